//! Packs batches of padded texts: concatenates the texts' tokens to one sequence without padding.

use trainable_candle_core::{DType, Device, Error, Result, Tensor};

use super::OP;

/// The texts of a batch (B, S), concatenated without padding to one sequence of N tokens. The sequence has a segment
/// for each of the B texts.
pub struct PackedTexts {
    /// The tokens' ids, (N).
    pub input_ids: Tensor,
    /// The column of each token in the batch, (N).
    pub positions: Tensor,
    /// The bounds of the segments, (B + 1): the index in the sequence at which each segment starts, and N.
    pub cu_seqlens: Tensor,
    /// For each token of the sequence, its index among the B · S tokens of the batch: row · S + column.
    places: Vec<usize>,
    /// B and S.
    batch: [usize; 2],
    /// The device of `input_ids`.
    device: Device,
}

impl PackedTexts {
    /// Packs the tokens of `input_ids (B, S)` where `attention_mask (B, S)` is 1; without a mask, packs all tokens. The
    /// mask is copied to the CPU, and so are the ids of a batch with padding. The call waits for the GPU that computes
    /// them.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input has another shape, [`Error::DType`] if the mask, or the ids of a batch with
    /// padding, are neither i64 nor u32, [`Error::Index`] if the mask has a value other than 0 and 1.
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
                    let text =
                        format!("attention_mask has shape {found:?}, expected {expected:?}, the shape of input_ids");
                    return Err(Error::shape(OP, text));
                }
                let as_bool = |value: i64| match value {
                    0 | 1 => Ok(value == 1),
                    other => Err(Error::index(OP, format!("attention_mask has the value {other}, expected 0 or 1"))),
                };
                host(mask, "attention_mask")?.into_iter().map(as_bool).collect::<Result<_>>()?
            }
        };
        let places: Vec<usize> = (0..rows * columns).filter(|&place| is_text[place]).collect();
        // For each row, the number of tokens in earlier rows; then the number of all tokens.
        let bounds = (0..=rows).map(|row| places.partition_point(|&place| place < row * columns) as i64);
        let vector = |values: Vec<i64>| {
            let count = values.len();
            Tensor::from_vec(values, count, &device)
        };
        let positions = vector(places.iter().map(|place| (place % columns) as i64).collect())?;
        let cu_seqlens = vector(bounds.collect())?;
        let flat = input_ids.reshape(rows * columns)?;
        let packed_ids = if places.len() == rows * columns {
            flat
        } else {
            let ids = host(&flat, "input_ids")?;
            vector(places.iter().map(|&place| ids[place]).collect())?
        };
        Ok(Self { input_ids: packed_ids, positions, cu_seqlens, places, batch: [rows, columns], device })
    }

    /// The target of each token of the sequence, (N), and the number of targets that are not `ignored`. The target of a
    /// token is the label in the next column of the token's row, or `ignored` for a token in the last column. The
    /// labels are copied to the CPU, so the call waits for the GPU that computes them.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shape of `labels` is not (B, S), [`Error::DType`] if `labels` is neither i64 nor u32.
    pub fn targets(&self, labels: &Tensor, ignored: i64) -> Result<(Tensor, usize)> {
        let [_, columns] = self.batch;
        if *labels.dims() != self.batch {
            let (found, expected) = (labels.dims(), self.batch);
            let text = format!("labels have shape {found:?}, expected {expected:?}, the shape of input_ids");
            return Err(Error::shape(OP, text));
        }
        let labels = host(labels, "labels")?;
        let target = |&place: &usize| if (place + 1) % columns == 0 { ignored } else { labels[place + 1] };
        let targets: Vec<i64> = self.places.iter().map(target).collect();
        let not_ignored = targets.iter().filter(|&&target| target != ignored).count();
        let tokens = targets.len();
        Ok((Tensor::from_vec(targets, tokens, &self.device)?, not_ignored))
    }

    /// Copies the rows of `x (N, D)`, one for each token of the sequence, to the tokens' rows and columns of the batch:
    /// (B, S, D), with zeros for padding.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the result does not fit in memory.
    pub fn unpack(&self, x: &Tensor) -> Result<Tensor> {
        let ([rows, columns], width) = (self.batch, x.dims()[1]);
        if self.places.len() == rows * columns {
            return x.reshape((rows, columns, width));
        }
        let padding = Tensor::zeros((1, width), x.dtype(), x.device())?;
        // For each place in the batch, a row of `x`, or the row of zeros that follows the rows of `x`.
        let mut sources = vec![self.places.len() as i64; rows * columns];
        for (source, &place) in self.places.iter().enumerate() {
            sources[place] = source as i64;
        }
        let sources = Tensor::from_vec(sources, rows * columns, x.device())?;
        Tensor::cat(&[x, &padding], 0)?.index_select(&sources, 0)?.reshape((rows, columns, width))
    }
}

/// The elements of `tensor`, copied to the CPU. `name` is the tensor's name in errors.
///
/// # Errors
/// [`Error::DType`] if `tensor` is neither i64 nor u32.
fn host(tensor: &Tensor, name: &str) -> Result<Vec<i64>> {
    if !matches!(tensor.dtype(), DType::I64 | DType::U32) {
        let found = tensor.dtype().as_str();
        return Err(Error::dtype(OP, format!("{name} is {found}, expected i64 or u32; convert it with to()")));
    }
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.reshape(tensor.elem_count())?.to_vec()
}
