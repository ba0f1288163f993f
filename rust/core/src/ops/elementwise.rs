//! Elementwise functions of one tensor. A table at the end of the file has the value and the derivative of each.

#[cfg(feature = "testing")]
use super::case::{Case, Domain, Entry};
use crate::cpu::{Binary, Real, Unary};
use crate::raw::is_float;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute};

/// A function with its derivative: [`Unary::apply`] computes the value; [`Binary::apply`] computes the gradient of the
/// input from the gradient of the result and the saved tensor's element.
pub(crate) trait Pointwise: Unary + Binary + Copy + Send + Sync + 'static {
    /// Whether the saved tensor is the function's result, as for `exp` and `tanh`; otherwise it is the input.
    const SAVES_RESULT: bool;
}

struct PointwiseBackward<F> {
    saved: Saved,
    function: F,
}

impl<F: Pointwise> Backward for PointwiseBackward<F> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = compute::binary(context.grad(), &self.saved.get()?, self.function)?;
        context.add(0, grad)
    }
}

/// Applies `function` to each element.
pub(crate) fn pointwise<F: Pointwise>(info: &'static OpInfo, x: &Tensor, function: F) -> Result<Tensor> {
    if !is_float(x.dtype()) {
        return Err(Error::dtype(
            info.name,
            format!("expected a floating point tensor, found {}; convert it with to()", x.dtype().as_str()),
        ));
    }
    record(
        info,
        &[x],
        || compute::unary(&x.raw, function),
        |saver, result| PointwiseBackward {
            saved: if F::SAVES_RESULT { saver.save_raw(result) } else { saver.save(x) },
            function,
        },
    )
}

/// Declares functions. Each line has, in this order:
/// - a function's names: of the method, the functor and the [`OpInfo`];
/// - what its backward pass reads: `result` or `input`;
/// - the `Domain` from which its test cases draw their inputs. `Normal` is -2 to 2, `Positive` is 0.5 to 2, and
///   `Distinct` is at least 0.25 away from 0, for functions with a kink or a pole there;
/// - its value;
/// - the gradient of its input, computed from `g`, the gradient of its result, and from what the backward pass reads:
///   the input `x` or the result `y`;
/// - its doc comment.
macro_rules! pointwise_ops {
    // `integers` names the function for integer tensors; a line without it declares a function that rejects them.
    ($($name:ident $functor:ident $info:ident reads $reads:ident in $domain:ident $(integers $integers:path)?: |$x:ident| $value:expr, |$g:ident, $s:ident| $derivative:expr, $doc:literal;)*) => {
        $(
            static $info: OpInfo = OpInfo::cheap(stringify!($name));

            #[derive(Clone, Copy)]
            struct $functor;

            impl Unary for $functor {
                const KERNEL: &'static str = stringify!($name);

                #[inline(always)]
                fn apply<R: Real>(&self, $x: R) -> R {
                    $value
                }
            }

            impl Binary for $functor {
                const KERNEL: &'static str = concat!(stringify!($name), "_backward");

                #[inline(always)]
                fn apply<R: Real>(&self, $g: R, $s: R) -> R {
                    $derivative
                }
            }

            impl Pointwise for $functor {
                const SAVES_RESULT: bool = $crate::ops::elementwise::reads_result!($reads);
            }

            impl Tensor {
                #[doc = $doc]
                ///
                /// # Errors
                /// [`Error::DType`] if the function does not support the tensor's dtype.
                pub fn $name(&self) -> Result<Tensor> {
                    $(if !$crate::raw::is_float(self.dtype()) {
                        return $integers(self);
                    })?
                    $crate::ops::elementwise::pointwise(&$info, self, $functor)
                }
            }
        )*

        /// Registry entries of the functions in this file.
        #[cfg(feature = "testing")]
        pub static ENTRIES: &[Entry] = &[$(Entry {
            info: &$info,
            // A case has a label and the shape of each input.
            cases: || vec![
                Case::new("", &[&[3, 5]], |x| x[0].$name()).domain(Domain::$domain),
                Case::new("empty", &[&[0, 3]], |x| x[0].$name()).domain(Domain::$domain),
            ],
        }),*];
    };
}

/// Whether the backward pass reads the result.
macro_rules! reads_result {
    (result) => {
        true
    };
    (input) => {
        false
    };
}

pub(crate) use reads_result;

/// 1 or -1 with the sign of `x`; zeros and NaN stay as they are.
#[inline(always)]
fn sign<R: Real>(x: R) -> R {
    if x > R::ZERO {
        R::ONE
    } else if x < R::ZERO {
        R::ZERO - R::ONE
    } else {
        x
    }
}

pointwise_ops! {
    exp Exp EXP reads result in Normal: |x| x.exp(), |g, y| g * y, "e to the power of each element.";
    log Log LOG reads input in Positive: |x| x.ln(), |g, x| g / x, "The natural logarithm.";
    sqrt Sqrt SQRT reads result in Positive: |x| x.sqrt(), |g, y| g * R::from_f64(0.5) / y, "The square root.";
    sqr Sqr SQR reads input in Normal: |x| x * x, |g, x| g * (x + x), "The square.";
    recip Recip RECIP reads result in Distinct: |x| R::ONE / x, |g, y| R::ZERO - g * y * y, "One over each element.";
    abs Abs ABS reads input in Distinct integers super::integer::abs: |x| x.abs(), |g, x| g * sign(x), "The absolute value (gradient 0 at 0).";
    sin Sin SIN reads input in Normal: |x| x.sin(), |g, x| g * x.cos(), "The sine.";
    cos Cos COS reads input in Normal: |x| x.cos(), |g, x| R::ZERO - g * x.sin(), "The cosine.";
    tanh Tanh TANH reads result in Normal: |x| x.tanh(), |g, y| g * (R::ONE - y * y), "The hyperbolic tangent.";
    sigmoid Sigmoid SIGMOID reads result in Normal: |x| x.sigmoid(), |g, y| g * y * (R::ONE - y), "1 / (1 + e^-x).";
    relu Relu RELU reads result in Distinct: |x| if x < R::ZERO { R::ZERO } else { x }, |g, y| if y > R::ZERO { g } else { R::ZERO }, "max(x, 0); NaN stays NaN.";
}
