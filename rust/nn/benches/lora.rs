//! Times the forward and backward pass of a frozen linear layer with LoRA. Compares this library's layer with the same
//! layer written with candle's tensors, whose gradients candle computes.
//!
//! ```text
//! cargo bench -p trainable-candle-nn --bench lora -- [cpu|cuda[:N]|rows] [FOLDER_OF_CUDA_LIBRARIES ...]
//! ```
//!
//! `rows` shows how the time of this library's layer on the CPU grows with the number of input rows. For CUDA, build with
//! `--features cuda`; the executable then also runs on machines without cargo.
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

/// The cases on the CPU, as in `benches/lora_linear.py`: (dtype, rows of the input, features of the input and of the
/// result, rank).
const ON_CPU: [(DType, usize, usize, usize); 4] =
    [(DType::F32, 512, 1024, 16), (DType::F32, 1024, 768, 16), (DType::F32, 2048, 640, 32), (DType::F32, 64, 256, 8)];
/// The cases on CUDA devices, as in `benches/gpu_lora.py`.
const ON_CUDA: [(DType, usize, usize, usize); 7] = [
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
const WIDTH: usize = 512;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let text = arguments.next().unwrap_or_else(|| "cpu".into());
    if text == "rows" {
        return rows();
    }
    let device = parse(&text, || arguments.map(PathBuf::from).collect())?;
    println!("{}, {} threads of the CPU; median ms of forward and backward", name(&device), num_threads());
    let cases: &[_] = if device.is_cpu() { &ON_CPU } else { &ON_CUDA };
    for &(dtype, rows, width, rank) in cases {
        let (mut ours, mut candle) =
            (ours(dtype, rows, width, rank, &device)?, candle(dtype, rows, width, rank, &device)?);
        let times = race(&mut [&mut *ours, &mut *candle], 15, 2.0, &device)?;
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

fn rows() -> Result<()> {
    println!("width {WIDTH}, rank 16, {} threads; median of forward and backward", num_threads());
    for rows in ROWS {
        let mut step = ours(DType::F32, rows, WIDTH, 16, &Device::Cpu)?;
        let time = race(&mut [&mut *step], 5, 1.0, &Device::Cpu)?[0];
        println!("{rows} rows: {time:.1} ms, {:.3} us a row", time * 1e3 / rows as f64);
    }
    Ok(())
}

/// Waits until the device has finished all launched work.
fn synchronize(device: &Device) -> Result<()> {
    if device.is_cpu() { Ok(()) } else { device::synchronize(device) }
}

type Step = Box<dyn FnMut() -> Result<()>>;

fn random(dims: (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0.0, 1.0, dims, DType::F32, device)?.mul_scalar(0.02)?.to_dtype(dtype)
}

fn ours(dtype: DType, rows: usize, width: usize, rank: usize, device: &Device) -> Result<Step> {
    let layer = LoRALinear::new(random((width, width), dtype, device)?, rank, rank as f64 / 2.0, device)?;
    let [down, up] = [(rank, width), (width, rank)].map(|dims| random(dims, DType::F32, device));
    layer.get_vars()[0].set(&down?)?;
    layer.get_vars()[1].set(&up?)?;
    let x = Var::from_tensor(&random((rows, width), dtype, device)?)?;
    let grad = random((rows, width), dtype, device)?;
    let vars: Vec<Var> = layer.get_vars().into_iter().chain([x.clone()]).collect();
    Ok(Box::new(move || {
        vars.iter().try_for_each(Var::zero_grad)?;
        layer.forward(&x)?.backward_with(Some(&grad), false)?;
        Ok(())
    }))
}

fn candle(dtype: DType, rows: usize, width: usize, rank: usize, device: &Device) -> Result<Step> {
    // The values come from this library's generator. Candle's generator needs functions of cuRAND that the CUDA build does not
    // define.
    let random = |rows: usize, columns: usize| -> Result<Plain> {
        let values = random((rows, columns), DType::F32, &Device::Cpu)?.to_vec::<f32>()?;
        Ok(Plain::from_vec(values, (rows, columns), device)?.to_dtype(dtype)?)
    };
    let (weight, grad) = (random(width, width)?, random(rows, width)?);
    let x = PlainVar::from_tensor(&random(rows, width)?)?;
    let down = PlainVar::from_tensor(&random(rank, width)?)?;
    let up = PlainVar::from_tensor(&random(width, rank)?)?;
    Ok(Box::new(move || {
        let hidden = x.as_tensor().matmul(&down.as_tensor().t()?)?.matmul(&up.as_tensor().t()?)?;
        let y = (x.as_tensor().matmul(&weight.t()?)? + (hidden * 0.5)?)?;
        // Candle's backward pass starts from ones. Multiplying `y` by `grad` before the sum makes `grad` the gradient of
        // `y`.
        let grads = (y * &grad)?.sum_all()?.backward()?;
        let all = [&x, &down, &up].iter().all(|var| grads.get(var.as_tensor()).is_some());
        if all { Ok(()) } else { Err(Error::argument("bench", "candle computed no gradient for x, down or up")) }
    }))
}

/// Runs the functions in turn, each at least `least` times, and for at least `seconds` in total. Returns the median time
/// of each in ms.
fn race(sides: &mut [&mut dyn FnMut() -> Result<()>], least: usize, seconds: f64, device: &Device) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); sides.len()];
    for side in &mut *sides {
        for _ in 0..3 {
            side()?;
        }
    }
    synchronize(device)?;
    let start = Instant::now();
    while times[0].len() < least || start.elapsed().as_secs_f64() < seconds {
        for (side, times) in sides.iter_mut().zip(&mut times) {
            let start = Instant::now();
            side()?;
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
