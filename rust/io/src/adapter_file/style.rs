//! [`Style`]: the ways to write a layer's name as a module's name in an adapter file.

/// A way to write a layer's name as a module's name in an adapter file. An *original name* is the name of the layer's
/// matrix in the original checkpoint, the file that the model's authors published. *With underscores* means that
/// underscores replace the dots. For a denoiser, kohya's prefix is `lora_unet`, and `ComfyUI`'s is `diffusion_model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// kohya's prefix of the part, and the original name with underscores.
    KohyaOriginal,
    /// kohya's prefix of the part, and diffusers' name with underscores.
    Kohya,
    /// `lora_`, diffusers' name of the part, and diffusers' name of the layer with underscores (`OneTrainer`).
    OneTrainer,
    /// `lycoris_` and diffusers' name with underscores (`SimpleTuner`).
    Lycoris,
    /// diffusers' names of the part and of the layer.
    Diffusers,
    /// As [`Diffusers`](Self::Diffusers), but with `.processor` before the name of an attention projection
    /// (`attn1.processor.to_q`). Early releases of diffusers wrote such names.
    Processor,
    /// `ComfyUI`'s prefix of the part, and the original name.
    ComfyUi,
    /// `ComfyUI`'s prefix of the part, and diffusers' name, which is the model's own name in this library.
    ComfyUiOwn,
    /// `base_model.model.` and diffusers' name.
    Peft,
    /// diffusers' name of the layer, without a prefix.
    Bare,
}

impl Style {
    /// All styles, the most likely first. If two styles give a layer the same name, the first style counts.
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
