"""The command line accepts every command of the documents."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainable_candle import hub
from trainable_candle.cli import COMMANDS, demo, train
from trainable_candle.cli.ray import continuation
from trainable_candle.cli.ray import make_parser as make_ray_parser
from trainable_candle.cli.ray import run as run_ray
from trainable_candle.errors import Error, MissingFileError

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "examples/README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
PROGRAMS = ("train-lora", "trainable-candle")
# Files of settings that documents name in their commands.
FILES = ("run.yaml", "run/config.yaml")


def lines(text: str) -> Iterator[str]:
    """Yield the lines of shell blocks, then the backquoted commands outside code blocks.

    A line that ends in a backslash is joined with the next line.
    """
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(rf"`((?:{'|'.join(PROGRAMS)})\s[^`]+)`", prose):
        # A command with the placeholder NAME, without flags, or with --help has no values to check.
        if "NAME" not in code and "--" in code and "--help" not in code:
            yield code.replace("\n", " ")


def commands(document: str) -> Iterator[list[str]]:
    """Yield a document's commands, without the words before the program, such as `srun`."""
    for line in lines((ROOT / document).read_text()):
        words = shlex.split(line, comments=True)
        place = next((n for n, word in enumerate(words) if word in PROGRAMS), len(words))
        match words[place:]:
            case ["train-lora", *arguments]:
                yield ["train", *arguments]
            case ["trainable-candle", *arguments]:
                yield arguments


FOUND = {
    f"{document}: {shlex.join(command)}": command
    for document in DOCUMENTS
    for command in commands(document)
}


def test_the_documents_contain_commands() -> None:
    assert len(FOUND) > 45
    assert {command[0] for command in FOUND.values()} > {"train", "sample", "merge", "ray", "chat"}


@pytest.mark.parametrize("name", FOUND, ids=lambda name: name[:80])
def test_a_command_fails_only_for_missing_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs in a folder without models and images.

    An error about a missing file passes the test: it shows that the flags are correct.
    """

    def no_hub(*_: object) -> None:
        raise MissingFileError("there is no hub here")

    monkeypatch.setattr(hub, "_fetch", no_hub)
    monkeypatch.chdir(tmp_path)
    for path in FILES:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("model: digits\ndataset: images\noutput: run\n")
    command, *arguments = FOUND[name]
    if command == "ray" or "--gpus" in arguments:
        # These commands need GPUs or Ray, which this machine may lack: check only their settings.
        _, settings = make_ray_parser("ray").parse_own(arguments)
        config = train.read_config(train.make_parser("train", rare=True).parse(settings))
        config.require("model", "dataset", "output")
        return
    if command == "demo":
        demo.make_parser("demo").parse(arguments)
        return
    module = importlib.import_module(COMMANDS[command].module)
    try:
        status = module.run(arguments, command)
    except Error as error:
        assert "there is no" in str(error), error  # noqa: PT017 - some commands need no file
    else:
        assert status == 0


@pytest.mark.parametrize("given", [[], ["--resume", "/a/step-3"], ["--resume=auto"]])
def test_the_command_that_continues_a_ray_run_has_one_resume_flag(given: list[str]) -> None:
    again = continuation("t ray", ["--output", "a run", *given, "--steps", "3"])
    assert again == "t ray --output 'a run' --steps 3 --resume latest"


def test_the_long_help_of_ray_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ray(["--help-all"], "trainable-candle ray") == 0
    told = capsys.readouterr().out
    for name in ("--max-failures", "--learning-rate", "--step-limit"):
        assert f"  {name} " in told
