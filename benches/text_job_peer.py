"""The phases of `gpu_text_job.py` in transformers and peft.

python benches/text_job_peer.py FOLDER [--device cpu] [--steps 30] [--rows 4] [--length 2048]

FOLDER is the folder of `gpu_text_job.py`. The training is that of transformers' `Trainer` over
peft's LoRA with f32 factors and a bf16 base, under autocast, with the fused AdamW. Conversations
follow one another in rows of the same length as ours. Here a token also attends to the earlier
conversations of its row, so torch needs no mask, which would take time.
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

started = time.perf_counter()
import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402

RANK = 16
HELD_OUT = 100
PROMPT = "What is a LoRA?"
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of tokens with their labels."""

    def __init__(self, ids: Any, labels: Any) -> None:
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Clock(transformers.TrainerCallback):
    """Collects the seconds of each step."""

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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    print(f"\n== transformers: imports {time.perf_counter() - started:.1f} s", flush=True)
    Job(given).run()


class Job:
    """The phases, one after another."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.on_gpu = given.device != "cpu"
        self.output = given.folder / "peer"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def phase(self, title: str, run: Callable[[], Any]) -> Any:
        """Run a phase, and print its time and the peak of GPU memory."""
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
        given = self.given
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(given.folder / "weights")
        train, held_out = self.phase("read and tokenize the conversations", self.read)
        base = self.phase("load the model", self.load)
        model = self.phase("attach the adapter", lambda: self.attach(base))
        clock = Clock(self.wait)
        trainer = self.trainer(model, train, held_out, given.steps, [clock])
        self.phase(f"{given.steps} steps and a save", trainer.train)
        second = sorted(clock.seconds[len(clock.seconds) // 2 :])
        median = second[len(second) // 2]
        tokens = given.rows * given.length / median / 1e3
        print(f"    first step {clock.seconds[0]:.2f} s, median of the second half "
              f"{median * 1e3:.1f} ms, {tokens:.1f} k tokens/s")  # fmt: skip
        self.phase(f"loss of {len(held_out)} held-out rows", trainer.evaluate)
        again = self.trainer(model, train, held_out, given.steps + 20, [])
        resume = lambda: again.train(resume_from_checkpoint=True)  # noqa: E731
        self.phase("resume, 20 steps more and a save", resume)
        self.phase("save the adapter", lambda: model.save_pretrained(self.output / "adapter"))
        model.eval()
        for number in ("first", "second"):
            self.phase(f"write {given.tokens} tokens, {number}", lambda: self.write(model))
        merged = self.phase("merge the adapter", model.merge_and_unload)
        self.phase("save the merged model", lambda: merged.save_pretrained(self.output / "merged"))
        start = lambda: self.attach(merged, "pissa_niter_16")  # noqa: E731
        self.phase("attach an adapter that starts from PiSSA", start)
        shutil.rmtree(self.output)

    def read(self) -> tuple[Rows, Rows]:
        ids: list[int] = []
        learnt: list[int] = []
        with (self.given.folder / "chats.jsonl").open() as file:
            for line in file:
                given = self.tokenizer.apply_chat_template(
                    json.loads(line)["messages"], tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True,
                )  # fmt: skip
                ids += given["input_ids"]
                learnt += given["assistant_masks"]
        length = self.given.length
        count = len(ids) // length
        rows = torch.tensor(ids[: count * length]).view(count, length)
        kept = torch.tensor(learnt[: count * length]).view(count, length) == 1
        labels = rows.masked_fill(~kept, -100)
        held_out = max(1, min(HELD_OUT * 320 // length, count // 2))
        return Rows(rows[held_out:], labels[held_out:]), Rows(rows[:held_out], labels[:held_out])

    def load(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.given.folder / "weights", dtype=torch.bfloat16, attn_implementation="sdpa"
        ).to(self.given.device)

    def attach(self, base: Any, init: bool | str = True) -> Any:
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
    def write(self, model: Any) -> None:
        messages = [{"role": "user", "content": PROMPT}]
        asked = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(self.given.device)
        tokens = self.given.tokens
        model.generate(**asked, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


if __name__ == "__main__":
    main()
