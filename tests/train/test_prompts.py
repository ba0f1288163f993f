"""Prompts with settings, files of prompts, settings stored in images, and overviews of previews."""

from pathlib import Path

import pytest
from PIL import Image

from trainable_candle import plot
from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.run import train_adapter
from trainable_candle.settings.prompts import expanded
from trainable_candle.sheet import PAGE, SHEET, preview_path, write_sheet
from trainable_candle.tasks.latent.drawing import DrawingDefaults, SampleOptions
from trainable_candle.tasks.latent.prompts import Place, Prompt, infotext, parse_prompt
from trainable_candle.train import TrainConfig

DEFAULT = SampleOptions(steps=25, seed=3, size=(64, 64))


def test_kohyas_settings_follow_a_prompt() -> None:
    text = "a cat, sitting -- really --w 1024 --h 768 --d 1 --n blurry, dark --l 6.5 --s 30"
    prompt = parse_prompt(text, DEFAULT)
    assert prompt.text == "a cat, sitting -- really"
    assert prompt.options == SampleOptions(
        steps=30, seed=1, guidance=6.5, negative_prompt="blurry, dark", size=(1024, 768)
    )
    assert parse_prompt("a cat", DEFAULT) == Prompt("a cat", DEFAULT)
    assert parse_prompt("a cat --w 128", DEFAULT).options.size == (128, 64)
    assert parse_prompt(text.replace("--w", "--W").replace("--n", "--N"), DEFAULT) == prompt
    assert parse_prompt("--d 5", DEFAULT) == Prompt(
        "", SampleOptions(steps=25, seed=5, size=(64, 64))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a --x 3", "--x is not known, expected one of --w, --h, --d"),
        ("a --w big", "--w is 'big', expected a number of at least 1"),
        ("a --s 0", "--s is '0', expected a number of at least 1"),
        ("a --l nan", "--l is 'nan'"),
        ("a --d", "--d is '', expected a number"),
        ("a --l 3 --g 4", "--g sets guidance a second time"),
        ("a --w 64 --W 128", "--w is given a second time"),
        ("a --w=64", "--w=64 is not known, .* with a space before the value"),
        ("a --AR 16:9", "--AR is not known"),
        ("a --ss ddim", "--ss is 'ddim', expected one of euler, dpmpp_2m"),
    ],
)
def test_wrong_settings_of_a_prompt_are_reported(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_prompt(text, DEFAULT)
    # Without a default size, one side alone is not enough.
    with pytest.raises(ConfigError, match="give both --w and --h"):
        parse_prompt("a --w 8", SampleOptions())


def test_a_json_file_of_prompts_is_rejected_but_a_prompt_may_end_with_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.JSON"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"prompts are not read from .*prompts\.JSON"):
        expanded([str(path)])
    assert expanded(["a cup on data.json"]) == ["a cup on data.json"]


def test_a_folder_in_place_of_a_file_of_prompts_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.txt").mkdir()
    with pytest.raises(ConfigError, match=r"p\.txt is a folder, expected a file"):
        expanded([str(tmp_path / "p.txt")])


def test_a_file_of_prompts_is_replaced_by_its_lines_and_rejected_if_empty_or_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("# for tests\na cat --d 1\n\n  a dog\n", encoding="utf-8")
    assert expanded(["a bird", str(path)]) == ["a bird", "a cat --d 1", "a dog"]
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no prompt; expected one on each line"):
        expanded([str(path)])
    with pytest.raises(MissingFileError, match="--prompt: there is no file"):
        expanded([str(tmp_path / "missing.txt")], "--prompt")


def test_an_image_has_its_settings_in_a1111s_format() -> None:
    options = SampleOptions(seed=7, negative_prompt="blurry", sampler="dpmpp_2m")
    prompt = Prompt("a cat", options)
    # A `Place` is the index of an image in its batch, and the number of images in the batch.
    assert infotext(
        prompt, "sdxl", DrawingDefaults(steps=20, guidance=5.0), (64, 32), Place(number=0, count=1)
    ) == (
        "a cat\nNegative prompt: blurry\n"
        "Steps: 20, Sampler: DPM++ 2M, CFG scale: 5, Seed: 7, Size: 64x32, Model: sdxl"
    )
    # Commas separate the settings, so spaces replace those in the model's name.
    assert infotext(
        prompt, "a, b", DrawingDefaults(20, 1.0), (64, 32), Place(number=1, count=2)
    ).endswith("Model: a  b, Batch size: 2, Batch pos: 1")
    # A guidance of 1 uses no negative prompt.
    assert "Negative" not in infotext(
        prompt, "sdxl", DrawingDefaults(20, 1.0), (64, 32), Place(0, 1)
    )


def test_the_sheet_and_page_show_previews_by_step(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    (folder / "images").mkdir(parents=True)
    prompts = ["a <cat>", "a dog"]
    for step in range(0, 1500, 100):
        for number in (1, 2):
            image = Image.new("RGB", (300 * number, 200), (step % 256, 0, 0))
            plot.save_png(image, preview_path(folder, step, number))
    # A step without the image of one of its prompts is left out: 14 of 15 steps remain.
    preview_path(folder, 100, 2).unlink()
    write_sheet(folder, prompts)
    page = (folder / PAGE).read_text()
    assert "a &lt;cat&gt;" in page
    assert page.count("<img") == 14 * len(prompts)
    assert page.index("step-001400-1.png") < page.index("step-000000-1.png")
    # The sheet has at most 12 columns. Its thumbnails are 192 px wide at most; they are 128 px high
    # for the first prompt and 64 px high for the second. Each row has a line of text of 14 px. The
    # steps are in another line of 14 px above the rows, followed by a gap. All gaps are 4 px.
    with Image.open(tmp_path / SHEET) as sheet:
        assert sheet.size == (12 * (192 + 4) + 4, 18 + (128 + 14) + (64 + 14))


def test_a_run_draws_each_prompt_with_its_own_settings(config: TrainConfig, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a zero --d 5 --s 4\na one\n")
    with_prompts = config.with_(sample_prompts=[str(file)], sample_every=6)
    run = train_adapter(with_prompts, progress=False, report=lambda _: None)
    samples = run.output / "samples"
    with Image.open(preview_path(samples, 6, 1)) as image:
        text = image.text["parameters"]  # type: ignore[attr-defined]
    assert text.startswith("a zero\nSteps: 4, Sampler: Euler")
    assert "Seed: 5" in text
    assert (run.output / SHEET).is_file()
    assert (samples / PAGE).read_text().count("<img") == 2 * 3  # 2 prompts after 0, 6 and 12 steps
    # The configuration holds the prompts of the file, not its path.
    assert TrainConfig.from_yaml(run.output / "config.yaml").sample_prompts == [
        "a zero --d 5 --s 4",
        "a one",
    ]
    with pytest.raises(ConfigError, match="size has no effect on the model `digits`"):
        train_adapter(
            with_prompts.with_(
                sample_prompts=["a zero --w 8 --h 8"], output=str(tmp_path / "other")
            ),
            progress=False,
        )
