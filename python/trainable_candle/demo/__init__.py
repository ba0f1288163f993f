"""The demo: a LoRA teaches a small image generator the one handwritten digit it has never seen."""
