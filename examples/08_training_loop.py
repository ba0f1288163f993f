"""Write a training loop: batches, schedule, averaged weights, a checkpoint to resume from.

`tc.train.Trainer` does all this; here the loop is written out, as torch users write it. The script
takes some seconds on a CPU:

    python examples/08_training_loop.py [FOLDER]
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import trainable_candle as tc
from trainable_candle import nn
from trainable_candle.demo import digits
from trainable_candle.files import safetensors_metadata
from trainable_candle.loader import DataLoader, TensorDataset

EPOCHS = 4
BATCH_SIZE = 64


@dataclass
class State:
    """The state of a run between two epochs: everything that the next epoch depends on."""

    model: nn.Module
    optimizer: tc.optim.Optimizer
    scheduler: tc.optim.lr_scheduler.LRScheduler
    ema: tc.optim.VariableEMA
    epoch: int = 0

    def save(self, path: Path) -> None:
        """Write the state to one file; if writing is interrupted, no partial file appears."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.state_dict(),
        }
        tensors = {
            f"{part}:{name}": tensor
            for part, tensors_of_part in parts.items()
            for name, tensor in tensors_of_part.items()
        }
        facts = {"epoch": str(self.epoch), "step": str(self.scheduler.last_step)}
        tc.save_file(tensors, path, metadata=facts)

    def load(self, path: Path) -> None:
        """Resume from a file that `save` has written."""
        parts: dict[str, dict[str, tc.Tensor]] = {"model": {}, "optimizer": {}, "ema": {}}
        for key, tensor in tc.load_file(path).items():
            part, _, name = key.partition(":")
            parts[part][name] = tensor
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.ema.load_state_dict(parts["ema"])
        facts = safetensors_metadata(path)
        self.epoch = int(facts["epoch"])
        self.scheduler.set_step(int(facts["step"]))


def make(steps: int) -> State:
    """Return the initial state of a run of `steps` optimizer steps."""
    tc.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = tc.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=steps, warmup_steps=10)
    ema = tc.optim.VariableEMA(model.parameters(), decay=0.9)
    return State(model, optimizer, scheduler, ema)


def pixels(images: digits.Digits) -> tc.Tensor:
    """Return the N images of 8x8 pixels as (N, 64), values from 0 to 1."""
    return tc.tensor(images.pixels.reshape(-1, 64) / digits.MAX_PIXEL, dtype="f32")


def train_epoch(state: State, data: TensorDataset) -> None:
    """Train on all images once."""
    # The order of the images and the dropout depend only on the number of the epoch, so that a
    # resumed run equals an uninterrupted run bit for bit.
    tc.manual_seed(state.epoch)
    state.model.train()
    for x, labels in DataLoader(data, batch_size=BATCH_SIZE, shuffle=True):
        loss = nn.functional.cross_entropy(state.model(x), labels)
        state.optimizer.zero_grad()
        loss.backward()
        tc.optim.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.scheduler.step()
        state.ema.update()
    state.epoch += 1


def accuracy(model: nn.Module, images: digits.Digits) -> float:
    """Return the share of images that the model reads correctly, without dropout."""
    model.eval()
    with tc.no_grad():
        predicted = model(pixels(images)).argmax(1).numpy()
    return float(np.mean(predicted == images.labels))


def main(folder: Path) -> dict[str, tc.Tensor]:
    """Train in two halves with a checkpoint between them; returns the trained weights by name."""
    folder.mkdir(parents=True, exist_ok=True)
    train, test = digits.split(digits.load())
    data = TensorDataset(pixels(train), tc.tensor(train.labels, dtype="i64"))
    # The division is rounded up, because the last batch of an epoch may be smaller.
    steps = EPOCHS * -(-len(train) // BATCH_SIZE)

    state = make(steps)
    while state.epoch < EPOCHS // 2:  # `train_epoch` counts the epochs.
        train_epoch(state, data)
    state.save(folder / "checkpoint.safetensors")

    # The second half starts from new objects, as a new process would.
    state = make(steps)
    state.load(folder / "checkpoint.safetensors")
    while state.epoch < EPOCHS:
        train_epoch(state, data)
        with state.ema:  # In this block, the weights are replaced by their averages.
            averaged = accuracy(state.model, test)
        lr = state.scheduler.get_last_lr()[0]
        print(
            f"epoch {state.epoch}: learning rate {lr:.5f}, test images read correctly: "
            f"{accuracy(state.model, test):.1%}, with averaged weights {averaged:.1%}"
        )
    return state.model.state_dict()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "own-loop"))
