"""llama.cpp computes the same logits and tokens from exported files as this library.

The tests need llama-cpp-python 0.3.36 or newer.
"""

import ctypes
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.models import CausalLM

llama = pytest.importorskip("llama_cpp")

TOKENIZER = Path(__file__).parents[1] / "golden" / "chats" / "tokenizer.json"
# Any tokens that every vocabulary has.
IDS = [3, 5, 7, 11, 13, 17, 2, 9]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": LLAMA3,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "built in": {},
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a model with random weights and a tokenizer, or copy the built-in model."""
    folder = tmp_path / "base"
    if request.param == "built in":
        shutil.copytree(BUILT_IN, folder)
        return folder
    folder.mkdir()
    config = json.dumps(COMMON | CONFIGS[request.param])
    (folder / "config.json").write_text(config)
    CausalLM.from_config(folder / "config.json").save_pretrained(folder)
    # `save_pretrained` wrote its own config.json: write the complete one again.
    (folder / "config.json").write_text(config)
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


@pytest.fixture
def adapter(weights: Path, tmp_path: Path) -> tuple[Path, npt.NDArray[np.float32]]:
    """Write an adapter for every linear layer of the blocks.

    Return the file, and the logits of the model with the adapter.
    """
    model = CausalLM.from_pretrained(weights, dtype="f32")
    adapter_set = model.add_adapter(tc.LoraConfig(r=3, lora_alpha=7.0, target_modules=LAYERS))
    tc.manual_seed(1)
    for var in adapter_set.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.2)
    adapter_set.save(tmp_path / "adapter.safetensors", format="peft")
    return tmp_path / "adapter.safetensors", scores(model)


def scores(model: CausalLM) -> npt.NDArray[np.float32]:
    """Return this library's logits after each token of IDS."""
    return np.asarray(model(tc.tensor([IDS])).numpy()[0])


def exported(weights: Path, adapter: Path, output: Path, *flags: str) -> Path:
    """Export an adapter; return the output folder."""
    given = ["--weights", str(weights), "--adapter", str(adapter), "--output", str(output)]
    assert main(["export", *given, *flags]) == 0
    return output


def largest_error(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@contextmanager
def loaded(path: Path) -> Iterator[Any]:
    """Yield the model that llama.cpp loads from a GGUF file, and free it at the end."""
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), settings)
    assert model, f"llama.cpp does not load {path.name}"
    try:
        yield model
    finally:
        llama.llama_model_free(model)


def their_scores(path: Path, adapter: Path | None = None) -> npt.NDArray[np.float32]:
    """Return llama.cpp's logits after each token of IDS: shape (len(IDS), vocabulary size).

    The cache of keys and values is in f32. Flash attention is off, because it rounds them.
    """
    with loaded(path) as model:
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = 64
        settings.type_k = settings.type_v = 0  # f32
        settings.flash_attn_type = 0  # Off.
        context = llama.llama_init_from_model(model, settings)
        if adapter is not None:
            lora = llama.llama_adapter_lora_init(model, str(adapter).encode())
            assert lora, f"llama.cpp does not load {adapter.name}"
            adapters = (llama.llama_adapter_lora_p_ctypes * 1)(lora)
            scales = (ctypes.c_float * 1)(1.0)
            assert llama.llama_set_adapters_lora(context, adapters, 1, scales) == 0
        # The numbers of tokens, of values of an embedding (0: the batch has tokens), and of
        # sequences that a token can belong to.
        batch = llama.llama_batch_init(len(IDS), 0, 1)
        batch.n_tokens = len(IDS)
        for position, token in enumerate(IDS):
            batch.token[position], batch.pos[position] = token, position
            # One sequence, number 0; return the logits.
            batch.n_seq_id[position], batch.seq_id[position][0], batch.logits[position] = 1, 0, 1
        assert llama.llama_decode(context, batch) == 0
        size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        rows = [llama.llama_get_logits_ith(context, position) for position in range(len(IDS))]
        found = np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return found


# The tolerances allow for the rounding of activations in llama.cpp: to the number format of the
# weights, or to Q8_0 if the weights are in Q8_0 or Q4_0.
@pytest.mark.parametrize(
    ("number_format", "tolerance"),
    [("f32", 1e-5), ("f16", 1e-2), ("bf16", 1e-1), ("q8_0", 1e-1), ("q4_0", 1e-1)],
)
def test_a_merged_model_gives_the_same_logits(
    weights: Path,
    adapter: tuple[Path, npt.NDArray[np.float32]],
    tmp_path: Path,
    number_format: str,
    tolerance: float,
) -> None:
    path, expected = adapter
    flags = ["--for", "merged", "--gguf", number_format]
    file = exported(weights, path, tmp_path / "merged", *flags) / "model.gguf"
    found = their_scores(file)
    assert largest_error(found, scores(CausalLM.from_pretrained(file, dtype="f32"))) < tolerance
    # The other formats round the weights, so only f32 keeps the logits of the adapter.
    if number_format == "f32":
        assert largest_error(found, expected) < tolerance


def test_an_adapter_gives_the_same_logits(
    weights: Path, adapter: tuple[Path, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    path, expected = adapter
    lora = exported(weights, path, tmp_path / "lora", "--for", "gguf") / "adapter.gguf"
    # A new adapter changes nothing, so merging it exports the base.
    new = tmp_path / "new.safetensors"
    CausalLM.from_pretrained(weights, dtype="f32").add_adapter(tc.LoraConfig(r=1)).save(
        new, format="peft"
    )
    flags = ["--for", "merged", "--gguf", "f32"]
    base = exported(weights, new, tmp_path / "base alone", *flags) / "model.gguf"
    assert largest_error(their_scores(base, lora), expected) < 1e-5
    assert largest_error(their_scores(base), expected) > 1e-2


def test_texts_have_the_same_tokens(
    weights: Path, adapter: tuple[Path, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    flags = ["--for", "merged", "--gguf", "f16"]
    file = exported(weights, adapter[0], tmp_path / "merged", *flags) / "model.gguf"
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(weights / "tokenizer.json")
    )
    with loaded(file) as model:
        vocabulary = llama.llama_model_get_vocab(model)
        for text in ("hello world", "A  quick\n\nfox: 1234 times!", "une été naïve", "x\ty  "):
            content, tokens = text.encode(), (llama.llama_token * 64)()
            # At most 64 tokens; no tokens of start and end are added; names of special tokens in
            # the text count as these tokens.
            count = llama.llama_tokenize(vocabulary, content, len(content), tokens, 64, False, True)
            assert list(tokens[:count]) == tokenizer.encode(text, add_special_tokens=False).ids
