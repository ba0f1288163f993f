"""The demos: LoRAs teach built-in models what they have never seen: a digit, hearts, Pig Latin."""
