//! Test cases of RMS norm with rotary embedding.

use super::rms_norm_rope;
use crate::Tensor;
use crate::ops::case::Case;
use crate::ops::norm::plain::{frozen, rms_norm as plain_rms_norm};
use crate::ops::rope::cases::{plain as plain_rope, tables};

pub(in crate::ops::norm) fn cases() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    // The argument `interleaved`: whether adjacent elements are rotated together, or elements half a width apart.
    const INTERLEAVED: bool = true;
    const HALVES: bool = false;
    // `tables` makes cos and sin for the positions and the width of an input; `frozen` makes a constant of a shape. The
    // shapes of a case are those of the inputs whose gradients are tested: x[0] is (..., positions, width), and x[1],
    // if there is one, the weight (width,).
    let case = |label, shapes: &[&[usize]], interleaved| {
        let fused = move |x: &[Tensor]| {
            let [cos, sin] = tables(&x[0])?;
            rms_norm_rope(&x[0], x.get(1), &cos, &sin, interleaved, EPS)
        };
        Case::new(label, shapes, fused).plain(move |x| {
            let [cos, sin] = tables(&x[0])?;
            plain_rope(&plain_rms_norm(x, EPS)?, [&cos, &sin], interleaved)
        })
    };
    // In "heads inside", x[0] is (batch, positions, heads, width), as a projection returns it. The operation gets the
    // transposed view (batch, heads, positions, width).
    let swap = |x: &Tensor| x.transpose(1, 2);
    let inside = move |x: &[Tensor]| {
        let [cos, sin] = tables(&swap(&x[0])?)?;
        swap(&rms_norm_rope(&swap(&x[0])?, x.get(1), &cos, &sin, HALVES, EPS)?)
    };
    let inside_plain = move |x: &[Tensor]| {
        let [cos, sin] = tables(&swap(&x[0])?)?;
        let normalised = plain_rms_norm(x, EPS)?;
        swap(&plain_rope(&swap(&normalised)?, [&cos, &sin], HALVES)?)
    };
    vec![
        case("halves", &[&[2, 3, 5, 6], &[6]], HALVES),
        case("interleaved", &[&[2, 3, 5, 6], &[6]], INTERLEAVED),
        case("one matrix", &[&[3, 2], &[2]], HALVES),
        case("no weight", &[&[2, 3, 10]], INTERLEAVED),
        case("wide", &[&[3, 70], &[70]], HALVES),
        Case::new("heads inside", &[&[2, 5, 3, 6], &[6]], inside).plain(inside_plain),
        Case::new("frozen weight", &[&[2, 5, 6]], |x| {
            let [cos, sin] = tables(&x[0])?;
            rms_norm_rope(&x[0], Some(&frozen(&[6], &x[0])?), &cos, &sin, INTERLEAVED, EPS)
        })
        .plain(|x| {
            let [cos, sin] = tables(&x[0])?;
            plain_rope(&plain_rms_norm(&[x[0].clone(), frozen(&[6], &x[0])?], EPS)?, [&cos, &sin], INTERLEAVED)
        }),
        // Here x[0], the only input that needs a gradient, is the weight.
        Case::new("frozen input", &[&[6]], |x| {
            let input = frozen(&[3, 5, 6], &x[0])?;
            let [cos, sin] = tables(&input)?;
            rms_norm_rope(&input, Some(&x[0]), &cos, &sin, HALVES, EPS)
        }),
        case("no positions", &[&[2, 0, 4], &[4]], INTERLEAVED),
        case("empty rows", &[&[2, 3, 0], &[0]], HALVES),
    ]
}
