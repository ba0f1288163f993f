//! Dropout (Srivastava et al. 2014). The mask, which says which elements are zeroed, is never stored: it is a function
//! of a state of the generator, and the backward pass recomputes it.

#[cfg(feature = "cuda")]
mod cuda;

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::compute::on_device;
use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::rng::{self, State, philox_lanes};
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor, compute, dispatch_float};

static DROPOUT: OpInfo = OpInfo::cheap("dropout");

/// Number of Philox blocks, of four random words each, that are computed together.
const LANES: usize = 16;
/// Number of elements of a group, whose random words are in [`LANES`] Philox blocks. Word `w` of block `i` decides
/// element `LANES * w + i` of the group.
const GROUP: usize = 4 * LANES;
/// Number of elements that a thread computes at a time, a multiple of [`GROUP`].
const GRAIN: usize = 32 * 1024;

/// In training, zeroes each element with probability `p` and divides the other elements by 1 - p; if `p` is 1, zeroes
/// all elements. Outside of training, or if `p` is 0, returns the tensor itself.
///
/// The mask comes from the library's generator ([`rng`]). It does not depend on dtype, device or number of threads.
///
/// # Errors
/// [`Error::Argument`] if `p` is not in [0, 1], [`Error::DType`] if elements are dropped from a tensor that is not
/// floating point.
pub fn dropout(x: &Tensor, p: f64, training: bool) -> Result<Tensor> {
    check_probability(p)?;
    if !training || p == 0.0 {
        return Ok(x.clone());
    }
    // Takes `LANES` Philox blocks from the generator for each group of elements.
    let blocks = x.elem_count().div_ceil(GROUP) * LANES;
    dropout_from(x, p, rng::advance(blocks as u64))
}

/// Applies [`dropout`] in training. Computes the mask from the generator's words from `state` on: `state.offset` is the
/// number of the first Philox block. Does not advance the generator.
///
/// # Errors
/// As [`dropout`].
pub fn dropout_from(x: &Tensor, p: f64, state: State) -> Result<Tensor> {
    check_probability(p)?;
    let mask = Mask { p, state };
    record(&DROPOUT, &[x], || mask.apply(&x.raw), |_, _| DropoutBackward(mask))
}

fn check_probability(p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    Err(Error::argument(DROPOUT.name, format!("the probability is {p}, expected a number from 0 to 1")))
}

/// The probability and the generator's state from which the mask is computed.
#[derive(Clone, Copy)]
struct Mask {
    p: f64,
    state: State,
}

impl Mask {
    /// Zeroes elements of `x` and scales the rest.
    fn apply(self, x: &Raw) -> Result<Raw> {
        on_device!(
            x.device(),
            cuda => cuda::apply(DROPOUT.name, x, self.state, self.threshold(), self.scale()),
            cpu => self.on_cpu(x),
        )
    }

    fn on_cpu(self, x: &Raw) -> Result<Raw> {
        let x = compute::contiguous(x)?;
        let len = x.elem_count();
        dispatch_float!(x.dtype(), DROPOUT.name, T => read_all(DROPOUT.name, &[&x], |operands| {
            let x = elements::<T>(operands[0])?;
            let mut result = Vec::<T>::with_capacity(len);
            par_chunks_mut(&mut result.spare_capacity_mut()[..len], GRAIN, |index, out| {
                let start = index * GRAIN;
                let x = &x[start..start + out.len()];
                let first_block = self.state.offset.wrapping_add((start / GROUP * LANES) as u64);
                dispatch(
                    #[inline(always)]
                    || {
                        let groups = out.chunks_mut(GROUP).zip(x.chunks(GROUP));
                        for (group, (out, x)) in groups.enumerate() {
                            let factors = self.factors::<T>(first_block.wrapping_add((group * LANES) as u64));
                            for (o, (x, factor)) in out.iter_mut().zip(x.iter().zip(factors.as_flattened())) {
                                o.write(T::from_acc(x.to_acc() * *factor));
                            }
                        }
                    },
                );
            });
            // SAFETY: every element is written above.
            unsafe { result.set_len(len) };
            Ok(result)
        })
        .map(|result| from_vec(result, x.shape())))
    }

    /// Random words below this number zero their elements.
    const fn threshold(self) -> u32 {
        (self.p * 4_294_967_296.0) as u32
    }

    /// The factor of the elements whose words are not below the threshold. With p = 1 the factor is 0, because all
    /// elements must be zeroed: the threshold, 2^32, is then rounded down to the largest u32, 2^32 - 1, and a word of
    /// 2^32 - 1 is not below it.
    fn scale(self) -> f64 {
        if self.p == 1.0 { 0.0 } else { 1.0 / (1.0 - self.p) }
    }

    /// The factors of the elements of a group, 0 or [`scale`](Self::scale), in the order of the elements. The group's
    /// first Philox block is `block`.
    #[inline(always)]
    fn factors<T: Elem>(self, block: u64) -> [[T::Acc; LANES]; 4] {
        let (threshold, scale) = (self.threshold(), T::Acc::from_f64(self.scale()));
        philox_lanes::<LANES>(self.state.seed, block)
            .map(|word| word.map(|bits| if bits < threshold { T::Acc::ZERO } else { scale }))
    }
}

struct DropoutBackward(Mask);

impl Backward for DropoutBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = self.0.apply(context.grad())?;
        context.add(0, grad)
    }
}

/// Registry entry of this operation.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &DROPOUT,
    cases: || {
        // An arbitrary state.
        const STATE: State = State { seed: 5, offset: 77 };
        let plain = |x: &[Tensor]| {
            let ones = Tensor::ones(x[0].shape().clone(), x[0].dtype(), x[0].device())?;
            x[0].mul(&dropout_from(&ones, 0.3, STATE)?)
        };
        vec![
            // 3 · 71 elements are three full groups, and a part of one.
            Case::new("", &[&[3, 71]], |x| dropout_from(&x[0], 0.3, STATE)).plain(plain),
            Case::new("all zeroed", &[&[3, 5]], |x| dropout_from(&x[0], 1.0, STATE)),
            Case::new("none zeroed", &[&[3, 5]], |x| dropout(&x[0], 0.0, true)),
            Case::new("not training", &[&[3, 5]], |x| dropout(&x[0], 0.5, false)),
            Case::new("empty", &[&[0, 5]], |x| dropout_from(&x[0], 0.3, STATE)),
        ]
    },
}];

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn the_share_of_zeros_is_p_and_other_elements_are_scaled() {
        let ones = Tensor::ones(200_000, DType::F32, &Device::Cpu).unwrap();
        for p in [0.1, 0.5, 0.9] {
            let y = dropout_from(&ones, p, State { seed: 1, offset: 0 }).unwrap().to_vec::<f32>().unwrap();
            let zeros = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
            // Five standard deviations.
            assert!(
                (zeros - p).abs() < 5.0 * (p * (1.0 - p) / 200_000.0).sqrt(),
                "the share of zeros is {zeros}, expected about {p}"
            );
            assert!(y.iter().all(|y| *y == 0.0 || (f64::from(*y) - 1.0 / (1.0 - p)).abs() < 1e-6));
        }
    }

    #[test]
    fn dtypes_and_views_share_the_mask() {
        let state = State { seed: 3, offset: 9 };
        let ones = |dtype| Tensor::ones((300, 7), dtype, &Device::Cpu).unwrap();
        let zeros = |x: &Tensor| -> Vec<bool> {
            let y = dropout_from(x, 0.4, state).unwrap();
            crate::raw::to_f64_vec(y.raw()).unwrap().iter().map(|y| *y == 0.0).collect()
        };
        let expected = zeros(&ones(DType::F32));
        for dtype in [DType::F64, DType::F16, DType::BF16] {
            assert_eq!(zeros(&ones(dtype)), expected);
        }
        let view = Tensor::ones((7, 300), DType::F32, &Device::Cpu).unwrap().t().unwrap();
        assert_eq!(zeros(&view), expected);
    }

    #[test]
    fn each_call_draws_another_mask() {
        let ones = Tensor::ones(100, DType::F32, &Device::Cpu).unwrap();
        let (first, second) = (dropout(&ones, 0.5, true).unwrap(), dropout(&ones, 0.5, true).unwrap());
        assert_ne!(first.to_vec::<f32>().unwrap(), second.to_vec::<f32>().unwrap());
    }

    #[test]
    fn a_wrong_probability_is_rejected() {
        let ones = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
        for p in [-0.1, 1.5, f64::NAN] {
            let message = dropout(&ones, p, false).unwrap_err().to_string();
            assert!(message.starts_with("dropout: the probability is"), "{message}");
        }
    }
}
