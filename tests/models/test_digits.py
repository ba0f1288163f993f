"""The digits transformer from Python: names, shapes, adapters, checkpointing, files, errors."""

from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import DigitsTransformer
from trainable_candle.nn.functional import mse_loss


def inputs(batch: int = 3) -> tuple[tc.Tensor, tc.Tensor, tc.Tensor]:
    """Noisy images, their timesteps and their labels."""
    tc.manual_seed(1)
    sample = tc.randn((batch, 1, 8, 8))
    return sample, tc.rand((batch,)) * 1000.0, tc.tensor(np.arange(batch) % 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a saved model with random weights.

    In a new model, gates that are zero multiply the results of the blocks, so the blocks have no
    effect. Random changes of all parameters make the gates non-zero.
    """
    tc.manual_seed(0)
    model = DigitsTransformer(num_layers=2)
    for var in model.named_parameters().values():
        var.set(var + tc.randn(var.shape) * 0.05)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def frozen(folder: Path) -> DigitsTransformer:
    """The saved model, loaded; without an adapter, it has no trainable parameters."""
    return DigitsTransformer.from_pretrained(folder)


def test_a_new_model_is_trainable_and_a_loaded_one_is_frozen(frozen: DigitsTransformer) -> None:
    fresh = DigitsTransformer(num_layers=2)
    assert fresh.named_parameters().keys() == frozen.named_tensors().keys()
    assert frozen.named_parameters() == {}
    velocity = fresh(*inputs())
    assert velocity.shape == (3, 1, 8, 8)
    assert velocity.requires_grad
    assert not frozen(*inputs()).requires_grad


def test_load_takes_the_class_from_the_configuration(folder: Path) -> None:
    model = tc.models.load(folder, dtype="bf16")
    assert type(model) is DigitsTransformer
    assert model.dtype == "bf16"


def test_training_the_adapter_leaves_the_base_unchanged(frozen: DigitsTransformer) -> None:
    arguments = inputs()
    base = frozen(*arguments).numpy()
    adapter = frozen.add_adapter(
        tc.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "ff.net.2"])
    )
    np.testing.assert_array_equal(frozen(*arguments).numpy(), base)
    parameters = adapter.named_parameters()
    assert "transformer_blocks.1.ff.net.2.lora_B.weight" in parameters
    # 2 blocks, each with 2 target layers, each with the factors A and B.
    assert len(parameters) == 2 * 2 * 2
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-2)
    target = tc.zeros((3, 1, 8, 8))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = mse_loss(frozen(*arguments), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    adapter.set_enabled(False)
    np.testing.assert_array_equal(frozen(*arguments).numpy(), base)
    adapter.set_enabled(True)
    assert not np.array_equal(frozen(*arguments).numpy(), base)
    frozen.remove_adapter()
    np.testing.assert_array_equal(frozen(*arguments).numpy(), base)


def test_a_loaded_adapter_has_the_same_effect_also_merged_and_takes_a_scale(
    frozen: DigitsTransformer, tmp_path: Path
) -> None:
    arguments = inputs()
    base = frozen(*arguments).numpy()
    config = tc.LoraConfig(
        r=4, lora_alpha=2, rank_pattern={"to_v": 2}, target_modules=["to_q", "to_v"]
    )
    adapter = frozen.add_adapter(config)
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.3)
    adapted = frozen(*arguments).numpy()
    adapter.save(tmp_path / "adapter.safetensors", metadata={"note": "test"})
    frozen.remove_adapter()

    frozen.load_adapter(tmp_path / "adapter.safetensors")
    np.testing.assert_array_equal(frozen(*arguments).numpy(), adapted)
    frozen.merge_adapter()
    np.testing.assert_allclose(frozen(*arguments).numpy(), adapted, rtol=1e-4, atol=1e-5)
    frozen.unmerge_adapter()
    np.testing.assert_array_equal(frozen(*arguments).numpy(), adapted)
    frozen.remove_adapter()
    # With this scale, the adapter has almost no effect.
    frozen.load_adapter(tmp_path / "adapter.safetensors", scale=1e-30)
    np.testing.assert_allclose(frozen(*arguments).numpy(), base, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointed_gradients_are_the_same_bit_for_bit(
    frozen: DigitsTransformer, policy: str
) -> None:
    adapter = frozen.add_adapter(tc.LoraConfig(r=2))
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.1)

    def gradients() -> list[np.ndarray]:
        loss = frozen(*inputs()).mean()
        return [g.numpy() for g in tc.grad(loss, adapter.parameters()) if g is not None]

    plain = gradients()
    frozen.enable_gradient_checkpointing(policy)
    for found, expected in zip(gradients(), plain, strict=True):
        np.testing.assert_array_equal(found, expected)
    frozen.disable_gradient_checkpointing()


def test_full_checkpointing_saves_fewer_bytes(frozen: DigitsTransformer) -> None:
    frozen.add_adapter(tc.LoraConfig(r=2))
    arguments = inputs(16)

    def saved_bytes() -> int:
        before = tc.memory.saved_bytes()
        loss = frozen(*arguments).mean()
        saved = tc.memory.saved_bytes() - before
        del loss
        return saved

    without_checkpoints = saved_bytes()
    frozen.enable_gradient_checkpointing("full")
    assert saved_bytes() < 0.5 * without_checkpoints


def test_wrong_arguments_and_files_are_reported(
    frozen: DigitsTransformer, folder: Path, tmp_path: Path
) -> None:
    sample, timestep, labels = inputs()
    with pytest.raises(
        tc.ShapeError, match=r"sample has shape \[3, 8, 8\], expected \(B, 1, 8, 8\)"
    ):
        frozen(sample.squeeze(1), timestep, labels)
    # The labels 0, 1 and 2 become 8, 9 and 10; the model has the classes 0 to 9.
    with pytest.raises(tc.IndexOutOfRangeError, match="embedding"):
        frozen(sample, timestep, labels + 8)
    with pytest.raises(tc.ConfigError, match="match no layer"):
        frozen.add_adapter(tc.LoraConfig(target_modules=["to_x"]))
    with pytest.raises(tc.ConfigError, match="rank"):
        tc.LoraConfig(r=0)
    with pytest.raises(tc.ArgumentError, match="the model has no adapter"):
        frozen.merge_adapter()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tc.models.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(tc.WeightsFormatError, match=r"no config\.json"):
        tc.models.load(tmp_path / "empty")
    (folder / "config.json").write_text('{"_class_name": "UNet"}')
    with pytest.raises(tc.ConfigError, match='"UNet", which is not supported'):
        tc.models.load(folder)


def test_a_second_adapter_is_rejected_until_the_first_is_removed(frozen: DigitsTransformer) -> None:
    frozen.add_adapter(tc.LoraConfig(r=2))
    with pytest.raises(tc.ConfigError, match="has an adapter already"):
        frozen.add_adapter(tc.LoraConfig(r=2))
    frozen.remove_adapter()
    frozen.add_adapter(tc.LoraConfig(r=2))


def test_the_adapter_of_another_model_is_rejected(
    frozen: DigitsTransformer, tmp_path: Path
) -> None:
    other = DigitsTransformer(num_layers=4)
    other.add_adapter(tc.LoraConfig(r=2)).save(tmp_path / "adapter.safetensors")
    with pytest.raises(tc.WeightsFormatError, match="the adapter is for another model"):
        frozen.load_adapter(tmp_path / "adapter.safetensors")
    # The failed call left no adapter.
    frozen.add_adapter(tc.LoraConfig(r=2))
