"""Language models in GGUF files: they compute what their values compute in a folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.export import TextAdapter, write_model
from trainable_candle.models import CausalLM
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.text.gguf_tokenizer import SPLITS

GOLDEN = Path(__file__).parents[1] / "golden"
IDS = [[3, 5, 7, 11, 13, 17]]
FAMILIES = ["llama", "qwen2", "qwen3"]


def write_tokenizer(folder: Path, split: str | None) -> None:
    """Bytes, a few merges and three special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2")]
    tokens = [*special, *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = level
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end_of_text|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def folder(family: str, tmp_path: Path) -> Path:
    """A tiny model with a tokenizer beside it."""
    path = tmp_path / "base"
    shutil.copytree(GOLDEN / "llm" / family, path)
    for file in path.iterdir():
        file.chmod(0o644)
    write_tokenizer(path, {"llama": SPLITS["llama-bpe"], "qwen2": SPLITS["qwen2"]}.get(family))
    return path


def scores(model: CausalLM) -> np.ndarray:
    return np.asarray(model(tc.tensor(IDS)).to("f32").numpy())


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_computes_what_its_values_do(family: str, kind: str, tmp_path: Path) -> None:
    base = folder(family, tmp_path)
    write_model(base, TextAdapter({}), tmp_path / "model.gguf", kind)
    found = CausalLM.from_pretrained(tmp_path / "model.gguf", dtype="f32")
    tensors = tc.load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and kind.startswith("q") and tensor.shape[1] % 32 == 0:
            tensors[name] = tc.quantize(tensor.to("f32"), kind).dequantize()
        elif tensor.ndim == 2:
            tensors[name] = tensor.to("f16" if kind.startswith("q") else kind)
    tc.save_file(tensors, base / "model.safetensors")
    plain = CausalLM.from_pretrained(base, dtype="f32")
    # The factors of Llama 3's positions are f32 in a file.
    tolerance = 2e-6 if family == "llama" else 0
    np.testing.assert_allclose(scores(found), scores(plain), rtol=0, atol=tolerance)
    for name, tensor in plain.named_tensors().items():
        np.testing.assert_array_equal(found.named_tensors()[name].numpy(), tensor.numpy(), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    base = folder(family, tmp_path)
    write_model(base, TextAdapter({}), tmp_path / "model.gguf", "f32")
    expected, found = map(ChatTokenizer.from_pretrained, (base, tmp_path / "model.gguf"))
    text = "hello World's 12345 \u00e9\u732b <|im_start|>hell\n\n  12 don't"
    assert found.encode(text).ids == expected.encode(text).ids
    ids = expected.encode(text).ids
    assert found.decode(ids) == expected.decode(ids)
    assert found.stops == expected.stops
    assert found.special == expected.special
    assert found.template.render([{"role": "user", "content": "a"}]).text == "a"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf")
    base = folder(family, tmp_path)
    # transformers reads neither Llama 3's factors nor, of Qwen3, the width of a head.
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (base / "config.json").write_text(json.dumps(config))
    write_model(base, TextAdapter({}), tmp_path / "model.gguf", "q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits.numpy()
    found = scores(CausalLM.from_pretrained(tmp_path / "model.gguf", dtype="f32"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
