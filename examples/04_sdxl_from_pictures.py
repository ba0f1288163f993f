"""Train SDXL on a folder of images in Python, with the settings of `train-lora`.

The script trains the tiny SDXL that ships in the package, on the photographs in the folder `photos`
beside the script. To train SDXL itself on your own images, set `weights` in the settings to
"sd_xl_base_1.0.safetensors", and `dataset` to a folder of images with captions in `.txt` files. A
GPU is used if there is one. The script takes about a minute on two cores:

    python examples/04_sdxl_from_pictures.py [FOLDER]
"""

import sys
from pathlib import Path

from PIL import Image

import trainable_candle as tc
from trainable_candle.run import TrainingRun, train_adapter
from trainable_candle.tasks.latent import SampleOptions

PHOTOS = Path(__file__).parent / "photos"
STEPS = 400
PROMPT = "a photo of a cup of coffee with a spoon on a red plate, on a wood table"


def main(folder: Path, steps: int = STEPS, **settings: object) -> TrainingRun:
    """Train an adapter, and draw an image with it.

    Args:
        folder: the folder for the adapter, logs, checkpoints and the image.
        steps: optimizer steps.
        **settings: settings of `docs/settings.md`; they override those in this function.
    """
    config = tc.train.TrainConfig(
        model="sdxl",
        dataset=str(PHOTOS),
        output=str(folder),
        rank=16,
        target_modules=["all-linear"],
        steps=steps,
        batch_size=4,
        learning_rate=2e-3,
    ).with_(**settings)
    run = train_adapter(config)

    # The model is still in memory, with the adapter on it.
    (pixels,) = run.task.draw([PROMPT], SampleOptions(steps=25, seed=0))
    Image.fromarray(pixels).save(folder / "coffee.png")
    print(f"adapter: {run.adapter_path}; an image drawn with it: {folder / 'coffee.png'}")
    return run


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sdxl-photos"))
