"""Train the built-in language model from random weights on tasks about made-up words.

The model's tokens are bytes. It is trained only on short chats, in which the user names a task and
a word, and the assistant answers. The package's demo teaches this model a new task, which is not
among these tasks. About one word in eight is held out for evaluation. The script takes some minutes
on two cores. It writes the files of the built-in model `causal-lm`:

    python examples/02_train_tiny_llama.py
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import trainable_candle as tc
from trainable_candle.data.chats import Packed, Tokens, tokens_of
from trainable_candle.data.chats.forms import Chat
from trainable_candle.data.chats.packing import joined
from trainable_candle.demo import words
from trainable_candle.draws import generator
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.train import ProgressBar, Trainer

STEPS = 3000
EXAMPLES = 96
"""The number of chats in a batch; together they have about 2000 tokens."""
SEED = 0
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
"""The special tokens; their ids follow those of the 256 bytes."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,  # 256 bytes, three special tokens and one unused id
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,  # <|end|>
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("llama-tiny"), help="folder for the files"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()

    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    write_tokenizer(output)
    (output / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")

    tokenizer = ChatTokenizer.from_pretrained(output)
    tc.manual_seed(SEED)
    model = tc.models.CausalLM(output / "config.json")

    def loss(given: dict[str, tc.Tensor]) -> tc.Tensor:
        names = ("input_ids", "targets", "positions", "cu_seqlens")
        return model.packed_loss(*(given[name] for name in names)) * given["scale"]

    parameters = model.named_parameters()
    optimizer = tc.optim.AdamW(list(parameters.values()), lr=3e-3, weight_decay=0.01)
    trainer = Trainer(
        loss,
        parameters,
        optimizer,
        Chats(tokenizer),
        inputs=tensors,
        steps=arguments.steps,
        scheduler=tc.optim.lr_scheduler.cosine(
            optimizer, total_steps=arguments.steps, warmup_steps=100
        ),
        max_grad_norm=1.0,
        callbacks=[ProgressBar()],
    )
    trainer.train()

    # The model was trained in f32. In bf16 the file is half as large, and the model gives the same
    # answers.
    in_f32 = output / "f32"
    model.save_pretrained(in_f32)
    tc.models.CausalLM.from_pretrained(in_f32, dtype="bf16").save_pretrained(output)
    shutil.rmtree(in_f32)
    print(f"{sum(p.numel() for p in parameters.values())} parameters -> {output}")


class Chats:
    """An endless sequence of batches of newly drawn chats.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def batch(self, index: int) -> Packed:
        """Return batch number `index`, from 0."""
        rng = generator(SEED, "items", index)  # its own stream of numbers for each batch
        tasks = list(words.TASKS)
        chosen = rng.integers(len(tasks), size=EXAMPLES)
        drawn = words.words(rng, EXAMPLES)  # never words that are held out
        examples = [self._tokens(tasks[t], word) for t, word in zip(chosen, drawn, strict=True)]
        return joined([examples])  # one row

    def _tokens(self, task: str, word: str) -> Tokens:
        return tokens_of(Chat(words.chat(task, word)), self._tokenizer)


def tensors(batch: Packed) -> dict[str, tc.Tensor]:
    """Return the inputs of `loss` in `main`: a batch's arrays, and 1 / its number of targets."""
    names = ("input_ids", "targets", "positions", "cu_seqlens")
    given = {name: tc.tensor(getattr(batch, name)) for name in names}
    return given | {"scale": tc.tensor(np.float32(1.0 / batch.count))}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 byte tokens and three special tokens, with the chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []  # none, so every byte stays a token of its own
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
