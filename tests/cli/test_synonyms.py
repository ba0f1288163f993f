"""Synonyms of flags, such as `--memory-limit` for `--vram`."""

import pytest

from trainable_candle.settings import TrainConfig, flag, settings

from .test_options import VALUES, as_arguments, parse

# Names with dots are keys of nested mappings in YAML files; they are no flags.
SYNONYMS = [
    (name, other)
    for name, (_, setting) in settings().items()
    for other in setting.synonyms
    if "." not in other
]


@pytest.mark.parametrize(("name", "synonym"), SYNONYMS)
def test_a_synonym_sets_its_setting(name: str, synonym: str) -> None:
    # VALUES lacks settings that conflict with others. Those that have synonyms are switches.
    value = VALUES.get(name, True)
    arguments = as_arguments(name, value)
    arguments[0] = arguments[0].replace(flag(name)[2:], flag(synonym)[2:])
    assert parse(*arguments) == TrainConfig(**{name: value})


def test_memory_limit_is_a_synonym_of_vram() -> None:
    assert parse("--memory-limit", "12").vram == 12
