//! CUDA graphs of functions. A graph holds all work that a function queues; one launch repeats the work.
//!
//! The first call of a captured function runs it eagerly, which allocates memory, loads kernels and creates optimizer
//! states. The second call records the function and launches the graph. Each later call is a replay: it copies new
//! inputs to where the graph reads them, and launches the graph. Every call has all effects of the function, so
//! training computes the same bits as without a graph. If the function creates gradients outside of
//! [flat buffers](crate::FlatBuffer), these gradients move to fixed storage after the first call. Then the second call
//! runs eagerly again, and the third call records.
//!
//! All graphs of a device share one pool of memory for temporaries (the memory of graphs). They can share it, because
//! the graphs of a device run one after the other; eager work between two replays may use the memory, too. A call
//! returns copies of the function's results; it is an error if the function keeps any other tensor that it has created.
//! A graph keeps alive the tensors outside the pool that the graph reads or writes.
//!
//! Random draws read the seed and the position of the random generator from device memory. Each replay writes both
//! there, and advances the generator by the number of draws. Values that the function copies from the CPU are constants
//! of the graph; it is an error if the call that records copies another value than the eager call before it. It is also
//! an error if the function reads a tensor's value. When host state that the work depends on
//! ([`HostState`](crate::capture::HostState)) changes, the graph is stale: the next call runs eagerly, and the call
//! after that records again.

mod recording;

use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphExec, CUgraphInstantiate_flags};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result};
use candle_core::{DType, Device};
use trainable_candle_cuda::kernels::random::{SET_GENERATOR, SetGenerator};
use trainable_candle_cuda::memory;
use trainable_candle_cuda::upload::{self, Constants, Known};

use super::copy::{duplicate, transfer};
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::{Address, Element, Mut, Shape, address, empty};
use super::recorder::{FORWARD, Held};
use crate::capture::{Effects, Function, Run};
use crate::raw::storage_identity;
use crate::rng::{self, State};
use crate::{Error, Raw, Result, Tensor, capture};
use recording::{Lease, Recorded, Recording, Template};

const OP: &str = "capture";

/// A function that runs as a CUDA graph from its second call on, or its third if it makes gradients outside of flat
/// buffers.
///
/// ```no_run
/// use trainable_candle_core::capture::Captured;
/// use trainable_candle_core::{DType, Tensor, device};
///
/// let device = device::cuda(0, &[] as &[&str])?;
/// let x = Tensor::zeros(3, DType::F32, &device)?;
/// let mut doubled = Captured::new(&device, Box::new(|x| Ok(vec![x[0].add(&x[0])?])), &[&x])?;
/// let y = doubled.call(&[&Tensor::new([1f32, 2.0, 3.0], &device)?])?;
/// # Ok::<(), trainable_candle_core::Error>(())
/// ```
pub struct Captured {
    function: Function,
    gpu: &'static Gpu,
    /// The tensors that the function reads as its inputs. Each call copies the caller's tensors into them.
    inputs: Vec<Tensor>,
    stage: Stage,
}

enum Stage {
    /// The next call runs the function eagerly: there was no call yet, or the last call has moved gradients, or has
    /// failed without a graph.
    New,
    /// The function ran eagerly; the next call records it. Has the function's effects on the host, and fingerprints of
    /// the values that it copied from the CPU.
    Ran(Effects, Known),
    /// The function was recorded; calls replay the graph unless it is stale.
    Recorded(Graph),
}

impl Captured {
    /// Prepare `function` for capture, without running it. Calls take tensors of the shapes and dtypes of `inputs`, on
    /// any device. The function gets copies of them on `device`, and must return tensors there.
    ///
    /// # Errors
    /// [`Error::Device`] if `device` is not a CUDA device or cannot run graphs, or inside a captured function;
    /// [`Error::Autograd`] if an input needs a gradient, [`Error::DType`] if CUDA tensors cannot have its dtype,
    /// [`Error::OutOfMemory`] if the copies of the inputs do not fit into memory.
    pub fn new(device: &Device, function: Function, inputs: &[&Tensor]) -> Result<Self> {
        let gpu = Gpu::of_device(OP, device)?;
        // An error if a function is being captured on this thread.
        capture::refuse(OP)?;
        if !gpu.stream().context().has_async_alloc() {
            let message =
                "the GPU has no stream-ordered allocation of memory, which graphs need (some virtual GPUs lack it)";
            return Err(Error::device(OP, message));
        }
        let copy = |(index, input): (usize, &&Tensor)| {
            if input.requires_grad() {
                let message = format!(
                    "input {index} needs a gradient, but calls copy their inputs; let the function use the variable itself"
                );
                return Err(Error::autograd(OP, message));
            }
            let moved = Tensor::from_raw(&input.raw).to_device(device)?;
            Ok(Tensor::from_raw(&duplicate(OP, &moved.raw)?))
        };
        let inputs = inputs.iter().enumerate().map(copy).collect::<Result<_>>()?;
        Ok(Self { function, gpu, inputs, stage: Stage::New })
    }

    /// Call the function for `inputs`, or replay its graph. Returns the results, detached from the tape. Inside another
    /// captured function, the call becomes a part of that function's graph, and the results stay on the tape.
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of inputs than was given to [`new`](Self::new), [`Error::Shape`] or
    /// [`Error::DType`] for another shape or dtype of an input. The errors of the function. [`Error::OutOfMemory`] if
    /// the device has too little memory. [`Error::Device`] if the function returns a tensor on the CPU or, in the call
    /// that records, if it does what a graph cannot repeat: it reads a tensor's value, waits for the device, copies a
    /// value from the CPU that the previous call did not copy, seeds the random generator, keeps a tensor that it has
    /// created but does not return, or changes state that its own work depends on. A call that fails to record has no
    /// effect, and the next call runs eagerly.
    pub fn call(&mut self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.check(inputs)?;
        if capture::is_running() {
            let device = Device::Cuda(self.gpu.device().clone());
            let inputs: Vec<Tensor> =
                inputs.iter().map(|input| Tensor::from_raw(&input.raw).to_device(&device)).collect::<Result<_>>()?;
            return (self.function)(&inputs);
        }
        self.copy_inputs(inputs)?;
        match std::mem::replace(&mut self.stage, Stage::New) {
            Stage::New => self.run(),
            Stage::Ran(mut effects, known) => {
                // The function may have registered work that is not a part of the graph but must run before each
                // launch, also before the one below: for example, copies of new values of variables to an optimizer's
                // master values.
                effects.run_before_replay()?;
                // `settle_gradients` gives gradients fixed storage, and notes which of them have values. The recording
                // changes these marks; if it fails, `restore_gradients` sets them back.
                effects.settle_gradients()?;
                let graph = Graph::record(self.gpu, &self.function, &self.inputs, known)
                    .inspect_err(|_| effects.restore_gradients())?;
                let launched = graph.launch();
                self.finish(graph, launched)
            }
            // State that the recorded work depends on has changed: this call runs eagerly, and the next one records.
            Stage::Recorded(graph) if graph.effects.is_stale() => {
                drop(graph);
                self.run()
            }
            Stage::Recorded(graph) => {
                let launched = graph.replay();
                self.finish(graph, launched)
            }
        }
    }

    /// Return whether calls replay a graph.
    pub const fn is_recorded(&self) -> bool {
        matches!(self.stage, Stage::Recorded(_))
    }

    /// Store `graph` for the next calls. `launched` is the outcome of its launch for this call. Returns copies of the
    /// results, because the next replay overwrites the originals.
    fn finish(&mut self, graph: Graph, launched: Result<()>) -> Result<Vec<Tensor>> {
        let copies = || graph.outputs.iter().map(|output| Ok(Tensor::from_raw(&duplicate(OP, output)?))).collect();
        let outputs = launched.and_then(|()| copies());
        self.stage = Stage::Recorded(graph);
        outputs
    }

    /// Check that new inputs have the shapes and dtypes with which the function was captured.
    fn check(&self, inputs: &[&Tensor]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            let message = format!("found {} inputs, expected {}", inputs.len(), self.inputs.len());
            return Err(Error::argument(OP, message));
        }
        for (index, (captured, new)) in self.inputs.iter().zip(inputs).enumerate() {
            if captured.dims() != new.dims() {
                let message = format!(
                    "input {index} has shape {:?}, the function was captured with shape {:?}; capture it for each shape",
                    new.dims(),
                    captured.dims()
                );
                return Err(Error::shape(OP, message));
            }
            if captured.dtype() != new.dtype() {
                let message = format!(
                    "input {index} has dtype {}, the function was captured with dtype {}",
                    new.dtype().as_str(),
                    captured.dtype().as_str()
                );
                return Err(Error::dtype(OP, message));
            }
        }
        Ok(())
    }

    /// Copy the inputs of a call into the tensors that the function reads.
    fn copy_inputs(&self, inputs: &[&Tensor]) -> Result<()> {
        for (captured, new) in self.inputs.iter().zip(inputs) {
            // A caller may pass the captured input itself, if the function has stored it somewhere: nothing to copy.
            // `storage_identity` returns the storage's address and its size.
            if captured.elem_count() > 0 && storage_identity(&captured.raw).0 != storage_identity(&new.raw).0 {
                let moved = Tensor::from_raw(&new.raw).to_device(captured.device())?;
                transfer(OP, &captured.raw, &moved.raw)?;
            }
        }
        Ok(())
    }

    /// Call the function eagerly.
    fn run(&mut self) -> Result<Vec<Tensor>> {
        let run = Run::begin(/* capturing: */ false)?;
        let noting = Noting::begin();
        let outputs = (self.function)(&self.inputs)?;
        let known = noting.finish();
        let mut effects = run.finish();
        let outputs = values(outputs)?.iter().map(|output| Ok(Tensor::from_raw(&duplicate(OP, output)?))).collect();
        // `settle_gradients` moves gradients to fixed storage, and returns whether any has moved. The function may have
        // stored the addresses that they had before. So if any has moved, the function runs eagerly once more before
        // the capture.
        self.stage = if effects.settle_gradients()? { Stage::New } else { Stage::Ran(effects, known) };
        outputs
    }
}

/// Check that the results of a function are on a CUDA device, and detach them from the tape.
fn values(outputs: Vec<Tensor>) -> Result<Vec<Raw>> {
    let value = |(index, output): (usize, Tensor)| {
        if output.device().is_cuda() {
            return Ok(output.raw.detach());
        }
        let message =
            format!("output {index} is on the CPU, where replays do not change it; return tensors on the CUDA device");
        Err(Error::device(OP, message))
    };
    outputs.into_iter().enumerate().map(value).collect()
}

/// While this object exists, the fingerprints of the values that this thread copies from the CPU are noted. `finish`
/// returns them. If an error drops the object without `finish`, they are discarded.
struct Noting;

impl Noting {
    fn begin() -> Self {
        upload::note();
        Self
    }

    fn finish(self) -> Known {
        upload::finish_noting()
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        upload::finish_noting();
    }
}

/// A recorded function. Fields are dropped in order, so the lease on the memory of graphs is dropped after all that
/// uses this memory.
struct Graph {
    gpu: &'static Gpu,
    executable: Executable,
    outputs: Vec<Raw>,
    /// The tensors that the graph uses outside of the memory of graphs.
    _held: Held,
    /// What the function changes on the host, and what host state its work depends on.
    effects: Effects,
    /// The values from the CPU that the graph reads, in device memory.
    _constants: Constants,
    /// Seed and position of the generator at the start of a replay.
    generator: Raw,
    /// By how much a call advances the generator's position, in blocks of random numbers.
    draws: u64,
    _lease: Option<Lease>,
}

impl Graph {
    /// Record the function, and make its graph. `known` are fingerprints of the values that it may copy from the CPU.
    fn record(gpu: &'static Gpu, function: &Function, inputs: &[Tensor], known: Known) -> Result<Self> {
        let generator = empty(OP, gpu, &[2], DType::I64)?;
        let start = rng::state();
        // Draws during the recording advance this stream of random numbers. They do not advance the thread's generator,
        // because each launch of the graph does so.
        let _stream = rng::Stream::enter(start);
        let recording = Recording::begin(gpu, address(OP, &generator)?, start, known)?;
        let outputs = function(inputs).and_then(values);
        let recorded = recording.finish();
        let end = rng::state();
        Self::build(gpu, generator, start, end, outputs, recorded)
    }

    /// Make the graph of a recording. `start` and `end` are the states of the random generator before and after it.
    fn build(
        gpu: &'static Gpu,
        generator: Raw,
        start: State,
        end: State,
        outputs: Result<Vec<Raw>>,
        recorded: Recorded,
    ) -> Result<Self> {
        let Recorded { template, mut effects, held, kept, mut constants, lease } = recorded;
        if constants.has_rejected() {
            return Err(Error::device(
                OP,
                "the function copies a value from the CPU that the previous call did not copy, so the value differs \
                 from call to call; pass it as an input, or make it before the function is captured",
            ));
        }
        let outputs = outputs?;
        let template = template?;
        // The difference modulo 2^64; from `FORWARD` (2^63) on, it means that the function has set the position back.
        let draws = end.offset.wrapping_sub(start.offset);
        if effects.has_seeded || end.seed != start.seed || draws >= FORWARD {
            let message =
                "the function seeds the random generator, but replays would not; seed it outside of the function";
            return Err(Error::device(OP, message));
        }
        if let Some(name) = effects.changed_dependency() {
            let message = format!("the function changes {name}, on which its work depends; change it between calls");
            return Err(Error::device(OP, message));
        }
        check_kept(&kept, &outputs)?;
        let executable = Executable::new(gpu, &template)?;
        // SAFETY: the stream is the one that was captured, and its device is current.
        unsafe { constants.upload(gpu.stream().cu_stream().cast()) }.map_err(|status| status_error(OP, status))?;
        effects.commit();
        Ok(Self {
            gpu,
            executable,
            outputs,
            _held: held,
            effects,
            _constants: constants,
            generator,
            draws,
            _lease: lease,
        })
    }

    /// Queue the recorded work. The work takes the next random numbers of the thread's generator.
    fn launch(&self) -> Result<()> {
        let (gpu, stream) = (self.gpu, self.gpu.stream());
        stream.context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        // Maps the memory of graphs again where it was unmapped for eager work.
        // SAFETY: the stream is the device's, and the device is current.
        unsafe { memory::restore_graphs(stream.cu_stream().cast()) }.map_err(|status| status_error(OP, status))?;
        if self.draws > 0 {
            let State { seed, offset } = rng::advance(self.draws);
            let function = gpu.function(&SET_GENERATOR, &[])?;
            let state = Mut::new(address(OP, &self.generator)?, Element::U64);
            let one_thread = Shape::linear(OP, /* blocks: */ 1, /* threads: */ 1)?;
            // SAFETY: the kernel writes two 64-bit numbers, and `generator` has two.
            unsafe { function.launch(OP, gpu, one_thread, SetGenerator { state, seed, offset }) }?;
        }
        let launch = || {
            // The work waits for the copies that run on the device's other stream, such as those of streamed weights.
            gpu.meet_copies()?;
            self.executable.launch(gpu)
        };
        launch().map_err(|error| driver_error(OP, error))
    }

    /// Repeat a call of the function: launch the recorded work, and repeat the function's effects on the host.
    fn replay(&self) -> Result<()> {
        self.effects.run_before_replay()?;
        self.launch()?;
        self.effects.run_after_replay();
        Ok(())
    }
}

/// Check that a recording has left only its `outputs` in the memory of graphs; `kept` are the blocks that are in use
/// there. Any other tensor there would change with each replay of any graph, because all graphs share that memory.
fn check_kept(kept: &[Range<Address>], outputs: &[Raw]) -> Result<()> {
    let outputs = outputs.iter().map(|output| address(OP, output)).collect::<Result<Vec<_>>>()?;
    let others: Vec<_> = kept.iter().filter(|block| !outputs.iter().any(|at| block.contains(at))).collect();
    if others.is_empty() {
        return Ok(());
    }
    let (count, bytes) = (others.len(), others.iter().map(|block| block.end - block.start).sum::<Address>());
    let plural = if count == 1 { "" } else { "s" };
    let message = format!(
        "the function keeps {count} tensor{plural} ({bytes} bytes) that it has made, and replays would change them; return them, or \
         make them before the function is captured"
    );
    Err(Error::device(OP, message))
}

/// The driver's executable graph, made from a [`Template`].
struct Executable(CUgraphExec);

// SAFETY: the driver requires that calls on one graph do not overlap. Every call goes through an exclusive reference to
// the `Captured` that owns the graph.
unsafe impl Send for Executable {}
// SAFETY: no method of `Captured` uses the graph through a shared reference.
unsafe impl Sync for Executable {}

impl Executable {
    fn new(gpu: &Gpu, template: &Template) -> Result<Self> {
        let make = || {
            gpu.stream().context().bind_to_thread()?;
            // SAFETY: the template is a graph. The executable graph that is made from it is destroyed once, with
            // `Self`.
            let executable = Self(unsafe { result::graph::instantiate(template.0, CUgraphInstantiate_flags(0)) }?);
            // SAFETY: the stream is the device's.
            unsafe { result::graph::upload(executable.0, gpu.stream().cu_stream()) }?;
            Ok(executable)
        };
        make().map_err(|error| driver_error(OP, error))
    }

    fn launch(&self, gpu: &Gpu) -> std::result::Result<(), DriverError> {
        gpu.stream().context().bind_to_thread()?;
        // SAFETY: the owner of the graph keeps the memory that the graph uses.
        unsafe { result::graph::launch(self.0, gpu.stream().cu_stream()) }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: `new` has made the graph, and the driver lets a running replay finish. An error is ignored, because
        // nothing can be done about it here.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
