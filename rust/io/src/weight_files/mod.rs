//! Reads weights by name from one or several files. A quantized weight counts as one tensor: the tensors with its
//! scales and the values of its codes belong to it, and have no names here (`beside.rs` finds them when files are
//! opened).

mod beside;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainable_candle_core::quantized::{Format, Ggml, create_dynamic_map, nf4_values};
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor};

use crate::bitsandbytes::{self, State};
use crate::eight_bits;
use crate::gguf::GgufFile;
use crate::tensor_file::TensorFile;
use crate::tensor_writer::EightBits;
use crate::weight_file::WeightFile;

/// Open files whose tensors are read one at a time, as if they were one file.
pub struct WeightFiles {
    files: Vec<WeightFile>,
    /// A map from a tensor's name to the index in `files` of the file that has the tensor.
    index: BTreeMap<String, usize>,
    /// The types (fp8 or int8) of the codes of eight-bit weights by the weights' names.
    codes: BTreeMap<String, EightBits>,
    /// The scales (f32) of the eight-bit weights by the weights' names: one scale for a weight, or one for each of its
    /// rows.
    scales: BTreeMap<String, Tensor>,
    /// The four-bit weights of bitsandbytes by name.
    packed: BTreeMap<String, Packed>,
}

/// A four-bit weight of bitsandbytes. The tensor with the weight's name holds the codes. Other tensors hold the scales
/// and the values of the codes.
struct Packed {
    /// The weight's shape and original dtype, and the offset of quantized scales.
    state: State,
    /// The other tensors of the weight: a map from a tensor's name to the index of the file that has the tensor.
    tensors: BTreeMap<String, usize>,
}

impl WeightFiles {
    /// Open one file, or all files (shards) of a model.
    ///
    /// # Errors
    /// As [`WeightFile::open`]; [`Error::WeightsFormat`] if two shards have a tensor of the same name, or if weights
    /// are quantized in a format that is not supported.
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
        let (codes, scales, packed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut found = Self { files, index, codes, scales, packed };
        // Fills `codes`, `scales` and `packed`, and removes the tensors that belong to quantized weights from `index`.
        found.take_all_beside()?;
        Ok(found)
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

    /// The dtype in which [`read`](Self::read) returns the tensor `name` if no other dtype is requested. It is bf16 for
    /// eight-bit weights. `None` if the files have no tensor `name`, or if the tensor's dtype is not supported.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        if let Some(packed) = self.packed.get(name) {
            return Some(packed.state.dtype);
        }
        if self.eight_bits(name).is_some() {
            return Some(DType::BF16);
        }
        self.files[*self.index.get(name)?].dtype_of(name)
    }

    /// The floating-point dtype that the largest number of elements has, among the tensors whose names begin with
    /// `prefix`. `None` if no tensor with such a name has a floating-point dtype. Int8 weights do not count.
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

    /// The text entries of the headers of all files, without the entry that names the formats of quantized weights.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.files.iter().flat_map(WeightFile::metadata).filter(|(name, _)| name != eight_bits::HEADER).collect()
    }

    /// Read one tensor to `device`. Floating-point values are converted to `dtype`, if it is given. Quantized weights
    /// are dequantized.
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
        let Some((bits, codes, scales)) = self.read_eight_bits(name)? else {
            return self.files[file].read_as(name, dtype, device);
        };
        // The rows of a convolution's weight are the weights of the output channels.
        let rows = codes.dims().first().copied().unwrap_or(1);
        let code_matrix = codes.reshape((rows, codes.elem_count() / rows.max(1)))?;
        let weight =
            quantized(bits, &code_matrix, &scales, dtype.unwrap_or(DType::BF16)).map_err(|error| match error {
                Error::Argument { message, .. } => {
                    Error::weights(self.files[file].path(), format!("\"{name}\": {message}"))
                }
                other => other,
            })?;
        let weight = weight.to_device(device)?;
        weight.dequantize(weight.dtype())?.reshape(codes.dims())
    }

    /// Whether the tensor `name` is a four-bit weight of bitsandbytes.
    pub fn is_nf4(&self, name: &str) -> bool {
        self.packed.contains_key(name)
    }

    /// Whether the tensor `name` is a four-bit weight of bitsandbytes whose scales are not quantized.
    pub fn has_plain_scales(&self, name: &str) -> bool {
        self.packed.get(name).is_some_and(|packed| packed.state.offset.is_none())
    }

    /// The format of the codes of the quantized weight `name`. `None` for other weights, and for weights in GGUF files,
    /// which have a [`block_format`](Self::block_format) instead.
    pub fn format(&self, name: &str) -> Option<Format> {
        if self.is_nf4(name) {
            return Some(Format::Nf4);
        }
        Some(match self.eight_bits(name)?.0 {
            EightBits::Fp8 => Format::Fp8,
            EightBits::Int8 => Format::Int8,
        })
    }

    /// Read a four-bit weight to the CPU without dequantizing it.
    ///
    /// # Errors
    /// [`Error::WeightsFormat`] if the weight is not a four-bit weight, one of its tensors is missing or does not have
    /// the size or the dtype that the weight's shape requires, or the file's values of the codes are not those of NF4.
    pub fn read_nf4(&mut self, name: &str) -> Result<Quantized> {
        let error = |text: String| Error::weights(self.path(), format!("\"{name}\": {text}"));
        let (Some(packed), Some(&file)) = (self.packed.get(name), self.index.get(name)) else {
            return Err(error("this is not a four-bit weight".to_owned()));
        };
        let (state, tensors) = (packed.state.clone(), packed.tensors.clone());
        let missing = |end: &str| error(format!("{name}{end} is missing"));
        let file_of = |end: &str| tensors.get(&format!("{name}{end}")).copied().ok_or_else(|| missing(end));
        let (scales_file, code_values_file) = (file_of(bitsandbytes::SCALES)?, file_of(bitsandbytes::CODE_VALUES)?);
        // If the scales are quantized themselves (then the state has an offset): the files with the scales of the
        // blocks of scales, and with the values of the scales' codes.
        let nested_files = if state.offset.is_some() {
            Some([file_of(bitsandbytes::NESTED_SCALES)?, file_of(bitsandbytes::NESTED_CODE_VALUES)?])
        } else {
            None
        };
        // The bytes are the codes whatever the dtype of the tensor is: `bnb_4bit_quant_storage` may be bf16, for
        // example.
        let codes = self.files[file].read_bytes(name)?;
        let mut read = |file: usize, end: &str| self.files[file].read(&format!("{name}{end}"), &Device::Cpu);
        let scales = read(scales_file, bitsandbytes::SCALES)?;
        let code_values = read(code_values_file, bitsandbytes::CODE_VALUES)?.to_vec::<f32>()?;
        let nested = match nested_files {
            Some([nested_scales_file, nested_values_file]) => {
                let scales = read(nested_scales_file, bitsandbytes::NESTED_SCALES)?;
                Some((scales, read(nested_values_file, bitsandbytes::NESTED_CODE_VALUES)?.to_vec::<f32>()?))
            }
            None => None,
        };
        // The codes of quantized scales must represent the values of bitsandbytes' signed dynamic map.
        let are_known = code_values == nf4_values()
            && nested
                .as_ref()
                .is_none_or(|(_, code_values)| *code_values == create_dynamic_map(/* signed: */ true));
        if !are_known {
            return Err(Error::weights(
                self.path(),
                format!("\"{name}\": its codes do not represent the values of NF4"),
            ));
        }
        let nested = nested.as_ref().map(|(scales, _)| scales).zip(state.offset);
        Quantized::from_nf4(state.dims, &codes, &scales, nested, state.dtype).map_err(|found| match found {
            Error::Shape { message, .. } | Error::DType { message, .. } => {
                Error::weights(self.path(), format!("\"{name}\": {message}"))
            }
            other => other,
        })
    }

    /// Read an eight-bit weight: the type of its codes, the codes' bytes (u8) in the weight's shape, and its scales
    /// (f32), one for the weight or one for each row. An fp8 (e4m3) weight without scales gets the scale 1. `None` for
    /// other weights, and for int8 weights without scales.
    ///
    /// # Errors
    /// [`Error::Io`] if reading fails, [`Error::OutOfMemory`] if the codes do not fit in memory.
    pub fn read_eight_bits(&self, name: &str) -> Result<Option<(EightBits, Tensor, Tensor)>> {
        let Some((bits, file)) = self.eight_bits(name) else { return Ok(None) };
        let scales = match self.scales.get(name) {
            Some(scales) => scales.clone(),
            None => Tensor::new(&[1f32], &Device::Cpu)?,
        };
        let codes = file.read_bytes(name)?.reshape(file.shape(name).unwrap_or_default())?;
        Ok(Some((bits, codes, scales)))
    }

    /// The type of an eight-bit weight's codes, and the weight's file. `None` for other weights, and for int8 weights
    /// without scales.
    fn eight_bits(&self, name: &str) -> Option<(EightBits, &TensorFile)> {
        let (&bits, &file) = (self.codes.get(name)?, self.index.get(name)?);
        let file = self.files[file].safetensors()?;
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

/// Make a quantized matrix from `codes` (rows, columns) and `scales`: one scale for the matrix, or one for each row.
/// The dequantized values have the dtype `dtype`.
///
/// # Errors
/// As [`Quantized::from_eight_bits`].
pub fn quantized(bits: EightBits, codes: &Tensor, scales: &Tensor, dtype: DType) -> Result<Quantized> {
    match bits {
        EightBits::Fp8 => Quantized::from_eight_bits(Format::Fp8, codes, scales, dtype),
        EightBits::Int8 => {
            // This format needs a scale for each row.
            let (rows, mut row_scales) = (codes.dims().first().copied().unwrap_or(1), scales.to_vec::<f32>()?);
            if let &[scale] = row_scales.as_slice() {
                row_scales = vec![scale; rows];
            }
            let scales = Tensor::new(row_scales.as_slice(), &Device::Cpu)?;
            Quantized::from_eight_bits(Format::Int8, codes, &scales, dtype)
        }
    }
}
