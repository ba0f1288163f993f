//! Test cases of norms. A case has a label, the shapes of its inputs `x`, and the call. The inputs are the tensor to
//! normalise, then the scale and the shift, if any; operands that a case makes with `frozen` are not among the inputs.
//! Images and sequences have their features last. Finite differences test every case; a case with a plain form is also
//! compared with it. Cases with frozen or empty operands have none.

// `frozen(dims, like)` makes an input that needs no gradient. Of `like` it takes only dtype and device.
use super::plain::{self, frozen};
use super::{group, rms_norm_rope, row};
use crate::ops::case::{Case, Entry};
use crate::{Result, Tensor};

/// Multiplies the two results of an `add_*` norm, the sum and its norm, so that both get a gradient.
fn joined((sum, y): (Tensor, Tensor)) -> Result<Tensor> {
    sum.mul(&y)
}

/// Computes norm(x) + x[0]. When the backward pass of the norm runs, x[0] already has the gradient from the addition,
/// so the norm's gradient must be added to it.
fn plus_input(x: &[Tensor], norm: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<Tensor> {
    norm(x)?.add(&x[0])
}

/// Computes norm(x) + x[0] + x[0]². As in [`plus_input`], x[0] already has a gradient, but this gradient is a sum of
/// two gradients, in a tensor of its own. The norm's backward pass may overwrite this tensor.
fn plus_sum(x: &[Tensor], norm: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<Tensor> {
    plus_input(x, norm)?.add(&x[0].sqr()?)
}

fn layer_norm() -> Vec<Case> {
    const EPS: f64 = 1e-5;
    // The second argument is the number of trailing dimensions that are normalised together; the plain form takes a
    // list of these dimensions.
    let run = |x: &[Tensor]| super::layer_norm(&x[0], 1, x.get(1), x.get(2), EPS);
    let plain = |x: &[Tensor]| plain::layer_norm(x, &[x[0].rank() - 1], EPS);
    vec![
        Case::new("scale and shift", &[&[2, 3, 7], &[7], &[7]], run).plain(plain),
        Case::new("scale", &[&[3, 7], &[7]], run).plain(plain),
        Case::new("no parameters", &[&[3, 7]], run).plain(plain),
        Case::new("shift", &[&[3, 7], &[7]], |x| super::layer_norm(&x[0], 1, None, Some(&x[1]), EPS))
            .plain(|x| plain::layer_norm(&x[..1], &[1], EPS)?.add(&x[1])),
        Case::new("frozen input", &[&[7], &[7]], |x| {
            let input = frozen(&[3, 7], &x[0])?;
            super::layer_norm(&input, 1, Some(&x[0]), Some(&x[1]), EPS)
        }),
        Case::new("two dimensions", &[&[3, 5, 9], &[5, 9], &[5, 9]], |x| {
            super::layer_norm(&x[0], 2, x.get(1), x.get(2), EPS)
        })
        .plain(|x| plain::layer_norm(x, &[1, 2], EPS)),
        Case::new("wide rows", &[&[5, 96], &[96], &[96]], run).plain(plain),
        Case::new("plus x", &[&[3, 8], &[8], &[8]], move |x| plus_input(x, run)).plain(move |x| plus_input(x, plain)),
        Case::new("plus a sum", &[&[3, 7], &[7]], move |x| plus_sum(x, run)).plain(move |x| plus_sum(x, plain)),
        Case::new("no rows", &[&[0, 7], &[7], &[7]], run),
        Case::new("empty rows", &[&[3, 0]], run),
    ]
}

fn add_layer_norm() -> Vec<Case> {
    const EPS: f64 = 1e-5;
    // The norm of x[0] + x[1]; scale and shift are x[2] and x[3].
    let run = |x: &[Tensor]| joined(super::add_layer_norm(&x[0], &x[1], 1, x.get(2), x.get(3), EPS)?);
    let plain = |x: &[Tensor]| {
        let sum = x[0].add(&x[1])?;
        let y = plain::layer_norm(&[std::slice::from_ref(&sum), &x[2..]].concat(), &[sum.rank() - 1], EPS)?;
        joined((sum, y))
    };
    vec![
        Case::new("scale and shift", &[&[2, 3, 7], &[2, 3, 7], &[7], &[7]], run).plain(plain),
        Case::new("wide rows", &[&[5, 96], &[5, 96], &[96], &[96]], run).plain(plain),
        Case::new("no parameters", &[&[3, 7], &[3, 7]], run).plain(plain),
        // Nothing reads the sum, so it gets no gradient.
        Case::new("norm alone", &[&[3, 8], &[3, 8], &[8]], |x| {
            Ok(super::add_layer_norm(&x[0], &x[1], 1, Some(&x[2]), None, EPS)?.1)
        }),
        Case::new("frozen x", &[&[3, 7], &[7]], |x| {
            let input = frozen(&[3, 7], &x[0])?;
            joined(super::add_layer_norm(&input, &x[0], 1, Some(&x[1]), None, EPS)?)
        }),
        Case::new("no rows", &[&[0, 7], &[0, 7], &[7], &[7]], run),
    ]
}

fn modulated_layer_norm() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    let run = |x: &[Tensor]| super::modulated_layer_norm(&x[0], &x[1], &x[2], EPS);
    // x[0] is (batch, length, features), or has other dimensions in place of the length; scale and shift, x[1] and
    // x[2], are (batch, features). The plain form is for (batch, length, features) only.
    let plain = |x: &[Tensor]| {
        let normalised = plain::layer_norm(&x[..1], &[2], EPS)?;
        normalised.mul(&x[1].unsqueeze(1)?.add_scalar(1.0)?)?.add(&x[2].unsqueeze(1)?)
    };
    vec![
        Case::new("sequences", &[&[2, 5, 7], &[2, 7], &[2, 7]], run).plain(plain),
        Case::new("wide rows", &[&[3, 4, 96], &[3, 96], &[3, 96]], run).plain(plain),
        Case::new("plus x", &[&[2, 3, 8], &[2, 8], &[2, 8]], move |x| plus_input(x, run))
            .plain(move |x| plus_input(x, plain)),
        Case::new("rows", &[&[3, 7], &[3, 7], &[3, 7]], run),
        Case::new("images", &[&[2, 3, 2, 8], &[2, 8], &[2, 8]], run),
        Case::new("frozen input", &[&[2, 7], &[2, 7]], |x| {
            super::modulated_layer_norm(&frozen(&[2, 5, 7], &x[0])?, &x[0], &x[1], EPS)
        }),
        Case::new("frozen input and scale", &[&[2, 7]], |x| {
            super::modulated_layer_norm(&frozen(&[2, 5, 7], &x[0])?, &frozen(&[2, 7], &x[0])?, &x[0], EPS)
        }),
        Case::new("frozen scale and shift", &[&[2, 5, 7]], |x| {
            let (scale, shift) = (frozen(&[2, 7], &x[0])?, frozen(&[2, 7], &x[0])?);
            super::modulated_layer_norm(&x[0], &scale, &shift, EPS)
        }),
        Case::new("empty batch", &[&[0, 5, 7], &[0, 7], &[0, 7]], run),
        Case::new("no positions", &[&[2, 0, 7], &[2, 7], &[2, 7]], run),
        Case::new("empty rows", &[&[2, 3, 0], &[2, 0], &[2, 0]], run),
    ]
}

fn rms_norm() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    let run = |x: &[Tensor]| super::rms_norm(&x[0], x.get(1), EPS);
    let plain = |x: &[Tensor]| plain::rms_norm(x, EPS);
    vec![
        Case::new("scale", &[&[2, 3, 37], &[37]], run).plain(plain),
        Case::new("no parameters", &[&[3, 7]], run).plain(plain),
        Case::new("wide rows", &[&[5, 96], &[96]], run).plain(plain),
        Case::new("plus x", &[&[3, 7], &[7]], move |x| plus_input(x, run)).plain(move |x| plus_input(x, plain)),
        Case::new("plus a sum", &[&[3, 8], &[8]], move |x| plus_sum(x, run)).plain(move |x| plus_sum(x, plain)),
        Case::new("no rows", &[&[0, 7], &[7]], run),
    ]
}

fn add_rms_norm() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    // The norm of x[0] + x[1]; the scale is x[2].
    let run = |x: &[Tensor]| joined(super::add_rms_norm(&x[0], &x[1], x.get(2), EPS)?);
    let plain = |x: &[Tensor]| {
        let sum = x[0].add(&x[1])?;
        let y = plain::rms_norm(&[std::slice::from_ref(&sum), &x[2..]].concat(), EPS)?;
        joined((sum, y))
    };
    vec![
        Case::new("scale", &[&[2, 3, 37], &[2, 3, 37], &[37]], run).plain(plain),
        Case::new("no parameters", &[&[3, 8], &[3, 8]], run).plain(plain),
        Case::new("no rows", &[&[0, 7], &[0, 7], &[7]], run),
    ]
}

fn group_norm() -> Vec<Case> {
    const EPS: f64 = 1e-5;
    // Three groups of channels; x[0] is (batch, positions, channels) or (batch, height, width, channels).
    let run = |x: &[Tensor]| super::group_norm(&x[0], 3, x.get(1), x.get(2), EPS);
    // For (batch, positions, channels) only, so the case "image" has no plain form.
    let plain = |x: &[Tensor]| plain::group_norm(x, 3, EPS);
    vec![
        Case::new("scale and shift", &[&[2, 5, 6], &[6], &[6]], run).plain(plain),
        Case::new("no parameters", &[&[2, 5, 6]], run).plain(plain),
        Case::new("image", &[&[2, 3, 5, 6], &[6]], run),
        Case::new("plus x", &[&[2, 5, 6], &[6]], move |x| plus_input(x, run)).plain(move |x| plus_input(x, plain)),
        Case::new("plus a sum", &[&[2, 4, 24], &[24]], move |x| plus_sum(x, run)).plain(move |x| plus_sum(x, plain)),
        // Each group has one channel.
        Case::new("groups of one", &[&[2, 5, 3], &[3], &[3]], run).plain(plain),
        Case::new("frozen input", &[&[6], &[6]], |x| {
            let input = frozen(&[2, 3, 6], &x[0])?;
            super::group_norm(&input, 3, Some(&x[0]), Some(&x[1]), EPS)
        }),
        Case::new("empty batch", &[&[0, 5, 6], &[6], &[6]], run),
        Case::new("no positions", &[&[2, 0, 6], &[6], &[6]], run),
    ]
}

fn group_norm_silu() -> Vec<Case> {
    const EPS: f64 = 1e-6;
    // Three groups of channels; shapes as in `group_norm`.
    let run = |x: &[Tensor]| super::group_norm_silu(&x[0], 3, x.get(1), x.get(2), EPS);
    let plain = |x: &[Tensor]| plain::group_norm(x, 3, EPS)?.silu();
    vec![
        Case::new("scale and shift", &[&[2, 5, 6], &[6], &[6]], run).plain(plain),
        Case::new("no parameters", &[&[2, 5, 6]], run).plain(plain),
        Case::new("plus x", &[&[2, 4, 24], &[24]], move |x| plus_input(x, run)).plain(move |x| plus_input(x, plain)),
        Case::new("plus a sum", &[&[2, 5, 6], &[6]], move |x| plus_sum(x, run)).plain(move |x| plus_sum(x, plain)),
        Case::new("image", &[&[2, 3, 5, 6], &[6]], run),
        Case::new("frozen input", &[&[6], &[6]], |x| {
            let input = frozen(&[2, 3, 6], &x[0])?;
            super::group_norm_silu(&input, 3, Some(&x[0]), Some(&x[1]), EPS)
        }),
        Case::new("frozen input and scale", &[&[6]], |x| {
            let (input, scale) = (frozen(&[2, 3, 6], &x[0])?, frozen(&[6], &x[0])?);
            super::group_norm_silu(&input, 3, Some(&scale), Some(&x[0]), EPS)
        }),
        Case::new("empty batch", &[&[0, 5, 6], &[6], &[6]], run),
    ]
}

/// Registry entries of the norms.
pub static ENTRIES: &[Entry] = &[
    Entry { info: &row::LAYER_NORM, cases: layer_norm },
    Entry { info: &row::RMS_NORM, cases: rms_norm },
    Entry { info: &row::ADD_LAYER_NORM, cases: add_layer_norm },
    Entry { info: &row::ADD_RMS_NORM, cases: add_rms_norm },
    Entry { info: &row::MODULATED_LAYER_NORM, cases: modulated_layer_norm },
    Entry { info: &rms_norm_rope::RMS_NORM_ROPE, cases: rms_norm_rope::cases },
    Entry { info: &group::GROUP_NORM, cases: group_norm },
    Entry { info: &group::GROUP_NORM_SILU, cases: group_norm_silu },
];
