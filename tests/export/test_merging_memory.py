"""Merging a language model holds one of its weight files in memory at a time."""

import json
from pathlib import Path

import pytest
from tests.peak_memory import READS_PROC, growth, write_zeros

# Of each file, the only tensor has this shape, in f32.
SHAPE = (1024, 8192)
SIZE = 4 * SHAPE[0] * SHAPE[1]
SETUP = """
from trainable_candle.export import TextAdapter
from trainable_candle.export.merged import write_merged
"""
# The adapter has no layers.
MERGE = "write_merged(Path(sys.argv[1]), TextAdapter({}), Path(sys.argv[2]))"


@READS_PROC
@pytest.mark.parametrize("count", [1, 4])
def test_merging_holds_one_file_at_a_time(tmp_path: Path, count: int) -> None:
    (weights := tmp_path / "weights").mkdir()
    (output := tmp_path / "output").mkdir()
    names = {f"layer{n}.weight": f"model-{n}.safetensors" for n in range(count)}
    for name, file in names.items():
        write_zeros(weights / file, {name: SHAPE}, "F32")
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert SIZE <= growth(SETUP, MERGE, str(weights), str(output)) < 1.5 * SIZE
