"""The features that docs/features.md says the library lacks: their settings are errors."""

import re
from pathlib import Path

import pytest

from trainable_candle.errors import ConfigError

from .test_options import parse

FEATURES = Path(__file__).parents[2] / "docs" / "features.md"
# By the title of a row of the table: arguments that ask for the feature, and the error.
CASES = {
    "BOFT": ("--adapter boft", "adapter is `boft`, expected one of lora, dora, loha, lokr, oft;"),
    "SOAP": ("--optimizer soap", "optimizer is `soap`, expected one of"),
    "optimizers of other packages": (
        "--optimizer torch.optim.SGD",
        r"optimizer is `torch\.optim\.SGD`, expected one of",
    ),
    "updates during the backward pass": (
        "--fused_backward_pass",
        "--fused-backward-pass is not needed here: leave it out",
    ),
    "each image in several resolutions in one run": (
        "--resolution 512,768,1024",
        "resolution is 512,768,1024, expected one number N",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES)
def test_the_setting_of_a_missing_feature_is_an_error(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*arguments.split())


def test_the_table_has_no_in_the_rows_of_these_features_alone() -> None:
    rows = re.findall(r"^\| ([^|]+) \|((?: no \|)+)", FEATURES.read_text(), re.MULTILINE)
    assert {title: cells.count("no") for title, cells in rows} == dict.fromkeys(CASES, 5)
