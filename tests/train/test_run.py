"""Complete training runs: their files, the effects of settings, and runs that run out of memory.

A plan chooses settings that the user leaves open (such as gradient checkpointing and the precision
of the base weights) so that the run fits into memory. If memory runs out within the first 20 steps
and before the first checkpoint, the run makes a new plan for less memory and starts again.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.placement import choose
from trainable_candle.run import ADAPTER, CONFIG, CURVE, JSON_LOG, LOG, train_adapter
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.evaluation import step_adapter_path
from trainable_candle.train.logs import read_log
from trainable_candle.train.state import checkpoint_path, checkpoints

# A function that trains with settings and returns the bytes of the adapter's parameters by name.
Train = Callable[..., dict[str, bytes]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads after each test."""
    before = tc.get_num_threads()
    yield
    tc.set_num_threads(before)


def test_a_run_writes_its_log_settings_adapters_and_checkpoints_into_its_folder(
    config: TrainConfig, train: Train
) -> None:
    train(config)
    output = Path(config.output)
    # The run has 12 steps. It saves a checkpoint and an adapter every 5 steps and at the end; the
    # last adapter is the file `ADAPTER`.
    folders = [checkpoint_path(output, step).name for step in (5, 10, 12)]
    files = [ADAPTER, CONFIG, CURVE, LOG, JSON_LOG]
    files += [step_adapter_path(output, step).name for step in (5, 10)]
    assert sorted(p.name for p in output.iterdir()) == sorted([*files, *folders])
    # The plan has chosen the two settings that `config` leaves open.
    assert TrainConfig.from_yaml(output / CONFIG) == config.with_(
        base_precision="same", gradient_checkpointing="none"
    )
    intermediate = [tc.load_file(step_adapter_path(output, step)) for step in (5, 10)]
    final = tc.load_file(output / ADAPTER)
    assert intermediate[0].keys() == intermediate[1].keys() == final.keys()
    adapters = (*intermediate, final)
    distinct = {str([tensors[name].tolist() for name in final]) for tensors in adapters}
    assert len(distinct) == 3


def test_a_number_of_epochs_becomes_a_number_of_steps(config: TrainConfig) -> None:
    lines: list[str] = []
    # `steps` gets its default value, as if it were not given.
    given = config.with_(steps=TrainConfig.steps, epochs=3, batch_size=4, gradient_accumulation=2)
    run = train_adapter(given, progress=False, report=lines.append)
    images = len(list(Path(config.dataset).glob("*.png")))
    # If the last images of an epoch do not fill a batch of 4, the next epoch completes the batch:
    # only full batches count (//). A step uses 2 batches; an odd last batch takes a whole step.
    assert run.step == math.ceil(3 * images // 4 / 2)
    assert f"epochs: 3 of {images} images: {run.step} steps" in lines
    assert read_log(Path(config.output) / LOG)[-1]["step"] == str(run.step)
    written = TrainConfig.from_yaml(Path(config.output) / CONFIG)
    assert (written.epochs, written.steps) == (None, run.step)
    with pytest.raises(ConfigError, match="--epochs and --steps both say how long"):
        train_adapter(config.with_(epochs=3), progress=False)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 1e-4), ("prodigy", 1.0)])
def test_the_default_learning_rate_suits_the_optimizer(
    config: TrainConfig, optimizer: str, rate: float
) -> None:
    train_adapter(config.with_(optimizer=optimizer, learning_rate=None), progress=False)
    assert TrainConfig.from_yaml(Path(config.output) / CONFIG).learning_rate == rate


def test_without_a_gpu_an_automatic_device_is_the_cpu_and_is_reported(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(tc.cuda, "unavailable_reason", lambda: "there is no driver")
    automatic = config.with_(device="auto", precision="auto", steps=2, warmup_steps=0)
    train_adapter(automatic, progress=False, report=lines.append)
    assert "device: cpu, f32 (no GPU is used: there is no driver)" in lines
    written = TrainConfig.from_yaml(Path(config.output) / CONFIG)
    assert (written.device, written.precision) == ("cpu", "f32")


def test_an_automatic_device_is_the_gpu_and_an_automatic_precision_suits_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tc.cuda, "unavailable_reason", lambda: None)
    assert str(choose("auto", "auto")) == "device: cuda, bf16"
    assert str(choose("auto", "f32")) == "device: cuda, f32"
    assert str(choose("cuda:1", "auto")) == "device: cuda:1, bf16"
    assert str(choose("cpu", "bf16")) == "device: cpu, bf16"
    assert str(choose("cpu:0", "auto")) == "device: cpu, f32"


def test_an_output_folder_with_checkpoints_is_not_reused(config: TrainConfig, train: Train) -> None:
    train(config)
    before = (Path(config.output) / LOG).read_bytes()
    with pytest.raises(
        ConfigError, match=r"holds checkpoint-000012 of an earlier run; continue it"
    ):
        train(config)
    assert (Path(config.output) / LOG).read_bytes() == before


def test_a_finished_adapter_is_not_overwritten(config: TrainConfig, train: Train) -> None:
    train(config)
    adapter = Path(config.output) / ADAPTER
    # Without checkpoints, the adapter itself is what keeps a new run out of the folder.
    for checkpoint in checkpoints(adapter.parent):
        shutil.rmtree(checkpoint)
    before = adapter.read_bytes()
    with pytest.raises(ConfigError, match=r"holds adapter\.safetensors of an earlier run"):
        train(config.with_(seed=9))
    assert adapter.read_bytes() == before
    # A run with another name can write into the folder.
    train(config.with_(name="other"))
    assert adapter.read_bytes() == before


def test_a_run_resumed_from_its_last_checkpoint_writes_the_same_adapter_into_a_new_folder(
    config: TrainConfig, train: Train, tmp_path: Path
) -> None:
    train(config)
    last = checkpoints(Path(config.output))[-1]
    train(config.with_(output=str(tmp_path / "again"), resume=str(last)))
    first, again = (
        tc.load_file(folder / ADAPTER) for folder in (Path(config.output), tmp_path / "again")
    )
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(again[name].numpy(), tensor.numpy(), err_msg=name)


# Changes of the settings of `six_step_config`, each of which changes the trained adapter. OFT takes
# no rank, so its changes set the default rank.
EFFECTIVE_CHANGES = [
    {"rank": 5},
    {"alpha": 7.0},
    {"rslora": True},
    {"adapter": "dora"},
    {"adapter": "oft", "rank": TrainConfig.rank},
    {"adapter": "oft", "rank": TrainConfig.rank, "oft_side": "output", "format": "kohya"},
    {"lora_dropout": 0.5},
    {"qat": "int8"},
    {"target_modules": ["to_q", "to_v"]},
    {"exclude_modules": ["to_k"]},
    {"steps": 4},
    {"batch_size": 3},
    {"gradient_accumulation": 2},
    {"optimizer": "adamw"},
    {"learning_rate": 1e-3},
    {"lr_scheduler": "linear"},
    {"optimizer_args": ["momentum=0.5"]},
    {"lr_scheduler_args": ["num_cycles=1.5"]},
    {"warmup_steps": 0},
    {"weight_decay": 0.5},
    {"max_grad_norm": 1e-3},
    {"timesteps": "logit_normal"},
    {"ema_decay": 0.9},
    {"validation_split": 0.3},
    {"seed": 1},
    {"precision": "bf16"},
]


@pytest.fixture(scope="module")
def reference(
    train: Train, digits_base: Path, digits_folder: Path, tmp_path_factory: Any
) -> dict[str, bytes]:
    """The parameters of the adapter of a run of `six_step_config` without changes."""
    return train(six_step_config(digits_base, digits_folder, tmp_path_factory.mktemp("reference")))


def six_step_config(base: Path, dataset: Path, output: Path, **changes: Any) -> TrainConfig:
    """Return the settings of a run of 6 steps, with changes."""
    settings = {
        "rank": 4,
        "steps": 6,
        "batch_size": 4,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler": "cosine",
        "warmup_steps": 2,
    }
    folders = {"weights": str(base), "dataset": str(dataset), "output": str(output / "run")}
    return TrainConfig(model="digits", **folders, **{**settings, **changes})


@pytest.mark.parametrize("change", EFFECTIVE_CHANGES, ids="-".join)
def test_settings_of_the_adapter_and_of_training_change_the_result(
    change: dict[str, Any],
    reference: dict[str, bytes],
    train: Train,
    digits_base: Path,
    digits_folder: Path,
    tmp_path: Path,
) -> None:
    assert train(six_step_config(digits_base, digits_folder, tmp_path, **change)) != reference


@pytest.mark.parametrize("axis", ["output", "input"])
def test_dora_has_a_magnitude_for_each_output_or_input(
    axis: str, train: Train, digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    config = six_step_config(
        digits_base, digits_folder, tmp_path, adapter="dora", format="kohya", dora_axis=axis
    )
    train(config)
    file = tc.load_file(Path(config.output) / ADAPTER)
    magnitudes = {key: value.shape for key, value in file.items() if key.endswith(".dora_scale")}
    assert magnitudes
    for key, shape in magnitudes.items():
        module = key.removesuffix(".dora_scale")
        outputs = file[f"{module}.lora_up.weight"].shape[0]
        inputs = file[f"{module}.lora_down.weight"].shape[1]
        assert tuple(shape[:2]) == ((outputs, 1) if axis == "output" else (1, inputs))


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 1},
        {"save_every": 1},
        {"keep_checkpoints": 1},
        {"log_every": 4},
        {"caption": "1"},  # for images without a caption; here every image has one
        {"keep_adapters": 1},
        {"tensorboard": True},
        {"vram": 4.0},
        {"sample_prompts": ["a zero"], "sample_every": 2},
        {"validation_dataset": "DATASET", "validate_every": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_do_not_change_the_result(
    change: dict[str, Any],
    reference: dict[str, bytes],
    train: Train,
    digits_base: Path,
    digits_folder: Path,
    tmp_path: Path,
) -> None:
    # Put the path of the fixture in place of "DATASET".
    change = {k: str(digits_folder) if v == "DATASET" else v for k, v in change.items()}
    assert train(six_step_config(digits_base, digits_folder, tmp_path, **change)) == reference


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_the_loss_of_a_run_in_16_bit_floats_falls(
    config: TrainConfig, train: Train, precision: str
) -> None:
    longer = config.with_(precision=precision, steps=60, batch_size=10, save_every=0)
    train(longer)
    losses = [float(row["loss"]) for row in read_log(Path(longer.output) / LOG)]
    assert np.mean(losses[-15:]) < 0.9 * np.mean(losses[:15])


@pytest.mark.parametrize(
    ("policy", "blocks"), [("full", None), ("selective", None), ("full", 1), ("offload", 1)]
)
def test_gradient_checkpointing_does_not_change_the_result(
    config: TrainConfig, train: Train, policy: str, blocks: int | None, tmp_path: Path
) -> None:
    given = {"gradient_checkpointing": policy, "checkpoint_blocks": blocks}
    other = config.with_(output=str(tmp_path / "other"), **given)
    assert train(other) == train(config)
    written = TrainConfig.from_yaml(tmp_path / "other" / CONFIG)
    assert {name: getattr(written, name) for name in given} == given


def test_an_unknown_or_missing_device_is_reported_before_anything_is_read(
    config: TrainConfig,
) -> None:
    nowhere = config.with_(dataset="nowhere", weights="nowhere")
    with pytest.raises(tc.DeviceError, match='unknown device "tpu"'):
        train_adapter(nowhere.with_(device="tpu"), progress=False)
    if tc.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(tc.CudaUnavailableError):
        train_adapter(nowhere.with_(device="cuda"), progress=False)


class OneOutOfMemory(Callback):
    """Raises an out-of-memory error once, at the end of step `step`.

    Both attempts, the one that fails and the one after it, must begin at step 0.
    """

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        assert trainer.step == 0

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        assert trainer.step == report.step
        if report.step == self.step:
            self.step = None
            raise tc.OutOfMemoryError("matmul: there is too little")


@pytest.mark.parametrize("step", [1, 4])
def test_a_run_out_of_memory_restarts_with_a_new_plan_and_the_same_result(
    config: TrainConfig, train: Train, tmp_path: Path, step: int
) -> None:
    # Four blocks and large batches, so that gradient checkpointing saves memory: otherwise there
    # would be no smaller plan.
    deep = tc.models.DigitsTransformer(num_layers=4, num_attention_heads=2, attention_head_dim=8)
    deep.save_pretrained(tmp_path / "deep")
    config = config.with_(weights=str(tmp_path / "deep"), batch_size=32)
    expected = train(config)
    again = config.with_(output=str(tmp_path / "again"))
    lines: list[str] = []
    run = train_adapter(
        again, callbacks=[OneOutOfMemory(step)], progress=False, report=lines.append
    )
    after = "1 step" if step == 1 else f"{step} steps"
    assert f"plan: memory ran out after {after}: matmul: there is too little" in lines
    (plan,) = (line for line in lines if line.startswith("plan: --"))
    assert "--gradient-checkpointing" in plan
    written = TrainConfig.from_yaml(tmp_path / "again" / CONFIG)
    assert written.gradient_checkpointing in {"selective", "full"}
    # Gradient checkpointing changes no value.
    found = {n: v.detach().numpy().tobytes() for n, v in run.adapter.named_parameters().items()}
    assert found == expected
    steps = [row["step"] for row in read_log(tmp_path / "again" / LOG)]
    assert steps == [row["step"] for row in read_log(Path(config.output) / LOG)]


def test_a_run_out_of_memory_fails_if_it_cannot_be_planned_anew(config: TrainConfig) -> None:
    by_hand = config.with_(gradient_checkpointing="none", base_precision="same")
    late = config.with_(steps=30, save_every=0)
    # In the first run, the user has set all that a plan could change. The second runs out of memory
    # after the first 20 steps, and the third after its first checkpoint.
    for settings, step in ((by_hand, 1), (late, 25), (config, 7)):
        failing = OneOutOfMemory(step)
        with pytest.raises(tc.OutOfMemoryError):
            train_adapter(settings, callbacks=[failing], progress=False)


def test_the_batch_size_auto_is_stored_as_a_number(config: TrainConfig) -> None:
    settings = {**asdict(config), "batch_size": "auto", "steps": 3}
    lines: list[str] = []
    train_adapter(TrainConfig.from_mapping(settings), progress=False, report=lines.append)
    written = TrainConfig.from_yaml(Path(config.output) / CONFIG)
    assert written.batch_size >= 1
    assert any(line.startswith(f"plan: --batch-size {written.batch_size} ") for line in lines)


def test_an_effective_batch_is_divided_into_automatic_batches(
    config: TrainConfig, tmp_path: Path
) -> None:
    """A resumed run keeps the batch size and the accumulation."""
    settings = {**asdict(config), "batch_size": "auto", "effective_batch": 6, "steps": 3}
    divisions = []
    for change in ({"save_every": 2}, {"steps": 4, "resume": "latest"}):
        given = TrainConfig.from_mapping({**settings, **change})
        train_adapter(given, progress=False, report=lambda _: None)
        written = TrainConfig.from_yaml(Path(config.output) / CONFIG)
        divisions.append((written.batch_size, written.gradient_accumulation))
        if not given.resume:
            # Remove the adapter, as if the run had been stopped before its end.
            (Path(config.output) / ADAPTER).unlink()
    # On the CPU, the batch size of `auto` is 1.
    assert divisions == [(1, 6), (1, 6)]
    uneven = {**settings, "batch_size": 4, "output": str(tmp_path / "uneven")}
    with pytest.raises(ConfigError, match="cannot be divided among 1 processes of batch size 4"):
        train_adapter(TrainConfig.from_mapping(uneven), progress=False)


def test_a_run_with_streamed_blocks_on_a_gpu_resumes_without_them_on_the_cpu(
    config: TrainConfig, train: Train
) -> None:
    train(config.with_(steps=5))
    state = checkpoint_path(Path(config.output), 5) / "state.json"
    # Change the checkpoint to that of a run on a GPU which streams one block.
    text = state.read_text()
    assert '"stream_blocks": null' in text
    state.write_text(text.replace('"stream_blocks": null', '"stream_blocks": 1'))
    train(config.with_(resume="latest"))
    assert TrainConfig.from_yaml(Path(config.output) / CONFIG).stream_blocks is None


def test_a_resumed_run_keeps_settings_that_affect_results_and_plans_the_others_anew(
    config: TrainConfig, train: Train
) -> None:
    full = {"gradient_checkpointing": "full", "checkpoint_blocks": 1}
    train(config.with_(**full, base_precision="nf4", steps=5))
    lines: list[str] = []
    train_adapter(config.with_(resume="latest"), progress=False, report=lines.append)
    written = TrainConfig.from_yaml(Path(config.output) / CONFIG)
    assert (written.base_precision, written.gradient_checkpointing) == ("nf4", "none")
    assert written.checkpoint_blocks is None
    # A resumed run logs the settings that have changed, except those that do not change its result.
    assert not [line for line in lines if line.startswith("resume: gradient_checkpointing")]


def test_a_resumed_run_out_of_memory_gets_a_new_plan(
    config: TrainConfig, train: Train, tmp_path: Path
) -> None:
    deep = tc.models.DigitsTransformer(num_layers=4, num_attention_heads=2, attention_head_dim=8)
    deep.save_pretrained(tmp_path / "deep")
    config = config.with_(weights=str(tmp_path / "deep"), batch_size=32)
    again = config.with_(output=str(tmp_path / "again"))
    for settings in (config, again):
        train(settings.with_(steps=5))
    expected = train(config.with_(resume="latest"))

    class OneOutOfMemoryAfterResume(OneOutOfMemory):
        def on_train_begin(self, trainer: Trainer[Any]) -> None:
            assert trainer.step == 5

    failing = OneOutOfMemoryAfterResume(7)
    run = train_adapter(
        again.with_(resume="latest"), callbacks=[failing], progress=False, report=lambda _: None
    )
    found = {n: v.detach().numpy().tobytes() for n, v in run.adapter.named_parameters().items()}
    assert found == expected
    written = TrainConfig.from_yaml(tmp_path / "again" / CONFIG)
    assert written.gradient_checkpointing in {"selective", "full"}


def test_without_another_plan_the_error_of_the_run_is_raised(config: TrainConfig) -> None:
    # The user has set all that a plan could change, so there is no smaller plan; nor is there a
    # rank below 1 that an error could advise.
    with pytest.raises(tc.OutOfMemoryError, match="matmul: there is too little"):
        train_adapter(
            config.with_(gradient_checkpointing="full", base_precision="same", rank=1),
            callbacks=[OneOutOfMemory(1)],
            progress=False,
        )
