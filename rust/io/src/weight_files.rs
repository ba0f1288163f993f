//! Reads weights by name from one file or several.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use crate::fp8;
use crate::tensor_file::TensorFile;

/// Open safetensors files whose tensors are read one at a time, as if they were one file.
pub struct WeightFiles {
    files: Vec<TensorFile>,
    /// The index of the file of each name.
    index: BTreeMap<String, usize>,
    /// What the values of a weight of eight bits are multiplied by.
    scales: BTreeMap<String, f32>,
}

impl WeightFiles {
    /// Open a file, or the shards of one.
    ///
    /// # Errors
    /// As [`TensorFile::open`]; [`Error::WeightsFormat`] if two shards hold the same name.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let files = paths.iter().map(TensorFile::open).collect::<Result<Vec<_>>>()?;
        let mut index = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                if index.contains_key(&name) {
                    return Err(Error::weights(file.path(), format!("tensor \"{name}\" is in another shard too")));
                }
                index.insert(name, i);
            }
        }
        let mut found = Self { files, index, scales: BTreeMap::new() };
        found.take_scales()?;
        Ok(found)
    }

    /// Take what says how weights of eight bits were scaled out of the names: it is part of their values.
    fn take_scales(&mut self) -> Result<()> {
        let is_fp8 = |&(name, &file): &(&String, &usize)| self.files[file].is_fp8(name);
        let weights: Vec<String> = self.index.iter().filter(is_fp8).map(|(name, _)| name.clone()).collect();
        for weight in weights {
            for key in fp8::keys_beside(&weight) {
                let Some(file) = self.index.remove(&key) else { continue };
                let values = &mut self.files[file];
                if key.ends_with("comfy_quant") {
                    let json = values.read(&key, &Device::Cpu)?.to_vec::<u8>()?;
                    if let Some(format) = fp8::other_format(&json) {
                        let message = format!(
                            "\"{weight}\" is quantised as \"{format}\", which is not supported; use a file of bf16, f16 or \
                             fp8 (float8_e4m3fn)"
                        );
                        return Err(Error::weights(values.path(), message));
                    }
                } else if fp8::scales_of(&weight).is_some_and(|scales| scales.contains(&key)) {
                    let scale = values.read_as(&key, Some(DType::F32), &Device::Cpu)?;
                    let &[factor] = scale.reshape(scale.elem_count())?.to_vec::<f32>()?.as_slice() else {
                        let message =
                            format!("\"{key}\" has shape {:?}, expected one scale for the tensor", scale.dims());
                        return Err(Error::weights(values.path(), message));
                    };
                    self.scales.insert(weight.clone(), factor);
                }
            }
        }
        self.index.retain(|name, _| name.rsplit('.').next() != Some(fp8::MARK));
        Ok(())
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// The path of the first file.
    pub fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), TensorFile::path)
    }

    /// The shape of a tensor, if there is one of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.files[*self.index.get(name)?].shape(name)
    }

    /// The dtype of a tensor, if there is one of that name and its dtype is supported.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.files[*self.index.get(name)?].dtype_of(name)
    }

    /// The floating-point dtype of most elements of the tensors whose names begin with `prefix`.
    pub fn common_dtype(&self, prefix: &str) -> Option<DType> {
        let mut elements: Vec<(DType, usize)> = Vec::new();
        for name in self.names().filter(|name| name.starts_with(prefix)) {
            let Some(dtype) = self.dtype(name).filter(|&dtype| is_float(dtype)) else { continue };
            let count = self.shape(name).map_or(0, |dims| dims.iter().product());
            match elements.iter_mut().find(|(known, _)| *known == dtype) {
                Some((_, sum)) => *sum += count,
                None => elements.push((dtype, count)),
            }
        }
        elements.into_iter().max_by_key(|&(_, count)| count).map(|(dtype, _)| dtype)
    }

    /// The text entries of the headers.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.files.iter().flat_map(TensorFile::metadata).collect()
    }

    /// Read one tensor to `device`, floating-point values converted to `dtype` on the way if one is given.
    ///
    /// # Errors
    /// As [`TensorFile::read_as`].
    pub fn read(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let Some(&file) = self.index.get(name) else {
            return Err(Error::weights(self.path(), format!("there is no tensor \"{name}\"")));
        };
        let Some(&scale) = self.scales.get(name) else { return self.files[file].read_as(name, dtype, device) };
        let values = self.files[file].read_as(name, Some(DType::F32), device)?;
        values.mul_scalar(f64::from(scale))?.to_dtype(dtype.unwrap_or(DType::BF16))
    }
}
