"""The tiny golden transformers of flow models, and adapters of each kind for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.compressed import model_folder

import trainable_candle as tc
from trainable_candle.models import (
    ChromaTransformer,
    Flux2Transformer,
    FluxTransformer,
    Model,
    QwenImageTransformer,
    SD3Transformer,
    ZImageTransformer,
)

GOLDEN = Path(__file__).parents[2] / "golden"
# The names of the inputs that every transformer has; and those of SD3 and Flux, which also have a
# pooled text embedding.
UNPOOLED = ("hidden_states", "encoder_hidden_states", "timestep")
POOLED = (*UNPOOLED, "pooled_projections")
RANK, ALPHA = 4, 6.0
# The settings that each kind changes.
DEFAULTS: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["all-linear"]}
KINDS: dict[str, dict[str, Any]] = {
    # SD3's default targets. In Flux's single blocks, these layers have only some of the rows of the
    # fused layer `linear1`.
    "attention": DEFAULTS | {"target_modules": ["to_q", "to_k", "to_v", "to_out.0"]},
    "lora": DEFAULTS,
    "rslora": DEFAULTS | {"use_rslora": True},
    "patterns": DEFAULTS | {"rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_q": 9.0}},
    "dora": DEFAULTS | {"use_dora": True},
    "dora_attention": DEFAULTS | {"use_dora": True, "target_modules": ["to_q", "to_k"]},
    # Without `wd_on_output`, DoRA has a magnitude for each input of a layer, not for each output.
    "dora_input": DEFAULTS | {"use_dora": True, "wd_on_output": False},
    "loha": DEFAULTS | {"adapter": "loha"},
    "lokr": DEFAULTS | {"adapter": "lokr"},
    "oft": DEFAULTS | {"adapter": "oft", "oft_block_size": 4},
    "oft_inputs": DEFAULTS | {"adapter": "oft", "oft_block_size": 4, "oft_side": "input"},
    "oft_attention": DEFAULTS
    | {"adapter": "oft", "oft_block_size": 4, "target_modules": ["to_q", "to_k"]},
}


class Family(NamedTuple):
    """A transformer and its golden inputs."""

    name: str
    model_class: type[Model]
    inputs: tuple[str, ...]
    layer: str = "transformer_blocks.0.attn.to_q"
    """The name of a linear layer in the transformer."""
    native: tuple[str, ...] = ()
    """Patterns of layers that ComfyUI knows only by their original names, not by diffusers'."""

    @property
    def folder(self) -> Path:
        """The folder of diffusers' model."""
        return model_folder(GOLDEN / self.name / "transformer")

    def load(self) -> Model:
        """The model in f32."""
        return self.model_class.from_pretrained(self.folder, dtype="f32")

    def golden_inputs(self) -> dict[str, tc.Tensor]:
        """The golden inputs by name."""
        case = tc.load_file(GOLDEN / self.name / "transformer_forward.safetensors")
        return {name: case[name] for name in self.inputs}

    def predict(self, model: Model) -> np.ndarray:
        """The model's output for the golden inputs."""
        return model(**self.golden_inputs()).numpy()

    def pipeline(self, folder: Path) -> Path:
        """Make a pipeline's folder, from which `verify_adapter` reads the transformer's sizes.

        The folder has no other part.
        """
        folder.mkdir(exist_ok=True)
        (folder / "transformer").symlink_to(self.folder)
        return folder


FAMILIES = {
    "sd3": Family("sd3", SD3Transformer, POOLED),
    "flux": Family("flux", FluxTransformer, (*POOLED, "img_ids", "txt_ids", "guidance")),
    "chroma": Family(
        "chroma",
        ChromaTransformer,
        (*UNPOOLED, "img_ids", "txt_ids", "lengths"),
        native=(r"distilled_guidance_layer\..*",),
    ),
    "zimage": Family(
        "zimage",
        ZImageTransformer,
        (*UNPOOLED, "lengths"),
        layer="layers.0.attention.to_q",
    ),
    "flux2": Family(
        "flux2",
        Flux2Transformer,
        (*UNPOOLED, "img_ids", "txt_ids"),
        native=(r".*_modulation.*\.linear", r"time_guidance_embed\..*"),
    ),
    "qwen-image": Family(
        "qwen-image", QwenImageTransformer, (*UNPOOLED, "img_ids", "txt_ids", "lengths")
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family in turn."""
    return FAMILIES[request.param]


@pytest.fixture
def attach() -> Callable[..., tc.AdapterSet]:
    """A function that adds an adapter to a model and gives it values that change the output."""

    def attach(model: Model, kind: str, **other: Any) -> tc.AdapterSet:
        tc.manual_seed(5)
        adapter = model.add_adapter(tc.LoraConfig(**KINDS[kind] | other))
        for name, var in adapter.named_parameters().items():
            if name.endswith(("magnitude_vector.weight", "dora_scale")):
                # A magnitude starts as a norm of the weight, and stays near it.
                var.set(var * (1 + 0.2 * tc.rand(var.shape)))
            else:
                var.set(var + 0.1 * tc.randn(var.shape))
        return adapter

    return attach


def merged(model: Model) -> dict[str, np.ndarray]:
    """Merge the adapter of a model; return the values of all parameters."""
    model.merge_adapter()
    return {name: tensor.numpy() for name, tensor in model.named_tensors().items()}
