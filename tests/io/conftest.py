"""The tiny SDXL with an adapter of each kind, and ComfyUI."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.files import safetensors_metadata

SDXL = Path(__file__).parents[1] / "golden" / "sdxl"
ATTENTION: dict[str, Any] = {"r": 4, "lora_alpha": 6.0, "target_modules": ["all-attention"]}
EVERYWHERE: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 2.0,
    "target_modules": ["all-linear", "all-conv"],
}
# The settings of each kind of adapter. LoCon is LoRA on convolutions, too: in "locon_uniform" all
# layers have the same rank and alpha, in "locon" some layers have others. The magnitude of "dora"
# has a value for each output of a layer, that of "dora_input" one for each input. In
# "lokr_both", both factors of LoKr may be low-rank.
KINDS: dict[str, dict[str, Any]] = {
    "lora": ATTENTION,
    "rslora": ATTENTION | {"use_rslora": True},
    "locon_uniform": EVERYWHERE,
    "locon": EVERYWHERE | {"rank_pattern": {"conv1": 2}, "alpha_pattern": {"to_q": 7.0}},
    "dora": EVERYWHERE | {"use_dora": True},
    "dora_input": EVERYWHERE | {"use_dora": True, "wd_on_output": False},
    "loha": EVERYWHERE | {"adapter": "loha"},
    "lokr": EVERYWHERE | {"adapter": "lokr"},
    "oft": EVERYWHERE | {"adapter": "oft", "oft_block_size": 8},
    "lokr_both": EVERYWHERE | {"adapter": "lokr", "decompose_both": True, "decompose_factor": 8},
}


@pytest.fixture
def sdxl() -> Path:
    """The folder of the tiny SDXL."""
    return SDXL


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of adapter in turn."""
    name: str = request.param
    return name


@pytest.fixture
def config_of() -> Callable[[str], tc.LoraConfig]:
    """A function that returns the configuration of a kind of adapter."""
    return lambda kind: tc.LoraConfig(**KINDS[kind])


@pytest.fixture
def unet() -> tc.models.SDXLUNet:
    """The tiny UNet in f32."""
    return tc.models.SDXLUNet.from_pretrained(SDXL / "unet", dtype="f32")


@pytest.fixture
def attach() -> Callable[[tc.models.Model, str], tc.AdapterSet]:
    """A function that adds an adapter to a model and gives it values that change the output."""

    def attach(model: tc.models.Model, kind: str) -> tc.AdapterSet:
        tc.manual_seed(5)
        adapter = model.add_adapter(tc.LoraConfig(**KINDS[kind]))
        for name, var in adapter.named_parameters().items():
            if name.endswith(("magnitude_vector.weight", "dora_scale")):
                var.set(var * (1 + 0.2 * tc.rand(var.shape)))
            else:
                var.set(var + 0.2 * tc.randn(var.shape))
        return adapter

    return attach


class ComfyUI:
    """ComfyUI's own code in another process, which `comfyui_worker.py` runs."""

    def __init__(self, checkout: str, log: Path) -> None:
        script = Path(__file__).with_name("comfyui_worker.py")
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, script, checkout],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def weights(
        self, base: Path, settings: dict[str, Any], lora: Path | None = None
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """The weights of a model after ComfyUI has loaded an adapter, and ComfyUI's warnings.

        Args:
            base: a file of the model in ComfyUI's own layout.
            settings: what `comfyui_worker.py` needs to know about the model.
            lora: the adapter; None loads only the model.
        """
        output = base.with_suffix(".loaded")
        request = settings | {"base": str(base), "output": str(output)}
        if lora:
            request["lora"] = str(lora)
        log = self.ask(request)
        return {k: t.numpy() for k, t in tc.load_file(output).items()}, log

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer of `comfyui_worker.py` to a request."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()[-2000:]
        return json.loads(answer)

    def check(
        self,
        path: Path,
        report: tc.AdapterReport,
        settings: dict[str, Any],
        checkpoint: Callable[[Path, Path | None], Path],
    ) -> float:
        """Assert that ComfyUI does with an adapter what a report says.

        ComfyUI must load the modules that the report does not list as ignored, and no others. The
        result must equal the checkpoint into which this library has merged these modules, except
        in the weights whose adapters ComfyUI applies in part according to the report.

        Args:
            path: the adapter's file, or peft's folder.
            report: what `tc.verify_adapter` says about the file.
            settings: as for `weights`.
            checkpoint: a function that writes a checkpoint in a new folder, with the adapter of a
                file merged into it, or without an adapter, and returns its path.

        Returns:
            The largest difference to the merged weights, divided by the largest absolute value of
            the weight.
        """
        # How ComfyUI applies each module's adapter: "not" at all, in "part" or as a "whole".
        # Modules that fit no layer are "unknown". A module that adapts several layers has several
        # reports, which must agree. Below, a later line overrides the claim of an earlier one.
        claims: dict[str, str] = {}
        for m in report.modules:
            claim = "not" if "ComfyUI" in m.ignored_by else "whole"
            claim = "part" if "ComfyUI" in m.changed_by else claim
            claim = "unknown" if m.layer is None else claim
            assert claims.setdefault(m.module, claim) == claim
        file = path / "adapter_model.safetensors" if path.is_dir() else path
        tensors = tc.load_file(file)
        # The module of each key: of all modules with which the key begins, the longest.
        owner = {key: max((m for m in claims if key.startswith(m)), key=len) for key in tensors}
        folder = file.parent
        base = checkpoint(folder / "base", None)
        plain, problems = self.weights(base, settings)
        assert problems == []
        found, log = self.weights(base, settings, file)
        unread = {message.removeprefix("lora key not loaded: ") for message in log}
        assert unread <= tensors.keys(), log
        for key, module in owner.items():
            if claims[module] != "part":
                assert (key in unread) == (claims[module] in {"not", "unknown"}), key

        def merged(name: str, claimed: set[str]) -> dict[str, np.ndarray]:
            """The weights with the adapters of modules whose claim is among `claimed`.

            `name` is the beginning of the names of the folders that this function makes.
            """
            selected = {k: t for k, t in tensors.items() if claims[owner[k]] in claimed}
            if not selected:
                return plain
            target = folder / name / file.name
            target.parent.mkdir()
            tc.save_file(selected, target, safetensors_metadata(file))
            if path.is_dir():
                shutil.copy(path / "adapter_config.json", target.parent)
            source = target.parent if path.is_dir() else target
            return self.weights(checkpoint(folder / f"{name}_model", source), settings)[0]

        # `partly` also has the adapters that ComfyUI applies in part, with their whole effect.
        whole = merged("whole", {"whole"})
        partly = merged("part", {"whole", "part"}) if "part" in claims.values() else whole
        # If ComfyUI reads some modules, these must change a weight: otherwise the comparison below
        # would show nothing.
        is_read = not {"whole", "part"}.isdisjoint(claims.values())
        assert is_read == any(np.abs(partly[key] - plain[key]).max() > 1e-3 for key in plain)
        worst = 0.0
        for key, value in whole.items():
            scale = np.abs(value).max()
            if (partly[key] != value).any():
                # An adapter that ComfyUI applies in part must not have its whole effect.
                assert np.abs(found[key] - partly[key]).max() > 1e-4 * scale, key
            else:
                error = np.abs(found[key] - value).max() / max(scale, 1e-9)
                assert error <= 1e-5, f"{key}: {error}"
                worst = max(worst, float(error))
        return worst


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """ComfyUI, if the environment variable COMFYUI names the folder of a checkout."""
    checkout = os.environ.get("COMFYUI")
    if not checkout:
        pytest.skip("set COMFYUI to a checkout of ComfyUI, and install its requirements")
    started = ComfyUI(checkout, tmp_path_factory.mktemp("comfyui") / "log")
    with started.process as process:
        yield started
        assert process.stdin
        process.stdin.close()
