//! Prints the milliseconds per step of several optimizers, and of gradient clipping ("clip"). The columns are:
//! `one`, one large variable; `flat`, adapter-sized variables in one flat buffer; `loose`, adapter-sized variables with
//! separate storage.
//!
//! `cargo bench -p trainable-candle-nn --bench optim -- [MILLIONS_OF_ELEMENTS]`.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use trainable_candle_core::cpu::pool::num_threads;
use trainable_candle_core::{DType, Device, FlatBuffer, Result, Tensor, Var};
use trainable_candle_nn::optim::{Adam, AdamW, AdamW8bit, Lion, Lion8bit, NormType, Optimizer, SGD, clip_grad_norm_};

const STEPS: usize = 15;
/// Elements of an adapter-sized variable: a LoRA matrix of rank 16 for 1280 features.
const ADAPTER: usize = 16 * 1280;

fn main() -> Result<()> {
    let millions: usize = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(16);
    let total = millions << 20;
    println!("{millions} Mi f32 elements, {} threads, best of {STEPS} steps in ms", num_threads());
    println!("{:<12}{:>12}{:>12}{:>12}", "", "one", "flat", "loose");
    for name in ["SGD", "Adam", "AdamW", "Lion", "AdamW8bit", "Lion8bit", "clip"] {
        print!("{name:<12}");
        for layout in [Layout::One, Layout::Flat, Layout::Loose] {
            print!("{:>12.1}", best_step(name, &variables(total, layout)?)?);
        }
        println!();
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Layout {
    One,
    Flat,
    Loose,
}

fn variables(total: usize, layout: Layout) -> Result<Vec<Var>> {
    let randn = |n: usize| Tensor::randn(0.0, 1.0, n, DType::F32, &Device::Cpu);
    let many = || (0..total / ADAPTER).map(|_| randn(ADAPTER)).collect::<Result<Vec<_>>>();
    let vars = match layout {
        Layout::One => vec![Var::from_tensor(&randn(total)?)?],
        Layout::Flat => FlatBuffer::new(&many()?)?.vars().to_vec(),
        Layout::Loose => many()?.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?,
    };
    for var in &vars {
        var.set_grad(&randn(var.elem_count())?)?;
    }
    Ok(vars)
}

fn best_step(name: &str, vars: &[Var]) -> Result<f64> {
    let params = vars.to_vec();
    let mut opt: Box<dyn Optimizer> = match name {
        "SGD" => Box::new(SGD::new(params, 1e-3)?),
        "Adam" => Box::new(Adam::new(params, 1e-3)?),
        "AdamW" => Box::new(AdamW::new(params, 1e-3, 0.01)?),
        "Lion" => Box::new(Lion::new(params, 1e-4, 0.01)?),
        "AdamW8bit" => Box::new(AdamW8bit::new(params, 1e-3, 0.01)?),
        _ => Box::new(Lion8bit::new(params, 1e-4, 0.01)?),
    };
    let mut best = f64::INFINITY;
    for _ in 0..STEPS {
        let start = Instant::now();
        if name == "clip" {
            clip_grad_norm_(vars, f64::INFINITY, NormType::L2, false)?;
        } else {
            opt.step_all()?;
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}
