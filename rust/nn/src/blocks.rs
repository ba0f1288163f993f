//! [`Blocks`]: the repeated blocks of a model, and the checkpointing policy, which says which results of the blocks are
//! kept from the forward pass to the backward pass.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use trainable_candle_core::checkpoint::{Policy, checkpoint_with};
use trainable_candle_core::{Error, Result, Tensor};

use crate::streaming::Turn;
use crate::{Module, Visitor};

/// The largest number of stretches (groups of consecutive blocks) into which [nested](Blocks::nested) blocks are
/// divided. Each stretch is one checkpoint: the backward pass recomputes its blocks together, so their recomputed
/// results are in memory at the same time. With three stretches, these results need less memory than the results that
/// the layers around the blocks keep.
const STRETCHES: usize = 3;

/// The checkpointing policy of a model's blocks, or of its first blocks.
///
/// If only some blocks are recomputed, these are the first blocks, because the tape holds the results of the first
/// blocks the longest. While the backward pass recomputes the first blocks, the results of the later blocks are already
/// freed. If the last blocks were recomputed instead, their recomputed results would be in memory together with the
/// results of all earlier blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpointing {
    policy: Policy,
    /// The number of first blocks that have the policy; None if all blocks have it.
    count: Option<usize>,
}

impl Checkpointing {
    /// Apply `policy` to the first `count` blocks, and [`Policy::Selective`] to the rest of the model's `all` blocks.
    ///
    /// # Errors
    /// [`Error::Argument`] if `policy` does not recompute everything, or if `count` exceeds `all`.
    pub fn of_first(count: usize, policy: Policy, all: usize) -> Result<Self> {
        if !policy.recomputes_all() {
            let found = if policy == Policy::None { "none" } else { "selective" };
            let message = format!(
                "found a number of blocks for the policy \"{found}\", expected \"full\" or \"offload\"; leave it out"
            );
            return Err(Error::argument("checkpoint_blocks", message));
        }
        if count > all {
            let message =
                format!("found {count} blocks to recompute, expected at most {all}, the model's number of blocks");
            return Err(Error::argument("checkpoint_blocks", message));
        }
        Ok(Self { policy, count: Some(count) })
    }

    /// The policy of the block `index`.
    pub fn policy(self, index: usize) -> Policy {
        if self.count.is_none_or(|count| index < count) { self.policy } else { Policy::Selective }
    }

    /// Return the policies of the blocks from `start` on. The result numbers these blocks from 0.
    #[must_use]
    pub fn after(self, start: usize) -> Self {
        Self { count: self.count.map(|count| count.saturating_sub(start)), ..self }
    }
}

impl From<Policy> for Checkpointing {
    fn from(policy: Policy) -> Self {
        Self { policy, count: None }
    }
}

/// Blocks of one kind. [`run`](Self::run) runs them one after another; with [`run_one`](Self::run_one), the model runs
/// each separately. All results are kept from the forward to the backward pass until [`Module::set_checkpointing`] sets
/// another policy. The code of the model is the same for every policy.
pub struct Blocks<B> {
    blocks: Vec<Arc<B>>,
    /// Whether [`nested`](Self::nested) has marked the blocks.
    nested: bool,
    state: BlockState,
}

/// The state of blocks that changes after they are built: their checkpointing policies, and which of them have streamed
/// weights.
pub struct BlockState {
    checkpointing: RwLock<Checkpointing>,
    turns: RwLock<Turns>,
}

/// The [`Turn`]s of the blocks with streamed weights, by the index of the block. A turn copies the block's weights to
/// the device.
#[derive(Default)]
struct Turns {
    /// The turns of the blocks that read streamed weights while they run.
    block_units: HashMap<usize, Turn>,
    /// The turns of the blocks whose streamed weights [`Blocks::aside`] reads.
    modulation_units: HashMap<usize, Turn>,
}

impl BlockState {
    /// The initial state: all results are kept, and no block has streamed weights.
    fn initial() -> Self {
        Self { checkpointing: RwLock::new(Policy::None.into()), turns: RwLock::default() }
    }

    pub(crate) fn set(&self, checkpointing: Checkpointing) {
        *self.checkpointing.write().unwrap_or_else(PoisonError::into_inner) = checkpointing;
    }

    fn checkpointing(&self) -> Checkpointing {
        *self.checkpointing.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Set the turns of the blocks that have streamed weights, by the index of the block: `block_units` for the weights
    /// that a block reads while it runs, `modulation_units` for the weights that [`Blocks::aside`] reads.
    pub(crate) fn stream(&self, block_units: HashMap<usize, Turn>, modulation_units: HashMap<usize, Turn>) {
        *self.turns.write().unwrap_or_else(PoisonError::into_inner) = Turns { block_units, modulation_units };
    }

    fn turns(&self) -> RwLockReadGuard<'_, Turns> {
        self.turns.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn of a block that reads streamed weights while it runs.
    fn turn(&self, block: usize) -> Option<Turn> {
        self.turns().block_units.get(&block).cloned()
    }

    /// Whether any block reads streamed weights while it runs.
    fn streams(&self) -> bool {
        !self.turns().block_units.is_empty()
    }
}

impl<B> FromIterator<B> for Blocks<B> {
    fn from_iter<I: IntoIterator<Item = B>>(blocks: I) -> Self {
        let blocks = blocks.into_iter().map(Arc::new).collect();
        Self { blocks, nested: false, state: BlockState::initial() }
    }
}

impl<B> Blocks<B> {
    /// Mark the blocks as nested in a network whose other layers keep more for the backward pass than several of these
    /// blocks keep together. Under [`Policy::Full`] the backward pass then recomputes [`stretch`](Self::stretch) blocks
    /// at a time. So the tape needs less memory: it keeps one input for each stretch instead of one for each block. In
    /// return, the results of a whole stretch are recomputed at once. They fit into the memory that the backward pass
    /// has already freed: that of what the later layers of the network kept.
    #[must_use]
    pub fn nested(mut self) -> Self {
        self.nested = true;
        self
    }

    /// The number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The blocks in their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &B> {
        self.blocks.iter().map(AsRef::as_ref)
    }

    /// The state that [`Part::Blocks`](crate::Part::Blocks) shows of these blocks.
    pub const fn state(&self) -> &BlockState {
        &self.state
    }

    /// The number of blocks that the backward pass recomputes together under a policy that recomputes everything. The
    /// number is 1 unless the blocks are [nested](Self::nested). It is also 1 if weights are streamed, because weights
    /// are copied one block at a time, and under [`Policy::Offloaded`], because the blocks' inputs then take no memory
    /// of the device, so that keeping fewer of them would save none.
    pub fn stretch(&self) -> usize {
        if self.nested && !self.state.streams() && self.state.checkpointing().policy != Policy::Offloaded {
            self.blocks.len().div_ceil(STRETCHES).max(1)
        } else {
            1
        }
    }
}

impl<B: Send + Sync + 'static> Blocks<B> {
    /// Run `forward` on block `index` and `inputs`, under the block's checkpointing policy.
    ///
    /// # Errors
    /// Those of `forward`, of copying streamed weights and of [`checkpoint_with`].
    ///
    /// # Panics
    /// If there is no such block.
    pub fn run_one<F>(&self, index: usize, inputs: &[&Tensor], forward: F) -> Result<Tensor>
    where
        F: Fn(&B, &[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    {
        Ok(self.run_several(index, inputs, move |block, inputs| Ok(vec![forward(block, inputs)?]))?.remove(0))
    }

    /// As [`run_one`](Self::run_one), for a `forward` that returns several tensors.
    ///
    /// # Errors
    /// As [`run_one`](Self::run_one).
    ///
    /// # Panics
    /// If there is no such block.
    pub fn run_several<F>(&self, index: usize, inputs: &[&Tensor], forward: F) -> Result<Vec<Tensor>>
    where
        F: Fn(&B, &[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    {
        let block = self.blocks[index].clone();
        let turn = self.state.turn(index);
        let policy = self.state.checkpointing().policy(index);
        checkpointed(policy, turn, move |inputs: &[Tensor]| forward(&block, inputs), inputs)
    }

    /// Run `forward` on block `index` outside of the block's checkpoint, before the block runs. Models use this to
    /// compute the block's modulation (shifts, scales and gates from the timestep). The modulation has few
    /// values for each sample, so the tape keeps it: a recomputation would read the large weights behind it again.
    ///
    /// # Errors
    /// Those of `forward` and of copying streamed weights.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn aside<const N: usize>(
        &self,
        index: usize,
        forward: impl FnOnce(&B) -> Result<[Tensor; N]>,
    ) -> Result<[Tensor; N]> {
        let turn = self.state.turns().modulation_units.get(&index).cloned();
        let Some(turn) = turn else { return forward(&self.blocks[index]) };
        // `enter` copies the weights to the device. `reenter` marks a result, so that the backward pass copies them
        // again.
        turn.enter()?;
        Ok(forward(&self.blocks[index])?.map(|result| turn.reenter(result)))
    }

    /// Run `forward` on all blocks one after another. Each takes the previous block's result (the first takes `x`) and
    /// `conditions`.
    ///
    /// # Errors
    /// As [`run_one`](Self::run_one).
    pub fn run<F>(&self, x: &Tensor, conditions: &[&Tensor], forward: F) -> Result<Tensor>
    where
        F: Fn(&B, &Tensor, &[Tensor]) -> Result<Tensor> + Copy + Send + Sync + 'static,
    {
        let (checkpointing, mut x) = (self.state.checkpointing(), x.clone());
        let blocks_per_checkpoint = if checkpointing.policy.recomputes_all() { self.stretch() } else { 1 };
        let (first, rest) = self.blocks.split_at(checkpointing.count.unwrap_or(self.len()).min(self.len()));
        let mut start = 0;
        for blocks in first.chunks(blocks_per_checkpoint).chain(rest.chunks(1)) {
            // If weights are streamed, `blocks` is one block, so `turn` is the turn of all of `blocks`.
            let (policy, turn) = (checkpointing.policy(start), self.state.turn(start));
            start += blocks.len();
            let blocks = blocks.to_vec();
            let run = move |inputs: &[Tensor]| {
                let (x, conditions) = (inputs[0].clone(), &inputs[1..]);
                Ok(vec![blocks.iter().try_fold(x, |x, block| forward(block, &x, conditions))?])
            };
            let inputs: Vec<&Tensor> = std::iter::once(&x).chain(conditions.iter().copied()).collect();
            x = checkpointed(policy, turn, run, &inputs)?.remove(0);
        }
        Ok(x)
    }
}

/// Run `forward` on `inputs` under a checkpointing policy. With a `turn`, its streamed weights are copied to the device
/// before `forward`, and again before the backward pass reaches the results.
fn checkpointed<F>(policy: Policy, turn: Option<Turn>, forward: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
{
    let Some(turn) = turn else { return checkpoint_with(policy, forward, inputs) };
    let entered = turn.clone();
    let enter_and_run = move |inputs: &[Tensor]| {
        entered.enter()?;
        forward(inputs)
    };
    let results = checkpoint_with(policy, enter_and_run, inputs)?;
    Ok(results.into_iter().map(|result| turn.reenter(result)).collect())
}

impl<B: Module> Blocks<B> {
    /// Pass the blocks to `visitor` as `<name>.0`, `<name>.1`, ...
    pub(crate) fn visit<'a>(&'a self, name: &str, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.block_state(name, &self.state, self.blocks.len())?;
        let mut blocks = self.blocks.iter().enumerate();
        blocks.try_for_each(|(index, block)| visitor.module(&format!("{name}.{index}"), block.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use trainable_candle_core::{DType, Device, Var, grad};

    use super::*;

    /// A block with one parameter.
    struct Scale(Var);

    impl Module for Scale {
        fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
            visitor.tensor("scale", &self.0)
        }
    }

    struct Model(Blocks<Scale>);

    impl Module for Model {
        fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
            visitor.blocks("scales", &self.0)
        }
    }

    struct Two(Model, Model);

    impl Module for Two {
        fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
            visitor.module("a", &self.0)?;
            visitor.module("b", &self.1)
        }
    }

    #[test]
    fn blocks_are_named_by_index_and_policies_change_no_gradient() {
        let var = |value: f64| Var::from_tensor(&Tensor::full(value, 3, DType::F64, &Device::Cpu).unwrap()).unwrap();
        let model = Model((2..7).map(|i| Scale(var(f64::from(i)))).collect::<Blocks<_>>().nested());
        assert_eq!(model.named_tensors()[4].0, "scales.4.scale");
        let x = var(0.5);
        let gradients = || {
            let forward = |block: &Scale, x: &Tensor, added: &[Tensor]| x.mul(&block.0)?.add(&added[0])?.tanh();
            let y = model.0.run(&x, &[&x], forward).unwrap();
            let y = model.0.run_one(0, &[&y], |block, inputs| inputs[0].mul(&block.0)).unwrap();
            let vars: Vec<Var> = model.named_vars().into_iter().map(|(_, var)| var).chain([x.clone()]).collect();
            let vars: Vec<&Tensor> = vars.iter().map(|var| var.as_ref()).collect();
            let grads = grad(&y.sum_all().unwrap(), &vars, None, /* retain_graph: */ false).unwrap();
            grads.iter().map(|grad| grad.as_ref().unwrap().to_vec::<f64>().unwrap()).collect::<Vec<_>>()
        };
        let expected = gradients();
        // The gradients of the five blocks' parameters and of x.
        assert_eq!(expected.len(), 6);
        for policy in [Policy::Full, Policy::Selective] {
            model.set_checkpointing(policy);
            assert_eq!(gradients(), expected, "{policy:?}");
        }
        for count in 0..=5 {
            model.checkpoint_first(count, Policy::Full).unwrap();
            assert_eq!(gradients(), expected, "{count} blocks");
        }
    }

    #[test]
    fn checkpoint_first_sets_the_policy_of_the_first_blocks_and_rejects_large_counts_and_other_policies() {
        let var = || Var::from_tensor(&Tensor::full(2.0, 3, DType::F64, &Device::Cpu).unwrap()).unwrap();
        let blocks = |count| (0..count).map(|_| Scale(var())).collect::<Blocks<_>>();
        let model = Two(Model(blocks(2)), Model(blocks(3)));
        assert_eq!(model.blocks_to_checkpoint(), 5);
        model.checkpoint_first(3, Policy::Offloaded).unwrap();
        let policies = |blocks: &Blocks<Scale>| {
            (0..blocks.len()).map(|index| blocks.state.checkpointing().policy(index)).collect::<Vec<_>>()
        };
        assert_eq!(policies(&model.0.0), [Policy::Offloaded; 2]);
        assert_eq!(policies(&model.1.0), [Policy::Offloaded, Policy::Selective, Policy::Selective]);
        let error = model.checkpoint_first(6, Policy::Full).unwrap_err().to_string();
        assert!(error.contains("found 6 blocks to recompute, expected at most 5"), "{error}");
        let error = model.checkpoint_first(1, Policy::None).unwrap_err().to_string();
        assert!(error.contains("\"full\" or \"offload\""), "{error}");
    }
}
