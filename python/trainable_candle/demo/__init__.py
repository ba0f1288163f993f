"""Demos: with a LoRA, a built-in model learns to draw zeros or hearts, or to write Pig Latin."""
