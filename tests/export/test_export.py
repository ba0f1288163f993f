"""Exported adapters of language models hold what each target program expects.

The expected results are those of the model with the adapter before its export.
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


@pytest.fixture(params=["llama", "qwen2"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model with a tokenizer, a chat template and a generation configuration."""
    folder = tmp_path / "base"
    shutil.copytree(GOLDEN / "llm" / request.param, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    shutil.copyfile(GOLDEN / "chats" / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>" }\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id":  [2, 3]}')
    return folder


def make_adapter(weights: Path, path: Path, **settings: Any) -> np.ndarray:
    """Write an adapter with random weights and return the logits of the model with the adapter."""
    model = CausalLM.from_pretrained(weights, dtype="f32")
    chosen = {"r": 3, "lora_alpha": 7.0, "target_modules": ["q_proj", "k_proj", "down_proj"]}
    adapter = model.add_adapter(tc.LoraConfig(**(chosen | settings)))
    tc.manual_seed(1)
    for name, var in adapter.named_parameters().items():
        if "magnitude" not in name:
            var.set(tc.randn(var.shape) * 0.2)
    adapter.save(path, format="peft")
    return scores(model)


def scores(model: CausalLM) -> np.ndarray:
    return np.asarray(model(tc.tensor(IDS)).to("f32").numpy())


def exported(weights: Path, path: Path, reader: str, *flags: str) -> Path:
    output = path.parent / f"for {reader}"
    given = ["--weights", str(weights), "--adapter", str(path), "--for", reader]
    assert main(["export", *given, "--output", str(output), *flags]) == 0
    return output


def tuned(weights: Path, adapter: Path) -> np.ndarray:
    model = CausalLM.from_pretrained(weights, dtype="f32")
    model.load_adapter(adapter)
    return scores(model)


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True, "r": 5}, {"adapter": "dora"}], ids=["lora", "rs", "dora"]
)
def test_peft_applies_what_was_trained(weights: Path, tmp_path: Path, settings: Any) -> None:
    expected = make_adapter(weights, tmp_path / "a.safetensors", **settings)
    folder = exported(weights, tmp_path / "a.safetensors", "peft")
    np.testing.assert_allclose(tuned(weights, folder), expected, atol=2e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == settings.get("r", 3)
    assert config["target_modules"] == ["down_proj", "k_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(weights)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (weights / name).read_bytes()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_itself_computes_the_same(weights: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for number, settings in enumerate([{"use_rslora": True}, {"adapter": "dora"}]):
        path = tmp_path / str(number) / "a.safetensors"
        path.parent.mkdir()
        expected = make_adapter(weights, path, **settings)
        for reader in ("peft", "vllm")[: 2 - number]:
            folder = exported(weights, path, reader)
            base = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
            model = peft.PeftModel.from_pretrained(base, folder)
            with torch.no_grad():
                found = model(torch.tensor(IDS)).logits.numpy()
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_layers_of_several_ranks_are_exported_with_one_rank(tmp_path: Path) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors")
    config = {"r": 3, "lora_alpha": 7.0, "peft_type": "LORA", "target_modules": ["q_proj"],
              "rank_pattern": {"layers.0.self_attn.q_proj": 2},
              "alpha_pattern": {"layers.0.self_attn.q_proj": 9}}  # fmt: skip
    folder = tmp_path / "mixed"
    folder.mkdir()
    tensors = tc.load_file(tmp_path / "a.safetensors")
    kept = {key: value for key, value in tensors.items() if "q_proj" in key}
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    kept[f"{first}.lora_A.weight"] = kept[f"{first}.lora_A.weight"][:2]
    kept[f"{first}.lora_B.weight"] = kept[f"{first}.lora_B.weight"][:, :2].contiguous()
    tc.save_file(kept, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    expected = tuned(weights, folder)
    output = exported(weights, folder, "vllm")
    np.testing.assert_allclose(tuned(weights, output), expected, atol=2e-5)
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
    assert facts["adapter.lora.alpha"] == 3.0
    adapter = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(tensors) == 2 * len(adapter.layers)
    down = adapter.layers["model.layers.1.mlp.down_proj"]
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight.lora_a"], down.down)
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight.lora_b"], down.up)
    keys = adapter.layers["model.layers.1.self_attn.k_proj"].up
    if config["model_type"] == "llama":
        keys = paired(keys, config["num_key_value_heads"])
    np.testing.assert_array_equal(tensors["blk.1.attn_k.weight.lora_b"], keys)
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {weights}", "ADAPTER ./adapter.gguf"]
    assert 'PARAMETER stop "<|im_end|>"' in lines


def test_permuted_rows_of_llama_are_rotated_in_neighbouring_pairs() -> None:
    """Permuting the rows with `paired` commutes with the rotary position embedding.

    Before the permutation, the embedding rotates row i with row i + width / 2 of a head; after
    it, row 2i with row 2i + 1.
    """
    heads, width = 2, 6
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(heads * width, 1)).astype(np.float32)
    angles = rng.normal(size=width // 2)
    turns = np.exp(1j * angles)
    halves = rows.reshape(heads, 2, width // 2)
    turned = (halves[:, 0] + 1j * halves[:, 1]) * turns
    expected = np.stack([turned.real, turned.imag], 1).reshape(-1, 1)
    pairs = paired(rows, heads).reshape(heads, width // 2, 2)
    found = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    neighbours = np.stack([found.real, found.imag], -1).reshape(-1, 1)
    np.testing.assert_allclose(neighbours, paired(expected, heads), atol=1e-6)


def test_a_gguf_file_has_the_expected_bytes() -> None:
    file = BytesIO()
    entry = Entry("t", (1, 3), "f32", lambda: tc.tensor([[1.0, 2.0, 3.0]]))
    write(file, {"a": "b", "c": 1.5, "d": []}, [entry])
    content = file.getvalue()
    header = b"GGUF\x03\0\0\0" + b"\x01" + bytes(7) + b"\x03" + bytes(7)
    facts = b"\x01" + bytes(7) + b"a\x08\0\0\0\x01" + bytes(7) + b"b"
    facts += b"\x01" + bytes(7) + b"c\x06\0\0\0\0\0\xc0\x3f"
    # An empty list of strings, as for a tokenizer without merges.
    facts += b"\x01" + bytes(7) + b"d\x09\0\0\0\x08\0\0\0" + bytes(8)
    tensor = b"\x01" + bytes(7) + b"t\x02\0\0\0\x03" + bytes(7) + b"\x01" + bytes(7) + bytes(12)
    start = header + facts + tensor
    assert content[: len(start)] == start
    data = len(start) + -len(start) % 32
    assert content[data:] == np.array([1, 2, 3], "<f4").tobytes() + bytes(20)


def test_mlx_has_transposed_factors_by_the_models_names(tmp_path: Path) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors")
    folder = exported(weights, tmp_path / "a.safetensors", "mlx")
    tensors = tc.load_file(folder / "adapters.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["lora_parameters"]["keys"] == [
        "mlp.down_proj", "self_attn.k_proj", "self_attn.q_proj",
    ]  # fmt: skip
    assert config["num_layers"] == 3
    layer = "model.layers.2.self_attn.q_proj"
    factors = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights).layers[layer]
    a, b = (tensors[f"{layer}.{name}"].numpy() for name in ("lora_a", "lora_b"))
    scale = config["lora_parameters"]["scale"]
    np.testing.assert_allclose(scale * (a @ b).T, factors.up @ factors.down, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merged_model_computes_the_same_and_keeps_its_files(
    weights: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
    """Replace the weights with two files in f32 and an index."""
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
    """Most weights keep their values if the merge adds far less than half the bf16 spacing."""
    weights = tmp_path / "base"
    CausalLM.from_pretrained(GOLDEN / "llm" / "qwen2", dtype="bf16").save_pretrained(weights)
    make_adapter(weights, tmp_path / "a.safetensors", lora_alpha=1e-4)
    exported(weights, tmp_path / "a.safetensors", "merged")
    told = capsys.readouterr().out
    share = float(told.partition("rounding took ")[2].partition("%")[0])
    assert share > 50


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_weights_merged_some_rows_at_a_time_are_those_merged_at_once(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors", adapter=adapter)
    merged = []
    for name, count in (("whole", 2**21), ("rows", 100)):
        monkeypatch.setattr("trainable_candle.export.merged.AT_ONCE", count)
        (tmp_path / name).mkdir()
        read = read_adapter(tmp_path / "a.safetensors", "causal-lm", weights)
        merged.append(write_merged(weights, read, tmp_path / name))
    files = [tc.load_file(tmp_path / name / "model.safetensors") for name in ("whole", "rows")]
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(tensor.to("f32").numpy(), files[1][name].to("f32").numpy())
    one, other = merged
    assert (one.weights, one.changed) == (other.weights, other.changed)
    assert one.squared_change == pytest.approx(other.squared_change, rel=1e-5)
    assert one.lost == pytest.approx(other.lost, rel=1e-4)


@pytest.mark.parametrize(
    ("reader", "settings", "message"),
    [
        ("vllm", {"adapter": "dora"}, "vLLM does not load this adapter: it does not load DoRA"),
        (
            "gguf",
            {"adapter": "dora"},
            "llama.cpp does not load this adapter: it does not load DoRA",
        ),
        ("tensorrt", {}, "--for is tensorrt, expected one of peft, vllm"),
    ],
)
def test_adapters_that_a_program_cannot_load_are_rejected(
    tmp_path: Path,
    reader: str,
    settings: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors", **settings)
    given = ["--weights", str(weights), "--adapter", str(tmp_path / "a.safetensors")]
    output = tmp_path / "out"
    assert main(["export", *given, "--for", reader, "--output", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_verify_reports_what_each_program_cannot_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = GOLDEN / "llm" / "qwen2"
    make_adapter(weights, tmp_path / "a.safetensors", adapter="dora")
    folder = exported(weights, tmp_path / "a.safetensors", "peft")
    capsys.readouterr()
    assert main(["verify", str(folder), "--model", "causal-lm", "--weights", str(weights)]) == 0
    told = capsys.readouterr().out
    assert "good: peft applies all modules" in told
    assert "transformers and peft: loads it as it is" in told
    assert "vLLM: cannot load it, even exported: it does not load DoRA; use export --for" in told
    assert "mlx-lm: cannot load it, even exported: export writes no DoRA for it; use" in told
    # If the argument is the file instead of the folder, `verify` reads the adapter_config.json
    # beside the file.
    alone = folder / "adapter_model.safetensors"
    assert main(["verify", str(alone), "--model", "causal-lm", "--weights", str(weights)]) == 0


def test_losses_with_the_adapter_and_merged_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_adapter(BUILT_IN, tmp_path / "a.safetensors")
    data = tmp_path / "chats.jsonl"
    rows = [{"messages": words.chat("upper", word)} for word in ("clavo", "drenda", "spok")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exported(BUILT_IN, tmp_path / "a.safetensors", "merged", "--dataset", str(data))
    told = capsys.readouterr().out.partition("loss: base ")[2].partition("\n")[0]
    base, adapter, merged = (float(part.split()[-1]) for part in told.split(","))
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


def test_ollama_finds_a_local_base_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(BUILT_IN, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    make_adapter(Path("base"), Path("a.safetensors"))
    folder = exported(Path("base"), Path("a.safetensors"), "ollama")
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {tmp_path / 'base'}", "ADAPTER ./adapter.gguf"]
    other = tmp_path / "named"
    given = ["--adapter", "a.safetensors", "--for", "ollama", "--base", "llama3.2:1b"]
    assert main(["export", *given, "--weights", "base", "--output", str(other)]) == 0
    assert (other / "Modelfile").read_text().startswith("FROM llama3.2:1b\n")


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"], ids=["cut", "list", "bytes"])
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


def test_a_yarn_model_may_lack_its_longest_context() -> None:
    config = json.loads((GOLDEN / "llm" / "llama" / "config.json").read_text())
    del config["max_position_embeddings"]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    for rope, length in ((scaling, 8), ({"rope_type": "yarn", "factor": 4.0}, 2048)):
        facts = model_facts(config | {"rope_scaling": rope, "rope_parameters": None})
        assert facts["llama.rope.scaling.original_context_length"] == length


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (float("nan"), "a.safetensors cannot be used: .*q_proj.* has non-finite elements; see"),
        (None, "a.safetensors cannot be used: .*q_proj: .*; see"),
    ],
    ids=["non-finite", "shape"],
)
def test_a_faulty_adapter_is_not_called_another_models(
    weights: Path, tmp_path: Path, values: float | None, message: str
) -> None:
    path = tmp_path / "a.safetensors"
    make_adapter(weights, path, target_modules=["q_proj"])
    tensors = tc.load_file(path)
    key = next(key for key in tensors if key.endswith("lora_A.weight"))
    shape = tensors[key].shape
    tensors[key] = tc.ones((shape[0], shape[1] + 1)) if values is None else tc.full(shape, values)
    tc.save_file(tensors, path)
    with pytest.raises(WeightsFormatError, match=message):
        read_adapter(path, "causal-lm", weights)
