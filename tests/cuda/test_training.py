"""The launches and waits of training steps on the simulated device, which computes no values."""

import json
from pathlib import Path
from typing import Any

import pytest

RUN = """
    from trainable_candle.train import Callback, TrainConfig, Trainer
    from trainable_candle.run import train_adapter

    # Kernels do not compute, so losses and norms have arbitrary values.
    Trainer._require_finite = lambda *_: None

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
# The steps whose calls are checked. With graphs, these steps replay: earlier steps record.
RECORDED = (4, 5, 6)
QUEUED = {"launch", "replay", "product"}


def waits_at_its_end(step: Any) -> bool:
    """Whether the host first queues the whole step, then waits once, and only then reads values."""
    waits = [step.calls.index(call) for call in step.waits]
    after = step.calls[min(waits) :]
    return len(step.of("synchronize")) <= 1 and not QUEUED & {call.kind for call in after}


def digits(base: Path, folder: Path, output: Path, **settings: Any) -> str:
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
def test_a_step_is_replayed_and_waits_once(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run = cuda.run(digits(digits_base, digits_folder, tmp_path / "run", **settings))
    assert run.of("refused") == []
    passes = settings.get("gradient_accumulation", 1)
    for step in RECORDED:
        done = run.after(f"step-{step}")
        assert len(done.of("replay")) == passes, step
        assert waits_at_its_end(done), done.calls
        assert done.of("grow", "map", "capture-begin") == [], step


def test_states_that_cannot_be_pinned_stay_on_the_gpu(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    code = digits(digits_base, digits_folder, tmp_path / "run", optimizer_states="host")
    code = code.replace("report=lambda _: None", "report=print")
    run = cuda.run("    os.environ['TRAINABLE_CANDLE_PINNED_BYTES'] = '0'" + code)
    assert run.of("refused") == []
    (line,) = (line for line in run.output.splitlines() if line.startswith("optimizer: "))
    assert "its states are in GPU memory, not in host memory, because the system gives too" in line
    assert (tmp_path / "run" / "adapter.safetensors").is_file()


@pytest.mark.parametrize("runtime", [None, 0])
def test_a_wrong_prediction_is_reported(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path, runtime: int | None
) -> None:
    """Without the share for kernels and workspaces, the prediction for a tiny model is too low."""
    code = digits(digits_base, digits_folder, tmp_path / "run")
    code = code.replace("report=lambda _: None", "report=print")
    if runtime is not None:
        change = f"from trainable_candle.tasks import estimate; estimate.RUNTIME_BYTES = {runtime}"
        code = f"    {change}\n{code}"
    lines = cuda.run(code).output.splitlines()
    took = [line for line in lines if line.startswith("plan: the run took")]
    assert len(took) == (runtime is not None)
    assert all(" of GPU memory, where " in line and "% more)" in line for line in took)


def test_without_graphs_a_step_waits_once_too(
    cuda: Any, digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = cuda.run(digits(digits_base, digits_folder, output, cuda_graphs=0, lora_dropout=0.1))
    assert run.of("refused", "replay") == []
    first = run.after("step-3").launches
    for step in RECORDED:
        done = run.after(f"step-{step}")
        assert waits_at_its_end(done), done.calls
        assert done.of("grow", "map") == [], step
        assert done.launches == first


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
    for step in RECORDED:
        done = run.after(f"step-{step}")
        assert len(done.of("replay")) == 1, step
        assert waits_at_its_end(done), done.calls
        assert done.of("grow", "map", "capture-begin") == [], step
    assert (tmp_path / "run" / "adapter.safetensors").is_file()


TEXTS = """
    from trainable_candle.data.chats import packing

    given = packing.joined
    numbers = []

    def joined(*arguments):
        packed = given(*arguments)
        numbers.append(len(packed.input_ids))
        return packed

    packing.joined = joined
    train(**{settings!r})
    print("tokens", *sorted(set(numbers)))
"""


def texts(folder: Path, **settings: Any) -> str:
    """The code of a run of the built-in language model on 60 texts of 29 characters.

    As the texts are equally long, they fill all rows equally.
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
    return RUN + TEXTS.replace("{settings!r}", repr(given))


@pytest.mark.parametrize("settings", [{}, {"validation_split": 0.2, "validate_every": 7}], ids=str)
def test_steps_of_texts_are_replayed(cuda: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    run = cuda.run(texts(tmp_path, **settings))
    assert run.of("refused") == []
    # A training batch is padded to the 256 tokens of two rows, so that its step can be replayed. A
    # validation batch has no padding, and its step uses no graph.
    assert "256" in run.output.split()
    for step in RECORDED:
        done = run.after(f"step-{step}")
        assert len(done.of("replay")) == 1, step
        assert waits_at_its_end(done), done.calls
        assert done.of("grow", "map", "capture-begin") == [], step


def test_steps_on_pairs_of_answers_are_not_replayed(cuda: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in range(1, 9)]
    program = texts(tmp_path, objective="dpo")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    assert profile.launches == 300, profile
    assert len(str(profile).splitlines()) == 3
    assert {k.count for k in profile.kernels} == {150}
    products = [k for k in profile.kernels if k.name == "gemm 1 x 64x64x64 CUDA_R_32F"]
    assert len(products) == 1, profile
    for wrong in (tc.cuda.profile("cpu"),):
        try:
            with wrong:
                pass
        except tc.DeviceError as error:
            print(error)
    """
    )
    assert run.of("refused") == []
    assert (
        'profile: found the device "cpu"' in run.output or "found a tensor on the CPU" in run.output
    )


def test_memory_of_graphs_is_freed_with_the_last_graph(cuda: Any) -> None:
    run = cuda.run(
        """
    tc.manual_seed(0)
    weight = tc.randn((1024, 1024), device="cuda")

    def work(x):
        for _ in range(4):
            x = (x @ weight).sigmoid()

    def held():
        return tc.cuda.memory_stats()["graphs"]

    graphs = []
    for rows in (1024, 512, 2048):
        x = tc.zeros((rows, 1024), device="cuda")
        graphs.append(tc.cuda.capture(work, [x]))
        for _ in range(3):
            graphs[-1](x)
        assert graphs[-1].is_recorded and held() > 0
    before = held()
    tc.cuda.empty_cache()
    assert held() == before, (held(), before)
    del graphs[1:]
    tc.cuda.empty_cache()
    assert held() == before
    del graphs[:]
    tc.cuda.empty_cache()
    assert held() == 0
    """
    )
    assert run.of("refused") == []
