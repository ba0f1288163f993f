"""The formula for DoRA of A1111 (AUTOMATIC1111's web UI), on files with kohya's names."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main

Attach = Callable[[tc.models.Model, str], tc.AdapterSet]
Arrays = dict[str, np.ndarray]


def weight_in_a1111(weight: np.ndarray, module: Arrays) -> np.ndarray:
    """The weight of a layer with a DoRA, as A1111 computes it.

    A1111 divides by one norm for each input, whatever the shape of the magnitude. The formula is in
    `NetworkModule.apply_weight_decompose` of the built-in extension Lora, in A1111's forks.
    """
    up, down = module["lora_up.weight"], module["lora_down.weight"]
    change = (up.reshape(len(up), -1) @ down.reshape(len(down), -1)).reshape(weight.shape)
    summed = weight + change * (float(module["alpha"]) / len(down))
    norms = np.linalg.norm(summed.swapaxes(0, 1).reshape(summed.shape[1], -1), axis=1)
    return np.asarray(
        summed * module["dora_scale"] / norms.reshape(1, -1, *[1] * (weight.ndim - 2))
    )


# The magnitude of `dora` has a value for each output, that of `dora_input` one for each input.
@pytest.mark.parametrize(("kind", "is_exact"), [("dora", False), ("dora_input", True)])
def test_only_a_magnitude_for_each_input_is_applied_as_trained(
    sdxl: Path,
    unet: tc.models.SDXLUNet,
    attach: Attach,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    is_exact: bool,
) -> None:
    path = tmp_path / "adapter.safetensors"
    base = {name: value.numpy() for name, value in unet.named_tensors().items()}
    # `attach` gives the adapter random values. `save` lists the layers whose adapter has no effect.
    assert attach(unet, kind).save(path, format="kohya") == []
    unet.merge_adapter()
    merged = {name: value.numpy() for name, value in unet.named_tensors().items()}
    # The parameters of each module of the file, by their names without the module's name.
    modules: dict[str, Arrays] = {}
    for key, value in tc.load_file(path).items():
        module, _, parameter = key.partition(".")
        modules.setdefault(module, {})[parameter] = value.numpy()
    errors = []
    for report in tc.verify_adapter(path, "sdxl", sdxl).modules:
        assert report.layer is not None
        name = f"{report.layer.removeprefix('unet.')}.weight"
        found = weight_in_a1111(base[name], modules[report.module])
        change = np.linalg.norm(merged[name] - base[name])
        errors.append(float(np.linalg.norm(found - merged[name]) / change))
    assert len(errors) == len(modules)
    assert len(modules) > 200
    assert main(["verify", str(path), "--weights", str(sdxl)]) == 0
    # The line goes on with the reason if A1111 applies no module as trained.
    line = "A1111 applies " + (f"{len(modules)}\n" if is_exact else "0; ")
    text = capsys.readouterr().out
    assert line in text
    assert ("it divides DoRA's weights by one norm for each input" in text) == (not is_exact)
    if is_exact:
        assert max(errors) < 1e-4
    else:
        # With one magnitude for each output, A1111's error exceeds half of the trained change. This
        # is the reason for `--dora-axis input`.
        assert np.median(errors) > 0.5
