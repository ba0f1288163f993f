"""The walk over the UNet against the model itself."""

import json
from pathlib import Path

from trainable_candle.families.sdxl import files
from trainable_candle.families.sdxl.structure import UNetWalk, saved_values
from trainable_candle.models import SDXLUNet

GOLDEN = Path(__file__).parents[2] / "golden" / "sdxl"


def walk(base: Path, side: int = 16) -> UNetWalk:
    config = json.loads((base / "unet" / "config.json").read_text())
    return UNetWalk(config, side, side, 77)


def test_it_names_every_layer_with_its_shape(sdxl_base: Path) -> None:
    model = SDXLUNet.from_pretrained(sdxl_base, subfolder="unet")
    expected = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in model.named_tensors().items()
        if name.endswith(".weight") and len(tensor.shape) in {2, 4}
    }
    layers = [layer for b in walk(sdxl_base).blocks() for p in b.pieces for layer in p.layers]
    assert {layer.name: layer.shape for layer in layers} == expected
    assert len(layers) == len(expected)


def test_it_names_every_layer_of_the_published_model() -> None:
    expected = json.loads((GOLDEN / "unet_shapes.json").read_text())
    layers = [layer for b in published().blocks() for p in b.pieces for layer in p.layers]
    assert {f"{layer.name}.weight": list(layer.shape) for layer in layers} == {
        name: shape
        for name, shape in expected.items()
        if name.endswith(".weight") and len(shape) in {2, 4}
    }


def published() -> UNetWalk:
    return UNetWalk(files.PUBLISHED, 128, 128, 77)


def test_nothing_is_kept_before_the_first_adapter(sdxl_base: Path) -> None:
    def values(name: str) -> int:
        return saved_values(walk(sdxl_base).blocks(), name.__eq__, 4, "none")

    first = "down_blocks.0.resnets.0.conv1"
    late = "up_blocks.2.resnets.2.conv2"
    assert values("none") == 0
    assert 0 < values(late) < values("mid_block.attentions.0.proj_in") < values(first)


def test_full_checkpointing_keeps_less(sdxl_base: Path) -> None:
    kept = {
        policy: saved_values(walk(sdxl_base).blocks(), lambda n: "attn" in n, 4, policy)
        for policy in ("none", "full")
    }
    assert kept["full"] < kept["none"] / 2
