//! Reads parameters from weight files by the model's own names.

use std::collections::BTreeSet;

use trainable_candle_core::quantized::Format;
use trainable_candle_core::{DType, Device, Error, Quantized, Result, Tensor, Weight};
use trainable_candle_io::{EightBits, WeightFiles, quantized};
use trainable_candle_nn::Stored;

use super::layout::{Form, Layout};

/// Reads parameters one at a time from open files through a layout.
pub(super) struct StoredWeights {
    pub files: WeightFiles,
    pub layout: Box<dyn Layout>,
    /// The dtype of the parameters, or of the values of their codes. None keeps the stored dtype.
    pub dtype: Option<DType>,
    pub device: Device,
}

impl StoredWeights {
    /// The key of the tensor that holds the parameter `name`, and the form in which the tensor holds it, for example as
    /// some of its rows. None if there is no such tensor.
    fn find(&self, name: &str) -> Option<(String, Form)> {
        self.layout.keys(name).into_iter().find_map(|candidate| {
            let key = format!("{}{}", self.layout.prefix(), candidate.key);
            self.files.shape(&key).is_some().then_some((key, candidate.form))
        })
    }
}

impl Stored for StoredWeights {
    fn shape(&self, name: &str) -> Result<Option<Vec<usize>>> {
        let Some((key, form)) = self.find(name) else { return Ok(None) };
        let stored = self.files.shape(&key).unwrap_or_default();
        let misfit =
            || Error::weights(self.files.path(), format!("\"{key}\" has shape {stored:?}, which does not fit {name}"));
        form.shape(stored).map(Some).ok_or_else(misfit)
    }

    fn read(&mut self, name: &str) -> Result<Tensor> {
        self.read_to(name, &self.device.clone())
    }

    fn read_weight(&mut self, name: &str, format: Option<Format>) -> Result<Weight> {
        self.read_weight_to(name, format, &self.device.clone())
    }

    fn read_weight_to_cpu(&mut self, name: &str, format: Option<Format>) -> Result<Weight> {
        self.read_weight_to(name, format, &Device::Cpu)
    }

    fn unexpected(&self, taken: &BTreeSet<String>) -> Vec<String> {
        // `taken` has the names of the parameters that the model has read.
        let known: BTreeSet<String> = taken.iter().filter_map(|name| Some(self.find(name)?.0)).collect();
        let prefix = self.layout.prefix();
        self.files
            .names()
            .filter(|key| key.strip_prefix(prefix).is_some_and(|rest| !self.layout.ignores(rest)))
            .filter(|key| !known.contains(*key))
            .map(str::to_owned)
            .collect()
    }
}

impl StoredWeights {
    /// The codes of the parameter `name`, if the file stores them in `format` and they can be separated from those of
    /// other parameters. If `format` is None, every block format of ggml counts, but no other format. None in all other
    /// cases.
    fn codes(&mut self, name: &str, format: Option<Format>) -> Result<Option<Quantized>> {
        let Some((key, form)) = self.find(name) else { return Ok(None) };
        if let Some((stored_format, blocks)) = self.files.read_blocks(&key)? {
            // A block of ggml lies within one row, so only whole rows can be separated from the others.
            if !form.keeps_rows() || format.is_some_and(|format| format != Format::Ggml(stored_format)) {
                return Ok(None);
            }
            let blocks = form.read(&blocks)?;
            return Quantized::from_ggml(stored_format, &blocks, self.dtype.unwrap_or(DType::BF16)).map(Some);
        }
        if format == Some(Format::Nf4) && self.files.is_nf4(&key) {
            let stored = self.files.read_nf4(&key)?;
            let matrix = match form {
                Form::Plain => Some(stored),
                // The tensor has `of` equal shares of rows, the parameter has `count` of them from `first` on.
                Form::Rows { first, count, of } => {
                    let rows_of_share = stored.dims()[0] / of;
                    stored.rows_of_nf4(first * rows_of_share, count * rows_of_share)?
                }
                _ => None,
            };
            return Ok(matrix.map(|matrix| matrix.with_dtype(self.dtype.unwrap_or_else(|| matrix.dtype()))));
        }
        let bits = match format {
            Some(Format::Int8) => EightBits::Int8,
            Some(Format::Fp8) => EightBits::Fp8,
            _ => return Ok(None),
        };
        let Some((_, codes, scales)) = self.files.read_eight_bits(&key)?.filter(|(stored, ..)| *stored == bits) else {
            return Ok(None);
        };
        // A scale of the whole tensor is also the scale of any part of it. Otherwise each row has a scale.
        let scales = match scales.elem_count() {
            1 => scales,
            _ if !form.keeps_rows() => return Ok(None),
            rows => form.read(&scales.reshape((rows, 1))?)?,
        };
        quantized(bits, &form.read(&codes)?, &scales, self.dtype.unwrap_or(DType::BF16)).map(Some)
    }

    /// As [`Stored::read_weight`], with the weight on `device`.
    fn read_weight_to(&mut self, name: &str, format: Option<Format>, device: &Device) -> Result<Weight> {
        if let Some(codes) = self.codes(name, format)? {
            return Ok(codes.to_device(device)?.into());
        }
        let Some(format) = format else { return Ok(self.read_to(name, device)?.into()) };
        // Values are quantized on the CPU, so that only codes and scales are copied to the device.
        let values = self.read_to(name, &Device::Cpu)?;
        Ok(Quantized::new(&values, format)?.to_device(device)?.into())
    }

    /// As [`Stored::read`], with the values on `device`.
    fn read_to(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        let Some((key, form)) = self.find(name) else {
            return Err(Error::weights(self.files.path(), format!("there is no parameter \"{name}\"")));
        };
        if form == Form::Plain {
            return self.files.read(&key, self.dtype, device);
        }
        // If the parameter is a part of the tensor, only that part is copied to the device.
        form.read(&self.files.read(&key, self.dtype, &Device::Cpu)?)?.to_device(device)
    }
}
