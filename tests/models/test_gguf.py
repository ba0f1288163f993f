"""A language model from a GGUF file computes the same as one from a folder with equal weights."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.export import TextAdapter, write_model
from trainable_candle.export.gguf_file import Entry, Fact, write
from trainable_candle.export.gguf_model import model_facts, parameter_name
from trainable_candle.models import CausalLM
from trainable_candle.tasks.speed import work_of
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.text.gguf_tokenizer import SPLITS
from trainable_candle.train import TrainConfig

GOLDEN = Path(__file__).parents[1] / "golden"
IDS = [[3, 5, 7, 11, 13, 17]]
FAMILIES = ["llama", "qwen2", "qwen3"]
# `write_model` writes a folder's weights, changed by an adapter. This adapter changes no layer.
NO_ADAPTER = TextAdapter({})


def write_tokenizer(folder: Path, split: str | None) -> None:
    """Write a byte-level tokenizer with a few merges and three special tokens.

    The regular expression `split` divides texts into words; None takes that of GPT-2.
    """
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


def folder_of(family: str, tmp_path: Path) -> Path:
    """Copy the folder of a tiny model, and add a tokenizer; return the copy's path."""
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
def test_a_file_computes_the_same_as_its_values(family: str, kind: str, tmp_path: Path) -> None:
    base = folder_of(family, tmp_path)
    write_model(base, NO_ADAPTER, tmp_path / "model.gguf", kind)
    found = CausalLM.from_pretrained(tmp_path / "model.gguf", dtype="f32")
    tensors = tc.load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        # Matrices whose rows do not divide into blocks of 32 elements are not quantized but f16.
        if tensor.ndim == 2 and kind.startswith("q") and tensor.shape[1] % 32 == 0:
            tensors[name] = tc.quantize(tensor.to("f32"), kind).dequantize()
        elif tensor.ndim == 2:
            tensors[name] = tensor.to("f16" if kind.startswith("q") else kind)
    tc.save_file(tensors, base / "model.safetensors")
    expected = CausalLM.from_pretrained(base, dtype="f32")
    # GGUF files store the factors of Llama 3's rotary frequencies in f32, which rounds them.
    tolerance = 2e-6 if family == "llama" else 0
    np.testing.assert_allclose(scores(found), scores(expected), rtol=0, atol=tolerance)
    for name, tensor in expected.named_tensors().items():
        np.testing.assert_array_equal(found.named_tensors()[name].numpy(), tensor.numpy(), name)


def test_adapters_train_over_a_file(tmp_path: Path) -> None:
    """The loss and the gradients equal those of a model with the dequantized values."""
    base = folder_of("qwen3", tmp_path)
    write_model(base, NO_ADAPTER, tmp_path / "model.gguf", "q8_0")
    results = []
    for path in (tmp_path / "model.gguf", base):
        model = CausalLM.from_pretrained(path, dtype="f32")
        if path == tmp_path / "model.gguf":
            # The folder `base` gets the file's dequantized values.
            model.save_pretrained(tmp_path / "values")
            shutil.copyfile(tmp_path / "values" / "model.safetensors", base / "model.safetensors")
        adapter = model.add_adapter(tc.LoraConfig(r=4, target_modules=["all-linear"]))
        tc.manual_seed(0)
        for var in adapter.parameters():
            var.set(tc.randn(var.shape) * 0.05)
        ids = tc.tensor(np.arange(48).reshape(2, 24) * 7 % 100)
        loss = model.loss(ids, ids)
        gradients = tc.grad(loss, adapter.parameters())
        results.append([loss.numpy(), *(gradient.numpy() for gradient in gradients)])
    for of_file, of_folder in zip(*results, strict=True):
        np.testing.assert_allclose(of_file, of_folder, rtol=1e-4, atol=1e-6)


def test_facts_count_the_bytes_of_the_weights_in_a_file(tmp_path: Path) -> None:
    base = folder_of("qwen3", tmp_path)
    write_model(base, NO_ADAPTER, tmp_path / "model.gguf", "q8_0")
    (facts,) = tc.inspect(tmp_path / "model.gguf").parts.values()
    expected = 0
    for shape in facts.tensors.values():
        # A block of 32 elements takes 34 bytes. Vectors, and matrices whose rows do not divide into
        # blocks (rows of 112 elements), count as bf16: with two bytes per element.
        blocks = len(shape) == 2 and shape[1] % 32 == 0
        expected += shape[0] * shape[1] // 32 * 34 if blocks else 2 * int(np.prod(shape))
    assert facts.weight_bytes("bf16") == expected


@pytest.mark.parametrize(("kind", "decoded"), [("q8_0", True), ("bf16", False)])
def test_estimates_count_the_elements_that_steps_dequantize(
    kind: str, decoded: bool, tmp_path: Path
) -> None:
    base = folder_of("qwen3", tmp_path)
    write_model(base, NO_ADAPTER, tmp_path / "model.gguf", kind)
    (facts,) = tc.inspect(tmp_path / "model.gguf").parts.values()
    config = TrainConfig(device="cuda", precision="bf16")
    adapter = tc.LoraConfig(target_modules=["q_proj"])
    work = work_of(facts, adapter, config, itemsize=2, tokens=64)
    # The estimate counts all elements of a model with quantized weights, norms included.
    assert work.decoded == (facts.elements if decoded else 0)


def test_an_adapter_trained_on_a_file_is_merged_into_the_folder_but_not_into_the_file(
    tmp_path: Path,
) -> None:
    base = folder_of("qwen2", tmp_path)
    path = tmp_path / "model.gguf"
    write_model(base, NO_ADAPTER, path, "q8_0")
    rows = [{"prompt": f"say {n}: ", "completion": "hello" * n} for n in range(1, 5)]
    dataset = tmp_path / "chats.jsonl"
    dataset.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    from_file, from_folder = ["--weights", str(path)], ["--weights", str(base)]
    run = ["--dataset", str(dataset), "--output", str(tmp_path / "run"), "--device", "cpu"]
    run += ["--steps", "2", "--sequence-length", "128"]
    assert main(["train", "--model", "causal-lm", *from_file, *run]) == 0
    export = ["export", "--adapter", str(tmp_path / "run" / "peft"), "--for", "merged", "--output"]
    # An error (exit status 2): a GGUF file is not merged into.
    assert main([*export, str(tmp_path / "merged"), *from_file]) == 2
    assert main([*export, str(tmp_path / "merged"), *from_folder, "--gguf", "bf16"]) == 0
    found = scores(CausalLM.from_pretrained(tmp_path / "merged" / "model.gguf", dtype="f32"))
    assert main([*export, str(tmp_path / "folder"), *from_folder]) == 0
    expected = scores(CausalLM.from_pretrained(tmp_path / "folder", dtype="f32"))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    base = folder_of(family, tmp_path)
    # Each of the two templates is a constant text, which does not depend on the conversation.
    (base / "chat_template.jinja").write_text("a")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    write_model(base, NO_ADAPTER, tmp_path / "model.gguf", "f32")
    expected, found = map(ChatTokenizer.from_pretrained, (base, tmp_path / "model.gguf"))
    text = "hello World's 12345 \u00e9\u732b <|im_start|>hell\n\n  12 don't"
    assert found.encode(text).ids == expected.encode(text).ids
    ids = expected.encode(text).ids
    assert found.decode(ids) == expected.decode(ids)
    assert found.stops == expected.stops
    assert found.special == expected.special
    conversation = [{"role": "user", "content": "a"}]
    assert found.render(conversation).text == "a"
    tools = [{}]  # one tool, whose description does not matter
    assert found.render(conversation, tools).text == "with tools"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf")
    base = folder_of(family, tmp_path)
    # From GGUF files, transformers reads neither Llama 3's factors of rotary frequencies nor
    # the head width of Qwen3. So the models here have no such factors, and Qwen3 is left out.
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (base / "config.json").write_text(json.dumps(config))
    write_model(base, NO_ADAPTER, tmp_path / "model.gguf", "q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits.numpy()
    found = scores(CausalLM.from_pretrained(tmp_path / "model.gguf", dtype="f32"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def tiny(path: Path, **changes: Fact | None) -> Path:
    """Write a file with two tensors and the metadata of a one-layer Llama, changed by `changes`.

    A key of `changes` has two underscores for each dot; the value None removes the entry.
    """
    facts: dict[str, Fact] = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 32, "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    facts = {key: value for key, value in (facts | changed).items() if value is not None}
    shapes = {"token_embd.weight": (8, 32), "blk.0.attn_q.weight": (32, 32)}
    entries = [
        Entry(name, shape, "q8_0", partial(tc.ones, shape)) for name, shape in shapes.items()
    ]
    with path.open("wb") as file:
        write(file, facts, entries)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma"}, "not supported; expected one of llama, qwen2, qwen3"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"split__count": 2}, "llama-gguf-split --merge"),
        ({"general__alignment": 24}, "a power of two"),
        # The file has only two of the model's tensors.
        ({}, "missing model.layers.0"),
    ],
)
def test_unsupported_files_are_reported(
    changes: dict[str, Fact | None], message: str, tmp_path: Path
) -> None:
    path = tiny(tmp_path / "model.gguf", **changes)
    with pytest.raises(tc.errors.Error, match=message):
        CausalLM.from_pretrained(path)
    # Reading the tokenizer fails, too: the file is one of several parts, or its alignment is no
    # power of two, or else it has no tokenizer of the kind gpt2 or llama.
    with pytest.raises(tc.errors.WeightsFormatError, match=r"gpt2 or llama|parts|power"):
        ChatTokenizer.from_pretrained(path)


def test_damaged_files_and_unsupported_versions_and_types_are_reported(tmp_path: Path) -> None:
    valid = tiny(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "other.gguf"
    # The number of a tensor's type precedes the tensor's offset: 8 is Q8_0, 10 is Q2_K, 23 is
    # IQ4_XS. The first offset is 0.
    q8_0 = b"\x08\0\0\0" + bytes(8)
    for content, message in [
        (valid[:-40], "incomplete or damaged: .* download or copy it again"),
        (valid[:60], "its header ends early"),
        (valid.replace(b"GGUF\3", b"GGUF\1"), "version 1"),
        (valid.replace(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"), "big-endian"),
        (valid.replace(q8_0, b"\x0a\0\0\0" + bytes(8)), "Q2_K, .* use a file"),
        (valid.replace(q8_0, b"\x17\0\0\0" + bytes(8)), "IQ4_XS"),
    ]:
        path.write_bytes(content)
        with pytest.raises(tc.errors.WeightsFormatError, match=message):
            CausalLM.from_pretrained(path)


@pytest.mark.parametrize("kind", ["q4_k", "q5_k", "q6_k"])
def test_blocks_of_256_elements_are_read(kind: str, tmp_path: Path) -> None:
    """All matrices of the file are random blocks, with scales so small that nothing overflows."""
    # The number of bytes of a block, and the byte offsets of the f16 scales in the block.
    sizes = {"q4_k": (144, (0, 2)), "q5_k": (176, (0, 2)), "q6_k": (210, (208,))}
    size, scale_offsets = sizes[kind]
    base = tmp_path / "base"
    shutil.copytree(GOLDEN / "llm" / "llama", base)
    config = json.loads((base / "config.json").read_text())
    config |= {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (base / "config.json").unlink()  # a copy of a file that may be read-only
    (base / "config.json").write_text(json.dumps(config))
    model = CausalLM.from_config(base / "config.json", dtype="f32")
    random = np.random.default_rng(0)
    entries, values = [], {}
    for name, tensor in model.named_tensors().items():
        values[name], shape = tensor, tuple(tensor.shape)
        stored: tc.Tensor | tc.QuantizedTensor = tensor
        if tensor.ndim == 2:
            # Each row has 256 elements, so it is one block.
            blocks = random.integers(0, 256, (shape[0], size), np.uint8)
            for offset in scale_offsets:
                blocks[:, offset : offset + 2] = np.float16([1e-3]).view(np.uint8)
            stored = tc.QuantizedTensor.from_blocks(tc.tensor(blocks), kind)
            values[name] = stored.dequantize()
        gguf_name = parameter_name(name.removeprefix("model."))
        stored_kind = kind if tensor.ndim == 2 else "f32"
        entries.append(Entry(gguf_name, shape, stored_kind, partial(lambda given: given, stored)))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # The file has the rows of this weight in llama.cpp's order: the two halves of each head
            # alternate. The folder has them in transformers' order: one half follows the other.
            # A head has 64 rows, two halves of 32; a row has 256 elements.
            heads = 4 if "q_proj" in name else 2
            halves = values[name].numpy().reshape(heads, 32, 2, 256).swapaxes(1, 2)
            values[name] = tc.tensor(np.ascontiguousarray(halves).reshape(-1, 256))
    (base / "model.safetensors").unlink()
    tc.save_file(values, base / "model.safetensors")
    with (tmp_path / "model.gguf").open("wb") as file:
        write(file, model_facts(config), entries)
    found = CausalLM.from_pretrained(tmp_path / "model.gguf", dtype="f32")
    expected = CausalLM.from_pretrained(base, dtype="f32")
    np.testing.assert_array_equal(scores(found), scores(expected))
