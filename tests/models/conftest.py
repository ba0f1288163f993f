"""Files of the tiny SDXL in `tests/golden/sdxl`, their metadata, and comparisons of tensors."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

GOLDEN = Path(__file__).parents[1] / "golden" / "sdxl"


@pytest.fixture
def sdxl() -> Path:
    """The folder of the tiny SDXL."""
    return GOLDEN


def weights_of(folder: str) -> dict[str, tc.Tensor]:
    """The parameters in a folder of the pipeline, by the names in its file."""
    return tc.load_file(next((GOLDEN / folder).glob("*.safetensors")))


@pytest.fixture(scope="session")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of all the pipeline's models, with the names of the published single file of SDXL.

    Its folder also has the models' configurations.
    """
    folder = tmp_path_factory.mktemp("original")
    stored = {name: weights_of(name) for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    tensors = {}
    for key, sources in json.loads(
        gzip.decompress((GOLDEN / "original_names.json.gz").read_bytes())
    ).items():
        # The tensor `key` consists of one or several tensors of a part, such as `unet`. Each source
        # is the part, the tensor's name there, and how the tensor `key` stores it: "plain" (as it
        # is), "transposed", "pointwise" (as the weight of a 1x1 convolution), or "rows 0", "rows 1"
        # and so on (the sources, in this order, are blocks of rows of the tensor `key`).
        pieces = [stored[part][name] for part, name, _ in sources]
        form = sources[0][2]
        if form.startswith("rows"):
            tensors[key] = tc.cat(pieces, 0)
        elif form == "transposed":
            tensors[key] = pieces[0].T.contiguous()
        elif form == "pointwise":
            tensors[key] = pieces[0].reshape((*pieces[0].shape, 1, 1))
        else:
            tensors[key] = pieces[0]
    # The published single file also has these tensors, which no model uses.
    tensors["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = tc.tensor(
        np.arange(17)[None]
    )
    tensors["conditioner.embedders.1.model.logit_scale"] = tc.tensor(4.6)
    tensors["denoiser.sigmas"] = tc.zeros((10,))
    tc.save_file(tensors, folder / "model.safetensors", metadata={"modelspec.title": "tiny"})
    for name in stored:
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    return folder / "model.safetensors"


def assert_near(found: tc.Tensor, expected: tc.Tensor, within: float = 1e-4) -> None:
    """Assert that each element differs from its expected value v by <= `within` * (|v| + 0.1)."""
    values = found.to("cpu").numpy()
    np.testing.assert_allclose(values, expected.numpy(), rtol=within, atol=within / 10)


def relative_error(found: tc.Tensor, expected: tc.Tensor) -> float:
    """The largest difference, relative to the largest expected value unless that is zero."""
    values = found.to("cpu").to("f32").numpy()
    largest = np.abs(expected.numpy()).max()
    return float(np.abs(values - expected.numpy()).max() / (largest or 1.0))


def distance(found: tc.Tensor, expected: tc.Tensor) -> float:
    """The norm of the differences, relative to the norm of the expected values."""
    values, wanted = found.detach().to("cpu").to("f32").numpy(), expected.numpy()
    return float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))["__metadata__"]
