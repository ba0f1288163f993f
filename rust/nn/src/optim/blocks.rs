//! A step of an optimizer with 8-bit states: updates a chunk (consecutive elements of a parameter) block by block.

use super::lanes::{Lanes, WithLanes, with_lanes};
use super::quant::BLOCK_SIZE;
use super::rule::{Chunk, StateSlice};

/// [`BLOCK_SIZE`] elements of a parameter, with their gradients and `N` states. Each state consists of the elements'
/// codes and one scale, which is the largest magnitude of the state's values in the block.
pub(super) struct Block<'a, const N: usize> {
    pub(super) param: &'a mut [f32; BLOCK_SIZE],
    pub(super) grad: &'a [f32; BLOCK_SIZE],
    pub(super) states: [(&'a mut [u8; BLOCK_SIZE], &'a mut f32); N],
}

/// One step of a rule with `N` 8-bit states.
pub(super) trait Step<const N: usize>: Copy {
    /// For each state, the code that bitsandbytes assumes for the missing elements of the last block if the block is
    /// not full. These elements have a gradient of 0.
    const PADDING_CODES: [u8; N];

    /// Updates a block. `values` is a buffer for the new states in f32. Callers reuse it, because a new buffer would
    /// have to be zeroed.
    fn update<L: Lanes>(self, lanes: L, block: Block<'_, N>, values: &mut [Values; N]);
}

/// A block of values, aligned so that each vector register is loaded from one cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Values(pub(super) [f32; BLOCK_SIZE]);

/// Updates a chunk with `N` 8-bit states. `chunk.states` holds, for each state in turn, its
/// codes and then its scales.
pub(super) fn update_blocks<const N: usize>(step: impl Step<N>, chunk: Chunk<'_, f32>) {
    with_lanes(Blocks { step, chunk });
}

/// The update of a chunk block by block, for any [`Lanes`].
struct Blocks<'a, S, const N: usize> {
    step: S,
    chunk: Chunk<'a, f32>,
}

impl<S: Step<N>, const N: usize> WithLanes for Blocks<'_, S, N> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Chunk { param, grad, states, .. } = self.chunk;
        let mut states = states.into_iter();
        let mut states: [_; N] = std::array::from_fn(|_| match (states.next(), states.next()) {
            (Some(StateSlice::Codes(codes)), Some(StateSlice::Scales(scales))) => (codes, scales),
            _ => unreachable!("the states are those that the rule declares"),
        });
        let mut values = [Values([0.0; BLOCK_SIZE]); N];
        let (params, param_rest) = param.as_chunks_mut();
        let (grads, grad_rest) = grad.as_chunks();
        let full_blocks = params.len();
        for (index, (param, grad)) in params.iter_mut().zip(grads).enumerate() {
            let states =
                states.each_mut().map(|(codes, scales)| (&mut codes.as_chunks_mut().0[index], &mut scales[index]));
            self.step.update(lanes, Block { param, grad, states }, &mut values);
        }
        if param_rest.is_empty() {
            return;
        }
        // The last block is not full: update a padded copy, and copy its elements back.
        let (mut param, grad) = (padded(param_rest, 0.0), padded(grad_rest, 0.0));
        let mut padded_codes: [_; N] =
            std::array::from_fn(|i| padded(states[i].0.as_chunks::<BLOCK_SIZE>().1, S::PADDING_CODES[i]));
        let mut pairs =
            padded_codes.iter_mut().zip(&mut states).map(|(codes, (_, scales))| (codes, &mut scales[full_blocks]));
        let block_states = std::array::from_fn(|_| pairs.next().unwrap_or_else(|| unreachable!("there are N states")));
        self.step.update(lanes, Block { param: &mut param, grad: &grad, states: block_states }, &mut values);
        let len = param_rest.len();
        param_rest.copy_from_slice(&param[..len]);
        for (updated, (codes, _)) in padded_codes.iter().zip(states) {
            codes.as_chunks_mut::<BLOCK_SIZE>().1.copy_from_slice(&updated[..len]);
        }
    }
}

/// Pads `data` with `value` to a whole block.
fn padded<T: Copy>(data: &[T], value: T) -> [T; BLOCK_SIZE] {
    let mut block = [value; BLOCK_SIZE];
    block[..data.len()].copy_from_slice(data);
    block
}

/// Checks that all implementations of [`Lanes`] that this processor supports give bitwise equal steps, and that
/// parameters stay finite although some gradients are not.
#[cfg(test)]
pub(super) fn check_equal_steps<const N: usize>(step: impl Step<N>) {
    use super::lanes::with_all_lanes;
    use std::cell::RefCell;

    /// Three full blocks of 256 elements, and a block that is not full.
    const LEN: usize = 1000;

    /// Makes gradients of many magnitudes, some of them zero or non-finite; all are zero in the second block.
    fn gradients(round: usize) -> Vec<f32> {
        // 7919 and 1000 have no common factor, so in each round the second number of this pair takes every value below
        // 1000 once, in an order that looks random. `round` rotates this order.
        let value = |i: usize| match (i, (i * 7919 + round * 104_729) % 1000) {
            (256..512, _) | (_, 0..50) => 0.0,
            (_, 50) => f32::NAN,
            (_, 51) => f32::INFINITY,
            (_, 52) => 1e30,
            (_, n) => ((n * n) as f32 * 0.37).sin() * 10f32.powi(n as i32 % 9 - 6),
        };
        (0..LEN).map(value).collect()
    }

    /// Runs several steps, and appends the bits of the parameters, codes and scales to `results`.
    #[derive(Clone, Copy)]
    struct Run<'a, S, const N: usize> {
        step: S,
        results: &'a RefCell<Vec<Vec<u32>>>,
    }

    impl<S: Step<N>, const N: usize> WithLanes for Run<'_, S, N> {
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) {
            let mut param: Vec<f32> = (0..LEN).map(|i| (i as f32).cos()).collect();
            let mut states: [_; N] = std::array::from_fn(|_| (vec![0u8; LEN], vec![0f32; LEN.div_ceil(BLOCK_SIZE)]));
            for round in 0..6 {
                let grad = gradients(round);
                let slices = states
                    .iter_mut()
                    .flat_map(|(codes, scales)| [StateSlice::Codes(codes), StateSlice::Scales(scales)])
                    .collect();
                // Only Prodigy, which has no 8-bit states, writes `sums`.
                let chunk = Chunk { dims: &[LEN], param: &mut param, grad: &grad, states: slices, sums: None };
                Blocks { step: self.step, chunk }.run(lanes);
            }
            let mut bits: Vec<u32> = param.iter().map(|x| x.to_bits()).collect();
            for (codes, scales) in states {
                bits.extend(codes.into_iter().map(u32::from).chain(scales.into_iter().map(f32::to_bits)));
            }
            self.results.borrow_mut().push(bits);
        }
    }

    let results = RefCell::new(Vec::new());
    with_all_lanes(Run { step, results: &results });
    let results = results.into_inner();
    assert!(results.iter().all(|found| *found == results[0]), "implementations of `Lanes` differ");
    let param = &results[0][..LEN];
    assert!(param.iter().all(|&bits| f32::from_bits(bits).is_finite()), "a parameter is not finite");
}
