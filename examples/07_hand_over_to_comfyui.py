"""Use an adapter in ComfyUI: train it, check what ComfyUI applies, copy it to ComfyUI's folder.

ComfyUI finds a LoRA by its file's name in `models/loras` and applies the modules whose names it
recognises; for other modules it only writes a line in its log. `verify_adapter`, or
`trainable-candle verify FILE`, says which modules of a file each program (ComfyUI, A1111,
diffusers, sd-scripts, peft) applies as they were trained. The script takes some seconds on two
cores:

    python examples/07_hand_over_to_comfyui.py [FOLDER]
"""

import shutil
import sys
from pathlib import Path

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.files import safetensors_metadata
from trainable_candle.run import train_adapter

PHOTOS = Path(__file__).parent / "photos"
STEPS = 20


def main(folder: Path, steps: int = STEPS, comfyui: Path | None = None) -> tc.AdapterReport:
    """Train an adapter, check its file, and copy the file to ComfyUI; returns the report.

    Args:
        folder: the output folder of the run.
        steps: optimizer steps.
        comfyui: ComfyUI's folder; by default `ComfyUI` in `folder`.

    Raises:
        SystemExit: ComfyUI would not apply the file as it was trained.
    """
    run = train_adapter(
        tc.train.TrainConfig(
            model="sdxl",
            dataset=str(PHOTOS),
            output=str(folder),
            # The name of the adapter's file, which ComfyUI shows in its list of LoRAs.
            name="my-photos",
            # A word that is put before every caption, and later into prompts.
            trigger="myphotos",
            rank=8,
            steps=steps,
            batch_size=2,
        )
    )
    # The run has trained on the small SDXL that the package ships, because `TrainConfig` names no
    # weights. `verify_adapter` reads the sizes of this model's layers from `weights`; for an
    # adapter of the published SDXL, omit `weights`.
    weights = families.find("sdxl").default_weights()
    report = tc.verify_adapter(run.adapter_path, "sdxl", weights)
    for tool in report.tools:
        applied = sum(tool not in {*m.ignored_by, *m.changed_by} for m in report.modules)
        print(f"{tool}: {applied} of {len(report.modules)} modules as they were trained")
    # `good`: the first tool, ComfyUI, applies every module as it was trained, and the file has no
    # other fault. The other tools do not count.
    if not report.good:
        raise SystemExit(
            "ComfyUI would not apply all modules of the adapter as they were trained, or the file "
            f"has other faults; `trainable-candle verify {run.adapter_path}` names them"
        )

    # Metadata that programs show, such as title, trigger and resolution.
    for key, value in sorted(safetensors_metadata(run.adapter_path).items()):
        if key.startswith("modelspec."):
            print(f"  {key}: {value}")

    loras = (comfyui or folder / "ComfyUI") / "models" / "loras"
    loras.mkdir(parents=True, exist_ok=True)
    copied = shutil.copy(run.adapter_path, loras)
    print(f"{copied}: in the node LoraLoader, choose {run.adapter_path.name} as lora_name")
    return report


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "comfyui"))
