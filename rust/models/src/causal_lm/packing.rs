//! Packs batches of padded texts into one row of tokens.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::OP;

/// The texts of a batch (B, S), concatenated without padding: N tokens in M segments.
pub struct PackedTexts {
    /// The ids, (N).
    pub input_ids: Tensor,
    /// The column of each token, (N).
    pub positions: Tensor,
    /// The starts of the segments and the end of the last one, (M + 1).
    pub cu_seqlens: Tensor,
    /// The index of each token in the batch, flattened row by row.
    places: Vec<usize>,
    batch: [usize; 2],
    device: Device,
}

impl PackedTexts {
    /// Packs the texts of `input_ids (B, S)`: all tokens, or those where `attention_mask (B, S)` is 1. The host reads
    /// the mask and therefore waits for a GPU.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input has another shape, [`Error::DType`] if it is not i64 or u32, [`Error::Index`] if the mask has
    /// other values than 0 and 1.
    pub fn new(input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Self> {
        let &[rows, columns] = input_ids.dims() else {
            return Err(Error::shape(OP, format!("input_ids has shape {:?}, expected (B, S)", input_ids.dims())));
        };
        let device = input_ids.device().clone();
        let is_text = match attention_mask {
            None => vec![true; rows * columns],
            Some(mask) => {
                if mask.dims() != input_ids.dims() {
                    let (found, expected) = (mask.dims(), input_ids.dims());
                    let text = format!("attention_mask has shape {found:?}, expected {expected:?}, as input_ids");
                    return Err(Error::shape(OP, text));
                }
                let flag = |value: i64| match value {
                    0 | 1 => Ok(value == 1),
                    other => Err(Error::index(OP, format!("attention_mask has the value {other}, expected 0 or 1"))),
                };
                host(mask, "attention_mask")?.into_iter().map(flag).collect::<Result<_>>()?
            }
        };
        let places: Vec<usize> = (0..rows * columns).filter(|&place| is_text[place]).collect();
        let ends = (0..=rows).map(|row| places.partition_point(|&place| place < row * columns) as i64);
        let bounds: Vec<i64> = ends.collect();
        let row = |values: Vec<i64>| {
            let count = values.len();
            Tensor::from_vec(values, count, &device)
        };
        let positions = row(places.iter().map(|place| (place % columns.max(1)) as i64).collect())?;
        let cu_seqlens = row(bounds)?;
        let flat = input_ids.reshape(rows * columns)?;
        let packed_ids = if places.len() == rows * columns {
            flat
        } else {
            let ids = host(&flat, "input_ids")?;
            row(places.iter().map(|&place| ids[place]).collect())?
        };
        Ok(Self { input_ids: packed_ids, positions, cu_seqlens, places, batch: [rows, columns], device })
    }

    /// The target of each token, (N), and the number of targets that are not ignored. The target is the label of the
    /// next column, or `ignored` at the end of a row. The host reads the labels and therefore waits for a GPU.
    ///
    /// # Errors
    /// [`Error::Shape`] if `labels` are not (B, S), [`Error::DType`] if they are not i64 or u32.
    pub fn targets(&self, labels: &Tensor, ignored: i64) -> Result<(Tensor, usize)> {
        let [rows, columns] = self.batch;
        if *labels.dims() != self.batch {
            let text = format!("labels have shape {:?}, expected {:?}, as input_ids", labels.dims(), [rows, columns]);
            return Err(Error::shape(OP, text));
        }
        let labels = host(labels, "labels")?;
        let target = |&place: &usize| if (place + 1) % columns == 0 { ignored } else { labels[place + 1] };
        let targets: Vec<i64> = self.places.iter().map(target).collect();
        let counted = targets.iter().filter(|&&target| target != ignored).count();
        let count = targets.len();
        Ok((Tensor::from_vec(targets, count, &self.device)?, counted))
    }

    /// `x (N, D)` in the layout of the batch, (B, S, D), with zeros for padding.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the result does not fit.
    pub fn unpack(&self, x: &Tensor) -> Result<Tensor> {
        let ([rows, columns], width) = (self.batch, x.dims()[1]);
        if self.places.len() == rows * columns {
            return x.reshape((rows, columns, width));
        }
        let padding = Tensor::zeros((1, width), x.dtype(), x.device())?;
        let mut sources = vec![self.places.len() as i64; rows * columns];
        for (source, &place) in self.places.iter().enumerate() {
            sources[place] = source as i64;
        }
        let sources = Tensor::from_vec(sources, rows * columns, x.device())?;
        Tensor::cat(&[x, &padding], 0)?.index_select(&sources, 0)?.reshape((rows, columns, width))
    }
}

/// The integers of a tensor.
fn host(tensor: &Tensor, name: &str) -> Result<Vec<i64>> {
    if !matches!(tensor.dtype(), DType::I64 | DType::U32) {
        let found = tensor.dtype().as_str();
        return Err(Error::dtype(OP, format!("{name} is {found}, expected i64 or u32; convert it with to()")));
    }
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.reshape(tensor.elem_count())?.to_vec()
}
