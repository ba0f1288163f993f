//! [`LinearGroup`]: linear layers that share their input.

use trainable_candle_core::ops::gated::{swiglu_feed_forward, swiglu_linear_group};
use trainable_candle_core::ops::linear_group::{LinearGroup as Group, linear_group};
use trainable_candle_core::streaming::Streamed;
use trainable_candle_core::{Error, Quantized, Result, Tensor, Var, Weight};

use crate::{Layer, Linear, Visitor};

/// Linear layers that share one input. If [`new`](Self::new) has joined the layers' parameters, one matrix product
/// computes the results of all layers. Each layer has its own name and its own slot for an adapter.
pub struct LinearGroup {
    names: Vec<&'static str>,
    members: Vec<Linear<Tensor>>,
    /// The number of output features of each member: the rows of its weight.
    sizes: Vec<usize>,
    /// None if [`LinearGroup::new`] has not joined the members' parameters.
    joined: Option<JoinedParameters>,
}

/// The parameters of all members, stacked along the output features. They share their storage with the members' own
/// parameters.
struct JoinedParameters {
    weight: Weight,
    bias: Option<Tensor>,
}

/// The results of a group.
pub enum Projected {
    /// The results of all members side by side in the last dimension, in the order of the members.
    Joined(Tensor),
    /// One result for each member, in the order of the members.
    Separate(Vec<Tensor>),
}

impl LinearGroup {
    /// Group named layers, which have no adapters yet. If all layers are frozen, their parameters are joined where
    /// possible: they move to common storage. If one layer is trainable, all layers keep their own storage.
    ///
    /// # Errors
    /// [`Error::Shape`] if the layers have different numbers of input features, [`Error::Device`] if their quantized
    /// weights are on different devices, [`Error::OutOfMemory`] if the common storage does not fit.
    pub fn new(layers: Vec<(&'static str, Linear<Tensor>)>) -> Result<Self> {
        let (names, mut members): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
        if let Some(other) = members.iter().find(|member| member.in_features() != members[0].in_features()) {
            return Err(Error::shape(
                "LinearGroup",
                format!(
                    "the layers have {} and {} input features, expected the same number",
                    members[0].in_features(),
                    other.in_features()
                ),
            ));
        }
        let sizes: Vec<usize> = members.iter().map(Linear::out_features).collect();
        let joined = join(&mut members)?;
        if let Some(JoinedParameters { weight, bias }) = &joined {
            let mut start = 0;
            for (member, &size) in members.iter_mut().zip(&sizes) {
                let rows = |tensor: &Tensor| tensor.narrow(0, start, size);
                // Of the weights, only plain ones change here; after `join`, the others already share storage.
                let member_weight =
                    weight.tensor().map_or_else(|| Ok(member.weight.clone()), |all| rows(all).map(Weight::from))?;
                *member = Linear::from_weight(member_weight, bias.as_ref().map(rows).transpose()?);
                start += size;
            }
        }
        Ok(Self { names, members, sizes, joined })
    }

    /// Apply all members and their adapters to `x (..., in_features)`. One matrix product computes the results of all
    /// frozen layers if their parameters are joined and all adapters are low-rank products.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the input does not fit; the errors of the adapters.
    pub fn forward(&self, x: &Tensor) -> Result<Projected> {
        match self.as_one(x, linear_group)? {
            Some(results) => Ok(Projected::Joined(results)),
            None => Ok(Projected::Separate(self.members.iter().map(|m| m.forward(x)).collect::<Result<_>>()?)),
        }
    }

    /// Apply the two members, features and gate in this order, to `x (..., in_features)`, and return the
    /// [`swiglu`](trainable_candle_core::ops::gated::swiglu) of their results, `(..., out_features)`. If one matrix
    /// product can compute both members (see [`forward`](Self::forward)), one operation computes the product and the
    /// SwiGLU. The tape then need not keep the SwiGLU, because the backward pass can recompute it
    /// ([`recomputed`](Tensor::recomputed)).
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Shape`] if there are not two members with the same number of output
    /// features.
    pub fn forward_swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let [features, gate] = self.features_and_gate()?;
        if let Some(result) = self.as_one(x, swiglu_linear_group)? {
            return Ok(result.recomputed());
        }
        features.forward(x)?.mul(&gate.forward(x)?.silu()?)
    }

    /// Apply the layer `last` to the result of [`forward_swiglu`](Self::forward_swiglu). `last` has as many input
    /// features as each of the two members has output features. If the adapters of `last` and of the members are
    /// low-rank products, one operation may compute both steps; [`swiglu_feed_forward`] says when.
    ///
    /// # Errors
    /// As [`forward_swiglu`](Self::forward_swiglu) and [`Linear::forward`].
    pub fn feed_forward(&self, x: &Tensor, last: &Linear<Tensor>) -> Result<Tensor> {
        // Only for its errors.
        self.features_and_gate()?;
        let adapter = last.slot().get();
        if let Some(product) = adapter.map(|adapter| adapter.as_low_rank(x.dtype())).transpose()?.flatten() {
            let (base, sizes, low_rank) = (last.base(), [last.out_features()], [Some(product)]);
            let last_group = Group { weight: base.weight, bias: base.bias, sizes: &sizes, low_rank: &low_rank };
            if let Some(result) = self.as_one(x, |x, group| swiglu_feed_forward(x, group, last_group))? {
                return Ok(result);
            }
        }
        last.forward(&self.forward_swiglu(x)?)
    }

    /// Return the two members of a group that computes a SwiGLU.
    fn features_and_gate(&self) -> Result<[&Linear<Tensor>; 2]> {
        let [features, gate] = self.members.as_slice() else {
            let found = self.members.len();
            return Err(Error::shape("LinearGroup", format!("found {found} layers, expected 2: features and gate")));
        };
        let found = [features, gate].map(Linear::out_features);
        if found[0] != found[1] {
            let message = format!(
                "features and gate have {} and {} output features, expected the same number",
                found[0], found[1]
            );
            return Err(Error::shape("LinearGroup", message));
        }
        Ok([features, gate])
    }

    /// Apply `op` to all members together. Return None if their parameters are not joined, or if an adapter is not a
    /// low-rank product.
    fn as_one(&self, x: &Tensor, op: impl Fn(&Tensor, Group<'_>) -> Result<Tensor>) -> Result<Option<Tensor>> {
        let Some(JoinedParameters { weight, bias }) = &self.joined else { return Ok(None) };
        let mut low_rank = Vec::with_capacity(self.members.len());
        for member in &self.members {
            low_rank.push(match member.slot().get() {
                None => None,
                Some(adapter) => match adapter.as_low_rank(x.dtype())? {
                    Some(product) => Some(product),
                    None => return Ok(None),
                },
            });
        }
        let (weight, bias) = (weight.into(), bias.as_ref());
        op(x, Group { weight, bias, sizes: &self.sizes, low_rank: &low_rank }).map(Some)
    }

    /// List the members.
    pub fn layers(&self) -> Vec<Layer<'_>> {
        self.members.iter().map(Layer::Linear).collect()
    }

    /// Pass the members to `visitor` under their names.
    ///
    /// # Errors
    /// Those of the visitor.
    pub fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.names.iter().zip(&self.members).try_for_each(|(name, member)| visitor.linear(name, member))
    }
}

/// Join the parameters of frozen layers. Afterwards, quantized and streamed weights of `members` share the storage of
/// the result. Plain weights and biases do not yet; the caller must replace them by views of the result.
///
/// Return None if there are fewer than two layers, if a layer is trainable or has shapes but no values, if the layers
/// differ in presence of a bias or in kind of weight (plain, quantized, streamed), if their plain weights and biases
/// differ in dtype or device, or if [`Streamed::join`] cannot join their streamed weights.
fn join(members: &mut [Linear<Tensor>]) -> Result<Option<JoinedParameters>> {
    let Some(first) = members.first() else { return Ok(None) };
    let (dtype, has_bias) = (first.weight.dtype(), first.bias.is_some());
    let device = first.weight.device().clone();
    let fits = |tensor: &Tensor| {
        Var::of(tensor).is_none()
            // False for a tensor with a shape but no values, which repeats one element.
            && tensor.raw().is_contiguous()
            && tensor.dtype() == dtype
            && tensor.device().same_device(&device)
    };
    let alike = members.iter().all(|member| {
        member.bias.is_some() == has_bias && member.weight.tensor().into_iter().chain(&member.bias).all(fits)
    });
    if members.len() < 2 || !alike {
        return Ok(None);
    }
    let stack = |tensors: Vec<&Tensor>| Tensor::cat(&tensors, 0).map(|tensor| tensor.detach());
    let plain: Vec<&Tensor> = members.iter().filter_map(|member| member.weight.tensor()).collect();
    let quantized: Vec<&Quantized> = members.iter().filter_map(|member| member.weight.quantized()).collect();
    let streamed: Vec<&Streamed> = members.iter().filter_map(|member| member.weight.streamed()).collect();
    let count = members.len();
    let as_weights = |parts: Vec<Quantized>| parts.into_iter().map(Weight::from).collect::<Vec<_>>();
    // `parts` are the members' views of `weight`, or None if the members' weights need not change here.
    let (weight, parts) = if plain.len() == count {
        (Weight::from(stack(plain)?), None)
    } else if quantized.len() == count {
        // On a GPU, one product computes all members if their quantized weights are in common storage.
        match if device.is_cuda() { Quantized::join(&quantized)? } else { None } {
            Some((joined, parts)) => (joined.into(), Some(as_weights(parts))),
            // The result of `cat` shares the storage of the members' weights.
            None => (Quantized::cat(&quantized)?.into(), None),
        }
    } else if streamed.len() == count {
        let Some((joined, parts)) = Streamed::join(&streamed)? else { return Ok(None) };
        (Weight::Streamed(joined), Some(parts.into_iter().map(Weight::Streamed).collect()))
    } else {
        return Ok(None);
    };
    for (member, part) in members.iter_mut().zip(parts.into_iter().flatten()) {
        member.weight = part;
    }
    let bias =
        has_bias.then(|| stack(members.iter().filter_map(|member| member.bias.as_ref()).collect())).transpose()?;
    Ok(Some(JoinedParameters { weight, bias }))
}
