"""Adapters on models written in Python."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError, ShapeError, WeightsFormatError
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.nn import functional as F


class Net(tc.nn.Module):
    def __init__(self) -> None:
        self.conv = tc.nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.blocks = tc.nn.Sequential(tc.nn.Linear.init(16, 8), tc.nn.GELU())
        self.heads = {"one": tc.nn.Linear.init(8, 3)}

    def forward(self, x: tc.Tensor) -> tc.Tensor:
        return self.heads["one"](self.blocks(self.conv(x).reshape((x.shape[0], -1))))


@pytest.fixture
def net() -> Net:
    tc.manual_seed(0)
    return Net()


# Five samples of 2 channels of 4 x 4. The convolution makes 4 channels of 2 x 2: 16 features.
X = np.random.default_rng(0).standard_normal((5, 2, 4, 4)).astype(np.float32)
# Targets that match every layer of `Net`: `conv`, `blocks.0` and `heads.one`.
EVERY = ["conv", "0", "one"]


def disturb(adapter: tc.peft.ModuleAdapter) -> None:
    for var in adapter.parameters():
        var.set(var.detach() + tc.randn(*var.shape) * 0.3)


def test_an_adapter_starts_without_effect_and_is_trained_alone(net: Net) -> None:
    x = tc.tensor(X)
    before = net(x).detach().numpy()
    names = set(net.named_tensors())
    adapter = net.add_adapter(tc.LoraConfig(r=2, lora_alpha=4.0, target_modules=EVERY))
    np.testing.assert_array_equal(net(x).detach().numpy(), before)
    assert set(adapter.named_parameters()) == {
        f"{layer}.lora_{end}.weight" for layer in ("conv", "blocks.0", "heads.one") for end in "AB"
    }
    assert len(net.parameters()) == 6  # two factors of each of the three layers
    # The base's parameters keep their names.
    assert names <= set(net.named_tensors())
    target = tc.randn(5, 3)
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
    adapter.set_enabled(False)
    np.testing.assert_array_equal(net(x).numpy(), before)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merging_keeps_results_and_removing_restores_the_base(net: Net, kind: str) -> None:
    x = tc.tensor(X)
    before = net(x).detach().numpy()
    # A convolution can have LoRA only.
    targets = EVERY if kind == "lora" else ["0", "one"]
    config = tc.LoraConfig(r=2, lora_alpha=3.0, target_modules=targets, adapter=kind)
    adapter = net.add_adapter(config)
    disturb(adapter)
    tuned = net(x).detach().numpy()
    assert np.abs(tuned - before).max() > 0.01
    adapter.remove()
    np.testing.assert_array_equal(net(x).numpy(), before)
    assert type(net.heads["one"]) is tc.nn.Linear
    second = net.add_adapter(config)
    for name, var in second.named_parameters().items():
        var.set(adapter.named_parameters()[name].detach())
    second.merge()
    np.testing.assert_allclose(net(x).numpy(), tuned, atol=2e-6)


def test_ranks_and_scales_follow_patterns_and_all_linear_omits_convolutions(net: Net) -> None:
    config = tc.LoraConfig(
        r=2,
        lora_alpha=2.0,
        target_modules="all-linear",
        rank_pattern={"one": 3},
        alpha_pattern={"one": 6.0},
        use_rslora=True,
    )
    model = tc.get_peft_model(net, config)
    layers = model.adapter.layers
    assert layers["heads.one"].lora_down.shape == (3, 8)
    assert layers["heads.one"].scale == pytest.approx(6 / 3**0.5)
    assert layers["blocks.0"].scale == pytest.approx(2 / 2**0.5)
    assert "conv" not in layers


def test_a_saved_folder_computes_the_same_after_loading(
    net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tc.get_peft_model(net, tc.LoraConfig(r=2, target_modules=EVERY))
    disturb(model.adapter)
    model.save_pretrained(tmp_path / "lora")
    expected = model(tc.tensor(X)).detach().numpy()
    model.print_trainable_parameters()
    # The factors of `conv`, `blocks.0` and `heads.one` have 44, 48 and 22 elements. The layers
    # themselves have 76, 136 and 27 parameters.
    assert "trainable params: 114 || all params: 353" in capsys.readouterr().out
    keys = tc.load_file(tmp_path / "lora" / "adapter_model.safetensors").keys()
    assert "base_model.model.heads.one.lora_A.weight" in keys
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"]) == ("LORA", 2)
    base = model.unload()
    loaded = tc.PeftModel.from_pretrained(base, tmp_path / "lora")
    np.testing.assert_array_equal(loaded(tc.tensor(X)).detach().numpy(), expected)
    np.testing.assert_allclose(
        loaded.merge_and_unload()(tc.tensor(X)).numpy(), expected, rtol=1e-5, atol=1e-5
    )


def test_adapters_that_do_not_fit_are_rejected(net: Net, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected lora or dora"):
        net.add_adapter(tc.LoraConfig(adapter="loha", target_modules=EVERY))
    with pytest.raises(ConfigError, match="conv is a convolution, which can have LoRA only"):
        net.add_adapter(tc.LoraConfig(adapter="dora", target_modules=EVERY))
    with pytest.raises(ArgumentError, match="the convolution has 2 groups"):
        tc.nn.LoRAConv2d(tc.nn.Conv2d(2, 4, 3, groups=2), rank=1, alpha=1.0)
    # The rejected calls have not changed the model: a layer with an adapter holds its base's weight
    # as a tensor, not as a variable.
    assert all(isinstance(value, tc.Var) for value in net.named_tensors().values())
    adapter = net.add_adapter(tc.LoraConfig(r=2, target_modules=["one"]))
    adapter.save(tmp_path / "a")
    adapter.remove()
    other = net.add_adapter(tc.LoraConfig(r=3, target_modules=["one"]))
    with pytest.raises(ShapeError, match=r"heads\.one\.lora_A\.weight has shape \(2, 8\)"):
        other.load(tmp_path / "a")
    other.remove()
    wrong = net.add_adapter(tc.LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(WeightsFormatError, match="its adapters differ from the model's"):
        wrong.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object"),
        ('{"peft_type": "LORA"}', "r is missing, expected a number"),
        (
            '{"peft_type": "LORA", "r": 2, "lora_alpha": "4"}',
            "lora_alpha is '4', expected a number",
        ),
    ],
    ids=["no object", "no rank", "alpha of text"],
)
def test_a_damaged_configuration_is_reported(
    text: str, message: str, net: Net, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(WeightsFormatError, match=message):
        tc.PeftModel.from_pretrained(net, tmp_path)


def test_targets_without_a_layer_that_can_have_an_adapter_are_rejected() -> None:
    def model() -> tc.nn.Sequential:
        return tc.nn.Sequential(tc.nn.Embedding(5, 4), tc.nn.Linear(4, 2))

    for targets in (["0", "1"], ["0"]):
        with pytest.raises(
            tc.ConfigError, match="0 is of the kind Embedding, which has no adapter"
        ):
            model().add_adapter(tc.LoraConfig(target_modules=targets))
    with pytest.raises(tc.ConfigError, match="no layer has a name that `nope` targets"):
        model().add_adapter(tc.LoraConfig(target_modules=["1", "nope"]))
    assert list(model().add_adapter(tc.LoraConfig(target_modules=["1"])).layers) == ["1"]


@pytest.mark.parametrize(
    "copy_of",
    [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_copy_computes_the_same_and_is_trained_independently(
    kind: str, copy_of: Callable[[Any], Any]
) -> None:
    tc.manual_seed(0)
    net = tc.nn.Sequential(tc.nn.Linear(4, 8), tc.nn.ReLU(), tc.nn.Linear(8, 2))
    model = tc.get_peft_model(net, tc.LoraConfig(r=2, target_modules=["0", "2"], adapter=kind))
    for var in model.parameters():
        var.set(tc.randn(*var.shape))
    x, state = tc.randn(3, 4), tc.get_rng_state()
    expected = model(x).numpy()
    other = copy_of(model)
    assert tc.get_rng_state() == state
    np.testing.assert_array_equal(other(x).numpy(), expected)
    assert list(other.adapter.named_parameters()) == list(model.adapter.named_parameters())
    other(x).sum().backward()
    assert all(var.grad is not None for var in other.parameters())
    assert all(var.grad is None for var in model.parameters())
    for var in other.parameters():
        var.set(var.detach() * 2)
    np.testing.assert_array_equal(model(x).numpy(), expected)
    plain = other.merge_and_unload()
    np.testing.assert_allclose(plain(x).numpy(), other(x).numpy(), rtol=1e-5, atol=1e-6)
    # A shallow copy of a layer shares its variables.
    shallow = copy.copy(net[0])
    shallow.get_vars()[0].set(tc.zeros(2, 4))
    assert not net[0].get_vars()[0].numpy().any()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_module_with_adapters_computes_in_bf16_with_f32_factors(kind: str) -> None:
    tc.manual_seed(0)
    net = tc.nn.Sequential(tc.nn.Linear(4, 2))
    model = tc.get_peft_model(net, tc.LoraConfig(r=2, target_modules=["0"], adapter=kind))
    for var in model.parameters():
        var.set(tc.randn(*var.shape))
    x, state = tc.randn(3, 4), tc.get_rng_state()
    before = model(x).numpy()
    model.to("bf16")
    assert tc.get_rng_state() == state
    found = model(x.to("bf16"))
    np.testing.assert_allclose(found.to("f32").numpy(), before, rtol=0.05, atol=0.2)
    assert {str(var.dtype) for var in model.parameters()} == {"f32"}
    found.sum().backward()
    # At least both factors have gradients.
    assert sum(var.grad is not None for var in model.parameters()) >= 2
    tc.optim.SGD(model.parameters(), lr=1.0).step()
    assert (model(x.to("bf16")).to("f32").numpy() != found.to("f32").numpy()).all()
    model.eval()
    model.to("bf16").to("cpu")
    # A module without variables computes too, and in every call the same.
    frozen = model.requires_grad_(requires_grad=False)(x.to("bf16")).to("f32").numpy()
    assert model.parameters() == []
    np.testing.assert_array_equal(model(x.to("bf16")).to("f32").numpy(), frozen)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_optimizer_made_before_a_move_raises_if_the_move_changed_the_dtype(kind: str) -> None:
    net = tc.nn.Sequential(tc.nn.Linear(4, 2))
    model = tc.get_peft_model(net, tc.LoraConfig(r=2, target_modules=["0"], adapter=kind))
    optimizer = tc.optim.SGD(model.parameters(), lr=1.0)
    x = tc.ones(3, 4)
    for target in ("cpu", "f32"):  # The module has this device and dtype already.
        before = model.to(target)(x).numpy()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert (model(x).numpy() != before).any()
    model.to("bf16")(x.to("bf16")).sum().backward()
    with pytest.raises(ArgumentError, match=r"SGD: step.* move the model first, then make the opt"):
        optimizer.step()
    tc.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_that_move_to_a_gpu_are_trained_there(gpu: str, kind: str) -> None:
    losses = []
    for device in ("cpu", gpu):
        tc.manual_seed(0)
        net = tc.nn.Sequential(tc.nn.Linear(4, 8), tc.nn.ReLU(), tc.nn.Linear(8, 2))
        model = tc.get_peft_model(net, tc.LoraConfig(r=2, target_modules=["0", "2"], adapter=kind))
        # A move to the GPU makes this optimizer unusable, so it can be used only on the CPU.
        early_optimizer = tc.optim.SGD(model.parameters(), lr=0.01)
        x = tc.randn(16, 4).to(device)
        model.to(device)
        assert {var.device.type for var in model.parameters()} == {device}
        optimizer = (
            early_optimizer if device == "cpu" else tc.optim.SGD(model.parameters(), lr=0.01)
        )
        for _ in range(5):
            loss = ((model(x) - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    # Here, `early_optimizer` is that of the run on the GPU.
    with pytest.raises(ArgumentError, match=r"SGD: step.* move the model first, then make the opt"):
        early_optimizer.step()
    on_cpu, on_gpu = losses[:5], losses[5:]
    assert on_gpu[-1] < on_gpu[0]
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-5)


def test_a_configuration_can_be_copied_but_not_subclassed() -> None:
    config = tc.LoraConfig(
        r=3, target_modules=["a", "b"], rank_pattern={"a": 2}, qat="nf4", oft_side="output"
    )
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert repr(other) == repr(config)
        assert isinstance(other, tc.LoraConfig)
    with pytest.raises(TypeError, match="LoraConfig has no subclasses"):
        type("Mine", (tc.LoraConfig,), {})


def test_the_arguments_of_peft_are_accepted_with_their_defaults() -> None:
    # The arguments of peft 0.18's LoraConfig, with the defaults that peft has.
    config = tc.LoraConfig(
        task_type="CAUSAL_LM", peft_type="LORA", auto_mapping=None, base_model_name_or_path=None,
        revision=None, inference_mode=False, r=8, target_modules=["q"], exclude_modules=None,
        lora_alpha=8, lora_dropout=0.0, fan_in_fan_out=False, bias="none", use_rslora=False,
        modules_to_save=None, init_lora_weights=True, layers_to_transform=None,
        layers_pattern=None, rank_pattern={}, alpha_pattern={}, megatron_config=None,
        megatron_core="megatron.core", trainable_token_indices=None, loftq_config={},
        eva_config=None, corda_config=None, use_dora=False, layer_replication=None,
        lora_bias=False, target_parameters=None,
    )  # fmt: skip
    assert repr(config) == repr(tc.LoraConfig(target_modules=["q"]))


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("bias", "all", "adapters do not change biases"),
        ("modules_to_save", ["head"], "`requires_grad_.*` makes a module trainable"),
        ("init_lora_weights", "pissa", "trainable_candle.lora.loftq"),
        ("init_lora_weights", 1, "start without an effect"),
        ("fan_in_fan_out", True, "transpose"),
        ("layers_to_transform", [0], "give target_modules a regular expression"),
        ("inference_mode", True, "made to be trained"),
    ],
)
def test_unsupported_arguments_of_peft_are_rejected_with_advice(
    name: str, value: Any, advice: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* of peft has no counterpart: .*{advice}"):
        tc.LoraConfig(target_modules=["q"], **{name: value})


def test_a_misspelt_argument_of_a_configuration_is_rejected() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        tc.LoraConfig(rnak=3)


def test_get_peft_model_rejects_a_model_of_the_library() -> None:
    model = tc.models.CausalLM.from_pretrained(BUILT_IN)
    with pytest.raises(TypeError, match=r"module is CausalLM.* model\.add_adapter\(config\)"):
        tc.get_peft_model(model, tc.LoraConfig())  # type: ignore[arg-type]


def test_an_alpha_is_stored_as_an_integer_if_it_is_one(tmp_path: Path) -> None:
    for alpha in (8.0, 7.5):
        model = tc.nn.Sequential(tc.nn.Linear.init(4, 4))
        config = tc.LoraConfig(r=2, lora_alpha=alpha, target_modules=["0"])
        tc.get_peft_model(model, config).save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"]
        assert (stored, type(stored)) == ((8, int) if alpha == 8 else (7.5, float))


def test_a_folder_that_does_not_fit_leaves_the_module_unchanged(tmp_path: Path) -> None:
    def make(width: int) -> tc.nn.Module:
        return tc.nn.Sequential(tc.nn.Linear(4, width), tc.nn.Linear(width, 2))

    config = tc.LoraConfig(r=2, target_modules=["0", "1"])
    tc.get_peft_model(make(8), config).save_pretrained(tmp_path)
    module = make(6)
    layers, parameters = list(module), module.named_parameters()
    with pytest.raises(tc.ShapeError, match="has shape"):
        tc.PeftModel.from_pretrained(module, tmp_path)
    assert all(found is layer for found, layer in zip(module, layers, strict=True))
    after = module.named_parameters()
    assert after.keys() == parameters.keys()
    assert all(after[name] is var for name, var in parameters.items())
