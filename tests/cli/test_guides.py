"""The commands in README.md and docs/sdxl.md work, with fewer steps and smaller images."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainable_candle.demo import hearts

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "trainable_candle"]


def set_flag(arguments: list[str], flag: str, value: str) -> None:
    """Replace the value of a flag in `arguments`, or append the flag with the value."""
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = value
    else:
        arguments += [flag, value]


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/sdxl.md"])
def test_the_commands_of_the_guides_work(document: str, tmp_path: Path) -> None:
    """Run the guide's commands in order, in a folder with the images that they read."""
    text = (ROOT / document).read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = [
        command
        for block in blocks
        for command in block.replace("\\\n", " ").splitlines()
        if command.startswith(("train-lora", "trainable-candle"))
    ]
    assert len(commands) >= 3
    shutil.copytree(ROOT / "examples" / "photos", tmp_path / "images")
    # The README also trains on the images that `make demo` draws.
    hearts.write_dataset(tmp_path / "demo-output" / "hearts" / hearts.DATASET, seed=0)
    programs = {"train-lora": [*PROGRAM, "train"], "trainable-candle": PROGRAM}
    for command in commands:
        arguments = shlex.split(command)
        if "sd_xl_base_1.0.safetensors" in arguments:
            # Without --weights, the command uses the small built-in SDXL instead of a download.
            index = arguments.index("--weights")
            del arguments[index : index + 2]
            # The built-in SDXL is a folder, so `merge` writes a folder, too.
            arguments = ["merged" if a == "merged.safetensors" else a for a in arguments]
        if arguments[0] == "train-lora":
            # A command with --rank starts a run; one without --rank continues a run of 3 steps.
            starts = "--rank" in arguments
            set_flag(arguments, "--steps", "3" if starts else "5")
            set_flag(arguments, "--save-every", "2")
            if starts:
                # Several commands of a guide start runs with the same output folder.
                output = arguments[arguments.index("--output") + 1]
                shutil.rmtree(tmp_path / output, ignore_errors=True)
        if "--prompt" in arguments:
            # The command draws images: its --steps are sampling steps.
            set_flag(arguments, "--steps", "2")
            if "--size" in arguments:
                set_flag(arguments, "--size", "128x96")
        result = subprocess.run(
            [*programs[arguments[0]], *arguments[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (command, result.stderr)
    assert (tmp_path / "run" / "adapter.safetensors").is_file()
