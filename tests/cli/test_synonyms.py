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
    # VALUES has a value for each setting, except those that conflict with others. Of these
    # exceptions, those with synonyms are switches.
    value = VALUES.get(name, True)
    arguments = as_arguments(name, value)
    # Without the leading "--", because a switch may be negated: `--no-NAME`.
    arguments[0] = arguments[0].replace(flag(name)[2:], flag(synonym)[2:])
    assert parse(*arguments) == TrainConfig(**{name: value})


def test_memory_limit_is_a_synonym_of_vram() -> None:
    assert parse("--memory-limit", "12").vram == 12
