"""The commands of the guides work, here with fewer steps and smaller images than in the guides."""

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


def give(arguments: list[str], flag: str, value: str) -> None:
    """Replace the value of a flag in `arguments`, or append the flag with the value."""
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = value
    else:
        arguments += [flag, value]


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/sdxl.md"])
def test_the_commands_of_the_guides_work(document: str, tmp_path: Path) -> None:
    """The test copies images to the folders from which the commands of the guide read images."""
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
    hearts.write_dataset(tmp_path / "demo-output" / "hearts" / hearts.DATASET, 0)
    scripts = {"train-lora": [*PROGRAM, "train"], "trainable-candle": PROGRAM}
    for command in commands:
        arguments = shlex.split(command)
        if "sd_xl_base_1.0.safetensors" in arguments:
            # Without --weights, the command uses the built-in checkpoint instead of a download.
            place = arguments.index("--weights")
            del arguments[place : place + 2]
            arguments = [a if a != "merged.safetensors" else "merged" for a in arguments]
        if arguments[0] == "train-lora":
            give(arguments, "--steps", "3" if "--rank" in arguments else "5")
            give(arguments, "--save-every", "2")
            if "--rank" in arguments:
                output = arguments[arguments.index("--output") + 1]
                shutil.rmtree(tmp_path / output, ignore_errors=True)
        if "--prompt" in arguments:
            give(arguments, "--steps", "2")
            if "--size" in arguments:
                give(arguments, "--size", "128x96")
        result = subprocess.run(
            [*scripts[arguments[0]], *arguments[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (command, result.stderr)
    assert (tmp_path / "run" / "adapter.safetensors").is_file()
