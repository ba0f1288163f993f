"""Relatives of the supported models are rejected by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.compressed import model_folder

import trainable_candle as tc
from trainable_candle.run import train_adapter
from trainable_candle.train import TrainConfig

GOLDEN = Path(__file__).parents[2] / "golden"
PREFIX = "model.diffusion_model."


@pytest.fixture
def train(configure: Callable[..., TrainConfig]) -> Callable[[str, Path], None]:
    """Return a function that starts to train a family on weights."""

    def train(model: str, weights: Path) -> None:
        train_adapter(configure(model, weights, steps=1))

    return train


def original(name: str, folder: Path) -> dict[str, tc.Tensor]:
    """Return the tensors of a golden transformer under their original names without a prefix."""
    path = folder / "original.safetensors"
    tc.models.save_checkpoint(
        path, {"transformer": tc.models.load(model_folder(GOLDEN / name / "transformer"))}
    )
    return {key.removeprefix(PREFIX): tensor for key, tensor in tc.load_file(path).items()}


def widened(weight: tc.Tensor, times: int) -> tc.Tensor:
    """Return the weight of a layer that reads `times` as many values."""
    return tc.cat([weight] * times, 1).contiguous()


# Beside the 64 values of the noisy latents, Fill reads 64 of a masked image and 256 of the mask,
# and Canny and Depth read 64 of a control image.
TOOLS = pytest.mark.parametrize(
    ("times", "pipeline"), [(6, "FluxFillPipeline"), (2, "FluxControlPipeline")],
    ids=["Fill", "Canny and Depth"],
)  # fmt: skip
TOOL = r"one of Flux's tools \(Fill, Canny, Depth\), which are not supported"


@TOOLS
@pytest.mark.parametrize("prefix", ["", PREFIX], ids=["bare", "with prefix"])
def test_the_files_of_fluxs_tools_are_rejected_by_name(
    times: int, pipeline: str, prefix: str, train: Callable[[str, Path], None], tmp_path: Path
) -> None:
    tensors = original("flux", tmp_path)
    tensors["img_in.weight"] = widened(tensors["img_in.weight"], times)
    path = tmp_path / f"{pipeline}.safetensors"
    tc.save_file({f"{prefix}{key}": tensor for key, tensor in tensors.items()}, path)
    message = f"reads {64 * times} values per token and predicts 64: it is {TOOL}"
    for act in (tc.inspect, tc.models.load, tc.models.FluxTransformer.from_pretrained):
        with pytest.raises(tc.ConfigError, match=message):
            act(path)
    with pytest.raises(tc.WeightsFormatError, match=message):
        train("flux", path)


@TOOLS
def test_the_pipelines_of_fluxs_tools_are_rejected_by_name(
    times: int,
    pipeline: str,
    train: Callable[[str, Path], None],
    flux_base: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tool"
    shutil.copytree(flux_base, folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    path = folder / "transformer" / "config.json"
    sizes = {"in_channels": 64 * times, "out_channels": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = tc.load_file(path)
    tensors["x_embedder.weight"] = widened(tensors["x_embedder.weight"], times)
    tc.save_file(tensors, path)
    for act in (tc.inspect, tc.models.load, tc.models.FluxTransformer.from_pretrained):
        with pytest.raises(tc.ConfigError, match=TOOL):
            act(folder)
    with pytest.raises(tc.ConfigError, match=TOOL):
        train("flux", folder)


def test_lumina_2_is_rejected_by_name(
    train: Callable[[str, Path], None], zimage_base: Path, tmp_path: Path
) -> None:
    """It has the tensor names of Z-Image, but no tokens of padding, and fewer heads of keys."""
    tensors = original("zimage", tmp_path)
    tensors = {key: t for key, t in tensors.items() if not key.endswith("pad_token")}
    for key in [key for key in tensors if key.endswith("attention.qkv.weight")]:
        # The matrix has `width` rows for the queries. With half as many heads, keys and values have
        # width / 2 rows each.
        width = tensors[key].shape[1]
        tensors[key] = tc.zeros((2 * width, width), dtype="bf16")
    path = tmp_path / "lumina.safetensors"
    # `norm_final.weight` is an unused tensor that files of Z-Image may have, too.
    tc.save_file(tensors | {"norm_final.weight": tc.ones((32,))}, path)
    message = "the transformer is not supported: it is Lumina 2 or another relative of Z-Image"
    for act in (tc.inspect, tc.models.load):
        with pytest.raises(tc.ConfigError, match=message):
            act(path)
    with pytest.raises(tc.WeightsFormatError, match=message):
        train("zimage", path)
    folder = tmp_path / "lumina"
    shutil.copytree(zimage_base, folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Lumina2Pipeline"}))
    config = {"_class_name": "Lumina2Transformer2DModel", "in_channels": 16, "hidden_size": 32}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    named = 'the model is a "Lumina2Transformer2DModel"'
    with pytest.raises(tc.ConfigError, match=named):
        tc.models.load(folder / "transformer")
    with pytest.raises(tc.ConfigError, match=named):
        train("zimage", folder)
