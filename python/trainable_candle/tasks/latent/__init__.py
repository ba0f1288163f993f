"""Models that generate images from noise: everything that their families share.

`LatentModel` is the interface of a model, and `LatentFamily` adds what `--model` needs.
`LatentTask` trains any such model and draws images with it.
"""

from trainable_candle.tasks.latent.drawing import SampleOptions
from trainable_candle.tasks.latent.family import LatentFamily
from trainable_candle.tasks.latent.model import LatentModel
from trainable_candle.tasks.latent.task import LatentTask

__all__ = ["LatentFamily", "LatentModel", "LatentTask", "SampleOptions"]
