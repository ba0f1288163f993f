"""Launches, replays and waits of training on the simulated device, which computes no values.

`cuda.run` runs a snippet and returns the log of its calls. `mark` writes a mark into the log, and
`run.after(mark)` has the calls from a mark to the next one. `of(kind, ...)` selects calls by kind:
"refused" are calls to which the simulated libraries returned an error; "grow" takes more device
memory; "capture-begin" begins to record a CUDA graph, and "replay" launches one; "product" is a
matrix product by cuBLAS. `waits` are the calls that make the host wait for the device.
"""

import json
from pathlib import Path
from typing import Any

import pytest

RUN = """
    from trainable_candle.train import Callback, TrainConfig, Trainer
    from trainable_candle.run import train_adapter

    # Kernels do not compute, so losses and norms have arbitrary values.
    Trainer._require_finite = lambda *_: None

    # The calls after the mark step-N are those of step N, counted from 1.
    class Marks(Callback):
        def on_train_begin(self, trainer):
            mark("step-1")

        def on_step_end(self, trainer, report):
            mark(f"step-{report.step + 1}")

    def train(**settings):
        settings = {"precision": "f32", **settings}
        config = TrainConfig(steps=7, save_every=0, rank=4, device="cuda", **settings)
        return train_adapter(config, callbacks=[Marks()], progress=False, report=lambda _: None)
"""
# The numbers of the steps whose calls are checked. Earlier steps record the CUDA graph, if a run
# uses one, and these steps replay it.
CHECKED = (4, 5, 6)
# The kinds of calls that queue work on the device.
QUEUING = {"launch", "replay", "product"}


def waits_at_its_end(step: Any) -> bool:
    """Return whether the host queues all work before it waits, and synchronizes at most once."""
    waits = [step.calls.index(call) for call in step.waits]
    from_first_wait = step.calls[min(waits) :]
    queued_later = QUEUING & {call.kind for call in from_first_wait}
    return len(step.of("synchronize")) <= 1 and not queued_later


def run_on_digits(base: Path, folder: Path, output: Path, **settings: Any) -> str:
    """Return the code of a training run of the digits model."""
    given = {
        "model": "digits",
        "weights": str(base),
        "dataset": str(folder),
        "output": str(output),
        "batch_size": 4,
        "optimizer": "adamw",
        **settings,
    }
    return RUN + f"    train(**{given!r})\n"


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation": 2}, {"precision": "bf16"}, {"optimizer_states": "host"}],
    ids=str,
)
def test_steps_are_replayed_and_wait_once(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run = cuda.run(run_on_digits(digits_base, digits_folder, tmp_path / "run", **settings))
    assert run.of("refused") == []
    micro_batches = settings.get("gradient_accumulation", 1)
    for number in CHECKED:
        step = run.after(f"step-{number}")
        assert len(step.of("replay")) == micro_batches, number
        assert waits_at_its_end(step), step.calls
        assert step.of("grow", "capture-begin") == [], number


def test_states_that_cannot_be_pinned_stay_on_the_gpu(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    code = run_on_digits(digits_base, digits_folder, tmp_path / "run", optimizer_states="host")
    code = code.replace("report=lambda _: None", "report=print")
    # The code begins with a line break.
    run = cuda.run("    os.environ['TRAINABLE_CANDLE_PINNED_BYTES'] = '0'" + code)
    assert run.of("refused") == []
    (line,) = (line for line in run.output.splitlines() if line.startswith("optimizer: "))
    assert "its states are in GPU memory, not in host memory, because the system gives too" in line
    assert (tmp_path / "run" / "adapter.safetensors").is_file()


@pytest.mark.parametrize("runtime_bytes", [None, 0], ids=["sufficient", "too low"])
def test_a_prediction_of_memory_is_reported_only_if_it_is_too_low(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path, runtime_bytes: int | None
) -> None:
    """Without the bytes for kernels and workspaces, the prediction for a tiny model is too low."""
    code = run_on_digits(digits_base, digits_folder, tmp_path / "run")
    code = code.replace("report=lambda _: None", "report=print")
    if runtime_bytes is not None:
        change = "from trainable_candle.tasks import estimate\n"
        change += f"    estimate.RUNTIME_BYTES = {runtime_bytes}"
        code = f"    {change}\n{code}"
    lines = cuda.run(code).output.splitlines()
    reports = [line for line in lines if line.startswith("plan: the run took")]
    assert len(reports) == (0 if runtime_bytes is None else 1)
    assert all(" of GPU memory, where " in line and "% more)" in line for line in reports)


def test_without_graphs_steps_wait_once_too_and_launch_the_same_kernels(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = cuda.run(
        run_on_digits(digits_base, digits_folder, output, cuda_graphs=0, lora_dropout=0.1)
    )
    assert run.of("refused", "replay") == []
    expected = run.after("step-3").launches
    for number in CHECKED:
        step = run.after(f"step-{number}")
        assert waits_at_its_end(step), step.calls
        assert step.of("grow") == [], number
        assert step.launches == expected


def test_steps_of_sdxl_are_replayed_in_a_run_with_validation(
    cuda: Any, sdxl_base: Path, sdxl_folder: Path, tmp_path: Path
) -> None:
    given = {
        "model": "sdxl",
        "weights": str(sdxl_base),
        "dataset": str(sdxl_folder),
        "output": str(tmp_path / "run"),
        "resolution": 64,
        "bucketing": False,
        "precision": "bf16",
        "cache": "memory",
        "validation_split": 0.25,
        "validate_every": 7,
        "gradient_checkpointing": "selective",
    }
    run = cuda.run(RUN + f"    train(**{given!r})\n")
    assert run.of("refused") == []
    for number in CHECKED:
        step = run.after(f"step-{number}")
        assert len(step.of("replay")) == 1, number
        assert waits_at_its_end(step), step.calls
        assert step.of("grow", "capture-begin") == [], number
    assert (tmp_path / "run" / "adapter.safetensors").is_file()


# Trains on texts, and prints the different lengths of the batches, in tokens.
TRAIN_ON_TEXTS = """
    from trainable_candle.data.chats import packing

    join_rows = packing.joined
    lengths = []

    def joined(*arguments):
        packed = join_rows(*arguments)
        lengths.append(len(packed.input_ids))
        return packed

    packing.joined = joined
    train(**{settings!r})
    print("tokens", *sorted(set(lengths)))
"""


def run_on_texts(folder: Path, **settings: Any) -> str:
    """Write 60 texts, and return the code of a run of the built-in language model on them.

    Each text has 29 characters, so that all rows are filled equally.
    """
    dataset = folder / "texts.jsonl"
    lines = ["".join(chr(97 + (n * k) % 26) for k in range(29)) for n in range(60)]
    dataset.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    given = {
        "model": "causal-lm",
        "dataset": str(dataset),
        "output": str(folder / "run"),
        "sequence_length": 128,
        "batch_size": 2,
        "precision": "bf16",
        **settings,
    }
    return RUN + TRAIN_ON_TEXTS.replace("{settings!r}", repr(given))


@pytest.mark.parametrize("settings", [{}, {"validation_split": 0.2, "validate_every": 7}], ids=str)
def test_steps_of_texts_are_replayed(cuda: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    run = cuda.run(run_on_texts(tmp_path, **settings))
    assert run.of("refused") == []
    # Each training batch is padded to 256 tokens (two rows), so that its step can be replayed.
    # Validation batches have no padding and use no graph.
    assert "256" in run.output.split()
    for number in CHECKED:
        step = run.after(f"step-{number}")
        assert len(step.of("replay")) == 1, number
        assert waits_at_its_end(step), step.calls
        assert step.of("grow", "capture-begin") == [], number


def test_steps_on_pairs_of_answers_are_not_replayed(cuda: Any, tmp_path: Path) -> None:
    # Batches with equal numbers of tokens may have different numbers of pairs, and so other shapes.
    pairs = [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in range(1, 9)]
    program = run_on_texts(tmp_path, objective="dpo")
    # The run reads these pairs instead of the texts.
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = cuda.run(program)
    assert run.of("refused", "replay") == []


def test_a_profile_counts_launches(cuda: Any) -> None:
    run = cuda.run(
        """
    tc.manual_seed(0)
    x = tc.randn((64, 64), device="cuda")
    with tc.cuda.profile() as profile:
        for _ in range(150):
            x = (x @ x).sigmoid()
    # Each of the 150 products and each of the 150 sigmoids is one launch.
    assert profile.launches == 300, profile
    # A line of totals, and one for each of the two kernels.
    assert len(str(profile).splitlines()) == 3
    assert {k.count for k in profile.kernels} == {150}
    # One product of 64 x 64 and 64 x 64 elements of f32 (CUDA's R_32F).
    products = [k for k in profile.kernels if k.name == "gemm 1 x 64x64x64 CUDA_R_32F"]
    assert len(products) == 1, profile
    """
    )
    assert run.of("refused") == []


def test_a_profile_of_the_cpu_is_an_error(cuda: Any) -> None:
    run = cuda.run(
        """
    profile = tc.cuda.profile("cpu")
    try:
        with profile:
            pass
    except tc.DeviceError as error:
        print(error)
    """
    )
    assert run.of("refused") == []
    assert 'profile: found the device "cpu"' in run.output


def test_memory_of_graphs_is_freed_with_the_last_graph(cuda: Any) -> None:
    run = cuda.run(
        """
    tc.manual_seed(0)
    weight = tc.randn((1024, 1024), device="cuda")

    def work(x):
        for _ in range(4):
            x = (x @ weight).sigmoid()

    def bytes_of_graphs():
        return tc.cuda.memory_stats()["graphs"]

    graphs = []
    for rows in (1024, 512, 2048):
        x = tc.zeros((rows, 1024), device="cuda")
        graphs.append(tc.cuda.capture(work, [x]))
        # The first call runs the function, the second records the graph, the third replays it.
        for _ in range(3):
            graphs[-1](x)
        assert graphs[-1].is_recorded and bytes_of_graphs() > 0
    before = bytes_of_graphs()
    tc.cuda.empty_cache()
    assert bytes_of_graphs() == before, (bytes_of_graphs(), before)
    # The graphs share their memory, so it is needed as long as one of them exists.
    del graphs[1:]
    tc.cuda.empty_cache()
    assert bytes_of_graphs() == before
    del graphs[:]
    tc.cuda.empty_cache()
    assert bytes_of_graphs() == 0
    """
    )
    assert run.of("refused") == []
