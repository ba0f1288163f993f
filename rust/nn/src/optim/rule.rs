//! [`Rule`]: the arithmetic of an optimizer.

use half::bf16;
use smallvec::SmallVec;
use trainable_candle_core::{Error, Result};

use super::quant::BLOCK_SIZE;

pub use trainable_candle_cuda::structs::Settings;

/// The arithmetic of an optimizer and the states that it keeps. [`Stepper`](super::Stepper) does everything else.
///
/// An update is elementwise ([`ELEMENTWISE`](Self::ELEMENTWISE)) or needs whole variables. In an elementwise update,
/// blocks of [`BLOCK_SIZE`] elements may share a scale of their 8-bit states.
pub trait Rule: Sized + Send + Sync + 'static {
    /// The optimizer's name; error messages start with it.
    const NAME: &'static str;

    /// The hyper-parameters of a group of parameters.
    type Config: Clone + std::fmt::Debug + PartialEq + Send + Sync + 'static;

    /// The update of f32 values. f16 and bf16 variables are updated in f32 too.
    const UPDATE: Update<Self::Config, f32>;

    /// The update of f64 values, if the optimizer takes f64 variables.
    const UPDATE_F64: Option<Update<Self::Config, f64>>;

    /// The kernels of the update on CUDA devices; without them, the optimizer does not support such devices.
    const KERNELS: Option<Kernels<Self::Config>> = None;

    /// Whether a variable may be updated in chunks, on several threads. If not, the update gets the whole variable; on
    /// a CUDA device one block of threads updates it.
    const ELEMENTWISE: bool = true;

    /// The average that replaces the parameters outside of training, if the optimizer keeps one.
    const AVERAGE: Option<Average<Self::Config>> = None;

    /// Whether the update increments the step counter. A step may consist of two rules, one run after the other; then
    /// only the first one counts the step.
    const COUNTS: bool = true;

    /// Checks the ranges of hyper-parameters.
    ///
    /// # Errors
    /// [`Error::Argument`] that names the first hyper-parameter outside its range.
    fn validate(config: &Self::Config) -> Result<()>;

    /// Returns the states kept for a parameter of shape `dims`.
    fn states(config: &Self::Config, dims: &[usize]) -> SmallVec<[StateSpec; 4]>;

    /// Returns the number of f32 values of scratch memory that the update of a variable of shape `dims` needs on a CUDA
    /// device.
    fn scratch(_dims: &[usize]) -> usize {
        0
    }

    /// Returns the learning rate in `config`, to be read or set.
    fn lr(config: &mut Self::Config) -> &mut f64;
}

/// The average of a parameter over the steps, which replaces the parameter outside of training. It is
/// `parameter + weight * (state - parameter)`, where `state` is a state of the parameter's shape.
#[derive(Clone, Copy)]
pub struct Average<C> {
    /// The index of the state in [`Rule::states`].
    pub state: usize,
    /// Computes the weight from the hyper-parameters of the group; the weight may be negative.
    pub weight: fn(&C) -> f64,
}

/// The kernels of a rule, in the files `optim*.cu` of `kernels/`.
#[derive(Clone, Copy)]
pub struct Kernels<C> {
    /// The kernel `<prepare>_prepare` begins a step: it computes the coefficients of the update from the
    /// hyper-parameters of each group.
    pub prepare: &'static str,
    /// The kernel that updates variables without 8-bit states: `<step>_step` (`<step>_rounded` for variables that are
    /// rounded stochastically), or `step` itself if the rule is not elementwise.
    pub step: &'static str,
    /// The kernels that run before `step` in each step, for rules that are not elementwise. An entry has the kernel's
    /// name, and whether one block of threads processes all variables of a launch.
    pub before: &'static [(&'static str, bool)],
    /// The kernel that updates variables with 8-bit states, if the rule has such states: `<step_8bit>_step` or
    /// `<step_8bit>_rounded`.
    pub step_8bit: Option<&'static str>,
    /// Converts the hyper-parameters of a group to the structure that kernels read. Fields that an optimizer lacks are
    /// 0.
    pub settings: fn(&C) -> Settings,
}

/// Updates a chunk in step number `step`, which counts from 1.
pub type Update<C, T> = fn(config: &C, step: u64, chunk: Chunk<'_, T>);

/// Consecutive elements of one parameter, or all elements of the parameter, with their gradients and states. A chunk
/// starts at a multiple of [`BLOCK_SIZE`] elements.
pub struct Chunk<'a, T> {
    /// The shape of the whole parameter.
    pub dims: &'a [usize],
    /// The values of the elements, which the update changes.
    pub param: &'a mut [T],
    /// The gradients of the elements.
    pub grad: &'a [T],
    /// The states in the order of [`Rule::states`]; all zeros before the first step.
    pub states: SmallVec<[StateSlice<'a, T>; 4]>,
    /// Where the update may write two sums over the chunk's elements, from which the optimizer Prodigy estimates its
    /// learning rate. Other updates ignore this. None if the chunk is a part of a variable, or if the
    /// variable is rounded stochastically.
    pub sums: Option<&'a mut [f64; 2]>,
}

/// The part of one state that belongs to a chunk.
pub enum StateSlice<'a, T> {
    /// Numbers: one for each element, row or column, or one for every n elements.
    Float(&'a mut [T]),
    /// An 8-bit code for each element.
    Codes(&'a mut [u8]),
    /// A scale for each [`BLOCK_SIZE`] elements.
    Scales(&'a mut [f32]),
}

/// A state that an optimizer keeps for each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// The name of the state in a state dict.
    pub name: &'static str,
    /// What the entries of the state are.
    pub kind: StateKind,
}

/// What the entries of a state are, and to which elements of the parameter they belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// A number for each element: f64 for f64 parameters, bf16 for those that are rounded stochastically, otherwise
    /// f32.
    Float,
    /// An 8-bit code for each element.
    Codes,
    /// A scale (f32) for each [`BLOCK_SIZE`] elements.
    Scales,
    /// As `Float`, with one number for each row of each matrix (the last two dimensions of the parameter).
    Rows,
    /// As `Float`, with one number for each column of each matrix (the last two dimensions of the parameter).
    Columns,
    /// As `Float`, with one number for the first element and every n-th element after it; n is at least 1.
    Every(usize),
}

impl StateKind {
    /// Returns the shape of the state of a parameter of shape `dims`.
    pub(crate) fn dims(self, dims: &[usize]) -> Vec<usize> {
        let mut shape = dims.to_vec();
        match (self, shape.as_mut_slice()) {
            (Self::Scales, _) => return vec![dims.iter().product::<usize>().div_ceil(BLOCK_SIZE)],
            (Self::Every(n), _) => return vec![dims.iter().product::<usize>().div_ceil(n)],
            (Self::Rows, [.., reduced]) | (Self::Columns, [.., reduced, _]) => *reduced = 1,
            _ => {}
        }
        shape
    }

    /// Returns the bytes of the state of a parameter of shape `dims`, which is bf16 and rounded stochastically if
    /// `rounded`, otherwise f32.
    pub(crate) fn bytes(self, dims: &[usize], rounded: bool) -> usize {
        let element = match self {
            Self::Codes => size_of::<u8>(),
            Self::Scales => size_of::<f32>(),
            _ if rounded => size_of::<bf16>(),
            _ => size_of::<f32>(),
        };
        element * self.dims(dims).iter().product::<usize>()
    }

    /// Makes the description of a state of this kind that is called `name`.
    pub(crate) const fn named(self, name: &'static str) -> StateSpec {
        StateSpec { name, kind: self }
    }
}

impl<'a, T> StateSlice<'a, T> {
    /// Lends the state, so that `self` can be used again afterwards.
    pub(crate) fn reborrow(&mut self) -> StateSlice<'_, T> {
        match self {
            Self::Float(data) => StateSlice::Float(data),
            Self::Codes(data) => StateSlice::Codes(data),
            Self::Scales(data) => StateSlice::Scales(data),
        }
    }

    /// Splits the state of an elementwise update after the entries of the first `at` elements, a multiple of
    /// [`BLOCK_SIZE`]. For such an update, `Float` has one entry for each element.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Float(data) => {
                let (data, rest) = data.split_at_mut(at);
                (Self::Float(data), Self::Float(rest))
            }
            Self::Codes(data) => {
                let (data, rest) = data.split_at_mut(at);
                (Self::Codes(data), Self::Codes(rest))
            }
            Self::Scales(data) => {
                let (data, rest) = data.split_at_mut(at / BLOCK_SIZE);
                (Self::Scales(data), Self::Scales(rest))
            }
        }
    }
}

/// Checks that the hyper-parameter `name` is a finite number of at least 0.
pub(crate) fn check_not_negative(op: &'static str, name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::argument(op, format!("found {name} {value}, expected a number of at least 0")))
}

/// Checks that both betas are in [0, 1).
pub(crate) fn check_betas(op: &'static str, betas: (f64, f64)) -> Result<()> {
    for beta in [betas.0, betas.1] {
        if !(0.0..1.0).contains(&beta) {
            return Err(Error::argument(
                op,
                format!("found betas {betas:?}, expected both at least 0 and less than 1"),
            ));
        }
    }
    Ok(())
}
