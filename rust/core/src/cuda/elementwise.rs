//! Elementwise functions of one, two and three tensors.

// All kernels of one operand take the arguments of `exp`, those of two operands the arguments of `add`, and those of
// three operands the arguments of `share`.
use trainable_candle_cuda::kernels::elementwise::{Add as Binary, Exp as Unary, Share as Ternary};

use super::gpu::Gpu;
use super::launch::{empty, same_device, suffix};
use super::strided::{Member, strided};
use crate::cpu::map::operand_dims;
use crate::{Raw, Result};

const OP: &str = "elementwise operation";

/// The kernel of a function, and the two numbers that the kernel takes besides the operands.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    name: &'static str,
    parameters: [f64; 2],
}

impl Kernel {
    /// `name` is the function's name in `cuda/kernels/elementwise.cu`; unused `parameters` are 0.
    pub const fn new(name: &'static str, parameters: [f64; 2]) -> Self {
        Self { name, parameters }
    }
}

/// Does on a CUDA device what [`cpu::unary`](crate::cpu::unary) does on the CPU.
pub fn unary(x: &Raw, kernel: Kernel) -> Result<Raw> {
    apply([x], x.dims(), kernel)
}

/// Does on a CUDA device what [`cpu::binary`](crate::cpu::binary) does on the CPU.
pub fn binary(a: &Raw, b: &Raw, kernel: Kernel) -> Result<Raw> {
    same_device(OP, a, &[b])?;
    apply([a, b], &operand_dims(&[a, b])?, kernel)
}

/// Does on a CUDA device what [`cpu::ternary`](crate::cpu::ternary) does on the CPU.
pub fn ternary(a: &Raw, b: &Raw, c: &Raw, kernel: Kernel) -> Result<Raw> {
    same_device(OP, a, &[b, c])?;
    apply([a, b, c], &operand_dims(&[a, b, c])?, kernel)
}

fn apply<const N: usize>(operands: [&Raw; N], dims: &[usize], kernel: Kernel) -> Result<Raw> {
    let gpu = Gpu::of(OP, operands[0])?;
    let dtype = operands[0].dtype();
    let dtypes = suffix(OP, dtype)?;
    let y = empty(OP, gpu, dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let to = Member::new(OP, &y)?;
    let mut from = [to; N];
    for (member, operand) in from.iter_mut().zip(operands) {
        *member = Member::new(OP, operand)?;
    }
    let [p, q] = kernel.parameters;
    let y_at = to.output();
    // SAFETY: the addresses and strides are those of the tensors, broadcast to `dims`, so they stay inside of the
    // tensors.
    unsafe {
        match *from.as_slice() {
            [a] => {
                let (tensors, shape) = strided(OP, dims, [to, a])?;
                let arguments = Unary { y: y_at, a: a.input(), tensors, p, q };
                gpu.named(kernel.name, "", dtypes)?.launch(OP, gpu, shape, arguments)?;
            }
            [a, b] => {
                let (tensors, shape) = strided(OP, dims, [to, a, b])?;
                let arguments = Binary { y: y_at, a: a.input(), b: b.input(), tensors, p, q };
                gpu.named(kernel.name, "", dtypes)?.launch(OP, gpu, shape, arguments)?;
            }
            [a, b, c] => {
                let (tensors, shape) = strided(OP, dims, [to, a, b, c])?;
                let arguments = Ternary { y: y_at, a: a.input(), b: b.input(), c: c.input(), tensors, p, q };
                gpu.named(kernel.name, "", dtypes)?.launch(OP, gpu, shape, arguments)?;
            }
            _ => unreachable!("functions have one to three operands"),
        }
    }
    Ok(y)
}
