"""The command line accepts every command in the documents; `ray` resumes runs and has help."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trainable_candle import hub
from trainable_candle.cli import COMMANDS, demo, main, train
from trainable_candle.cli.ray import continuation
from trainable_candle.cli.ray import make_parser as make_ray_parser
from trainable_candle.cli.ray import run as run_ray
from trainable_candle.errors import Error, MissingFileError

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "examples/README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
PROGRAMS = ("train-lora", "trainable-candle")
# Files of settings that commands in the documents read.
SETTINGS_FILES = ("run.yaml", "run/config.yaml")


def command_lines(text: str) -> Iterator[str]:
    """Yield the lines of shell blocks, the lists `command:` in YAML, then commands in the prose.

    A line that ends in a backslash is joined with the next line.
    """
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    for words in re.findall(r"^ +command: (\[.*\])$", text, re.MULTILINE):
        yield shlex.join(yaml.safe_load(words))
    yield from (code for code in mentions(text) if has_flags_to_check(code))


def mentions(text: str) -> Iterator[str]:
    """Yield the backquoted commands outside code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(rf"`((?:{'|'.join(PROGRAMS)})\s[^`]+)`", prose):
        yield " ".join(code.split())


def has_flags_to_check(code: str) -> bool:
    """Return whether a command has flags to check, and neither --help nor a placeholder NAME."""
    return "NAME" not in code and "--" in code and "--help" not in code


def commands(document: str) -> Iterator[list[str]]:
    """Yield a document's commands, without the words before the program, such as `srun`."""
    for line in command_lines((ROOT / document).read_text()):
        words = shlex.split(line, comments=True)
        start = next((n for n, word in enumerate(words) if word in PROGRAMS), len(words))
        match words[start:]:
            case ["train-lora", *arguments]:
                yield ["train", *arguments]
            case ["trainable-candle", *arguments]:
                yield arguments


DOCUMENTED = {
    f"{document}: {shlex.join(command)}": command
    for document in DOCUMENTS
    for command in commands(document)
}


def test_the_documents_contain_commands() -> None:
    assert len(DOCUMENTED) > 45
    names = {name for name, *_ in DOCUMENTED.values()}
    assert names > {"train", "sample", "merge", "ray", "chat"}


@pytest.mark.parametrize("name", DOCUMENTED, ids=lambda name: name[:80])
def test_a_command_fails_only_for_missing_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the command in a folder without models and images.

    The flags are checked before files are opened, so an error about a missing file shows that the
    flags are correct.
    """

    def no_hub(*_: object, **__: object) -> None:
        # Errors about missing files have the words `there is no`; see the end of this test.
        raise MissingFileError("there is no hub here")

    monkeypatch.setattr(hub, "_fetch", no_hub)
    monkeypatch.chdir(tmp_path)
    for path in SETTINGS_FILES:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("model: digits\ndataset: images\noutput: run\n")
    # The documents keep the settings of a job on Kubernetes in /shared, which this machine lacks:
    # take the file in the current folder instead.
    command, *arguments = (word.removeprefix("/shared/") for word in DOCUMENTED[name])
    if command == "ray" or "--gpus" in arguments:
        # These commands need GPUs or Ray, which this machine may lack: check only their settings.
        # `settings` are the arguments that are not flags of `ray` itself: all those of `train`.
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


# The commands in the prose that `commands` leaves out. Sorted, so that every process of
# pytest-xdist has the same order.
ONLY_MENTIONED = sorted(
    {
        code
        for document in DOCUMENTS
        for code in mentions((ROOT / document).read_text())
        if not has_flags_to_check(code)
    }
)


def test_the_documents_mention_commands_without_flags_to_check() -> None:
    assert set(ONLY_MENTIONED) > {"trainable-candle doctor", "train-lora --help-all"}


@pytest.mark.parametrize("code", ONLY_MENTIONED)
def test_a_command_that_is_only_mentioned_and_its_flags_are_in_the_help(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = code.split()
    command = "train" if program == "train-lora" else words[0]
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and f"{word} " not in printed] == []


@pytest.mark.parametrize(
    "resume",
    [[], ["--resume", "/a/step-3"], ["--resume=auto"], ["--resume", "/a/step-3", "--resume=auto"]],
    ids=str,
)
def test_the_command_that_continues_a_ray_run_has_one_resume_flag(resume: list[str]) -> None:
    command = continuation("t ray", ["--output", "a run", *resume, "--steps", "3"])
    assert command == "t ray --output 'a run' --steps 3 --resume latest"


def test_the_long_help_of_ray_lists_its_own_flags_and_those_of_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_ray(["--help-all"], "trainable-candle ray") == 0
    printed = capsys.readouterr().out
    for flag in ("--max-failures", "--learning-rate", "--step-limit"):
        assert f"  {flag} " in printed
