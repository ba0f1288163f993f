"""vLLM's loader reads exported adapters. The tests need vllm 0.33 or newer, but no GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.models import CausalLM

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = Path(__file__).parents[1] / "golden" / "llm"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = ["llama", "qwen2", "qwen3"]


def make_adapter(weights: Path, folder: Path, **config: Any) -> dict[str, np.ndarray]:
    """Save an adapter with random values in the format of peft.

    Return the change of each weight that the adapter changes, by layer name.
    """
    model = CausalLM.from_pretrained(weights, dtype="f32")
    before = {name: tensor.numpy() for name, tensor in model.named_tensors().items()}
    # Rank and alpha differ, so that a loader that ignored the scale alpha / r would be noticed.
    settings = {"r": 3, "lora_alpha": 7.0, "target_modules": LAYERS} | config
    adapter = model.add_adapter(tc.LoraConfig(**settings))
    tc.manual_seed(1)
    for var in adapter.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.2)
    adapter.save(folder, format="peft")
    model.merge_adapter()
    after = {name: tensor.numpy() for name, tensor in model.named_tensors().items()}
    changes = {name.removesuffix(".weight"): after[name] - before[name] for name in before}
    return {name: change for name, change in changes.items() if change.any()}


def read(folder: Path, max_rank: int) -> Any:
    """Return the adapter of a folder as the server of vLLM loads it."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=4096)
    helper.validate_legal(LoRAConfig(max_lora_rank=max_rank))
    return LoRAModel.from_local_checkpoint(
        str(folder), set(LAYERS), helper, lora_model_id=1, device="cpu"
    )


def exported(weights: Path, adapter: Path, output: Path) -> Path:
    """Export an adapter for vLLM; return the output folder."""
    given = ["--weights", str(weights), "--adapter", str(adapter), "--output", str(output)]
    assert main(["export", "--for", "vllm", *given]) == 0
    return output


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop vLLM from pinning memory: pinning needs a CUDA driver."""
    monkeypatch.setattr("vllm.lora.lora_model.PIN_MEMORY", False)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "config",
    [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}],
    ids=["lora", "rslora", "rank pattern"],
)
def test_vllm_reads_the_change_of_each_weight(
    model: str, config: dict[str, Any], tmp_path: Path
) -> None:
    weights = GOLDEN / model
    expected = make_adapter(weights, tmp_path / "adapter", **config)
    output = exported(weights, tmp_path / "adapter", tmp_path / "out")
    # vLLM accepts only certain maximal ranks. 8 is one of them, and above the adapter's rank, 3.
    found = read(output, max_rank=8).loras
    assert found.keys() == expected.keys()
    for name, layer in found.items():
        change = (layer.lora_b @ layer.lora_a).float().numpy() * layer.scaling
        np.testing.assert_allclose(change, expected[name], atol=1e-6, err_msg=name)


def test_vllm_rejects_dora(tmp_path: Path) -> None:
    make_adapter(GOLDEN / "llama", tmp_path / "adapter", use_dora=True)
    with pytest.raises(ValueError, match="does not yet support DoRA"):
        read(tmp_path / "adapter", max_rank=8)
