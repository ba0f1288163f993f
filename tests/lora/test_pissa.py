"""LoRAs that start as the principal part of the weights (PiSSA), and the files of their runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError, NonFiniteError, WeightsFormatError
from trainable_candle.families import find
from trainable_candle.lora import pissa
from trainable_candle.models import CausalLM
from trainable_candle.outputs import LOG
from trainable_candle.run import ADAPTER, TrainingRun, train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.checks import check_targets
from trainable_candle.train import Callback, StepReport, Trainer
from trainable_candle.train.logs import read_log
from trainable_candle.train.state import checkpoint_path

LLAMA = Path(__file__).parents[1] / "golden" / "llm" / "llama"
BASE = str(find("causal-lm").default_weights())
IDS = np.arange(12, dtype=np.int64).reshape(1, 12) + 3


def decaying(rows: int, columns: int, power: float) -> np.ndarray:
    """A matrix whose singular values are 1, 2^-power, 3^-power and so on."""
    random = np.random.default_rng(0)
    size = min(rows, columns)
    left, _ = np.linalg.qr(random.standard_normal((rows, size)))
    right, _ = np.linalg.qr(random.standard_normal((columns, size)))
    weight: np.ndarray = (left * np.arange(1, size + 1) ** -power) @ right.T
    return weight.astype(np.float32)


@pytest.mark.parametrize("shape", [(40, 24), (300, 500), (500, 300)])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_factors_are_those_of_the_singular_value_decomposition(
    shape: tuple[int, int], power: float
) -> None:
    weight, rank = decaying(*shape, power), 16
    factors = pissa(tc.tensor(weight), rank, seed=3)
    u, s, vt = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    nearest = (u[:, :rank] * s[:rank]) @ vt[:rank]
    error = np.linalg.norm(factors.up @ factors.down - nearest)
    assert error < 1e-3 * np.linalg.norm(nearest)
    # The columns of `up` and the rows of `down` are orthogonal. Their norms are the square roots of
    # the singular values.
    for gram in (factors.up.T @ factors.up, factors.down @ factors.down.T):
        np.testing.assert_allclose(gram, np.diag(s[:rank]), atol=1e-3 * s[0])


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(ArgumentError, match="rank is 0, expected at least 1"):
        pissa(tc.tensor(decaying(8, 8, 1.0)), 0)
    with pytest.raises(NonFiniteError):
        pissa(tc.full((200, 300), float("nan")), 4)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns about peft
@pytest.mark.parametrize("rslora", [False, True])
def test_initial_factors_and_residual_are_those_of_peft(rslora: bool) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = TrainConfig(model="causal-lm", init="pissa", rank=4, alpha=6.0, rslora=rslora)
    kind: Any = find("causal-lm")
    family = kind(LLAMA, "f32", "cpu", config)
    parameters = family.task().attach().named_parameters()
    names = {name.partition(".lora_")[0] for name in parameters}
    scale = 6 / (2 if rslora else 4)  # alpha / sqrt(rank) with rsLoRA, else alpha / rank

    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    peft_config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=rslora,
        target_modules=list(family.targets),
        init_lora_weights="pissa",
    )
    reference = peft.get_peft_model(model, peft_config).state_dict()
    for name in names:
        key = "base_model.model." + name
        down, up = (parameters[f"{name}.lora_{letter}.weight"].numpy() for letter in "AB")
        theirs = {x: reference[f"{key}.lora_{x}.default.weight"].numpy() for x in "AB"}
        product = theirs["B"] @ theirs["A"]
        np.testing.assert_allclose(up @ down, product, atol=2e-3 * abs(product).max())
        # Rows of A may have the opposite sign in peft, but their norms are the same.
        norms = [np.linalg.norm(rows, axis=1) for rows in (down, theirs["A"])]
        np.testing.assert_allclose(norms[0], norms[1], rtol=2e-3)
        residual = family.model.get_tensor(f"{name}.weight").numpy() - scale * up @ down
        expected = reference[f"{key}.base_layer.weight"].numpy()
        np.testing.assert_allclose(residual, expected, atol=2e-3 * abs(expected).max())


def chats(folder: Path) -> Path:
    """Write a data set of twelve short conversations; return its path."""
    path = folder / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": t}]}
        for n, t in enumerate(["one two three", "four five six", "seven"] * 4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def language(tmp_path: Path) -> TrainConfig:
    """The settings of a run of 6 steps with the demo's language model."""
    return TrainConfig(
        model="causal-lm",
        weights=BASE,
        dataset=str(chats(tmp_path)),
        output=str(tmp_path / "run"),
        device="cpu",
        precision="f32",
        init="pissa",
        rank=4,
        alpha=6.0,
        steps=6,
        batch_size=1,
        sequence_length=64,
        learning_rate=1e-2,
        save_every=2,
        keep_checkpoints=9,
    )


@pytest.fixture
def images(digits_base: Path, digits_folder: Path, tmp_path: Path) -> TrainConfig:
    """The settings of a run of 6 steps with the digits transformer."""
    return TrainConfig(
        model="digits",
        weights=str(digits_base),
        dataset=str(digits_folder),
        output=str(tmp_path / "run"),
        device="cpu",
        precision="f32",
        init="pissa",
        rank=4,
        steps=6,
        batch_size=4,
        learning_rate=1e-2,
        save_every=2,
        keep_checkpoints=9,
    )


def train(config: TrainConfig, *callbacks: Callback) -> TrainingRun:
    return train_adapter(config, callbacks=callbacks, progress=False, report=lambda _: None)


def model_of(run: TrainingRun) -> Any:
    """The model that a run has trained, with its adapter."""
    task: Any = run.task
    return task.family.model


class LastLogits(Callback):
    """Keeps the logits of the trained model after the last step."""

    def __init__(self) -> None:
        self.family: Any = None
        self.logits = np.zeros(0)

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        with tc.no_grad():
            self.logits = self.family.model(tc.tensor(IDS)).numpy()


def watching(monkeypatch: pytest.MonkeyPatch, model: str) -> LastLogits:
    """Make a callback that keeps the last logits of the model that the next run trains."""
    last, kind = LastLogits(), find(model)
    original = kind.task

    def task(self: Any) -> Any:
        last.family = self
        return original(self)

    monkeypatch.setattr(kind, "task", task)
    return last


def test_a_new_or_disabled_adapter_does_not_change_the_model_and_gets_gradients() -> None:
    base = CausalLM.from_pretrained(BASE, dtype="f32")(tc.tensor(IDS)).numpy()
    kind: Any = find("causal-lm")
    cases: list[dict[str, Any]] = [
        {},
        {"alpha": 5.0},
        {"alpha": 5.0, "rslora": True},
        {"rank": 300},  # above the sides of the weights
    ]
    for settings in cases:
        config = TrainConfig(model="causal-lm", init="pissa", rank=4).with_(**settings)
        family = kind(Path(BASE), "f32", "cpu", config)
        adapters = family.task().attach()
        ups = [v.numpy() for n, v in adapters.named_parameters().items() if ".lora_B." in n]
        # Unlike the `up` factors of a usual LoRA, those of PiSSA do not start as zeros.
        assert all(up.any() for up in ups)
        np.testing.assert_allclose(family.model(tc.tensor(IDS)).numpy(), base, atol=1e-5)
        family.model(tc.tensor(IDS)).square().mean().backward()
        assert all(var.grad is not None for var in adapters.named_parameters().values())
        adapters.set_enabled(False)
        np.testing.assert_array_equal(family.model(tc.tensor(IDS)).numpy(), base)


def test_several_processes_subtract_the_initial_factors_of_the_first() -> None:
    """Before the first step, the trainer copies the parameters of the first process to all others.

    If there are several processes, `on_train_begin` then makes the copied parameters the frozen
    start that the adapter subtracts, so that the model is unchanged. The test multiplies the
    parameters by 1.5 in place of the copy.
    """
    kind: Any = find("causal-lm")
    config = TrainConfig(model="causal-lm", init="pissa", rank=4, alpha=5.0)
    family = kind(LLAMA, "f32", "cpu", config)
    adapters = family.task().attach()
    with tc.no_grad():
        base = family.model(tc.tensor(IDS)).numpy()
        for var in adapters.named_parameters().values():
            var.set(var.detach() * 1.5)
        assert abs(family.model(tc.tensor(IDS)).numpy() - base).max() > 1e-2
        for processes in (1, 2):
            trainer: Any = SimpleNamespace(step=0, group=SimpleNamespace(size=processes))
            for callback in adapters.callbacks():
                callback.on_train_begin(trainer)
            near = np.allclose(family.model(tc.tensor(IDS)).numpy(), base, atol=1e-5)
            assert near == (processes == 2)


@pytest.mark.parametrize(
    "settings", [{}, {"rslora": True}, {"ema_decay": 0.8}, {"stochastic_rounding": True}]
)
def test_the_files_give_the_trained_model_on_the_original_weights(
    language: TrainConfig, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = watching(monkeypatch, "causal-lm")
    run = train(language.with_(**settings), last)
    original = CausalLM.from_pretrained(BASE, dtype="f32")
    base = original(tc.tensor(IDS)).numpy()
    finished = model_of(run)(tc.tensor(IDS)).numpy()
    if "ema_decay" not in settings:  # with it, the finished model has the averaged parameters
        np.testing.assert_allclose(finished, last.logits, atol=2e-5)
    assert abs(finished - base).max() > 1e-2
    for path in (run.adapter_path, run.output / "peft"):
        adapter = original.load_adapter(path)
        # Files join the trained factors with the initial ones, so that the rank is 2 * 4.
        assert {v.shape[0] for n, v in adapter.named_parameters().items() if "lora_A" in n} == {8}
        np.testing.assert_allclose(original(tc.tensor(IDS)).numpy(), finished, atol=2e-5)
        original.remove_adapter()
    task: Any = run.task
    task.save_merged(tmp_path / "merged")
    merged = CausalLM.from_pretrained(tmp_path / "merged", dtype="f32")
    np.testing.assert_allclose(merged(tc.tensor(IDS)).numpy(), finished, atol=2e-5)


def test_both_files_of_the_best_adapter_give_one_model_and_the_last_file_another(
    language: TrainConfig, tmp_path: Path
) -> None:
    # The answer is unlike those of the training texts, so the validation loss soon rises.
    other = {"prompt": "say 1", "completion": "QXZJ"}
    (tmp_path / "other.jsonl").write_text(json.dumps(other) + "\n")
    settings = {"steps": 60, "save_every": 60, "validate_every": 5, "early_stop": 2}
    run = train(language.with_(validation_dataset=str(tmp_path / "other.jsonl"), **settings))
    assert run.step < 60
    outputs = []
    for path in (run.output / "adapter-best.safetensors", run.output / "best" / "peft",
                 run.adapter_path):  # fmt: skip
        model = CausalLM.from_pretrained(BASE, dtype="f32")
        model.load_adapter(path)
        outputs.append(model(tc.tensor(IDS)).detach().numpy())
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert abs(outputs[0] - outputs[2]).max() > 1e-2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns about peft
def test_peft_computes_the_same_logits_from_its_folder(language: TrainConfig) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    run = train(language.with_(rslora=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(model, run.output / "peft")
    with torch.no_grad():
        theirs = tuned(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(model_of(run)(tc.tensor(IDS)).numpy(), theirs, atol=5e-5)


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_files_of_an_image_model_give_the_trained_model(images: TrainConfig, form: str) -> None:
    run = train(images.with_(format=form))
    trained = run.adapter.named_parameters()
    kind: Any = find("digits")
    task = kind(Path(images.weights), "f32", "cpu", TrainConfig(model="digits")).task()
    loaded = task.load_adapter(run.adapter_path, scale=1.0)
    models = (model_of(run), task.family.model)
    for model in models:
        model.merge_adapter()
    tensors = [model.named_tensors() for model in models]
    assert len(trained) == len(loaded.named_parameters())
    for name, value in tensors[0].items():
        np.testing.assert_allclose(tensors[1][name].numpy(), value.numpy(), atol=1e-5)


def test_every_format_of_sdxl_holds_the_change(tmp_path: Path) -> None:
    """In formats without alphas, the factors include the scale."""
    kind: Any = find("sdxl")
    weights = kind.default_weights()
    config = TrainConfig(model="sdxl", init="pissa", rank=3, alpha=5.0)
    family = kind(weights, "f32", "cpu", config)
    task = family.task()
    adapters = task.attach()
    originals = family.model.named_tensors()
    random, expected = np.random.default_rng(0), {}
    parameters = adapters.named_parameters()
    initial = {name: var.numpy().copy() for name, var in parameters.items()}
    for name, var in parameters.items():
        noise = random.standard_normal(var.shape).astype(np.float32)
        var.set(tc.tensor(initial[name] + 0.05 * noise))
    for down in [name for name in parameters if ".lora_A." in name]:
        layer, up = down.partition(".lora_")[0], down.replace("lora_A", "lora_B")
        change = parameters[up].numpy() @ parameters[down].numpy() - initial[up] @ initial[down]
        weight = originals[f"{layer}.weight"].numpy()
        expected[f"{layer}.weight"] = weight + 5 / 3 * change  # alpha / rank
    for form in family.formats:
        path = tmp_path / f"{form}.safetensors"
        adapters.file(path, config.with_(format=form), metadata={}).write()
        reloaded = kind(weights, "f32", "cpu", TrainConfig(model="sdxl"))
        reloaded.task().load_adapter(path, scale=1.0)
        reloaded.model.merge_adapter()
        merged = reloaded.model.named_tensors()
        for name, value in expected.items():
            np.testing.assert_allclose(merged[name].numpy(), value, atol=1e-5)


class StopAfter(Callback):
    """Stops the run after step `step`."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        if report.step == self._step:
            trainer.stop()


@pytest.mark.parametrize("run_settings", ["language", "images"])
@pytest.mark.parametrize("settings", [{}, {"stochastic_rounding": True}, {"ema_decay": 0.9}])
def test_a_run_resumes_bit_for_bit(
    run_settings: str, settings: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config: TrainConfig = request.getfixturevalue(run_settings).with_(**settings)
    train(config)
    stopped = config.with_(output=str(tmp_path / "stopped"))
    train(stopped, StopAfter(3))
    train(stopped.with_(resume="latest"))
    folders = (Path(config.output), Path(stopped.output))
    expected, found = (tc.load_file(folder / ADAPTER) for folder in folders)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[name].numpy(), expected[name].numpy()) for name in expected)
    losses = [[row["loss"] for row in read_log(folder / LOG)] for folder in folders]
    assert losses[0] == losses[1]


def test_a_checkpoint_with_another_init_or_without_its_start_is_rejected(
    language: TrainConfig,
) -> None:
    train(language, StopAfter(2))
    resumed = language.with_(resume="latest")
    with pytest.raises(ConfigError, match=r"is of a run with --init pissa, .*give --init pissa"):
        train(resumed.with_(init="default"))
    (checkpoint_path(Path(language.output), 2) / "start.safetensors").unlink()
    with pytest.raises(WeightsFormatError, match=r"is damaged: start\.safetensors"):
        train(resumed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter": "dora"}, "--adapter is dora"),
        ({"base_precision": "nf4"}, "leave out --base-precision, or give --init loftq"),
        ({"stream_blocks": 2}, "leave out --stream-blocks"),
        ({"initial_adapter": "a"}, "--initial-adapter both say"),
        ({"training_adapter": "a"}, "or --training-adapter"),
        ({"qat": "int8"}, "--qat, which rounds"),
        ({"lora_dropout": 0.1}, "--lora-dropout would drop"),
        ({"adapter_precision": "bf16"}, "--adapter-precision bf16 would round away"),
    ],
)
def test_settings_that_contradict_each_other_are_reported(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**({"init": "pissa"} | settings))


def test_convolutions_are_an_error_that_names_them_unless_excluded() -> None:
    layers = {"mid.to_q": (8, 8), "mid.conv": (8, 3, 3, 8)}
    config = TrainConfig(model="sdxl", init="pissa")
    with pytest.raises(ConfigError, match=r"mid\.conv is a convolution"):
        check_targets(config, layers, [".*"])
    check_targets(config.with_(exclude_modules=["conv"]), layers, [".*"])


def test_the_estimate_counts_the_initial_factors() -> None:
    kind: Any = find("causal-lm")
    config = TrainConfig(model="causal-lm", init="pissa", rank=4, precision="f32")
    family = kind(Path(BASE), "f32", "cpu", config)
    count = sum(var.numel() for var in family.task().attach().named_parameters().values())
    found = family.estimate(config, tokens=64).phases["training"]
    (extra,) = [item.bytes for item in found if item.what == "start of the adapter"]
    # In sizes of the trained adapter:
    # - 4 for the adapter that is saved to files. It has twice the rank, so its values take 2 and
    #   its gradients another 2.
    # - 1 for the frozen start.
    # - 2 for the trained adapter joined with the start.
    # A value in f32 has 4 bytes.
    assert extra == 4 * count * (4 + 1 + 2)
