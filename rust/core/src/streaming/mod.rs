//! Frozen weights that are kept in the memory of the host, or split into slices, one on each device of a machine.
//! Before a weight is used, it is copied to the device that uses it.
//!
//! A unit is a set of weights that are used together: those of one block of a model. A [`Ring`] has two slots on the
//! device. While the device computes with the unit in one slot, a second CUDA stream fills the other slot with the unit
//! that is needed next. A block calls [`Ring::enter`] with its unit before it runs. All units share the memory of the
//! slots, so a [`Streamed`] weight has values only while its unit is the one that was entered last. Every use of the
//! weight checks this; at any other time, the use returns an error. Operations get the values from [`Streamed::here`]
//! and do not keep them; a backward pass calls `here` again.

mod held;
mod packing;
mod pages;
mod ring;
mod shards;
mod sharing;
mod unit;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use candle_core::{DType, Device};

pub use crate::cuda::streaming::{is_staging, pinnable};
pub(crate) use pages::Pages;
pub use ring::Ring;
pub use sharing::{Exchange, Origin, Sharing, machine};
pub use unit::Unit;

use crate::quantized::Weight;
use crate::raw::Raw;
use crate::{Error, Quantized, Result, Tensor, WeightRef};

/// The setting that error messages name.
const OP: &str = "stream_blocks";

/// A frozen weight of a [`Unit`]. Cloning is cheap.
#[derive(Clone)]
pub struct Streamed(Arc<Inner>);

struct Inner {
    dims: Vec<usize>,
    dtype: DType,
    /// The device on which the weight is used.
    device: Device,
    unit: Unit,
    state: RwLock<State>,
}

enum State {
    /// The weight on the CPU, until the ring is created.
    Gathered(Weight),
    /// The weight is in unit number `unit` of `ring`. `view` is a view of a slot, and has the weight's values while
    /// this unit is in the slot.
    Placed { ring: Arc<Ring>, unit: usize, view: Weight },
}

impl Streamed {
    /// A weight on the CPU that will be used on `device`, as one of the weights of `unit`.
    ///
    /// # Errors
    /// [`Error::Argument`] if `weight` is not frozen, or is streamed already.
    pub fn new(weight: Weight, device: &Device, unit: &Unit) -> Result<Self> {
        if matches!(weight, Weight::Streamed(_)) || WeightRef::from(&weight).requires_grad() {
            return Err(Error::argument(OP, "a streamed weight must be frozen, and not streamed already"));
        }
        let streamed = Self(Arc::new(Inner {
            dims: weight.dims().to_vec(),
            dtype: weight.dtype(),
            device: device.clone(),
            unit: unit.clone(),
            state: RwLock::new(State::Gathered(weight)),
        }));
        unit.add(&streamed);
        Ok(streamed)
    }

    /// Joins weights along their rows. Returns one weight that has the rows of all `weights`, in their order, and for
    /// each of `weights` a weight of its rows alone, which replaces it. `None` if the units or the dtypes of `weights`
    /// differ, or if some of `weights` are quantized and some are not.
    ///
    /// # Errors
    /// [`Error::Argument`] if one of `weights` is in a ring already, [`Error::OutOfMemory`] if the joined weight does
    /// not fit (joined weights that are quantized need no memory).
    pub fn join(weights: &[&Self]) -> Result<Option<(Self, Vec<Self>)>> {
        let Some(first) = weights.first() else { return Ok(None) };
        let parts = weights.iter().map(|weight| weight.gathered()).collect::<Result<Vec<_>>>()?;
        let new = |weight: Weight| Self::new(weight, &first.0.device, &first.0.unit);
        let tensors: Vec<&Tensor> = parts.iter().filter_map(Weight::tensor).collect();
        let matrices: Vec<&Quantized> = parts.iter().filter_map(Weight::quantized).collect();
        if !weights.iter().all(|weight| weight.0.unit.is(&first.0.unit) && weight.0.dtype == first.0.dtype) {
            return Ok(None);
        }
        if matrices.len() == parts.len() {
            // The joined matrix shares storage with `matrices`, so they can stay as they are.
            let members = matrices.iter().map(|&matrix| new(matrix.clone().into())).collect::<Result<_>>()?;
            return Ok(Some((new(Quantized::cat(&matrices)?.into())?, members)));
        }
        if tensors.len() != parts.len() {
            return Ok(None);
        }
        let (all, parts) = first.0.unit.cat(&tensors)?;
        let members = parts.into_iter().map(|part| new(part.into())).collect::<Result<_>>()?;
        Ok(Some((new(all.into())?, members)))
    }

    /// The sizes of the dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.0.dims
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The device on which the weight is used.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The weight on its device, while its unit is the one that the ring entered last. Only work that is queued before
    /// the ring enters another unit may use the weight, so do not keep it.
    ///
    /// # Errors
    /// [`Error::Argument`] if the ring entered another unit last, or does not exist yet.
    pub(crate) fn here(&self) -> Result<Weight> {
        match &*self.state() {
            State::Placed { ring, unit, view } if ring.is_current(*unit) => Ok(view.clone()),
            State::Placed { .. } => Err(Error::argument(
                OP,
                "a streamed weight is used outside of the run of its block; call the model, not a block of it, and from one thread \
                 at a time",
            )),
            State::Gathered(_) => Err(Error::argument(OP, "a streamed weight is used before the model is complete")),
        }
    }

    /// The weight on the CPU, whatever unit the ring has entered; a copy if the weight is in a ring.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the copy does not fit, [`Error::Argument`] if the ring does not exist yet and only
    /// another process has the weight's values.
    pub fn host(&self) -> Result<Weight> {
        match &*self.state() {
            // In a hollow unit, this process has the shapes of the weights, and another process has their values.
            State::Gathered(_) if self.0.unit.is_hollow() => Err(Error::argument(
                OP,
                "only another process has the values of this weight until the model is complete",
            )),
            State::Gathered(weight) => Ok(weight.clone()),
            // `view` says where in the unit each tensor is. Its own values may be those of another unit.
            State::Placed { ring, unit, view } => view.map(|raw| ring.read(*unit, raw)),
        }
    }

    /// A copy of the weight's values, in `dtype` and on the weight's device, whatever unit the ring has entered.
    ///
    /// # Errors
    /// [`Error::DType`] if `dtype` is not floating point, [`Error::OutOfMemory`] if the values do not fit, and the
    /// errors of [`host`](Self::host).
    pub fn values(&self, dtype: DType) -> Result<Tensor> {
        match self.here() {
            // A copy, because the slot gets the values of other units later.
            Ok(Weight::Plain(view)) if view.dtype() == dtype => Ok(Tensor::constant(crate::raw::own_copy(&view.raw)?)),
            Ok(view) => WeightRef::from(&view).values(dtype),
            Err(_) => WeightRef::from(&self.host()?).values(dtype)?.to_device(&self.0.device),
        }
    }

    /// The weight on the CPU, if the ring does not exist yet.
    fn gathered(&self) -> Result<Weight> {
        match &*self.state() {
            State::Gathered(weight) => Ok(weight.clone()),
            State::Placed { .. } => Err(Error::argument(OP, "the weights of a complete model cannot be joined")),
        }
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.0.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the weight to `ring`.
    fn move_to_ring(&self, ring: &Arc<Ring>, unit: usize, view: Weight) {
        *self.0.state.write().unwrap_or_else(PoisonError::into_inner) =
            State::Placed { ring: ring.clone(), unit, view };
    }
}

impl std::fmt::Debug for Streamed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Streamed({:?}, {})", self.0.dims, self.0.dtype.as_str())
    }
}

impl Weight {
    /// This weight with `replace(tensor)` in place of each tensor; a quantized weight has several. The calls are always
    /// in the same order.
    fn map(&self, mut replace: impl FnMut(&Raw) -> Result<Raw>) -> Result<Self> {
        match self {
            Self::Plain(tensor) => Ok(Self::Plain(Tensor::constant(replace(&tensor.raw)?))),
            Self::Quantized(matrix) => Ok(Self::Quantized(matrix.map(replace)?)),
            Self::Streamed(_) => Err(Error::argument(OP, "the weight is streamed already")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;
    use crate::ops::linear::linear;
    use crate::quantized::Format;

    const SIDE: usize = 64;

    /// A matrix of whole numbers from -15 to 15, other ones for each seed. Also used as the input of layers.
    fn weight(seed: usize) -> Tensor {
        let values: Vec<f32> = (0..SIDE * SIDE).map(|i| ((i * 7 + seed * 13) % 31) as f32 - 15.0).collect();
        Tensor::from_vec(values, (SIDE, SIDE), &Device::Cpu).unwrap()
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.to_vec().unwrap()
    }

    /// A ring of `count` units, each with a plain weight and a quantized one. The values of unit `i` come from the
    /// seeds `i` and `i + 100`.
    fn ring(count: usize) -> (Arc<Ring>, Vec<[Streamed; 2]>) {
        let units: Vec<Unit> = (0..count).map(|_| Unit::default()).collect();
        let of = |(seed, unit): (usize, &Unit)| {
            let codes = Quantized::new(&weight(seed + 100), Format::Nf4).unwrap();
            let new = |weight: Weight| Streamed::new(weight, &Device::Cpu, unit).unwrap();
            [new(weight(seed).into()), new(codes.into())]
        };
        let weights = units.iter().enumerate().map(of).collect();
        (Ring::new(&Device::Cpu, &units, None).unwrap(), weights)
    }

    #[test]
    fn a_weight_has_values_only_while_its_unit_is_entered() {
        let (ring, weights) = ring(5);
        let x = weight(50);
        let run = |weight: &Streamed| linear(&x, WeightRef::Streamed(weight), None);
        assert!(run(&weights[0][0]).unwrap_err().to_string().contains("outside of the run"));
        // In order and back, as in forward and backward passes, and two jumps.
        for unit in [0, 1, 2, 3, 4, 4, 3, 2, 0, 4] {
            ring.enter(unit).unwrap();
            for (index, [plain, codes]) in weights.iter().enumerate() {
                assert_eq!(run(plain).is_ok(), index == unit);
                assert_eq!(run(codes).is_ok(), index == unit);
            }
            assert_eq!(values(&run(&weights[unit][0]).unwrap()), values(&linear(&x, &weight(unit), None).unwrap()));
            let codes = Quantized::new(&weight(unit + 100), Format::Nf4).unwrap();
            assert_eq!(values(&run(&weights[unit][1]).unwrap()), values(&linear(&x, &codes, None).unwrap()));
        }
    }

    #[test]
    fn values_can_be_read_at_any_time() {
        let (ring, weights) = ring(3);
        for unit in 0..3 {
            ring.enter(2 - unit).unwrap();
            for (index, [plain, _]) in weights.iter().enumerate() {
                assert_eq!(values(&plain.values(DType::F32).unwrap()), values(&weight(index)));
            }
        }
    }

    #[test]
    fn joined_weights_are_stored_once() {
        let unit = Unit::default();
        let parts: Vec<Streamed> =
            (0..3).map(|seed| Streamed::new(weight(seed).into(), &Device::Cpu, &unit).unwrap()).collect();
        let (joined, members) = Streamed::join(&parts.iter().collect::<Vec<_>>()).unwrap().unwrap();
        drop(parts);
        let ring = Ring::new(&Device::Cpu, &[unit], None).unwrap();
        assert_eq!(ring.unit_bytes(), 3 * SIDE * SIDE * 4);
        assert_eq!(ring.slot_bytes(), ring.unit_bytes());
        ring.enter(0).unwrap();
        let all = values(&joined.values(DType::F32).unwrap());
        for (index, member) in members.iter().enumerate() {
            assert_eq!(values(&member.values(DType::F32).unwrap()), values(&weight(index)));
            assert_eq!(all[index * SIDE * SIDE..][..SIDE * SIDE], values(&weight(index)));
        }
    }

    /// Runs `work` in `size` threads, which act as the processes of one machine. Each call of `work` gets its rank, and
    /// the exchange that connects the threads.
    fn run_processes<T: Send>(size: usize, work: impl Fn(usize, Box<Exchange>) -> T + Sync) -> Vec<T> {
        let (barrier, messages) = (Arc::new(Barrier::new(size)), Arc::new(Mutex::new(vec![Vec::new(); size])));
        let run = |rank: usize| {
            let (barrier, messages) = (barrier.clone(), messages.clone());
            let exchange = move |message: &[u8]| {
                messages.lock().unwrap()[rank] = message.to_vec();
                barrier.wait();
                let found = messages.lock().unwrap().clone();
                barrier.wait();
                Ok(found)
            };
            work(rank, Box::new(exchange))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// A ring of three units and their weights. Each unit has a joined weight, a quantized weight, and the two parts of
    /// the joined weight, in this order. The values of unit `i` come from the seeds `first + 10 i` to
    /// `first + 10 i + 2`.
    fn shared(
        first: usize,
        rank: usize,
        origin: Origin,
        exchange: Box<Exchange>,
    ) -> Result<(Arc<Ring>, Vec<Vec<Streamed>>)> {
        let sharing = Sharing::new(rank, origin, exchange)?;
        let units: Vec<Unit> = (0..3).map(Unit::new).collect();
        let mut weights = Vec::new();
        for (number, unit) in units.iter().enumerate() {
            let new = |weight: Weight| Streamed::new(unit.share(weight, &sharing)?, &Device::Cpu, unit);
            let seed = first + 10 * number;
            let parts = [new(weight(seed).into())?, new(weight(seed + 1).into())?];
            let (all, parts) = Streamed::join(&[&parts[0], &parts[1]])?.unwrap();
            let codes = new(Quantized::new(&weight(seed + 2), Format::Nf4)?.into())?;
            // Before the ring exists, one process has the values of a unit: rank 0, or with `Peers` each rank in turn.
            assert_eq!(all.host().is_ok(), rank == if origin == Origin::Host { 0 } else { number % 3 });
            weights.push([vec![all, codes], parts].concat());
        }
        Ok((Ring::new(&Device::Cpu, &units, Some(&sharing))?, weights))
    }

    fn check_one_copy(origin: Origin) {
        let found = run_processes(3, |rank, exchange| {
            let (ring, weights) = shared(0, rank, origin, exchange).unwrap();
            let x = weight(50);
            for unit in [0, 1, 2, 1, 0] {
                ring.enter(unit).unwrap();
                let [all, codes, first, second] = weights[unit].as_slice() else { panic!("four weights") };
                let run = |weight: &Streamed| values(&linear(&x, WeightRef::Streamed(weight), None).unwrap());
                let (one, other) = (weight(10 * unit), weight(10 * unit + 1));
                assert_eq!(values(&all.values(DType::F32).unwrap()), [values(&one), values(&other)].concat());
                assert_eq!(run(first), values(&linear(&x, &one, None).unwrap()));
                assert_eq!(run(second), values(&linear(&x, &other, None).unwrap()));
                let expected = Quantized::new(&weight(10 * unit + 2), Format::Nf4).unwrap();
                assert_eq!(run(codes), values(&linear(&x, &expected, None).unwrap()));
            }
            // The first part of the joined weight of unit 2.
            assert_eq!(values(weights[2][2].host().unwrap().tensor().unwrap()), values(&weight(20)));
            ring.unit_bytes()
        });
        // All processes report the same number of bytes, which is below the bytes of three plain weights per unit:
        // joined weights are stored once, and the third weight is quantized.
        assert!(found.iter().all(|&bytes| bytes == found[0] && bytes < 3 * 3 * SIDE * SIDE * 4), "{found:?}");
    }

    #[test]
    fn processes_use_one_copy() {
        check_one_copy(Origin::Host);
    }

    #[test]
    fn processes_use_slices_that_other_processes_keep() {
        check_one_copy(Origin::Peers);
    }

    #[test]
    fn different_weights_in_one_process_are_an_error_in_all_processes() {
        for origin in [Origin::Host, Origin::Peers] {
            let error = |rank, exchange| shared(7 * rank, rank, origin, exchange).err().unwrap().to_string();
            for error in &run_processes(3, error) {
                assert!(error.contains("rank 1 has other weights than rank 0 in streamed block 0"), "{error}");
            }
        }
    }

    #[test]
    fn a_process_alone_on_its_machine_is_an_error_there_and_elsewhere() {
        // In this exchange, there is only one process.
        let alone = Sharing::new(0, Origin::Peers, Box::new(|message: &[u8]| Ok(vec![message.to_vec()])));
        assert!(alone.err().unwrap().to_string().contains("rank 0 has no other process on its machine"));
        // Each message identifies a machine: ranks 0 and 1 are on one machine, rank 2 is alone on another.
        let elsewhere = |message: &[u8]| Ok(vec![message.to_vec(), message.to_vec(), b"elsewhere".to_vec()]);
        let error = Sharing::new(0, Origin::Peers, Box::new(elsewhere)).err().unwrap().to_string();
        assert!(error.contains("rank 2 has no other process on its machine"), "{error}");
    }

    #[test]
    fn an_error_of_one_process_is_an_error_in_all_processes() {
        let found = run_processes(2, |rank, exchange| {
            let sharing = Sharing::new(rank, Origin::Host, exchange).unwrap();
            // Every process would use the shared memory (1 byte, which nothing fills), but rank 1 fails to.
            let attach = |_| if rank == 1 { Err(Error::argument(OP, "no room")) } else { Ok(()) };
            sharing.pages(1, |_| Ok(()), attach).unwrap_err().to_string()
        });
        assert!(found[0].contains("rank 1 has failed: ") && found[0].contains("no room"), "{found:?}");
        assert!(!found[1].contains("has failed") && found[1].contains("no room"), "{found:?}");
    }
}
