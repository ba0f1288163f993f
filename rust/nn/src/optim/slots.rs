//! [`Slots`]: which variables of an optimizer share settings and a step counter in device memory.

use std::ops::Range;

use rustc_hash::FxHashMap;
use trainable_candle_core::Var;

use super::state::Group;

/// Assigns variables to slots. The variables of a slot share settings and a step counter: they are in one group and
/// have taken the same number of steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Slots {
    /// For each slot, the index of its parameter group in the optimizer.
    pub(super) group_of: Vec<usize>,
    /// For each variable, in the optimizer's order, the index of its slot.
    pub(super) of: Vec<usize>,
}

impl Slots {
    /// Assigns the variables of `groups` to slots. Two variables share a slot if they are in the same group and have
    /// taken the same number of steps.
    pub(super) fn new<C>(groups: &[Group<C>]) -> Self {
        let mut slots = Self::default();
        let mut slot_of = FxHashMap::default();
        for (index, group) in groups.iter().enumerate() {
            for parameter in &group.parameters {
                let slot = *slot_of.entry((index, parameter.step)).or_insert_with(|| {
                    slots.group_of.push(index);
                    slots.group_of.len() - 1
                });
                slots.of.push(slot);
            }
        }
        slots
    }

    /// For each slot, the number of steps that its variables have taken. None if two variables of one slot have taken
    /// different numbers of steps.
    pub(super) fn steps<C>(&self, groups: &[Group<C>]) -> Option<Vec<u64>> {
        let mut steps = vec![None; self.group_of.len()];
        let parameters = groups.iter().flat_map(|group| &group.parameters);
        // Empty variables take no steps, so their numbers of steps do not count.
        for (parameter, &slot) in parameters.zip(&self.of).filter(|(parameter, _)| parameter.var.elem_count() > 0) {
            if *steps[slot].get_or_insert(parameter.step) != parameter.step {
                return None;
            }
        }
        // A slot whose variables are all empty has taken no steps.
        Some(steps.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// Splits slots for a step in which only the variables with the indices `participants` take part; none of these
    /// variables is empty. If only some variables of a slot take part, they move to a new slot. Returns the new
    /// assignment and, for each new slot, the old slot that its variables come from; None if no slot must be split.
    pub(super) fn split(
        &self,
        vars: &[&Var],
        participants: impl Iterator<Item = usize> + Clone,
    ) -> Option<(Self, Vec<usize>)> {
        let count = self.group_of.len();
        // For each slot, how many of its variables are not empty, and how many take part.
        let (mut nonempty, mut taking_part) = (vec![0usize; count], vec![0usize; count]);
        for (&slot, _) in self.of.iter().zip(vars).filter(|(_, var)| var.elem_count() > 0) {
            nonempty[slot] += 1;
        }
        for index in participants.clone() {
            taking_part[self.of[index]] += 1;
        }
        let old_slots: Vec<usize> =
            (0..count).filter(|&slot| taking_part[slot] > 0 && taking_part[slot] < nonempty[slot]).collect();
        if old_slots.is_empty() {
            return None;
        }
        let mut slots = self.clone();
        for (new, &old) in (count..).zip(&old_slots) {
            slots.group_of.push(self.group_of[old]);
            for index in participants.clone().filter(|&index| self.of[index] == old) {
                slots.of[index] = new;
            }
        }
        Some((slots, old_slots))
    }

    /// The slots of the variables with the indices `participants`, as ranges of consecutive slots.
    pub(super) fn runs(&self, participants: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
        let mut used: Vec<usize> = participants.map(|index| self.of[index]).collect();
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

    /// Groups of variables. `steps` has, for each group, the number of steps that each variable has taken.
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
        let groups = groups(&[&[0, 0, 0], &[0]]);
        let vars: Vec<&Var> =
            groups.iter().flat_map(|group| &group.parameters).map(|parameter| &parameter.var).collect();
        let slots = Slots::new(&groups);
        assert_eq!((&slots.group_of[..], &slots.of[..]), (&[0, 1][..], &[0, 0, 0, 1][..]));
        assert!(slots.split(&vars, 0..4).is_none() && slots.split(&vars, 0..3).is_none());
        // Variable 1 takes part without the others of slot 0, so it moves to a new slot, 2. Variable 3 is alone in its
        // slot, 1.
        let (split, old_slots) = slots.split(&vars, [1, 3].into_iter()).unwrap();
        assert_eq!((&split.group_of[..], &split.of[..], &old_slots[..]), (&[0, 1, 0][..], &[0, 2, 0, 1][..], &[0][..]));
    }

    #[test]
    fn runs_are_ranges_of_consecutive_slots() {
        let slots = Slots { group_of: vec![0, 1, 0], of: vec![0, 2, 0, 1] };
        let all_slots = 0..3;
        assert_eq!(slots.runs([3, 1, 0].into_iter()), std::slice::from_ref(&all_slots));
        let last_slot = 2..3;
        assert_eq!(slots.runs([1].into_iter()), std::slice::from_ref(&last_slot));
    }

    #[test]
    fn steps_are_none_only_for_slots_in_which_the_numbers_of_steps_differ() {
        let slots = Slots::new(&groups(&[&[0, 0, 0], &[0]]));
        assert_eq!(slots.steps(&groups(&[&[7, 7, 7], &[5]])), Some(vec![7, 5]));
        let differing = groups(&[&[7, 6, 7], &[5]]);
        assert_eq!(slots.steps(&differing), None);
        let slots = Slots::new(&differing);
        assert_eq!((slots.steps(&differing), &slots.of[..]), (Some(vec![7, 6, 5]), &[0, 1, 0, 2][..]));
    }
}
