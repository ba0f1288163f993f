"""Estimates of memory match the memory that the tape and the optimizer use.

The tape holds the values that operations save for the backward pass. Other tests here check the
printed table of an estimate and the choice of the layers that get adapters.
"""

from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.families.digits import Digits
from trainable_candle.models import DigitsTransformer
from trainable_candle.settings.adapter import ADAPTERS
from trainable_candle.settings.training import OPTIMIZERS
from trainable_candle.tasks.estimate import Estimate, Item, adapted_layers
from trainable_candle.tasks.latent import LatentTask
from trainable_candle.train import TrainConfig
from trainable_candle.train.adapters import Adapters, adapter_config
from trainable_candle.train.optimizers import make_optimizer


def digits_task(base: Path, folder: Path, **settings: Any) -> LatentTask:
    config = TrainConfig(dataset=str(folder), device="cpu", precision="f32", **settings)
    return Digits(base, "f32", "cpu", config).task()


def estimated_items(task: LatentTask) -> dict[str, int]:
    """Return the estimated bytes of each item of training, such as `model weights`."""
    estimate = task.estimate(task.family.config, task.read(lambda _: None))
    return {
        f"{item.component} {item.what}".strip(): item.bytes for item in estimate.phases["training"]
    }


@pytest.fixture(scope="module", params=[(1, 2, 8), (3, 3, 32), (2, 4, 16)], ids=str)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits transformer; its parameter is (number of layers, number of heads, head size)."""
    layers, heads, head_dim = request.param
    folder = tmp_path_factory.mktemp("estimate") / "base"
    DigitsTransformer(
        num_layers=layers, num_attention_heads=heads, attention_head_dim=head_dim
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("batch_size", [4, 32])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_estimated_activations_match_the_tape(
    base: Path, digits_folder: Path, batch_size: int, checkpointing: str
) -> None:
    task = digits_task(
        base, digits_folder, batch_size=batch_size, gradient_checkpointing=checkpointing
    )
    task.attach()
    prepared = task.prepare(task.read(print), print).train
    before = tc.memory.saved_bytes()
    loss = prepared.loss(prepared.inputs(prepared.batches(batch_size).batch(0)))
    saved = tc.memory.saved_bytes() - before
    estimated = estimated_items(task)["model activations"]
    assert loss.item() > 0
    if checkpointing == "full":
        # The estimate also includes the one block that the backward pass recomputes at a time. That
        # block needs less than all blocks without checkpointing; 20 % is the tolerance.
        limit = saved + 1.2 * activations_without_checkpointing(base, digits_folder, batch_size)
        assert saved < estimated < limit
    else:
        assert estimated == pytest.approx(saved, rel=0.2)


def activations_without_checkpointing(base: Path, folder: Path, batch_size: int) -> int:
    """Return the estimated bytes of activations."""
    return estimated_items(digits_task(base, folder, batch_size=batch_size))["model activations"]


# `qat` is quantization-aware training: each step rounds the frozen weights plus the adapter's
# product to the numbers of a format, the grid.
@pytest.mark.parametrize("grid", ["int8", "nf4", "fp8"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_estimated_rounded_weights_match_what_the_tape_adds(
    digits_folder: Path, tmp_path: Path, checkpointing: str, grid: str
) -> None:
    base = tmp_path / "base"
    DigitsTransformer(num_layers=6, num_attention_heads=2, attention_head_dim=64).save_pretrained(
        base
    )
    settings = {"gradient_checkpointing": checkpointing, "batch_size": 4}

    def measured(**changes: Any) -> tuple[int, dict[str, int]]:
        """Return the bytes that a loss saves on the tape, and the estimated items."""
        task = digits_task(base, digits_folder, **settings, **changes)
        task.attach()
        prepared = task.prepare(task.read(print), print).train
        inputs = prepared.inputs(prepared.batches(4).batch(0))
        before = tc.memory.saved_bytes()
        loss = prepared.loss(inputs)
        saved = tc.memory.saved_bytes() - before
        assert loss.item() > 0
        return saved, estimated_items(task)

    plain, items = measured()
    assert "model rounded weights" not in items
    # The linear layers of attention are 128 x 128, because 2 heads of 64 features make 128.
    rounded, items = measured(qat=grid)
    # The item also counts three f32 buffers of one 128 x 128 layer: the weight, the weight plus the
    # adapter's product, and the gradient.
    estimated = items["model rounded weights"] - 3 * 4 * 128 * 128
    # Bytes of the rounded weights of one block: 4 f32 matrices, for q, k, v and the output.
    block = 4 * 4 * 128 * 128
    if checkpointing == "full":
        # The tape keeps no rounded weights: the backward pass recomputes those of one block at a
        # time. The estimate includes that block.
        assert (rounded - plain, estimated) == (0, block)
    else:
        # The estimate counts the rounded weights of all 6 blocks. The tape keeps fewer: it keeps a
        # layer's weight for the gradient of the layer's input, and the inputs of the first layers
        # need no gradient. The estimate may be up to 30 % too large.
        added = rounded - plain
        assert estimated == 6 * block
        assert added <= estimated < 1.3 * added


# With `qat_activations`, a step also rounds the inputs of adapted layers.
@pytest.mark.parametrize("grid", ["int8", "fp8"])
def test_estimated_rounded_inputs_match_what_the_tape_adds(
    digits_folder: Path, tmp_path: Path, grid: str
) -> None:
    base = tmp_path / "base"
    DigitsTransformer(num_layers=6, num_attention_heads=2, attention_head_dim=64).save_pretrained(
        base
    )

    def measured(**changes: Any) -> tuple[int, int]:
        """Return the bytes that a loss saves on the tape, and the estimate of these bytes."""
        task = digits_task(base, digits_folder, batch_size=4, qat=grid, **changes)
        task.attach()
        prepared = task.prepare(task.read(print), print).train
        inputs = prepared.inputs(prepared.batches(4).batch(0))
        before = tc.memory.saved_bytes()
        loss = prepared.loss(inputs)
        saved = tc.memory.saved_bytes() - before
        assert loss.item() > 0
        return saved, estimated_items(task)["model activations"]

    plain, plain_estimate = measured()
    rounded, rounded_estimate = measured(qat_activations=True)
    assert rounded > plain
    assert rounded_estimate - plain_estimate == pytest.approx(rounded - plain, rel=0.15)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_estimates_of_parameters_and_optimizer_states_are_exact(
    base: Path, digits_folder: Path, optimizer: str, adapter: str
) -> None:
    check_parameters_and_states(base, digits_folder, optimizer=optimizer, adapter=adapter, rank=64)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw", "lion", "sgd"])
def test_estimates_with_stochastic_rounding_are_exact(
    base: Path, digits_folder: Path, optimizer: str
) -> None:
    check_parameters_and_states(
        base, digits_folder, optimizer=optimizer, rank=64, stochastic_rounding=True
    )


def check_parameters_and_states(base: Path, digits_folder: Path, **settings: Any) -> None:
    """Check the estimates of weights, parameters, gradients and optimizer states."""
    task = digits_task(base, digits_folder, **settings)
    config = task.family.config
    estimated = estimated_items(task)
    model = DigitsTransformer.from_pretrained(base)
    # The transformer is the only part, so it has the name "".
    adapters = Adapters(
        {"": model.add_adapter(adapter_config(config, Digits.targets, Digits.formats))}
    )
    parameters = adapters.named_parameters().values()
    parameter_bytes = sum(var.nbytes for var in parameters)
    # With stochastic rounding, the parameters are bf16. The model computes with copies in f32, of
    # twice the size.
    copies = 2 * parameter_bytes if config.stochastic_rounding else 0
    assert estimated["model adapter"] == parameter_bytes + copies
    assert estimated["model gradients"] == parameter_bytes
    assert estimated["model weights"] == sum(t.nbytes for t in model.named_tensors().values())
    optimizer = make_optimizer(config, adapters.groups(config))
    for var in parameters:
        (var * 1.0).sum().backward()  # gives `var` a gradient
    optimizer.step()
    assert estimated["model optimizer"] == optimizer.state_bytes


def test_the_table_names_every_item() -> None:
    # 3 << 20 bytes are 3 MiB. Each phase also has 200 MiB for the interpreter and libraries.
    estimate = Estimate({"caching": [Item("vae", "weights", 3 << 20)], "training": []})
    assert estimate.table() == [
        "memory while caching: 203.0 MiB",
        "  vae weights                          3.0 MiB",
        "  interpreter and libraries          200.0 MiB",
        "memory while training: 200.0 MiB",
        "  interpreter and libraries          200.0 MiB",
        "memory at most: 203.0 MiB, while caching",
    ]


def test_the_last_line_of_the_table_names_the_memory_of_the_gpu_and_of_the_host() -> None:
    # 200 MiB for the interpreter and libraries are added to the 1 GiB (1 << 30 bytes) of training,
    # which makes 1.20 GiB. In the memory of the host, 5 << 29 bytes are 2.5 GiB.
    phases = {"caching": [Item("vae", "weights", 3 << 20)], "training": [Item("", "", 1 << 30)]}
    *_, last = Estimate(phases, on_gpu=True, host=5 << 29).table()
    assert last == "GPU memory at most: 1.20 GiB, while training, and 2.50 GiB in host memory"


@pytest.mark.parametrize(
    ("name", "patterns", "selected"),
    [
        # A pattern must match the whole name, or the end of it after a dot.
        ("a.to_q", ["to_q"], True),
        ("to_q", ["to_q"], True),
        ("a.xto_q", ["to_q"], False),
        ("a.1.to_q", [r"a\.\d\.to_[qk]"], True),
        ("a.1.to_q", ["to_(q|k)"], True),
        ("a.1.to_v", ["to_(q|k)"], False),
        # `all-attention` stands for the names of attention's projections in all models;
        # `proj_out` is a linear layer outside of attention.
        ("a.o_proj", ["all-attention"], True),
        ("a.to_add_out", ["all-attention"], True),
        ("a.proj_out", ["all-attention"], False),
    ],
)
def test_patterns_select_layers(name: str, patterns: list[str], selected: bool) -> None:
    found = adapted_layers({name: (4, 4)}, patterns)
    assert found == ({name: (4, 4)} if selected else {})


def test_a_pattern_that_is_no_regular_expression_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is not a regular expression"):
        adapted_layers({"a.to_q": (4, 4)}, ["a["])


def test_convolutions_are_recognized_by_their_shape_and_can_be_excluded() -> None:
    layers = {"a": (4, 4), "b": (4, 4, 3, 3)}
    assert adapted_layers(layers, ["all-conv"]) == {"b": (4, 4, 3, 3)}
    assert adapted_layers(layers, ["all-linear", "all-conv"], exclude=["b"]) == {"a": (4, 4)}
