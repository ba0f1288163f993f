"""Training on a CUDA device: results, graphs, memory, profiles and the command line."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.data import ShuffledBatches
from trainable_candle.models import SDXLUNet
from trainable_candle.run import train_adapter
from trainable_candle.tasks.estimate import available_bytes
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.logs import read_json_log

pytestmark = pytest.mark.gpu
PHOTOGRAPHS = Path(__file__).parents[2] / "examples" / "photos"
# The fixture `train` trains by a config, and returns the bytes of each parameter by name. The
# fixture `config` has the settings of a short run: 12 steps with the digits model.
Train = Callable[..., dict[str, bytes]]


class LossRecorder(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        del trainer
        self.losses.append(report.loss)


def curve(config: TrainConfig, **settings: Any) -> npt.NDArray[np.float64]:
    """Train by `config` with changed settings, and return the loss of each step."""
    recorder = LossRecorder()
    changed = config.with_(**settings)
    train_adapter(changed, callbacks=[recorder], progress=False, report=lambda _: None)
    return np.array(recorder.losses)


def test_two_hundred_steps_give_a_curve_near_that_of_the_cpu(gpu: str, tmp_path: Path) -> None:
    config = TrainConfig(
        model="sdxl",
        dataset=str(PHOTOGRAPHS),
        output=str(tmp_path / "cpu"),
        device="cpu",
        precision="f32",
        cache="memory",
        rank=8,
        steps=200,
        batch_size=2,
        learning_rate=1e-3,
        save_every=0,
    )
    expected = curve(config)
    found = curve(config, device=gpu, output=str(tmp_path / "f32"))
    # Both devices get the same latents, noise and timesteps. Each step adds to the differences that
    # come from rounding.
    np.testing.assert_allclose(found[:20], expected[:20], rtol=1e-3)
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert found.mean() == pytest.approx(expected.mean(), rel=5e-3)
    bf16 = curve(config, device=gpu, precision="bf16", output=str(tmp_path / "bf16"))
    np.testing.assert_allclose(bf16, expected, rtol=0.25)
    assert bf16.mean() == pytest.approx(expected.mean(), rel=0.02)


def test_recorded_steps_of_texts_are_near_eager_ones_and_repeat_bit_for_bit(
    gpu: str, tmp_path: Path
) -> None:
    """Texts start at different positions in each batch; a replay uses those of its own batch."""
    dataset = tmp_path / "texts.jsonl"
    # 80 texts of 3 to 92 letters.
    lines = ["".join(chr(97 + n * k % 26) for k in range(3 + 7 * n % 90)) for n in range(80)]
    dataset.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = TrainConfig(
        model="causal-lm",
        dataset=str(dataset),
        output=str(tmp_path / "eager"),
        device=gpu,
        precision="bf16",
        sequence_length=128,
        batch_size=2,
        rank=4,
        learning_rate=1e-2,
        steps=30,
        save_every=0,
    )
    # By default, a GPU records steps as CUDA graphs and replays them; with 0, each step is eager.
    eager = curve(config, cuda_graphs=0)
    recorded = curve(config, output=str(tmp_path / "recorded"))
    # Recorded steps pad the rows of a batch, eager steps do not. So their sums have another order.
    np.testing.assert_allclose(recorded, eager, rtol=0.02)
    again = curve(config, output=str(tmp_path / "again"))
    np.testing.assert_array_equal(again, recorded)
    # The run learns.
    assert recorded[-5:].mean() < 0.9 * recorded[:5].mean()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recorded_steps_equal_eager_ones_bit_for_bit(
    gpu: str, config: TrainConfig, train: Train, accumulation: int, tmp_path: Path
) -> None:
    """The fixture `config` has dropout and a schedule, and the default clips gradients."""
    config = config.with_(device=gpu, gradient_accumulation=accumulation)
    eager = train(config.with_(cuda_graphs=0))
    assert train(config.with_(output=str(tmp_path / "recorded"))) == eager


def test_a_run_continues_on_another_device(
    gpu: str, config: TrainConfig, train: Train, tmp_path: Path
) -> None:
    """A run saved on the GPU continues on the CPU; one saved on the CPU continues on the GPU."""

    class StopAfter5(Callback):
        def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
            if report.step == 5:
                trainer.stop()

    def values(parameters: Mapping[str, bytes]) -> npt.NDArray[np.float32]:
        return np.concatenate([np.frombuffer(data, np.float32) for data in parameters.values()])

    expected = values(train(config))
    for device, other in ((gpu, "cpu"), ("cpu", gpu)):
        interrupted = config.with_(output=str(tmp_path / device))
        train(interrupted.with_(device=device), StopAfter5())
        found = values(train(interrupted.with_(device=other, resume="latest")))
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw", "lion8bit", "sgd"])
def test_f16_with_a_loss_scaler_trains(
    gpu: str, config: TrainConfig, train: Train, optimizer: str, tmp_path: Path
) -> None:
    settings = {
        "device": gpu,
        "optimizer": optimizer,
        "precision": "f16",
        "lr_scheduler": "constant",
    }
    # The warm-up of `config` is longer than one step, which is an error.
    after_1 = train(config.with_(**settings, steps=1, warmup_steps=0))
    after_12 = train(config.with_(**settings, output=str(tmp_path / "longer")))
    assert after_1.keys() == after_12.keys()
    assert after_1 != after_12


def test_memory_is_constant_and_the_loss_falls_over_two_thousand_steps(gpu: str) -> None:
    data = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    tc.manual_seed(0)
    weight = tc.randn((256, 256), device=gpu) * 0.05
    rank, alpha = 8, 8.0
    layer = tc.nn.LoRALinear(weight, rank, alpha, dropout=0.1)
    parameters = dict(zip(("down", "up"), layer.get_vars(), strict=True))

    def inputs(rows: npt.NDArray[np.int64]) -> dict[str, tc.Tensor]:
        x = tc.tensor(data[rows])
        return {name: t.to(gpu) for name, t in {"x": x, "target": x.sum(1, keepdim=True)}.items()}

    def loss(batch: Mapping[str, tc.Tensor]) -> tc.Tensor:
        return tc.nn.functional.mse_loss(layer(batch["x"]).sum(1, keepdim=True), batch["target"])

    class Memory(Callback):
        def __init__(self) -> None:
            self.bytes: dict[int, tuple[int, int]] = {}
            self.losses: list[float] = []

        def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
            del trainer
            self.losses.append(report.loss)
            if report.step % 500 == 100:  # after the graphs are recorded
                stats = tc.cuda.memory_stats(gpu)
                self.bytes[report.step] = (stats["allocated"], stats["reserved"])

    memory = Memory()
    batch_size, seed = 16, 0
    optimizer = tc.optim.AdamW8bit(list(parameters.values()), lr=1e-3)
    Trainer(
        loss,
        parameters,
        optimizer,
        ShuffledBatches(len(data), batch_size, seed),
        inputs=inputs,
        cuda_graphs=4,  # graphs for at most 4 shapes of batches; here all batches have one shape
        steps=2000,
        max_grad_norm=1.0,
        callbacks=[memory],
    ).train()
    assert len(set(memory.bytes.values())) == 1, memory.bytes
    assert np.mean(memory.losses[-50:]) < 0.1 * np.mean(memory.losses[:50])


def test_checkpointing_needs_less_memory(gpu: str) -> None:
    base = Path(tc.__file__).parent / "assets" / "sdxl_tiny" / "unet"
    peaks = {}
    for policy in ("none", "selective", "full"):
        model = SDXLUNet.from_pretrained(base, dtype="bf16", device=gpu)
        if policy != "none":
            model.enable_gradient_checkpointing(policy)
        adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
        inputs = {
            "sample": tc.randn((8, 4, 64, 64), device=gpu),
            "timestep": tc.full((8,), 500.0, device=gpu),
            "encoder_hidden_states": tc.randn((8, 77, 128), device=gpu),
            "text_embeds": tc.randn((8, 64), device=gpu),
            "time_ids": tc.full((8, 6), 512.0, device=gpu),
        }
        tc.cuda.synchronize(gpu)
        tc.cuda.reset_peak_memory_stats(gpu)
        before = tc.cuda.memory_stats(gpu)["allocated"]
        (model(**inputs).to("f32") ** 2).mean().backward()
        peaks[policy] = tc.cuda.memory_stats(gpu)["peak_allocated"] - before
        assert all(var.grad is not None for var in adapter.parameters())
    # Full checkpointing keeps a fifth of the activations that the model keeps without
    # checkpointing; selective checkpointing keeps nine tenths. The peaks also include recomputed
    # values.
    assert peaks["full"] < 0.7 * peaks["none"], peaks
    assert peaks["full"] < peaks["selective"] < peaks["none"], peaks


def test_the_command_line_trains_and_draws(
    gpu: str, sdxl_base: Path, sdxl_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    model = ["--model", "sdxl", "--weights", str(sdxl_base), "--device", gpu]
    arguments = [
        *["train", *model, "--dataset", str(sdxl_folder), "--output", str(output)],
        *["--mixed-precision", "bf16", "--resolution", "64", "--rank", "4", "--steps", "6"],
        *["--validation-split", "0.25", "--validate-every", "3", "--sample-prompts", "a blur"],
        *["--sample-steps", "2", "--sample-every", "3", "--save-every", "3", "--flip"],
        *["--ema-decay", "0.9", "--train-text-encoder", "--gradient-checkpointing", "selective"],
    ]
    assert main(arguments) == 0
    rows = read_json_log(output / "train.jsonl")
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    # Validation runs before the first step and every three of the six steps.
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    adapter = output / "adapter.safetensors"
    for device in (gpu, "cpu"):
        image = tmp_path / f"{device}.png"
        base = ["--weights", str(sdxl_base), "--device", device, "--adapter", str(adapter)]
        drawing = ["--prompt", "a blur", "--size", "32", "--steps", "2", "--output", str(image)]
        assert main(["sample", "--model", "sdxl", *base, *drawing]) == 0
        assert image.is_file()
    # The adapter file also has adapters of the text encoders.
    parameters = tc.load_file(adapter)
    assert any("text_encoder" in name or "te1" in name for name in parameters)
    assert all(np.isfinite(tensor.to("f32").numpy()).all() for tensor in parameters.values())


def test_a_run_that_does_not_fit_into_the_memory_of_the_gpu_is_rejected(
    gpu: str, sdxl_base: Path, sdxl_folder: Path, tmp_path: Path
) -> None:
    stats = tc.cuda.memory_stats(gpu)
    assert 0 < available_bytes(gpu) <= stats["total"]
    config = TrainConfig(
        model="sdxl",
        weights=str(sdxl_base),
        dataset=str(sdxl_folder),
        output=str(tmp_path / "run"),
        resolution=64,
        batch_size=10**9,
        device=gpu,
    )
    with pytest.raises(tc.OutOfMemoryError, match=r"^GPU memory: .* --batch-size 1"):
        train_adapter(config, progress=False, report=lambda _: None)


def test_a_profile_counts_the_launches_of_each_kernel(gpu: str) -> None:
    x = tc.randn((256, 256), device=gpu)
    with tc.cuda.profile(gpu) as profile:
        for _ in range(300):
            x = (x @ x).sigmoid()
    products = [kernel for kernel in profile.kernels if kernel.name.startswith("gemm")]
    assert sum(kernel.count for kernel in products) == 300
    # Each iteration of the loop launches a product and a sigmoid.
    assert profile.launches == 600
    assert all(0 < kernel.milliseconds < 1000 for kernel in profile.kernels)
    assert str(profile).count("launches") == 1


def test_the_gpu_stays_usable_after_an_allocation_fails(gpu: str) -> None:
    with pytest.raises(tc.OutOfMemoryError):
        tc.zeros((1 << 20, 1 << 22), device=gpu)  # 16 TiB in f32
    assert float(tc.ones((2, 2), device=gpu).sum().item()) == 4.0
