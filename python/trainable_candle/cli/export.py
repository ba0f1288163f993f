"""`trainable-candle export`: write a language model's adapter for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.cli.options import Parser, add_help
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.tasks.text import TextTask

MERGED: Final = "merged"


def run(arguments: Sequence[str], program: str) -> int:
    """Export as the arguments say, and return the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "adapter", "for", "output")

    # Expensive imports, after the flags are parsed.
    from trainable_candle import export, families  # noqa: PLC0415
    from trainable_candle.settings.checks import existing_adapter  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    reader, output = given["for"], Path(given["output"]).expanduser()
    known = [*export.WRITERS, MERGED]
    if reader not in known:
        raise ConfigError(f"--for is {reader}, expected one of {', '.join(known)}")
    if "dataset" in given and reader != MERGED:
        raise ConfigError("--dataset has no effect without --for merged; leave it out")
    if "gguf" in given and reader != MERGED:
        raise ConfigError("--gguf has no effect without --for merged; leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output is {output}, which exists; expected a new or an empty folder")
    model = given.get("model", "causal-lm")
    adapter_path = existing_adapter("adapter", Path(given["adapter"]).expanduser())
    task = families.load(model, given.get("weights"), dtype=None, device="cpu")
    if not isinstance(task, TextTask):
        raise ConfigError(
            f"--model {model} draws images, and export is for language models; for adapters of "
            "image models, use train-lora --format or trainable-candle merge"
        )
    family = task.family
    adapter = export.read_adapter(adapter_path, model, family.weights)
    if reader == MERGED:
        # Compute this loss before any file is written, because `loss_on` checks the data set.
        base_loss = task.loss_on(given["dataset"]) if "dataset" in given else None
        output.mkdir(parents=True, exist_ok=True)
        merged = output  # The folder or, with --gguf, the file of the merged model.
        if "gguf" in given:
            merged = output / "model.gguf"
            export.write_model(family.weights, adapter, merged, given["gguf"])
        else:
            # The result says how much of the adapter's change remains after rounding.
            print(export.write_merged(family.weights, adapter, output))
        if base_loss is not None:
            _compare(task, adapter_path, merged, given["dataset"], base_loss)
        print(f"merged model: {merged}")
        return 0
    export.require_accepted(adapter, reader)
    output.mkdir(parents=True, exist_ok=True)
    base_name = given.get("base", str(given.get("weights", family.weights)))
    commands = export.WRITERS[reader](adapter, family, base_name, output)
    print(f"for {export.READERS[reader]}: {output}")
    for command in commands:
        print(f"  {command}")
    return 0


def _compare(task: TextTask, adapter: Path, merged: Path, dataset: str, base_loss: float) -> None:
    """Print the losses of the base, of the base with the adapter, and of the merged model.

    The adapter stays in the model of `task`.
    """
    from trainable_candle import families  # noqa: PLC0415 - after the flags are parsed

    task.load_adapter(adapter, scale=1.0)
    adapted_loss = task.loss_on(dataset)
    merged_task = families.load(task.family.name, merged, dtype=None, device="cpu")
    merged_loss = merged_task.loss_on(dataset)
    print(
        f"loss: base {base_loss:.4f}, with the adapter {adapted_loss:.4f}, merged {merged_loss:.4f}"
    )


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write a language model's adapter in the format of another program: peft (transformers),\n"
        "vllm, gguf (llama.cpp), mlx or ollama; or write the merged model.",
        "--adapter PATH --for NAME --output DIR [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument("--model", metavar="NAME", help="which model (default: causal-lm)")
    group.add_argument(
        "--weights", metavar="DIR", help="the base model (default: the built-in one)"
    )
    group.add_argument("--adapter", metavar="PATH", help="the adapter that train-lora wrote")
    group.add_argument("--for", metavar="NAME", help="peft, vllm, gguf, mlx, ollama or merged")
    group.add_argument("--output", metavar="DIR", help="a new or an empty folder")
    group.add_argument(
        "--base",
        metavar="NAME",
        help="the base model's name, to write into the files (default: --weights)",
    )
    group.add_argument(
        "--dataset", metavar="PATH", help="with --for merged: texts to compare losses on"
    )
    group.add_argument(
        "--gguf",
        metavar="TYPE",
        help="with --for merged: write one GGUF file of f32, f16, bf16, q8_0 or q4_0 weights",
    )
    add_help(group)
    return parser
