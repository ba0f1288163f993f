//! The choice of the next token.

use std::collections::HashSet;

use trainable_candle_core::{Error, Result};

use super::OP;

/// How the next token is chosen from the scores. The penalty, the temperature and the limits apply in transformers'
/// order.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 chooses the token with the highest score. Otherwise scores are divided by the temperature, and a token is
    /// drawn.
    pub temperature: f64,
    /// Draw from this many tokens with the highest scores; 0 draws from all.
    pub top_k: usize,
    /// Draw from the smallest set of most likely tokens whose probabilities sum to at least this, above 0 and up to 1
    /// (Holtzman et al. 2020, arXiv:1904.09751).
    pub top_p: f64,
    /// Draw only tokens whose probability is at least this fraction of the probability of the most likely token, 0 to 1
    /// (Nguyen et al. 2024, arXiv:2407.01082).
    pub min_p: f64,
    /// If this is above 1, tokens that are already in the text become less likely (Keskar et al. 2019,
    /// arXiv:1909.05858).
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// The number of candidates that are sorted first. This usually suffices, because a few tokens have nearly all of the
/// probability.
const FIRST: usize = 256;

impl Sampling {
    /// Check that all values are in range.
    ///
    /// # Errors
    /// [`Error::Argument`] naming a value out of range.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |name: &str, found: f64, expected: &str| {
            Err(Error::argument(OP, format!("{name} is {found}, expected {expected}")))
        };
        match *self {
            Self { temperature: t, .. } if !(t >= 0.0 && t.is_finite()) => wrong("temperature", t, "0 or more"),
            Self { top_p: p, .. } if !(p > 0.0 && p <= 1.0) => wrong("top_p", p, "above 0 and at most 1"),
            Self { min_p: p, .. } if !(0.0..=1.0).contains(&p) => wrong("min_p", p, "0 to 1"),
            Self { repetition_penalty: r, .. } if !(r > 0.0 && r.is_finite()) => {
                wrong("repetition_penalty", r, "above 0")
            }
            _ => Ok(()),
        }
    }

    /// Choose the next token of a text with the tokens `known` from `scores (vocab)`. The function may change `scores`.
    /// `draw` is uniform in 0..1.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if a score is NaN.
    pub(super) fn choose(&self, scores: &mut [f32], known: &[u32], draw: f64) -> Result<u32> {
        if scores.iter().any(|score| score.is_nan()) {
            let message = "the scores of the next token contain NaN; the weights or the adapter are damaged".into();
            return Err(Error::NonFinite { op: OP, message });
        }
        if self.repetition_penalty != 1.0 {
            let penalty = self.repetition_penalty as f32;
            for id in known.iter().copied().collect::<HashSet<_>>() {
                let score = &mut scores[id as usize];
                *score = if *score > 0.0 { *score / penalty } else { *score * penalty };
            }
        }
        let best = (0..scores.len() as u32)
            .reduce(|best, id| if scores[id as usize] > scores[best as usize] { id } else { best });
        let best = best.unwrap_or_default();
        Ok(if self.temperature == 0.0 { best } else { self.drawn(scores, best, draw) })
    }

    fn drawn(&self, scores: &[f32], best: u32, draw: f64) -> u32 {
        let highest = f64::from(scores[best as usize]);
        // The most likely token has weight 1.
        let weight = |id: u32| ((f64::from(scores[id as usize]) - highest) / self.temperature).exp();
        let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
        let mut sorted = 0;
        if self.top_k > 0 && self.top_k < ids.len() {
            sorted = sort_highest(&mut ids, 0, self.top_k, scores);
            ids.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            let bound = self.top_p * ids.iter().map(|&id| weight(id)).sum::<f64>();
            let (mut sum, mut kept) = (0.0, 0);
            // The token with which the sum reaches the bound is kept.
            while sum < bound && kept < ids.len() {
                if kept == sorted {
                    sorted = sort_highest(&mut ids, sorted, FIRST.max(3 * sorted), scores);
                }
                sum += weight(ids[kept]);
                kept += 1;
            }
            ids.truncate(kept);
        }
        if self.min_p > 0.0 {
            ids.retain(|&id| weight(id) >= self.min_p);
        }
        let mut left = draw * ids.iter().map(|&id| weight(id)).sum::<f64>();
        let drawn = ids.iter().copied().find(|&id| {
            left -= weight(id);
            left < 0.0
        });
        // If rounding makes the search run past the last token, take the last one.
        drawn.or(ids.last().copied()).unwrap_or(best)
    }
}

/// Move the ids of the `count` highest scores in `ids[from..]` to the front of this slice, highest first; of equal
/// scores, the lower id comes first. Returns the end of the sorted part.
fn sort_highest(ids: &mut [u32], from: usize, count: usize, scores: &[f32]) -> usize {
    let order = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    let rest = &mut ids[from..];
    let count = count.min(rest.len());
    if count < rest.len() {
        rest.select_nth_unstable_by(count, order);
    }
    rest[..count].sort_unstable_by(order);
    from + count
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fraction of evenly spaced draws that choose each token.
    fn shares(sampling: &Sampling, scores: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; scores.len()];
        let draws = 4000;
        for i in 0..draws {
            let draw = (f64::from(i) + 0.5) / f64::from(draws);
            counts[sampling.choose(&mut scores.to_vec(), &[], draw).unwrap() as usize] += 1.0 / f64::from(draws);
        }
        counts
    }

    fn near(found: &[f64], expected: &[f64]) {
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() < 1e-3, "token {i}: {found}, expected {expected}");
        }
    }

    #[test]
    fn limits_keep_the_proportions_of_the_most_likely_tokens() {
        let probabilities = [0.1f64, 0.5, 0.15, 0.25];
        let scores = probabilities.map(|p| p.ln() as f32 + 3.0);
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        near(&shares(&warm, &scores), &probabilities);
        near(&shares(&Sampling { top_k: 2, ..warm.clone() }, &scores), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        // The probability 0.5 is below `top_p`, so the token with the probability 0.25 is kept too.
        near(&shares(&Sampling { top_p: 0.6, ..warm.clone() }, &scores), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        near(&shares(&Sampling { top_p: 0.45, ..warm.clone() }, &scores), &[0.0, 1.0, 0.0, 0.0]);
        near(&shares(&Sampling { min_p: 0.29, ..warm.clone() }, &scores), &[0.0, 5.0 / 9.0, 1.0 / 6.0, 5.0 / 18.0]);
        let roots = probabilities.map(f64::sqrt);
        let sum: f64 = roots.iter().sum();
        near(&shares(&Sampling { temperature: 2.0, ..warm }, &scores), &roots.map(|root| root / sum));
    }

    #[test]
    fn only_as_many_tokens_are_sorted_as_needed() {
        let scores: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32 * 1e-4).collect();
        let mut all: Vec<u32> = (0..5000).collect();
        let mut end = 0;
        while end < all.len() {
            end = sort_highest(&mut all, end, FIRST.max(3 * end), &scores);
        }
        assert!(all.windows(2).all(|pair| scores[pair[0] as usize] > scores[pair[1] as usize]));
        let sampling = Sampling { temperature: 1.0, top_p: 0.999, ..Sampling::default() };
        let last = sampling.choose(&mut scores.clone(), &[], 1.0 - 1e-12).unwrap();
        let below = scores.iter().filter(|&&score| score < scores[last as usize]).count();
        // The weights sum to 3935. The tokens below have at most 0.001 of this sum, 3.93, and a weight of exp(-0.5) =
        // 0.607 each. These are six tokens.
        assert_eq!(below, 6);
    }

    #[test]
    fn the_penalty_lowers_known_tokens_and_nan_is_an_error() {
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(penalty.choose(&mut [1.0, 3.0, 2.0], &[1, 1], 0.0).unwrap(), 2);
        assert_eq!(penalty.choose(&mut [-1.0, -2.0, -1.9], &[0, 2], 0.0).unwrap(), 0);
        assert_eq!(penalty.choose(&mut [-1.0, -1.5, -1.9], &[0, 2], 0.0).unwrap(), 1);
        assert!(matches!(penalty.choose(&mut [1.0, f32::NAN], &[], 0.0), Err(Error::NonFinite { .. })));
        let wrong = Sampling { top_p: 0.0, ..Sampling::default() };
        assert!(wrong.check().unwrap_err().to_string().contains("top_p is 0, expected above 0"));
    }
}
