"""Tokenizers of CLIP and T5, and of language models with their chat templates.

The tokenizers of language models are in the submodule `chat_tokenizer`, which must be imported
explicitly.
"""

from trainable_candle.text.clip_tokenizer import PAD_OF_BIG_G, PAD_OF_CLIP_L, CLIPTokenizer
from trainable_candle.text.t5_tokenizer import T5Tokenizer

__all__ = ["PAD_OF_BIG_G", "PAD_OF_CLIP_L", "CLIPTokenizer", "T5Tokenizer"]
