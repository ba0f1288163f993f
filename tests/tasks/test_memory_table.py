"""The table of docs/memory.md has the settings that the plan chooses."""

from .full_size import MODELS


def test_the_document_has_the_table_that_the_plan_makes() -> None:
    # The import of `full_size` above has added the folder of benchmarks to `sys.path`.
    import memory_table as bench

    expected = bench.table()
    # Two lines are the head of the table.
    assert len(expected) == 2 + len(MODELS) * len(bench.CARDS)
    # BEGIN and END are the comments around the table in the document.
    _, rest = bench.DOCUMENT.read_text().split(bench.BEGIN)
    found, _ = rest.split(bench.END)
    assert found.strip().splitlines() == expected, "run: python benches/memory_table.py --write"
