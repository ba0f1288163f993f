"""SDXL from the command line, as a user runs it, on a tiny model with random weights."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.train.logs import read_json_log, read_log
from trainable_candle.train.state import checkpoints, step_of

PROGRAM = [sys.executable, "-m", "trainable_candle"]
Result = subprocess.CompletedProcess[str]


def run(*arguments: object) -> Result:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_checked(*arguments: object) -> Result:
    """Run a command that must succeed."""
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def check_rejected(result: Result, *texts: str) -> None:
    """Check that a command ended with status 2 and one error, and printed `texts` with it."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for text in texts:
        assert text in result.stderr


@pytest.fixture(scope="module")
def flags(sdxl_base: Path, sdxl_folder: Path) -> Callable[..., list[str]]:
    """A function that returns the arguments of a short run.

    Its keyword arguments are added to its default settings, or override them. A list gives its flag
    once for each item. The value True gives the flag without a value.
    """

    def arguments_of(output: Path, steps: int = 6, **settings: Any) -> list[str]:
        given: dict[str, Any] = {
            "model": "sdxl",
            "weights": sdxl_base,
            "dataset": sdxl_folder,
            "output": output,
            "resolution": 64,
            "rank": 4,
            "steps": steps,
            "cache": "memory",
            "learning_rate": 1e-2,
            # With this seed, `--crop random` changes one of the first two images, and `--flip` does
            # too. So two steps show the effect of either setting.
            "seed": 2,
            "optimizer": "adamw",
            **settings,
        }
        arguments = ["train"]
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            for item in value if isinstance(value, list) else [value]:
                arguments += [flag] if item is True else [flag, str(item)]
        return arguments

    return arguments_of


@pytest.fixture(scope="module")
def trained(flags: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints, validation, previews, averaged weights and TensorBoard logs."""
    output = tmp_path_factory.mktemp("trained") / "run"
    result = run_checked(
        *flags(
            output,
            save_every=2,
            validation_split=0.25,
            validate_every=2,
            sample_prompts=["a blur", "nothing, at all"],
            sample_every=3,
            sample_steps=2,
            ema_decay=0.9,
            tensorboard=True,
        )
    )
    for text in (
        "memory while training",
        "unet weights",
        "latents of 6 images: ",  # 2 of the 8 images are for validation
        "captions: ",
        "6/6",
    ):
        assert text in result.stdout + result.stderr
    return output


def test_a_run_writes_adapters_logs_previews_and_checkpoints(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    expected = ["adapter.safetensors", "adapter-best.safetensors", "config.yaml", "loss.png"]
    expected += ["train.csv", "train.jsonl", "tensorboard", "samples", "previews.png"]
    expected += [f"adapter-step00000{n}.safetensors" for n in (2, 4)]
    assert names == {*expected, *(f"checkpoint-00000{n}" for n in (2, 4, 6))}
    previews = sorted(path.name for path in (trained / "samples").iterdir())
    steps = ["step-000000.png", "step-000003.png", "step-000006.png"]
    # Because there are two prompts, the folder `images` has a file for each image.
    assert previews == ["images", "index.html", *steps]
    rows = read_json_log(trained / "train.jsonl")
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 2, 4, 6]


def test_adapter_files_have_kohyas_keys_and_metadata(
    trained: Path, read_metadata: Callable[[Path], dict[str, str]]
) -> None:
    keys = tc.load_file(trained / "adapter.safetensors").keys()
    start = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    assert f"{start}.lora_down.weight" in keys
    assert all(key.startswith("lora_unet_") for key in keys)
    ends = {key.partition(".")[2] for key in keys}
    assert ends == {"lora_down.weight", "lora_up.weight", "alpha"}
    metadata = read_metadata(trained / "adapter.safetensors")
    assert metadata["ss_mixed_precision"] == "no"
    assert metadata["ss_resolution"] == "(64, 64)"
    assert metadata["modelspec.resolution"] == "64x64"


def test_an_adapter_changes_samples_unless_its_scale_is_tiny(
    sdxl_base: Path, trained: Path, tmp_path: Path
) -> None:
    common = ["sample", "--model", "sdxl", "--weights", sdxl_base, "--prompt", "a blur"]
    common += ["--size", "64x32", "--steps", "3", "--seed", "4", "--guidance", "3"]
    adapter = ["--adapter", trained / "adapter.safetensors"]
    run_checked(*common, "--output", tmp_path / "base.png")
    run_checked(*common, *adapter, "--output", tmp_path / "adapted.png")
    run_checked(*common, *adapter, "--scale", "1e-9", "--output", tmp_path / "off.png")
    base, adapted, off = (pixels(tmp_path / f"{n}.png") for n in ("base", "adapted", "off"))
    assert base.shape == (64, 128, 3)  # `sample` writes small images enlarged, here twofold.
    assert np.abs(off - base).max() <= 1
    assert np.abs(adapted - base).max() > 1


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


@pytest.mark.parametrize("kind", ["folder to folder", "folder to file", "file to file"])
def test_merging_writes_a_checkpoint_that_predicts_the_same(
    sdxl_base: Path, sdxl_file: Path, trained: Path, tmp_path: Path, kind: str
) -> None:
    weights = sdxl_file if kind == "file to file" else sdxl_base
    output = tmp_path / ("merged" if kind == "folder to folder" else "merged.safetensors")
    adapter = ["--adapter", trained / "adapter.safetensors"]
    merge = ["merge", "--model", "sdxl", "--weights", weights, *adapter, "--dtype", "f32"]
    run_checked(*merge, "--output", output)
    check_rejected(run(*merge, "--output", output), "which exists")

    def predict(path: Path, adapter: Path | None = None) -> np.ndarray:
        config = sdxl_base / "unet" / "config.json"
        unet = tc.models.SDXLUNet.from_pretrained(
            path, dtype="f32", subfolder="unet", config=config
        )
        if adapter is not None:
            unet.load_adapter(adapter)
        # One sample: 4 latent channels of 8x8, 7 text tokens of width 20.
        tc.manual_seed(0)
        latents, text = tc.randn((1, 4, 8, 8)), tc.randn((1, 7, 20))
        pooled, sizes = tc.randn((1, 12)), tc.ones((1, 6))
        with tc.no_grad():
            return unet(latents, 500.0, text, text_embeds=pooled, time_ids=sizes).numpy()

    expected = predict(weights, trained / "adapter.safetensors")
    assert np.abs(expected - predict(weights)).max() > 1e-3
    np.testing.assert_allclose(predict(output), expected, atol=1e-4)


def test_merging_an_adapter_of_unet_and_text_encoders_draws_the_same(
    flags: Callable[..., list[str]], sdxl_base: Path, tmp_path: Path
) -> None:
    result = run_checked(*flags(tmp_path / "run", 3, train_text_encoder=True))
    assert "learnt nothing" not in result.stdout
    adapter = ["--adapter", tmp_path / "run" / "adapter.safetensors"]
    base = ["--model", "sdxl", "--weights", sdxl_base]
    run_checked("merge", *base, *adapter, "--dtype", "f32", "--output", tmp_path / "merged")
    drawing = ["--prompt", "a blur", "--size", "64", "--steps", "2", "--seed", "3"]
    run_checked("sample", *base, *adapter, *drawing, "--output", tmp_path / "adapted.png")
    merged = ["--model", "sdxl", "--weights", tmp_path / "merged"]
    run_checked("sample", *merged, *drawing, "--output", tmp_path / "merged.png")
    run_checked("sample", *base, *drawing, "--output", tmp_path / "base.png")
    drawn = {name: pixels(tmp_path / f"{name}.png") for name in ("adapted", "merged", "base")}
    assert np.abs(drawn["merged"] - drawn["adapted"]).max() <= 1
    assert np.abs(drawn["base"] - drawn["adapted"]).max() > 1


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of an adapter file, without the header: it names the run."""
    return {name: tensor.numpy().tobytes() for name, tensor in tc.load_file(path).items()}


def check_same_adapters(one: Path, other: Path, *names: str) -> None:
    """Check that the files `names` of two runs have the same tensors."""
    for name in names:
        assert contents(one / name) == contents(other / name), name


@pytest.mark.parametrize("extra", [{}, {"train_text_encoder": True, "lora_dropout": 0.1}], ids=str)
def test_a_run_stopped_by_a_signal_resumes_bit_for_bit(
    flags: Callable[..., list[str]], tmp_path: Path, extra: dict[str, Any]
) -> None:
    extra = {**extra, "validation_split": 0.25, "validate_every": 3, "ema_decay": 0.9}
    output = tmp_path / "a run"
    command = [*PROGRAM, *flags(output, 100_000, save_every=50, **extra)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for_steps(process, output / "train.csv", 3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    # The resumed run takes three more steps; this `--steps` replaces the 100,000.
    steps = step_of(checkpoints(output)[-1]) + 3
    # The last line is the command that continues the run. It begins with the program's name.
    advice = shlex.split(errors.splitlines()[-1])
    run_checked(*advice[1:], "--steps", steps)
    run_checked(*flags(tmp_path / "unbroken", steps, save_every=50, **extra))
    check_same_adapters(
        output, tmp_path / "unbroken", "adapter.safetensors", "adapter-best.safetensors"
    )


def wait_for_steps(process: subprocess.Popen[str], log: Path, steps: int) -> None:
    while len(read_log(log)) < steps:
        assert process.poll() is None
        time.sleep(0.01)


def test_the_next_run_reads_the_cache_on_disk(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = {"cache": "disk", "cache_dir": tmp_path / "cache"}
    first = run_checked(*flags(tmp_path / "a", 2, **settings)).stdout
    second = run_checked(*flags(tmp_path / "b", 2, **settings)).stdout
    assert "latents of 8 images: 0 found, 8 made" in first
    assert "latents of 8 images: 8 found, 0 made" in second
    check_same_adapters(tmp_path / "a", tmp_path / "b", "adapter.safetensors")
    run_checked(*flags(tmp_path / "c", 2, cache="off"))
    check_same_adapters(tmp_path / "a", tmp_path / "c", "adapter.safetensors")


@pytest.mark.parametrize("form", ["kohya", "diffusers", "comfyui"])
@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_an_adapter_of_unet_and_text_encoders_is_read_back_from_every_format(
    flags: Callable[..., list[str]], sdxl_base: Path, tmp_path: Path, form: str, precision: str
) -> None:
    output = tmp_path / "run"
    settings = {"format": form, "adapter_precision": precision, "train_text_encoder": True}
    prompt = {"sample_prompts": "a blur", "sample_steps": 2, "guidance": 1.5}
    run_checked(*flags(output, 3, **settings, **prompt))
    dtypes = {str(tensor.dtype) for tensor in tc.load_file(output / "adapter.safetensors").values()}
    assert precision in dtypes
    common = ["sample", "--model", "sdxl", "--weights", sdxl_base, "--prompt", "a blur"]
    common += ["--size", "64", "--steps", "2", "--guidance", "1.5"]
    drawn = tmp_path / "drawn.png"
    run_checked(*common, "--adapter", output / "adapter.safetensors", "--output", drawn)
    difference = np.abs(pixels(drawn) - pixels(output / "samples" / "step-000003.png"))
    assert difference.max() <= (1 if precision == "f32" else 3)
    # A second run can start from the adapter. The second run's preview at step 0 equals the image
    # that `sample` drew with the adapter.
    again = tmp_path / "again"
    start = {"initial_adapter": output / "adapter.safetensors", **settings, **prompt}
    run_checked(*flags(again, 1, **start))
    difference = np.abs(pixels(drawn) - pixels(again / "samples" / "step-000000.png"))
    assert difference.max() <= (1 if precision == "f32" else 3)


# OFT takes no rank, so its entry sets the default rank instead of the 4 of `flags`.
SETTINGS: list[dict[str, Any]] = [
    {"prediction_type": "v_prediction"}, {"loss": "huber"},
    {"loss": "huber", "huber_delta": 0.5}, {"loss": "huber", "huber_schedule": "snr"},
    {"timesteps": "logit_normal"}, {"timestep_shift": 3}, {"min_timestep": 500},
    {"max_timestep": 500}, {"min_snr_gamma": 0.01}, {"noise_offset": 0.1}, {"clip_skip": 1},
    {"multires_noise_iterations": 6}, {"color_brightness": 0.5}, {"color_hue": 0.5},
    {"caption_dropout": 1}, {"caption_shuffle": True}, {"trigger": "sks"}, {"flip": True},
    {"crop": "random"}, {"no_bucketing": True}, {"resolution": 32},
    {"train_text_encoder": True}, {"adapter": "loha"}, {"adapter": "lokr"},
    {"adapter": "oft", "rank": 16}, {"target_modules": "to_q"},
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(
    flags: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The bytes of each tensor of the adapter that 2 steps with the default `flags` write."""
    output = tmp_path_factory.mktemp("plain") / "run"
    run_checked(*flags(output, 2))
    return contents(output / "adapter.safetensors")


@pytest.mark.parametrize("change", SETTINGS, ids=str)
def test_a_setting_of_training_changes_the_adapter(
    flags: Callable[..., list[str]], tmp_path: Path, plain: dict[str, bytes], change: dict[str, Any]
) -> None:
    run_checked(*flags(tmp_path / "run", 2, **change))
    assert contents(tmp_path / "run" / "adapter.safetensors") != plain


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_checkpointing": "full"},
        {"gradient_checkpointing": "selective"},
        {"threads": 1},
        {"sample_prompts": "a blur", "sample_steps": 1, "negative_prompt": "sharp"},
        {"validation_dataset": "DATASET", "validate_every": 1},
        {"log_every": 2},
    ],
    ids=str,
)
def test_checkpointing_threads_previews_validation_and_logs_do_not_change_the_adapter(
    flags: Callable[..., list[str]],
    sdxl_folder: Path,
    tmp_path: Path,
    plain: dict[str, bytes],
    change: dict[str, Any],
) -> None:
    # The folder is known only here, in the test.
    change = {k: sdxl_folder if v == "DATASET" else v for k, v in change.items()}
    run_checked(*flags(tmp_path / "run", 2, **change))
    assert contents(tmp_path / "run" / "adapter.safetensors") == plain


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_runs_in_16_bit_floats_train_and_draw(
    flags: Callable[..., list[str]], tmp_path: Path, precision: str
) -> None:
    settings = {"sample_prompts": "a blur", "sample_steps": 2, "validation_split": 0.2}
    run_checked(*flags(tmp_path / "run", 3, precision=precision, **settings))
    losses = [float(row["loss"]) for row in read_log(tmp_path / "run" / "train.csv")]
    assert np.isfinite(losses).all()


def test_faulty_datasets_are_rejected_unless_a_setting_handles_the_fault(
    flags: Callable[..., list[str]], sdxl_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    check_rejected(run(*flags(out, dataset=empty)), "holds no images")
    check_rejected(run(*flags(out, dataset=tmp_path / "none")), "there is no folder")

    broken = tmp_path / "broken"
    shutil.copytree(sdxl_folder, broken)
    (broken / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    (broken / "bad.txt").write_text("bad")
    check_rejected(run(*flags(out, dataset=broken)), "1 of 9 images", "bad.png: cannot be decoded")
    result = run_checked(*flags(out, 1, dataset=broken, skip_bad=True))
    assert "bad.png" in result.stdout

    uncaptioned = tmp_path / "uncaptioned"
    uncaptioned.mkdir()
    Image.new("RGB", (64, 64)).save(uncaptioned / "a.png")
    check_rejected(
        run(*flags(tmp_path / "o2", dataset=uncaptioned)), "a.png: no caption", "--caption"
    )
    run_checked(*flags(tmp_path / "o3", 1, dataset=uncaptioned, caption="a square"))


def test_a_huge_image_is_rejected_before_it_is_decoded(
    flags: Callable[..., list[str]], sdxl_folder: Path, tmp_path: Path
) -> None:
    huge = tmp_path / "huge"
    shutil.copytree(sdxl_folder, huge)
    Image.new("1", (20_000, 20_000)).save(huge / "huge.png")
    (huge / "huge.txt").write_text("huge")
    check_rejected(run(*flags(tmp_path / "out", dataset=huge)), "huge.png", "too large")


def test_paths_may_contain_spaces_and_emoji(
    flags: Callable[..., list[str]], sdxl_folder: Path, sdxl_base: Path, tmp_path: Path
) -> None:
    dataset, output = tmp_path / "my \U0001f408 images", tmp_path / "out \U0001f408 \u00e9"
    weights = tmp_path / "the \U0001f408 model"
    shutil.copytree(sdxl_folder, dataset)
    (dataset / "0.png").rename(dataset / "a \U0001f408.png")
    (dataset / "0.txt").rename(dataset / "a \U0001f408.txt")
    shutil.copytree(sdxl_base, weights)
    run_checked(*flags(output, 1, dataset=dataset, weights=weights, cache="disk"))
    assert (output / "adapter.safetensors").is_file()


def test_weights_that_are_missing_damaged_or_of_another_model_are_rejected(
    flags: Callable[..., list[str]],
    digits_base: Path,
    sdxl_base: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    check_rejected(run(*flags(out, weights=digits_base)), "is not a model of SDXL", "unet")
    check_rejected(run(*flags(out, weights=tmp_path / "none")), "there is no file or folder")
    # The weights look like a name on the hub, but no test may connect to the hub.
    unreachable = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [*PROGRAM, *flags(out, weights="nobody/nothing")]
    check_rejected(
        subprocess.run(command, capture_output=True, text=True, check=False, env=unreachable),
        "nobody/nothing: there is no such file or folder",
    )
    check_rejected(
        run(*flags(out, weights=digits_base / "model.safetensors")), "is not a checkpoint of SDXL"
    )
    check_rejected(
        run(*flags(out, model="digits", resolution=64)), "have no effect on the model `digits`"
    )
    truncated = tmp_path / "truncated"
    shutil.copytree(sdxl_base, truncated)
    path = truncated / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    check_rejected(run(*flags(out, weights=truncated)), "diffusion_pytorch_model.safetensors")


def test_the_adapter_of_another_model_is_rejected(
    sdxl_base: Path, digits_folder: Path, digits_base: Path, tmp_path: Path
) -> None:
    run_checked(
        *("train", "--model", "digits", "--weights", digits_base, "--dataset", digits_folder),
        *("--output", tmp_path / "digits", "--steps", 1, "--rank", 2),
    )
    adapter = tmp_path / "digits" / "adapter.safetensors"
    common = ["--model", "sdxl", "--weights", sdxl_base, "--adapter", adapter]
    drawing = ["--prompt", "x", "--steps", "1", "--output", tmp_path / "a.png"]
    check_rejected(run("sample", *common, *drawing), "adapter")
    check_rejected(run("merge", *common, "--output", tmp_path / "merged"), "adapter")
    assert not (tmp_path / "merged").exists()


def test_an_output_that_cannot_be_written_is_rejected(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    check_rejected(run(*flags(tmp_path / "file" / "out")), "file")
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        check_rejected(run(*flags(locked / "out")), "Permission denied")


def test_a_run_that_cannot_fit_is_rejected_with_settings_that_fit(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    result = run(*flags(tmp_path / "out", batch_size=64, vram=0.25, gradient_checkpointing="none"))
    check_rejected(result, "the run needs about", "with --batch-size 1")
    assert not (tmp_path / "out").exists()


def test_weights_may_be_a_pipeline_on_the_hub(
    flags: Callable[..., list[str]], sdxl_base: Path, tmp_path: Path, plain: dict[str, bytes]
) -> None:
    """The hub cannot be reached, but its cache on disk has the pipeline."""
    revision = "0" * 40
    repository = tmp_path / "hub" / "models--someone--tiny-sdxl"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    shutil.copytree(sdxl_base, repository / "snapshots" / revision)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [*PROGRAM, *flags(tmp_path / "run", 2, weights="someone/tiny-sdxl")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "run" / "adapter.safetensors") == plain
