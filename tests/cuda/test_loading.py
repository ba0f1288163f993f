"""Loading weights to a GPU takes little host memory, and training runs load no kernel of candle.

candle is the Rust library whose tensors this package uses. Its kernels are PTX, which the driver
compiles at first use; that takes seconds. The log of the simulated device gives the architecture of
PTX as "any". `run.of("refused")` are the calls that the simulated device rejected.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc

MIB = 1 << 20
# A snippet for `cuda.run`, which imports `tc` before it; the test replaces FOLDER.
# The simulated device allocates device memory in the process that runs LOAD, so this process's
# VmRSS (resident memory) and VmHWM (its peak) include all device memory that was written.
LOAD = """
    from trainable_candle.models import SDXLUNet

    def status(key):
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(key))
        return int(line.split()[1]) * 1024

    # The first calls start threads, load kernels and allocate the buffers that copies go through.
    # They come before the first measurement, so that this memory does not count.
    tc.ones((1024, 1024), device="cuda").to("cpu")
    allocated = tc.cuda.memory_stats()["allocated"]
    resident = status("VmRSS")
    model = SDXLUNet.from_pretrained(FOLDER, "bf16", device="cuda")
    weights = tc.cuda.memory_stats()["allocated"] - allocated
    print(weights, status("VmHWM") - resident - weights)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads Linux's /proc")
def test_loading_a_model_takes_little_host_memory(cuda: Any, tmp_path: Path) -> None:
    tiny_config = Path(tc.__file__).parent / "assets" / "sdxl_tiny" / "unet" / "config.json"
    # Wide enough for a file of more than 500 MiB.
    wider = {"block_out_channels": [128, 768, 768], "attention_head_dim": [2, 12, 12]}
    config = json.loads(tiny_config.read_text()) | wider
    (tmp_path / "config.json").write_text(json.dumps(config))
    tc.models.SDXLUNet.from_config(tmp_path / "config.json").save_pretrained(tmp_path / "model")
    size = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert size > 500 * MIB
    run = cuda.run(LOAD.replace("FOLDER", repr(str(tmp_path / "model"))))
    weights, extra = map(int, run.output.split())
    # The file is f32 and the model bf16.
    assert weights == pytest.approx(size / 2, rel=0.02)
    # The bound leaves room for one tensor, its conversion to bf16 and buffers of copies, but not
    # for the whole file (over 500 MiB).
    assert extra < 192 * MIB, f"{weights / MIB:.0f} MiB of weights took {extra / MIB:.0f} MiB more"


TRAIN = """
    from trainable_candle.train import TrainConfig, Trainer
    from trainable_candle.run import train_adapter

    # Kernels do not compute, so losses and norms have arbitrary values.
    Trainer._require_finite = lambda *_: None
    train_adapter(TrainConfig(**SETTINGS), progress=False, report=lambda _: None)
"""
FAMILIES = ["sdxl", "sd3", "flux", "chroma", "zimage", "flux2", "qwen-image"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_of_images_loads_no_kernel_of_candle(
    cuda: Any, name: str, sdxl_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")
    settings = {
        "model": name, "weights": str(base), "dataset": str(sdxl_folder),
        "output": str(tmp_path / "out"), "device": "cuda", "precision": "bf16", "cache": "memory",
        "resolution": 32, "max_side": 48, "batch_size": 2, "rank": 4, "steps": 3, "loss": "huber",
        "sample_prompts": ["a blur"], "sample_every": 3, "sample_steps": 2,
        "validation_split": 0.25, "validate_every": 3,
    }  # fmt: skip
    run = cuda.run(TRAIN.replace("SETTINGS", repr(settings)))
    assert run.of("refused") == []
    assert run.of("launch")
    assert "any" not in {call["architecture"] for call in run.of("module")}


# Learned scales and validation are separate cases. A run with validation saves its best adapter and
# loads it at the end. Loading rejects learned scales that are not above 0. Such scales are saved
# here, because the simulated device computes no values.
@pytest.mark.parametrize(
    "more",
    [{"qat_learned_scales": True}, {"validation_split": 0.2, "validate_every": 3}],
    ids=["learned scales", "validation"],
)
def test_a_run_of_texts_loads_no_kernel_of_candle(
    cuda: Any, tmp_path: Path, more: dict[str, Any]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(3, 20)))
    settings = {
        "model": "causal-lm", "dataset": str(texts), "output": str(tmp_path / "out"),
        "device": "cuda", "precision": "bf16", "sequence_length": 64, "batch_size": 2, "rank": 4,
        "steps": 3, "qat": "int8", "sample_prompts": ["abc"], "sample_every": 3,
        "sample_tokens": 4, **more,
    }  # fmt: skip
    run = cuda.run(TRAIN.replace("SETTINGS", repr(settings)))
    assert run.of("refused") == []
    assert "any" not in {call["architecture"] for call in run.of("module")}


def test_functions_of_tensors_load_no_kernel_of_candle(cuda: Any) -> None:
    run = cuda.run("""
        import operator
        from itertools import product

        dtypes = ("f32", "f16", "bf16", "f64", "u8", "u32", "i64")
        for source, target in product(dtypes, dtypes):
            x = tc.ones((3, 16), dtype=source, device="cuda").transpose(0, 1)
            assert x.to(target).dtype == target
        for dtype in dtypes:
            x = tc.ones((3, 16), dtype=dtype, device="cuda")
            for name in ("eq", "ne", "lt", "le", "gt", "ge"):
                mask = getattr(operator, name)(x, x[:1])
                assert mask.dtype == "u8" and tc.where(mask, x, 1).shape == x.shape
            assert x[::2].shape == (2, 16) and x[:0].to("u8").shape == (0, 16)
        a, b = (tc.Var(tc.ones(shape, device="cuda")) for shape in ((3, 1), (1, 16)))
        tc.where(a < b, a, b[:, ::-1]).sum().backward()
        assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
        assert tc.ones((0, 3), device="cuda").logsumexp(0).shape == (3,)
    """)
    assert run.of("refused") == []
    assert "any" not in {call["architecture"] for call in run.of("module")}
