//! Reads weights by name from one file or several.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::quantized::{Ggml, create_dynamic_map, nf4_values};
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor};

use crate::bitsandbytes::{self, State};
use crate::fp8;
use crate::gguf::GgufFile;
use crate::weight_file::WeightFile;

/// Open files whose tensors are read one at a time, as if they were one file.
pub struct WeightFiles {
    files: Vec<WeightFile>,
    /// The index of the file of each name.
    index: BTreeMap<String, usize>,
    /// What the values of a weight of eight bits are multiplied by.
    scales: BTreeMap<String, f32>,
    /// The weights of four bits, and the files of what is beside them.
    packed: BTreeMap<String, Packed>,
}

/// A weight of four bits.
struct Packed {
    state: State,
    /// The files of its parts, by their names.
    parts: BTreeMap<String, usize>,
}

impl WeightFiles {
    /// Open a file, or the shards of one.
    ///
    /// # Errors
    /// As [`WeightFile::open`]; [`Error::WeightsFormat`] if two shards hold the same name.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let files = paths.iter().map(|path| WeightFile::open(path)).collect::<Result<Vec<_>>>()?;
        let mut index = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                if index.contains_key(&name) {
                    return Err(Error::weights(file.path(), format!("tensor \"{name}\" is in another shard too")));
                }
                index.insert(name, i);
            }
        }
        let mut found = Self { files, index, scales: BTreeMap::new(), packed: BTreeMap::new() };
        found.take_scales()?;
        found.take_packed()?;
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

    /// Take what is beside weights of four bits out of the names, likewise.
    fn take_packed(&mut self) -> Result<()> {
        let states: Vec<(String, usize)> = self
            .index
            .iter()
            .filter(|(key, _)| key.ends_with(bitsandbytes::STATE) || key.ends_with(bitsandbytes::OTHER_STATE))
            .map(|(key, &file)| (key.clone(), file))
            .collect();
        for (key, file) in states {
            let error = |text: String| Error::weights(self.files[file].path(), text);
            let Some(weight) = key.strip_suffix(bitsandbytes::STATE).map(str::to_owned) else {
                let text = format!("\"{key}\": weights of the type fp4 are not supported; use nf4, or bf16 weights");
                return Err(error(text));
            };
            let path = self.files[file].path().to_path_buf();
            let json = self.files[file].read(&key, &Device::Cpu)?.to_vec::<u8>()?;
            let state = State::parse(&json).map_err(|text| Error::weights(&path, format!("\"{weight}\": {text}")))?;
            self.index.remove(&key);
            let ends = [bitsandbytes::SCALES, bitsandbytes::CODE, bitsandbytes::OUTER, bitsandbytes::OUTER_CODE];
            let names = ends.map(|end| format!("{weight}{end}"));
            let parts = names.into_iter().filter_map(|name| Some((name.clone(), self.index.remove(&name)?))).collect();
            self.packed.insert(weight, Packed { state, parts });
        }
        Ok(())
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// The path of the first file.
    pub fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), WeightFile::path)
    }

    /// The shape of a tensor, if there is one of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        if let Some(packed) = self.packed.get(name) {
            return Some(&packed.state.dims);
        }
        self.files[*self.index.get(name)?].shape(name)
    }

    /// The dtype of a tensor, if there is one of that name and its dtype is supported.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        if let Some(packed) = self.packed.get(name) {
            return Some(packed.state.dtype);
        }
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
        self.files.iter().flat_map(WeightFile::metadata).collect()
    }

    /// Read one tensor to `device`, floating-point values converted to `dtype` on the way if one is given.
    ///
    /// # Errors
    /// As [`WeightFile::read_as`].
    pub fn read(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let Some(&file) = self.index.get(name) else {
            return Err(Error::weights(self.path(), format!("there is no tensor \"{name}\"")));
        };
        if self.packed.contains_key(name) {
            let matrix = self.read_nf4(name)?.to_device(device)?;
            return matrix.dequantize(dtype.unwrap_or_else(|| matrix.dtype()));
        }
        let Some(&scale) = self.scales.get(name) else { return self.files[file].read_as(name, dtype, device) };
        let values = self.files[file].read_as(name, Some(DType::F32), device)?;
        values.mul_scalar(f64::from(scale))?.to_dtype(dtype.unwrap_or(DType::BF16))
    }

    /// Whether a weight is of four bits, as bitsandbytes stores it.
    pub fn is_nf4(&self, name: &str) -> bool {
        self.packed.contains_key(name)
    }

    /// A weight of four bits as it is stored, on the CPU.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if a part is missing or has other values than the format's; as [`Quantized::from_nf4`].
    pub fn read_nf4(&mut self, name: &str) -> Result<Quantized> {
        let error = |text: String| Error::weights(self.path(), format!("\"{name}\": {text}"));
        let (Some(packed), Some(&file)) = (self.packed.get(name), self.index.get(name)) else {
            return Err(error("there is no weight of four bits".to_owned()));
        };
        let (state, parts) = (packed.state.clone(), packed.parts.clone());
        let missing = |end: &str| error(format!("{name}{end} is missing"));
        let file_of = |end: &str| parts.get(&format!("{name}{end}")).copied().ok_or_else(|| missing(end));
        let nested = state.offset.is_some();
        let [scales, code] = [file_of(bitsandbytes::SCALES)?, file_of(bitsandbytes::CODE)?];
        let outer =
            if nested { Some([file_of(bitsandbytes::OUTER)?, file_of(bitsandbytes::OUTER_CODE)?]) } else { None };
        let mut read = |file: usize, end: &str| self.files[file].read(&format!("{name}{end}"), &Device::Cpu);
        let (codes, scales) = (read(file, "")?, read(scales, bitsandbytes::SCALES)?);
        let map = read(code, bitsandbytes::CODE)?.to_vec::<f32>()?;
        let outer = match outer {
            Some([of_scales, of_code]) => {
                Some((read(of_scales, bitsandbytes::OUTER)?, read(of_code, bitsandbytes::OUTER_CODE)?.to_vec::<f32>()?))
            }
            None => None,
        };
        let is_known = map == nf4_values() && outer.as_ref().is_none_or(|(_, map)| *map == create_dynamic_map(true));
        if !is_known {
            return Err(Error::weights(
                self.path(),
                format!("\"{name}\": its codes represent other values than NF4's"),
            ));
        }
        let nested = outer.as_ref().map(|(scales, _)| scales).zip(state.offset);
        Quantized::from_nf4(state.dims, &codes, &scales, nested, state.dtype)
    }

    /// The codes of a weight of e4m3 numbers in its shape, and what they are multiplied by; none for other weights.
    ///
    /// # Errors
    /// [`Error::Io`] if reading fails.
    pub fn read_fp8(&mut self, name: &str) -> Result<Option<(Tensor, f32)>> {
        let Some(&file) = self.index.get(name).filter(|&&file| self.files[file].is_fp8(name)) else { return Ok(None) };
        let scale = self.scales.get(name).copied().unwrap_or(1.0);
        let Some(file) = self.files[file].safetensors() else { return Ok(None) };
        Ok(Some((file.read_codes(name)?, scale)))
    }

    /// The first file, if it is a GGUF file.
    pub fn gguf(&self) -> Option<&GgufFile> {
        self.files.first().and_then(WeightFile::gguf)
    }

    /// The format of a matrix in a GGUF file; as [`GgufFile::format_of`].
    pub fn block_format(&self, name: &str) -> Option<Ggml> {
        self.files[*self.index.get(name)?].gguf()?.format_of(name)
    }

    /// The blocks of a matrix in a GGUF file as they are stored; as [`GgufFile::read_blocks`].
    ///
    /// # Errors
    /// As [`GgufFile::read_blocks`].
    pub fn read_blocks(&self, name: &str) -> Result<Option<(Ggml, Tensor)>> {
        let file = self.index.get(name).and_then(|&file| self.files[file].gguf());
        file.map_or(Ok(None), |file| file.read_blocks(name))
    }
}
