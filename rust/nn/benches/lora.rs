//! Times the forward and backward pass of a frozen linear layer with LoRA. Compares this library's layer with the same
//! layer written with candle's tensors, for which candle computes the gradients.
//!
//! ```text
//! cargo bench -p trainable-candle-nn --bench lora -- [cpu|cuda[:N]|rows] [FOLDER_OF_CUDA_LIBRARIES ...]
//! ```
//!
//! The first argument is the device (default: `cpu`); N is the number of the GPU. With `rows` instead, the program
//! shows how the time of this library's layer on the CPU grows with the number of input rows. For CUDA, build with
//! `--features cuda`. The program looks for the CUDA libraries in the folders, then where the system's loader looks.
//! The built executable needs no cargo, so it can be copied to a machine with a GPU.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use candle_core::{Tensor as Plain, Var as PlainVar};
use trainable_candle_core::cpu::pool::num_threads;
use trainable_candle_core::device::{self, name, parse};
use trainable_candle_core::{DType, Device, Error, RecyclingAllocator, Result, Tensor, Var};
use trainable_candle_nn::adapter::LoRALinear;

/// The allocator that the Python extension uses too.
#[global_allocator]
static ALLOCATOR: RecyclingAllocator = RecyclingAllocator::new();

/// A layer and its input: (dtype, number of input rows, number of features of the input and also of the result, rank).
type Case = (DType, usize, usize, usize);

/// The cases on the CPU, as in `benches/lora_linear.py`.
const ON_CPU: [Case; 4] =
    [(DType::F32, 512, 1024, 16), (DType::F32, 1024, 768, 16), (DType::F32, 2048, 640, 32), (DType::F32, 64, 256, 8)];
/// The cases on CUDA devices, as in `benches/gpu_lora.py`.
const ON_CUDA: [Case; 7] = [
    (DType::F32, 1024, 768, 16),
    (DType::F32, 1024, 2048, 16),
    (DType::BF16, 1024, 768, 16),
    (DType::BF16, 1024, 2048, 16),
    (DType::BF16, 4096, 1280, 32),
    (DType::BF16, 4096, 3072, 16),
    (DType::BF16, 16384, 3072, 32),
];
/// The numbers of input rows that the argument `rows` measures.
const ROWS: [usize; 5] = [4096, 16384, 65_536, 262_144, 1_048_576];
/// The features of the input and of the result that the argument `rows` measures.
const ROWS_WIDTH: usize = 512;
/// The rank that the argument `rows` measures.
const ROWS_RANK: usize = 16;
/// The factor in front of the low-rank product.
const SCALE: f64 = 0.5;
/// The number of calls of each step before the measurement.
const WARM_UP: usize = 3;
/// The least number of measured calls of each step of a case, and the least seconds of measuring.
const CASE_CALLS: usize = 15;
const CASE_SECONDS: f64 = 2.0;
/// The same for a measurement of the argument `rows`.
const ROWS_CALLS: usize = 5;
const ROWS_SECONDS: f64 = 1.0;

fn main() -> Result<()> {
    // Cargo adds `--bench` to the arguments.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let first = arguments.next().unwrap_or_else(|| "cpu".into());
    if first == "rows" {
        return measure_rows();
    }
    // The other arguments are folders of CUDA libraries.
    let device = parse(&first, || arguments.map(PathBuf::from).collect())?;
    println!("{}, {} threads of the CPU; median ms of forward and backward", name(&device), num_threads());
    let cases: &[_] = if device.is_cpu() { &ON_CPU } else { &ON_CUDA };
    for &(dtype, rows, width, rank) in cases {
        let mut ours = our_step((dtype, rows, width, rank), &device)?;
        let mut candle = candle_step((dtype, rows, width, rank), &device)?;
        let times = median_times(&mut [&mut *ours, &mut *candle], CASE_CALLS, CASE_SECONDS, &device)?;
        let ratio = times[0] / times[1];
        println!(
            "{} {rows} x {width}, rank {rank}: ours {:.3}, candle {:.3}, ours/candle {ratio:.2}",
            dtype.as_str(),
            times[0],
            times[1]
        );
    }
    Ok(())
}

fn measure_rows() -> Result<()> {
    println!("width {ROWS_WIDTH}, rank {ROWS_RANK}, {} threads; median of forward and backward", num_threads());
    for rows in ROWS {
        let mut step = our_step((DType::F32, rows, ROWS_WIDTH, ROWS_RANK), &Device::Cpu)?;
        let time = median_times(&mut [&mut *step], ROWS_CALLS, ROWS_SECONDS, &Device::Cpu)?[0];
        println!("{rows} rows: {time:.1} ms, {:.3} us a row", time * 1e3 / rows as f64);
    }
    Ok(())
}

/// Waits until the device has finished all launched work.
fn synchronize(device: &Device) -> Result<()> {
    if device.is_cpu() { Ok(()) } else { device::synchronize(device) }
}

/// One forward and backward pass.
type Step = Box<dyn FnMut() -> Result<()>>;

/// Draws small normal values, with a standard deviation of 0.02.
fn random(dims: (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0.0, 1.0, dims, DType::F32, device)?.mul_scalar(0.02)?.to_dtype(dtype)
}

/// The step of this library's layer.
fn our_step((dtype, rows, width, rank): Case, device: &Device) -> Result<Step> {
    let alpha = rank as f64 * SCALE;
    let layer = LoRALinear::new(random((width, width), dtype, device)?, rank, alpha, device)?;
    let [down, up] = [(rank, width), (width, rank)].map(|dims| random(dims, DType::F32, device));
    layer.get_vars()[0].set(&down?)?;
    layer.get_vars()[1].set(&up?)?;
    let x = Var::from_tensor(&random((rows, width), dtype, device)?)?;
    let grad = random((rows, width), dtype, device)?;
    let vars: Vec<Var> = layer.get_vars().into_iter().chain([x.clone()]).collect();
    Ok(Box::new(move || {
        vars.iter().try_for_each(Var::zero_grad)?;
        let retain_graph = false;
        layer.forward(&x)?.backward_with(Some(&grad), retain_graph)?;
        Ok(())
    }))
}

/// The step of the layer written with candle's tensors.
fn candle_step((dtype, rows, width, rank): Case, device: &Device) -> Result<Step> {
    // The values come from this library's generator. Candle's generator needs functions of cuRAND that are missing
    // in this project's CUDA builds (`cuda/src/linked/symbols.rs` defines only a few).
    let plain_random = |rows: usize, columns: usize| -> Result<Plain> {
        let values = random((rows, columns), DType::F32, &Device::Cpu)?.to_vec::<f32>()?;
        Ok(Plain::from_vec(values, (rows, columns), device)?.to_dtype(dtype)?)
    };
    let (weight, grad) = (plain_random(width, width)?, plain_random(rows, width)?);
    let x = PlainVar::from_tensor(&plain_random(rows, width)?)?;
    let down = PlainVar::from_tensor(&plain_random(rank, width)?)?;
    let up = PlainVar::from_tensor(&plain_random(width, rank)?)?;
    Ok(Box::new(move || {
        let low_rank = x.as_tensor().matmul(&down.as_tensor().t()?)?.matmul(&up.as_tensor().t()?)?;
        let y = (x.as_tensor().matmul(&weight.t()?)? + (low_rank * SCALE)?)?;
        // Candle's backward pass starts from ones. Multiplying `y` by `grad` before the sum makes `grad` the gradient
        // of `y`.
        let grads = (y * &grad)?.sum_all()?.backward()?;
        let has_all = [&x, &down, &up].iter().all(|var| grads.get(var.as_tensor()).is_some());
        let message = "candle computed no gradient for at least one of x, down and up";
        if has_all { Ok(()) } else { Err(Error::argument("bench", message)) }
    }))
}

/// Runs the steps in turn until each has run `calls` times and `seconds` have passed. Returns the median time of each
/// step in ms.
fn median_times(
    steps: &mut [&mut dyn FnMut() -> Result<()>],
    calls: usize,
    seconds: f64,
    device: &Device,
) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); steps.len()];
    for step in &mut *steps {
        for _ in 0..WARM_UP {
            step()?;
        }
    }
    synchronize(device)?;
    let beginning = Instant::now();
    while times[0].len() < calls || beginning.elapsed().as_secs_f64() < seconds {
        for (step, times) in steps.iter_mut().zip(&mut times) {
            let start = Instant::now();
            step()?;
            synchronize(device)?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(times
        .into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect())
}
