//! [`Style`]: the ways to write the names of layers.

/// A way to write the name of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// kohya's prefix and the original name with underscores.
    KohyaOriginal,
    /// kohya's prefix and diffusers' name with underscores.
    Kohya,
    /// `lora_`, diffusers' prefix and name with underscores (`OneTrainer`).
    OneTrainer,
    /// `lycoris_` and diffusers' name with underscores (`SimpleTuner`).
    Lycoris,
    /// diffusers' prefix and name.
    Diffusers,
    /// diffusers' name with `.processor` before the projections of attention, as early releases of diffusers wrote it.
    Processor,
    /// `ComfyUI`'s prefix and the original name.
    ComfyUi,
    /// `ComfyUI`'s prefix and diffusers' name.
    ComfyUiOwn,
    /// `base_model.model.` and diffusers' name.
    Peft,
    /// diffusers' name alone.
    Bare,
}

impl Style {
    /// Every style in which files may name a layer, the most likely first.
    pub(super) const ALL: [Self; 10] = [
        Self::KohyaOriginal,
        Self::Kohya,
        Self::Diffusers,
        Self::ComfyUi,
        Self::OneTrainer,
        Self::Peft,
        Self::Lycoris,
        Self::Processor,
        Self::ComfyUiOwn,
        Self::Bare,
    ];
}
