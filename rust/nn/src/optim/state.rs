//! The states of an optimizer's variables: storage, saving and loading.

use std::collections::BTreeMap;

use half::bf16;
use smallvec::SmallVec;
use trainable_candle_core::capture::Fixed;
use trainable_candle_core::cpu::Elem;
use trainable_candle_core::{DType, Device, Error, Raw, Result, Tensor, Var};

use super::quant::BLOCK_SIZE;
use super::rule::{StateKind, StateSlice, StateSpec};

// Names of entries of a state dict; `MASTER` follows the index of a parameter. See `StateDict`.
const STEP: &str = "step";
const LR: &str = "lr";
const KIND: &str = "kind";
const MASTER: &str = "master";
const SEED: &str = "seed";

/// A copy of an optimizer's states on the CPU. Later steps do not change the copy. Its entries are:
///
/// - `INDEX.NAME`: the state NAME of parameter INDEX; indices count the parameters of all groups, from 0
/// - `INDEX.master`: the f32 master values of parameter INDEX, if it has any
/// - `step` (i64): the number of steps that each parameter has taken
/// - `lr` (f64): the learning rate of each group
/// - `kind` (u8): the bytes of the optimizer's name
/// - `seed` (i64): the bits of the seed of stochastic rounding, if the optimizer rounds stochastically
/// - states of the optimizer that belong to no parameter, under their names
///
/// A parameter that has taken no step has no states. [`EMA`](super::EMA) uses the same type for other entries.
pub type StateDict = BTreeMap<String, Tensor>;

/// Where the states of variables on a CUDA device are. Results do not depend on the place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StatePlace {
    /// In the memory of the device.
    #[default]
    Device,
    /// In pinned memory of the host, which steps read and write over the bus. Master values stay on the device.
    Host,
}

/// Variables that share hyper-parameters.
pub(super) struct Group<C> {
    pub(super) config: Fixed<C>,
    pub(super) parameters: Vec<Parameter>,
}

/// A variable with its states.
pub(super) struct Parameter {
    pub(super) var: Var,
    /// The number of steps taken. Once the states are on a device, the device counts the steps, and this number no
    /// longer changes.
    pub(super) step: u64,
    /// Empty before the first step, and while a device has the states.
    pub(super) states: SmallVec<[State; 4]>,
    pub(super) master: Option<Master>,
    /// The number of the variable's first element, as [`number_elements`] counts, if the variable and its states are
    /// rounded stochastically to bf16; otherwise None.
    pub(super) rounded: Option<u64>,
    /// The two sums over the variable that its last update wrote to [`Chunk::sums`](super::Chunk::sums). Only Prodigy
    /// uses them.
    pub(super) sums: [f64; 2],
}

/// A state of one variable.
pub(super) struct State {
    pub(super) spec: StateSpec,
    /// The values, of the dtype that [`State::dtype`] returns.
    pub(super) data: StateData,
}

/// The values of a state.
pub(super) enum StateData {
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    U8(Vec<u8>),
}

/// The f32 master values of an f16 or bf16 variable.
pub(super) struct Master {
    pub(super) values: Vec<f32>,
    /// The version of the variable when the values were written. If the variable has another version, it was set
    /// outside the optimizer.
    pub(super) version: u64,
}

/// The element types of states that are neither codes nor their scales.
pub(super) trait Number: Elem {
    fn zeros(len: usize) -> StateData;
    /// The values of `data`; None if they have another type.
    fn slice(data: &mut StateData) -> Option<&mut [Self]>;
}

macro_rules! number {
    ($($type:ty: $variant:ident, $zero:expr;)*) => {$(
        impl Number for $type {
            fn zeros(len: usize) -> StateData {
                StateData::$variant(vec![$zero; len])
            }

            fn slice(data: &mut StateData) -> Option<&mut [Self]> {
                if let StateData::$variant(data) = data { Some(data) } else { None }
            }
        }
    )*};
}

number! {
    bf16: BF16, bf16::ZERO;
    f32: F32, 0.0;
    f64: F64, 0.0;
}

impl StateData {
    /// The size of the values in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::BF16(data) => size_of_val(data.as_slice()),
            Self::F32(data) => size_of_val(data.as_slice()),
            Self::F64(data) => size_of_val(data.as_slice()),
            Self::U8(data) => data.len(),
        }
    }
}

impl State {
    fn zeros<T: Number>(spec: StateSpec, dims: &[usize]) -> Self {
        let len = spec.kind.dims(dims).iter().product();
        let data = match spec.kind {
            StateKind::Float | StateKind::Rows | StateKind::Columns | StateKind::Every(_) => T::zeros(len),
            StateKind::Codes => StateData::U8(vec![0; len]),
            StateKind::Scales => StateData::F32(vec![0.0; len]),
        };
        Self { spec, data }
    }

    /// The values as the slice that an update computing in `T` takes.
    pub(super) fn slice<T: Number>(&mut self) -> StateSlice<'_, T> {
        const STORED_AS_T: &str = "make_states and State::from_tensor store unquantized states as T";
        match (self.spec.kind, &mut self.data) {
            (StateKind::Codes, StateData::U8(data)) => StateSlice::Codes(data),
            (StateKind::Scales, StateData::F32(data)) => StateSlice::Scales(data),
            (_, data) => StateSlice::Float(T::slice(data).expect(STORED_AS_T)),
        }
    }

    /// The dtype of the state `spec` of `parameter`.
    fn dtype(spec: StateSpec, parameter: &Parameter) -> DType {
        match spec.kind {
            StateKind::Codes => DType::U8,
            StateKind::Scales => DType::F32,
            _ if parameter.rounded.is_some() => DType::BF16,
            _ if parameter.var.dtype() == DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    fn to_tensor(&self, var: &Var) -> Result<Tensor> {
        let dims = self.spec.kind.dims(var.dims());
        match &self.data {
            StateData::BF16(data) => Tensor::from_vec(data.clone(), dims, &Device::Cpu),
            StateData::F32(data) => Tensor::from_vec(data.clone(), dims, &Device::Cpu),
            StateData::F64(data) => Tensor::from_vec(data.clone(), dims, &Device::Cpu),
            StateData::U8(data) => Tensor::from_vec(data.clone(), dims, &Device::Cpu),
        }
    }

    fn from_tensor(spec: StateSpec, tensor: &Tensor) -> Result<Self> {
        let data = match tensor.dtype() {
            DType::U8 => StateData::U8(tensor.to_vec()?),
            DType::F64 => StateData::F64(tensor.to_vec()?),
            DType::BF16 => StateData::BF16(tensor.to_vec()?),
            _ => StateData::F32(tensor.to_vec()?),
        };
        Ok(Self { spec, data })
    }
}

impl Parameter {
    pub(super) fn new(var: Var) -> Self {
        Self { var, step: 0, states: SmallVec::new(), master: None, rounded: None, sums: [0.0; 2] }
    }

    /// The same variable, before its first step.
    pub(super) fn fresh(&self) -> Self {
        Self { rounded: self.rounded, ..Self::new(self.var.clone()) }
    }

    /// Whether updates compute on f32 master values and round them to the variable's dtype. The first step makes the
    /// master values.
    pub(super) fn has_master(&self) -> bool {
        self.rounded.is_none() && matches!(self.var.dtype(), DType::F16 | DType::BF16)
    }

    /// Makes the states if there are none yet.
    pub(super) fn make_states<T: Number>(&mut self, specs: &[StateSpec]) {
        if self.states.is_empty() {
            let dims = self.var.dims();
            self.states = specs.iter().map(|&spec| State::zeros::<T>(spec, dims)).collect();
        }
    }

    /// Whether the existing states are those of `specs`; true before the first step. Not for states on a device.
    pub(super) fn states_are(&self, specs: &[StateSpec]) -> bool {
        self.step == 0 || self.states.iter().map(|s| &s.spec).eq(specs)
    }

    /// Copies of the state with index `number` and of the master values, if there are any.
    pub(super) fn state(&self, number: usize) -> Result<(Raw, Option<Raw>)> {
        let copy = |master: &Master| Raw::from_slice(&master.values, self.var.shape(), &Device::Cpu);
        let state = self.states[number].to_tensor(&self.var)?;
        Ok((state.raw().clone(), self.master.as_ref().map(copy).transpose()?))
    }

    /// The size of the states and of the master values in bytes.
    pub(super) fn bytes(&self) -> usize {
        let states = self.states.iter().map(|state| state.data.bytes());
        states.sum::<usize>() + self.master.as_ref().map_or(0, |m| size_of_val(m.values.as_slice()))
    }
}

/// Numbers the elements of all variables of `groups`, and sets [`Parameter::rounded`] of the bf16 variables, which will
/// be rounded stochastically. The number of a variable's first element is a multiple of [`BLOCK_SIZE`] and depends only
/// on the sizes of the variables before this variable.
pub(super) fn number_elements<C>(groups: &mut [Group<C>]) {
    let mut next = 0;
    for parameter in groups.iter_mut().flat_map(|group| &mut group.parameters) {
        parameter.rounded = (parameter.var.dtype() == DType::BF16).then_some(next);
        next += parameter.var.elem_count().next_multiple_of(BLOCK_SIZE) as u64;
    }
}

/// Makes a state dict, to which the caller adds the states that belong to no parameter. `lrs` has the learning rate of
/// each group, `seed` is the seed of stochastic rounding.
pub(super) fn to_dict(
    name: &'static str,
    parameters: &[&Parameter],
    lrs: Vec<f64>,
    seed: Option<u64>,
) -> Result<StateDict> {
    let mut dict = StateDict::new();
    for (index, parameter) in parameters.iter().enumerate() {
        for state in &parameter.states {
            dict.insert(format!("{index}.{}", state.spec.name), state.to_tensor(&parameter.var)?);
        }
        if let Some(master) = &parameter.master {
            let values = Tensor::from_vec(master.values.clone(), parameter.var.dims(), &Device::Cpu)?;
            dict.insert(format!("{index}.{MASTER}"), values);
        }
    }
    let steps: Vec<i64> = parameters.iter().map(|p| p.step as i64).collect();
    let (parameter_count, group_count) = (steps.len(), lrs.len());
    dict.insert(STEP.into(), Tensor::from_vec(steps, parameter_count, &Device::Cpu)?);
    dict.insert(KIND.into(), Tensor::from_vec(name.as_bytes().to_vec(), name.len(), &Device::Cpu)?);
    dict.insert(LR.into(), Tensor::from_vec(lrs, group_count, &Device::Cpu)?);
    if let Some(seed) = seed {
        dict.insert(SEED.into(), Tensor::from_vec(vec![seed.cast_signed()], 1, &Device::Cpu)?);
    }
    Ok(dict)
}

/// The contents of a state dict.
pub(super) struct Loaded {
    /// The parameters with their states.
    pub(super) parameters: Vec<Parameter>,
    /// The learning rate of each group.
    pub(super) lrs: Vec<f64>,
    /// The seed of stochastic rounding, if the optimizer rounds stochastically.
    pub(super) seed: Option<u64>,
}

/// Reads a state dict, from which the caller has removed the states that belong to no parameter. `specs` has the states
/// of each of `parameters`, in the same order; `rounds` says whether the optimizer rounds stochastically.
///
/// Returns an error if the states were saved by another kind of optimizer or with other rounding, if an entry is
/// missing or not expected, if it has another dtype or shape, or if a number of steps is negative.
pub(super) fn from_dict(
    name: &'static str,
    parameters: &[&Parameter],
    specs: &[SmallVec<[StateSpec; 4]>],
    group_count: usize,
    rounds: bool,
    dict: &StateDict,
) -> Result<Loaded> {
    let reader = Reader { name, dict };
    reader.check_kind()?;
    let seed = reader.seed(rounds)?;
    let steps: Vec<i64> = reader.get(STEP, DType::I64, &[parameters.len()])?.to_vec()?;
    let lrs: Vec<f64> = reader.get(LR, DType::F64, &[group_count])?.to_vec()?;
    // The entries read so far: kind, step and lr, and the seed if there is one.
    let mut read_count = 3 + usize::from(rounds);
    let mut loaded = Vec::with_capacity(parameters.len());
    for (index, ((parameter, parameter_specs), &step)) in parameters.iter().zip(specs).zip(&steps).enumerate() {
        let var = &parameter.var;
        let step = u64::try_from(step)
            .map_err(|_| reader.error(format!("parameter {index} has taken {step} steps, expected 0 or more")))?;
        let mut new = Parameter { step, ..parameter.fresh() };
        if step > 0 {
            for &spec in parameter_specs {
                let key = format!("{index}.{}", spec.name);
                let tensor = reader.get(&key, State::dtype(spec, parameter), &spec.kind.dims(var.dims()))?;
                new.states.push(State::from_tensor(spec, tensor)?);
                read_count += 1;
            }
            if parameter.has_master() {
                let values = reader.get(&format!("{index}.{MASTER}"), DType::F32, var.dims())?.to_vec()?;
                new.master = Some(Master { values, version: var.version() });
                read_count += 1;
            }
        }
        loaded.push(new);
    }
    if dict.len() != read_count {
        let expected = |key: &&String| {
            let Some((index, state)) = key.split_once('.') else {
                return [KIND, STEP, LR, SEED].contains(&key.as_str());
            };
            // Indices such as "00" and "+0" parse as well, but entries do not have them.
            let number = index.parse::<usize>().ok().filter(|number| number.to_string() == index);
            let parameter = number.and_then(|number| loaded.get(number));
            parameter.is_some_and(|p| {
                p.states.iter().any(|s| s.spec.name == state) || (p.master.is_some() && state == MASTER)
            })
        };
        let unexpected: Vec<&String> = dict.keys().filter(|key| !expected(key)).collect();
        let count = unexpected.len();
        return Err(reader
            .error(format!("found {count} entries that this optimizer does not have, the first: {}", unexpected[0])));
    }
    Ok(Loaded { parameters: loaded, lrs, seed })
}

/// Reads the entries of a state dict for the optimizer `name`.
struct Reader<'a> {
    name: &'static str,
    dict: &'a StateDict,
}

impl<'a> Reader<'a> {
    fn error(&self, message: String) -> Error {
        Error::Config(format!("load_state_dict: {}: {message}", self.name))
    }

    /// Checks that the states were saved by an optimizer of the same name.
    fn check_kind(&self) -> Result<()> {
        let Some(kind) = self.dict.get(KIND).filter(|kind| kind.dtype() == DType::U8) else {
            return Err(
                self.error(format!("the entry {KIND:?} is missing or not u8; expected what state_dict() returned"))
            );
        };
        let kind = kind.to_vec::<u8>()?;
        if kind == self.name.as_bytes() {
            return Ok(());
        }
        let saved_by = String::from_utf8_lossy(&kind);
        Err(self.error(format!("the states were saved by {saved_by}; load them into {saved_by}")))
    }

    /// The seed of stochastic rounding; None if the optimizer does not round stochastically (`rounds` is false).
    ///
    /// Returns an error if only one of the optimizer and the saved states uses stochastic rounding.
    fn seed(&self, rounds: bool) -> Result<Option<u64>> {
        match (rounds, self.dict.contains_key(SEED)) {
            (false, false) => Ok(None),
            (true, true) => Ok(Some(self.get(SEED, DType::I64, &[1])?.to_vec::<i64>()?[0].cast_unsigned())),
            (true, false) => Err(self.error(
                "the states were saved without stochastic rounding; build the optimizer with stochastic_rounding=False"
                    .to_owned(),
            )),
            (false, true) => Err(self.error(
                "the states were saved with stochastic rounding; build the optimizer with stochastic_rounding=True"
                    .to_owned(),
            )),
        }
    }

    /// The entry `key`. Returns an error if it is missing or has another dtype or shape.
    fn get(&self, key: &str, dtype: DType, dims: &[usize]) -> Result<&'a Tensor> {
        let Some(tensor) = self.dict.get(key) else {
            return Err(self.error(format!(
                "the state {key:?} is missing; were the states saved with the same parameters and hyper-parameters?"
            )));
        };
        if tensor.dtype() != dtype {
            let (found, expected) = (tensor.dtype().as_str(), dtype.as_str());
            return Err(Error::dtype("load_state_dict", format!("{key:?} is {found}, expected {expected}")));
        }
        if tensor.dims() != dims {
            return Err(Error::shape(
                "load_state_dict",
                format!("{key:?} has shape {:?}, expected {dims:?}", tensor.dims()),
            ));
        }
        Ok(tensor)
    }
}
