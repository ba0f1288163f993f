"""Only requested values are copied from a GPU, each once, through pinned memory.

`cuda.run` (conftest.py) runs code on a simulated GPU, which copies but computes nothing. It returns
a log of the GPU's calls; `run.after(name)` are those between `mark(name)` in the code and the next
mark, and calls of the kind "refused" are those that a real GPU would not accept.
"""

import math
import struct
from json import loads
from pathlib import Path
from typing import Any

import pytest

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F64": 8, "U8": 1}


def copied_bytes(run: Any) -> int:
    """Count the bytes that were copied to the host; assert that all went through pinned memory."""
    copies = [call for call in run.of("copy") if "DtoH" in call["kind"]]
    assert all(call["pageable"] == "0" for call in copies)
    return sum(int(call["bytes"]) for call in copies)


def tensor_bytes(path: Path) -> dict[str, int]:
    """The size in bytes of each tensor in a file."""
    with path.open("rb") as file:
        header = loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    return {
        name: ITEM_BYTES[entry["dtype"]] * math.prod(entry["shape"])
        for name, entry in header.items()
    }


def test_only_the_elements_of_a_view_are_copied(cuda: Any) -> None:
    run = cuda.run("""
    import numpy as np

    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    there = tc.tensor(values, device="cuda")
    reads = {
        "rows": lambda: there[3:5].numpy(),
        "scalar": lambda: there[7, 9].item(),
        "cpu": lambda: there[1000:].to("cpu"),
        "list": lambda: there[5].tolist(),
        "columns": lambda: there[:, 2:4].numpy(),
        "nothing": lambda: there[4:4].numpy(),
    }
    for name, read in reads.items():
        mark(name)
        found = read()
        if name == "rows":
            np.testing.assert_array_equal(found, values[3:5])
        if name == "scalar":
            assert found == values[7, 9]
    mark("end")
    """)
    assert run.of("refused") == []
    # A row has 1024 values of 4 bytes. "columns" are two values of each of the 1024 rows.
    row = 4096
    sizes = {"rows": 2 * row, "scalar": 4, "cpu": 24 * row, "list": row, "columns": 1024 * 2 * 4}
    assert {name: copied_bytes(run.after(name)) for name in sizes} == sizes
    assert copied_bytes(run.after("nothing")) == 0
    assert all(len(run.after(name).of("synchronize")) == 1 for name in sizes)


# The ring has four buffers of 8 MiB, which a large copy uses one after another, again and again.
# 8 MiB fill one buffer, and 9 MiB need a second one. 33 MiB need all four and one of them again,
# and 75 MiB fill the ring more than twice. Each tensor has 3 bytes less, so that its end is not
# aligned.
@pytest.mark.parametrize("mib", [8, 9, 33, 75])
def test_large_tensors_pass_through_the_ring_of_pinned_buffers_unchanged(
    cuda: Any, mib: int
) -> None:
    run = cuda.run(f"""
    import numpy as np

    values = np.random.default_rng(0).integers(0, 256, ({mib} << 20) - 3, dtype=np.uint8)
    there = tc.tensor(values, device="cuda")
    for _ in range(2):
        mark("back")
        np.testing.assert_array_equal(there.numpy(), values)
    """)
    assert run.of("refused") == []
    assert copied_bytes(run.after("back")) == (mib << 20) - 3


SAVE = """
    from pathlib import Path
    from trainable_candle.train import state

    # The test replaces FOLDER, BASE, ADAPTER and DTYPE.
    folder = Path(FOLDER)
    model = tc.models.DigitsTransformer.from_pretrained(BASE, device="cuda")
    adapter = model.add_adapter(tc.LoraConfig(r=16, ADAPTER))
    parameters = adapter.named_parameters()
    optimizer = tc.optim.AdamW8bit(list(parameters.values()), lr=0.1, min_8bit_size=1)
    average = tc.optim.EMA(adapter, 0.9)
    for var in parameters.values():
        var.grad = tc.ones(var.shape, device="cuda")
    optimizer.step()
    tc.cuda.synchronize()
    mark("adapter")
    adapter.save(folder / "adapter.safetensors", DTYPE)
    mark("parameters")
    values = tc.snapshot(parameters)
    mark("optimizer")
    states = optimizer.state_dict()
    mark("average")
    averages = average.state_dict()
    mark("writing")
    tc.save_file(values, folder / "parameters.safetensors")
    tc.save_file(states, folder / "optimizer.safetensors")
    tc.save_file(averages, folder / "average.safetensors")
    mark("end")
"""


@pytest.mark.parametrize("dtype", ["", "dtype='bf16'"], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "lokr", "dora"])
def test_a_save_copies_each_value_once(
    cuda: Any, digits_base: Path, tmp_path: Path, kind: str, dtype: str
) -> None:
    code = SAVE.replace("FOLDER", repr(str(tmp_path))).replace("BASE", repr(str(digits_base)))
    run = cuda.run(code.replace("ADAPTER", f"adapter={kind!r}").replace(", DTYPE", f", {dtype}"))
    assert run.of("refused") == []

    def written(name: str) -> dict[str, int]:
        return tensor_bytes(tmp_path / f"{name}.safetensors")

    parameter_bytes = sum(written("parameters").values())
    assert copied_bytes(run.after("parameters")) == parameter_bytes
    # Alphas are on the host, so they are not copied.
    file = {n: size for n, size in written("adapter").items() if not n.endswith("alpha")}
    # A value that is bf16 in the file is copied as f32.
    widening = 2 if dtype else 1
    assert parameter_bytes == sum(file.values()) * widening
    # For DoRA's files in ComfyUI's form, an f32 ratio of norms is also copied for each magnitude;
    # files in peft's form need none. Other kinds have no magnitudes, so `norm_bytes` is 0.
    magnitude_bytes = sum(size for n, size in file.items() if "dora_scale" in n or "magnitude" in n)
    norm_bytes = magnitude_bytes * widening
    assert copied_bytes(run.after("adapter")) - parameter_bytes in {0, norm_bytes}
    average_bytes = sum(size for n, size in written("average").items() if n != "updates")
    assert copied_bytes(run.after("average")) == average_bytes
    # A kernel counts the optimizer's steps. Kernels do not compute here, so its counter stays 0 and
    # the optimizer's file has no states. The size of the copied states is computed instead: two
    # codes of 1 byte for each element, and two f32 scales for each block of up to 256 elements.
    element_counts = [size // 4 for size in written("parameters").values()]
    state_bytes = sum(2 * count + 8 * math.ceil(count / 256) for count in element_counts)
    # The bound allows for other bytes, such as padding and the step counters.
    surplus = copied_bytes(run.after("optimizer")) - state_bytes
    assert 0 <= surplus <= len(element_counts) * 512 + 4096
    assert copied_bytes(run.after("writing")) == 0
