"""`trainable-candle sample`: draw images or write texts, with an adapter or without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.cli.adapter_files import new_file
from trainable_candle.cli.loading import add_model, load_model, reject
from trainable_candle.cli.options import Parser, add_help, non_negative, whole
from trainable_candle.cli.writing import add_writing, writing_options
from trainable_candle.errors import ConfigError
from trainable_candle.files import write_atomically
from trainable_candle.placement import AUTO, choose
from trainable_candle.settings.previews import SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainable_candle.tasks.latent import LatentTask
    from trainable_candle.tasks.text import TextTask
    from trainable_candle.tasks.text.writing import WritingOptions

OF_IMAGES: Final = ("steps", "sampler", "guidance", "negative_prompt", "size", "columns")
"""Flags that have an effect only with models of images."""
OF_TEXTS: Final = ("raw", "system", "tokens", "temperature", "top_k", "top_p", "min_p",
                   "repetition_penalty", "stop")  # fmt: skip
"""Flags that have an effect only with language models."""


def run(arguments: Sequence[str], program: str) -> int:
    """Draw or write as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model")

    # Expensive imports, after the flags are parsed.
    from trainable_candle import families  # noqa: PLC0415
    from trainable_candle.settings.texts import Texts  # noqa: PLC0415

    model = given["model"]
    # Only language models have the settings `Texts`.
    if Texts in families.find(model).groups:
        parser.require(given, "prompt")
        reject(given, OF_IMAGES, f"--model {model}, which writes texts")
        _write(given)
    else:
        parser.require(given, "prompt", "output")
        reject(given, OF_TEXTS, f"--model {model}, which draws images")
        _draw(given)
    return 0


def _prompts(given: Mapping[str, Any]) -> list[str]:
    """Return the prompts of `--prompt`, with each name of a `.txt` file replaced by its prompts."""
    # Expensive imports, after the flags are parsed.
    from trainable_candle.settings.checks import require_text  # noqa: PLC0415
    from trainable_candle.settings.prompts import expanded  # noqa: PLC0415

    prompts = expanded(given["prompt"], "--prompt")
    for prompt in prompts:
        require_text("--prompt", prompt)
    return prompts


def _draw(given: Mapping[str, Any]) -> None:
    """Draw the images and write them into one PNG."""
    # Expensive imports, after the flags are parsed.
    from trainable_candle import plot  # noqa: PLC0415
    from trainable_candle.settings.checks import require_text  # noqa: PLC0415
    from trainable_candle.tasks.latent.drawing import SampleOptions, parse_size  # noqa: PLC0415
    from trainable_candle.tasks.latent.prompts import parse_prompt  # noqa: PLC0415

    output = new_file(given["output"], overwrite="overwrite" in given, suffix=".png")
    options = SampleOptions(
        steps=given.get("steps"),
        seed=given.get("seed", 0),
        guidance=given.get("guidance"),
        negative_prompt=given.get("negative_prompt", ""),
        size=parse_size(given["size"]) if "size" in given else None,
        sampler=given.get("sampler"),
    )
    prompts = [parse_prompt(prompt, options) for prompt in _prompts(given)]
    require_text("--negative-prompt", given.get("negative_prompt", ""))
    if given.get("guidance") == 1 and given.get("negative_prompt"):
        raise ConfigError("--negative-prompt has no effect with --guidance 1; leave it out")
    placement = choose(given.get("device", AUTO), given.get("precision", AUTO))
    task: LatentTask = load_model(given, placement.device, placement.precision)  # type: ignore[assignment]
    count = given.get("count", 1)
    # A prompt may have options of its own, such as a size. All images stay in memory for the grid,
    # so each check counts all of them.
    for prompt_options in {prompt.options for prompt in prompts}:
        task.require_room(len(prompts) * count, prompt_options)
    print(placement, flush=True)
    drawn = task.draw_prompts([prompt for prompt in prompts for _ in range(count)])
    images = plot.padded([image for image, _ in drawn])
    scale = plot.visible_scale(images)  # Enlarges tiny images.
    output.parent.mkdir(parents=True, exist_ok=True)
    grid = plot.image_grid(images, columns=given.get("columns"), scale=scale)
    plot.save_png(grid, output, "\n\n".join(text for _, text in drawn))
    print(f"{len(images)} {'image' if len(images) == 1 else 'images'}: {output}")


def _write(given: Mapping[str, Any]) -> None:
    """Print texts while they are generated; then write them into the file `--output`, if given."""
    options, count = writing_options(given), given.get("count", 1)
    if count > 1 and not options.temperature:
        raise ConfigError(
            "--count has no effect without --temperature, as the likeliest tokens are always the "
            "same; give --temperature, or leave --count out"
        )
    if "raw" in given and "system" in given:
        raise ConfigError("--system has no effect with --raw; leave one of them out")
    output = None
    if "output" in given:
        output = new_file(given["output"], overwrite="overwrite" in given, suffix=".txt")
    elif "overwrite" in given:
        raise ConfigError("--overwrite has no effect without --output; leave it out")
    prompts = _prompts(given)
    placement = choose(given.get("device", AUTO), given.get("precision", AUTO))
    # `load_model` calls `check` with the task before it loads weights.
    check = partial(_check_prompts, prompts, given)
    task: TextTask = load_model(given, placement.device, placement.precision, check)  # type: ignore[assignment]
    several = len(prompts) * count > 1
    records = []
    for prompt in prompts:
        for number in range(count):
            if several:
                print(f"prompt: {prompt}", flush=True)
            # Each text of a prompt has a seed of its own; seeds are below 2**64.
            seeded = replace(options, seed=(options.seed + number) % 2**64)
            pieces = []
            for piece in _pieces(task, prompt, given, seeded):
                pieces.append(piece)
                print(piece, end="", flush=True)
            # End the line; if there are several texts, add an empty line after each.
            print("\n" if several else "")
            records.append(f"prompt: {prompt}\ntext: {''.join(pieces)}\n")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, "\n".join(records))


def _check_prompts(prompts: Sequence[str], given: Mapping[str, Any], task: TextTask) -> None:
    """Check that the model can read each prompt and has room for an answer.

    Raises:
        ConfigError: the chat template rejects a prompt, a prompt has no tokens or too many, or the
            model's vocabulary lacks one of its tokens.
    """
    for prompt in prompts:
        if "raw" in given:
            task.text_tokens(prompt)
        else:
            task.prompt_tokens(_messages(prompt, given))


def _pieces(
    task: TextTask, prompt: str, given: Mapping[str, Any], options: WritingOptions
) -> Iterator[str]:
    """Return the pieces of an answer, or with `--raw` of a continuation, as they are generated."""
    if "raw" in given:
        return task.continuation(prompt, options)
    return task.answer(_messages(prompt, given), options)


def _messages(prompt: str, given: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conversation to answer: the message of `--system`, if given, and the prompt."""
    system = given.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": prompt}]


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Draw images into one PNG, or write texts, with an adapter or without.",
        "--model NAME --prompt TEXT [options]",
    )
    group = parser.add_argument_group("what to draw or write")
    add_model(group, "f32, bf16 or f16 (default: bf16 on a GPU, else f32)")
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="a prompt or a .txt file of prompts; may be given again",
    )
    group.add_argument(
        "--count", metavar="N", type=whole(1), help="images or texts for each prompt (default: 1)"
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="the .png of the images; for texts, an optional .txt",
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing file")
    group.add_argument("--seed", metavar="N", type=whole(0), help="seed of the draws (default: 0)")
    group.add_argument("--device", metavar="TEXT", help="auto (default), cpu, cuda or cuda:N")
    group = parser.add_argument_group("images")
    group.add_argument(
        "--steps", metavar="N", type=whole(1), help="sampling steps (default: the model's)"
    )
    group.add_argument(
        "--sampler", metavar="NAME", choices=SAMPLERS, help="sampler: " + ", ".join(SAMPLERS)
    )
    group.add_argument(
        "--guidance",
        metavar="X",
        type=non_negative,
        help="guidance scale; 1: off (default: the model's)",
    )
    group.add_argument("--negative-prompt", metavar="TEXT", help="what the images should not show")
    group.add_argument("--size", metavar="WxH", help="size of an image, px (default: the model's)")
    group.add_argument(
        "--columns", metavar="N", type=whole(1), help="images per row (default: a square grid)"
    )
    group = parser.add_argument_group("texts")
    group.add_argument(
        "--raw", action="store_true", help="continue the prompt itself, without the chat template"
    )
    group.add_argument("--system", metavar="TEXT", help="the system message")
    add_writing(group)
    add_help(group)
    return parser
