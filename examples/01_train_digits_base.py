"""Train the demo's image generator from random weights on handwritten digits of nine classes.

The tenth class, 0, is the one that the demo's LoRA learns: this script trains on no images of 0, so
the row of 0 in the class embedding keeps its random initial values. The script takes some minutes
on two cores. It writes the two files of the built-in model `digits`, its configuration and weights:

    python examples/01_train_digits_base.py
"""

import argparse
from pathlib import Path

import numpy as np

import trainable_candle as tc
from trainable_candle.data import ShuffledBatches
from trainable_candle.demo import digits
from trainable_candle.families.digits import to_model
from trainable_candle.models import DigitsTransformer
from trainable_candle.train import FlowMatching, ProgressBar, Trainer

STEPS = 4000
BATCH_SIZE = 128
SEED = 0
PURE_NOISE = 1000
"""The model's timestep at pure noise, where the noise level is 1."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("digits-base"), help="folder for the two files"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()

    train, _ = digits.split(digits.load())  # The other part is for the demo's judge.
    seen = train.without(digits.UNSEEN)
    # `to_model` takes RGB images, as users have them.
    rgb = np.repeat(digits.to_grey(seen.pixels)[..., None], 3, axis=-1)

    tc.manual_seed(SEED)
    model = DigitsTransformer()
    flow = FlowMatching()
    images, labels = to_model(rgb), seen.labels.astype(np.int64)

    def inputs(indices: np.ndarray) -> dict[str, tc.Tensor]:
        sample, levels, target = flow.noise(tc.tensor(images[indices]))
        return {
            "sample": sample,
            "times": levels * PURE_NOISE,
            "labels": tc.tensor(labels[indices]),
            "target": target,
        }

    def loss(given: dict[str, tc.Tensor]) -> tc.Tensor:
        velocity = model(given["sample"], given["times"], given["labels"])
        return tc.nn.functional.mse_loss(velocity, given["target"])

    parameters = model.named_parameters()
    optimizer = tc.optim.AdamW(list(parameters.values()), lr=2e-3, weight_decay=0.0)
    trainer = Trainer(
        loss,
        parameters,
        optimizer,
        ShuffledBatches(len(seen), BATCH_SIZE, SEED),
        inputs=inputs,
        steps=arguments.steps,
        scheduler=tc.optim.lr_scheduler.cosine(
            optimizer, total_steps=arguments.steps, warmup_steps=200
        ),
        max_grad_norm=1.0,
        callbacks=[ProgressBar()],
    )
    trainer.train()
    model.save_pretrained(arguments.output)
    # The library ships these weights in f16, which halves the file.
    weights = arguments.output / "model.safetensors"
    tc.save_file({name: w.to("f16") for name, w in tc.load_file(weights).items()}, weights)
    print(f"trained on {len(seen)} images: {arguments.output}")


if __name__ == "__main__":
    main()
