//! Which variables of an optimizer share a counter of steps on a device.

use std::ops::Range;

use rustc_hash::FxHashMap;
use trainable_candle_core::Var;

use super::state::Group;

/// Which variables share settings: those in one group with the same number of steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Slots {
    /// The optimizer's group of each slot.
    pub(super) group_of: Vec<usize>,
    /// The slot of each variable, in their order.
    pub(super) of: Vec<usize>,
}

impl Slots {
    /// The slots of variables that have taken the steps in `groups`.
    pub(super) fn new<C>(groups: &[Group<C>]) -> Self {
        let mut slots = Self::default();
        let mut known = FxHashMap::default();
        for (index, group) in groups.iter().enumerate() {
            for parameter in &group.parameters {
                let slot = *known.entry((index, parameter.step)).or_insert_with(|| {
                    slots.group_of.push(index);
                    slots.group_of.len() - 1
                });
                slots.of.push(slot);
            }
        }
        slots
    }

    /// The steps that the variables of each slot have taken; None if they differ within a slot.
    pub(super) fn steps<C>(&self, groups: &[Group<C>]) -> Option<Vec<u64>> {
        let mut steps = vec![None; self.group_of.len()];
        let parameters = groups.iter().flat_map(|group| &group.parameters);
        // Empty variables take no steps.
        for (parameter, &slot) in parameters.zip(&self.of).filter(|(parameter, _)| parameter.var.elem_count() > 0) {
            if *steps[slot].get_or_insert(parameter.step) != parameter.step {
                return None;
            }
        }
        // A slot without variables has taken none.
        Some(steps.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// The slots for a step of the variables with the indices `found`, and the old slots that are split for it. In
    /// their order, each gets a new slot for its variables that take part. None if no slot must be split.
    pub(super) fn split(
        &self,
        vars: &[&Var],
        found: impl Iterator<Item = usize> + Clone,
    ) -> Option<(Self, Vec<usize>)> {
        let count = self.group_of.len();
        let (mut sharing, mut taking_part) = (vec![0usize; count], vec![0usize; count]);
        for (&slot, _) in self.of.iter().zip(vars).filter(|(_, var)| var.elem_count() > 0) {
            sharing[slot] += 1;
        }
        for index in found.clone() {
            taking_part[self.of[index]] += 1;
        }
        let split: Vec<usize> =
            (0..count).filter(|&slot| taking_part[slot] > 0 && taking_part[slot] < sharing[slot]).collect();
        if split.is_empty() {
            return None;
        }
        let mut slots = self.clone();
        for (new, &slot) in (count..).zip(&split) {
            slots.group_of.push(self.group_of[slot]);
            for index in found.clone().filter(|&index| self.of[index] == slot) {
                slots.of[index] = new;
            }
        }
        Some((slots, split))
    }

    /// The slots of the variables with the indices `found`, in runs of neighbours.
    pub(super) fn runs(&self, found: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
        let mut used: Vec<usize> = found.map(|index| self.of[index]).collect();
        used.sort_unstable();
        used.dedup();
        let mut runs: Vec<Range<usize>> = Vec::new();
        for slot in used {
            match runs.last_mut() {
                Some(run) if run.end == slot => run.end += 1,
                _ => runs.push(slot..slot + 1),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use smallvec::SmallVec;
    use trainable_candle_core::capture::Fixed;
    use trainable_candle_core::{DType, Device};

    use super::super::state::Parameter;
    use super::*;

    fn groups(steps: &[&[u64]]) -> Vec<Group<()>> {
        let var = || Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let parameter = |&step: &u64| Parameter { step, states: SmallVec::new(), ..Parameter::new(var()) };
        let group = |steps: &&[u64]| Group {
            config: Fixed::new("the configuration", ()),
            parameters: steps.iter().map(parameter).collect(),
        };
        steps.iter().map(group).collect()
    }

    #[test]
    fn variables_share_a_slot_while_they_step_together() {
        let all = groups(&[&[0, 0, 0], &[0]]);
        let vars: Vec<&Var> = all.iter().flat_map(|group| &group.parameters).map(|parameter| &parameter.var).collect();
        let slots = Slots::new(&all);
        assert_eq!((&slots.group_of[..], &slots.of[..]), (&[0, 1][..], &[0, 0, 0, 1][..]));
        assert!(slots.split(&vars, 0..4).is_none() && slots.split(&vars, 0..3).is_none());
        let (split, from) = slots.split(&vars, [1, 3].into_iter()).unwrap();
        assert_eq!((&split.group_of[..], &split.of[..], &from[..]), (&[0, 1, 0][..], &[0, 2, 0, 1][..], &[0][..]));
        let all = 0..3;
        assert_eq!(split.runs([3, 1, 0].into_iter()), std::slice::from_ref(&all));
        let last = 2..3;
        assert_eq!(split.runs([1].into_iter()), std::slice::from_ref(&last));
    }

    #[test]
    fn loaded_steps_fit_the_slots_or_do_not() {
        let slots = Slots::new(&groups(&[&[0, 0, 0], &[0]]));
        assert_eq!(slots.steps(&groups(&[&[7, 7, 7], &[5]])), Some(vec![7, 5]));
        let other = groups(&[&[7, 6, 7], &[5]]);
        assert_eq!(slots.steps(&other), None);
        let slots = Slots::new(&other);
        assert_eq!((slots.steps(&other), &slots.of[..]), (Some(vec![7, 6, 5]), &[0, 1, 0, 2][..]));
    }
}
