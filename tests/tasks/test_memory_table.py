"""The table of docs/memory.md is what the plan chooses."""

from .full_size import MODELS


def test_the_document_has_the_table_that_the_plan_makes() -> None:
    # `full_size` puts the benchmarks on the path.
    import memory_table as bench

    lines = bench.table()
    assert len(lines) == 2 + len(MODELS) * len(bench.CARDS)
    _, rest = bench.DOCUMENT.read_text().split(bench.BEGIN)
    found, _ = rest.split(bench.END)
    assert found.strip().splitlines() == lines, "run: python benches/memory_table.py --write"
