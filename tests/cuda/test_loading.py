"""Loading weights to a GPU: how much memory the host needs, and which kernels are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc

MIB = 1 << 20
# The simulated device allocates its memory in this process, so VmRSS and VmHWM include the
# device's memory that was written.
LOAD = """
    from trainable_candle.models import SDXLUNet

    def status(key):
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(key))
        return int(line.split()[1]) * 1024

    # The first calls start threads, load kernels and allocate the ring of copy buffers.
    tc.ones((1024, 1024), device="cuda").to("cpu")
    held = tc.cuda.memory_stats()["allocated"]
    before = status("VmRSS")
    model = SDXLUNet.from_pretrained(FOLDER, "bf16", device="cuda")
    there = tc.cuda.memory_stats()["allocated"] - held
    print(there, status("VmHWM") - before - there)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads Linux's /proc")
def test_a_model_passes_through_little_host_memory(cuda: Any, tmp_path: Path) -> None:
    tiny = Path(tc.__file__).parent / "assets" / "sdxl_tiny" / "unet" / "config.json"
    larger = {"block_out_channels": [128, 768, 768], "attention_head_dim": [2, 12, 12]}
    config = json.loads(tiny.read_text()) | larger
    (tmp_path / "config.json").write_text(json.dumps(config))
    tc.models.SDXLUNet.from_config(tmp_path / "config.json").save_pretrained(tmp_path / "model")
    size = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert size > 500 * MIB
    run = cuda.run(LOAD.replace("FOLDER", repr(str(tmp_path / "model"))))
    there, more = map(int, run.output.split())
    assert there == pytest.approx(size / 2, rel=0.02)
    # Enough for a tensor, its conversion and the ring of copy buffers, but not for the file.
    assert more < 192 * MIB, f"{more / MIB:.0f} MiB beside {there / MIB:.0f} on the device"


def test_text_encoders_run_no_kernel_of_candle(cuda: Any) -> None:
    # Candle's kernels are PTX, which the driver compiles for 10 s at the first use on a machine.
    run = cuda.run("""
        from importlib.resources import files
        base = str(files("trainable_candle") / "assets" / "sdxl_tiny")
        for part in ("text_encoder", "text_encoder_2"):
            model = tc.models.CLIPTextModel.from_pretrained(
                base, dtype="bf16", device="cuda", subfolder=part
            )
            with tc.no_grad():
                model(tc.tensor([[1] * 77], device="cuda"))
    """)
    assert "any" not in {call["architecture"] for call in run.calls if call.kind == "module"}
