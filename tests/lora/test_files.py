"""LoRA files: `resize` lowers their rank, `combine` sums their changes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.errors import ArgumentError, WeightsFormatError
from trainable_candle.files import safetensors_metadata
from trainable_candle.lora import LoraFile, combine, resize

RNG = np.random.default_rng(1)


def kohya(path: Path, rank: int = 4, alpha: float = 2.0, seed: int = 0) -> Path:
    """Write a LoRA of a linear layer and a convolution in kohya's format; return its path."""
    rng = np.random.default_rng(seed)
    linear = {"down": (rank, 10), "up": (6, rank)}
    conv = {"down": (rank, 3, 3, 3), "up": (5, rank, 1, 1)}
    tensors = {}
    for name, shapes in (("lora_unet_a", linear), ("lora_unet_conv", conv)):
        for factor, shape in shapes.items():
            values = rng.standard_normal(shape).astype(np.float32)
            tensors[f"{name}.lora_{factor}.weight"] = tc.tensor(values)
        tensors[f"{name}.alpha"] = tc.tensor(alpha, dtype="f32")
    tc.save_file(tensors, path, metadata={"ss_network_dim": str(rank), "sshs_model_hash": "0"})
    return path


def changes(path: Path) -> dict[str, np.ndarray]:
    """Compute what each module adds to its weight in kohya's scripts: alpha / rank * up @ down.

    The shape of a change is (outputs, inputs times kernel taps).
    """
    tensors = {name: t.to("f32").numpy() for name, t in tc.load_file(path).items()}
    found = {}
    for key, down in tensors.items():
        name, _, suffix = key.partition(".")
        if suffix == "lora_down.weight":
            rank = down.shape[0]
            up = tensors[f"{name}.lora_up.weight"].reshape(-1, rank)
            scale = tensors[f"{name}.alpha"] / rank
            found[name] = scale * up @ down.reshape(rank, -1)
    return found


def test_resizing_to_the_same_rank_keeps_changes_names_and_shapes(tmp_path: Path) -> None:
    path = kohya(tmp_path / "a.safetensors")
    resize(LoraFile.read(path), 4).write(tmp_path / "b.safetensors")
    for name, change in changes(path).items():
        np.testing.assert_allclose(changes(tmp_path / "b.safetensors")[name], change, atol=1e-6)
    written = tc.load_file(tmp_path / "b.safetensors")
    assert written.keys() == tc.load_file(path).keys()
    assert written["lora_unet_conv.lora_down.weight"].shape == (4, 3, 3, 3)


def test_the_resize_command_writes_the_nearest_changes_of_the_rank(
    tmp_path: Path,
    read_metadata: Callable[[Path], dict[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, output = kohya(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    arguments = ["resize", str(path), "--rank", "2", "--output", str(output), "--dtype", "fp16"]
    assert main(arguments) == 0
    assert "2 modules: ranks 4 became 2" in capsys.readouterr().out
    for name, change in changes(path).items():
        u, s, vt = np.linalg.svd(change, full_matrices=False)
        np.testing.assert_allclose(changes(output)[name], (u[:, :2] * s[:2]) @ vt[:2], atol=5e-3)
    metadata = read_metadata(output)
    # The new factors include the old scale, so alpha equals the rank.
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("2", "2")
    # The hash was that of the old tensors.
    assert "sshs_model_hash" not in metadata


def test_the_resize_command_needs_a_rank_and_overwrites_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = kohya(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    arguments = ["resize", str(path), "--rank", "2", "--output", str(output), "--dtype", "fp16"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "which exists; give another name, or --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert main(["resize", str(path), "--output", str(tmp_path / "c.safetensors")]) == 2


def test_the_combine_command_sums_the_changes_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = kohya(tmp_path / "a.safetensors")
    other = kohya(tmp_path / "b.safetensors", rank=2, alpha=8.0, seed=1)
    output = tmp_path / "c.safetensors"
    arguments = ["combine", "--adapter", str(one), "--adapter", str(other)]
    assert main([*arguments, "--scale", "0.5", "--scale", "-2", "--output", str(output)]) == 0
    for name, change in changes(output).items():
        expected = 0.5 * changes(one)[name] - 2 * changes(other)[name]
        np.testing.assert_allclose(change, expected, atol=1e-5)
    # The ranks 4 and 2 add up.
    assert "ranks up to 6" in capsys.readouterr().out


def test_combining_two_files_with_three_scales_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [kohya(tmp_path / f"{name}.safetensors") for name in "ab"]
    arguments = [part for path in files for part in ("--adapter", str(path))]
    scales = ["--scale", "1"] * 3
    output = str(tmp_path / "c.safetensors")
    assert main(["combine", *arguments, *scales, "--output", output]) == 2
    assert "--scale is given 3 times and --adapter 2 times" in capsys.readouterr().err


def test_alphas_in_the_header_of_diffusers_scale_the_factors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    down_key, up_key = "unet.x.to_q.lora_A.weight", "unet.x.to_q.lora_B.weight"
    down, up = RNG.standard_normal((2, 3)), RNG.standard_normal((4, 2))
    config = {"unet.r": 2, "unet.lora_alpha": 8, "unet.alpha_pattern": {"x.to_q": 6}}
    factors = {down_key: down, up_key: up}
    tensors = {key: tc.tensor(values.astype(np.float32)) for key, values in factors.items()}
    tc.save_file(tensors, path, metadata={"lora_adapter_metadata": json.dumps(config)})
    resize(LoraFile.read(path), 2).write(path)
    found = tc.load_file(path)
    # The new file has no configuration, so tools use the scale 1. The product of its factors
    # therefore includes the old scale, alpha / rank = 6 / 2.
    product = found[up_key].numpy() @ found[down_key].numpy()
    np.testing.assert_allclose(product, 3 * up @ down, atol=1e-5)


def test_files_that_are_no_lora_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    factors = {"x.lora_A.weight": tc.ones(2, 3), "x.lora_B.weight": tc.ones(4, 2)}
    tc.save_file({**factors, "x.dora_scale": tc.ones(4, 1)}, path)
    with pytest.raises(WeightsFormatError, match=r"x\.dora_scale is not a factor of a LoRA"):
        LoraFile.read(path)
    tc.save_file({"x.lora_A.weight": tc.ones(2, 3), "x.lora_B.weight": tc.ones(4, 3)}, path)
    with pytest.raises(WeightsFormatError, match="have no rank in common"):
        LoraFile.read(path)
    with pytest.raises(WeightsFormatError, match=r"is a folder, expected the \.safetensors file"):
        LoraFile.read(tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("transformer.layers.0.attention.to_q", "diffusion_model.layers.0.attention.to_q",
         r"diffusion_model\., transformer\."),
        ("diffusion_model.layers.0.attention.to_q", "diffusion_model.layers.0.attention.qkv",
         "qkv, to_q"),
        ("transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.to_q",
         r"no prefix, transformer\."),
    ],
    ids=["prefixes", "joined projections", "a prefix and none"],
)  # fmt: skip
def test_one_layer_under_two_names_cannot_be_combined(
    tmp_path: Path, one: str, other: str, message: str
) -> None:
    """ai-toolkit, ComfyUI and this library have different names for one layer."""
    files = []
    for name in (one, other):
        path = tmp_path / f"{name}.safetensors"
        same_in_both = "text_encoder.layers.0.q_proj"
        factors = {"A": tc.randn((2, 4)), "B": tc.randn((4, 2))}
        tc.save_file(
            {
                f"{layer}.lora_{letter}.weight": factor
                for layer in (name, same_in_both)
                for letter, factor in factors.items()
            },
            path,
        )
        files.append(LoraFile.read(path))
    scales = [1, 1]
    with pytest.raises(ArgumentError, match=rf"names of different styles \({message}\)"):
        combine(files, scales)
    assert len(combine([files[0], files[0]], scales).modules) == 2


def test_files_with_different_styles_of_names_cannot_be_combined(tmp_path: Path) -> None:
    for name, factors in (("a", ("lora_down", "lora_up")), ("b", ("lora_A", "lora_B"))):
        tensors = {f"x.{factor}.weight": tc.ones(2, 2) for factor in factors}
        tc.save_file(tensors, tmp_path / f"{name}.safetensors")
    a, b = (LoraFile.read(tmp_path / f"{name}.safetensors") for name in "ab")
    with pytest.raises(
        ArgumentError, match=r"different styles .*give them to `trainable-candle sample`"
    ):
        combine([a, b], [1, 1])
    # Kohya's format has `lora_down` and `lora_up`, too.
    path = kohya(tmp_path / "c.safetensors")
    with pytest.raises(ArgumentError, match="names of different styles"):
        combine([LoraFile.read(path), b], [1, 1])


@pytest.mark.parametrize(("entries", "expected"), [("null", {}), ('{"rank": 4}', {"rank": "4"})])
def test_metadata_may_be_null_or_hold_numbers(
    entries: str, expected: dict[str, str], tmp_path: Path
) -> None:
    # A safetensors file begins with the length of its header in 8 bytes.
    header = f'{{"__metadata__": {entries}}}'.encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
    assert safetensors_metadata(tmp_path / "a") == expected


@pytest.mark.parametrize("header", ['{"__metadata__": 3}', "[]"])
def test_a_file_with_a_damaged_header_is_rejected(header: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ValueError, match="is not a safetensors file"):
        safetensors_metadata(tmp_path / "a")
