//! Reads weights by name from one or several files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::quantized::{Format, Ggml, create_dynamic_map, nf4_values};
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor};

use crate::bitsandbytes::{self, State};
use crate::eight_bits::{self, Beside};
use crate::gguf::GgufFile;
use crate::tensor_file::TensorFile;
use crate::tensor_writer::EightBits;
use crate::weight_file::WeightFile;

/// Open files whose tensors are read one at a time, as if they were one file.
pub struct WeightFiles {
    files: Vec<WeightFile>,
    /// A map from a tensor's name to the index in `files` of the file that has the tensor.
    index: BTreeMap<String, usize>,
    /// The scales (f32) of the eight-bit weights by the weights' names: one scale for a weight, or one for each of its rows.
    scales: BTreeMap<String, Tensor>,
    /// The four-bit weights of bitsandbytes by name.
    packed: BTreeMap<String, Packed>,
}

/// A four-bit weight of bitsandbytes. The tensor with the weight's name holds the codes. Other tensors hold the scales and the
/// values of the codes.
struct Packed {
    state: State,
    /// The other tensors of the weight: a map from a tensor's name to the index of the file that has the tensor.
    parts: BTreeMap<String, usize>,
}

impl WeightFiles {
    /// Open one file, or all files (shards) of a model.
    ///
    /// # Errors
    /// As [`WeightFile::open`]; [`Error::WeightsFormat`] if two shards have a tensor of the same name.
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

    /// Read the scales and the other tensors that belong to eight-bit weights. These tensors are removed from the names,
    /// because they are part of the weights' values.
    fn take_scales(&mut self) -> Result<()> {
        let kind = |(name, &file): (&String, &usize)| Some((name.clone(), self.files[file].eight_bits(name)?));
        let weights: Vec<(String, EightBits)> = self.index.iter().filter_map(kind).collect();
        for (weight, bits) in weights {
            for (key, beside) in eight_bits::keys_beside(&weight) {
                let Some(file) = self.index.remove(&key) else { continue };
                self.take_beside((&weight, bits), &key, beside, file)?;
            }
        }
        self.index.retain(|name, _| name.rsplit('.').next() != Some(eight_bits::MARK));
        Ok(())
    }

    /// Read the tensor `key`, which belongs to an eight-bit weight, from the file with the index `file`. `beside` is what the
    /// tensor contains.
    fn take_beside(&mut self, (weight, bits): (&str, EightBits), key: &str, beside: Beside, file: usize) -> Result<()> {
        let rows = self.shape(weight).and_then(|dims| dims.first().copied()).unwrap_or(1);
        let file = &mut self.files[file];
        match beside {
            Beside::Scales | Beside::Largest => {
                let scales = flat(&file.read_as(key, Some(DType::F32), &Device::Cpu)?)?;
                if ![1, rows].contains(&scales.elem_count()) {
                    let found = file.shape(key).unwrap_or_default();
                    let text = format!(
                        "\"{key}\" has shape {found:?}, expected one scale for \"{weight}\" or one for each of its {rows} rows"
                    );
                    return Err(Error::weights(file.path(), text));
                }
                let scales = if beside == Beside::Largest {
                    let factors = scales.to_vec::<f32>()?.into_iter().map(|largest| largest / eight_bits::LARGEST_INT8);
                    Tensor::new(factors.collect::<Vec<f32>>().as_slice(), &Device::Cpu)?
                } else {
                    scales
                };
                self.scales.insert(weight.to_owned(), scales);
            }
            Beside::Comfy => {
                if let Some(format) = eight_bits::other_format(&bytes(file, key)?, bits) {
                    let text = format!(
                        "\"{weight}\" is quantized as \"{format}\", which is not supported; use a file of bf16, f16 or fp8 \
                         (float8_e4m3fn)"
                    );
                    return Err(Error::weights(file.path(), text));
                }
            }
            Beside::Order => {
                if bytes(file, key)? != [0] {
                    let text = format!(
                        "\"{weight}\" is not in row-major order, which is not supported; save it again \
                         in row-major order"
                    );
                    return Err(Error::weights(file.path(), text));
                }
            }
            Beside::Nothing => {}
        }
        Ok(())
    }

    /// Read the states of four-bit weights. All tensors of these weights except the codes are removed from the names, because
    /// they are part of the weights' values.
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

    /// The shape of the tensor or four-bit weight `name`. `None` if the files have no tensor `name`.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        if let Some(packed) = self.packed.get(name) {
            return Some(&packed.state.dims);
        }
        self.files[*self.index.get(name)?].shape(name)
    }

    /// The dtype in which [`read`](Self::read) returns the tensor `name` if no other dtype is requested. It is bf16 for int8
    /// weights with scales. `None` if the files have no tensor `name`, or if the tensor's dtype is not supported.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        if let Some(packed) = self.packed.get(name) {
            return Some(packed.state.dtype);
        }
        if let Some((EightBits::Int8, _)) = self.eight_bits(name) {
            return Some(DType::BF16);
        }
        self.files[*self.index.get(name)?].dtype_of(name)
    }

    /// The floating-point dtype that the largest number of elements has, among the tensors whose names begin with `prefix`.
    /// `None` if no tensor with such a name has a floating-point dtype. Int8 weights do not count.
    pub fn common_dtype(&self, prefix: &str) -> Option<DType> {
        let mut elements: Vec<(DType, usize)> = Vec::new();
        for name in self.names().filter(|name| name.starts_with(prefix)) {
            // An int8 weight does not record the dtype that it was quantized from.
            if self.eight_bits(name).is_some_and(|(bits, _)| bits == EightBits::Int8) {
                continue;
            }
            let Some(dtype) = self.dtype(name).filter(|&dtype| is_float(dtype)) else { continue };
            let count = self.shape(name).map_or(0, |dims| dims.iter().product());
            match elements.iter_mut().find(|(known, _)| *known == dtype) {
                Some((_, sum)) => *sum += count,
                None => elements.push((dtype, count)),
            }
        }
        elements.into_iter().max_by_key(|&(_, count)| count).map(|(dtype, _)| dtype)
    }

    /// The text entries of the headers of all files.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.files.iter().flat_map(WeightFile::metadata).collect()
    }

    /// Read one tensor to `device`. Floating-point values are converted to `dtype`, if it is given. Quantized weights are
    /// dequantized.
    ///
    /// # Errors
    /// As [`WeightFile::read_as`], [`read_nf4`](Self::read_nf4) and [`read_eight_bits`](Self::read_eight_bits).
    pub fn read(&mut self, name: &str, dtype: Option<DType>, device: &Device) -> Result<Tensor> {
        let Some(&file) = self.index.get(name) else {
            return Err(Error::weights(self.path(), format!("there is no tensor \"{name}\"")));
        };
        if self.packed.contains_key(name) {
            let matrix = self.read_nf4(name)?.to_device(device)?;
            return matrix.dequantize(dtype.unwrap_or_else(|| matrix.dtype()));
        }
        if !self.scales.contains_key(name) {
            return self.files[file].read_as(name, dtype, device);
        }
        let Some((bits, codes, scales)) = self.read_eight_bits(name)? else {
            return Err(Error::weights(self.path(), format!("\"{name}\" has scales but is not an eight-bit weight")));
        };
        // The rows of a convolution's weight are the weights of the output channels.
        let rows = codes.dims().first().copied().unwrap_or(1);
        let matrix = codes.reshape((rows, codes.elem_count() / rows.max(1)))?;
        let values = quantized(bits, &matrix, &scales, dtype.unwrap_or(DType::BF16))?.to_device(device)?;
        values.dequantize(values.dtype())?.reshape(codes.dims())
    }

    /// Whether the tensor `name` is a four-bit weight of bitsandbytes.
    pub fn is_nf4(&self, name: &str) -> bool {
        self.packed.contains_key(name)
    }

    /// Read a four-bit weight to the CPU without dequantizing it.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if the weight is not a four-bit weight, one of its tensors is missing, or the file's values of
    /// the codes are not those of NF4; the errors of [`Quantized::from_nf4`].
    pub fn read_nf4(&mut self, name: &str) -> Result<Quantized> {
        let error = |text: String| Error::weights(self.path(), format!("\"{name}\": {text}"));
        let (Some(packed), Some(&file)) = (self.packed.get(name), self.index.get(name)) else {
            return Err(error("this is not a four-bit weight".to_owned()));
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
                format!("\"{name}\": its codes do not represent the values of NF4"),
            ));
        }
        let nested = outer.as_ref().map(|(scales, _)| scales).zip(state.offset);
        Quantized::from_nf4(state.dims, &codes, &scales, nested, state.dtype)
    }

    /// Read an eight-bit weight: the type of its codes, the codes' bytes (u8) in the weight's shape, and its scales (f32),
    /// one for the weight or one for each row. An e4m3 weight without scales gets the scale 1. `None` for other weights, and
    /// for int8 weights without scales.
    ///
    /// # Errors
    /// [`Error::Io`] if reading fails.
    pub fn read_eight_bits(&self, name: &str) -> Result<Option<(EightBits, Tensor, Tensor)>> {
        let Some((bits, file)) = self.eight_bits(name) else { return Ok(None) };
        let scales = match self.scales.get(name) {
            Some(scales) => scales.clone(),
            None => Tensor::new(&[1f32], &Device::Cpu)?,
        };
        Ok(Some((bits, file.read_codes(name)?, scales)))
    }

    /// The type of an eight-bit weight's codes, and the weight's file. `None` for other weights, and for int8 weights without
    /// scales.
    fn eight_bits(&self, name: &str) -> Option<(EightBits, &TensorFile)> {
        let file = self.files[*self.index.get(name)?].safetensors()?;
        let bits = file.eight_bits(name)?;
        (bits == EightBits::Fp8 || self.scales.contains_key(name)).then_some((bits, file))
    }

    /// The first file if it is a GGUF file, otherwise `None`.
    pub fn gguf(&self) -> Option<&GgufFile> {
        self.files.first().and_then(WeightFile::gguf)
    }

    /// The block format of a matrix in a GGUF file, as [`GgufFile::format_of`]. `None` for tensors in other files.
    pub fn block_format(&self, name: &str) -> Option<Ggml> {
        self.files[*self.index.get(name)?].gguf()?.format_of(name)
    }

    /// The stored blocks of a matrix in a GGUF file, as [`GgufFile::read_blocks`]. `None` for tensors in other files.
    ///
    /// # Errors
    /// As [`GgufFile::read_blocks`].
    pub fn read_blocks(&self, name: &str) -> Result<Option<(Ggml, Tensor)>> {
        let file = self.index.get(name).and_then(|&file| self.files[file].gguf());
        file.map_or(Ok(None), |file| file.read_blocks(name))
    }
}

/// Make a quantized matrix from `codes` (rows, columns) and `scales`: one scale for the matrix, or one for each row. The
/// dequantized values have the dtype `dtype`.
///
/// # Errors
/// As [`Quantized::from_eight_bits`].
pub fn quantized(bits: EightBits, codes: &Tensor, scales: &Tensor, dtype: DType) -> Result<Quantized> {
    match bits {
        EightBits::Fp8 => Quantized::from_eight_bits(Format::Fp8, codes, scales, dtype),
        EightBits::Int8 => {
            let (rows, mut each) = (codes.dims().first().copied().unwrap_or(1), scales.to_vec::<f32>()?);
            if let &[one] = each.as_slice() {
                each = vec![one; rows];
            }
            let scales = Tensor::new(each.as_slice(), &Device::Cpu)?;
            Quantized::from_eight_bits(Format::Int8, codes, &scales, dtype)
        }
    }
}

/// `tensor` with one dimension.
fn flat(tensor: &Tensor) -> Result<Tensor> {
    tensor.reshape(tensor.elem_count())
}

/// The elements of the u8 tensor `key`.
fn bytes(file: &mut WeightFile, key: &str) -> Result<Vec<u8>> {
    flat(&file.read(key, &Device::Cpu)?)?.to_vec::<u8>()
}
