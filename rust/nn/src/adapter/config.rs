//! [`LoraConfig`]: which layers get an adapter, of which kind and size. Settings that peft has too have peft's names.

use std::collections::BTreeMap;

use regex::Regex;
use trainable_candle_core::ops::fake_quantize::Grid;
use trainable_candle_core::{DType, Error, Result};

use super::oft::TERMS;
use super::{AdapterKind, AdapterSettings, KINDS, OftSide, QuantizationAware};

/// Which layers get an adapter, and of what kind and size.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank, at least 1.
    pub r: usize,
    /// Alpha, the numerator of the scale alpha / r; finite and not 0.
    pub lora_alpha: f64,
    /// The layers to adapt, as patterns. A pattern matches a layer whose name is the pattern, or ends in `.` and the
    /// pattern. A pattern with other characters than letters, digits, `_`, `.` and `-` is also a regular expression for
    /// the whole name, or for the end of the name after a `.`. `all-linear` matches every linear layer, `all-conv`
    /// every convolution, `all-attention` the projections of attention.
    pub target_modules: Vec<String>,
    /// Patterns of layers to leave out, although `target_modules` matches them.
    pub exclude_modules: Vec<String>,
    /// Probability of dropping an element of the adapter's input while training, in [0, 1).
    pub lora_dropout: f64,
    /// The kind of adapter: the name of one of [`KINDS`].
    pub adapter: String,
    /// Whether adapters of the kind `lora` are weight-decomposed, as those of the kind `dora` are. An error with
    /// another kind.
    pub use_dora: bool,
    /// DoRA: true for one magnitude for each output, as in peft; false for one for each input. The name is LyCORIS'.
    pub wd_on_output: bool,
    /// LoKr: whether the smaller factor may be low-rank, too.
    pub decompose_both: bool,
    /// LoKr: the size of the smaller factor, as in [`AdapterSettings::decompose_factor`]; `None` for sizes near the
    /// square roots of the layer's numbers of outputs and inputs.
    pub decompose_factor: Option<usize>,
    /// OFT: the size of blocks, at least 2. If it does not divide the number of features, OFT uses the nearest divisor.
    pub oft_block_size: usize,
    /// OFT: the side of layers that is rotated. `None` leaves the choice to the caller, who knows which side other
    /// programs expect in adapters of the model; [`settings`](Self::settings) takes the inputs if it is still `None`.
    pub oft_side: Option<OftSide>,
    /// OFT of inputs: the number of terms, from 2 to 64, of the series that replaces the Cayley transform (peft's
    /// `use_cayley_neumann` and `num_cayley_neumann_terms`); `None` for the transform itself.
    pub cayley_neumann_terms: Option<usize>,
    /// Whether the scale is alpha / √r instead of alpha / r (Kalajdzievski 2023, arXiv:2312.03732).
    pub use_rslora: bool,
    /// Quantization-aware training of linear layers: the grid to which adapted weights are rounded.
    pub qat: Option<Grid>,
    /// Whether the inputs of adapted layers are rounded to the grid too, with one scale per token, as servers that
    /// multiply in eight bits do. Needs `qat` to be [`Grid::Int8`] or [`Grid::Fp8`].
    pub qat_activations: bool,
    /// Whether each scale of the rounded weights is multiplied by a learned factor. Needs `qat`.
    pub qat_learned_scales: bool,
    /// The dtype of the parameters in training: f32, or bf16 for an optimizer with stochastic rounding
    /// ([`Stepper::with_stochastic_rounding`](crate::optim::Stepper::with_stochastic_rounding)).
    pub dtype: DType,
    /// The ranks of layers whose rank is not `r`, by pattern. If several patterns match a layer, the first in
    /// alphabetical order counts.
    pub rank_pattern: BTreeMap<String, usize>,
    /// The alphas of layers whose alpha is not `lora_alpha`, by pattern as in `rank_pattern`.
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
            adapter: "lora".into(),
            use_dora: false,
            wd_on_output: true,
            decompose_both: false,
            decompose_factor: None,
            oft_block_size: 32,
            oft_side: None,
            cayley_neumann_terms: None,
            use_rslora: false,
            qat: None,
            qat_activations: false,
            qat_learned_scales: false,
            dtype: DType::F32,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

impl LoraConfig {
    /// Check the values, and that they fit together. OFT's settings are checked only if the kind is OFT, and patterns
    /// only when they are matched.
    ///
    /// # Errors
    /// [`Error::Config`] that names a wrong value and says what is expected.
    pub fn validate(&self) -> Result<()> {
        let ranks = std::iter::once(("r", self.r)).chain(self.rank_pattern.iter().map(|(k, &v)| (k.as_str(), v)));
        for (name, rank) in ranks {
            if rank == 0 {
                return Err(Error::Config(format!("LoraConfig: found rank 0 for \"{name}\", expected at least 1")));
            }
        }
        let alphas = std::iter::once(("lora_alpha", self.lora_alpha))
            .chain(self.alpha_pattern.iter().map(|(k, &v)| (k.as_str(), v)));
        for (name, alpha) in alphas {
            if !alpha.is_finite() || alpha == 0.0 {
                return Err(Error::Config(format!(
                    "LoraConfig: found alpha {alpha} for \"{name}\", expected a finite number other than 0"
                )));
            }
        }
        if !(0.0..1.0).contains(&self.lora_dropout) {
            return Err(Error::Config(format!(
                "LoraConfig: lora_dropout is {}, expected a number in [0, 1)",
                self.lora_dropout
            )));
        }
        if let Some(grid) = self.qat.filter(|_| self.lora_dropout > 0.0) {
            return Err(Error::Config(format!(
                "LoraConfig: lora_dropout is {}, expected 0 with qat \"{}\", which computes base and adapter as one \
                 weight, so that dropout cannot change the input of the adapter alone",
                self.lora_dropout,
                grid.name()
            )));
        }
        if self.qat_activations {
            QuantizationAware::check_activations(self.qat)?;
        }
        if self.qat_learned_scales && self.qat.is_none() {
            return Err(Error::Config("LoraConfig: qat_learned_scales has no effect without qat; set qat".into()));
        }
        self.validate_dtype()?;
        self.validate_oft()?;
        // In Python, -1 stands for `None`.
        if self.decompose_factor == Some(0) {
            return Err(Error::Config(
                "LoraConfig: decompose_factor is 0, expected at least 1, or -1 for sizes near the square roots of the \
                 layer's numbers of outputs and inputs"
                    .into(),
            ));
        }
        if self.target_modules.is_empty() {
            return Err(Error::Config(
                "LoraConfig: target_modules is empty; name layers such as \"to_q\", or \"all-linear\"".into(),
            ));
        }
        Ok(())
    }

    /// If the kind is OFT, check its settings, and that dropout, rsLoRA and the patterns of ranks and alphas are left
    /// out.
    fn validate_oft(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Config(format!("LoraConfig: {text}")));
        if self.kind()?.name != "oft" {
            return Ok(());
        }
        if self.oft_block_size < 2 {
            return wrong(format!("oft_block_size is {}, expected at least 2", self.oft_block_size));
        }
        if let Some(terms) = self.cayley_neumann_terms.filter(|terms| !TERMS.contains(terms)) {
            return wrong(format!(
                "num_cayley_neumann_terms is {terms}, expected {} to {}",
                TERMS.start(),
                TERMS.end()
            ));
        }
        if self.cayley_neumann_terms.is_some() && self.oft_side == Some(OftSide::Output) {
            return wrong(
                "use_cayley_neumann is for oft_side \"input\": no program reads use_cayley_neumann for outputs".into(),
            );
        }
        if self.lora_dropout > 0.0 {
            return wrong(format!(
                "lora_dropout is {}, expected 0 with adapter \"oft\", which has no separate input that dropout could \
                 change",
                self.lora_dropout
            ));
        }
        if self.use_rslora || !self.rank_pattern.is_empty() || !self.alpha_pattern.is_empty() {
            return wrong(
                "use_rslora, rank_pattern and alpha_pattern have no effect with adapter \"oft\", which has no rank and no \
                 alpha; leave them out"
                    .into(),
            );
        }
        Ok(())
    }

    /// Find the kind of adapter that the configuration names.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such kind, or `use_dora` is set for another kind than `lora` and `dora`.
    pub fn kind(&self) -> Result<&'static AdapterKind> {
        let name = match (self.use_dora, self.adapter.as_str()) {
            (true, "lora" | "dora") => "dora",
            (true, other) => {
                return Err(Error::Config(format!(
                    "LoraConfig: use_dora works with adapter \"lora\" or \"dora\", found \"{other}\""
                )));
            }
            (false, name) => name,
        };
        KINDS.iter().find(|kind| kind.name == name).copied().ok_or_else(|| {
            let known: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
            Error::Config(format!("LoraConfig: there is no adapter \"{name}\"; expected \"{}\"", known.join("\", \"")))
        })
    }

    /// Check the dtype of the parameters, and that the other settings allow it.
    fn validate_dtype(&self) -> Result<()> {
        let wrong = |text: &str| Err(Error::Config(format!("LoraConfig: dtype is {}, {text}", self.dtype.as_str())));
        match self.dtype {
            DType::F32 => Ok(()),
            DType::BF16 if self.kind()?.name == "dora" => {
                wrong("and DoRA's magnitudes, rounded to bf16, would change the model; use f32")
            }
            DType::BF16 if self.qat_learned_scales => wrong("and qat_learned_scales needs f32; leave one of them out"),
            DType::BF16 => Ok(()),
            _ => wrong("expected f32 or bf16"),
        }
    }

    /// Select the layers that get an adapter. `layers` lists the name of every layer, and whether the layer is a
    /// convolution. The result has the ranks of the selected layers by name.
    ///
    /// # Errors
    /// [`Error::Config`] if a pattern is not a valid regular expression.
    pub fn select<'a>(&self, layers: impl IntoIterator<Item = (&'a str, bool)>) -> Result<BTreeMap<String, usize>> {
        let (targets, excluded) = (parse_all(&self.target_modules)?, parse_all(&self.exclude_modules)?);
        let any_matches = |patterns: &[Pattern<'_>], name, is_conv| patterns.iter().any(|p| p.matches(name, is_conv));
        layers
            .into_iter()
            .filter(|&(name, is_conv)| any_matches(&targets, name, is_conv) && !any_matches(&excluded, name, is_conv))
            .map(|(name, is_conv)| Ok((name.to_owned(), self.settings(name, is_conv)?.rank)))
            .collect()
    }

    /// Add the layer `name` and its adapter to a configuration that describes a set of adapters read from a file. Rank
    /// and alpha are recorded for each layer. `use_dora` holds if any layer has DoRA, `wd_on_output` if no layer has
    /// magnitudes of inputs. Of the other settings, those of the last layer count.
    pub(super) fn describe(&mut self, name: &str, kind: &AdapterKind, settings: &AdapterSettings) {
        self.adapter = kind.name.into();
        self.use_dora |= kind.name == "dora";
        self.wd_on_output &= settings.wd_on_output;
        self.oft_block_size = settings.oft_block_size;
        self.oft_side = Some(settings.oft_side);
        self.cayley_neumann_terms = settings.cayley_neumann_terms;
        if settings.rank > 0 {
            self.rank_pattern.insert(name.into(), settings.rank);
        }
        // Without a rank, the scale is recorded as the alpha of rank 1.
        self.alpha_pattern.insert(name.into(), settings.scale * settings.rank.max(1) as f64);
        self.target_modules.push(name.into());
    }

    /// Return the settings of the adapter on the layer `name`. `is_conv` says whether the layer is a convolution.
    ///
    /// # Errors
    /// [`Error::Config`] if a pattern is not a valid regular expression.
    pub fn settings(&self, name: &str, is_conv: bool) -> Result<AdapterSettings> {
        let rank = lookup(&self.rank_pattern, name, is_conv)?.unwrap_or(self.r);
        let alpha = lookup(&self.alpha_pattern, name, is_conv)?.unwrap_or(self.lora_alpha);
        Ok(AdapterSettings {
            rank,
            scale: scale(alpha, rank, self.use_rslora),
            dropout: self.lora_dropout,
            wd_on_output: self.wd_on_output,
            decompose_both: self.decompose_both,
            decompose_factor: self.decompose_factor,
            oft_block_size: self.oft_block_size,
            oft_side: self.oft_side.unwrap_or_default(),
            cayley_neumann_terms: self.cayley_neumann_terms,
        })
    }
}

/// Compute the factor in front of a low-rank product: alpha / rank, or alpha / √rank for rsLoRA.
pub fn scale(alpha: f64, rank: usize, rslora: bool) -> f64 {
    alpha / if rslora { (rank as f64).sqrt() } else { rank as f64 }
}

/// The ends of the names of attention's projections in diffusers and transformers.
const ATTENTION: &[&str] = &[
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "to_out",
    "to_qkv_mlp_proj",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "out_proj",
];

/// An entry of `target_modules` or `exclude_modules`, or a key of `rank_pattern` or `alpha_pattern`.
enum Pattern<'a> {
    AllLinear,
    AllConv,
    AllAttention,
    /// The entry's text and, if the text has characters that names do not have, the text as a regular expression.
    /// Either matches the whole name or its end after a dot, as in peft.
    Name(&'a str, Option<Regex>),
}

impl<'a> Pattern<'a> {
    fn new(text: &'a str) -> Result<Self> {
        Ok(match text {
            "all-linear" => Self::AllLinear,
            "all-conv" => Self::AllConv,
            "all-attention" => Self::AllAttention,
            name if name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '.' || c == '-') => {
                Self::Name(name, None)
            }
            pattern => {
                let regex = Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$")).map_err(|e| {
                    let message = format!("the pattern \"{pattern}\" is not a regular expression: {e}");
                    Error::Config(format!("LoraConfig: {message}"))
                })?;
                Self::Name(pattern, Some(regex))
            }
        })
    }

    /// Whether the pattern matches the layer `name`.
    fn matches(&self, name: &str, is_conv: bool) -> bool {
        let ends_in = |end: &str| name == end || name.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
        match self {
            Self::AllLinear => !is_conv,
            Self::AllConv => is_conv,
            Self::AllAttention => ATTENTION.iter().any(|end| ends_in(end)),
            Self::Name(text, regex) => ends_in(text) || regex.as_ref().is_some_and(|regex| regex.is_match(name)),
        }
    }
}

/// Parse the entries of a list of patterns.
fn parse_all(texts: &[String]) -> Result<Vec<Pattern<'_>>> {
    texts.iter().map(|text| Pattern::new(text)).collect()
}

/// Find the first pattern in alphabetical order that matches the layer `name`, and return its value.
fn lookup<V: Copy>(values: &BTreeMap<String, V>, name: &str, is_conv: bool) -> Result<Option<V>> {
    for (pattern, value) in values {
        if Pattern::new(pattern)?.matches(name, is_conv) {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(targets: &[&str]) -> LoraConfig {
        LoraConfig { target_modules: targets.iter().map(ToString::to_string).collect(), ..LoraConfig::default() }
    }

    /// Whether `config` targets a linear layer of this name, and whether it targets a convolution of this name.
    fn targeted(config: &LoraConfig, name: &str) -> (bool, bool) {
        let is_targeted = |is_conv| !config.select([(name, is_conv)]).unwrap().is_empty();
        (is_targeted(false), is_targeted(true))
    }

    #[test]
    fn an_entry_matches_the_whole_name_or_its_end_after_a_dot() {
        let c = config(&["to_q", "to_out.0"]);
        for (name, expected) in [
            ("blocks.0.attn.to_q", true),
            ("to_q", true),
            ("blocks.0.attn.to_out.0", true),
            ("blocks.0.attn.add_to_q", false),
            ("blocks.0.attn.to_out", false),
        ] {
            assert_eq!(targeted(&c, name), (expected, expected), "{name}");
        }
    }

    #[test]
    fn regular_expressions_select_layers_exclusions_remove_them_and_invalid_expressions_are_errors() {
        let mut c = config(&[r"blocks\.[02]\..*to_(q|k)"]);
        assert!(targeted(&c, "blocks.2.attn.to_k").0);
        assert!(!targeted(&c, "blocks.1.attn.to_k").0);
        c.exclude_modules = vec!["blocks.2.attn.to_k".into()];
        assert!(!targeted(&c, "blocks.2.attn.to_k").0);
        assert!(config(&["to_("]).select([("x", false)]).is_err());
    }

    #[test]
    fn all_linear_all_conv_and_all_attention_match_layers_of_their_kind() {
        assert_eq!(targeted(&config(&["all-linear"]), "x"), (true, false));
        assert_eq!(targeted(&config(&["all-conv"]), "x"), (false, true));
        assert_eq!(targeted(&config(&["all-linear", "all-conv"]), "x"), (true, true));
        let attention = config(&["all-attention"]);
        for (name, expected) in [
            ("down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0", true),
            ("text_model.encoder.layers.3.self_attn.out_proj", true),
            ("single_transformer_blocks.0.attn.to_qkv_mlp_proj", true),
            ("single_transformer_blocks.0.attn.to_out", true),
            ("down_blocks.1.attentions.0.proj_out", false),
            ("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2", false),
        ] {
            assert_eq!(targeted(&attention, name).0, expected, "{name}");
        }
    }

    #[test]
    fn the_default_kind_is_lora_use_dora_selects_dora_and_unknown_kinds_are_errors() {
        assert_eq!(LoraConfig::default().kind().unwrap().name, "lora");
        assert_eq!(LoraConfig { use_dora: true, ..LoraConfig::default() }.kind().unwrap().name, "dora");
        let wrong = LoraConfig { adapter: "lara".into(), ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("\"lara\""));
    }

    #[test]
    fn rank_and_scale_follow_patterns_and_rslora() {
        let mut c = config(&["all-linear"]);
        c.rank_pattern.insert("to_q".into(), 4);
        c.alpha_pattern.insert("to_q".into(), 2.0);
        // The scale is alpha / r = 2 / 4, and alpha / √r = 2 / 2 with rsLoRA.
        let settings = c.settings("a.to_q", false).unwrap();
        assert_eq!((settings.rank, settings.scale), (4, 0.5));
        c.use_rslora = true;
        assert_eq!(c.settings("a.to_q", false).unwrap().scale, 1.0);
        // No pattern matches this name, so the layer has the default rank.
        assert_eq!(c.settings("a.to_k", false).unwrap().rank, 8);
        c.rank_pattern = BTreeMap::from([("all-conv".into(), 2)]);
        assert_eq!((c.settings("a.conv1", true).unwrap().rank, c.settings("a.to_k", false).unwrap().rank), (2, 8));
    }

    #[test]
    fn validate_accepts_bf16_and_oft_and_its_errors_name_the_wrong_values() {
        let wrong = LoraConfig { lora_dropout: 1.0, ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("lora_dropout is 1"));
        let wrong = LoraConfig { lora_dropout: 0.1, qat: Some(Grid::Int8), ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("expected 0 with qat \"int8\""));
        let wrong = LoraConfig { qat: Some(Grid::Nf4), qat_activations: true, ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("which is nf4; expected int8 or fp8"));
        let bf16 = LoraConfig { dtype: DType::BF16, ..LoraConfig::default() };
        assert!(bf16.validate().is_ok());
        for (wrong, expected) in [
            (LoraConfig { dtype: DType::F16, ..bf16.clone() }, "dtype is f16, expected f32 or bf16"),
            (LoraConfig { use_dora: true, ..bf16.clone() }, "dtype is bf16, and DoRA's magnitudes"),
            (LoraConfig { qat: Some(Grid::Int8), qat_learned_scales: true, ..bf16 }, "dtype is bf16, and qat_learned"),
        ] {
            let message = wrong.validate().unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let wrong = LoraConfig { qat_learned_scales: true, ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("no effect without qat"));
        let oft = LoraConfig { adapter: "oft".into(), ..LoraConfig::default() };
        assert!(oft.validate().is_ok());
        for (wrong, expected) in [
            (LoraConfig { oft_block_size: 1, ..oft.clone() }, "oft_block_size is 1"),
            (LoraConfig { lora_dropout: 0.1, ..oft.clone() }, "lora_dropout is 0.1"),
            (LoraConfig { use_rslora: true, ..oft.clone() }, "use_rslora"),
            (LoraConfig { use_dora: true, ..oft.clone() }, "use_dora works with adapter \"lora\""),
            (LoraConfig { cayley_neumann_terms: Some(1), ..oft.clone() }, "num_cayley_neumann_terms"),
            (
                LoraConfig { cayley_neumann_terms: Some(5), oft_side: Some(OftSide::Output), ..oft.clone() },
                "use_cayley_neumann is for oft_side \"input\"",
            ),
        ] {
            assert!(wrong.validate().unwrap_err().to_string().contains(expected), "{expected}");
        }
        let wrong = LoraConfig { r: 0, ..LoraConfig::default() };
        assert!(wrong.validate().unwrap_err().to_string().contains("rank"));
    }
}
