//! Attention of tokens whose queries and keys are normalised and rotated, for the blocks of Flux, SD3.5 and Z-Image.
//! The operation takes projections whose columns are queries, then keys, then values, and writes the gradients in the
//! same layout.

use super::cpu::{self, SavedValues};
use super::{additive, backward_into, check_mask, forward, may_overwrite_inputs};
use crate::compute::{contiguous, on_device};
use crate::ops::linear::same_kind;
use crate::ops::norm::{HeadNorms, HeadStatistics, check_head_norms};
use crate::raw::{Raw, check_allocation_on, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Error, Result, Tensor, compute};

pub(super) static NORMED: OpInfo = OpInfo::expensive("normed_attention");

/// A sequence of tokens for each sample, such as the text or the image, with norms and angles of its own.
#[derive(Clone, Copy)]
pub struct Stream<'a> {
    /// Projections (B, S, at least 3 · heads · width) of B samples of S tokens. The first columns are queries, then
    /// keys, then values, each with its heads one after the other. Further columns are not read.
    pub x: &'a Tensor,
    /// Scales of the RMS norms of queries and of keys, (width), frozen, in the dtype of `x` or f32; `None` for a norm
    /// without a scale.
    pub norms: [Option<&'a Tensor>; 2],
    /// cos and sin of the angles by which pairs of neighbouring columns are rotated: (S, width / 2) if all samples have
    /// the same angles, else (B, S, width / 2). Without angles nothing is rotated.
    pub angles: Option<[&'a Tensor; 2]>,
}

/// Sizes of the heads of an attention, and the epsilon of their norms.
#[derive(Clone, Copy, Debug)]
pub struct HeadSizes {
    /// Number of heads.
    pub heads: usize,
    /// Width of each head, an even number.
    pub width: usize,
    /// Added to the mean square of each head of queries and of keys.
    pub eps: f64,
}

/// Computes attention of all tokens of `streams` to one another → (B, Σ S, heads · width), where Σ S is the number of
/// tokens of all streams, one stream after the other. Queries and keys are first normalised and rotated, as by
/// [`rms_norm_rope`](crate::ops::norm::rms_norm_rope) with interleaved pairs. `mask` broadcasts to
/// `(B, heads, Σ S, Σ S)`, and hides keys or adds to scores as in
/// [`scaled_dot_product_attention`](super::scaled_dot_product_attention).
///
/// Saves the projections, the mask, the result and one number per head and token: the logarithm of the sum of the
/// exponentials of its scores. The backward pass normalises and rotates queries and keys again.
///
/// # Errors
/// [`Error::Argument`] without streams, if `sizes` has no head, a width of 0, an odd width or at least 2^24 columns, if
/// a norm's scale or the mask needs a gradient, or if `eps` is negative or not finite; [`Error::NoBackward`] if cos or
/// sin needs a gradient; [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the operands do not fit together;
/// [`Error::OutOfMemory`] if the result does not fit in memory.
pub fn normed_attention(streams: &[Stream<'_>], sizes: HeadSizes, mask: Option<&Tensor>) -> Result<Tensor> {
    let normed = Normed::new(streams, sizes, mask)?;
    let first_x = streams[0].x;
    check_allocation_on(first_x.device(), NORMED.name, &normed.result_dims(), first_x.dtype())?;
    let mask = mask.map(|mask| additive(mask, first_x.dtype())).transpose()?;
    let inputs: Vec<&Tensor> = streams.iter().map(|stream| stream.x).collect();
    let operands = streams.iter().map(Operands::of).collect::<Result<Vec<_>>>()?;
    record_with_aux(
        &NORMED,
        &inputs,
        || {
            let xs = inputs.iter().map(|x| contiguous(&x.raw)).collect::<Result<Vec<_>>>()?;
            let Heads { qkv, .. } = normed.heads(&xs, &operands)?;
            let (o, log_sums) = forward(&normed.attention, qkv.each_ref(), mask.as_ref().map(Tensor::raw))?;
            Ok((o.transpose(1, 2)?.reshape(normed.result_dims().as_slice())?, std::iter::once(log_sums).collect()))
        },
        |saver, o, log_sums| NormedBackward {
            xs: inputs.iter().map(|x| saver.save(x)).collect(),
            operands: operands.clone(),
            mask: mask.as_ref().map(|mask| saver.save(mask)),
            result: saver.save_raw(o),
            log_sums: saver.save_raw(&log_sums[0]),
            normed: normed.clone(),
        },
    )
}

/// The frozen operands of a stream.
#[derive(Clone)]
struct Operands {
    norms: [Option<Raw>; 2],
    /// cos and sin: (S, width / 2) if all samples have the same angles, else (B · S, width / 2).
    tables: Option<[Raw; 2]>,
}

impl Operands {
    fn of(stream: &Stream<'_>) -> Result<Self> {
        let flattened = |table: &Tensor| -> Result<Raw> {
            let half = table.dims()[table.rank() - 1];
            Ok(contiguous(&table.raw)?.reshape((table.elem_count() / half.max(1), half))?)
        };
        let tables = stream.angles.map(|[cos, sin]| Ok::<_, Error>([flattened(cos)?, flattened(sin)?])).transpose()?;
        Ok(Self { norms: stream.norms.map(|norm| norm.map(|norm| norm.raw.clone())), tables })
    }
}

/// The sizes and settings of a call whose operands were checked.
#[derive(Clone)]
struct Normed {
    sizes: HeadSizes,
    batch: usize,
    /// Tokens of each stream.
    lengths: Vec<usize>,
    attention: cpu::Attention,
}

/// Queries, keys and values, (B, heads, tokens, width), and the statistics of the norms of each stream.
struct Heads {
    /// The [buffer](Normed::buffer) with the queries and keys and, with several streams, the values.
    buffer: Raw,
    /// Views of `buffer`; the values of a single stream are a view of its projections.
    qkv: [Raw; 3],
    statistics: Vec<HeadStatistics>,
}

impl Normed {
    /// Checks the operands.
    fn new(streams: &[Stream<'_>], sizes: HeadSizes, mask: Option<&Tensor>) -> Result<Self> {
        let op = NORMED.name;
        let HeadSizes { heads, width, eps } = sizes;
        let Some(first) = streams.first() else {
            return Err(Error::argument(op, "expected at least one stream of tokens, found none"));
        };
        // Candle's `unfold`, which makes the views of heads, computes sizes in f32; below this limit they are exact.
        if heads == 0 || width == 0 || width % 2 != 0 || heads.saturating_mul(width) >= 1 << 24 {
            let message = format!(
                "found {heads} heads of width {width}, expected at least one head, an even width above 0, and heads * width below 2^24"
            );
            return Err(Error::argument(op, message));
        }
        let batch = first.x.dims().first().copied().unwrap_or(0);
        for Stream { x, norms, angles } in streams {
            match *x.dims() {
                [samples, _, columns] if samples == batch && columns >= 3 * heads * width => {}
                _ => {
                    let found = x.dims();
                    let message = format!(
                        "found projections of shape {found:?}, expected ({batch}, tokens, at least 3 * {heads} * {width})"
                    );
                    return Err(Error::shape(op, message));
                }
            }
            if !is_float(x.dtype()) {
                let found = x.dtype().as_str();
                let message = format!("expected floating point projections, found {found}; convert them with to()");
                return Err(Error::dtype(op, message));
            }
            same_kind(op, first.x, "other stream", x)?;
            check_head_norms(op, x, [batch, x.dims()[1]], width, *norms, *angles, Some(eps))?;
        }
        let lengths: Vec<usize> = streams.iter().map(|stream| stream.x.dims()[1]).collect();
        let tokens = lengths.iter().sum();
        // The shape of the scores.
        let scores = vec![batch, heads, tokens, tokens];
        if let Some(mask) = mask {
            check_mask(op, first.x, mask, &scores)?;
            if mask.requires_grad() {
                return Err(Error::argument(op, "the mask must not need a gradient"));
            }
        }
        let attention = cpu::Attention {
            scores,
            scale: 1.0 / (width as f64).sqrt(),
            visible_keys: cpu::VisibleKeys::All,
            // Each query head has its own keys and values.
            group: 1,
        };
        Ok(Self { sizes, batch, lengths, attention })
    }

    /// The number of tokens of all streams.
    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The shape of the result.
    fn result_dims(&self) -> [usize; 3] {
        [self.batch, self.tokens(), self.columns()]
    }

    /// The number of columns of the queries, which is also that of the keys and that of the values.
    const fn columns(&self) -> usize {
        self.sizes.heads * self.sizes.width
    }

    /// The number of parts that are written to the [buffer](Self::buffer): queries, keys and, with several streams,
    /// values. The values of a single stream are read in place.
    fn parts(&self) -> usize {
        if self.lengths.len() == 1 { 2 } else { 3 }
    }

    /// The norms and rotation of a stream with these operands.
    fn norms<'a>(&self, Operands { norms, tables }: &'a Operands) -> HeadNorms<'a> {
        let HeadSizes { heads, width, eps } = self.sizes;
        HeadNorms {
            op: NORMED.name,
            weights: norms.each_ref().map(Option::as_ref),
            tables: tables.as_ref().map(|tables| tables.each_ref()),
            // As many key heads as query heads.
            heads: [heads, heads],
            width,
            interleaved: true,
            // None would mean that nothing is normalised.
            eps: Some(eps),
        }
    }

    /// An uninitialised tensor for queries, keys and, if there are several streams, values: (B, tokens, parts · heads,
    /// width).
    fn buffer(&self, like: &Raw) -> Result<Raw> {
        let HeadSizes { heads, width, .. } = self.sizes;
        compute::unset(NORMED.name, like, &[self.batch, self.tokens(), self.parts() * heads, width])
    }

    /// Queries (`index` 0), keys (1) or values (2) of a buffer: a view (B, heads, tokens, width).
    fn part(&self, buffer: &Raw, index: usize) -> Result<Raw> {
        let heads = self.sizes.heads;
        Ok(buffer.narrow(2, index * heads, heads)?.transpose(1, 2)?)
    }

    /// Views `columns` (B, S, heads · width), which may have any strides, as (B, heads, S, width).
    fn split(&self, columns: &Raw) -> Result<Raw> {
        let width = self.sizes.width;
        Ok(columns.unfold(2, width, width)?.transpose(1, 2)?)
    }

    /// The position of the first token of each stream.
    fn starts(&self) -> impl Iterator<Item = usize> {
        self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end - length)
        })
    }

    /// Computes normalised and rotated queries and keys, and values, from contiguous projections `xs`.
    fn heads(&self, xs: &[Raw], operands: &[Operands]) -> Result<Heads> {
        let buffer = self.buffer(&xs[0])?;
        let mut statistics = Vec::with_capacity(xs.len());
        for ((x, operands), (start, &length)) in xs.iter().zip(operands).zip(self.starts().zip(&self.lengths)) {
            // Writes the stream's queries and keys, and its values if there is room for them, to the buffer.
            statistics.push(self.norms(operands).forward(x, &buffer.narrow(1, start, length)?)?);
        }
        let v = match self.parts() {
            // The values of the single stream stay in the projections.
            2 => self.split(&xs[0].narrow(2, 2 * self.columns(), self.columns())?)?,
            _ => self.part(&buffer, 2)?,
        };
        let qkv = [self.part(&buffer, 0)?, self.part(&buffer, 1)?, v];
        Ok(Heads { buffer, qkv, statistics })
    }
}

struct NormedBackward {
    xs: Vec<Saved>,
    operands: Vec<Operands>,
    mask: Option<Saved>,
    result: Saved,
    log_sums: Saved,
    normed: Normed,
}

/// The index of the last dimension of the projections, (B, S, columns).
const COLUMN_DIM: usize = 2;

impl NormedBackward {
    /// The tensor (B, S, 3 · heads · width) into which the gradients of the queries, keys and values of stream `index`
    /// are written, and whether this tensor is a view of the gradient of the projection `x`. If it is not, the caller
    /// must add it to that gradient.
    fn grad_tensor(&self, context: &mut BackwardContext<'_>, index: usize, x: &Raw) -> Result<(Raw, bool)> {
        let columns = 3 * self.normed.columns();
        // The gradient has the dtype and the device of `x`, and the shape `x.dims()`.
        if let Some(view) = context.part(index, (x, x.dims()), COLUMN_DIM, 0..columns)? {
            return Ok((view, true));
        }
        Ok((compute::unset(NORMED.name, x, &[x.dims()[0], x.dims()[1], columns])?, false))
    }
}

impl Backward for NormedBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let normed = &self.normed;
        let (columns, parts) = (normed.columns(), normed.parts());
        let xs = self.xs.iter().map(|x| contiguous(&x.get()?)).collect::<Result<Vec<_>>>()?;
        let Heads { buffer: inputs, qkv, statistics } = normed.heads(&xs, &self.operands)?;
        // The result of `grad_tensor` for each stream for which it has been called.
        let mut grad_tensors: Vec<Option<(Raw, bool)>> = vec![None; xs.len()];
        let value_grads = if parts == 3 {
            None
        } else {
            // Attention writes the gradient of a single stream's values directly into the gradient of the projection.
            let (tensor, is_view) = self.grad_tensor(context, 0, &xs[0])?;
            let value_grads = normed.split(&tensor.narrow(2, 2 * columns, columns)?)?;
            grad_tensors[0] = Some((tensor, is_view));
            Some(value_grads)
        };
        // The places of the gradients of the normalised and rotated queries and keys, which are parts of `buffer`, and
        // of the values: also a part of `buffer` with several streams, `value_grads` with a single stream.
        let places = |buffer: &Raw| -> Result<[Raw; 3]> {
            let values = value_grads.clone().map_or_else(|| normed.part(buffer, 2), Ok)?;
            Ok([normed.part(buffer, 0)?, normed.part(buffer, 1)?, values])
        };
        let grad = context.grad();
        // The CUDA kernels read gradients with any strides; the CPU kernels need contiguous rows.
        let grad = on_device!(grad.device(), cuda => grad.clone(), cpu => contiguous(grad)?);
        let grad = normed.split(&grad)?;
        let saved = SavedValues {
            inputs: qkv,
            mask: self.mask.as_ref().map(Saved::get).transpose()?,
            result: normed.split(&self.result.get()?)?,
            log_sums: self.log_sums.get()?,
        };
        // The buffer of the queries and keys is needed only here, so it gets their gradients if it can.
        let mut grads = places(&inputs)?;
        let buffer = if may_overwrite_inputs(&normed.attention, &saved, &grad, grads.each_ref())? {
            inputs
        } else {
            let buffer = normed.buffer(&xs[0])?;
            grads = places(&buffer)?;
            buffer
        };
        backward_into(&normed.attention, &saved, &grad, grads.each_ref())?;
        drop(saved);
        let streams = normed.starts().zip(&normed.lengths).zip(&self.operands).zip(statistics);
        for (index, (((start, &length), operands), statistics)) in streams.enumerate() {
            if !context.needs(index) {
                continue;
            }
            let (tensor, is_view) = match grad_tensors[index].take() {
                Some(found) => found,
                None => self.grad_tensor(context, index, &xs[index])?,
            };
            let grad = buffer.narrow(1, start, length)?;
            // With two parts, the values' columns of `tensor` are complete.
            let destination = tensor.narrow(2, 0, parts * columns)?;
            normed.norms(operands).backward(&xs[index], &grad, &statistics, &destination)?;
            if !is_view {
                let first_column = 0;
                context.add_part(index, xs[index].dims(), COLUMN_DIM, first_column, &tensor)?;
            }
        }
        Ok(())
    }
}
