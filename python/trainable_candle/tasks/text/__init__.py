"""Language models: everything that their families share.

`TextFamily` is the interface of a model, and `TextTask` trains any such model on rows of tokens.
"""

from trainable_candle.tasks.text.family import CausalModel, TextFamily
from trainable_candle.tasks.text.task import TextTask

__all__ = ["CausalModel", "TextFamily", "TextTask"]
