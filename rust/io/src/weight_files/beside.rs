//! Reads, when files are opened, what headers and further tensors state about quantized weights. Such tensors are
//! stored beside a weight's codes: scales, states (bitsandbytes' JSON with a weight's shape and dtype), and names of
//! formats.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde_json::Value;
use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::{Packed, WeightFiles};
use crate::bitsandbytes::{self, State};
use crate::eight_bits::{self, Beside};
use crate::other_formats;
use crate::tensor_writer::EightBits;
use crate::weight_file::WeightFile;

impl WeightFiles {
    /// Read everything that headers and further tensors state about quantized weights. These tensors are removed from
    /// `index`, the map from the names of tensors to their files, because they are part of the weights' values.
    pub(super) fn take_all_beside(&mut self) -> Result<()> {
        self.take_codes()?;
        self.take_scales()?;
        self.take_packed()?;
        // Is there a tensor that only the files of an unsupported format have?
        let Some((key, format)) = other_formats::find(self.index.keys()) else { return Ok(()) };
        let text = format!(
            "\"{key}\": weights of {format} are not supported; load the unquantized weights, with quantize= \
             (--base-precision)"
        );
        Err(Error::weights(self.files[self.index[key]].path(), text))
    }

    /// Fill `codes` with the eight-bit weights, found by the dtypes of the tensors and by the formats that `ComfyUI`
    /// states. (Files of `ComfyUI` may store e4m3 codes as u8, so their dtype is not enough.)
    fn take_codes(&mut self) -> Result<()> {
        let bits_of = |(name, &file): (&String, &usize)| match self.files[file].safetensors()?.stored_dtype(name)? {
            Dtype::F8_E4M3 => Some((name.clone(), EightBits::Fp8)),
            Dtype::I8 => Some((name.clone(), EightBits::Int8)),
            _ => None,
        };
        self.codes = self.index.iter().filter_map(bits_of).collect();
        for (weight, stated) in self.take_stated_formats()? {
            let file = &self.files[self.index[&weight]];
            let stored = file.safetensors().and_then(|file| file.stored_dtype(&weight));
            let bits = eight_bits::bits_of(&stated, stored).map_err(|format| {
                let text = format!(
                    "\"{weight}\" is quantized as \"{format}\", which is not supported; use a file of bf16, f16, fp8 \
                     (float8_e4m3fn) or int8 (int8_tensorwise)"
                );
                Error::weights(file.path(), text)
            })?;
            self.codes.insert(weight, bits);
        }
        Ok(())
    }

    /// `ComfyUI`'s JSON about weights by the weights' names, from tensors and from the headers.
    fn take_stated_formats(&mut self) -> Result<BTreeMap<String, Value>> {
        let mut found = BTreeMap::new();
        for file in &self.files {
            let Some(text) = file.metadata().remove(eight_bits::HEADER) else { continue };
            for (layer, stated) in eight_bits::layers_of(&text) {
                let names = eight_bits::PREFIXES.map(|prefix| format!("{prefix}{layer}.weight"));
                found.extend(
                    names.into_iter().filter(|name| self.index.contains_key(name)).map(|name| (name, stated.clone())),
                );
            }
        }
        let keys: Vec<String> = self.index.keys().filter(|key| key.ends_with(eight_bits::COMFY)).cloned().collect();
        for key in keys {
            let weight = format!("{}weight", key.strip_suffix(eight_bits::COMFY).unwrap_or(&key));
            if self.index.contains_key(&weight)
                && let Some(file) = self.index.remove(&key)
            {
                let json = bytes(&mut self.files[file], &key)?;
                // JSON that does not parse becomes null, which `eight_bits::bits_of` rejects as an unsupported format.
                found.insert(weight, serde_json::from_slice(&json).unwrap_or_default());
            }
        }
        Ok(found)
    }

    /// Read the scales (into `scales`) and the other tensors that belong to eight-bit weights.
    fn take_scales(&mut self) -> Result<()> {
        for weight in self.codes.keys().cloned().collect::<Vec<_>>() {
            for (key, beside) in eight_bits::keys_beside(&weight) {
                let Some(file) = self.index.remove(&key) else { continue };
                self.take_beside(&weight, &key, beside, file)?;
            }
            let is_u8 = self.files[self.index[&weight]].dtype_of(&weight) == Some(DType::U8);
            if is_u8 && !self.scales.contains_key(&weight) {
                // An e4m3 weight that is stored as u8. Without scales it has the scale 1, which
                // `read_eight_bits` gives to the e4m3 weights that are stored in their own dtype.
                self.scales.insert(weight, Tensor::new(&[1f32], &Device::Cpu)?);
            }
        }
        // The empty tensor `scaled_fp8`, which marks older files of `ComfyUI`.
        self.index.retain(|name, _| name.rsplit('.').next() != Some(eight_bits::MARK));
        Ok(())
    }

    /// Read the tensor `key`, which belongs to the eight-bit weight `weight`, from the file with the index `file`.
    /// `beside` is what the tensor contains.
    fn take_beside(&mut self, weight: &str, key: &str, beside: Beside, file: usize) -> Result<()> {
        match beside {
            Beside::Scales | Beside::Largest => {
                let found = flat(&self.files[file].read_as(key, Some(DType::F32), &Device::Cpu)?)?.to_vec::<f32>()?;
                let path = self.files[file].path();
                let rows = self.shape(weight).and_then(|dims| dims.first().copied()).unwrap_or(1);
                if ![1, rows].contains(&found.len()) {
                    let shape = self.files[file].shape(key).unwrap_or_default();
                    let text = format!(
                        "\"{key}\" has shape {shape:?}, expected one scale for \"{weight}\" or one for each of its \
                         {rows} rows"
                    );
                    return Err(Error::weights(path, text));
                }
                // Rows of zeros may have the scale 0.
                if let Some(wrong) = found.iter().find(|scale| !scale.is_finite() || **scale < 0.0) {
                    let text = format!(
                        "\"{key}\" has the scale {wrong}, expected a positive number or 0; is the file damaged?"
                    );
                    return Err(Error::weights(path, text));
                }
                // bitsandbytes stores each row's largest magnitude, which has the code 127, instead of the scale.
                let divisor = if beside == Beside::Largest { eight_bits::LARGEST_INT8 } else { 1.0 };
                let scales: Vec<f32> = found.into_iter().map(|scale| scale / divisor).collect();
                let scales = Tensor::new(scales.as_slice(), &Device::Cpu)?;
                if self.scales.insert(weight.to_owned(), scales).is_some() {
                    let text = format!(
                        "\"{weight}\" has several tensors of scales, and \"{key}\" is one of them; expected one"
                    );
                    return Err(Error::weights(self.files[file].path(), text));
                }
            }
            Beside::Order => {
                // 0 stands for row-major order.
                if bytes(&mut self.files[file], key)? != [0] {
                    let text = format!(
                        "\"{weight}\" is not in row-major order, which is not supported; save it again in \
                         row-major order"
                    );
                    return Err(Error::weights(self.files[file].path(), text));
                }
            }
            // The tensor does not affect the weight's values.
            Beside::Nothing => {}
        }
        Ok(())
    }

    /// Read the states of bitsandbytes' four-bit weights into `packed`. All tensors of these weights except the codes
    /// are removed from `index`, because they are part of the weights' values.
    fn take_packed(&mut self) -> Result<()> {
        let states: Vec<(String, usize)> = self
            .index
            .iter()
            .filter(|(key, _)| key.ends_with(bitsandbytes::STATE) || key.ends_with(bitsandbytes::FP4_STATE))
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
            let ends = [
                bitsandbytes::SCALES,
                bitsandbytes::CODE_VALUES,
                bitsandbytes::NESTED_SCALES,
                bitsandbytes::NESTED_CODE_VALUES,
            ];
            let names = ends.map(|end| format!("{weight}{end}"));
            let tensors =
                names.into_iter().filter_map(|name| Some((name.clone(), self.index.remove(&name)?))).collect();
            self.packed.insert(weight, Packed { state, tensors });
        }
        Ok(())
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
