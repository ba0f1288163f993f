//! Elementwise functions of one, two and three tensors on CUDA devices.

// All kernels of one operand take the arguments of the kernel `exp`, those of two operands the arguments of `add`, and
// those of three operands the arguments of `share` (the kernel for the gradient of a maximum or minimum).
use trainable_candle_cuda::kernels::elementwise::{Add as Binary, Exp as Unary, Share as Ternary};

use super::gpu::Gpu;
use super::launch::{empty, same_device, suffix};
use super::strided::{Member, strided};
use crate::cpu::map::operand_dims;
use crate::{Raw, Result};

const OP: &str = "elementwise operation";

/// An elementwise function by its kernel, with the two numbers that every such kernel takes besides its operands.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    name: &'static str,
    parameters: [f64; 2],
}

impl Kernel {
    /// Describes the function that `cuda/kernels/elementwise.cu` calls `name`. `parameters`, which the kernel calls `p`
    /// and `q`, are 0 if it does not use them.
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

/// Computes the function of `kernel`. `dims` is the shape to which the operands broadcast; they are on one device and
/// have one dtype, which is also that of the result.
fn apply<const N: usize>(operands: [&Raw; N], dims: &[usize], kernel: Kernel) -> Result<Raw> {
    let gpu = Gpu::of(OP, operands[0])?;
    let dtype = operands[0].dtype();
    let dtypes = suffix(OP, dtype)?;
    let y = empty(OP, gpu, dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let to = Member::new(OP, &y)?;
    // A member is the layout, address and dtype of a tensor. `to` only fills this array until the loop has set the
    // operands' members.
    let mut members = [to; N];
    for (member, operand) in members.iter_mut().zip(operands) {
        *member = Member::new(OP, operand)?;
    }
    // Below, "" is the part of a kernel's name between `kernel.name` and the dtypes (here a list of one), `tensors`
    // describes the strides, and `shape` is that of the launch.
    let [p, q] = kernel.parameters;
    let y_at = to.output();
    // SAFETY: the addresses and strides are those of the tensors, broadcast to `dims`, so they stay inside the tensors.
    unsafe {
        match *members.as_slice() {
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
