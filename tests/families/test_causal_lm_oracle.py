"""Losses of a language model equal those that peft and transformers compute from the same files.

This holds for the base, the base with its adapter, and the merged model.

The tests are skipped where torch, peft or transformers is missing.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.data.chats import TextOptions, load_texts
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text.prepared import PreparedTexts

GOLDEN = Path(__file__).parents[1] / "golden"
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
# Elsewhere in the tests, warnings are errors; here the other libraries may warn.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The folder of the tiny Qwen3; its tokenizer has three special tokens and all single bytes."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder = tmp_path / "weights"
    shutil.copytree(GOLDEN / "llm" / "qwen3", folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate([*special, *letters])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    return folder


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_peft_and_transformers_compute_the_same_losses(
    weights: Path, tmp_path: Path, adapter: str
) -> None:
    examples = [
        {"instruction": f"count to {n}", "output": " ".join(map(str, range(n)))}
        for n in range(2, 9)
    ]
    dataset = tmp_path / "chats.jsonl"
    dataset.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    config = TrainConfig(
        model="causal-lm",
        weights=str(weights),
        dataset=str(dataset),
        output=str(tmp_path / "run"),
        device="cpu",
        precision="f32",
        adapter=adapter,
        sequence_length=128,
        steps=4,
        learning_rate=2e-2,
        optimizer="adamw",
    )
    train_adapter(config, progress=False, report=lambda _: None)
    task = families.load("causal-lm", weights, "f32", "cpu", config)
    # `run/peft` is the folder that the run has written for peft. The effect of its adapter is not
    # scaled (1.0).
    task.load_adapter(tmp_path / "run" / "peft", 1.0)
    options = TextOptions(sequence_length=128)
    data, _ = load_texts(dataset, task.family.tokenizer, options)
    # `print` gets the lines for users.
    ours = PreparedTexts(task.family, data, task.without_adapter, print)
    adapted_loss = ours.validation_loss()
    with task.without_adapter():
        base_loss = ours.validation_loss()

    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)

    def loss(module: torch.nn.Module) -> float:
        """Return the mean cross-entropy of the learnt tokens (those of answers) of all examples."""
        losses = []
        for example in data.examples:
            ids = torch.from_numpy(example.ids)[None]
            # -100 marks the tokens that are not learnt.
            labels = torch.from_numpy(np.where(example.learnt, example.ids, -100))
            with torch.no_grad():
                logits = module(ids).logits[0, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")[
                    labels[1:] != -100
                ]
            )
        return float(torch.cat(losses).mean())

    assert loss(model) == pytest.approx(base_loss, rel=1e-5)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "run" / "peft").eval()
    assert loss(adapted) == pytest.approx(adapted_loss, rel=1e-5)
    assert adapted_loss < 0.9 * base_loss
    merged = tmp_path / "merged"
    task.save_merged(merged)
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert loss(merged_model) == pytest.approx(adapted_loss, rel=1e-4)
    # This library reads the merged file too.
    assert tc.load_file(merged / "model.safetensors")
