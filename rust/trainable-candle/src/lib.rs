//! Fine-tune large models with LoRA and DoRA, without PyTorch.
