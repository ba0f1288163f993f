"""Kernels that the recomputation of a checkpoint does not launch, on a simulated GPU.

The fixture `cuda` runs a code snippet and returns the log of its CUDA calls. For the snippet, the
fixture defines `tc`, the library, and `mark(name)`, which writes a line to the log.
"""

from collections import Counter
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"

FLUX_STEP = f"""
    folder = {str(GOLDEN / "flux")!r}
    case = tc.load_file(folder + "/transformer_forward.safetensors")
    case.pop("output")
    model = tc.models.FluxTransformer.from_pretrained(
        folder + "/transformer", dtype="bf16", device="cuda"
    )
    model.enable_gradient_checkpointing("full")
    # The layers after the activations have no adapters.
    model.add_adapter(tc.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]))
    given = {{name: value.to("cuda") for name, value in case.items()}}
    given = {{name: v.to("bf16") if v.dtype.is_floating_point else v for name, v in given.items()}}
    mark("forward")
    result = model(**given)
    mark("backward")
    result.to("f32").sum().backward()
    mark("end")
"""


def test_a_recomputation_skips_an_activation_that_nothing_reads(cuda: Any) -> None:
    run = cuda.run(FLUX_STEP)
    forward, backward = (Counter(run.after(name).launches) for name in ("forward", "backward"))
    assert forward["gelu_tanh_beside_forward_bf16"] > 0
    assert backward["gelu_tanh_beside_forward_bf16"] == 0
    # The blocks were recomputed, and their activations differentiated.
    blocks = forward["gelu_tanh_beside_forward_bf16"]
    assert backward["gelu_tanh_beside_backward_bf16"] == blocks
    assert backward["modulated_layer_norm_forward_bf16"] >= blocks
