"""A LoRA training step of full-size language models on a GPU, over a bf16 base of random weights.

python benches/gpu_lm.py [--only qwen2] [--profile] [--liger]

A step is forward, cross-entropy, backward and the optimizer, with f32 LoRA of rank 16 on the seven
linear layers of every block and 8-bit AdamW. Our step is timed without and with a CUDA graph, and
compared with transformers and peft under torch's autocast, if they are installed; `--liger` adds
Liger's kernels. The sequences of a step are separate examples, which our step packs into one row.
Every token except the first of a sequence is a target of the loss.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_timing
import numpy as np
from gpu_sdxl import torch_optimizer
from gpu_timing import GIB, Machine

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = 16
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "silu",
}  # fmt: skip
CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Case:
    """The model, the batch and the kind of checkpointing of a measured step."""

    name: str
    config: dict[str, Any]
    sequences: int
    length: int
    checkpointing: str
    rank: int = RANK

    @property
    def title(self) -> str:
        return f"{self.name}, {self.sequences} x {self.length}, {self.checkpointing} checkpointing"

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def class_name(self) -> str:
        return CLASSES[self.config["model_type"]]

    @property
    def step_flops(self) -> float:
        """The floating-point operations of a step, without those of LoRA.

        The backward pass costs as much as the forward pass in frozen layers, and 2.5 times as much
        in attention.
        """
        config, layers = self.config, self.config["num_hidden_layers"]
        width, heads = config["hidden_size"], config["num_attention_heads"]
        key_width = width * config["num_key_value_heads"] // heads
        # Of a block: the projections of queries and outputs, of keys and values, and three of the
        # feed-forward network.
        weights = width * (2 * width + 2 * key_width + 3 * config["intermediate_size"])
        linear = 2 * self.tokens * layers * weights
        head = 2 * self.tokens * width * config["vocab_size"]
        # Scores and sums of values are two products, each of 2 * tokens * length * width operations
        # in a block. The causal mask hides half of these operations.
        attention = 2 * self.tokens * self.length * width * layers
        recomputed = linear + attention if self.checkpointing == "full" else 0
        return 2 * (linear + head) + 3.5 * attention + recomputed


CASES = (
    Case("qwen2-1.5b", QWEN2, 4, 2048, "no"),
    Case("qwen2-1.5b", QWEN2, 4, 2048, "full"),
    Case("llama3-8b", LLAMA3, 2, 2048, "full"),
)


def prepared(
    case: Case, device: str, base: str | None = None
) -> tuple[tc.models.CausalLM, tc.optim.Optimizer]:
    """Make the model of a case with its adapter, and the adapter's optimizer.

    `base` is the format to which the frozen linear layers are quantized; None: they stay bf16.
    """
    tc.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config | {"architectures": [case.class_name]}))
        model = tc.models.CausalLM.from_config(path, dtype="bf16", device=device, quantize=base)
    if case.checkpointing != "no":
        model.enable_gradient_checkpointing(case.checkpointing)
    config = tc.LoraConfig(r=case.rank, lora_alpha=case.rank, target_modules=LAYERS)
    adapter = model.add_adapter(config)
    return model, tc.optim.AdamW8bit(adapter.parameters(), lr=1e-4)


def step_of(
    case: Case, model: tc.models.CausalLM, optimizer: tc.optim.Optimizer, device: str
) -> Callable[[], tc.Tensor]:
    """Return a function that makes a training step on random tokens and returns the loss."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, case.config["vocab_size"], (case.sequences, case.length))
    targets = np.roll(ids, -1, axis=1)
    targets[:, -1] = -100
    positions = np.tile(np.arange(case.length), case.sequences)
    bounds = np.arange(case.sequences + 1) * case.length
    inputs = [
        tc.tensor(values.reshape(-1).astype(np.int64)).to(device)
        for values in (ids, targets, positions, bounds)
    ]
    count = float((targets >= 0).sum())

    def step() -> tc.Tensor:
        loss = model.packed_loss(*inputs) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def theirs(torch: Any, case: Case, *, liger: bool) -> Callable[[], object]:
    import transformers  # noqa: PLC0415 - optional
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - optional

    if liger:
        import liger_kernel.transformers as kernels  # noqa: PLC0415 - optional

        getattr(kernels, f"apply_liger_kernel_to_{case.config['model_type']}")()
    torch.manual_seed(0)
    kind = getattr(transformers, case.class_name)
    config = kind.config_class(
        **{k: v for k, v in case.config.items() if k != "model_type"},
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = kind(config)
        torch.set_default_dtype(torch.float32)
    model.requires_grad_(requires_grad=False)
    lora = LoraConfig(
        r=case.rank, lora_alpha=case.rank, target_modules=LAYERS, init_lora_weights="gaussian"
    )
    model = inject_adapter_in_model(lora, model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    if case.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    ids = torch.randint(0, case.config["vocab_size"], (case.sequences, case.length), device="cuda")
    optimizer = torch_optimizer(torch, parameters, "adamw8bit")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speed(case: Case, seconds: float) -> str:
    return f"{case.tokens / seconds / 1e3:.1f} k tokens/s"


def run(case: Case, machine: Machine, *, profile: bool, liger: bool) -> None:
    device = machine.device
    gpu_timing.fresh(device)
    step = step_of(case, *prepared(case, device, machine.base), device)
    started = time.perf_counter()
    step().item()
    first = time.perf_counter() - started
    if profile:
        gpu_timing.profiled(step, device)
    eager = gpu_timing.timed(step, device, machine.seconds)
    peak = tc.cuda.memory_stats(device)["peak_allocated"]
    graph = gpu_timing.captured(step, device)
    replayed = gpu_timing.timed(graph, device, machine.seconds)
    # Arithmetic alone: the floor of a step leaves out the bytes that it reads and writes.
    floor = machine.floor("bf16", case.step_flops, moved=0)
    times = gpu_timing.milliseconds(ours=replayed, ours_without_graph=eager, floor=floor)
    print(
        f"{case.title}{gpu_timing.title_suffix(machine)}: {speed(case, replayed)}; {times}; "
        f"peak {peak / GIB:.2f} GiB; first {first:.1f} s",
        flush=True,
    )
    del step, graph
    gc.collect()
    gpu_timing.fresh(device)
    if machine.torch is None:
        return
    try:
        their_step = theirs(machine.torch, case, liger=liger)
    except ImportError as error:
        print(f"  {error}", flush=True)
        return
    their_seconds = gpu_timing.torch_timed(machine.torch, their_step, machine.seconds)
    allocated = machine.torch.cuda.max_memory_allocated() / GIB
    print(
        f"  torch{' with Liger' if liger else ''}: {speed(case, their_seconds)}; "
        f"{their_seconds * 1e3:.1f} ms; peak {allocated:.2f} GiB; "
        f"ours is {their_seconds / replayed:.2f} times as fast",
        flush=True,
    )
    del their_step
    gpu_timing.fresh(device)


def main() -> None:
    parser = gpu_timing.parser(__doc__)
    parser.set_defaults(seconds=2.0)
    # Liger replaces functions of transformers for the whole process, so a run times torch either
    # with Liger's kernels or without them.
    parser.add_argument("--liger", action="store_true", help="run torch with Liger's kernels")
    options = parser.parse_args()
    machine = gpu_timing.start(options)
    for case in CASES:
        if options.only in case.title:
            run(case, machine, profile=options.profile, liger=options.liger)


if __name__ == "__main__":
    main()
