"""`trainable-candle verify`: check which modules of an adapter file other tools apply."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.cli.options import Parser, add_help
from trainable_candle.outputs import adapter_in

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trainable_candle import AdapterModule, AdapterReport

BAD: Final = 1
"""Exit status if ComfyUI (for language models: peft) does not apply every module of the file."""

_SHOWN: Final = 20
"""The most kinds of adapters that a report lists; without --all, also the most problems."""
_ONLY_PEFT: Final = "peft loads it, and this library does not"


def run(arguments: Sequence[str], program: str) -> int:
    """Print the report; returns the exit status.

    The status is 0 if ComfyUI (for language models: peft) applies all modules, else `BAD`. It is
    also 0 for an adapter in llama.cpp's, mlx-lm's or Ollama's form, which is only compared with the
    model.
    """
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "file")

    # Expensive imports, after the flags are parsed.
    from trainable_candle import families, verify_adapter  # noqa: PLC0415
    from trainable_candle.cli import verify_texts  # noqa: PLC0415

    path = Path(given["file"]).expanduser()
    weights = Path(given["weights"]).expanduser() if "weights" in given else None
    model = given.get("model", "sdxl")
    is_text = verify_texts.is_text(model)
    if is_text and verify_texts.is_exported(path):
        print("\n".join(verify_texts.exported_lines(path, model, weights)))
        return 0
    path = adapter_in(path)
    report = verify_adapter(path, model, weights)
    built_in = families.find(model).default_weights() if weights is None else None
    if built_in is not None and _unusable_count(report):
        built_in_report = verify_adapter(path, model, built_in)
        if _unusable_count(built_in_report) < _unusable_count(report):
            report, weights = built_in_report, built_in
            print(
                f"note: the adapter's sizes are those of the built-in `{model}`, not those of the "
                "published model"
            )
    if weights is None and _unusable_count(report) == len(report.modules):
        print(
            f"note: compared with the published `{model}`; for a model of other sizes, give "
            "--weights"
        )
    only_peft = verify_texts.outside(path, report) if is_text else set()
    # The remarks are about tools for image models.
    shown = lines(path, report, every="all" in given, only_peft=only_peft, remarks=not is_text)
    print("\n".join(shown))
    if is_text:
        print("\n".join(verify_texts.reader_lines(path, model, weights)))
    return 0 if report.good else BAD


def lines(
    path: Path,
    report: AdapterReport,
    *,
    every: bool,
    only_peft: Collection[str] = (),
    remarks: bool = True,
) -> list[str]:
    """Return the lines of a report.

    Args:
        path: the file or folder of the adapter.
        report: the result of `verify_adapter`.
        every: whether to list every module and every problem.
        only_peft: modules and tensors that peft loads and this library does not.
        remarks: whether to list the report's remarks.
    """
    modules = report.modules
    names = {module.module for module in modules}
    kinds = Counter((m.kind or "unknown", m.rank, f"{m.scale:g}") for m in modules)
    # A module that adapts several layers, as one for q, k and v does, has a report for each layer.
    layer_note = f" with the adapters of {len(modules)} layers" if len(modules) > len(names) else ""
    text = [f"{path}: {len(names)} modules{layer_note}"]
    text += [
        f"  {count} x {kind}, rank {rank}, scale {scale}"
        for (kind, rank, scale), count in kinds.most_common(_SHOWN)
    ]
    text += [f"  {_applied(tool, modules, only_peft)}" for tool in report.tools]
    # The first tool decides whether the file is good: ComfyUI, or peft for language models. The
    # demo's model has no tools.
    main_tool = report.tools[0] if report.tools else "this library"
    wrong = [
        f"  {m.module}: {fault}"
        for m in modules
        if (fault := _ONLY_PEFT if m.module in only_peft else _fault(m, main_tool))
    ]
    wrong += [
        f"  {key}: "
        f"{_ONLY_PEFT if key in only_peft else 'this tensor is no parameter of an adapter'}"
        for key in report.others
    ]
    if wrong:
        hidden = 0 if every else max(0, len(wrong) - _SHOWN)
        text += ["problems:", *(wrong if every else wrong[:_SHOWN])]
        if hidden:
            text.append(f"  and {hidden} more; --all shows them")
    if remarks:
        text += [f"note: {remark}" for remark in report.remarks]
    if every:
        text += ["modules:"]
        text += [
            f"  {m.module} -> {m.layer or 'nothing'} ({m.kind or 'unknown'}, rank {m.rank}, "
            f"scale {m.scale:g})"
            for m in modules
        ]
    text.append(f"good: {main_tool} applies all modules" if report.good else "not good")
    return text


def _applied(tool: str, modules: Sequence[AdapterModule], only_peft: Collection[str]) -> str:
    """Return how many adapters a tool applies as trained, in part and not at all, with reasons."""
    # The modules in `only_peft` have no layer in the report, but peft applies them.
    if tool != "peft":
        only_peft = ()
    ignored = Counter(m.ignored_by[tool] for m in modules if tool in m.ignored_by)
    # `ignored_by` is empty for a module without a layer, so no module is counted twice.
    missing = sum(m.layer is None and m.module not in only_peft for m in modules)
    if missing:
        ignored["the model has no such layer"] = missing
    misfits = sum(_does_not_fit(m) and tool not in m.ignored_by for m in modules)
    if misfits:
        ignored["its shapes or values do not fit the layer"] = misfits
    changed = Counter(
        m.changed_by[tool] for m in modules if tool in m.changed_by and not _does_not_fit(m)
    )
    in_full = len(modules) - ignored.total() - changed.total()
    parts = [f"; {count} in part: {reason}" for reason, count in changed.items()]
    parts += [f"; {count} not: {reason}" for reason, count in ignored.items()]
    return f"{tool} applies {in_full}{''.join(parts)}"


def _does_not_fit(module: AdapterModule) -> bool:
    """Return whether the module's layer exists but the module does not fit it."""
    return module.layer is not None and module.fault is not None


def _unusable_count(report: AdapterReport) -> int:
    """Count the modules that match no layer of the model or do not fit their layer."""
    return sum(module.layer is None or _does_not_fit(module) for module in report.modules)


def _fault(module: AdapterModule, tool: str) -> str | None:
    """Return why a module has no effect, or a wrong one, in a tool; None if its effect is right."""
    if module.layer is None:
        return "the model has no such layer"
    if module.fault:
        return module.fault
    if module.zero:
        return "a factor is zero everywhere: the module has no effect"
    return module.ignored_by.get(tool) or module.changed_by.get(tool)


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Show which modules of an adapter file ComfyUI, diffusers, kohya's sd-scripts, peft and\n"
        "others apply wholly, in part or not at all.\n"
        "The exit status is 0 if ComfyUI (peft for language models) applies all modules, else 1.",
        "FILE [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "file",
        metavar="FILE",
        nargs="?",  # `require` reports a missing file
        help="the adapter: a file, a folder of another program, or the output folder of a run",
    )
    group.add_argument("--model", metavar="NAME", help="the model of the adapter (default: sdxl)")
    group.add_argument(
        "--weights",
        metavar="PATH",
        help="the model's files, if its sizes are not those of the published model",
    )
    group.add_argument("--all", action="store_true", help="list every module and every problem")
    add_help(group)
    return parser
