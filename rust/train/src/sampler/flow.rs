//! Euler's method along the paths of rectified flow, for any model given as a closure.

use trainable_candle_core::{Error, Result, Tensor, no_grad};

use crate::objective::shift_sigma;

/// The noise levels at the ends of `steps` Euler steps. They are `steps + 1` evenly spaced values σ from 1 down to 0,
/// each replaced by shift · σ / (1 + (shift - 1) · σ), as in
/// [`FlowMatching::new`](crate::objective::FlowMatching::new).
///
/// # Errors
/// [`Error::Argument`] if there are no steps or the shift is not above 0.
pub fn flow_sigmas(steps: usize, shift: f64) -> Result<Vec<f64>> {
    if steps == 0 || !(shift > 0.0 && shift.is_finite()) {
        return Err(Error::argument(
            "flow_sigmas",
            format!("found {steps} steps and shift {shift}, expected at least 1 step and a shift above 0"),
        ));
    }
    Ok((0..=steps).map(|i| shift_sigma(1.0 - i as f64 / steps as f64, shift)).collect())
}

/// Integrate dx/dσ = `velocity(x, σ)` by Euler's method, from x = `noise` at σ = `sigmas[0]` to x at the last of
/// `sigmas`, with one step between neighbouring `sigmas`. Records no gradients.
///
/// # Errors
/// [`Error::Argument`] if there are fewer than two noise levels; the errors of `velocity` and [`euler_step`].
pub fn euler(
    noise: &Tensor,
    sigmas: &[f64],
    mut velocity: impl FnMut(&Tensor, f64) -> Result<Tensor>,
) -> Result<Tensor> {
    if sigmas.len() < 2 {
        return Err(Error::argument("euler", format!("found {} noise levels, expected at least 2", sigmas.len())));
    }
    let _no_grad = no_grad();
    let mut x = noise.clone();
    for pair in sigmas.windows(2) {
        x = euler_step(&x, &velocity(&x, pair[0])?, pair[0], pair[1])?;
    }
    Ok(x)
}

/// One Euler step from the noise level `sigma` to the noise level `next`: x + (next - sigma) · velocity, in the dtype
/// of `x`.
///
/// # Errors
/// [`Error::Shape`] if the shapes differ.
pub fn euler_step(x: &Tensor, velocity: &Tensor, sigma: f64, next: f64) -> Result<Tensor> {
    if velocity.dims() != x.dims() {
        return Err(Error::shape(
            "euler_step",
            format!("the velocity has shape {:?}, expected {:?}, the shape of the sample", velocity.dims(), x.dims()),
        ));
    }
    x.add(&velocity.to_dtype(x.dtype())?.mul_scalar(next - sigma)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainable_candle_core::{DType, Device};

    #[test]
    fn euler_follows_straight_paths_exactly() {
        let cpu = Device::Cpu;
        let noise = Tensor::randn(0.0, 1.0, (2, 3), DType::F64, &cpu).unwrap();
        let data = Tensor::randn(0.0, 1.0, (2, 3), DType::F64, &cpu).unwrap();
        let velocity = noise.sub(&data).unwrap();
        let found = euler(&noise, &flow_sigmas(7, 3.0).unwrap(), |_, _| Ok(velocity.clone())).unwrap();
        let error =
            found.sub(&data).unwrap().to_vec::<f64>().unwrap().into_iter().fold(0.0f64, |m, e: f64| m.max(e.abs()));
        assert!(error < 1e-12, "{error}");
    }

    #[test]
    fn twice_as_many_steps_halve_the_error() {
        // dx/dσ = x from 1 at σ = 1 to 1/e at σ = 0; Euler's method is of first order.
        let one = Tensor::new(1f64, &Device::Cpu).unwrap();
        let error = |steps| {
            let end = euler(&one, &flow_sigmas(steps, 1.0).unwrap(), |x, _| Ok(x.clone())).unwrap();
            (end.item().unwrap() - (-1f64).exp()).abs()
        };
        let ratio = error(50) / error(100);
        assert!((ratio - 2.0).abs() < 0.05, "{ratio}");
    }

    #[test]
    fn too_few_steps_are_rejected() {
        assert!(flow_sigmas(0, 1.0).is_err());
        assert!(euler(&Tensor::new(1f32, &Device::Cpu).unwrap(), &[1.0], |x, _| Ok(x.clone())).is_err());
    }
}
