//! [`Reader`]: the styles of names that a tool reads, and how the tool applies adapters whose names are in these
//! styles.
//!
//! Each part of a model family has a table of readers. The table determines the format in which adapters of the part
//! are saved by default, and what `verify` reports.

use super::Style;

/// A tool that loads adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// ComfyUI, which maps keys in `comfy/lora.py`.
    ComfyUi,
    /// diffusers' pipelines, whose `load_lora_weights` converts other tools' names.
    Diffusers,
    /// kohya's sd-scripts, which resume training from adapters or merge them (`networks/lora*.py`), or musubi-tuner for
    /// the models that it supports.
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

/// The styles of names and the kinds of adapters that one tool reads.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// The tool.
    pub tool: Tool,
    /// The styles of names that the tool reads.
    pub styles: &'static [Known],
    /// The kinds of adapters that the tool loads. DoRA need not be listed: every tool loads it, with the magnitude or
    /// without ([`magnitude`](Self::magnitude)).
    pub kinds: &'static [&'static str],
    /// The name of the parameter in which the tool expects DoRA's magnitude. `None` if the tool ignores the magnitude
    /// and applies the rest of the adapter.
    pub magnitude: Option<&'static str>,
}

/// A style of names that a tool reads.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The style.
    pub style: Style,
    /// Whether the tool reads the name of `layer` in this style. `None` if the tool reads the names of all layers.
    pub only: Option<fn(layer: &str) -> bool>,
    /// What the tool does with a tensor `….alpha` of a module.
    pub alpha: Alpha,
    /// Whether the tool applies an alpha in peft's configuration.
    pub configured: bool,
}

/// What a tool does with a tensor `….alpha` beside the parameters of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpha {
    /// The tool uses the alpha as the numerator of the scale alpha / rank.
    Applied,
    /// The tool ignores the alpha.
    LeftOut,
    /// The tool reports an error and loads nothing.
    Rejected,
}

impl Known {
    /// The style `style`, for a tool that reads the names of all layers and applies a tensor `….alpha` of a module.
    pub const fn all(style: Style) -> Self {
        Self { style, only: None, alpha: Alpha::Applied, configured: false }
    }

    /// This style, for a tool that reads only the names of layers for which `only` is true.
    #[must_use]
    pub const fn only(self, only: fn(&str) -> bool) -> Self {
        Self { only: Some(only), ..self }
    }

    /// This style, for a tool that also applies alphas in peft's configuration.
    #[must_use]
    pub const fn configured(self) -> Self {
        Self { configured: true, ..self }
    }

    /// This style, for a tool that treats a tensor `….alpha` of a module as `alpha` says.
    #[must_use]
    pub const fn alpha(self, alpha: Alpha) -> Self {
        Self { alpha, ..self }
    }
}

/// Every kind of adapter.
pub const EVERY_KIND: &[&str] = &["lora", "dora", "loha", "lokr", "oft"];

/// peft, which reads its own names for every model.
pub const PEFT: Reader = Reader {
    tool: Tool::Peft,
    styles: &[Known::all(Style::Peft).configured().alpha(Alpha::LeftOut)],
    kinds: EVERY_KIND,
    magnitude: Some("lora_magnitude_vector.weight"),
};

/// The readers of a model that no other tool supports: only peft, which loads adapters of any model.
pub const UNKNOWN: &[Reader] = &[PEFT];

/// What a tool does with one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The tool applies the trained adapter.
    Whole,
    /// The tool applies the adapter, but not as it was trained. The string is the reason.
    Changed(&'static str),
    /// The tool does not apply the module: it ignores the module, or rejects the file. The string is the reason.
    Ignored(&'static str),
}

/// The properties of a module that decide what a tool does with the module.
pub(super) struct ModuleTraits<'a> {
    /// The name of a layer that the module adapts.
    pub layer: &'a str,
    pub style: Style,
    pub kind: &'a str,
    /// The name of DoRA's magnitude in the file, if there is one.
    pub magnitude: Option<&'a str>,
    /// For DoRA: whether it has one magnitude for each input (not for each output). For OFT: whether it rotates inputs
    /// (not outputs).
    pub per_input: bool,
    /// Whether OFT has an alpha that limits the rotations in `ComfyUI` to less than in training.
    pub limited: bool,
    /// Whether the module has a tensor `….alpha`.
    pub has_alpha: bool,
    /// Where the file stores the module's alpha, if this alpha gives a scale other than 1.
    pub alpha_at: AlphaAt,
}

/// Where a file stores an alpha that gives a scale other than 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AlphaAt {
    /// The file has no such alpha.
    Nowhere,
    /// In a tensor `….alpha` of the module.
    Beside,
    /// In peft's configuration.
    Configuration,
}

impl Reader {
    /// What the tool does with a module.
    pub(super) fn outcome(&self, found: &ModuleTraits<'_>) -> Outcome {
        let knows = |known: &&Known| known.style == found.style && known.only.is_none_or(|only| only(found.layer));
        let Some(known) = self.styles.iter().find(knows) else {
            return Outcome::Ignored(match self.tool {
                Tool::A1111 => "it only knows kohya's names",
                Tool::Peft => "it only knows its own names",
                _ => "it does not know this key",
            });
        };
        if !self.kinds.contains(&found.kind) && found.kind != "dora" {
            return Outcome::Ignored("it only loads LoRA");
        }
        if found.kind == "oft" {
            return self.oft_outcome(found);
        }
        if found.has_alpha && known.alpha == Alpha::Rejected {
            return Outcome::Ignored("it rejects files with an alpha beside the factors");
        }
        if found.magnitude.is_some() && found.magnitude != self.magnitude {
            return Outcome::Changed(match self.magnitude {
                Some("dora_scale") => "it only knows DoRA's magnitude as dora_scale",
                _ => "it ignores DoRA's magnitude",
            });
        }
        // A1111's `NetworkModule.apply_weight_decompose` always divides by one norm for each input, whatever the shape
        // of the magnitude.
        if self.tool == Tool::A1111 && found.magnitude.is_some() && !found.per_input {
            return Outcome::Changed(
                "it divides DoRA's weights by one norm for each input; train with --dora-axis input for A1111",
            );
        }
        match found.alpha_at {
            AlphaAt::Beside if known.alpha == Alpha::LeftOut => {
                Outcome::Changed("it ignores the alpha beside the factors")
            }
            AlphaAt::Configuration if !known.configured => {
                Outcome::Changed("it ignores the alpha in peft's configuration")
            }
            _ => Outcome::Whole,
        }
    }
}

impl Reader {
    /// What the tool does with OFT. For A1111 see `extensions-builtin/Lora/network_oft.py` at
    /// <https://github.com/AUTOMATIC1111/stable-diffusion-webui/tree/0550659c>.
    fn oft_outcome(&self, found: &ModuleTraits<'_>) -> Outcome {
        match (self.tool, found.per_input) {
            (Tool::Peft, true) => Outcome::Whole,
            (Tool::Peft, false) => Outcome::Ignored("its OFT rotates inputs; train with --oft-side input for peft"),
            (_, true) => Outcome::Ignored("its OFT rotates outputs; train with --oft-side output for this tool"),
            (Tool::A1111, false) => Outcome::Changed("it rotates biases too"),
            // Of the other tools only ComfyUI loads OFT.
            (_, false) if found.limited => {
                Outcome::Changed("it limits rotations to alpha, not to alpha times the number of outputs")
            }
            _ => Outcome::Whole,
        }
    }
}

/// Whether `tool` reads names in `style` of the layers that are usually adapted. Checked for one layer, an attention
/// projection.
pub(super) fn knows_usual(readers: &[Reader], tool: Tool, style: Style) -> bool {
    const USUAL: &str = "transformer_blocks.0.attn.to_q";
    let mut known = readers.iter().filter(|reader| reader.tool == tool).flat_map(|reader| reader.styles);
    known.any(|known| known.style == style && known.only.is_none_or(|only| only(USUAL)))
}
