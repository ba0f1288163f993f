"""LoRA+: of the factors A and B of a LoRA, B trains at a multiple of the learning rate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.families.causal_lm import BUILT_IN, CausalLM
from trainable_candle.run import train_adapter
from trainable_candle.settings.checks import check_settings
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.adapters import Adapters
from trainable_candle.train.optimizers import make_optimizer

# A function that trains with settings and returns the bytes of the adapter's parameters by name.
Train = Callable[..., dict[str, bytes]]
GOLDEN = Path(__file__).parents[1] / "golden" / "llm" / "llama"
RATIO = 16.0


def adapters_of(folder: Path, kind: str = "lora") -> Any:
    """Return new adapters of the language model in `folder`."""
    model = tc.models.CausalLM.from_pretrained(folder, dtype="f32")
    targets = list(CausalLM.targets)
    return model.add_adapter(tc.LoraConfig(r=4, target_modules=targets, adapter=kind))


def rates(adapters: Adapters, config: TrainConfig) -> dict[str, float]:
    """Return the learning rate that the optimizer has for each parameter, by name."""
    names = {id(var): name for name, var in adapters.named_parameters().items()}
    groups = adapters.groups(config)
    assert make_optimizer(config, groups).group_lrs == [rate for _, rate in groups]
    rate_of = {names[id(var)]: rate for parameters, rate in groups for var in parameters}
    assert len(rate_of) == len(names) == sum(len(parameters) for parameters, _ in groups)
    return rate_of


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_learning_rates_of_factors_are_those_of_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    create_loraplus_optimizer = pytest.importorskip("peft.optimizers").create_loraplus_optimizer
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, target_modules=list(CausalLM.targets), use_dora=kind == "dora")
    model = peft.get_peft_model(model, lora)
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=RATIO
    )
    names = {
        id(parameter): name.removeprefix("base_model.model.").replace(".default", "")
        for name, parameter in model.named_parameters()
    }
    expected = {
        names[id(parameter)]: group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    config = TrainConfig(learning_rate=1e-3, lora_plus_ratio=RATIO, adapter=kind)
    # Adapters are given by part. The only part of a language model has the name "".
    found = rates(Adapters({"": adapters_of(GOLDEN, kind)}), config)
    assert found.keys() == expected.keys()
    # peft trains all vectors, and so also the magnitudes of DoRA, at the rate of B. The paper
    # defines LoRA+ for the factors alone, so here the magnitudes train at the rate of A.
    magnitudes = {name: found.pop(name) for name in list(found) if "magnitude" in name}
    assert bool(magnitudes) == (kind == "dora")
    assert all(rate == 1e-3 for rate in magnitudes.values())
    assert found == {name: expected[name] for name in found}
    assert set(found.values()) == {1e-3, 1e-3 * RATIO}


def test_the_ratio_multiplies_the_rate_of_text_encoders_and_of_the_unet() -> None:
    # The rate depends on the name of the part alone, so adapters of any model will do.
    parts = {part: adapters_of(BUILT_IN) for part in ("unet", "text_encoder", "text_encoder_2")}
    config = TrainConfig(learning_rate=1e-3, lora_plus_ratio=4, train_text_encoder=True)
    # By default, the rate of text encoders is a tenth of the learning rate.
    for given, text_rate in ((None, 1e-4), (3e-5, 3e-5)):
        found = rates(Adapters(parts), config.with_(text_encoder_learning_rate=given))
        for name, rate in found.items():
            base_rate = 1e-3 if name.startswith("unet.") else text_rate
            assert rate == pytest.approx(base_rate * (4 if "lora_B" in name else 1)), name


class UpdateChecker(Callback):
    """Compares each update with the formula of gradient descent.

    `largest` has the absolute value of the largest update of each kind of parameter, such as
    `lora_A`.
    """

    def __init__(self) -> None:
        self._before: dict[str, np.ndarray] = {}
        self.largest: dict[str, float] = {}

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        self._before = {name: var.numpy().copy() for name, var in trainer.parameters.items()}

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        for name, var in trainer.parameters.items():
            before, gradient = self._before[name], var.grad
            assert gradient is not None
            rate = report.lr * (RATIO if name.endswith(".lora_B.weight") else 1)
            expected = rate * gradient.numpy()
            after = var.numpy().copy()
            np.testing.assert_allclose(before - after, expected, rtol=1e-3, atol=1e-6)
            kind = name.split(".")[-2]
            self.largest[kind] = max(self.largest.get(kind, 0.0), float(np.abs(expected).max()))
            self._before[name] = after


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_updates_have_the_scheduled_rates(config: TrainConfig, kind: str) -> None:
    config = config.with_(
        adapter=kind, optimizer="sgd", learning_rate=0.1, weight_decay=0, lora_plus_ratio=RATIO
    )
    updates = UpdateChecker()
    lines: list[str] = []
    train_adapter(config, callbacks=[updates], progress=False, report=lines.append)
    assert "LoRA+: the factors B have 16 times the learning rate of the other parameters" in lines
    # The kinds of parameters are A, B and, with DoRA, the magnitudes. All of them are trained.
    assert len(updates.largest) == (3 if kind == "dora" else 2)
    assert min(updates.largest.values()) > 1e-4


# Prodigy is left out: it rejects a ratio.
@pytest.mark.parametrize("optimizer", sorted(tc.optim.KINDS.keys() - {"prodigy"}))
def test_in_the_first_step_the_ratio_changes_only_the_factors_b(
    config: TrainConfig, train: Train, tmp_path: Path, optimizer: str
) -> None:
    """B trains as with a learning rate `ratio` times as large, A as without a ratio.

    This holds only in the first step: later gradients of A depend on B, which starts at zero.
    """
    config = config.with_(steps=1, lr_scheduler="constant", warmup_steps=0, optimizer=optimizer)
    rate = 1e-2
    plain, plus, larger = (
        train(config.with_(learning_rate=lr, lora_plus_ratio=ratio, output=str(tmp_path / name)))
        for name, lr, ratio in (("plain", rate, 1), ("plus", rate, 4), ("larger", 4 * rate, 1))
    )
    for name in plain:
        assert plus[name] == (larger if name.endswith(".lora_B.weight") else plain)[name], name
    assert plus != plain


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_run_resumes_bit_for_bit_and_only_with_the_same_ratio(
    config: TrainConfig, train: Train, tmp_path: Path, kind: str
) -> None:
    class StopAfter7(Callback):
        def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
            if report.step == 7:  # of 12; the latest checkpoint is that of step 5
                trainer.stop()

    config = config.with_(adapter=kind, lora_plus_ratio=RATIO, learning_rate=1e-3)
    expected = train(config)
    interrupted = config.with_(output=str(tmp_path / "interrupted"))
    train(interrupted, StopAfter7())
    assert train(interrupted.with_(resume="latest")) == expected
    # The finished run of 12 steps can only resume with more steps than these.
    with pytest.raises(tc.WeightsFormatError, match="resume with the settings that the run was"):
        train(interrupted.with_(resume="latest", lora_plus_ratio=1, steps=13))


def test_updates_of_a_language_model_have_the_scheduled_rates(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"instruction": "say", "output": "so"}) + "\n")
    config = TrainConfig(
        model="causal-lm", dataset=str(data), output=str(tmp_path / "run"), device="cpu",
        precision="f32", optimizer="sgd", learning_rate=0.1, weight_decay=0, steps=3,
        lora_plus_ratio=RATIO,
    )  # fmt: skip
    updates = UpdateChecker()
    train_adapter(config, callbacks=[updates], progress=False, report=lambda _: None)
    # Updates of A are small in so few steps: its gradient is proportional to B, which starts at 0.
    assert min(updates.largest.values()) > 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # All kinds of adapters without factor B get one message. The first case checks its start,
        # the next two check its end.
        ({"adapter": "loha"}, "--lora-plus-ratio has no effect without --adapter lora or"),
        ({"adapter": "lokr"}, "other kinds have no factor B"),
        ({"adapter": "oft"}, "other kinds have no factor B"),
        ({"optimizer": "prodigy"}, "prodigy finds one step size .* leave --lora-plus-ratio out"),
        ({"lora_plus_ratio": 0}, r"lora_plus_ratio is 0\.0, expected above 0"),
    ],
    ids=["loha", "lokr", "oft", "prodigy", "zero"],
)
def test_ratios_of_zero_or_without_effect_are_rejected(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(TrainConfig(**{"lora_plus_ratio": RATIO, **settings}))
