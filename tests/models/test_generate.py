"""Generation: a KV cache does not change scores; greedy tokens equal those of transformers."""

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.models import CausalLM

GOLDEN = Path(__file__).parents[1] / "golden" / "llm"
FAMILIES = ("llama", "qwen2", "qwen3")
# The configurations of tiny models, by name. Most switch on one feature, such as a kind of rotary
# embedding. Each has the keys of older versions of transformers ("old") and of transformers 5
# ("new").
SWITCHES = json.loads(gzip.decompress((GOLDEN / "switches.json.gz").read_bytes()))
# By family: prompts, options, and the tokens with which transformers continued the prompts.
CONTINUED = json.loads((GOLDEN / "continued.json").read_text())


def model_of(family: str, **options: object) -> CausalLM:
    return CausalLM.from_pretrained(GOLDEN / family, dtype="f32", **options)  # type: ignore[arg-type]


def switched(name: str, folder: Path) -> tuple[CausalLM, list[int]]:
    """The model `name` of `SWITCHES`, and the 20 token ids of the first text in the golden file."""
    # The weights and the logits of a case have keys such as `mistral|lm_head.weight`.
    tensors = tc.load_file(decompressed(GOLDEN / "switches.safetensors"))
    case = {key.split("|")[1]: tensors[key] for key in tensors if key.startswith(f"{name}|")}
    weights = {key: value for key, value in case.items() if not key.startswith("logits")}
    tc.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SWITCHES[name]["new"]))
    return CausalLM.from_pretrained(folder, dtype="f32"), tensors["input_ids"][0].numpy().tolist()


def scores(model: CausalLM, ids: list[int]) -> np.ndarray:
    """The scores of the next token, from a forward pass over the whole text without a cache."""
    return np.asarray(model(tc.tensor([ids]))[0, -1].to("f32").numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family: str, device: str) -> None:
    """Prompts of several lengths, in a batch and alone, without and with a repetition penalty."""
    model = model_of(family, device=device)
    for case in CONTINUED[family]:
        options = case["options"] | {"max_new_tokens": len(case["expected"][0])}
        assert model.generate(case["prompts"], stop_token_ids=[], **options) == case["expected"]
        alone = [model.generate([p], stop_token_ids=[], **options)[0] for p in case["prompts"]]
        assert alone == case["expected"]


@pytest.mark.parametrize("name", SWITCHES)
def test_scores_with_a_cache_equal_those_without(name: str, tmp_path: Path) -> None:
    """The texts grow beyond the attention window and the lengths where the rotary angles change."""
    model, ids = switched(name, tmp_path)
    cache = tc.models.KVCache(texts=2)
    texts = [ids[:3], ids[4:11]]
    found = model.extend(cache, texts)
    for step in range(20):
        for text, next_scores in zip(texts, found.numpy(), strict=True):
            np.testing.assert_allclose(next_scores, scores(model, text), rtol=0, atol=1e-5)
        # In some steps the first text gets three tokens, or the second text gets none.
        new = [[ids[step]], [ids[-step - 1]]]
        if step % 7 == 3:
            new[0] = ids[step : step + 3]
        if step % 7 == 5:
            new[1] = []
        texts = [text + added for text, added in zip(texts, new, strict=True)]
        found = model.extend(cache, new)
        if not new[1]:
            # `extend` returns scores only of the texts that got tokens: here, of the first text.
            assert found.shape == (1, model.vocab_size)
            np.testing.assert_allclose(found.numpy()[0], scores(model, texts[0]), rtol=0, atol=1e-5)
            # The next step compares the scores of both texts, so each text gets another token.
            new = [ids[1:2], ids[:1]]
            texts = [text + added for text, added in zip(texts, new, strict=True)]
            found = model.extend(cache, new)
    assert cache.tokens(0) == texts[0]


def test_scores_stay_right_when_the_cache_outgrows_its_buffers(tmp_path: Path) -> None:
    model, _ = switched("mistral", tmp_path)
    rng = np.random.default_rng(0)
    # New buffers have room for at least 64 more tokens. These 300 tokens need larger ones.
    text = rng.integers(0, model.vocab_size, 300).tolist()
    cache = tc.models.KVCache(texts=1)
    model.extend(cache, [text[:5]])
    for index in range(5, len(text)):
        found = model.extend(cache, [text[index : index + 1]])
    np.testing.assert_allclose(found.numpy()[0], scores(model, text), rtol=0, atol=1e-5)


def test_scores_with_a_cache_are_right_with_an_adapter() -> None:
    model = model_of("llama")
    adapter = model.add_adapter(
        tc.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    for var in adapter.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.3)
    ids = [3, 5, 7, 9]
    cache = tc.models.KVCache(texts=1)
    model.extend(cache, [ids[:3]])
    tuned = model.extend(cache, [ids[3:]]).numpy()[0]
    np.testing.assert_allclose(tuned, scores(model, ids), rtol=0, atol=1e-5)
    adapter.set_enabled(False)
    assert np.abs(scores(model, ids) - tuned).max() > 1e-3


def test_scores_with_a_cache_are_nearly_right_in_bf16() -> None:
    model = CausalLM.from_pretrained(GOLDEN / "llama", dtype="bf16")
    ids = [3, 5, 7, 9]
    cache = tc.models.KVCache(texts=1)
    model.extend(cache, [ids[:3]])
    found = model.extend(cache, [ids[3:]]).to("f32").numpy()[0]
    expected = scores(model, ids)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


def test_draws_depend_only_on_the_seed_the_text_and_its_place_in_the_batch() -> None:
    model = model_of("llama")
    options = {"temperature": 1.0, "top_k": 20, "max_new_tokens": 12, "stop_token_ids": []}
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3]]
    drawn = model.generate(prompts, seed=7, **options)
    assert drawn == model.generate(prompts, seed=7, **options)
    assert drawn != model.generate(prompts, seed=8, **options)
    assert drawn[0] != drawn[2]
    assert model.generate(prompts[:1], seed=7, **options)[0] == drawn[0]
    # A lower max_new_tokens only cuts the texts: it does not change their first tokens.
    assert model.generate(prompts, seed=7, **(options | {"max_new_tokens": 5})) == [
        text[:5] for text in drawn
    ]


def test_draws_have_the_models_probabilities() -> None:
    model = model_of("llama")
    ids = [1, 2, 3]
    probabilities = np.exp(scores(model, ids).astype(np.float64))
    probabilities /= probabilities.sum()
    prompts, count = [ids] * 500, 4 * 500
    counts: Counter[int] = Counter()
    for seed in range(4):
        drawn = model.generate(
            prompts, max_new_tokens=1, temperature=1.0, stop_token_ids=[], seed=seed
        )
        counts.update(text[0] for text in drawn)
    likeliest = int(probabilities.argmax())
    # The standard deviation of the token's share of `count` draws.
    deviation = (probabilities[likeliest] * (1 - probabilities[likeliest]) / count) ** 0.5
    assert abs(counts[likeliest] / count - probabilities[likeliest]) < 5 * deviation


def test_a_stop_token_ends_only_its_text() -> None:
    model = model_of("llama")
    prompts = [[1, 2, 3], [9, 8]]
    unstopped = model.generate(prompts, max_new_tokens=10, stop_token_ids=[])
    stop = unstopped[0][4]
    expected = [text[: text.index(stop)] if stop in text else text for text in unstopped]
    assert model.generate(prompts, max_new_tokens=10, stop_token_ids=[stop]) == expected
    assert model.generate(prompts, max_new_tokens=0) == [[], []]


def test_a_stream_can_end_one_text_and_continue_the_other() -> None:
    model = model_of("llama")
    prompts = [[1, 2, 3], [9, 8]]
    unstopped = model.generate(prompts, max_new_tokens=10, stop_token_ids=[])
    stream = model.stream(prompts, max_new_tokens=10, stop_token_ids=[])
    steps = [next(stream), next(stream)]
    stream.end(0)
    steps += list(stream)
    assert [step[1] for step in steps] == unstopped[1]
    assert [step[0] for step in steps] == unstopped[0][:2] + [None] * 8


def test_end_tokens_of_both_configurations_end_a_text(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    prompts = [[1, 2, 3]]
    unstopped = model_of("llama").generate(prompts, max_new_tokens=10, stop_token_ids=[])[0]
    # 319 is the last token of the vocabulary.
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 319}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"eos_token_id": [unstopped[4], 319]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model = CausalLM.from_pretrained(tmp_path, dtype="f32")
    assert sorted(model.eos_token_ids) == sorted({unstopped[4], 319})
    expected = unstopped[: unstopped.index(unstopped[4])]
    assert model.generate(prompts, max_new_tokens=10) == [expected]


def test_wrong_input_is_reported() -> None:
    model = model_of("llama")
    for prompts, options, message in [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1]], {"top_p": 0.0}, "top_p is 0, expected above 0 and at most 1"),
        ([[1]], {"temperature": -1.0}, "temperature is -1, expected 0 or more"),
    ]:
        with pytest.raises(tc.ArgumentError, match=message):
            model.generate(prompts, **options)  # type: ignore[arg-type]
    with pytest.raises(tc.IndexOutOfRangeError, match="the id 99999 is not a token"):
        model.generate([[1, 99999]])
    with pytest.raises(tc.IndexOutOfRangeError, match="the id 8589934592 is not a token"):
        model.generate([[1, 2**33]])
    # A model of which only the first layers are loaded.
    with pytest.raises(tc.ArgumentError, match="it cannot compute scores or be saved"):
        model_of("llama", layers=1).generate([[1]])
    with pytest.raises(tc.ArgumentError, match="1 lists of tokens for 2 texts"):
        model.extend(tc.models.KVCache(texts=2), [[1]])
