"""SDXL: from a checkpoint and a folder of pictures to an adapter."""

from trainable_candle.recipes.sdxl.recipe import SDXLRecipe

__all__ = ["SDXLRecipe"]
