"""Files that `export` writes for each target program, from adapters of language models.

The expected logits are those of the model with the adapter before the export.
"""

import json
import re
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.demo import words
from trainable_candle.errors import WeightsFormatError
from trainable_candle.export import read_adapter
from trainable_candle.export.adapter import adapter_settings
from trainable_candle.export.gguf import paired
from trainable_candle.export.gguf_file import Entry, write
from trainable_candle.export.gguf_model import model_facts, write_model
from trainable_candle.export.merged import write_merged
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.models import CausalLM

GOLDEN = Path(__file__).parents[1] / "golden"
IDS = [[3, 5, 7, 11, 13, 17]]
"""A batch of one sequence of token ids."""


@pytest.fixture(params=["llama", "qwen2"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a tiny model with a tokenizer, a chat template and a generation configuration."""
    folder = tmp_path / "base"
    shutil.copytree(GOLDEN / "llm" / request.param, folder, ignore=shutil.ignore_patterns("case.*"))
    for file in folder.iterdir():
        file.chmod(0o644)
    shutil.copyfile(GOLDEN / "chats" / "tokenizer.json", folder / "tokenizer.json")
    # The unusual spaces would be lost if an export parsed these files instead of copying the bytes.
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>" }\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id":  [2, 3]}')
    return folder


def make_adapter(weights: Path, path: Path, **settings: Any) -> np.ndarray:
    """Write an adapter with random weights and return the logits of the model with the adapter."""
    model = CausalLM.from_pretrained(weights, dtype="f32")
    defaults = {"r": 3, "lora_alpha": 7.0, "target_modules": ["q_proj", "k_proj", "down_proj"]}
    adapter = model.add_adapter(tc.LoraConfig(**(defaults | settings)))
    tc.manual_seed(1)
    for name, var in adapter.named_parameters().items():
        if "magnitude" not in name:
            var.set(tc.randn(var.shape) * 0.2)
    adapter.save(path, format="peft")
    return scores(model)


def scores(model: CausalLM) -> np.ndarray:
    """Return the logits of the tokens `IDS`."""
    return np.asarray(model(tc.tensor(IDS)).to("f32").numpy())


def exported(weights: Path, path: Path, program: str, *flags: str) -> Path:
    """Export an adapter for a program; return the output folder."""
    output = path.parent / f"for {program}"
    given = ["--weights", str(weights), "--adapter", str(path), "--for", program]
    assert main(["export", *given, "--output", str(output), *flags]) == 0
    return output


def adapted_scores(weights: Path, adapter: Path) -> np.ndarray:
    """Return the logits of the model with the adapter of a file or folder."""
    model = CausalLM.from_pretrained(weights, dtype="f32")
    model.load_adapter(adapter)
    return scores(model)


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True, "r": 5}, {"adapter": "dora"}], ids=["lora", "rs", "dora"]
)
def test_a_folder_for_peft_loads_with_the_same_logits(
    weights: Path, tmp_path: Path, settings: Any
) -> None:
    expected = make_adapter(weights, tmp_path / "a.safetensors", **settings)
    folder = exported(weights, tmp_path / "a.safetensors", "peft")
    np.testing.assert_allclose(adapted_scores(weights, folder), expected, atol=2e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    # The exported factors include the scale, so alpha / r is 1.
    assert config["r"] == config["lora_alpha"] == settings.get("r", 3)
    assert config["target_modules"] == ["down_proj", "k_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(weights)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (weights / name).read_bytes()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_computes_the_same_logits(weights: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    # vLLM loads no DoRA, so only LoRA is also exported for vLLM.
    cases = (
        ("lora", {"use_rslora": True}, ("peft", "vllm")),
        ("dora", {"adapter": "dora"}, ("peft",)),
    )
    for name, settings, programs in cases:
        path = tmp_path / name / "a.safetensors"
        path.parent.mkdir()
        expected = make_adapter(weights, path, **settings)
        for program in programs:
            folder = exported(weights, path, program)
            base = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
            model = peft.PeftModel.from_pretrained(base, folder)
            with torch.no_grad():
                found = model(torch.tensor(IDS)).logits.numpy()
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_layers_of_different_ranks_are_exported_with_one_rank(tmp_path: Path) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors")
    # Keep only the query layers, and give the first one rank 2 and alpha 9.
    config = {"r": 3, "lora_alpha": 7.0, "peft_type": "LORA", "target_modules": ["q_proj"],
              "rank_pattern": {"layers.0.self_attn.q_proj": 2},
              "alpha_pattern": {"layers.0.self_attn.q_proj": 9}}  # fmt: skip
    folder = tmp_path / "mixed"
    folder.mkdir()
    tensors = tc.load_file(tmp_path / "a.safetensors")
    factors = {key: value for key, value in tensors.items() if "q_proj" in key}
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    factors[f"{first}.lora_A.weight"] = factors[f"{first}.lora_A.weight"][:2]
    factors[f"{first}.lora_B.weight"] = factors[f"{first}.lora_B.weight"][:, :2].contiguous()
    tc.save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    expected = adapted_scores(weights, folder)
    output = exported(weights, folder, "vllm")
    np.testing.assert_allclose(adapted_scores(weights, output), expected, atol=2e-5)
    written = json.loads((output / "adapter_config.json").read_text())
    assert (written["r"], written["rank_pattern"], written["alpha_pattern"]) == (3, {}, {})


def test_gguf_holds_what_llama_cpp_expects(weights: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    make_adapter(weights, tmp_path / "a.safetensors")
    folder = exported(weights, tmp_path / "a.safetensors", "ollama")
    reader = gguf.GGUFReader(folder / "adapter.gguf")
    config = json.loads((weights / "config.json").read_text())
    facts = {key: field.contents() for key, field in reader.fields.items()}
    assert facts["general.architecture"] == config["model_type"]
    assert (facts["general.type"], facts["adapter.type"]) == ("adapter", "lora")
    # The rank: the exported factors include the scale, so alpha / r is 1.
    assert facts["adapter.lora.alpha"] == 3.0
    adapter = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(tensors) == 2 * len(adapter.layers)
    down = adapter.layers["model.layers.1.mlp.down_proj"]
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight.lora_a"], down.down)
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight.lora_b"], down.up)
    key_up = adapter.layers["model.layers.1.self_attn.k_proj"].up
    # llama.cpp's converter reorders the rows of query and key weights only for llama.
    if config["model_type"] == "llama":
        key_up = paired(key_up, config["num_key_value_heads"])
    np.testing.assert_array_equal(tensors["blk.1.attn_k.weight.lora_b"], key_up)
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {weights}", "ADAPTER ./adapter.gguf"]
    assert 'PARAMETER stop "<|im_end|>"' in lines


def test_paired_rows_are_rotated_in_neighbouring_pairs() -> None:
    """Permuting the rows with `paired` commutes with the rotary position embedding.

    Before the permutation, the embedding rotates the pair of rows i and i + width / 2 of a head;
    after the permutation, the pair of rows 2i and 2i + 1.
    """
    heads, width = 2, 6
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(heads * width, 1)).astype(np.float32)
    # A pair of rows is a complex number, and a rotation multiplies it by exp(i angle).
    rotations = np.exp(1j * rng.normal(size=width // 2))
    halves = rows.reshape(heads, 2, width // 2)
    rotated = (halves[:, 0] + 1j * halves[:, 1]) * rotations
    in_halves = np.stack([rotated.real, rotated.imag], 1).reshape(-1, 1)
    pairs = paired(rows, heads).reshape(heads, width // 2, 2)
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * rotations
    in_pairs = np.stack([rotated.real, rotated.imag], -1).reshape(-1, 1)
    np.testing.assert_allclose(in_pairs, paired(in_halves, heads), atol=1e-6)


def test_a_gguf_file_has_the_expected_bytes() -> None:
    file = BytesIO()
    entry = Entry("t", (1, 3), "f32", lambda: tc.tensor([[1.0, 2.0, 3.0]]))
    write(file, {"a": "b", "c": 1.5, "d": []}, [entry])
    content = file.getvalue()
    # Version 3, 1 tensor, 3 facts (entries of the metadata). A fact is the length of its key, the
    # key, a type (8: string, 6: f32, 9: list) and a value.
    header = b"GGUF\x03\0\0\0" + b"\x01" + bytes(7) + b"\x03" + bytes(7)
    facts = b"\x01" + bytes(7) + b"a\x08\0\0\0\x01" + bytes(7) + b"b"
    facts += b"\x01" + bytes(7) + b"c\x06\0\0\0\0\0\xc0\x3f"
    # An empty list of strings, as for a tokenizer without merges.
    facts += b"\x01" + bytes(7) + b"d\x09\0\0\0\x08\0\0\0" + bytes(8)
    # The name, 2 dimensions (the last one first), the type f32 (0), and the offset 0 in the data.
    tensor = b"\x01" + bytes(7) + b"t\x02\0\0\0\x03" + bytes(7) + b"\x01" + bytes(7) + bytes(12)
    start = header + facts + tensor
    assert content[: len(start)] == start
    offset = len(start) + -len(start) % 32  # The data are aligned to 32 bytes.
    # The 12 bytes of the values are padded to 32.
    assert content[offset:] == np.array([1, 2, 3], "<f4").tobytes() + bytes(20)


def test_files_for_mlx_hold_transposed_factors_by_layer_name(tmp_path: Path) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors")
    folder = exported(weights, tmp_path / "a.safetensors", "mlx")
    tensors = tc.load_file(folder / "adapters.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["lora_parameters"]["keys"] == [
        "mlp.down_proj", "self_attn.k_proj", "self_attn.q_proj",
    ]  # fmt: skip
    assert config["num_layers"] == 3  # those of the model
    layer = "model.layers.2.self_attn.q_proj"
    factors = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights).layers[layer]
    a, b = (tensors[f"{layer}.{name}"].numpy() for name in ("lora_a", "lora_b"))
    scale = config["lora_parameters"]["scale"]
    np.testing.assert_allclose(scale * (a @ b).T, factors.up @ factors.down, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merged_model_computes_the_same_and_keeps_its_files(
    weights: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # In f32, unlike bf16, no change of a weight is lost to rounding.
    into_shards(weights)
    expected = make_adapter(weights, tmp_path / "a.safetensors", adapter=kind)
    folder = exported(weights, tmp_path / "a.safetensors", "merged")
    assert "100.0% of the adapted layers' weights changed" in capsys.readouterr().out
    found = scores(CausalLM.from_pretrained(folder, dtype="f32"))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    for file in weights.iterdir():
        if file.suffix != ".safetensors":
            assert (folder / file.name).read_bytes() == file.read_bytes()
    assert len(list(folder.glob("*.safetensors"))) == 2


def into_shards(weights: Path) -> None:
    """Replace the file of the weights with two files in f32 and an index."""
    stored = tc.load_file(weights / "model.safetensors")
    tensors = {name: tensor.to("f32") for name, tensor in stored.items()}
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        tc.save_file({name: tensors[name] for name in part}, weights / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (weights / "model.safetensors.index.json").write_text(json.dumps(index))
    (weights / "model.safetensors").unlink()


def test_changes_lost_to_rounding_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a merge adds far less than half the bf16 spacing, most weights keep their values."""
    weights = tmp_path / "base"
    CausalLM.from_pretrained(GOLDEN / "llm" / "qwen2", dtype="bf16").save_pretrained(weights)
    make_adapter(weights, tmp_path / "a.safetensors", lora_alpha=1e-4)
    exported(weights, tmp_path / "a.safetensors", "merged")
    log = capsys.readouterr().out
    share = float(log.partition("rounding took ")[2].partition("%")[0])
    assert share > 50


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_merging_some_rows_at_a_time_gives_the_same_weights(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors", adapter=adapter)
    reports = []
    # The second number is the number of weights that are merged at a time, in whole rows.
    for name, count in (("at once", 2**21), ("in parts", 100)):
        monkeypatch.setattr("trainable_candle.export.merged.AT_ONCE", count)
        (tmp_path / name).mkdir()
        read = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights)
        reports.append(write_merged(weights, read, tmp_path / name))
    files = [
        tc.load_file(tmp_path / name / "model.safetensors") for name in ("at once", "in parts")
    ]
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(tensor.to("f32").numpy(), files[1][name].to("f32").numpy())
    at_once, in_parts = reports
    assert (at_once.weights, at_once.changed) == (in_parts.weights, in_parts.changed)
    assert at_once.squared_change == pytest.approx(in_parts.squared_change, rel=1e-5)
    assert at_once.lost == pytest.approx(in_parts.lost, rel=1e-4)


@pytest.mark.parametrize(
    ("program", "settings", "message"),
    [
        ("vllm", {"adapter": "dora"}, "vLLM does not load this adapter: it does not load DoRA"),
        (
            "gguf",
            {"adapter": "dora"},
            "llama.cpp does not load this adapter: it does not load DoRA",
        ),
        ("tensorrt", {}, "--for is tensorrt, expected one of peft, vllm"),
    ],
    ids=["DoRA for vLLM", "DoRA for llama.cpp", "unknown program"],
)
def test_adapters_for_programs_that_cannot_load_them_are_rejected(
    tmp_path: Path,
    program: str,
    settings: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors", **settings)
    given = ["--weights", str(weights), "--adapter", str(tmp_path / "a.safetensors")]
    output = tmp_path / "out"
    assert main(["export", *given, "--for", program, "--output", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_verify_says_which_programs_load_a_dora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors", adapter="dora")
    folder = exported(weights, tmp_path / "a.safetensors", "peft")
    capsys.readouterr()
    assert main(["verify", str(folder), "--model", "causal-lm", "--weights", str(weights)]) == 0
    log = capsys.readouterr().out
    assert "good: peft applies all modules" in log
    assert "transformers and peft: loads it as it is" in log
    assert "vLLM: cannot load it, even exported: it does not load DoRA; use export --for" in log
    assert "mlx-lm: cannot load it, even exported: export writes no DoRA for it; use" in log
    # Given the file instead of the folder, `verify` reads adapter_config.json from the same folder.
    file = folder / "adapter_model.safetensors"
    assert main(["verify", str(file), "--model", "causal-lm", "--weights", str(weights)]) == 0


def test_the_losses_of_base_adapter_and_merged_model_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_adapter(BUILT_IN, tmp_path / "a.safetensors")
    data = tmp_path / "chats.jsonl"
    rows = [{"messages": words.chat("upper", word)} for word in ("clavo", "drenda", "spok")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exported(BUILT_IN, tmp_path / "a.safetensors", "merged", "--dataset", str(data))
    line = capsys.readouterr().out.partition("loss: base ")[2].partition("\n")[0]
    base, adapter, merged = (float(part.split()[-1]) for part in line.split(","))
    # The built-in model has learned the task "upper". An adapter with random weights spoils it.
    assert base < 0.1
    assert adapter > base + 0.5
    assert merged == pytest.approx(adapter, rel=0.05)


def test_data_is_checked_before_the_merged_model_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_adapter(BUILT_IN, tmp_path / "a.safetensors")
    data = tmp_path / "data.jsonl"
    for row, message in (
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has pairs of answers"),
        ({"question": "a"}, "has the fields question"),
    ):
        data.write_text(json.dumps(row) + "\n")
        given = ["--adapter", str(tmp_path / "a.safetensors"), "--for", "merged"]
        output = tmp_path / "merged"
        assert main(["export", *given, "--output", str(output), "--dataset", str(data)]) == 2
        assert message in capsys.readouterr().err
        assert not output.exists()


def test_a_modelfile_has_the_absolute_path_or_the_given_name_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(BUILT_IN, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    make_adapter(Path("base"), Path("a.safetensors"))
    folder = exported(Path("base"), Path("a.safetensors"), "ollama")
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {tmp_path / 'base'}", "ADAPTER ./adapter.gguf"]
    named = tmp_path / "named"
    given = ["--adapter", "a.safetensors", "--for", "ollama", "--base", "llama3.2:1b"]
    assert main(["export", *given, "--weights", "base", "--output", str(named)]) == 0
    assert (named / "Modelfile").read_text().startswith("FROM llama3.2:1b\n")


# "\udcff" becomes the byte 0xff, because `surrogateescape` is used to encode it.
@pytest.mark.parametrize("content", ["{", "[]", "\udcff"], ids=["truncated", "list", "not UTF-8"])
def test_a_damaged_configuration_is_named(weights: Path, tmp_path: Path, content: str) -> None:
    make_adapter(weights, tmp_path / "a.safetensors")
    adapter = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights)
    path = weights / "config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    for attempt in (
        lambda: write_model(weights, adapter, tmp_path / "model.gguf", "f16"),
        lambda: write_merged(weights, adapter, tmp_path),
    ):
        with pytest.raises(WeightsFormatError, match=f"^{re.escape(str(path))}: .*JSON"):
            attempt()
    shutil.copyfile(path, tmp_path / "adapter_config.json")
    with pytest.raises(WeightsFormatError, match=r"adapter_config\.json: .*JSON"):
        adapter_settings(tmp_path)


def test_a_yarn_model_may_lack_its_maximum_context() -> None:
    config = json.loads((GOLDEN / "llm" / "llama" / "config.json").read_text())
    del config["max_position_embeddings"]
    # If `original_max_position_embeddings` is missing, too, the original context is the default of
    # transformers' `LlamaConfig`, 2048.
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    for rope, length in ((scaling, 8), ({"rope_type": "yarn", "factor": 4.0}, 2048)):
        facts = model_facts(config | {"rope_scaling": rope, "rope_parameters": None})
        assert facts["llama.rope.scaling.original_context_length"] == length


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "a.safetensors cannot be used: .*q_proj.* has non-finite elements; see"),
        (None, "a.safetensors cannot be used: .*q_proj: .*; see"),
    ],
    ids=["non-finite", "wrong shape"],
)
def test_the_error_of_a_faulty_adapter_names_the_fault(
    weights: Path, tmp_path: Path, value: float | None, message: str
) -> None:
    path = tmp_path / "a.safetensors"
    make_adapter(weights, path, target_modules=["q_proj"])
    tensors = tc.load_file(path)
    key = next(key for key in tensors if key.endswith("lora_A.weight"))
    shape = tensors[key].shape
    tensors[key] = tc.ones((shape[0], shape[1] + 1)) if value is None else tc.full(shape, value)
    tc.save_file(tensors, path)
    with pytest.raises(WeightsFormatError, match=message):
        read_adapter(path, "causal-lm", weights)
