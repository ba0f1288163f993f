"""`verify` says which programs load the files of a language model's adapter, and how."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import export, families
from trainable_candle.cli import main
from trainable_candle.export import gguf
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.models import CausalLM

GOLDEN = Path(__file__).parents[1] / "golden" / "llm"
NEEDS_FILE = "loads it after `trainable-candle export --for gguf`: it needs a .gguf file"
# The name of the head in files of peft.
HEAD = "base_model.model.lm_head"


def make_adapter(weights: Path, folder: Path, **settings: Any) -> Path:
    """Write an adapter with random values as a folder for peft; return the folder."""
    model = CausalLM.from_pretrained(weights, dtype="f32")
    defaults = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
    adapter = model.add_adapter(tc.LoraConfig(**(defaults | settings)))
    for name, var in adapter.named_parameters().items():
        if "magnitude" not in name:
            var.set(tc.randn(var.shape) * 0.2)
    adapter.save(folder, format="peft")
    # An integer in place of 8.0, because vLLM may reject other numbers.
    return configured(folder, lora_alpha=8)


def configured(folder: Path, **settings: Any) -> Path:
    """Change settings in the `adapter_config.json` of a folder; return the folder."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def verdicts(
    capsys: pytest.CaptureFixture[str], path: Path, weights: Path, status: int = 0
) -> dict[str, str]:
    """Run `verify` with the exit status `status`; return what it prints about each program.

    The status is 1 if the adapter has a module that this library cannot apply, or a tensor that is
    no parameter of an adapter, even if peft loads this module or tensor.
    """
    capsys.readouterr()
    given = ["verify", str(path), "--model", "causal-lm", "--weights", str(weights)]
    assert main(given) == status
    log = capsys.readouterr().out
    # The remark that other tools use the scale 1 does not apply to language models.
    assert "the scale 1" not in log
    # The last five lines are about one program each.
    return dict(line.split(": ", 1) for line in log.splitlines()[-5:])


@pytest.fixture
def weights() -> Path:
    return GOLDEN / "llama"


def test_peft_and_vllm_load_pefts_folder(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(weights, tmp_path / "peft")
    expected = {
        "transformers and peft": "loads it as it is",
        "vLLM": "loads it as it is",
        "llama.cpp": NEEDS_FILE,
        "mlx-lm": "loads it after `trainable-candle export --for mlx`: it needs "
        "adapters.safetensors, and an adapter_config.json of its own form",
        "Ollama": "loads it after `trainable-candle export --for ollama`: it needs a Modelfile",
    }
    assert verdicts(capsys, folder, weights) == expected
    assert verdicts(capsys, folder / "adapter_model.safetensors", weights) == expected
    # Ollama converts peft's folder for some architectures, but not for Qwen2.
    qwen2 = make_adapter(GOLDEN / "qwen2", tmp_path / "qwen2")
    found = verdicts(capsys, qwen2, GOLDEN / "qwen2")
    assert found["Ollama"].endswith("converts no safetensors adapters of this architecture")


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        (
            {"alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
            {
                "vLLM": "before 0.33, it does not read alpha_pattern",
                "llama.cpp": "it needs a .gguf file; its converter does not read alpha_pattern",
            },
        ),
        (
            {"use_rslora": True},
            {"llama.cpp": "it needs a .gguf file; its converter does not read use_rslora"},
        ),
        ({"lora_alpha": 7.5}, {"vLLM": "it declares lora_alpha an integer, and may reject 7.5"}),
        ({"bias": "all"}, {"vLLM": "it may reject bias: all"}),
    ],
    ids=["alpha_pattern", "use_rslora", "lora_alpha", "bias"],
)
def test_settings_that_a_program_misreads_are_reported(
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: Any,
    reasons: dict[str, str],
) -> None:
    folder = configured(make_adapter(weights, tmp_path / "peft"), **settings)
    found = verdicts(capsys, folder, weights)
    assert found["transformers and peft"] == "loads it as it is"
    forms = {"vLLM": "vllm", "llama.cpp": "gguf"}  # the values of `--for`
    for program, reason in reasons.items():
        start = f"loads it after `trainable-candle export --for {forms[program]}`: "
        assert found[program] == start + reason


def test_each_program_loads_only_its_exported_files(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(weights, tmp_path / "peft", r=40)
    loaded = {}
    for form in ("peft", "vllm", "gguf", "mlx"):
        output = tmp_path / form
        if form != "peft":
            given = ["--weights", str(weights), "--adapter", str(folder), "--for", form]
            assert main(["export", *given, "--output", str(output)]) == 0
        found = verdicts(capsys, output, weights)
        loaded[form] = {name for name, text in found.items() if text.startswith("loads it as")}
        capsys.readouterr()
    assert loaded["peft"] == loaded["vllm"] == {"transformers and peft", "vLLM"}
    assert loaded["gguf"] == {"llama.cpp"}
    assert loaded["mlx"] == {"mlx-lm"}
    # Of the values that vLLM allows, 64 is the smallest that is at least the rank, 40.
    assert verdicts(capsys, tmp_path / "peft", weights)["vLLM"].endswith("--max-lora-rank 64")
    (tmp_path / "gguf" / "Modelfile").write_text("ADAPTER ./adapter.gguf")
    found = verdicts(capsys, tmp_path / "gguf", weights)
    assert found["Ollama"] == "loads it as it is"
    assert found["llama.cpp"] == "loads it as it is: adapter.gguf"
    assert found["vLLM"].startswith("cannot load it, and export cannot convert Ollama's format")


def test_exported_files_that_do_not_fit_the_model_are_errors(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(weights, tmp_path / "peft", target_modules=["down_proj"])
    for form, other_model, message in (
        ("gguf", GOLDEN / "qwen2", "is for the architecture llama, and the model is qwen2"),
        ("mlx", BUILT_IN, "which does not fit a weight of shape [96, 128]"),
    ):
        output = tmp_path / form
        given = ["--weights", str(weights), "--adapter", str(folder), "--for", form]
        assert main(["export", *given, "--output", str(output)]) == 0
        given = ["verify", str(output), "--model", "causal-lm"]
        assert main([*given, "--weights", str(other_model)]) == 2
        assert message in capsys.readouterr().err
        assert main(given) == 0
        assert "not compared with a model; give --weights" in capsys.readouterr().out


@pytest.mark.parametrize("in_full", [True, False], ids=["modules_to_save", "lora"])
def test_only_peft_loads_an_adapter_with_a_changed_head(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_full: bool
) -> None:
    folder = make_adapter(weights, tmp_path / "peft")
    file = folder / "adapter_model.safetensors"
    head = tc.load_file(weights / "model.safetensors")["lm_head.weight"]
    vocabulary, width = head.shape
    added = {f"{HEAD}.weight": head}
    if not in_full:
        added = {
            f"{HEAD}.base_layer.weight": head,
            f"{HEAD}.lora_A.weight": tc.ones((4, width)),
            f"{HEAD}.lora_B.weight": tc.ones((vocabulary, 4)),
        }
    tc.save_file(tc.load_file(file) | added, file)
    configured(folder, modules_to_save=["lm_head"] if in_full else None)
    found = verdicts(capsys, folder, weights, status=1)
    assert found.pop("transformers and peft") == "loads it as it is"
    for text in found.values():
        assert text.startswith("cannot load it, even exported: it changes lm_head, and export ")
    assert main(["verify", str(folder), "--model", "causal-lm", "--weights", str(weights)]) == 1
    log = capsys.readouterr().out
    assert "not: the model has no such layer" not in log
    # The first of the added tensors is the complete weight, which is not part of an adapter.
    assert f"{next(iter(added))}: peft loads it, and this library does not" in log


def test_no_program_loads_the_adapter_of_another_model(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.safetensors"
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    factors = {"lora_down.weight": tc.ones((2, 640)), "lora_up.weight": tc.ones((640, 2))}
    tc.save_file({f"{module}.{name}": values for name, values in factors.items()}, file)
    found = verdicts(capsys, file, weights, status=1)
    reason = f"cannot load it: it is not for this model: there is no layer {module}"
    assert set(found.values()) == {reason}


def test_no_program_can_use_non_finite_values(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_adapter(weights, tmp_path / "peft") / "adapter_model.safetensors"
    tensors = tc.load_file(file)
    key = next(key for key in tensors if key.endswith("lora_A.weight"))
    tc.save_file(tensors | {key: tc.full(tensors[key].shape, float("nan"))}, file)
    [verdict] = set(verdicts(capsys, tmp_path / "peft", weights, status=1).values())
    assert verdict.startswith("cannot use it: base_model.model.")
    assert verdict.endswith("has non-finite elements")


def test_with_an_unknown_architecture_no_merge_for_llama_cpp_is_advised(tmp_path: Path) -> None:
    weights = tmp_path / "base"
    weights.mkdir()
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    CausalLM.from_config(weights / "config.json").save_pretrained(weights)
    folder = make_adapter(weights, tmp_path / "peft", adapter="dora")
    family = families.load("causal-lm", weights, None, "cpu").family
    # llama.cpp cannot load DoRA. Merging helps, but not if the architecture is unknown too.
    for known in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not known:
                patch.setattr(gguf, "ARCHITECTURES", {"llama": "llama"})
            found = export.verdicts(folder, family)["gguf"]
        assert found.startswith("cannot load it, even exported: ")
        assert ("use export --for merged" in found) is known
        assert ("the architecture `mistral` is not known" in found) is not known


def test_a_file_without_a_configuration_needs_an_export(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = CausalLM.from_pretrained(weights, dtype="f32")
    adapter = model.add_adapter(tc.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    for var in adapter.parameters():
        var.set(tc.ones(var.shape))
    adapter.save(tmp_path / "a.safetensors", format="peft")
    found = verdicts(capsys, tmp_path / "a.safetensors", weights)
    for program, name in (("transformers and peft", "peft"), ("vLLM", "vllm")):
        assert found[program].startswith(f"loads it after `trainable-candle export --for {name}`")
    # Without --weights, `verify` compares with the published model and with the built-in one. This
    # adapter fits neither.
    assert main(["verify", str(tmp_path / "a.safetensors"), "--model", "causal-lm"]) == 1
    assert "note: give --weights to see what these programs do" in capsys.readouterr().out


def test_without_weights_verify_uses_the_built_in_model_if_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(BUILT_IN, tmp_path / "peft")
    assert main(["verify", str(folder), "--model", "causal-lm"]) == 0
    assert "\nvLLM: loads it as it is\n" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    ],
    ids=["LoRA of the head", "LoRA of the embedding", "modules_to_save", "tokens"],
)
def test_only_peft_loads_folders_with_a_changed_head_or_embedding(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: Any
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    base = transformers.AutoModelForCausalLM.from_pretrained(weights)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    trained = peft.get_peft_model(base, config)
    trained.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 5, 7]])
    expected = trained(ids).logits.detach()
    plain = transformers.AutoModelForCausalLM.from_pretrained(weights)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)(ids).logits.detach()
    torch.testing.assert_close(loaded, expected)
    found = verdicts(capsys, tmp_path, weights, status=1)
    assert found.pop("transformers and peft") == "loads it as it is"
    for text in found.values():
        assert text.startswith("cannot load it, even exported: it changes ")
