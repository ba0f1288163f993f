"""The CUDA calls of a training step on the simulated device, which computes no values."""

from collections import Counter
from typing import Any

# Four training steps. The fixture `cuda` runs this code with `tc`, the package, and `mark`, which
# writes a mark to the log of calls. `after` returns the calls between a mark and the next one.
TRAIN = """
    import numpy as np

    tc.manual_seed(0)
    rng = np.random.default_rng(0)
    F = tc.nn.functional
    weights = [tc.Var(tc.randn(s, dtype="DTYPE", device="cuda")) for s in ((256, 64), (10, 256))]
    fc1, fc2 = (tc.nn.Linear(weight) for weight in weights)
    optimizer = tc.optim.AdamW(weights, lr=0.001)
    x = tc.tensor(rng.standard_normal((32, 64)), dtype="DTYPE", device="cuda")
    labels = tc.tensor(rng.integers(0, 10, 32), dtype="i64", device="cuda")
    for step in range(4):
        mark(f"step-{step}")
        hidden = F.dropout(fc1(x).relu(), 0.2)
        loss = F.cross_entropy(fc2(hidden), labels)
        loss.backward()
        assert [w.grad.shape for w in weights] == [w.shape for w in weights]
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    assert loss.shape == ()
"""


def test_a_step_has_five_products_and_at_most_twenty_launches(cuda: Any) -> None:
    for dtype in ("f32", "bf16"):
        run = cuda.run(TRAIN.replace("DTYPE", dtype))
        # Calls that the simulated libraries reject, because of wrong arguments for example.
        assert run.of("refused") == []
        step = run.after("step-3")
        # Each of the two linear layers has one product in the forward pass and one for the
        # gradient of its weight. The fifth product gives the gradient of the second layer's input.
        assert len(step.of("product")) == 5
        launches = Counter(step.launches)
        assert launches[f"dropout_{dtype}"] == 2  # the backward pass draws the same mask again
        assert launches == Counter(run.after("step-2").launches)
        assert sum(launches.values()) <= 20, launches


def test_a_warm_step_neither_waits_nor_allocates(cuda: Any) -> None:
    run = cuda.run(TRAIN.replace("DTYPE", "f32"))
    for step in ("step-2", "step-3"):
        assert run.after(step).waits == []
        # Pools that grow or shrink, other allocations, and loads of modules (kernels).
        assert run.after(step).of("grow", "shrink", "alloc", "alloc-pinned", "module") == []


def test_each_gpu_loads_the_kernels_of_its_architecture(cuda: Any) -> None:
    """A GPU for which there is no machine code uses PTX: here, one of compute capability 13.0."""
    # Each line begins with a checksum of the module, the architecture and the kernel's name.
    kernels = [line.split() for line in cuda.kernels.read_text().splitlines()]
    # Every architecture has the kernel `fill_f32`.
    architectures = sorted(
        architecture for _, architecture, name, *_ in kernels if name == "fill_f32"
    )
    assert architectures
    for architecture in architectures:
        # The names are such as `sm_90a` (machine code) and `compute_80` (PTX).
        kind, number = architecture.rstrip("a").split("_")
        capability = "13.0" if kind == "compute" else f"{number[:-1]}.{number[-1]}"
        run = cuda.run(TRAIN.replace("DTYPE", "bf16"), settings={"CAPABILITY": capability})
        assert run.of("refused") == []
        assert {call["architecture"] for call in run.of("module")} == {architecture}
