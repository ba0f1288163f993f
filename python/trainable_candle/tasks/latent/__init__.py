"""Models that generate an image's latents from noise: everything that their families share.

`LatentModel` is the interface of a model. `LatentFamily` adds what a family needs to be a value of
`--model`, such as default settings. `LatentTask` trains any such model and draws images with it, as
`SampleOptions` say.
"""

from trainable_candle.tasks.latent.drawing import SampleOptions
from trainable_candle.tasks.latent.family import LatentFamily
from trainable_candle.tasks.latent.model import LatentModel
from trainable_candle.tasks.latent.task import LatentTask

__all__ = ["LatentFamily", "LatentModel", "LatentTask", "SampleOptions"]
