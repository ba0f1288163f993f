//! Prints the milliseconds of the fastest step of several optimizers, and of the gradient norm that clipping needs
//! ("clip"). The columns are: `one`, one large variable; `flat`, adapter-sized variables in one flat buffer; `loose`,
//! adapter-sized variables with separate storage.
//!
//! ```text
//! cargo bench -p trainable-candle-nn --bench optim -- [SIZE]
//! ```
//!
//! SIZE is the number of elements of all variables together, in units of 2²⁰ (default: 16).
#![allow(clippy::print_stdout)]

use std::time::Instant;

use trainable_candle_core::cpu::pool::num_threads;
use trainable_candle_core::{DType, Device, FlatBuffer, Result, Tensor, Var};
use trainable_candle_nn::optim::{Adam, AdamW, AdamW8bit, Lion, Lion8bit, NormType, Optimizer, SGD, clip_grad_norm_};

/// The number of steps, of which the fastest counts.
const STEPS: usize = 15;
/// The number of elements of an adapter-sized variable: a LoRA matrix of rank 16 for 1280 features.
const ADAPTER_ELEMENTS: usize = 16 * 1280;

fn main() -> Result<()> {
    let size: usize = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(16);
    let total = size << 20;
    println!("{size} Mi f32 elements, {} threads, best of {STEPS} steps in ms", num_threads());
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

/// How the elements are divided among variables: the columns of the table.
#[derive(Clone, Copy)]
enum Layout {
    One,
    Flat,
    Loose,
}

/// Makes variables with gradients, of `total` elements together. For adapter-sized variables, `total` is rounded down
/// to a multiple of their size.
fn variables(total: usize, layout: Layout) -> Result<Vec<Var>> {
    let randn = |elements: usize| Tensor::randn(0.0, 1.0, elements, DType::F32, &Device::Cpu);
    let adapter_sized = || (0..total / ADAPTER_ELEMENTS).map(|_| randn(ADAPTER_ELEMENTS)).collect::<Result<Vec<_>>>();
    let vars = match layout {
        Layout::One => vec![Var::from_tensor(&randn(total)?)?],
        Layout::Flat => FlatBuffer::new(&adapter_sized()?)?.vars().to_vec(),
        Layout::Loose => adapter_sized()?.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?,
    };
    for var in &vars {
        var.set_grad(&randn(var.elem_count())?)?;
    }
    Ok(vars)
}

/// Returns the time of the fastest step in ms.
fn best_step(name: &str, vars: &[Var]) -> Result<f64> {
    let params = vars.to_vec();
    let mut opt: Box<dyn Optimizer> = match name {
        "SGD" => Box::new(SGD::new(params, 1e-3)?),
        "Adam" => Box::new(Adam::new(params, 1e-3)?),
        "AdamW" => Box::new(AdamW::new(params, 1e-3, 0.01)?),
        "Lion" => Box::new(Lion::new(params, 1e-4, 0.01)?),
        "AdamW8bit" => Box::new(AdamW8bit::new(params, 1e-3, 0.01)?),
        // Lion8bit; also for "clip", which uses no optimizer.
        _ => Box::new(Lion8bit::new(params, 1e-4, 0.01)?),
    };
    let mut best = f64::INFINITY;
    for _ in 0..STEPS {
        let start = Instant::now();
        if name == "clip" {
            // With an infinite limit, no step scales the gradients.
            let (max_norm, error_if_nonfinite) = (f64::INFINITY, false);
            clip_grad_norm_(vars, max_norm, NormType::L2, error_if_nonfinite)?;
        } else {
            opt.step_all()?;
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}
