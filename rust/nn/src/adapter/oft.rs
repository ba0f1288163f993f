//! OFT (Qiu et al. 2023, arXiv:2306.07280) rotates blocks of a layer's inputs, y = W R x + b, or of its outputs,
//! y = R W x + b.
//!
//! R is block diagonal. For outputs, each block is the Cayley transform C = (I - Q) (I + Q)⁻¹ of a skew-symmetric Q;
//! for inputs, each block is Cᵀ. The strict upper triangle of Q is trained; Q = 0 gives the identity. The layer rotates
//! activations, not the weight. A row vector x becomes x + x D with D = Rᵀ - I. The layer does not compute with R
//! itself, because bf16 would round the diagonal of R to 1 if the rotation is small.
//!
//! peft rotates inputs; `LyCORIS` and `ComfyUI` rotate outputs. The parameter of each side has the name that these
//! programs give it. In place of C, peft can use the first terms of a series (`use_cayley_neumann`). Their sum
//! approximates (I + Q) (I - Q)⁻¹ = C⁻¹, which is also a rotation and can be trained equally well.
//!
//! The code follows
//! <https://github.com/huggingface/peft/blob/5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40/src/peft/tuners/oft/layer.py#L116>,
//! <https://github.com/KohakuBlueleaf/LyCORIS/blob/01ca138aead1b5d2e5c4b1b22c3ba6ba274e7d14/lycoris/modules/diag_oft.py#L87>
//! and
//! <https://github.com/comfyanonymous/ComfyUI/blob/3684cff31bb470fc106b2c843224e69780266cca/comfy/weight_adapter/oft.py#L118>.

use std::ops::RangeInclusive;
use std::str::FromStr;

use trainable_candle_core::ops::cayley::{cayley, size_of as block_size_of};
use trainable_candle_core::{DType, Device, Error, Result, Tensor, Var};

use super::kind::{Parameters, SavedByAdapter, Start, StartValues, find};
use super::{Adapter, AdapterKind, AdapterSettings, Layout};
use crate::base::{Base, Operation};

/// The parameter that rotates inputs: the strict upper triangles of its blocks, (blocks, n (n - 1) / 2).
const INPUT: &str = "oft_R.weight";
/// The parameter that rotates outputs: triangles as in [`INPUT`]. Files have a square matrix M for each block, and Q is
/// M - Mᵀ.
const OUTPUT: &str = "oft_blocks";

/// The numbers of terms that the series may have.
pub(super) const TERMS: RangeInclusive<usize> = 2..=64;

/// OFT in the registry.
pub static KIND: AdapterKind = AdapterKind {
    name: "oft",
    parameters: &[(INPUT, Layout::Same), (OUTPUT, Layout::UpperTriangle)],
    // The parameters by which readers of files recognize OFT.
    mark: &[INPUT, OUTPUT],
    // No parameter has a rank.
    ranked: &[],
    saved,
    start,
    build,
};

/// The side of a layer that OFT rotates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OftSide {
    /// The inputs, as peft does.
    #[default]
    Input,
    /// The outputs without the bias, as `LyCORIS` and `ComfyUI` do.
    Output,
}

impl OftSide {
    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
        }
    }

    /// Return the side that an adapter with parameters of these names rotates; `None` if it is not OFT.
    pub fn of<'a>(parameters: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        parameters.into_iter().find_map(|name| match name {
            INPUT => Some(Self::Input),
            OUTPUT => Some(Self::Output),
            _ => None,
        })
    }

    /// The name of the parameter that rotates this side.
    pub const fn parameter(self) -> &'static str {
        match self {
            Self::Input => INPUT,
            Self::Output => OUTPUT,
        }
    }

    /// The number of features on this side of a layer.
    fn features(self, base: &Base<'_>) -> usize {
        match self {
            Self::Input => base.inputs(),
            Self::Output => base.rows(),
        }
    }
}

impl FromStr for OftSide {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Input, Self::Output].into_iter().find(|side| side.name() == text).ok_or_else(|| {
            Error::Config(format!("LoraConfig: oft_side is \"{text}\", expected \"input\" or \"output\""))
        })
    }
}

/// Compute the size of blocks on a side with `features` features: the divisor of `features` that is nearest to
/// `wanted`, or the smaller one if two are equally near. This is peft's `adjust_oft_parameters`.
pub fn oft_block_size(features: usize, wanted: usize) -> usize {
    if wanted >= features {
        return features;
    }
    let lower = (1..=wanted).rev().find(|size| features.is_multiple_of(*size)).unwrap_or(1);
    let higher = (wanted..=features).find(|size| features.is_multiple_of(*size)).unwrap_or(features);
    if wanted - lower <= higher - wanted { lower } else { higher }
}

/// The initial values: zeros, which give the identity.
fn start(base: &Base<'_>, settings: &AdapterSettings) -> Parameters<Start> {
    let features = settings.oft_side.features(base);
    // `max` avoids a division by 0 for a layer without features.
    let size = oft_block_size(features, settings.oft_block_size).max(1);
    vec![(settings.oft_side.parameter(), Start::new([features / size, size * (size - 1) / 2], StartValues::Zero))]
}

/// For the gradient of the blocks, the tape keeps a view of the activations before their rotation: the layer's input,
/// or its result without the bias. The input is kept even if the backward pass could compute it again
/// (`even_if_recomputable`). For inputs, selective checkpointing also keeps x D, the result of a matrix product.
fn saved(base: &Base<'_>, settings: &AdapterSettings) -> SavedByAdapter {
    match settings.oft_side {
        OftSide::Input => {
            SavedByAdapter { input: true, even_if_recomputable: true, values: 0, products: base.inputs() }
        }
        OftSide::Output => {
            SavedByAdapter { input: false, even_if_recomputable: false, values: base.rows(), products: 0 }
        }
    }
}

/// Makes the adapter of a layer. The side follows from the name of the parameter, and the size of the blocks from its
/// shape.
fn build(parameters: &[(&'static str, Var)], base: &Base<'_>, settings: &AdapterSettings) -> Result<Box<dyn Adapter>> {
    let (side, upper) = match (find(parameters, INPUT), find(parameters, OUTPUT)) {
        (Some(upper), None) => (OftSide::Input, upper),
        (None, Some(upper)) => (OftSide::Output, upper),
        _ => {
            let message =
                format!("OFT: found both or none of the parameters {INPUT} and {OUTPUT}, expected exactly one");
            return Err(Error::Config(message));
        }
    };
    if base.operation != Operation::Linear && side == OftSide::Input {
        return Err(Error::Config(
            "OFT: the layer is a convolution, and OFT rotates only the outputs of convolutions; give \
             oft_side=\"output\" (--oft-side output), or leave the layer out with exclude_modules"
                .into(),
        ));
    }
    if base.groups() != 1 {
        return Err(Error::Config(format!(
            "OFT: a convolution with {} groups cannot have this adapter; leave the layer out with exclude_modules",
            base.groups()
        )));
    }
    let features = side.features(base);
    let size = match *upper.dims() {
        [count, elements] => block_size_of(elements).filter(|size| count * size == features),
        _ => None,
    };
    let Some(size) = size else {
        let text = format!(
            "the triangles of {} have shape {:?}, expected (k, n (n - 1) / 2) with k * n = {features}",
            side.parameter(),
            upper.dims()
        );
        return Err(Error::shape("OFT", text));
    };
    if size == 1 {
        return Err(Error::Config(format!(
            "OFT: the divisor of the layer's {features} features nearest to oft_block_size is 1, and blocks of 1 \
             feature cannot rotate; give another oft_block_size, or leave the layer out with exclude_modules"
        )));
    }
    if let Some(terms) = settings.cayley_neumann_terms.filter(|terms| !TERMS.contains(terms)) {
        return Err(Error::Config(format!(
            "OFT: num_cayley_neumann_terms is {terms}, expected {} to {}",
            TERMS.start(),
            TERMS.end()
        )));
    }
    let series = settings.cayley_neumann_terms.map(|terms| Series::new(terms, size, upper.device())).transpose()?;
    Ok(Box::new(Oft { upper, size, side, scale: settings.scale, series }))
}

/// The row and the column of each element of a matrix's strict upper triangle, row by row.
pub(super) fn upper_places(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size).flat_map(move |row| (row + 1..size).map(move |column| (row, column)))
}

/// The first terms of the series of peft's `use_cayley_neumann`.
struct Series {
    /// The number of terms, at least 2.
    terms: usize,
    /// For each element of Q, its index in a list that has the triangle's elements, then their negatives, then one 0.
    ids: Tensor,
}

impl Series {
    fn new(terms: usize, size: usize, device: &Device) -> Result<Self> {
        let triangle = size * (size - 1) / 2;
        let mut ids = vec![2 * triangle as i64; size * size];
        for (id, (row, column)) in upper_places(size).enumerate() {
            ids[row * size + column] = id as i64;
            ids[column * size + row] = (triangle + id) as i64;
        }
        Ok(Self { terms, ids: Tensor::from_vec(ids, size * size, device)? })
    }

    /// Compute the series minus I, with the powers that peft sums: 2 Q for two terms, otherwise 2 Q + 2 Q² + … + Qⁿ
    /// with n = max(3, `terms` - 1), where all powers but the last have the factor 2. `size` is the size of the blocks.
    fn change(&self, upper: &Tensor, size: usize) -> Result<Tensor> {
        let count = upper.dims()[0];
        let zero = Tensor::zeros((count, 1), upper.dtype(), upper.device())?;
        let elements = Tensor::cat(&[upper, &upper.neg()?, &zero], 1)?;
        let q = elements.index_select(&self.ids, 1)?.reshape((count, size, size))?;
        let mut change = q.mul_scalar(2.0)?;
        if self.terms > 2 {
            let mut power = q.matmul(&q)?;
            change = change.add(&power.mul_scalar(2.0)?)?;
            for _ in 3..self.terms - 1 {
                power = power.matmul(&q)?;
                change = change.add(&power.mul_scalar(2.0)?)?;
            }
            change = change.add(&power.matmul(&q)?)?;
        }
        Ok(change)
    }
}

/// The rotations of one layer.
struct Oft {
    /// The strict upper triangles of the blocks' matrices Q, (blocks, n (n - 1) / 2).
    upper: Var,
    /// The size n of the blocks.
    size: usize,
    side: OftSide,
    /// The factor s in front of R - I; 1 in training.
    scale: f64,
    /// The series in place of the Cayley transform, if the settings ask for it.
    series: Option<Series>,
}

impl Oft {
    /// Compute s (Rᵀ - I), (blocks, n, n), by which row vectors are multiplied from the right. The dtype is f64 for
    /// `dtype` f64, otherwise f32.
    fn change(&self, dtype: DType) -> Result<Tensor> {
        let upper = self.upper.to_dtype(if dtype == DType::F64 { DType::F64 } else { DType::F32 })?;
        let change = match &self.series {
            Some(series) => series.change(&upper, self.size)?,
            // `cayley` computes C - I.
            None => cayley(&upper)?,
        };
        let change = if self.scale == 1.0 { change } else { change.mul_scalar(self.scale)? };
        match self.side {
            OftSide::Input => Ok(change),
            // `LyCORIS` and `ComfyUI` multiply column vectors of outputs by C, so row vectors are multiplied by Cᵀ.
            OftSide::Output => change.transpose(1, 2),
        }
    }
}

/// Multiply row vectors `x (..., features)` by the block diagonal matrix I + `change (blocks, n, n)`.
fn rotated(x: &Tensor, change: &Tensor) -> Result<Tensor> {
    let (count, size) = (change.dims()[0], change.dims()[1]);
    let rows = x.elem_count() / (count * size).max(1);
    let blocks = x.reshape((rows, count, size))?;
    let added = blocks.transpose(0, 1)?.matmul(&change.to_dtype(x.dtype())?)?;
    blocks.add(&added.transpose(0, 1)?)?.reshape(x.dims())
}

impl Adapter for Oft {
    fn forward(&self, x: &Tensor, base: &Base<'_>) -> Result<Tensor> {
        let change = self.change(x.dtype())?;
        match (self.side, base.bias) {
            (OftSide::Input, _) => base.forward(&rotated(x, &change)?),
            (OftSide::Output, None) => rotated(&base.forward(x)?, &change),
            (OftSide::Output, Some(bias)) => rotated(&Base { bias: None, ..*base }.forward(x)?, &change)?.add(bias),
        }
    }

    /// Compute W R for inputs, or R W for outputs, with I + s (R - I) in the place of R.
    fn adapted_weight(&self, base: &Base<'_>) -> Result<Tensor> {
        // `change` is s (R - I). For inputs, R multiplies the rows of W from the right; for outputs, it multiplies W
        // from the left.
        let change = self.change(base.weight.dtype())?.transpose(1, 2)?;
        let weight = base.weight.values(change.dtype())?;
        match self.side {
            OftSide::Input => rotated(&weight, &change),
            OftSide::Output => {
                let blocks = weight.reshape((change.dims()[0], self.size, base.columns()))?;
                blocks.add(&change.matmul(&blocks)?)?.reshape(weight.dims())
            }
        }
    }

    fn scale(&self) -> f64 {
        self.scale
    }

    /// Does nothing: OFT has no dropout.
    fn set_training(&self, _training: bool) {}
}

#[cfg(test)]
mod tests {
    use super::oft_block_size;

    /// The expected values are the results of `OFTLayer.adjust_oft_parameters` of peft 0.21.2.
    #[test]
    fn block_sizes_are_those_of_peft() {
        for (features, wanted, expected) in [
            (2048, 32, 32),
            (320, 48, 40),
            (100, 32, 25),
            (48, 32, 24),
            (10, 32, 10),
            (254, 32, 2),
            (12, 5, 4),
            (90, 8, 9),
        ] {
            assert_eq!(oft_block_size(features, wanted), expected, "{features} features, wanted {wanted}");
        }
    }
}
