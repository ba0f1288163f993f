"""Text for diffusion models: CLIP's tokenizer."""

from trainable_candle.text.clip_tokenizer import PAD_OF_BIG_G, PAD_OF_CLIP_L, CLIPTokenizer

__all__ = ["PAD_OF_BIG_G", "PAD_OF_CLIP_L", "CLIPTokenizer"]
