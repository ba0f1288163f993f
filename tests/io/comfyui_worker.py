"""Loads adapter files with ComfyUI's own code; run as `python comfyui_worker.py CHECKOUT`.

Each line of the standard input is a JSON object with these keys:

- `base`: the path of a model in ComfyUI's own key layout: a denoiser, or a checkpoint if `clip` is
  given.
- `unet`: entries that replace those of the configuration that ComfyUI detects in the model. ComfyUI
  takes some of them, such as the number of heads, from the published model.
- `model`: optional, the name of a class in `comfy.supported_models` to use without detection.
- `clip`: optional, the number of layers of each CLIP in the file.
- `lora`: optional, the path of an adapter to load at strength 1.
- `output`: the path of a file for all weights of the model, in f32, with ComfyUI's names.

ComfyUI also takes some sizes of layers from published models. Therefore each parameter gets the
shape that it has in the file before values are loaded. The answer is a line of JSON on the standard
output: the list of messages of level WARNING and above in ComfyUI's log.

An object with only the key `shapes`, the shapes of a published denoiser's parameters by name, asks
for the names of layers that ComfyUI knows in adapter files. The answer is an object with the shape
of each layer's weight by the name of the layer.
"""

import json
import logging
import os
import sys
from typing import Any

requests = sys.stdin
# ComfyUI prints to the standard output too. So `answers` is a copy of the standard output, and what
# ComfyUI prints goes to the standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
folder = sys.argv[1]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, folder)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.lora  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.supported_models  # noqa: E402
import comfy.utils  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from comfy import model_detection  # noqa: E402


class Messages(logging.Handler):
    """Collects the messages of warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message."""
        self.found.append(record.getMessage())

    def take(self) -> list[str]:
        """The messages since the last call."""
        found, self.found = self.found, []
        return found


messages = Messages()
logging.getLogger().addHandler(messages)
detect = model_detection.detect_unet_config
match = model_detection.model_config_from_unet_config


def load_resized(module: Any, state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
    """Load values into parameters of the values' shapes; parameters without a value become 0."""
    for name, parameter in module.named_parameters():
        parameter.data = torch.zeros_like(state_dict.get(name, parameter))
    return load_state_dict(module, state_dict, *args, **options)


# torch's own function, which `load_resized` calls.
load_state_dict = torch.nn.Module.load_state_dict
torch.nn.Module.load_state_dict = load_resized


def load(request: dict[str, Any]) -> tuple[Any, Any]:
    """ComfyUI's denoiser and text encoders of a model; the second is None without `clip`."""
    changes, name = request["unet"], request.get("model")
    model_detection.detect_unet_config = lambda *a, **k: detect(*a, **k) | changes
    model_detection.model_config_from_unet_config = lambda config, *a, **k: (
        getattr(comfy.supported_models, name)(config) if name else match(config, *a, **k)
    )
    options = {"dtype": torch.float32}
    if "clip" not in request:
        return comfy.sd.load_diffusion_model(request["base"], options), None
    # The sizes in the configuration need not fit the file: `load_resized` resizes the parameters.
    clip = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    clip["num_hidden_layers"] = request["clip"]
    encoders = options | {f"{encoder}_model_config": clip for encoder in ("clip_l", "clip_g")}
    found = comfy.sd.load_checkpoint_guess_config(
        request["base"], output_vae=False, model_options=options, te_model_options=encoders
    )
    return found[:2]


def layers(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The shapes of the layers of a denoiser by their names in adapter files."""
    with torch.device("meta"):
        sd = {name: torch.empty(shape) for name, shape in shapes.items()}
        # `load` may have replaced these two functions.
        model_detection.detect_unet_config = detect
        model_detection.model_config_from_unet_config = match
        model = comfy.sd.load_diffusion_model_state_dict(sd, {"dtype": torch.float32}).model
    weights = model.state_dict()
    found = {}
    # ComfyUI maps a layer's name to the key of its weight. If the layer has only some rows of the
    # weight, it maps the name to a tuple that begins with the key and (dimension, first row, number
    # of rows).
    for name, target in comfy.lora.model_lora_keys_unet(model, {}).items():
        key, rows = (target, None) if isinstance(target, str) else target[:2]
        if key in weights:
            shape = list(weights[key].shape)
            found[name] = [rows[2], *shape[1:]] if rows else shape
    return found


# The last model that was loaded, by its path: consecutive requests often have the same model.
loaded: dict[str, tuple[Any, Any]] = {}
for line in requests:
    request = json.loads(line)
    if "shapes" in request:
        print(json.dumps(layers(request["shapes"])), file=answers, flush=True)
        messages.take()  # The answer to the next request must not have these messages.
        continue
    base = request["base"]
    if base not in loaded:
        loaded = {base: load(request)}
    model, clip = loaded[base]
    if "lora" in request:
        adapter = comfy.utils.load_torch_file(request["lora"])
        # This returns clones with the adapter; those in `loaded` stay without it.
        model, clip = comfy.sd.load_lora_for_models(model, clip, adapter, 1.0, 1.0)
    weights = {}
    for patcher in (model, clip and clip.patcher):
        if patcher:
            patcher.patch_model()
            weights |= {key: w.clone().float() for key, w in patcher.model_state_dict().items()}
            patcher.unpatch_model()
    safetensors.torch.save_file(weights, request["output"])
    print(json.dumps(messages.take()), file=answers, flush=True)
