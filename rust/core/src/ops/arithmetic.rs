//! Elementwise functions of two tensors, whose shapes broadcast as in numpy, and Rust's operators `+`, `-`, `*` and
//! `/`.

#[cfg(feature = "testing")]
use super::case::{Case, Domain, Entry};
use super::scalar::Affine;
use crate::cpu::{Add, Binary, Div, Maximum, Minimum, Mul, Real, Sub};
use crate::raw::{Raw, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, Var, compute};

static ADD: OpInfo = OpInfo::cheap("add");
static SUB: OpInfo = OpInfo::cheap("sub");
static MUL: OpInfo = OpInfo::cheap("mul");
static DIV: OpInfo = OpInfo::cheap("div");
static POW: OpInfo = OpInfo::cheap("pow");
static MAXIMUM: OpInfo = OpInfo::cheap("maximum");
static MINIMUM: OpInfo = OpInfo::cheap("minimum");

/// Declares types with a [`Binary`] function: the type's name, its CUDA kernel, and the value.
macro_rules! functors {
    ($($name:ident $kernel:literal: |$a:ident, $b:ident| $value:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name;

        impl Binary for $name {
            const KERNEL: &'static str = $kernel;

            #[inline(always)]
            fn apply<R: Real>(&self, $a: R, $b: R) -> R {
                $value
            }
        }
    )*};
}

functors! {
    Pow "pow": |a, b| a.powf(b);
    // The derivatives of maximum and minimum with respect to the first operand: 1 where the result is this operand, 1/2
    // where both operands are equal (torch's subgradient), 0 elsewhere.
    TakesMaximum "takes_maximum": |a, b| if a > b { R::ONE } else if a == b { R::from_f64(0.5) } else { R::ZERO };
    TakesMinimum "takes_minimum": |a, b| if a < b { R::ONE } else if a == b { R::from_f64(0.5) } else { R::ZERO };
    // The derivative of a^b with respect to a; zero for b = 0.
    PowerSlope "power_slope": |a, b| if b == R::ZERO { R::ZERO } else { b * a.powf(b - R::ONE) };
    // The derivative of a^b with respect to b: a^b ln a; zero for a = 0 and b >= 0.
    PowerLog "power_log": |a, b| if a == R::ZERO && b >= R::ZERO { R::ZERO } else { a.powf(b) * a.ln() };
}

/// Returns the gradient of an operand of shape `dims`: sums `grad` over the dimensions along which the operand was
/// broadcast.
pub(super) fn reduced(grad: Raw, dims: &[usize]) -> Result<Raw> {
    if grad.dims() == dims { Ok(grad) } else { compute::sum_to_shape(&grad, dims) }
}

/// Checks that the operands have the same dtype and device.
pub(super) fn check(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.dtype() != b.dtype() {
        return Err(Error::dtype(
            op,
            format!("dtypes {} and {} differ; convert one with to()", a.dtype().as_str(), b.dtype().as_str()),
        ));
    }
    if !a.device().same_device(b.device()) {
        return Err(Error::device(op, "tensors are on different devices; move one with to()"));
    }
    Ok(())
}

/// A function that computes an operation on two integer tensors of the same shape.
type IntegerForm = fn(&Raw, &Raw) -> candle_core::Result<Raw>;

/// Computes the result with `functor` for floating-point tensors, and with `integer` for integer tensors. Without
/// `integer`, rejects integer tensors.
fn forward(
    op: &'static str,
    a: &Raw,
    b: &Raw,
    functor: impl Binary + Copy + Send + Sync,
    integer: Option<IntegerForm>,
) -> Result<Raw> {
    if is_float(a.dtype()) {
        return compute::binary(a, b, functor).map_err(|error| error.under(op));
    }
    let Some(integer) = integer else {
        let found = a.dtype().as_str();
        return Err(Error::dtype(
            op,
            format!("expected floating point tensors, found {found}; convert them with to()"),
        ));
    };
    let shape = a.shape().broadcast_shape_binary_op(b.shape(), op)?;
    Ok(integer(&a.broadcast_as(&shape)?, &b.broadcast_as(&shape)?)?)
}

/// The backward function of `a + b` and `a - b`.
struct SumBackward {
    /// The shapes of the operands.
    dims: [Vec<usize>; 2],
    /// Whether the gradient of `b` is negated, as for `a - b`.
    negates_b: bool,
}

impl Backward for SumBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        for (index, dims) in self.dims.iter().enumerate() {
            if context.needs(index) {
                let mut grad = reduced(context.grad().clone(), dims)?;
                if index == 1 && self.negates_b {
                    grad = compute::unary(&grad, Affine::times(-1.0))?;
                }
                context.add(index, grad)?;
            }
        }
        Ok(())
    }
}

/// The backward function of the operations in [`Product`]. The gradient of each operand is the gradient of the result
/// times a factor that depends on the saved operands.
struct ProductBackward {
    kind: Product,
    /// The operands; `None` for an operand that the gradients do not need.
    saved: [Option<Saved>; 2],
    /// The shapes of the operands.
    dims: [Vec<usize>; 2],
}

/// An operation whose gradients [`ProductBackward`] computes.
#[derive(Clone, Copy)]
enum Product {
    Mul,
    Div,
    Pow,
    Maximum,
    Minimum,
}

impl ProductBackward {
    fn operand(&self, index: usize) -> Result<Raw> {
        self.saved[index]
            .as_ref()
            .map_or_else(|| Err(Error::autograd("backward", "an operand was not saved")), Saved::get)
    }

    /// The gradient of operand `index` in the broadcast shape, given the gradient `grad` of the result.
    fn gradient(&self, grad: &Raw, index: usize) -> Result<Raw> {
        let (a, b) = (|| self.operand(0), || self.operand(1));
        match (self.kind, index) {
            (Product::Mul, 0) => compute::binary(grad, &b()?, Mul),
            (Product::Mul, _) => compute::binary(grad, &a()?, Mul),
            (Product::Div, 0) => compute::binary(grad, &b()?, Div),
            (Product::Div, _) => {
                let b = b()?;
                let factor = compute::binary(&compute::binary(&a()?, &b, Div)?, &b, Div)?;
                compute::binary(grad, &compute::unary(&factor, Affine::times(-1.0))?, Mul)
            }
            (Product::Pow, 0) => compute::binary(grad, &compute::binary(&a()?, &b()?, PowerSlope)?, Mul),
            (Product::Pow, _) => compute::binary(grad, &compute::binary(&a()?, &b()?, PowerLog)?, Mul),
            (Product::Maximum, 0) => compute::binary(grad, &compute::binary(&a()?, &b()?, TakesMaximum)?, Mul),
            (Product::Maximum, _) => compute::binary(grad, &compute::binary(&b()?, &a()?, TakesMaximum)?, Mul),
            (Product::Minimum, 0) => compute::binary(grad, &compute::binary(&a()?, &b()?, TakesMinimum)?, Mul),
            (Product::Minimum, _) => compute::binary(grad, &compute::binary(&b()?, &a()?, TakesMinimum)?, Mul),
        }
    }
}

impl Backward for ProductBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        for index in 0..2 {
            if context.needs(index) {
                let grad = self.gradient(context.grad(), index)?;
                context.add(index, reduced(grad, &self.dims[index])?)?;
            }
        }
        Ok(())
    }
}

/// Computes an operation whose backward function is [`SumBackward`].
fn sum_like(
    info: &'static OpInfo,
    a: &Tensor,
    b: &Tensor,
    functor: impl Binary + Copy + Send + Sync,
    integer: IntegerForm,
    negates_b: bool,
) -> Result<Tensor> {
    check(info.name, a, b)?;
    record(
        info,
        &[a, b],
        || forward(info.name, &a.raw, &b.raw, functor, Some(integer)),
        |_, _| SumBackward { dims: [a.dims().to_vec(), b.dims().to_vec()], negates_b },
    )
}

/// Records [`Tensor::add`] of two tensors, whose sum `forward` computes. The caller has checked that the tensors match
/// in dtype, device and shape.
pub(super) fn add_by(a: &Tensor, b: &Tensor, forward: impl FnOnce() -> Result<Raw>) -> Result<Tensor> {
    let dims = [a.dims().to_vec(), b.dims().to_vec()];
    record(&ADD, &[a, b], forward, |_, _| SumBackward { dims, negates_b: false })
}

/// Computes an operation whose backward function is [`ProductBackward`].
fn product_like(
    info: &'static OpInfo,
    a: &Tensor,
    b: &Tensor,
    functor: impl Binary + Copy + Send + Sync,
    integer: Option<IntegerForm>,
    kind: Product,
) -> Result<Tensor> {
    check(info.name, a, b)?;
    record(
        info,
        &[a, b],
        || forward(info.name, &a.raw, &b.raw, functor, integer),
        |saver, _| {
            let (needs_a, needs_b) = (saver.needs(0), saver.needs(1));
            // The gradient of each factor of a product reads only the other factor. For `a / b`, the gradient of `a`
            // reads only `b`; the gradient of `b` reads both.
            let (save_a, save_b) = match kind {
                Product::Mul => (needs_b, needs_a),
                Product::Div => (needs_b, true),
                _ => (true, true),
            };
            ProductBackward {
                kind,
                saved: [save_a.then(|| saver.save(a)), save_b.then(|| saver.save(b))],
                dims: [a.dims().to_vec(), b.dims().to_vec()],
            }
        },
    )
}

/// Declares methods of [`Tensor`], each with the arguments of `sum_like` or `product_like`, and its doc comment. The
/// last argument is `negates_b` for `sum_like`, and `kind` for `product_like`.
macro_rules! binary_methods {
    ($($name:ident($info:ident) = $call:ident($functor:expr, $integer:expr, $last:expr), $doc:literal;)*) => {
        impl Tensor {
            $(
                #[doc = $doc]
                ///
                /// Shapes broadcast as in numpy.
                ///
                /// # Errors
                /// [`Error::Shape`] if the shapes do not broadcast, [`Error::DType`] if the dtypes differ or the
                /// operation does not support them, [`Error::Device`] if the devices differ, [`Error::OutOfMemory`] if
                /// the result does not fit in memory.
                pub fn $name(&self, other: &Tensor) -> Result<Tensor> {
                    $call(&$info, self, other, $functor, $integer, $last)
                }
            )*
        }
    };
}

binary_methods! {
    add(ADD) = sum_like(Add, Raw::add, false), "The sum.";
    sub(SUB) = sum_like(Sub, Raw::sub, true), "The difference.";
    mul(MUL) = product_like(Mul, Some(Raw::mul), Product::Mul), "The elementwise product.";
    div(DIV) = product_like(Div, None, Product::Div), "The elementwise quotient.";
    pow(POW) = product_like(Pow, None, Product::Pow), "Each element to the power of its counterpart in `other`.";
    maximum(MAXIMUM) = product_like(Maximum, Some(|a, b| a.maximum(b)), Product::Maximum), "The larger of each pair of elements; equal elements get half of the gradient each.";
    minimum(MINIMUM) = product_like(Minimum, Some(|a, b| a.minimum(b)), Product::Minimum), "The smaller of each pair of elements; equal elements get half of the gradient each.";
}

/// Implements an operator of Rust for references to tensors and variables, and between these and numbers. `$scalar`
/// computes `tensor op number`, and `$scalar_left` computes `number op tensor`.
macro_rules! operators {
    ($($trait:ident $method:ident $scalar:expr, $scalar_left:expr;)*) => {$(
        operators!(@pair $trait $method Tensor Tensor);
        operators!(@pair $trait $method Tensor Var);
        operators!(@pair $trait $method Var Tensor);
        operators!(@pair $trait $method Var Var);
        operators!(@scalar $trait $method $scalar, $scalar_left, Tensor);
        operators!(@scalar $trait $method $scalar, $scalar_left, Var);
    )*};
    (@pair $trait:ident $method:ident $left:ident $right:ident) => {
        impl std::ops::$trait<&$right> for &$left {
            type Output = Result<Tensor>;
            fn $method(self, other: &$right) -> Result<Tensor> {
                // This calls `Tensor`'s own method, which has precedence over the trait's.
                AsRef::<Tensor>::as_ref(self).$method(AsRef::<Tensor>::as_ref(other))
            }
        }
    };
    (@scalar $trait:ident $method:ident $scalar:expr, $scalar_left:expr, $operand:ident) => {
        impl std::ops::$trait<f64> for &$operand {
            type Output = Result<Tensor>;
            fn $method(self, value: f64) -> Result<Tensor> {
                let apply: fn(&Tensor, f64) -> Result<Tensor> = $scalar;
                apply(AsRef::<Tensor>::as_ref(self), value)
            }
        }

        impl std::ops::$trait<&$operand> for f64 {
            type Output = Result<Tensor>;
            fn $method(self, tensor: &$operand) -> Result<Tensor> {
                let apply: fn(f64, &Tensor) -> Result<Tensor> = $scalar_left;
                apply(self, AsRef::<Tensor>::as_ref(tensor))
            }
        }
    };
}

operators! {
    Add add |t, v| t.add_scalar(v), |v, t| t.add_scalar(v);
    Sub sub |t, v| t.add_scalar(-v), |v, t| t.affine(-1.0, v);
    Mul mul |t, v| t.mul_scalar(v), |v, t| t.mul_scalar(v);
    Div div |t, v| t.mul_scalar(1.0 / v), |v, t| t.recip()?.mul_scalar(v);
}

/// Makes a registry entry from an operation's `OpInfo`, its method, and the [`Domain`] of the values of its operands.
#[cfg(feature = "testing")]
macro_rules! binary_entry {
    ($info:ident, $method:ident, $domain:ident) => {
        Entry {
            info: &$info,
            cases: || {
                vec![
                    Case::new("same shape", &[&[3, 5], &[3, 5]], |x| x[0].$method(&x[1])).domain(Domain::$domain),
                    Case::new("broadcast", &[&[2, 1, 5], &[3, 1]], |x| x[0].$method(&x[1])).domain(Domain::$domain),
                    Case::new("broadcast row", &[&[4, 5], &[5]], |x| x[0].$method(&x[1])).domain(Domain::$domain),
                    Case::new("empty", &[&[0, 3], &[3]], |x| x[0].$method(&x[1])).domain(Domain::$domain),
                ]
            },
        }
    };
}

/// Registry entries of this file.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    binary_entry!(ADD, add, Normal),
    binary_entry!(SUB, sub, Normal),
    binary_entry!(MUL, mul, Normal),
    binary_entry!(DIV, div, Positive),
    binary_entry!(POW, pow, Positive),
    // The values of the two operands differ, because the derivatives jump where they are equal.
    binary_entry!(MAXIMUM, maximum, Distinct),
    binary_entry!(MINIMUM, minimum, Distinct),
];
