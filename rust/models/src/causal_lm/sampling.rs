//! The choice of the next token from the scores of all tokens.

use std::collections::HashSet;

use trainable_candle_core::{Error, Result};

use super::OP;

/// How the next token is chosen from the scores of all tokens. The options apply in transformers' order:
/// `repetition_penalty`, `temperature`, `top_k`, `top_p`, `min_p`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The temperature t, a finite number of at least 0. If t is 0, the token with the highest score is chosen.
    /// Otherwise a token is drawn with the probabilities `softmax(scores / t)`; `top_k`, `top_p` and `min_p` limit the
    /// tokens that can be drawn.
    pub temperature: f64,
    /// A token is drawn from this many tokens with the highest scores. 0 means all tokens.
    pub top_k: usize,
    /// A probability above 0 and up to 1. A token is drawn from the smallest set of most likely tokens whose
    /// probabilities sum to at least `top_p` (Holtzman et al. 2020, arXiv:1904.09751). If `top_k` limits the tokens,
    /// the probabilities are those among these tokens.
    pub top_p: f64,
    /// A fraction from 0 to 1. A token can be drawn only if its probability is at least `min_p` · the probability of
    /// the most likely token (Nguyen et al. 2024, arXiv:2407.01082).
    pub min_p: f64,
    /// A finite number above 0. For tokens that are already in the text, positive scores are divided by it and negative
    /// scores are multiplied by it (Keskar et al. 2019, arXiv:1909.05858). Values above 1 make these tokens less
    /// likely.
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// The number of tokens that are sorted at first for `top_p`. More tokens are sorted only if the probabilities of these
/// do not reach `top_p`. That is rare, because a few tokens usually have nearly all of the probability.
const SORTED_FIRST: usize = 256;

impl Sampling {
    /// Check that all options are in range.
    ///
    /// # Errors
    /// [`Error::Argument`] with the option that is out of range.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |name: &str, found: f64, expected: &str| {
            Err(Error::argument(OP, format!("{name} is {found}, expected {expected}")))
        };
        match *self {
            Self { temperature: t, .. } if !(t >= 0.0 && t.is_finite()) => {
                wrong("temperature", t, "0 or more, and finite")
            }
            Self { top_p: p, .. } if !(p > 0.0 && p <= 1.0) => wrong("top_p", p, "above 0 and at most 1"),
            Self { min_p: p, .. } if !(0.0..=1.0).contains(&p) => wrong("min_p", p, "0 to 1"),
            Self { repetition_penalty: r, .. } if !(r > 0.0 && r.is_finite()) => {
                wrong("repetition_penalty", r, "above 0, and finite")
            }
            _ => Ok(()),
        }
    }

    /// Choose the next token of a text that has the tokens `text`, from the scores `scores (vocab)` of all tokens.
    /// `draw` is a random number, uniform in [0, 1). The function applies the repetition penalty to `scores` in place.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if a score is NaN.
    pub(super) fn choose(&self, scores: &mut [f32], text: &[u32], draw: f64) -> Result<u32> {
        if scores.iter().any(|score| score.is_nan()) {
            let message = "the scores of the next token contain NaN; the weights or the adapter are damaged".into();
            return Err(Error::NonFinite { op: OP, message });
        }
        if self.repetition_penalty != 1.0 {
            let penalty = self.repetition_penalty as f32;
            // The penalty applies once, however often a token is in the text.
            for id in text.iter().copied().collect::<HashSet<_>>() {
                let score = &mut scores[id as usize];
                *score = if *score > 0.0 { *score / penalty } else { *score * penalty };
            }
        }
        let best = (0..scores.len() as u32)
            .reduce(|best, id| if scores[id as usize] > scores[best as usize] { id } else { best });
        let best = best.unwrap_or_default();
        Ok(if self.temperature == 0.0 { best } else { self.draw_token(scores, best, draw) })
    }

    /// Draw a token, given the random number `draw`, uniform in [0, 1). `best` is the token with the highest score.
    fn draw_token(&self, scores: &[f32], best: u32, draw: f64) -> u32 {
        let highest = f64::from(scores[best as usize]);
        // The probability of a token is proportional to its weight. The most likely token has the weight 1.
        let weight = |id: u32| ((f64::from(scores[id as usize]) - highest) / self.temperature).exp();
        let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
        // The first `sorted` of `ids` are sorted by their scores, and all other scores are lower or equal.
        let mut sorted = 0;
        if self.top_k > 0 && self.top_k < ids.len() {
            sorted = sort_highest(&mut ids, 0, self.top_k, scores);
            ids.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            let bound = self.top_p * ids.iter().map(|&id| weight(id)).sum::<f64>();
            let (mut sum, mut kept_count) = (0.0, 0);
            // The last token that is kept is the one with which the sum reaches the bound.
            while sum < bound && kept_count < ids.len() {
                if kept_count == sorted {
                    // Each further round sorts three times as many tokens as are sorted already.
                    sorted = sort_highest(&mut ids, sorted, SORTED_FIRST.max(3 * sorted), scores);
                }
                sum += weight(ids[kept_count]);
                kept_count += 1;
            }
            ids.truncate(kept_count);
        }
        if self.min_p > 0.0 {
            ids.retain(|&id| weight(id) >= self.min_p);
        }
        let mut remaining = draw * ids.iter().map(|&id| weight(id)).sum::<f64>();
        let drawn = ids.iter().copied().find(|&id| {
            remaining -= weight(id);
            remaining < 0.0
        });
        // With rounding errors, `remaining` may be 0 or more after the last token. Then the last token is drawn. `ids`
        // is empty only if the highest score is infinite, which makes weights NaN.
        drawn.or(ids.last().copied()).unwrap_or(best)
    }
}

/// Move the ids of the `count` highest scores in `ids[from..]` to the front of this slice, with the highest score
/// first. If the slice has fewer ids, sort all of them. Of two equal scores, the one with the lower id comes first.
/// Returns the index in `ids` of the first id that is not sorted.
fn sort_highest(ids: &mut [u32], from: usize, count: usize, scores: &[f32]) -> usize {
    let order = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    let slice = &mut ids[from..];
    let count = count.min(slice.len());
    if count < slice.len() {
        slice.select_nth_unstable_by(count, order);
    }
    slice[..count].sort_unstable_by(order);
    from + count
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each token, the fraction of evenly spaced numbers `draw` with which it is chosen.
    fn shares(sampling: &Sampling, scores: &[f32]) -> Vec<f64> {
        let mut fractions = vec![0.0; scores.len()];
        let draws = 4000;
        for i in 0..draws {
            let draw = (f64::from(i) + 0.5) / f64::from(draws);
            fractions[sampling.choose(&mut scores.to_vec(), &[], draw).unwrap() as usize] += 1.0 / f64::from(draws);
        }
        fractions
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() < 1e-3, "token {i}: {found}, expected {expected}");
        }
    }

    /// The scores 0, 0.0001, … 0.4999 of 5000 tokens, in an order that is not sorted.
    fn shuffled_scores() -> Vec<f32> {
        // 7919 and 5000 have no common divisor, so the products take each remainder once.
        (0..5000).map(|i| ((i * 7919) % 5000) as f32 * 1e-4).collect()
    }

    #[test]
    fn tokens_are_drawn_with_their_probabilities_within_the_limits() {
        let probabilities = [0.1f64, 0.5, 0.15, 0.25];
        let scores = probabilities.map(|p| p.ln() as f32 + 3.0);
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        assert_near(&shares(&warm, &scores), &probabilities);
        assert_near(&shares(&Sampling { top_k: 2, ..warm.clone() }, &scores), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        // The probability 0.5 of the most likely token is below `top_p`, so the token with the probability 0.25 is kept
        // too.
        assert_near(&shares(&Sampling { top_p: 0.6, ..warm.clone() }, &scores), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        assert_near(&shares(&Sampling { top_p: 0.45, ..warm.clone() }, &scores), &[0.0, 1.0, 0.0, 0.0]);
        // 0.29 · 0.5 = 0.145 excludes only the token with the probability 0.1.
        assert_near(
            &shares(&Sampling { min_p: 0.29, ..warm.clone() }, &scores),
            &[0.0, 5.0 / 9.0, 1.0 / 6.0, 5.0 / 18.0],
        );
        let roots = probabilities.map(f64::sqrt);
        let sum: f64 = roots.iter().sum();
        assert_near(&shares(&Sampling { temperature: 2.0, ..warm }, &scores), &roots.map(|root| root / sum));
    }

    #[test]
    fn sorting_in_steps_puts_higher_scores_before_lower_scores() {
        let scores = shuffled_scores();
        let mut ids: Vec<u32> = (0..5000).collect();
        let mut end = 0;
        while end < ids.len() {
            end = sort_highest(&mut ids, end, SORTED_FIRST.max(3 * end), &scores);
        }
        assert!(ids.windows(2).all(|pair| scores[pair[0] as usize] > scores[pair[1] as usize]));
    }

    #[test]
    fn top_p_excludes_the_least_likely_of_many_tokens() {
        let scores = shuffled_scores();
        let sampling = Sampling { temperature: 1.0, top_p: 0.999, ..Sampling::default() };
        let last = sampling.choose(&mut scores.clone(), &[], 1.0 - 1e-12).unwrap();
        let below = scores.iter().filter(|&&score| score < scores[last as usize]).count();
        // `draw` is so large that the least likely token within `top_p` is chosen. The weights sum to 3935, about
        // (1 - exp(-0.5)) / 0.0001. The less likely tokens outside of `top_p` have at most 0.001 of this sum, 3.93.
        // Each of them has a weight of about exp(-0.5) = 0.607, so there are six of them.
        assert_eq!(below, 6);
    }

    #[test]
    fn the_penalty_makes_tokens_of_the_text_less_likely() {
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        // The scores become 1, 1.5, 2.
        assert_eq!(penalty.choose(&mut [1.0, 3.0, 2.0], &[1, 1], 0.0).unwrap(), 2);
        // The scores become -2, -2, -3.8. Of equal scores, the first is chosen.
        assert_eq!(penalty.choose(&mut [-1.0, -2.0, -1.9], &[0, 2], 0.0).unwrap(), 0);
        // The scores become -2, -1.5, -3.8.
        assert_eq!(penalty.choose(&mut [-1.0, -1.5, -1.9], &[0, 2], 0.0).unwrap(), 1);
    }

    #[test]
    fn a_nan_score_and_a_top_p_of_0_are_rejected() {
        let greedy = Sampling::default();
        assert!(matches!(greedy.choose(&mut [1.0, f32::NAN], &[], 0.0), Err(Error::NonFinite { .. })));
        let wrong = Sampling { top_p: 0.0, ..Sampling::default() };
        assert!(wrong.check().unwrap_err().to_string().contains("top_p is 0, expected above 0"));
    }
}
