"""Language models against transformers (tests/golden/llm)."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.models import CausalLM

from .conftest import assert_near, relative_error

GOLDEN = Path(__file__).parents[1] / "golden" / "llm"
FAMILIES = ("llama", "qwen2", "qwen3")
# The configurations of the golden cases, by the case's name and by form (see `switched`).
SWITCHES = json.loads(gzip.decompress((GOLDEN / "switches.json.gz").read_bytes()))
# Cases whose rotary angles depend on the longest text of a batch.
BY_LENGTH = ("dynamic", "longrope", "longrope short")


def stored(logits: tc.Tensor) -> np.ndarray:
    """The part of `logits`, (N, T, V), that a golden case has; the rest would make its file large.

    It has every 16th of the V tokens. At position t they begin with token t % 16, so that all rows
    of the head are compared.
    """
    values = logits.to("cpu").numpy()
    positions, vocabulary = values.shape[1:]
    chosen = np.arange(0, vocabulary, 16) + np.arange(positions)[:, None] % 16
    return np.asarray(np.take_along_axis(values, chosen[None].repeat(len(values), 0), 2))


def case_of(family: str) -> dict[str, tc.Tensor]:
    return tc.load_file(decompressed(GOLDEN / family / "case.safetensors"))


def model_of(family: str, **options: object) -> CausalLM:
    return CausalLM.from_pretrained(GOLDEN / family, dtype="f32", **options)  # type: ignore[arg-type]


def switched(name: str, form: str, folder: Path) -> tuple[CausalLM, dict[str, tc.Tensor]]:
    """The model of the case `name`, and the case's tensors: inputs and transformers' logits.

    With the `form` "new", config.json has the keys of transformers 5, such as `rope_parameters`.
    With "old", it has the older keys of the same settings, such as `rope_theta`.
    """
    tensors = tc.load_file(decompressed(GOLDEN / "switches.safetensors"))
    case_tensors = {
        key.split("|")[1]: tensors[key] for key in tensors if key.startswith(f"{name}|")
    }
    expected = {key: case_tensors.pop(key) for key in ("logits.0", "logits.1")}
    # The tensors that remain in `case_tensors` are the weights.
    tc.save_file(case_tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SWITCHES[name][form]))
    shared = {key: tensors[key] for key in ("input_ids", "attention_mask")}
    return CausalLM.from_pretrained(folder, dtype="f32"), expected | shared


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_transformers(family: str, device: str) -> None:
    case = case_of(family)
    model = model_of(family, device=device)
    ids = case["input_ids"].to(device)
    assert_near(tc.tensor(stored(model(ids))), case["logits"])
    # Ids in u32 and a mask without padding change nothing.
    np.testing.assert_array_equal(
        model(ids.to("u32"), ids * 0 + 1).to("cpu").numpy(), model(ids).to("cpu").numpy()
    )


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("name", SWITCHES)
def test_scores_with_every_configuration_equal_those_of_transformers(
    name: str, form: str, tmp_path: Path
) -> None:
    model, case = switched(name, form, tmp_path)
    ids = case["input_ids"]
    # The two texts have 20 and 13 tokens. Padding follows the second.
    for text, length in enumerate((20, 13)):
        assert_near(model(ids[text : text + 1, :length])[0], case[f"logits.{text}"])
    if name not in BY_LENGTH:
        padded = model(ids, case["attention_mask"])
        assert_near(padded[0], case["logits.0"])
        assert_near(padded[1, :13], case["logits.1"])
        assert not padded[1, 13:].numpy().any()  # the scores of padding are zeros


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3 window"])
def test_a_packed_row_equals_its_texts_alone(name: str, tmp_path: Path) -> None:
    model, case = switched(name, "new", tmp_path)
    ids = case["input_ids"]
    texts = [ids[0], ids[1, :13], ids[0, :1]]
    lengths = [len(text) for text in texts]
    # The bounds end with an empty text. Training pads `cu_seqlens` in the same way.
    bounds = tc.tensor(np.cumsum([0, *lengths, 0]))
    positions = tc.tensor(np.concatenate([np.arange(length) for length in lengths]))
    hidden = model.hidden(tc.cat(texts, 0), positions, bounds)
    expected = tc.cat([case["logits.0"], case["logits.1"], model(texts[2][None])[0]], 0)
    assert_near(model.logits(hidden), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_counted_as_in_transformers(family: str) -> None:
    ids = case_of(family)["input_ids"]
    model = model_of(family)
    assert model.num_hidden_layers == 3
    layers = [3, 0, 2, 1]
    states = model.hidden_states(ids, layers=layers)
    for layer, state in zip(layers, states, strict=True):
        (alone,) = model.hidden_states(ids, layers=[layer])
        np.testing.assert_array_equal(state.numpy(), alone.numpy())
    # `states[1]` is the state after 0 layers (`layers[1]` is 0): the embeddings.
    embedding = model.named_tensors()["model.embed_tokens.weight"].numpy()
    np.testing.assert_array_equal(states[1].numpy(), embedding[ids.numpy()])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_its_last_layers_computes_only_hidden_states(family: str) -> None:
    ids = case_of(family)["input_ids"]
    complete, shortened = model_of(family), model_of(family, layers=2)
    assert shortened.num_hidden_layers == 2
    (expected,) = complete.hidden_states(ids, layers=[2])
    np.testing.assert_array_equal(shortened.hidden_states(ids)[0].numpy(), expected.numpy())
    assert set(shortened.named_tensors()) < set(complete.named_tensors())
    with pytest.raises(
        tc.ArgumentError,
        match="layers=2, so it cannot compute scores or be saved; load all layers",
    ):
        shortened(ids)
    with pytest.raises(
        tc.ArgumentError, match="hidden states after 3 layers were requested, expected 0 to 2"
    ):
        shortened.hidden_states(ids, layers=[3])
    with pytest.raises(tc.ArgumentError, match="layers is 4, expected 1 to 3"):
        model_of(family, layers=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_padding_are_zeros_and_padding_changes_no_others(family: str) -> None:
    ids = case_of(family)["input_ids"]
    model = model_of(family)
    # Two texts of 40 tokens. The mask makes the first 7 tokens of the first text padding.
    mask = np.ones((2, 40), dtype=np.int64)
    mask[0, :7] = 0
    padded = model.hidden_states(ids, tc.tensor(mask), layers=[1])[0].numpy()
    assert not padded[0, :7].any()
    # The second text has no padding, so its states stay the same.
    expected = model.hidden_states(ids, layers=[1])[0].numpy()
    np.testing.assert_allclose(padded[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_checkpointing(family: str) -> None:
    case = case_of(family)

    def gradients(policy: str | None) -> list[np.ndarray]:
        model = model_of(family)
        tc.manual_seed(0)
        adapter = model.add_adapter(tc.LoraConfig(r=2))
        # 3 layers have 7 adapters of 2 factors each.
        assert len(adapter.parameters()) == 3 * 7 * 2
        for var in adapter.parameters():
            var.set(tc.randn(var.shape) * 0.1)
        if policy is not None:
            model.enable_gradient_checkpointing(policy)
        grads = tc.grad((model(case["input_ids"]) ** 2).sum(), adapter.parameters())
        return [grad.numpy() for grad in grads if grad is not None]

    exact = gradients(None)
    assert len(exact) == 3 * 7 * 2
    for policy in ("full", "selective"):
        for found, expected in zip(gradients(policy), exact, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_equals_the_one_that_was_read(family: str, tmp_path: Path) -> None:
    model = CausalLM.from_pretrained(GOLDEN / family)
    assert model.dtype == "bf16"
    model.save_pretrained(tmp_path)
    saved = tc.load_file(tmp_path / "model.safetensors")
    expected = tc.load_file(GOLDEN / family / "model.safetensors")
    assert saved.keys() == expected.keys() == model.named_tensors().keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(saved[name].to("f32").numpy(), tensor.to("f32").numpy())
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, GOLDEN / family)
    )
    assert ours == theirs
    assert isinstance(tc.models.load(tmp_path), CausalLM)


def test_shards_with_unprefixed_names_and_extra_tensors_are_read(tmp_path: Path) -> None:
    ids = case_of("qwen3")["input_ids"]
    expected = model_of("qwen3")(ids).numpy()
    tensors = tc.load_file(GOLDEN / "qwen3" / "model.safetensors")
    # A checkpoint may be in shards. Its names may lack the prefix "model.". It may also hold rotary
    # frequencies and a copy of the tied head. Both are ignored, so their values here are wrong.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    names = {key: key.removeprefix("model.") for key in tensors}
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for index, key in enumerate(tensors):
        list(shards.values())[index % 2][names[key]] = tensors[key]
    shards["model-00001-of-00002.safetensors"]["layers.0.self_attn.rotary_emb.inv_freq"] = tc.ones(
        12
    )
    for file, held in shards.items():
        tc.save_file(held, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
    np.testing.assert_array_equal(
        CausalLM.from_pretrained(tmp_path, dtype="f32")(ids).numpy(), expected
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, 'model_type is "gemma2", expected "llama", "mistral"'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", expected "silu"'),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of num_key"),
        ({"quantization_config": {"bits": 4}}, "load the unquantized weights"),
        (
            {"rope_parameters": {"rope_type": "su2", "rope_theta": 1.0}},
            'rope_type is "su2", expected "default", "linear"',
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "low_freq_factor is missing, expected a number",
        ),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        # The embedding in the file has 320 rows.
        ({"vocab_size": 319}, "model.embed_tokens.weight has shape"),
    ],
)
def test_wrong_configurations_are_reported(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    shutil.copy(GOLDEN / "llama" / "model.safetensors", tmp_path)
    with pytest.raises(tc.ConfigError) as error:
        CausalLM.from_pretrained(tmp_path)
    assert message in str(error.value)


def test_wrong_inputs_are_reported() -> None:
    model = model_of("llama")
    ids = tc.tensor(np.array([[1, 2, 3]]))
    with pytest.raises(tc.ShapeError, match=r"input_ids has shape \[3\], expected \(B, S\)"):
        model(ids[0])
    # The vocabulary has 320 tokens.
    with pytest.raises(tc.IndexOutOfRangeError, match="320"):
        model(ids + 318)
    # A mask may have the values 0 and 1.
    with pytest.raises(tc.IndexOutOfRangeError, match="attention_mask has the value 2"):
        model(ids, ids)
    with pytest.raises(tc.ShapeError, match="attention_mask has shape"):
        model(ids, ids[:, :2] * 0)
    # There are only 3 tokens.
    with pytest.raises(tc.IndexOutOfRangeError, match="cu_seqlens"):
        model.hidden(ids[0], ids[0], tc.tensor(np.array([0, 5])))
    with pytest.raises(tc.ShapeError, match="positions have shape"):
        model.hidden(ids[0], ids[0, :2], tc.tensor(np.array([0, 3])))
    with pytest.raises(tc.ArgumentError, match="layers= is for language models"):
        tc.models.T5Encoder.from_pretrained(GOLDEN.parent / "t5" / "gated", layers=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_scores_with_adapters_equal_those_of_peft(
    family: str, device: str
) -> None:
    case = {name: tensor.to(device) for name, tensor in case_of(family).items()}
    model = model_of(family, device=device)
    adapter = model.add_adapter(tc.LoraConfig(r=4, lora_alpha=8.0))
    parameters = adapter.named_parameters()
    factors = {name.removeprefix("lora."): case[name] for name in case if name.startswith("lora.")}
    assert parameters.keys() == factors.keys()
    for name, var in parameters.items():
        var.set(factors[name])
    inputs = (case["input_ids"], case["labels"], case["attention_mask"])
    loss = model.loss(*inputs)
    np.testing.assert_allclose(loss.item(), case["lora_loss"].to("cpu").numpy()[0], rtol=1e-5)
    grads = tc.grad(loss, list(parameters.values()))
    for name, grad in zip(parameters, grads, strict=True):
        assert grad is not None
        assert relative_error(grad, case[f"grad.{name}"].to("cpu")) < 1e-3
    scores = model(inputs[0], inputs[2])
    not_padding = case["attention_mask"].to("cpu").numpy() == 1
    expected = case["lora_logits"].to("cpu").numpy()
    np.testing.assert_allclose(
        stored(scores)[not_padding], expected[not_padding], rtol=1e-4, atol=1e-5
    )


def test_packed_loss_and_log_probs_equal_the_loss_of_the_texts(device: str) -> None:
    case = {name: tensor.to(device) for name, tensor in case_of("qwen3").items()}
    model = model_of("qwen3", device=device)
    adapter = model.add_adapter(tc.LoraConfig(r=2))
    ids = case["input_ids"]
    lengths = (40, 30)  # padding follows the 30 tokens of the second text
    labels = case["labels"].to("cpu").numpy()
    # Labels shifted by one, so that each token has its next token as target. -100: no target.
    targets = [np.append(row[1:length], -100) for row, length in zip(labels, lengths, strict=True)]
    packed = (
        tc.cat([ids[0], ids[1, : lengths[1]]], 0),
        tc.tensor(np.concatenate(targets)).to(device),
        tc.tensor(np.concatenate([np.arange(length) for length in lengths])).to(device),
        tc.tensor(np.cumsum([0, *lengths])).to(device),
    )
    # `loss` is the mean of the targets' losses, `packed_loss` is their sum.
    counted = sum(int((target >= 0).sum()) for target in targets)
    expected = model.loss(ids, case["labels"], case["attention_mask"]) * counted
    loss = model.packed_loss(*packed)
    assert loss.dtype == "f32"
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5)
    values = model.log_probs(*packed).to("cpu").numpy()
    assert not values[np.concatenate(targets) == -100].any()
    np.testing.assert_allclose(-values.sum(), loss.item(), rtol=1e-5)
    # `packed_loss` with weights has the gradients of a weighted sum of `log_probs`.
    variables = adapter.parameters()
    for var in variables:
        var.set((tc.randn(var.shape) * 0.1).to(device))
    weights = tc.tensor(np.linspace(-1, 2, sum(lengths), dtype=np.float32)).to(device)
    weighted = model.packed_loss(*packed, weights=weights)
    from_log_probs = (model.log_probs(*packed) * -weights).sum()
    np.testing.assert_allclose(weighted.item(), from_log_probs.item(), rtol=1e-4)
    pairs = zip(tc.grad(weighted, variables), tc.grad(from_log_probs, variables), strict=True)
    for found, reference in pairs:
        assert found is not None
        assert reference is not None
        assert relative_error(found, reference.to("cpu")) < 1e-4


def test_a_loss_without_targets_is_zero() -> None:
    case = case_of("qwen2")
    assert model_of("qwen2").loss(case["input_ids"], case["labels"] * 0 - 100).item() == 0


def test_wrong_labels_are_reported() -> None:
    case = case_of("qwen2")
    with pytest.raises(tc.IndexOutOfRangeError, match="target 320"):
        model_of("qwen2").loss(case["input_ids"], case["labels"] * 0 + 320)
    with pytest.raises(tc.ShapeError, match="labels have shape"):
        model_of("qwen2").loss(case["input_ids"], case["labels"][:, :3])


# peft 0.21 uses an attribute that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_reads_adapters_and_computes_the_same(family: str, kind: str, tmp_path: Path) -> None:
    ids = case_of(family)["input_ids"]
    model = model_of(family)
    config = tc.LoraConfig(r=2, target_modules=["all-linear"], use_dora=kind == "dora")
    adapter = model.add_adapter(config)
    tc.manual_seed(3)
    for var in adapter.parameters():
        if len(var.shape) == 2:  # a factor; the magnitudes of DoRA stay
            var.set(tc.randn(var.shape) * 0.1)
    adapter.save(tmp_path)
    names = tc.load_file(tmp_path / "adapter_model.safetensors").keys()
    # "all-linear" leaves out the head, as in peft.
    assert {name.split(".lora_")[0] for name in names} == {
        f"base_model.model.model.layers.{layer}.{name}"
        for layer in range(3)
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    }
    expected = model(ids).numpy()
    reloaded = model_of(family)
    # Before the adapter is loaded, the scores differ.
    assert np.abs(reloaded(ids).numpy() - expected).max() > 0.1
    reloaded.load_adapter(tmp_path)
    np.testing.assert_array_equal(reloaded(ids).numpy(), expected)
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / family, dtype=torch.float32
    )
    reference = peft.PeftModel.from_pretrained(reference, tmp_path)
    with torch.no_grad():
        scores = reference(input_ids=torch.from_numpy(ids.numpy())).logits.numpy()
    np.testing.assert_allclose(expected, scores, rtol=1e-4, atol=2e-5)


def test_a_model_without_its_last_layers_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(tc.ArgumentError, match=r"layers=2, .* be saved; load all layers"):
        model_of("llama", layers=2).save_pretrained(tmp_path / "part")
    assert not (tmp_path / "part").exists()
