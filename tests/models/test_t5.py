"""T5's encoder against transformers (tests/golden/t5)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.models import T5Encoder

from .conftest import assert_near, relative_error

GOLDEN = Path(__file__).parents[1] / "golden" / "t5"
# The forms of the feed-forward networks: T5 1.1 has gated ones, the first T5 has ReLUs.
FORMS = ("gated", "relu")
# The first block's table of relative position biases.
TABLE = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def case_of(form: str) -> dict[str, tc.Tensor]:
    return tc.load_file(decompressed(GOLDEN / f"{form}.safetensors"))


def weights_of(form: str) -> dict[str, tc.Tensor]:
    return tc.load_file(GOLDEN / form / "model.safetensors")


def assert_same(found: T5Encoder, expected: T5Encoder) -> None:
    tensors = expected.named_tensors()
    assert found.named_tensors().keys() == tensors.keys()
    for name, tensor in found.named_tensors().items():
        np.testing.assert_array_equal(tensor.to("f32").numpy(), tensors[name].to("f32").numpy())
    ids = case_of("gated")["input_ids"]
    np.testing.assert_array_equal(
        found(ids).to("f32").numpy(), expected(ids).to("f32").numpy(), strict=True
    )


@pytest.mark.parametrize("form", FORMS)
def test_states_equal_those_of_transformers(form: str, device: str) -> None:
    case = {name: tensor.to(device) for name, tensor in case_of(form).items()}
    model = T5Encoder.from_pretrained(GOLDEN / form, dtype="f32", device=device)
    ids, mask = case["input_ids"], case["attention_mask"]
    assert_near(model(ids), case["output"].to("cpu"))
    # A text with distances beyond 128, from which all distances have the same position bias.
    assert_near(model(case["long_ids"]), case["long"].to("cpu"))
    assert_near(model(ids, mask), case["masked"].to("cpu"))
    assert_near(model(ids, attention_mask=mask * 0), case["nothing_seen"].to("cpu"))
    # Ids and masks may be u32. A mask of ones is the same as none.
    np.testing.assert_array_equal(
        model(ids.to("u32"), (mask * 0 + 1).to("u32")).to("cpu").numpy(),
        model(ids).to("cpu").numpy(),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "within"), [("bf16", 0.03), ("f16", 0.004)])
def test_states_in_half_precision_are_near_those_in_f32(
    form: str, dtype: str, within: float, device: str
) -> None:
    case = case_of(form)
    model = T5Encoder.from_pretrained(GOLDEN / form, dtype=dtype, device=device)
    states = model(case["input_ids"].to(device), case["attention_mask"].to(device))
    assert (states.dtype, model.dtype) == (dtype, dtype)
    assert relative_error(states, case["masked"]) < within


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write an encoder whose residual stream, gated products and `wo` outputs exceed f16's range.

    make_transformers.py multiplies the same weights by 8192 for its results `large`.
    """
    tensors = {
        name: tensor.to("f32") * (8192 if name.endswith(".wi_1.weight") else 1)
        for name, tensor in weights_of("gated").items()
    }
    tc.save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "gated" / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("dtype", "within"), [("f32", 1e-5), ("bf16", 0.03), ("f16", 0.004)])
def test_large_values_do_not_overflow(large: Path, dtype: str, within: float, device: str) -> None:
    case = case_of("gated")
    model = T5Encoder.from_pretrained(large, dtype=dtype, device=device)
    states = model(case["input_ids"].to(device))
    assert np.isfinite(states.to("cpu").to("f32").numpy()).all()
    assert relative_error(states, case["large"]) < within


def test_gradients_with_large_values_are_near_in_f16_and_equal_with_checkpointing(
    large: Path,
) -> None:
    ids = case_of("gated")["input_ids"]

    def gradients(dtype: str, policy: str | None = None) -> list[np.ndarray]:
        model = T5Encoder.from_pretrained(large, dtype=dtype)
        adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules=["q", "wi_0", "wo"]))
        tc.manual_seed(0)
        for var in adapter.parameters():
            var.set(tc.randn(var.shape) * 0.1)
        if policy is not None:
            model.enable_gradient_checkpointing(policy)
        # The loss is a sum: the gradients of a mean would be below the range of f16.
        loss = (model(ids).to("f32") ** 2).sum()
        grads = tc.grad(loss, adapter.parameters())
        return [grad.to("f32").numpy() for grad in grads if grad is not None]

    exact = gradients("f32")
    assert len(exact) == 3 * 3 * 2  # blocks, targets, factors of LoRA
    for policy in ("full", "selective"):
        for found, expected in zip(gradients("f32", policy), exact, strict=True):
            np.testing.assert_array_equal(found, expected)
    for found, expected in zip(gradients("f16"), exact, strict=True):
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_folder_equals_that_of_transformers(form: str, tmp_path: Path) -> None:
    model = T5Encoder.from_pretrained(GOLDEN / form)
    assert model.dtype == "bf16"
    model.save_pretrained(tmp_path)
    saved, expected = tc.load_file(tmp_path / "model.safetensors"), weights_of(form)
    assert saved.keys() == expected.keys() == model.named_tensors().keys()
    for name, tensor in expected.items():
        assert saved[name].dtype == "bf16"
        np.testing.assert_array_equal(saved[name].to("f32").numpy(), tensor.to("f32").numpy())
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, GOLDEN / form)
    )
    assert ours.items() <= theirs.items()
    again = tc.models.load(tmp_path)
    assert isinstance(again, T5Encoder)
    assert_same(again, model)


@pytest.mark.parametrize("names", [("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")])
def test_the_embedding_is_read_under_another_name_or_both(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    tensors = weights_of("gated")
    embedding = tensors.pop("shared.weight")
    tensors |= {f"{name}.weight": embedding for name in names}
    # A file of the whole model (T5ForConditionalGeneration) also has the tensors of the decoder.
    tensors["decoder.final_layer_norm.weight"] = tensors["lm_head.weight"] = tc.zeros(3)
    config = json.loads((GOLDEN / "gated" / "config.json").read_text())
    config["architectures"] = ["T5ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tc.save_file(tensors, tmp_path / "model.safetensors")
    assert_same(T5Encoder.from_pretrained(tmp_path), T5Encoder.from_pretrained(GOLDEN / "gated"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "prefix", ["", "text_encoders.t5xxl.transformer."], ids=["bare", "checkpoint"]
)
def test_sizes_are_deduced_from_a_single_file_and_its_names_are_kept(
    form: str, prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "t5.safetensors"
    tensors = {f"{prefix}{name}": tensor for name, tensor in weights_of(form).items()}
    if prefix:
        # The checkpoint also has another text encoder.
        tensors["text_encoders.clip_l.transformer.x"] = tc.zeros(2)
    tc.save_file(tensors, path)
    model = T5Encoder.from_pretrained(path)
    assert_same(model, T5Encoder.from_pretrained(GOLDEN / form))
    assert [part.class_name for part in tc.inspect(path).parts.values()] == ["T5Encoder"]
    copy = tmp_path / "copy.safetensors"
    # `text_encoder_2` is FLUX.1's name of the T5 encoder.
    tc.models.save_checkpoint(copy, {"text_encoder_2": model}, base=path)
    assert tc.load_file(copy).keys() == tensors.keys()


def test_files_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t5.safetensors"
    tensors = weights_of("gated")
    tc.save_file({TABLE: tensors[TABLE]}, path)
    with pytest.raises(tc.ConfigError, match=r"do not determine the size of shared"):
        T5Encoder.from_pretrained(path)
    # umT5 has such a table in each block, T5 only in the first block.
    tc.save_file({**tensors, TABLE.replace("0", "1", 1): tensors[TABLE]}, path)
    with pytest.raises(tc.ConfigError, match=r"unexpected encoder\.block\.1\..*attention_bias"):
        T5Encoder.from_pretrained(path)
    tc.save_file({"x": tc.zeros(1)}, path)
    with pytest.raises(tc.WeightsFormatError, match="there is no T5EncoderModel or T5For"):
        T5Encoder.from_pretrained(path)


def test_wrong_inputs_are_reported() -> None:
    model = T5Encoder.from_pretrained(GOLDEN / "gated")
    ids = tc.zeros((1, 3), dtype="i64")
    with pytest.raises(tc.ShapeError, match=r"shape \[3\], expected \(B, L\)"):
        model(ids.reshape(3))
    with pytest.raises(tc.ShapeError, match=r"shape \[1, 0\], expected \(B, L\) with L 1 or more"):
        model(tc.zeros((1, 0), dtype="i64"))
    with pytest.raises(
        tc.ShapeError, match=r"attention_mask has shape \[1, 2\], expected \[1, 3\]"
    ):
        model(ids, tc.zeros((1, 2), dtype="i64"))
    # The vocabulary has 150 tokens.
    with pytest.raises(tc.IndexOutOfRangeError, match="150"):
        model(ids + 150)
    # A mask has only zeros and ones.
    with pytest.raises(tc.IndexOutOfRangeError, match="2"):
        model(ids, ids + 2)
    with pytest.raises(TypeError, match="attention_mask is a value of type list"):
        model(ids, [1, 1, 1])  # type: ignore[arg-type]
