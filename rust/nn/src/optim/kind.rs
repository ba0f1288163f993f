//! [`OptimizerKind`] describes an optimizer for code that selects it by name: its hyper-parameters, its states and its
//! constructor.

use smallvec::SmallVec;
use trainable_candle_core::{Error, Result, Var};

use super::rule::StateSpec;
use super::stepper::{Optimizer, ParamGroup};

/// The value of a hyper-parameter. All values of a hyper-parameter have the same variant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A number.
    Number(f64),
    /// A number or `None`.
    Optional(Option<f64>),
    /// Two numbers.
    Pair((f64, f64)),
    /// Three numbers.
    Triple((f64, f64, f64)),
    /// Two numbers, of which the first may be `None`.
    OptionalPair((Option<f64>, f64)),
    /// A boolean.
    Switch(bool),
    /// A whole number of at least 0.
    Count(usize),
}

/// The type of a hyper-parameter in a configuration.
pub(super) trait Hyper: Copy {
    /// Converts to a value.
    fn value(self) -> Value;
    /// Converts from a value; None if the value has another type.
    fn of(value: Value) -> Option<Self>;
}

macro_rules! hyper {
    ($($type:ty: $variant:ident),*) => {$(
        impl Hyper for $type {
            fn value(self) -> Value {
                Value::$variant(self)
            }

            fn of(value: Value) -> Option<Self> {
                if let Value::$variant(value) = value { Some(value) } else { None }
            }
        }
    )*};
}

hyper!(
    f64: Number, Option<f64>: Optional, (f64, f64): Pair, (f64, f64, f64): Triple, (Option<f64>, f64): OptionalPair,
    bool: Switch, usize: Count
);

/// A hyper-parameter of a configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Field {
    /// The name of the hyper-parameter.
    pub name: &'static str,
    /// The meaning and the range of the hyper-parameter: the documentation of the configuration's field.
    pub doc: &'static str,
    /// The value in the configuration; the default if the configuration is [`Registered::defaults`].
    pub value: Value,
}

/// A configuration whose fields can be listed and set by name. The macro `hyper_parameters` implements it.
pub trait HyperParameters: Clone {
    /// Returns the fields with their values, in the order of their declaration.
    fn fields(&self) -> Vec<Field>;

    /// Sets a field; returns false if there is no field of this name and type.
    fn set(&mut self, name: &str, value: Value) -> bool;
}

/// Declares a configuration: a struct whose documented fields are the hyper-parameters.
macro_rules! hyper_parameters {
    ($(#[$meta:meta])* pub struct $config:ident { $($(#[doc = $doc:literal])* pub $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $config {
            $($(#[doc = $doc])* pub $field: $type,)*
        }

        impl $crate::optim::kind::HyperParameters for $config {
            fn fields(&self) -> Vec<$crate::optim::kind::Field> {
                use $crate::optim::kind::{Field, Hyper};
                vec![$(Field { name: stringify!($field), doc: concat!($($doc),*), value: Hyper::value(self.$field) }),*]
            }

            fn set(&mut self, name: &str, value: $crate::optim::kind::Value) -> bool {
                match name {
                    $(stringify!($field) => {
                        $crate::optim::kind::Hyper::of(value).map(|value| self.$field = value).is_some()
                    })*
                    _ => false,
                }
            }
        }
    };
}
pub(super) use hyper_parameters;

/// An optimizer that the registry can hold.
pub trait Registered: Optimizer + Sized + 'static {
    /// The hyper-parameters of a group of variables.
    type Config: HyperParameters;
    /// The name of the optimizer's class.
    const NAME: &'static str;
    /// What the optimizer is, in a sentence or two that cite the paper or the implementation that it follows.
    const ABOUT: &'static str;
    /// The number of hyper-parameters that the reference implementation takes by position; the others are passed by
    /// name.
    const POSITIONAL: usize;
    /// Whether the optimizer can round bf16 variables stochastically.
    const ROUNDS: bool = false;

    /// Returns the default hyper-parameters.
    fn defaults() -> Self::Config;

    /// Returns the states kept for a parameter of shape `dims`.
    fn states(config: &Self::Config, dims: &[usize]) -> SmallVec<[StateSpec; 4]>;

    /// Makes the optimizer of several groups of variables. With a `seed`, the optimizer rounds bf16 variables
    /// stochastically ([`Stepper::with_stochastic_rounding`](super::Stepper::with_stochastic_rounding)).
    ///
    /// # Errors
    /// Those of the optimizer's constructor; if there is a seed, [`Error::Argument`] if the optimizer cannot round
    /// stochastically, and [`Error::DType`] if no variable is bf16.
    fn build(groups: Vec<ParamGroup<Self::Config>>, seed: Option<u64>) -> Result<Self>;
}

/// Implements [`Registered`] for the [`Stepper`](super::Stepper) of a rule. Arguments: the rule,
/// [`ABOUT`](Registered::ABOUT), [`POSITIONAL`](Registered::POSITIONAL) after the label `positional:`, and the default
/// hyper-parameters.
macro_rules! registered {
    ($rule:ty, $about:literal, positional: $positional:literal, $defaults:expr) => {
        impl $crate::optim::kind::Registered for $crate::optim::Stepper<$rule> {
            type Config = <$rule as $crate::optim::Rule>::Config;
            const NAME: &'static str = <$rule as $crate::optim::Rule>::NAME;
            const ABOUT: &'static str = $about;
            const POSITIONAL: usize = $positional;
            // Only updates of one element at a time can round stochastically.
            const ROUNDS: bool = <$rule as $crate::optim::Rule>::ELEMENTWISE;

            fn defaults() -> Self::Config {
                $defaults
            }

            fn states(
                config: &Self::Config,
                dims: &[usize],
            ) -> smallvec::SmallVec<[$crate::optim::rule::StateSpec; 4]> {
                <$rule as $crate::optim::Rule>::states(config, dims)
            }

            fn build(
                groups: Vec<$crate::optim::ParamGroup<Self::Config>>,
                seed: Option<u64>,
            ) -> trainable_candle_core::Result<Self> {
                let optimizer = Self::with_groups(groups)?;
                match seed {
                    Some(seed) => optimizer.with_stochastic_rounding(seed),
                    None => Ok(optimizer),
                }
            }
        }
    };
}
pub(super) use registered;

/// Variables, and the hyper-parameters (name and value) whose values differ from the defaults.
pub type NamedGroup<'a> = (Vec<Var>, Vec<(&'a str, Value)>);

/// An optimizer in the registry.
#[derive(Debug)]
pub struct OptimizerKind {
    /// The name of the optimizer's class.
    pub name: &'static str,
    /// What the optimizer is, in a sentence or two that cite the paper or the implementation that it follows.
    pub about: &'static str,
    /// The number of hyper-parameters that the reference implementation takes by position; the others are passed by
    /// name.
    pub positional: usize,
    /// Whether the optimizer can round bf16 variables stochastically.
    pub rounds: bool,
    /// The hyper-parameters with their defaults, in the order of their declaration.
    pub fields: fn() -> Vec<Field>,
    /// The states of a parameter of shape `dims`, with default hyper-parameters.
    pub states: fn(dims: &[usize]) -> SmallVec<[StateSpec; 4]>,
    make: Make,
}

/// Makes an optimizer of groups of variables. With a seed, the optimizer rounds bf16 variables stochastically.
type Make = fn(Vec<NamedGroup<'_>>, Option<u64>) -> Result<Box<dyn Optimizer>>;

impl OptimizerKind {
    /// Describes the optimizer `T`.
    pub(super) const fn of<T: Registered>() -> Self {
        Self {
            name: T::NAME,
            about: T::ABOUT,
            positional: T::POSITIONAL,
            rounds: T::ROUNDS,
            fields: || T::defaults().fields(),
            states: |dims| T::states(&T::defaults(), dims),
            make: make::<T>,
        }
    }

    /// Makes the optimizer of groups of variables. With a `seed`, the optimizer rounds bf16 variables stochastically.
    ///
    /// # Errors
    /// [`Error::Argument`] if the optimizer has no hyper-parameter of a given name and type; the errors of
    /// [`Registered::build`].
    pub fn build(&self, groups: Vec<NamedGroup<'_>>, seed: Option<u64>) -> Result<Box<dyn Optimizer>> {
        (self.make)(groups, seed)
    }

    /// Returns the name of the optimizer in options: the class name in lower case.
    pub fn option(&self) -> String {
        self.name.to_lowercase()
    }

    /// Finds the optimizer with this name in options ([`option`](Self::option)); `None` if there is none.
    pub fn find(option: &str) -> Option<&'static Self> {
        super::KINDS.iter().find(|kind| kind.option() == option)
    }

    /// Returns the bytes of a parameter's states with default hyper-parameters. The parameter has the shape `dims`. It
    /// is bf16 and rounded stochastically if `rounded`, otherwise f32.
    pub fn state_bytes(&self, dims: &[usize], rounded: bool) -> usize {
        (self.states)(dims).iter().map(|state| state.kind.bytes(dims, rounded)).sum()
    }
}

fn make<T: Registered>(groups: Vec<NamedGroup<'_>>, seed: Option<u64>) -> Result<Box<dyn Optimizer>> {
    let group = |(params, settings): NamedGroup<'_>| {
        let mut config = T::defaults();
        for (name, value) in settings {
            if !config.set(name, value) {
                let names: Vec<&str> = config.fields().iter().map(|field| field.name).collect();
                let message =
                    format!("found {name} = {value:?}, expected one of {}, with a value of its type", names.join(", "));
                return Err(Error::argument(T::NAME, message));
            }
        }
        Ok(ParamGroup { params, config })
    };
    Ok(Box::new(T::build(groups.into_iter().map(group).collect::<Result<_>>()?, seed)?))
}
