"""A language model's losses after quantization-aware training, and with products of 8-bit codes.

python benches/rounded_training.py qat MODEL [--steps 400] [--seeds 3] [--device cuda] [--only qat]
python benches/rounded_training.py w8a8 MODEL [--steps 2000] [--seeds 3] [--device cuda]

MODEL is a folder in transformers' format, such as benches/pretrain.py writes. A LoRA of rank 16 on
all linear layers learns this project's Rust and CUDA sources; every tenth file is held out. The
runs of all seeds go on at the same time, with a process for each seed.

`qat`: the adapter is trained over a bf16 base ("plain"), over a quantized base ("on FORMAT"), with
quantization-aware training ("qat FORMAT", also with learned scales), and over an nf4 base from
LoftQ's initial values ("loftq nf4"). The script reports losses on the held-out files for three
forms of the trained model: the training base with the adapter unmerged ("apart"), weights merged in
f32 ("merged"), and these weights rounded to each format. For LoftQ it reports only "apart". The
formats were chosen before any seed was run.

`w8a8`: the adapter is trained over a bf16 base, and over each 8-bit base twice: with products of
the base's values, and with products of the base's codes. The script reports the mean of the last
tenth of the training losses, and the held-out loss.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.cli.roundings import learned_scales
from trainable_candle.models import CausalLM
from trainable_candle.nn.functional import fake_quantize
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text import TextTask
from trainable_candle.train.logs import read_json_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[1]
FORMATS = ("int8", "fp8", "int4", "nf4")
"""The formats to which the merged weights are rounded."""
BASES = ("int8", "fp8", "nf4")
"""The formats of the quantized bases, and those for which scales are learned."""
TEXT_CHARACTERS = 2000
"""The most characters of a text: so few that its tokens fit into a row."""


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write and return the file of training texts and the file of held-out texts."""
    paths = [*(ROOT / "rust").rglob("*.rs"), *(ROOT / "cuda").rglob("*.cu*")]
    training_texts: list[str] = []
    held_out_texts: list[str] = []
    for number, path in enumerate(sorted(path for path in paths if "target" not in path.parts)):
        text = path.read_text()
        texts = held_out_texts if number % 10 == 9 else training_texts
        texts += [text[at : at + TEXT_CHARACTERS] for at in range(0, len(text), TEXT_CHARACTERS)]
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, texts in zip(files, (training_texts, held_out_texts), strict=True):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def settings(given: argparse.Namespace, output: Path, **more: Any) -> TrainConfig:
    """Return the settings of a run of this seed; `more` can replace the precision, too."""
    return TrainConfig(
        model="causal-lm",
        weights=str(given.model),
        dataset=str(given.work / "train.jsonl"),
        output=str(output),
        device=given.device,
        rank=16,
        steps=given.steps,
        batch_size=given.batch,
        sequence_length=1024,
        learning_rate=5e-4,
        lr_scheduler="cosine",
        warmup_steps=given.steps // 20,
        save_every=0,
        seed=given.seed,
        **{"precision": "bf16", **more},
    )


def train(given: argparse.Namespace, name: str, **more: Any) -> tuple[TextTask, Path, list[float]]:
    """Train, and return the trained task, the adapter's path and the losses of the log."""
    output = given.work / f"{given.seed} {name}"
    run = train_adapter(settings(given, output, **more), progress=False, report=lambda _: None)
    assert isinstance(run.task, TextTask)
    entries = read_json_log(output / "train.jsonl")
    assert run.adapter_path is not None
    return run.task, run.adapter_path, [entry["loss"] for entry in entries if "loss" in entry]


def held_out_loss(given: argparse.Namespace, task: TextTask) -> float:
    """Return the loss of a task's model on the held-out texts."""
    return task.loss_on(str(given.work / "held_out.jsonl"))


def rounded(
    values: Mapping[str, tc.Tensor],
    form: str | None,
    is_rounded: Callable[[str], bool],
    adapter: Path,
) -> dict[str, tc.Tensor]:
    """Return the values, with those whose names satisfy `is_rounded` rounded to the format `form`.

    If the format is None, nothing is rounded. If the run of `adapter` learned factors on the scales
    of this format, the scales are multiplied by them.
    """
    if form is None:
        return dict(values)
    factors = learned_scales(adapter, form)
    return {
        key: fake_quantize(value, form, factors.get(key.removesuffix(".weight")))
        if is_rounded(key)
        else value
        for key, value in values.items()
    }


def merged_losses(given: argparse.Namespace, adapter: Path) -> dict[str, float]:
    """Return the held-out losses of weights merged in f32, and of these rounded to each format."""
    with tempfile.TemporaryDirectory() as folder:
        # The run of these settings never starts, so its output folder is not made.
        config = settings(given, Path(folder) / "none", precision="f32")
        task = families.load("causal-lm", given.model, "f32", "cpu", config)
        task.load_adapter(adapter, 1.0)
        merged = Path(folder) / "merged"
        task.save_merged(merged)
        weights = CausalLM.from_pretrained(merged, dtype="f32").named_tensors()
        losses = {}
        for form in (None, *FORMATS):
            # The linear layers of the blocks have names with `_proj`; only they are rounded.
            served = rounded(weights, form, lambda key: key.endswith("_proj.weight"), adapter)
            tc.save_file(served, merged / "model.safetensors")
            served_task = families.load("causal-lm", merged, "f32", given.device, config)
            assert isinstance(served_task, TextTask)
            losses[form or "merged"] = held_out_loss(given, served_task)
        return losses


def qat(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train in each way; return the held-out losses, by way and by form of the trained model."""
    # The settings that distinguish each way, by the name of the way.
    cases: dict[str, dict[str, Any]] = {"plain": {}}
    cases |= {f"on {base}": {"base_precision": base} for base in BASES}
    cases |= {f"qat {form}": {"qat": form} for form in FORMATS}
    learned = {"qat_learned_scales": True}
    cases |= {f"qat {base}, learned scales": {"qat": base, **learned} for base in BASES}
    cases["loftq nf4"] = {"base_precision": "nf4", "init": "loftq"}
    found = {}
    for name, more in cases.items():
        # `report` compares the other ways with "plain".
        if name != "plain" and given.only not in name:
            continue
        task, adapter, _ = train(given, name, **more)
        apart = held_out_loss(given, task)
        # LoftQ's adapter starts as the rounding error of its base, so it fits only that base.
        merged = {} if name.startswith("loftq") else merged_losses(given, adapter)
        found[name] = {"apart": apart, **merged}
    return found


def w8a8(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train over each base with each kind of products; return final losses by name of the run."""
    found = {}
    # A base in "same" is not quantized, so it has no codes.
    for base in ("same", "int8", "fp8"):
        for codes in (False,) if base == "same" else (False, True):
            name = f"{base}, {'codes' if codes else 'values'}"
            task, _, losses = train(given, name, base_precision=base, w8a8=codes)
            last = statistics.mean(losses[-max(1, given.steps // 10) :])
            found[name] = {"training": last, "held-out": held_out_loss(given, task)}
    return found


def report(results: list[dict[str, dict[str, float]]]) -> None:
    """Print means over seeds with standard errors, and gaps to the plain merged model's loss.

    Args:
        results: for each seed, the losses by way of training (a row) and by column. For `qat`, a
            column is a form of the trained model; for `w8a8`, it is "training" or "held-out".
    """
    root_count = math.sqrt(len(results))
    for name, columns in results[0].items():
        cells = []
        for column in columns:
            values = [result[name][column] for result in results]
            error = statistics.stdev(values) / root_count if len(values) > 1 else math.nan
            cell = f"{column} {statistics.mean(values):.4f} +- {error:.4f}"
            if "plain" in results[0]:
                gaps = [result[name][column] - result["plain"]["merged"] for result in results]
                error = statistics.stdev(gaps) / root_count if len(gaps) > 1 else math.nan
                cell += f" (gap {statistics.mean(gaps):+.4f} +- {error:.4f})"
            cells.append(cell)
        print(f"{name:<24}", "   ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("qat", "w8a8"), help="what to compare")
    parser.add_argument("model", type=Path, help="a folder in transformers' format")
    parser.add_argument("--steps", type=int, help="default: 400 for qat, 2000 for w8a8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="rows of 1,024 tokens in a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", default="", help='qat: run "plain", and the ways whose name contains this'
    )
    # For the process of one seed: the seed, and the folder that all processes share.
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.steps = given.steps or {"qat": 400, "w8a8": 2000}[given.what]
    if given.seed is not None:
        found = {"qat": qat, "w8a8": w8a8}[given.what](given)
        (given.work / f"{given.seed}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as work:
        for file in write_texts(Path(work)):
            print(f"{file.name}: {sum(1 for _ in file.open())} texts")
        more = ["--steps", str(given.steps), "--work", work]
        running = [
            subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *more, "--seed", str(seed)])
            for seed in range(given.seeds)
        ]
        statuses = [process.wait() for process in running]
        if any(statuses):
            sys.exit("the process of a seed failed")
        report([json.loads(Path(work, f"{seed}.json").read_text()) for seed in range(given.seeds)])


if __name__ == "__main__":
    main()
