//! Elementwise functions of one, two and three tensors.

use candle_core::Layout;
use candle_core::Shape as Dimensions;
use trainable_candle_cuda::modules::ELEMENTWISE;

use super::gpu::Gpu;
use super::launch::{address, empty, launch, same_device, suffix};
use super::strided::{Member, Strided};
use crate::cpu::operand_dims;
use crate::{Raw, Result};

const OP: &str = "elementwise operation";

/// The kernel of a function and the numbers that it takes.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    name: &'static str,
    parameters: [f64; 2],
}

impl Kernel {
    /// The function's name in `kernels/elementwise.cu` and its numbers.
    pub const fn new(name: &'static str, parameters: [f64; 2]) -> Self {
        Self { name, parameters }
    }
}

/// As [`cpu::unary`](crate::cpu::unary).
pub fn unary(x: &Raw, kernel: Kernel) -> Result<Raw> {
    apply([x], x.dims(), kernel)
}

/// As [`cpu::binary`](crate::cpu::binary).
pub fn binary(a: &Raw, b: &Raw, kernel: Kernel) -> Result<Raw> {
    same_device(OP, a, &[b])?;
    apply([a, b], &operand_dims(&[a, b])?, kernel)
}

/// As [`cpu::ternary`](crate::cpu::ternary).
pub fn ternary(a: &Raw, b: &Raw, c: &Raw, kernel: Kernel) -> Result<Raw> {
    same_device(OP, a, &[b, c])?;
    apply([a, b, c], &operand_dims(&[a, b, c])?, kernel)
}

fn apply<const N: usize>(operands: [&Raw; N], dims: &[usize], kernel: Kernel) -> Result<Raw> {
    let gpu = Gpu::of(OP, operands[0])?;
    let dtype = operands[0].dtype();
    let function = gpu.function(&ELEMENTWISE, kernel.name, suffix(OP, dtype)?)?;
    let y = empty(OP, gpu, dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let layout = Layout::contiguous(Dimensions::from(dims));
    let element_size = dtype.size_in_bytes();
    let to = Member { layout: &layout, address: address(OP, &y)?, element_size };
    let mut from = [to; N];
    for (member, operand) in from.iter_mut().zip(operands) {
        *member = Member { layout: operand.layout(), address: address(OP, operand)?, element_size };
    }
    let [p, q] = kernel.parameters;
    // SAFETY: the kernel takes the result, the operands, their strides, which stay inside, and two numbers.
    unsafe {
        match *from.as_slice() {
            [a] => {
                let tensors = Strided::new(OP, dims, [to, a])?;
                launch!(OP, gpu, function, tensors.launch_shape(OP)?, to.address, a.address, tensors, p, q)?;
            }
            [a, b] => {
                let tensors = Strided::new(OP, dims, [to, a, b])?;
                launch!(OP, gpu, function, tensors.launch_shape(OP)?, to.address, a.address, b.address, tensors, p, q)?;
            }
            [a, b, c] => {
                let tensors = Strided::new(OP, dims, [to, a, b, c])?;
                let shape = tensors.launch_shape(OP)?;
                launch!(OP, gpu, function, shape, to.address, a.address, b.address, c.address, tensors, p, q)?;
            }
            _ => unreachable!("functions have one to three operands"),
        }
    }
    Ok(y)
}
