//! Test cases of gated linear units. `frozen(x, dims)` makes a frozen tensor of fixed values, of the dtype and on the
//! device of `x`.

use super::codes::GEGLU_FEED_FORWARD;
use super::feed_forward::SWIGLU_FEED_FORWARD;
use super::linear::SWIGLU_LINEAR_GROUP;
use super::{GEGLU, SWIGLU, geglu, geglu_feed_forward, swiglu, swiglu_feed_forward, swiglu_linear_group};
use crate::ops::activation::Gelu;
use crate::ops::case::{Case, Entry};
use crate::ops::linear::linear;
use crate::ops::linear_group::{LinearGroup, LowRank, frozen, linear_group};
use crate::ops::norm::layer_norm;
use crate::quantized::{Format, example};
use crate::{Result, Tensor};

/// The plain form: the first half of the features times `activation` of the second half, the gate.
fn plain(x: &Tensor, activation: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let last = x.rank() - 1;
    let width = x.dims()[last] / 2;
    x.narrow(last, 0, width)?.mul(&activation(&x.narrow(last, width, width)?)?)
}

fn cases(
    fused: fn(&Tensor) -> Result<Tensor>,
    activation: impl Fn(&Tensor) -> Result<Tensor> + Copy + Send + Sync + 'static,
) -> Vec<Case> {
    let case = |label, dims: &[usize]| {
        Case::new(label, &[dims], move |x| fused(&x[0])).plain(move |x| plain(&x[0], activation))
    };
    vec![case("rows", &[2, 3, 34]), case("one row", &[10]), case("no rows", &[0, 4]), case("no features", &[3, 0])]
}

/// Registry entries of this folder.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &GEGLU, cases: || cases(geglu, |gate| gate.gelu(Gelu::Exact)) },
    Entry { info: &SWIGLU, cases: || cases(swiglu, Tensor::silu) },
    Entry { info: &SWIGLU_LINEAR_GROUP, cases: linear_group_cases },
    Entry { info: &SWIGLU_FEED_FORWARD, cases: swiglu_feed_forward_cases },
    Entry { info: &GEGLU_FEED_FORWARD, cases: geglu_feed_forward_cases },
];

/// Feed-forward networks over quantized weights that also keep their codes transposed. In these cases, products
/// multiply values, not codes: products of codes agree with the plain form less closely than `tests/registry.rs`
/// requires. `tests/cuda/test_quantized_gpu.py` tests products of codes.
fn geglu_feed_forward_cases() -> Vec<Case> {
    const EPS: f64 = 1e-5;
    /// `x` has the input and the residual, (..., 16) each. `inner` has 32 results: 16 features and 16 gates.
    fn run(x: &[Tensor], is_fused: bool) -> Result<Tensor> {
        let quantized = |rows, columns| example(&x[0], [rows, columns], Format::Int8)?.with_transposed_codes();
        let (inner, outer) = (quantized(32, 16)?, quantized(16, 16)?);
        let [inner_bias, outer_bias, norm_weight, norm_bias] = [32, 16, 16, 16].map(|size| frozen(&x[0], &[size]));
        let (inner_bias, outer_bias, norm_weight, norm_bias) = (inner_bias?, outer_bias?, norm_weight?, norm_bias?);
        let affine = [Some(&norm_weight), Some(&norm_bias)];
        if is_fused {
            let (inner, outer) = (((&inner).into(), Some(&inner_bias)), ((&outer).into(), Some(&outer_bias)));
            return geglu_feed_forward(&x[0], &x[1], (affine, EPS), inner, outer);
        }
        let sum = x[0].add(&x[1])?;
        let normed_dims = 1;
        let normed = layer_norm(&sum, normed_dims, affine[0], affine[1], EPS)?;
        linear(&geglu(&linear(&normed, &inner, Some(&inner_bias))?)?, &outer, Some(&outer_bias))?.add(&sum)
    }
    let case = |label, dims: &[usize]| Case::new(label, &[dims, dims], |x| run(x, true)).plain(|x| run(x, false));
    vec![case("int8", &[2, 3, 16]), case("no rows", &[0, 16])]
}

/// Gated units of two linear layers of the same input: one computes the features, the other the gate. `adapted` says
/// which of the two layers have a low-rank product; each product has its own scale. The plain form applies [`swiglu`]
/// to the result of [`linear_group`].
fn linear_group_cases() -> Vec<Case> {
    type Unit = fn(&Tensor, LinearGroup<'_>) -> Result<Tensor>;
    /// `x` has the input, then A (rank, in) and B (out, rank) of each adapted layer. `adapted` is for the features and
    /// the gate, which have `width` columns each.
    fn run(x: &[Tensor], width: usize, adapted: [bool; 2], unit: Unit) -> Result<Tensor> {
        let in_features = x[0].dims()[x[0].rank() - 1];
        let (weight, bias) = (frozen(&x[0], &[2 * width, in_features])?, frozen(&x[0], &[2 * width])?);
        let mut factors = x[1..].chunks_exact(2);
        let low_rank = [0, 1].map(|layer| {
            let factors = if adapted[layer] { factors.next() } else { None };
            factors.map(|f| LowRank { down: f[0].clone(), up: f[1].clone(), scale: 0.5 + layer as f64 })
        });
        let sizes = [width; 2];
        unit(&x[0], LinearGroup { weight: (&weight).into(), bias: Some(&bias), sizes: &sizes, low_rank: &low_rank })
    }
    let case = |label, shapes: &[&[usize]], width: usize, adapted: [bool; 2]| {
        Case::new(label, shapes, move |x| run(x, width, adapted, swiglu_linear_group))
            .plain(move |x| run(x, width, adapted, |x, group| swiglu(&linear_group(x, group)?)))
    };
    vec![
        case("both", &[&[2, 3, 5], &[2, 5], &[4, 2], &[2, 5], &[4, 2]], 4, [true; 2]),
        case("the gate alone", &[&[3, 5], &[2, 5], &[4, 2]], 4, [false, true]),
        case("none", &[&[3, 5]], 4, [false; 2]),
        // Sizes that the CUDA kernel supports. 19 and 130 rows are not multiples of the 16 rows of its tiles.
        case("rank 16", &[&[19, 8], &[16, 8], &[64, 16], &[16, 8], &[64, 16]], 64, [true; 2]),
        case("rank 16 of features", &[&[130, 8], &[16, 8], &[32, 16]], 32, [true, false]),
        case("no rows", &[&[0, 8], &[16, 8], &[32, 16]], 32, [true, false]),
    ]
}

/// Gated units as in [`linear_group_cases`], followed by a last linear layer. The plain form applies [`linear_group`],
/// [`swiglu`] and again [`linear_group`].
fn swiglu_feed_forward_cases() -> Vec<Case> {
    type Network = fn(&Tensor, LinearGroup<'_>, LinearGroup<'_>) -> Result<Tensor>;
    /// `x` has the input, then A (rank, in) and B (out, rank) of each adapted layer. `adapted` is for the features, the
    /// gate and the last layer. Features and gate have `width` columns each, and the result has `out` columns.
    fn run(x: &[Tensor], width: usize, out: usize, adapted: [bool; 3], network: Network) -> Result<Tensor> {
        let in_features = x[0].dims()[x[0].rank() - 1];
        let mut factors = x[1..].chunks_exact(2);
        let [features, gate, last] = [0, 1, 2].map(|layer| {
            let factors = if adapted[layer] { factors.next() } else { None };
            factors.map(|f| LowRank { down: f[0].clone(), up: f[1].clone(), scale: 0.5 + layer as f64 })
        });
        let (weight, bias) = (frozen(&x[0], &[2 * width, in_features])?, frozen(&x[0], &[2 * width])?);
        let (last_weight, last_bias) = (frozen(&x[0], &[out, width])?, frozen(&x[0], &[out])?);
        let (sizes, low_rank, last) = ([width; 2], [features, gate], [last]);
        network(
            &x[0],
            LinearGroup { weight: (&weight).into(), bias: Some(&bias), sizes: &sizes, low_rank: &low_rank },
            LinearGroup { weight: (&last_weight).into(), bias: Some(&last_bias), sizes: &[out], low_rank: &last },
        )
    }
    let case = |label, shapes: &[&[usize]], width: usize, out: usize, adapted: [bool; 3]| {
        Case::new(label, shapes, move |x| run(x, width, out, adapted, swiglu_feed_forward)).plain(move |x| {
            run(x, width, out, adapted, |x, group, last| linear_group(&swiglu(&linear_group(x, group)?)?, last))
        })
    };
    let three_adapted: &[&[usize]] = &[&[2, 3, 5], &[2, 5], &[4, 2], &[2, 5], &[4, 2], &[3, 4], &[6, 3]];
    // Sizes that the CUDA kernel supports. 19 rows are not a multiple of the 16 rows of its tiles.
    let rank_16: &[&[usize]] = &[&[19, 4], &[16, 4], &[64, 16], &[16, 4], &[64, 16], &[16, 64], &[3, 16]];
    vec![
        case("all", three_adapted, 4, 6, [true; 3]),
        case("the last layer alone", &[&[3, 5], &[3, 4], &[6, 3]], 4, 6, [false, false, true]),
        case("none", &[&[3, 5]], 4, 6, [false; 3]),
        case("rank 16", rank_16, 64, 3, [true; 3]),
        case("no rows", &[&[0, 4], &[16, 4], &[32, 16], &[16, 4], &[32, 16], &[16, 32], &[3, 16]], 32, 3, [true; 3]),
    ]
}
