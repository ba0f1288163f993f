//! [`Reader`]: the styles of names that a tool knows, and how it applies adapters under these names.
//!
//! Each model family has a table of readers for each of its parts. `verify` reports by this table, and the default
//! format follows from it.

use super::Style;

/// A tool that loads adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// ComfyUI, by its key maps (`comfy/lora.py`).
    ComfyUi,
    /// diffusers' pipelines (`load_lora_weights`), by their conversion of other names.
    Diffusers,
    /// kohya's sd-scripts, which resume a training or merge (`networks/lora*.py`), or musubi-tuner for its own models.
    Kohya,
    /// `PeftModel.from_pretrained`.
    Peft,
    /// AUTOMATIC1111's web UI and its descendants.
    A1111,
}

impl Tool {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ComfyUi => "ComfyUI",
            Self::Diffusers => "diffusers",
            Self::Kohya => "kohya",
            Self::Peft => "peft",
            Self::A1111 => "A1111",
        }
    }
}

/// The names that a tool knows.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// The tool.
    pub tool: Tool,
    /// The styles that it knows.
    pub styles: &'static [Known],
    /// The kinds of adapters that it loads.
    pub kinds: &'static [&'static str],
    /// The parameter in which it looks for DoRA's magnitude; `None` if it applies only the rest of such an adapter.
    pub magnitude: Option<&'static str>,
}

/// A style that a tool knows.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The style.
    pub style: Style,
    /// Whether it knows a layer by this style; `None` if it knows all of them.
    pub only: Option<fn(layer: &str) -> bool>,
    /// What it does with an alpha beside the parameters.
    pub alpha: Alpha,
    /// Whether it applies an alpha in the configuration.
    pub configured: bool,
}

/// What a tool does with an alpha beside the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpha {
    /// It is the numerator of the scale.
    Applied,
    /// It is ignored.
    LeftOut,
    /// It is an error.
    Refused,
}

impl Known {
    /// Every layer in `style`, with the alpha beside its parameters.
    pub const fn all(style: Style) -> Self {
        Self { style, only: None, alpha: Alpha::Applied, configured: false }
    }

    /// With only the layers for which `only` is true.
    #[must_use]
    pub const fn only(self, only: fn(&str) -> bool) -> Self {
        Self { only: Some(only), ..self }
    }

    /// With alphas in the configuration.
    #[must_use]
    pub const fn configured(self) -> Self {
        Self { configured: true, ..self }
    }

    /// With this treatment of alphas beside the parameters.
    #[must_use]
    pub const fn alpha(self, alpha: Alpha) -> Self {
        Self { alpha, ..self }
    }
}

/// Every kind of adapter.
pub const EVERY_KIND: &[&str] = &["lora", "dora", "loha", "lokr", "oft"];

/// peft, which knows its own names for every model.
pub const PEFT: Reader = Reader {
    tool: Tool::Peft,
    styles: &[Known::all(Style::Peft).configured().alpha(Alpha::LeftOut)],
    kinds: EVERY_KIND,
    magnitude: Some("lora_magnitude_vector.weight"),
};

/// The tools that load adapters of a model that only this library knows.
pub const UNKNOWN: &[Reader] = &[PEFT];

/// What a tool does with one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It applies the trained adapter.
    Whole,
    /// It applies the adapter, but not as trained; the reason.
    Part(&'static str),
    /// It ignores the module; the reason.
    Not(&'static str),
}

/// The properties of a module of a file on which readers depend.
pub(super) struct Found<'a> {
    pub layer: &'a str,
    pub style: Style,
    pub kind: &'a str,
    /// The file's name of DoRA's magnitude.
    pub magnitude: Option<&'a str>,
    /// Whether there is one magnitude for each input, or OFT rotates inputs.
    pub per_input: bool,
    /// Whether OFT has an alpha that limits it more in `ComfyUI` than in training.
    pub limited: bool,
    /// Whether the file has an alpha beside the parameters.
    pub has_alpha: bool,
    /// Where the file has an alpha that gives a scale other than 1.
    pub scaled: AlphaAt,
}

/// Where a file has an alpha.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AlphaAt {
    Nowhere,
    Beside,
    Configuration,
}

impl Reader {
    /// What the tool does with a module.
    pub(super) fn outcome(&self, found: &Found<'_>) -> Outcome {
        let knows = |known: &&Known| known.style == found.style && known.only.is_none_or(|only| only(found.layer));
        let Some(known) = self.styles.iter().find(knows) else {
            return Outcome::Not(match self.tool {
                Tool::A1111 => "it knows kohya's names only",
                Tool::Peft => "it knows its own names only",
                _ => "it knows no such key",
            });
        };
        if !self.kinds.contains(&found.kind) && found.kind != "dora" {
            return Outcome::Not("it loads LoRA only");
        }
        if found.kind == "oft" {
            return self.rotates(found);
        }
        if found.has_alpha && known.alpha == Alpha::Refused {
            return Outcome::Not("it refuses a file with an alpha beside the factors");
        }
        if found.magnitude.is_some() && found.magnitude != self.magnitude {
            return Outcome::Part(match self.magnitude {
                Some("dora_scale") => "it knows DoRA's magnitude as dora_scale only",
                _ => "it leaves DoRA's magnitude out",
            });
        }
        // As `NetworkModule.apply_weight_decompose`, which ignores the shape of the magnitude.
        if self.tool == Tool::A1111 && found.magnitude.is_some() && !found.per_input {
            return Outcome::Part("it divides DoRA's weights by norms of inputs; --dora-axis input is for it");
        }
        match found.scaled {
            AlphaAt::Beside if known.alpha == Alpha::LeftOut => {
                Outcome::Part("it leaves the alpha beside the factors out")
            }
            AlphaAt::Configuration if !known.configured => Outcome::Part("it leaves the alpha in the header out"),
            _ => Outcome::Whole,
        }
    }
}

impl Reader {
    /// What the tool does with OFT. A1111: `extensions-builtin/Lora/network_oft.py` at
    /// <https://github.com/AUTOMATIC1111/stable-diffusion-webui/tree/0550659c>.
    fn rotates(&self, found: &Found<'_>) -> Outcome {
        match (self.tool, found.per_input) {
            (Tool::Peft, true) => Outcome::Whole,
            (Tool::Peft, false) => Outcome::Not("its OFT rotates inputs; --oft-side input is for it"),
            (_, true) => Outcome::Not("its OFT rotates outputs; --oft-side output is for it"),
            (Tool::A1111, false) => Outcome::Part("it rotates biases too"),
            (_, false) if found.limited => {
                Outcome::Part("it limits rotations to alpha, not to alpha times the outputs")
            }
            _ => Outcome::Whole,
        }
    }
}

/// Whether a tool knows the usually adapted layers by a style; attention's projections stand for them.
pub(super) fn knows_usual(readers: &[Reader], tool: Tool, style: Style) -> bool {
    const USUAL: &str = "transformer_blocks.0.attn.to_q";
    let mut known = readers.iter().filter(|reader| reader.tool == tool).flat_map(|reader| reader.styles);
    known.any(|known| known.style == style && known.only.is_none_or(|only| only(USUAL)))
}
