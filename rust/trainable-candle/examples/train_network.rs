//! Train a small network, then train a LoRA on it for another task, without Python.
//!
//! ```text
//! cargo run --release --package trainable-candle --example train_network
//! cargo run --release --package trainable-candle --features cuda --example train_network -- cuda
//! ```
//!
//! The network learns the sine of a number. Then it is frozen, and its adapters learn the cosine.
#![allow(clippy::print_stdout)] // prints the progress of training

use trainable_candle::core::{device, rng};
use trainable_candle::prelude::*;

const HIDDEN: usize = 64;
const BATCH: usize = 256;
const STEPS: usize = 500;

/// Two layers. Their parameters are variables during training, and frozen tensors afterwards.
struct Network<T: Parameter> {
    hidden: Linear<T>,
    out: Linear<T>,
}

impl<T: Parameter> Network<T> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.out.forward(&self.hidden.forward(x)?.silu()?)
    }
}

impl Network<Var> {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { hidden: Linear::new(1, HIDDEN, device)?, out: Linear::new(HIDDEN, 1, device)? })
    }

    fn vars(&self) -> Vec<Var> {
        [self.hidden.vars(), self.out.vars()].concat()
    }

    fn frozen(&self) -> Network<Tensor> {
        let frozen = |layer: &Linear<Var>| {
            Linear::from_weight(layer.weight.detach(), layer.bias.as_ref().map(|bias| bias.detach()))
        };
        Network { hidden: frozen(&self.hidden), out: frozen(&self.out) }
    }
}

/// The layers by name, for adapters and files.
impl Module for Network<Tensor> {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("hidden", &self.hidden)?;
        visitor.linear("out", &self.out)
    }
}

/// Train `vars`, so that the network computes `target`; return the loss of the last step.
fn fit<T: Parameter>(
    network: &Network<T>,
    vars: Vec<Var>,
    target: impl Fn(&Tensor) -> Result<Tensor>,
    device: &Device,
) -> Result<f64> {
    let mut optimizer = AdamW::new(vars, 1e-2, 0.0)?; // learning rate, weight decay
    let mut last = f64::INFINITY;
    for step in 1..=STEPS {
        let x = Tensor::rand(-3.0, 3.0, (BATCH, 1), DType::F32, device)?;
        let loss = mse_loss(&network.forward(&x)?, &target(&x)?)?;
        optimizer.step(&loss.backward()?)?; // applies the gradients and clears them
        if step % 100 == 0 {
            last = loss.item()?;
            println!("step {step}: loss {last:.5}");
        }
    }
    Ok(last)
}

fn main() -> Result<()> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "cpu".into());
    // The second argument of `parse` gives further folders with CUDA libraries: none beside the system loader's.
    let device = device::parse(&name, Vec::new)?;
    rng::manual_seed(0);

    println!("the network learns the sine");
    let trained = Network::new(&device)?;
    let sine_loss = fit(&trained, trained.vars(), Tensor::sin, &device)?;

    println!("its adapters learn the cosine");
    let network = trained.frozen();
    let config = LoraConfig { r: 8, lora_alpha: 8.0, target_modules: vec!["all-linear".into()], ..Default::default() };
    let adapter = AdapterSet::attach(config, &network.named_layers())?;
    let cosine_loss = fit(&network, adapter.vars().to_vec(), Tensor::cos, &device)?;

    let x = Tensor::new(&[[0f32], [1.0]], &device)?;
    let unmerged = network.forward(&x)?;
    adapter.merge()?; // from here on, each layer computes with one merged weight
    let merged = network.forward(&x)?;
    let difference = mse_loss(&unmerged, &merged)?.item()?;
    println!("after merging, the results differ by {difference:.1e} (mean square)");
    assert!(sine_loss < 0.01 && cosine_loss < 0.01 && difference < 1e-6, "losses of {sine_loss} and {cosine_loss}");

    adapter.set_enabled(false); // without adapters, the network computes the sine again
    assert!(mse_loss(&network.forward(&x)?, &x.sin()?)?.item()? < 0.05);
    Ok(())
}
