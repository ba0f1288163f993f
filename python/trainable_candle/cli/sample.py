"""`trainable-candle sample`: draw images, with an adapter or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainable_candle.cli.adapter_files import new_file
from trainable_candle.cli.loading import add_model, load_model
from trainable_candle.cli.options import Parser, add_help, guidance, whole
from trainable_candle.errors import ConfigError
from trainable_candle.placement import AUTO, choose
from trainable_candle.settings.previews import SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Draw as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model", "prompt", "output")

    # Expensive imports, after the flags are parsed.
    from trainable_candle import plot  # noqa: PLC0415
    from trainable_candle.settings.checks import require_text  # noqa: PLC0415
    from trainable_candle.settings.prompts import expanded  # noqa: PLC0415
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415
    from trainable_candle.tasks.latent.drawing import SampleOptions, parse_size  # noqa: PLC0415
    from trainable_candle.tasks.latent.prompts import parse_prompt  # noqa: PLC0415

    output = new_file(given["output"], overwrite="overwrite" in given, suffix=".png")
    options = SampleOptions(
        steps=given.get("steps", 25),
        seed=given.get("seed", 0),
        guidance=given.get("guidance"),
        negative_prompt=given.get("negative_prompt", ""),
        size=parse_size(given["size"]) if "size" in given else None,
        sampler=given.get("sampler"),
    )
    texts = expanded(given["prompt"], "--prompt")
    for prompt in texts:
        require_text("--prompt", prompt)
    wanted = [parse_prompt(prompt, options) for prompt in texts]
    require_text("--negative-prompt", given.get("negative_prompt", ""))
    if given.get("guidance") == 1 and given.get("negative_prompt"):
        raise ConfigError("--negative-prompt has no effect with --guidance 1; leave it out")
    placement = choose(given.get("device", AUTO), given.get("precision", AUTO))
    task = load_model(given, placement.device, placement.precision)
    if not isinstance(task, LatentTask):
        raise ConfigError(
            f"--model {given['model']} writes texts, and sample draws images; "
            "use trainable-candle chat"
        )
    count = given.get("count", 1)
    for different in {prompt.options for prompt in wanted}:
        task.require_room(len(wanted) * count, different)
    print(placement, flush=True)
    drawn = task.draw_prompts([prompt for prompt in wanted for _ in range(count)])
    images = plot.padded([image for image, _ in drawn])
    scale = plot.visible_scale(images)
    output.parent.mkdir(parents=True, exist_ok=True)
    grid = plot.image_grid(images, columns=given.get("columns"), scale=scale)
    plot.save_png(grid, output, "\n\n".join(text for _, text in drawn))
    print(f"{len(images)} {'image' if len(images) == 1 else 'images'}: {output}")
    return 0


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Draw images, with an adapter or without, into one PNG.",
        "--model NAME --prompt TEXT --output PNG [options]",
    )
    group = parser.add_argument_group("what to draw")
    add_model(group, "f32, bf16 or f16 (default: bf16 on a GPU, else f32)")
    group.add_argument(
        "--prompt", metavar="TEXT", action="append", help="what to draw, or a .txt file of prompts"
    )
    group.add_argument(
        "--count", metavar="N", type=whole(1), help="images for each prompt (default: 1)"
    )
    group.add_argument("--output", metavar="PNG", help="the image to write")
    group.add_argument("--overwrite", action="store_true", help="replace an existing image")
    group.add_argument(
        "--columns", metavar="N", type=whole(1), help="images in a row (default: a square grid)"
    )
    group = parser.add_argument_group("how")
    group.add_argument("--steps", metavar="N", type=whole(1), help="sampling steps (default: 25)")
    group.add_argument(
        "--sampler", metavar="NAME", choices=SAMPLERS, help="sampler: " + ", ".join(SAMPLERS)
    )
    group.add_argument(
        "--guidance",
        metavar="X",
        type=guidance,
        help="guidance scale; 1: off (default: the model's)",
    )
    group.add_argument("--negative-prompt", metavar="TEXT", help="what the images should not show")
    group.add_argument("--size", metavar="WxH", help="size of an image, px (default: the model's)")
    group.add_argument("--seed", metavar="N", type=whole(0), help="seed of the noise (default: 0)")
    group.add_argument("--device", metavar="TEXT", help="auto (default), cpu, cuda or cuda:N")
    add_help(group)
    return parser
