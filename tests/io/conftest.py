"""The tiny SDXL with an adapter of each kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc

SDXL = Path(__file__).parents[1] / "golden" / "sdxl"
ATTENTION: dict[str, Any] = {"r": 4, "lora_alpha": 6.0, "target_modules": ["all-attention"]}
EVERYWHERE: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 2.0,
    "target_modules": ["all-linear", "all-conv"],
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": ATTENTION,
    "rslora": ATTENTION | {"use_rslora": True},
    "locon_uniform": EVERYWHERE,
    "locon": EVERYWHERE | {"rank_pattern": {"conv1": 2}, "alpha_pattern": {"to_q": 7.0}},
    "dora": EVERYWHERE | {"use_dora": True},
    "dora_input": EVERYWHERE | {"use_dora": True, "wd_on_output": False},
    "loha": EVERYWHERE | {"adapter": "loha"},
    "lokr": EVERYWHERE | {"adapter": "lokr"},
    "oft": EVERYWHERE | {"adapter": "oft", "oft_block_size": 8},
    "lokr_both": EVERYWHERE | {"adapter": "lokr", "decompose_both": True, "decompose_factor": 8},
}


@pytest.fixture
def sdxl() -> Path:
    """The folder of the tiny SDXL."""
    return SDXL


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of adapter in turn."""
    name: str = request.param
    return name


@pytest.fixture
def config_of() -> Callable[[str], tc.LoraConfig]:
    """A function that returns the configuration of a kind of adapter."""
    return lambda kind: tc.LoraConfig(**KINDS[kind])


@pytest.fixture
def unet() -> tc.models.SDXLUNet:
    """The tiny UNet in f32."""
    return tc.models.SDXLUNet.from_pretrained(SDXL / "unet", dtype="f32")


@pytest.fixture
def attach() -> Callable[[tc.models.Model, str], tc.AdapterSet]:
    """A function that adds an adapter to a model and gives it values that change the output."""

    def attach(model: tc.models.Model, kind: str) -> tc.AdapterSet:
        tc.manual_seed(5)
        adapter = model.add_adapter(tc.LoraConfig(**KINDS[kind]))
        for name, var in adapter.named_parameters().items():
            if name.endswith(("magnitude_vector.weight", "dora_scale")):
                var.set(var * (1 + 0.2 * tc.rand(var.shape)))
            else:
                var.set(var + 0.2 * tc.randn(var.shape))
        return adapter

    return attach
