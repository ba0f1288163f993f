"""`trainable-candle extract`: write the difference of two checkpoints as a LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.adapter_files import add_output, new_file, share
from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Extract as the arguments say, and return the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model", "tuned", "output")
    output = new_file(given["output"], overwrite="overwrite" in given)

    from tqdm import tqdm  # noqa: PLC0415 - after the flags are parsed

    from trainable_candle import families, hub  # noqa: PLC0415
    from trainable_candle.lora import extract  # noqa: PLC0415
    from trainable_candle.settings import TrainConfig  # noqa: PLC0415
    from trainable_candle.settings.checks import existing  # noqa: PLC0415
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415
    from trainable_candle.train.adapters import Adapters, adapter_config  # noqa: PLC0415

    if not hub.is_name(given["tuned"]):
        # Raises an error if there is no such path.
        existing("tuned", Path(given["tuned"]).expanduser())
    rank = given.get("rank", 32)
    config = TrainConfig(
        model=given["model"],
        rank=rank,
        target_modules=given.get("target_modules", ""),
        format=given.get("format"),
        adapter_precision=given.get("precision", "f32"),
    )
    base, tuned = (
        families.load(given["model"], weights, "f32", "cpu", config)
        for weights in (given.get("weights"), given["tuned"])
    )
    if not isinstance(base, LatentTask) or not isinstance(tuned, LatentTask):
        raise ConfigError(f"--model {given['model']} is a language model, expected an image model")
    layers = base.family.layers()
    chosen = adapter_config(config, base.family.targets, base.family.formats).select(
        {name: list(shape) for name, shape in layers.items()}
    )
    with tqdm(total=len(chosen), unit="layer") as bar:

        def progress(done: int, _all: int) -> None:
            bar.update(done - bar.n)

        models = (base.family.model, tuned.family.model)
        adapter = extract(*models, list(chosen), rank, given.get("keep", 1.0), progress)
    metadata = {"ss_output_name": output.stem, "modelspec.title": output.stem}
    base.adapter_file(Adapters({base.family.component: adapter}), output, metadata).write()
    # `rank_pattern` has an entry for each layer that differs.
    print(f"{len(adapter.config.rank_pattern)} of {len(chosen)} layers differ")
    print(f"adapter: {output}")
    return 0


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write the difference of two checkpoints as a LoRA, by an SVD of each layer.",
        "--model NAME --tuned PATH --output FILE",
    )
    group = parser.add_argument_group("options")
    group.add_argument("--model", metavar="NAME", help="the model of both checkpoints")
    group.add_argument("--weights", metavar="PATH", help="the base (default: the built-in one)")
    group.add_argument("--tuned", metavar="PATH", help="the fine-tuned checkpoint")
    group.add_argument("--rank", metavar="N", type=whole(1), help="the highest rank (default: 32)")
    group.add_argument(
        "--keep",
        metavar="X",
        type=share,
        help="fraction of each layer's squared norm to keep (default: 1)",
    )
    group.add_argument(
        "--target-modules", metavar="TEXT", help="layers, comma-separated (default: the model's)"
    )
    group.add_argument("--format", metavar="NAME", help="format of the file (default: the model's)")
    add_output(group)  # --output, --overwrite and --precision
    add_help(group)
    return parser
