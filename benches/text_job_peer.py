"""Time the phases of `gpu_text_job.py`, a job on a language model, in transformers and peft.

python benches/text_job_peer.py FOLDER [--device cpu] [--steps 30] [--rows 4] [--length 2048]
    [--tokens 128]

FOLDER is the folder in which `gpu_text_job.py` has written `weights` and `chats.jsonl`.
transformers' `Trainer` trains peft's LoRA, with f32 factors over a bf16 base, under autocast, with
the fused AdamW. Rows have as many tokens as ours, of conversations one after another. Unlike in our
rows, a token also attends to the earlier conversations of its row: torch then needs no mask, which
would take time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# The imports below are timed, too.
started = time.perf_counter()
import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402

RANK = 16
# The number of conversations that `gpu_text_job.py` holds out, and about the number of tokens of
# each. Here, rows of as many tokens in all are held out.
HELD_OUT, CONVERSATION_TOKENS = 100, 320
PROMPT = "What is a LoRA?"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of token ids, with their labels."""

    def __init__(self, ids: Any, labels: Any) -> None:
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Clock(transformers.TrainerCallback):
    """Collects the seconds of each step; `wait` waits for the device."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait, self.seconds, self.begun = wait, [], 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.wait()
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wait()
        self.seconds.append(time.perf_counter() - self.begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    given = parser.parse_args()
    print(f"\n== transformers: imports {time.perf_counter() - started:.1f} s", flush=True)
    Job(given).run()


class Job:
    """The phases of the job, and what they share."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.on_gpu = given.device != "cpu"
        self.output = given.folder / "peer"

    def wait(self) -> None:
        """Wait for the GPU, if the job runs on one."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def phase(self, title: str, run: Callable[[], Any]) -> Any:
        """Run a phase, print its time and torch's peak of GPU memory, and return its result."""
        self.wait()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        result = run()
        self.wait()
        seconds = time.perf_counter() - begun
        peak = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if self.on_gpu else ""
        print(f"  transformers, {title}: {seconds:.2f} s{peak}", flush=True)
        return result

    def run(self) -> None:
        """Run the phases, one after another."""
        given = self.given
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(given.folder / "weights")
        train, held_out = self.phase("read and tokenize the conversations", self.read)
        base = self.phase("load the model", self.load)
        model = self.phase("attach the adapter", lambda: self.attach(base))
        clock = Clock(self.wait)
        trainer = self.trainer(model, train, held_out, given.steps, [clock])
        self.phase(f"{given.steps} steps and a save", trainer.train)
        later = sorted(clock.seconds[len(clock.seconds) // 2 :])
        median = later[len(later) // 2]
        speed = given.rows * given.length / median / 1e3
        print(f"    first step {clock.seconds[0]:.2f} s, median of the second half "
              f"{median * 1e3:.1f} ms, {speed:.1f} k tokens/s")  # fmt: skip
        self.phase(f"loss of {len(held_out)} held-out rows", trainer.evaluate)
        resumed = self.trainer(model, train, held_out, given.steps + 20, [])
        resume = lambda: resumed.train(resume_from_checkpoint=True)  # noqa: E731
        self.phase("resume, 20 steps more and a save", resume)
        self.phase("save the adapter", lambda: model.save_pretrained(self.output / "adapter"))
        model.eval()
        for number in ("first", "second"):
            self.phase(f"write {given.tokens} tokens, {number}", lambda: self.answer(model))
        merged = self.phase("merge the adapter", model.merge_and_unload)
        self.phase("save the merged model", lambda: merged.save_pretrained(self.output / "merged"))
        attach_pissa = lambda: self.attach(merged, "pissa_niter_16")  # noqa: E731
        self.phase("attach an adapter that starts from PiSSA", attach_pissa)
        shutil.rmtree(self.output)

    def read(self) -> tuple[Rows, Rows]:
        """Return the rows for training and the held-out rows."""
        ids: list[int] = []
        learnt_masks: list[int] = []
        with (self.given.folder / "chats.jsonl").open() as file:
            for line in file:
                encoded = self.tokenizer.apply_chat_template(
                    json.loads(line)["messages"], tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True,
                )  # fmt: skip
                ids += encoded["input_ids"]
                learnt_masks += encoded["assistant_masks"]
        length = self.given.length
        count = len(ids) // length
        rows = torch.tensor(ids[: count * length]).view(count, length)
        is_learnt = torch.tensor(learnt_masks[: count * length]).view(count, length) == 1
        labels = rows.masked_fill(~is_learnt, -100)
        held_out = max(1, min(HELD_OUT * CONVERSATION_TOKENS // length, count // 2))
        return Rows(rows[held_out:], labels[held_out:]), Rows(rows[:held_out], labels[:held_out])

    def load(self) -> Any:
        """Return the model, without an adapter."""
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.given.folder / "weights", dtype=torch.bfloat16, attn_implementation="sdpa"
        ).to(self.given.device)

    def attach(self, base: Any, init: bool | str = True) -> Any:
        """Return the model with a LoRA of f32; `init` is peft's `init_lora_weights`."""
        config = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=LAYERS, task_type="CAUSAL_LM",
            init_lora_weights=init,
        )  # fmt: skip
        model = get_peft_model(base, config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model

    def trainer(
        self, model: Any, train: Rows, held_out: Rows, steps: int, callbacks: list[Any]
    ) -> transformers.Trainer:
        """Return a trainer for this number of steps in all, which saves after the last."""
        settings = transformers.TrainingArguments(
            output_dir=str(self.output), max_steps=steps, learning_rate=2e-4, bf16=True,
            per_device_train_batch_size=self.given.rows, per_device_eval_batch_size=self.given.rows,
            optim="adamw_torch_fused", logging_steps=10, save_steps=steps, report_to=[],
            disable_tqdm=True, use_cpu=not self.on_gpu, dataloader_num_workers=0,
        )  # fmt: skip
        return transformers.Trainer(
            model=model, args=settings, train_dataset=train, eval_dataset=held_out,
            callbacks=callbacks,
        )  # fmt: skip

    @torch.no_grad()
    def answer(self, model: Any) -> None:
        """Answer a prompt with exactly `--tokens` tokens, always the most probable ones."""
        messages = [{"role": "user", "content": PROMPT}]
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(self.given.device)
        tokens = self.given.tokens
        model.generate(**prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


if __name__ == "__main__":
    main()
