"""A run that gets only weights and images has the values that the guides in docs/ describe."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.cli import main
from trainable_candle.errors import ConfigError
from trainable_candle.files import safetensors_metadata
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import LatentTask
from trainable_candle.train import TrainConfig

DOCS = Path(__file__).parents[3] / "docs"
BLOCKS = r"transformer_blocks\.\d+\."
FLUX_LAYERS = rf"{BLOCKS}(attn|ff|ff_context)\..*|single_{BLOCKS}attn\..*"


class Guide(NamedTuple):
    """What the guide of a family says, and the values that it says."""

    name: str
    """The name of the document without `.md`."""
    sentences: tuple[str, ...]
    """Parts of the guide that have the values below."""
    layers: str
    """The pattern of the names of the adapted layers."""
    steps: int
    guidance: float
    """The guidance of drawing; the file of an image says it."""
    shift: float = 1.0
    rate: float = 1e-4
    norm: float = 1.0
    """The limit of the norm of gradients."""


GUIDES = {
    "sd3": Guide(
        "sd3",
        ("levels have the distribution `logit_normal` and are shifted by the scheduler's shift, 3",
         "Adapters are on `to_q`, `to_k`, `to_v` and `to_out.0` of all blocks",
         "in medium's dual-attention blocks, on these layers of both attentions.",
         "Gradients are clipped to a norm of 0.1",
         "by default in 28 steps with a guidance of 4.5."),
        rf"{BLOCKS}attn2?\.to_(q|k|v|out\.0)", 28, 4.5, shift=3.0, norm=0.1,
    ),
    "flux": Guide(
        "flux",
        ("Noise levels are drawn from the distribution `logit_normal`, without a shift",
         "Adapters are on the attention and the feed-forward layers of the double-stream blocks,",
         "and on the attention of the single-stream blocks.",
         "In previews and in `sample` it is the value of `--guidance`, 3.5 by default.",
         "by default in 28 steps for dev"),
        FLUX_LAYERS, 28, 3.5,
    ),
    "chroma": Guide(
        "chroma",
        ("Noise levels are drawn from the distribution `logit_normal`;",
         "Adapters are on the attention and the feed-forward layers of the double-stream blocks,",
         "and on the attention of the single-stream blocks, as for Flux.1.",
         "with classifier-free guidance of 5, in 35 steps"),
        FLUX_LAYERS, 35, 5.0,
    ),
    "zimage": Guide(
        "z-image",
        ("levels have the distribution `logit_normal` and are shifted by the scheduler's shift, 3",
         "Adapters are on the attention and the feed-forward layers of the 30 blocks",
         "that read image and text together, not on the refiner blocks before them.",
         "by default in 50 steps, as in diffusers, with a classifier-free guidance of 5."),
        r"layers\.\d+\.(attention|feed_forward)\..*", 50, 5.0, shift=3.0,
    ),
    "flux2": Guide(
        "flux2",
        ("Noise levels are drawn from the distribution `logit_normal`.",
         "Adapters are on the attention layers of the image tokens in the double-stream blocks,",
         "and on both linear layers of the single-stream blocks",
         "base models are drawn with a classifier-free guidance of 4 in 50 steps"),
        rf"{BLOCKS}attn\.to_(q|k|v|out\.0)|single_{BLOCKS}.*", 50, 4.0,
    ),
    "qwen-image": Guide(
        "qwen-image",
        ("Noise levels have the distribution `logit_normal` without a shift",
         "Adapters are on the attention and the feed-forward layers of all 60 blocks,",
         "for image tokens and for text tokens. Four layers of the last block get no adapter",
         "50 steps, and a guidance scale of 4"),
        rf"{BLOCKS}(attn|img_mlp|txt_mlp)\..*", 50, 4.0, rate=5e-5,
    ),
}  # fmt: skip


LICENCES = ("Apache-2.0", "Stability AI Community License",
            "FLUX.1 [dev] Non-Commercial License", "FLUX Non-Commercial License")  # fmt: skip


@cache
def words_of(document: str) -> str:
    """Return a document with single spaces between its words."""
    return " ".join((DOCS / f"{document}.md").read_text().split())


@pytest.fixture(params=GUIDES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a family."""
    return request.param


@pytest.fixture
def base(name: str, request: pytest.FixtureRequest) -> Path:
    """Return the folder of the family's tiny pipeline."""
    return request.getfixturevalue(f"{name.replace('-', '_')}_base")


def table_of_settings() -> dict[str, str]:
    """Return the settings of docs/settings.md that have the same default for all models."""
    pattern = r"^\| `--([\w-]+)` \| [^|]* \| `([^`]*)` \|"
    rows = re.findall(pattern, (DOCS / "settings.md").read_text(), re.MULTILINE)
    assert len(rows) > 60
    return {flag.replace("-", "_"): text for flag, text in rows}


def as_in_the_table(value: object) -> str:
    """Return how the table of settings writes a value."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def test_the_guides_have_the_values(name: str) -> None:
    guide = GUIDES[name]
    assert [part for part in guide.sentences if part not in words_of(guide.name)] == []
    assert "learning rate of image models is 1e-4, and that of Qwen-Image 5e-5" in words_of(
        "training"
    )
    # The limit of the norm of gradients.
    assert "(default: 1; sd3: 0.1)" in words_of("settings")


def terms_of(text: str) -> tuple[set[str], set[str], bool]:
    """Return the sizes in GB, the licences, and whether a login is needed, as a text says them."""
    licences = {licence for licence in LICENCES if licence in text}
    return set(re.findall(r"\d+(?= GB)", text)), licences, "login" in text


def test_the_error_for_missing_weights_and_the_help_have_the_terms_of_the_guide(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have the sizes and the licences of the weights, and say whether a login is needed."""
    with pytest.raises(ConfigError, match="needs its checkpoint; give --weights PATH: ") as caught:
        families.weights_of(name, None)
    advice = str(caught.value).partition("PATH: ")[2]
    guide = words_of(GUIDES[name].name)
    found = terms_of(guide.partition("## Weights")[2].partition(" ## ")[0])
    sizes, licences, _ = found
    assert sizes
    assert licences
    assert terms_of(advice) == found
    # The repository that the guide's first command loads.
    (repository, *_) = re.findall(r"[\w-]+/[\w.-]+", advice)
    assert f"--weights {repository} " in guide
    # The lines of the help break at other places.
    assert main(["train", "--help-all"]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert "".join(f"{name}: {advice}".split()) in text


def test_a_run_with_weights_and_images_has_the_documented_values(
    name: str, base: Path, sdxl_folder: Path, tmp_path: Path
) -> None:
    guide = GUIDES[name]
    given = {"device": "cpu", "steps": 1, "resolution": 32, "max_side": 48, "cache": "memory"}
    run = train_adapter(
        TrainConfig(
            model=name, weights=str(base), dataset=str(sdxl_folder), output=str(tmp_path), **given
        ),
        progress=False,
        report=lambda _: None,
    )
    used = yaml.safe_load((tmp_path / "config.yaml").read_text())
    expected = table_of_settings()
    # The run replaces "auto" by what it has chosen.
    chosen = {key for key, value in expected.items() if value == "auto"}
    compared = (expected.keys() & used.keys()) - chosen - given.keys()
    assert len(compared) > 50
    wrong = {key: used[key] for key in compared if as_in_the_table(used[key]) != expected[key]}
    assert wrong == {}
    assert used["learning_rate"] == guide.rate
    assert float(safetensors_metadata(run.adapter_path)["ss_max_grad_norm"]) == guide.norm

    tensors = tc.load_file(run.adapter_path)
    layers = {key.partition(".")[2].rpartition(".lora_")[0] for key in tensors}
    known = tc.inspect(base).parts["transformer"].layers
    described = {layer for layer in known if re.fullmatch(guide.layers, layer)}
    assert layers <= described
    left_out = described - layers
    if name == "qwen-image":
        # The guide says this of the last block, which in the tiny model is block 1.
        assert len(left_out) == 4
        assert all(re.fullmatch(r"transformer_blocks\.1\..*(add_|txt_).*", x) for x in left_out)
    else:
        assert left_out == set()

    # The odds of a level x are x / (1 - x). With `logit_normal` their logarithms are normally
    # distributed. A shift multiplies the odds. The tolerances are five standard errors.
    assert isinstance(run.task, LatentTask)
    count = 20_000
    latents = tc.zeros((count, 1, 1, 1))
    # The latents are those of the samples 0, 1, ... of a run with the seed 0. The times are the
    # levels times 1000.
    times = run.task.family.objective("cpu").noise(latents, range(count), 0)["times"].numpy()
    levels = times.astype(np.float64) / 1000
    log_odds = np.log(levels / (1 - levels))
    assert abs(log_odds.mean() - np.log(guide.shift)) < 5 / np.sqrt(count)
    assert abs(log_odds.std() - 1) < 5 / np.sqrt(2 * count)


def test_an_image_is_drawn_with_the_documented_steps_and_guidance(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the image says them. For speed, the denoiser returns the latents."""
    guide, output = GUIDES[name], tmp_path / "image.png"
    monkeypatch.setattr(families.find(name), "predict", lambda _, sample, *__: sample)
    base_arguments = ["--model", name, "--weights", str(base), "--device", "cpu"]
    drawing = ["--prompt", "a", "--size", "32x16", "--output", str(output)]
    assert main(["sample", *base_arguments, *drawing]) == 0
    with Image.open(output) as image:
        parameters = image.info["parameters"]
    assert f"Steps: {guide.steps}," in parameters
    (guidance,) = re.findall(r"CFG scale: ([\d.]+)", parameters)
    assert float(guidance) == guide.guidance
