//! One class for each optimizer. Argument names and defaults are torch's, for 8-bit ones bitsandbytes'.

use pyo3::prelude::*;
use trainable_candle_nn::optim::{
    self, AdafactorConfig, Adam8bitConfig, AdamConfig, Lion8bitConfig, LionConfig, ProdigyConfig, SGDConfig,
};

use super::{Optimizer, Params};
use crate::argument::{Argument, Expected};
use crate::arguments::Integer;
use crate::error::Result;

/// A hyper-parameter as it is passed.
trait HyperParameter {
    /// As the optimizer takes it.
    type Value;

    fn value(self, op: &'static str, name: &str) -> Result<Self::Value>;
}

impl<T: Expected> HyperParameter for Argument<T> {
    type Value = T;

    fn value(self, op: &'static str, name: &str) -> Result<T> {
        self.get(op, name)
    }
}

impl HyperParameter for Integer {
    type Value = usize;

    fn value(self, op: &'static str, name: &str) -> Result<usize> {
        self.count(op, name)
    }
}

/// How a hyper-parameter of type `Self` is passed.
trait Passed: Sized {
    type As: HyperParameter;

    fn default(self) -> Self::As;
}

impl<T: Expected> Passed for T {
    type As = Argument<T>;

    fn default(self) -> Argument<T> {
        Argument::of(self)
    }
}

impl Passed for Integer {
    type As = Self;

    fn default(self) -> Self {
        self
    }
}

/// The entry `key` of a parameter group.
fn entry<'py, T>(op: &'static str, key: &str, value: &Bound<'py, PyAny>) -> Result<T::Value>
where
    T: HyperParameter + for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    value.extract::<T>()?.value(op, &format!("{key} of a parameter group"))
}

macro_rules! optimizers {
    ($($(#[$doc:meta])* $name:ident($config:ident { $($field:ident: $type:ty = $default:expr),* } $(, only $($named:ident: $named_type:ty = $named_default:expr),*)?);)*) => {$(
        $(#[$doc])*
        #[pyclass(frozen, extends = Optimizer, module = "trainable_candle.optim")]
        #[allow(clippy::upper_case_acronyms)] // torch's names
        pub struct $name;

        #[pymethods]
        #[allow(clippy::too_many_arguments)] // as in the reference implementations
        impl $name {
            #[new]
            #[pyo3(signature = (params, $($field = Passed::default($default)),* $(, *, $($named = Passed::default($named_default)),*)?))]
            fn new(params: Params<'_>, $($field: <$type as Passed>::As),* $(, $($named: <$named_type as Passed>::As),*)?) -> Result<PyClassInitializer<Self>> {
                const OP: &str = stringify!($name);
                let config = $config {
                    $($field: $field.value(OP, stringify!($field))?),*
                    $(, $($named: $named.value(OP, stringify!($named))?),*)?
                };
                let fields = [$(stringify!($field)),* $(, $(stringify!($named)),*)?];
                let groups = params.groups(OP, config, &fields, |config, key, value| {
                    match key {
                        $(stringify!($field) => config.$field = entry::<<$type as Passed>::As>(OP, key, value)?,)*
                        $($(stringify!($named) => config.$named = entry::<<$named_type as Passed>::As>(OP, key, value)?,)*)?
                        _ => return Ok(false),
                    }
                    Ok(true)
                })?;
                let optimizer = Optimizer::new(optim::$name::with_groups(groups)?);
                Ok(PyClassInitializer::from(optimizer).add_subclass(Self))
            }
        }
    )*};
}

optimizers! {
    /// Stochastic gradient descent with momentum, as `torch.optim.SGD`.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0.
    ///     momentum: weight of the old momentum in each step; 0 for no momentum.
    ///     dampening: the gradient enters the momentum with weight 1 - dampening.
    ///     weight_decay: L2 penalty, added to the gradient.
    ///     nesterov: look ahead along the momentum; needs momentum > 0 and dampening 0.
    ///     maximize: ascend instead of descend.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    SGD(
        SGDConfig { lr: f64 = 1e-3, momentum: f64 = 0.0, dampening: f64 = 0.0, weight_decay: f64 = 0.0, nesterov: bool = false },
        only maximize: bool = false
    );

    /// Adam (Kingma & Ba 2015, arXiv:1412.6980), as `torch.optim.Adam`.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0.
    ///     betas: decay rates of the first and the second moment, each in [0, 1).
    ///     eps: added to the root of the second moment.
    ///     weight_decay: L2 penalty, added to the gradient.
    ///     amsgrad: divide by the largest second moment so far.
    ///     maximize: ascend instead of descend.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    Adam(
        AdamConfig { lr: f64 = 1e-3, betas: (f64, f64) = (0.9, 0.999), eps: f64 = 1e-8, weight_decay: f64 = 0.0, amsgrad: bool = false },
        only maximize: bool = false
    );

    /// Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), as `torch.optim.AdamW`.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0.
    ///     betas: decay rates of the first and the second moment, each in [0, 1).
    ///     eps: added to the root of the second moment.
    ///     weight_decay: each step multiplies the variables by 1 - lr * weight_decay.
    ///     amsgrad: divide by the largest second moment so far.
    ///     maximize: ascend instead of descend.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    AdamW(
        AdamConfig { lr: f64 = 1e-3, betas: (f64, f64) = (0.9, 0.999), eps: f64 = 1e-8, weight_decay: f64 = 1e-2, amsgrad: bool = false },
        only maximize: bool = false
    );

    /// Adam with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' `Adam8bit`.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0.
    ///     betas: decay rates of the first and the second moment, each in [0, 1).
    ///     eps: added to the root of the second moment.
    ///     weight_decay: each step multiplies the variables by 1 - lr * weight_decay.
    ///     min_8bit_size: variables with fewer elements keep their moments in f32.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    Adam8bit(
        Adam8bitConfig { lr: f64 = 1e-3, betas: (f64, f64) = (0.9, 0.999), eps: f64 = 1e-8, weight_decay: f64 = 0.0 },
        only min_8bit_size: Integer = Integer::of(4096)
    );

    /// AdamW with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' `AdamW8bit`.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0.
    ///     betas: decay rates of the first and the second moment, each in [0, 1).
    ///     eps: added to the root of the second moment.
    ///     weight_decay: each step multiplies the variables by 1 - lr * weight_decay.
    ///     min_8bit_size: variables with fewer elements keep their moments in f32.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    AdamW8bit(
        Adam8bitConfig { lr: f64 = 1e-3, betas: (f64, f64) = (0.9, 0.999), eps: f64 = 1e-8, weight_decay: f64 = 1e-2 },
        only min_8bit_size: Integer = Integer::of(4096)
    );

    /// Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0; 3 to 10 times smaller than Adam's.
    ///     betas: weight of the momentum in the update, and its decay rate; each in [0, 1).
    ///     weight_decay: each step multiplies the variables by 1 - lr * weight_decay.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    Lion(LionConfig { lr: f64 = 1e-4, betas: (f64, f64) = (0.9, 0.99), weight_decay: f64 = 0.0 });

    /// Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: learning rate, at least 0; 3 to 10 times smaller than Adam's.
    ///     betas: weight of the momentum in the update, and its decay rate; each in [0, 1).
    ///     weight_decay: each step multiplies the variables by 1 - lr * weight_decay.
    ///     min_8bit_size: variables with fewer elements keep their momentum in f32.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    Lion8bit(
        Lion8bitConfig { lr: f64 = 1e-4, betas: (f64, f64) = (0.9, 0.99), weight_decay: f64 = 0.0 },
        only min_8bit_size: Integer = Integer::of(4096)
    );
    /// Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), as `torch.optim.Adafactor`: the second moment of a matrix from
    /// those of its rows and columns.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: bound of the relative step size, at least 0: step t moves a variable by min(lr, 1 / sqrt(t)) of its root mean
    ///         square.
    ///     beta2_decay: at most 0; the second moments take the square of gradient t with weight t**beta2_decay.
    ///     eps: root of the least second moment (None for the precision of the dtype), and the least root mean square of a
    ///         variable.
    ///     d: at least 1; the root mean square of an update is clipped to it.
    ///     weight_decay: each step multiplies the variables by 1 - lr * weight_decay.
    ///     maximize: ascend instead of descend.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, there is no variable, or one appears twice.
    ///     DTypeError: if a variable's dtype is not supported.
    Adafactor(
        AdafactorConfig { lr: f64 = 1e-2, beta2_decay: f64 = -0.8, eps: (Option<f64>, f64) = (None, 1e-3), d: f64 = 1.0, weight_decay: f64 = 0.0 },
        only maximize: bool = false
    );

    /// Prodigy (Mishchenko & Defazio 2023, arXiv:2306.06101), as `prodigyopt.Prodigy`: AdamW that estimates its step size.
    ///
    /// All groups share one estimate d and their hyper-parameters, except weight_decay, eps and a learning rate of 0. The
    /// state dict has `estimate` (4), f64: d, its maximum, its numerator and the number of steps.
    ///
    /// Args:
    ///     params: variables, or dicts with an entry "params" and their own hyper-parameters.
    ///     lr: factor on the estimated step size, at least 0; leave it at 1 except for a schedule. A group with 0 does not change.
    ///     betas: decay rates of the first and the second moment, each in [0, 1).
    ///     beta3: decay rate of the sums behind the estimate, in [0, 1); None for the root of the second beta.
    ///     eps: added, times the estimate, to the root of the second moment; above 0.
    ///     weight_decay: each step multiplies the variables by 1 - d * lr * weight_decay.
    ///     decouple: False for weight decay as an L2 penalty, added to the gradient.
    ///     use_bias_correction: correct the first steps as Adam does.
    ///     safeguard_warmup: keep lr out of the estimate's denominator, which a warm-up would make too small.
    ///     d0: the first estimate, above 0.
    ///     d_coef: factor on the estimate, above 0; the way to tune the method.
    ///     growth_rate: the estimate grows by at most this factor in a step; at least 1.
    ///     slice_p: estimate from every slice_p-th element, at least 1; 11 saves almost half of the memory.
    ///
    /// Raises:
    ///     ArgumentError: if a number is out of range, groups differ where they must agree, there is no variable, or one
    ///         appears twice. `step` raises it if learning rates differ.
    ///     DTypeError: if a variable's dtype is not supported.
    Prodigy(
        ProdigyConfig {
            lr: f64 = 1.0, betas: (f64, f64) = (0.9, 0.999), beta3: Option<f64> = None, eps: f64 = 1e-8, weight_decay: f64 = 0.0,
            decouple: bool = true, use_bias_correction: bool = false, safeguard_warmup: bool = false, d0: f64 = 1e-6,
            d_coef: f64 = 1.0, growth_rate: f64 = f64::INFINITY
        },
        only slice_p: Integer = Integer::of(1)
    );
}
