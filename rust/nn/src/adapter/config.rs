//! [`LoraConfig`]: which layers get an adapter, of which kind and size. The names are peft's.

use std::collections::BTreeMap;

use regex::Regex;
use trainable_candle_core::{Error, Result};

use super::{AdapterKind, AdapterSettings, dora, lora};

/// Which layers get an adapter, and of what kind and size.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank, at least 1.
    pub r: usize,
    /// The numerator of the scale.
    pub lora_alpha: f64,
    /// Layers whose name is one of these or ends in `.` and one of these; `all-linear` stands for every layer. An entry with
    /// characters that no name has (`*`, `(`, `|`, …) is a regular expression for the whole name.
    pub target_modules: Vec<String>,
    /// Layers to leave out, by the same rules.
    pub exclude_modules: Vec<String>,
    /// Probability of dropping an element of the adapter's input while training, in [0, 1).
    pub lora_dropout: f64,
    /// Weight-decomposed adapters (DoRA).
    pub use_dora: bool,
    /// Scale alpha / √r instead of alpha / r (Kalajdzievski 2023, arXiv:2312.03732).
    pub use_rslora: bool,
    /// Other ranks for layers by name (the rules of `target_modules`).
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other alphas for layers by name.
    pub alpha_pattern: BTreeMap<String, f64>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            target_modules: vec!["all-linear".into()],
            exclude_modules: Vec::new(),
            lora_dropout: 0.0,
            use_dora: false,
            use_rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

impl LoraConfig {
    /// Check every value.
    ///
    /// # Errors
    /// [`Error::Config`] naming the value and its range.
    pub fn validate(&self) -> Result<()> {
        let ranks = std::iter::once(("r", self.r)).chain(self.rank_pattern.iter().map(|(k, &v)| (k.as_str(), v)));
        for (name, rank) in ranks {
            if rank == 0 {
                return Err(Error::Config(format!("LoraConfig: the rank of {name} is 0, expected at least 1")));
            }
        }
        let alphas = std::iter::once(("lora_alpha", self.lora_alpha))
            .chain(self.alpha_pattern.iter().map(|(k, &v)| (k.as_str(), v)));
        for (name, alpha) in alphas {
            if !alpha.is_finite() || alpha == 0.0 {
                return Err(Error::Config(format!(
                    "LoraConfig: the alpha of {name} is {alpha}, expected a finite number other than 0"
                )));
            }
        }
        if !(0.0..1.0).contains(&self.lora_dropout) {
            return Err(Error::Config(format!(
                "LoraConfig: lora_dropout is {}, expected a number in [0, 1)",
                self.lora_dropout
            )));
        }
        if self.target_modules.is_empty() {
            return Err(Error::Config(
                "LoraConfig: target_modules is empty; name layers such as \"to_q\", or \"all-linear\"".into(),
            ));
        }
        Ok(())
    }

    /// The kind of adapter that the switches ask for.
    pub const fn kind(&self) -> &'static AdapterKind {
        if self.use_dora { &dora::KIND } else { &lora::KIND }
    }

    /// Whether the layer `name` gets an adapter.
    ///
    /// # Errors
    /// [`Error::Config`] if a pattern is no regular expression.
    pub fn targets(&self, name: &str) -> Result<bool> {
        let hit = |patterns: &[String]| -> Result<bool> {
            for pattern in patterns {
                if pattern == "all-linear" || matches(pattern, name)? {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        Ok(hit(&self.target_modules)? && !hit(&self.exclude_modules)?)
    }

    /// Sizes for the layer `name`.
    ///
    /// # Errors
    /// [`Error::Config`] if a pattern is no regular expression.
    pub fn settings(&self, name: &str) -> Result<AdapterSettings> {
        let rank = lookup(&self.rank_pattern, name)?.unwrap_or(self.r);
        let alpha = lookup(&self.alpha_pattern, name)?.unwrap_or(self.lora_alpha);
        Ok(AdapterSettings { rank, scale: scale(alpha, rank, self.use_rslora), dropout: self.lora_dropout })
    }
}

/// The factor in front of a product of rank `rank`: alpha / r, or alpha / √r for rsLoRA.
pub fn scale(alpha: f64, rank: usize, rslora: bool) -> f64 {
    alpha / if rslora { (rank as f64).sqrt() } else { rank as f64 }
}

fn lookup<V: Copy>(patterns: &BTreeMap<String, V>, name: &str) -> Result<Option<V>> {
    for (pattern, value) in patterns {
        if matches(pattern, name)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// peft's rule: the whole name, its end after a dot, or a regular expression for the whole name.
fn matches(pattern: &str, name: &str) -> Result<bool> {
    if name == pattern || name.strip_suffix(pattern).is_some_and(|rest| rest.ends_with('.')) {
        return Ok(true);
    }
    if pattern.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '.' || c == '-') {
        return Ok(false);
    }
    let regex = Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$"))
        .map_err(|e| Error::Config(format!("LoraConfig: the pattern \"{pattern}\" is no regular expression: {e}")))?;
    Ok(regex.is_match(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(targets: &[&str]) -> LoraConfig {
        LoraConfig { target_modules: targets.iter().map(ToString::to_string).collect(), ..LoraConfig::default() }
    }

    #[test]
    fn names_match_whole_or_after_a_dot() {
        let c = config(&["to_q", "to_out.0"]);
        assert!(c.targets("blocks.0.attn.to_q").unwrap());
        assert!(c.targets("to_q").unwrap());
        assert!(c.targets("blocks.0.attn.to_out.0").unwrap());
        assert!(!c.targets("blocks.0.attn.add_to_q").unwrap());
        assert!(!c.targets("blocks.0.attn.to_out").unwrap());
    }

    #[test]
    fn patterns_and_exclusions() {
        let mut c = config(&[r"blocks\.[02]\..*to_(q|k)"]);
        assert!(c.targets("blocks.2.attn.to_k").unwrap());
        assert!(!c.targets("blocks.1.attn.to_k").unwrap());
        c.exclude_modules = vec!["blocks.2.attn.to_k".into()];
        assert!(!c.targets("blocks.2.attn.to_k").unwrap());
        assert!(config(&["to_("]).targets("x").is_err());
    }

    #[test]
    fn sizes_follow_patterns_and_rslora() {
        let mut c = config(&["all-linear"]);
        c.rank_pattern.insert("to_q".into(), 4);
        c.alpha_pattern.insert("to_q".into(), 2.0);
        assert_eq!(c.settings("a.to_q").unwrap(), AdapterSettings { rank: 4, scale: 0.5, dropout: 0.0 });
        c.use_rslora = true;
        assert_eq!(c.settings("a.to_q").unwrap().scale, 1.0);
        assert_eq!(c.settings("a.to_k").unwrap().rank, 8);
    }

    #[test]
    fn wrong_values_are_named() {
        let wrong = LoraConfig { lora_dropout: 1.0, ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("lora_dropout is 1"));
        let wrong = LoraConfig { r: 0, ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("rank"));
    }
}
