//! Stand-ins for the types and functions of the module `cuda` in a build without CUDA. In such a build no variable is
//! on a CUDA device, so no value of these types ever exists. The module `cuda` documents the functions and their
//! arguments, whose names have no `_` there.

use std::convert::Infallible;

use trainable_candle_core::{Device, Error, Raw, Result, Tensor, Var};

use super::rule::Rule;
use super::state::{Group, Parameter, StatePlace};

/// Returns the error of a function that needs CUDA.
fn unavailable<T>() -> Result<T> {
    Err(Error::CudaUnavailable("this build has no CUDA support".to_owned()))
}

/// The norm of gradients and the factor that clips them.
pub struct Clip(Infallible);

impl Clip {
    pub fn of(
        _op: &'static str,
        _device: &Device,
        _vectors: &[Raw],
        _is_max: bool,
        _max_norm: f64,
        _loss_scale: Option<&LossScale>,
    ) -> Result<Self> {
        unavailable()
    }

    pub fn norm(&self) -> Result<Raw> {
        match self.0 {}
    }
}

pub fn scale_gradients(
    _op: &'static str,
    _gradients: &Raw,
    _clip: Option<&Clip>,
    _loss_scale: Option<&LossScale>,
) -> Result<()> {
    unavailable()
}

/// The state of dynamic loss scaling.
#[derive(Clone, Debug)]
pub struct LossScale(Infallible);

impl LossScale {
    pub fn new(_device: &Device, _scale: f64, _growth_tracker: u64) -> Result<Self> {
        unavailable()
    }

    pub fn scale(&self) -> Result<Raw> {
        match self.0 {}
    }

    pub fn read(&self) -> Result<(f64, u64)> {
        match self.0 {}
    }

    pub fn set(&self, _scale: f64, _growth_tracker: u64) -> Result<()> {
        match self.0 {}
    }

    pub fn update(&self, _norm: &Raw, _growth: f64, _backoff: f64, _interval: u64) -> Result<()> {
        match self.0 {}
    }
}

/// The device state of an optimizer.
pub struct OnDevice(Infallible);

impl OnDevice {
    pub fn new<R: Rule>(
        _groups: &mut [Group<R::Config>],
        _place: StatePlace,
        _shared_and_seed: (&[f64], Option<u64>),
    ) -> Result<Self> {
        unavailable()
    }

    /// Takes over the states, steps and settings of the groups, and the seed.
    pub fn take<R: Rule>(&mut self, _groups: &mut [Group<R::Config>], _seed: Option<u64>) -> Result<()> {
        match self.0 {}
    }

    /// Tells whether the group would have the same states with other hyper-parameters.
    pub fn states_are<R: Rule>(&self, _groups: &[Group<R::Config>], _index: usize, _config: &R::Config) -> bool {
        match self.0 {}
    }

    pub fn configure<R: Rule>(&self, _index: usize, _config: &R::Config) -> Result<()> {
        match self.0 {}
    }

    pub fn step<R: Rule>(
        &mut self,
        _groups: &[Group<R::Config>],
        _wanted: impl Fn(&Var) -> bool,
        _guard: (Option<&Tensor>, Option<&LossScale>),
        _zero: bool,
    ) -> Result<()> {
        match self.0 {}
    }

    pub fn shared(&self) -> Result<Vec<f64>> {
        match self.0 {}
    }

    pub fn set_shared(&self, _numbers: &[f64]) -> Result<()> {
        match self.0 {}
    }

    pub fn steps(&self) -> Result<Vec<u64>> {
        match self.0 {}
    }

    pub fn state(&self, _var: &Var, _index: usize, _state: usize) -> Result<(Raw, Option<Raw>)> {
        match self.0 {}
    }

    pub fn mark_master_current(&self, _var: &Var, _index: usize) {
        match self.0 {}
    }

    /// Invalidates the device state for all later steps.
    pub fn retire(&self) -> Result<()> {
        match self.0 {}
    }

    pub fn download<C>(&self, _groups: &[Group<C>]) -> Result<Vec<Parameter>> {
        match self.0 {}
    }

    pub fn state_bytes(&self) -> usize {
        match self.0 {}
    }
}
