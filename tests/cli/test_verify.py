"""`trainable-candle verify`: its reports, and its exit statuses."""

from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.families import find
from trainable_candle.families.sdxl import SDXL

# A layer of width 640, under its name in kohya's files.
MODULE = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"


def lora(module: str, up: float = 1.0) -> dict[str, tc.Tensor]:
    """Return a LoRA of one layer; every element of its up matrix is `up`."""
    return {
        f"{module}.lora_down.weight": tc.ones((2, 640)),
        f"{module}.lora_up.weight": tc.full((640, 2), up),
        f"{module}.alpha": tc.tensor(1.0),
    }


def verify(path: Path, tensors: dict[str, tc.Tensor], *flags: str) -> int:
    """Write `tensors` to a file, verify it, and return the exit status."""
    tc.save_file(tensors, path)
    return main(["verify", str(path), *flags])


def test_a_good_file_is_reported_with_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "lora_unet_down_blocks_1_attentions_1_transformer_blocks_0_attn1_to_q"
    assert verify(tmp_path / "a.safetensors", lora(module), "--all") == 0
    text = capsys.readouterr().out
    assert "1 x lora, rank 2, scale 0.5" in text
    assert "ComfyUI applies 1\n" in text
    assert "unet.down_blocks.1.attentions.1.transformer_blocks.0.attn1.to_q" in text


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lora(MODULE, up=0.0), "zero everywhere"),
        (lora(MODULE) | lora("lora_unet_blocks_0_to_x"), "no such layer"),
        (
            lora(MODULE) | {"strange": tc.ones(1)},
            "strange: this tensor is no parameter of an adapter",
        ),
        # This layer has the width 1280.
        (lora("lora_unet_input_blocks_7_1_transformer_blocks_0_attn1_to_q"), "do not fit a weight"),
        # ComfyUI does not know diffusers' names of attention projections.
        (
            lora("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
            "ComfyUI applies 0; 1 not: it does not know this key",
        ),
    ],
    ids=["zeros", "unknown layer", "strange tensor", "wrong shape", "unknown key"],
)
def test_faults_of_a_file_are_reported_with_status_1(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tensors: dict[str, tc.Tensor],
    message: str,
) -> None:
    assert verify(tmp_path / "a.safetensors", tensors) == 1
    assert message in capsys.readouterr().out


def test_layers_that_do_not_fit_are_not_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = lora(MODULE) | lora("lora_unet_input_blocks_7_1_transformer_blocks_0_attn1_to_q")
    assert verify(tmp_path / "a.safetensors", tensors) == 1
    text = capsys.readouterr().out
    for tool in ("ComfyUI", "diffusers", "A1111"):
        assert f"{tool} applies 1; 1 not: its shapes or values do not fit the layer\n" in text


def test_an_adapter_for_the_built_in_model_is_compared_with_that_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = SDXL.default_weights()
    assert base is not None
    unet = tc.models.SDXLUNet.from_pretrained(base, subfolder="unet")
    adapter = unet.add_adapter(tc.LoraConfig(r=2, lora_alpha=2.0, target_modules=["to_q"]))
    for name, var in adapter.named_parameters().items():
        if "lora_B" in name:
            var.set(tc.ones(var.shape))
    path = tmp_path / "a.safetensors"
    tc.save_adapters(path, [adapter])
    assert main(["verify", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("note: the adapter's sizes are those of the built-in `sdxl`")
    assert "problems" not in text
    assert main(["verify", str(path), "--weights", str(base)]) == 0
    assert "note: the adapter's sizes" not in capsys.readouterr().out


def test_alphas_that_diffusers_misreads_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For attention projections with kohya's names, diffusers uses the UNet's most common alpha."""
    block = "lora_unet_input_blocks_4_1_transformer_blocks_0"
    names = ("attn1_to_q", "attn1_to_k", "attn2_to_out_0", "attn1_to_v")
    tensors = {k: v for name in names for k, v in lora(f"{block}_{name}").items()}
    assert verify(tmp_path / "a.safetensors", tensors) == 0
    assert "diffusers uses" not in capsys.readouterr().out
    tensors[f"{block}_attn1_to_k.alpha"] = tc.tensor(4.0)
    assert verify(tmp_path / "a.safetensors", tensors) == 0
    # One projection has the alpha 4; the most common alpha is 1.
    assert "alpha 1 for 1 attention projections" in capsys.readouterr().out


def test_wrong_arguments_give_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 2
    assert main(["verify", str(tmp_path / "none.safetensors")]) == 2
    assert verify(tmp_path / "a.safetensors", lora(MODULE), "--model", "sdxxl") == 2
    assert "did you mean `sdxl`" in capsys.readouterr().err


def test_the_report_says_how_many_modules_each_tool_applies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [f"transformer.transformer_blocks.0.attn.to_{letter}" for letter in "qk"]
    a, b = tc.ones((2, 3072)), tc.ones((3072, 2))
    tensors = {f"{m}.lora_{name}.weight": x for m in modules for name, x in (("A", a), ("B", b))}
    assert verify(tmp_path / "a.safetensors", tensors, "--model", "flux") == 0
    text = capsys.readouterr().out
    assert "ComfyUI applies 2\n" in text
    assert "diffusers applies 2\n" in text
    assert "kohya applies 0; 2 not: it does not know this key\n" in text
    assert "peft applies 0; 2 not: it only knows its own names\n" in text
    alphas = {f"{module}.alpha": tc.tensor(1.0) for module in modules}
    assert verify(tmp_path / "a.safetensors", tensors | alphas, "--model", "flux") == 0
    assert "diffusers applies 2\n" in capsys.readouterr().out
    # The same layers of SD3 have the width 1536.
    sd3 = {name: t[:, :1536] if "_A" in name else t[:1536] for name, t in tensors.items()}
    assert verify(tmp_path / "a.safetensors", sd3 | alphas, "--model", "sd3") == 0
    text = capsys.readouterr().out
    assert "diffusers applies 0; 2 not: it rejects files with an alpha beside the" in text
    # In kohya's files, one module adapts the queries, keys and values of FLUX.
    module = "lora_unet_double_blocks_0_img_attn_qkv"
    fused = {
        f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": tc.ones((3 * 3072, 2)),
        f"{module}.dora_scale": tc.ones((3 * 3072, 1)),
    }  # fmt: skip
    assert verify(tmp_path / "a.safetensors", fused, "--model", "flux") == 0
    text = capsys.readouterr().out
    assert "1 modules with the adapters of 3 layers\n" in text
    assert "kohya applies 0; 3 in part: it ignores DoRA's magnitude\n" in text


def test_the_error_for_a_missing_argument_names_it_as_the_usage_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify"]) == 2
    assert "missing FILE (see" in capsys.readouterr().err


def test_an_adapter_of_a_language_model_is_good_if_peft_applies_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = "model.layers.0.self_attn.o_proj"
    model = tc.models.CausalLM.from_pretrained(find("causal-lm").default_weights())
    width, _ = dict(model.named_tensors())[f"{layer}.weight"].shape  # a square matrix
    down, up = tc.ones((2, width)), tc.ones((width, 2))
    module = "lora_lm_" + layer.replace(".", "_")
    file = tmp_path / "a.safetensors"
    kohya_tensors = {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
    assert verify(file, kohya_tensors, "--model", "causal-lm") == 1
    text = capsys.readouterr().out
    assert "peft applies 0; 1 not: it only knows its own names\n" in text
    assert "\nnot good\n" in text
    peft_tensors = {
        f"base_model.model.{layer}.lora_A.weight": down,
        f"base_model.model.{layer}.lora_B.weight": up,
    }
    assert verify(file, peft_tensors, "--model", "causal-lm") == 0
    assert "\ngood: peft applies all modules\n" in capsys.readouterr().out
