"""Data sets: loading from folders, the summary, batches and masks."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainable_candle.data import (
    CaptionOptions,
    Dataset,
    DatasetOptions,
    load_dataset,
    parse_sources,
    read_pixels,
)
from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.tasks.latent.data import load_images, read_datasets
from trainable_candle.train import TrainConfig

# The fixture `images` writes noise images `00.png`, `01.png` and so on into a folder below
# `tmp_path`, one for each size (width, height), with captions that begin with "image 0".
MakeImages = Callable[..., list[Path]]
# Sizes of images that belong to several buckets.
MIXED = [(64, 64), (70, 64), (128, 32), (130, 36), (48, 80), (64, 65), (200, 100)]


def load(
    *entries: Any, captions: CaptionOptions | None = None, seed: int = 0, **settings: Any
) -> Dataset:
    settings = {"resolution": 64, "bucket_step": 16, **settings}
    return load_dataset(DatasetOptions(parse_sources(entries), **settings), captions, seed)


def test_batches_have_one_bucket_and_epochs_have_every_image(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", *MIXED)
    data = load(tmp_path / "a")
    batches = data.batches(2)
    seen: Counter[int] = Counter()
    # The batches of epochs 0 and 1.
    for index in range(batches.first_batch(2)):
        batch = batches.batch(index)
        assert len(batch) == 2
        assert {data.items[view.item].fit.bucket for view in batch.views} == {batch.bucket}
        for view in batch.views:
            pixels = data.pixels(view)
            assert pixels.shape == (batch.bucket.height, batch.bucket.width, 3)
        seen.update(view.item for view in batch.views)
    assert seen == dict.fromkeys(range(len(MIXED)), 2)


def test_a_resumed_run_sees_the_same_batches(images: MakeImages, tmp_path: Path) -> None:
    images("a", *MIXED)
    # With `variants=0`, each use of an image draws a new variant of its caption.
    settings: dict[str, Any] = {
        "crop": "random",
        "flip": True,
        "captions": CaptionOptions(dropout=0.2, shuffle=True, variants=0),
    }

    def describe(indices: range, seed: int = 3) -> list[Any]:
        batches = load(tmp_path / "a", seed=seed, **settings).batches(3)
        # `frames` are the parts of the images that the crops show.
        return [(b.index, b.views, b.captions, b.frames) for b in map(batches.batch, indices)]

    expected = describe(range(40))
    assert describe(range(25, 40)) == expected[25:]
    assert describe(range(40), seed=4) != expected


def test_all_used_views_and_captions_are_listed(images: MakeImages, tmp_path: Path) -> None:
    images("a", *MIXED)
    captions = CaptionOptions(dropout=0.2, shuffle=True, variants=3, trigger="sks")
    data = load(tmp_path / "a", crop="random", random_crops=3, flip=True, captions=captions)
    drawn = [data.batches(2).batch(index) for index in range(300)]
    views = {view for batch in drawn for view in batch.views}
    assert views == set(data.views())
    assert {view.flipped for view in views} == {True, False}
    assert {caption for batch in drawn for caption in batch.captions} == set(
        data.possible_captions()
    )


def test_captions_without_a_fixed_number_of_variants_cannot_be_listed(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    data = load(tmp_path / "a", captions=CaptionOptions(shuffle=True, variants=0))
    with pytest.raises(ConfigError, match=r"with caption_variants 0, .* cannot be cached"):
        data.possible_captions()


def test_images_that_are_as_large_as_a_bucket_keep_their_pixels(
    images: MakeImages, tmp_path: Path
) -> None:
    (path,) = images("a", (64, 64))
    data = load(tmp_path / "a", flip=True)
    plain, mirrored = data.views()
    np.testing.assert_array_equal(data.pixels(plain), read_pixels(path))
    np.testing.assert_array_equal(data.pixels(mirrored), read_pixels(path)[:, ::-1])


def test_epochs_follow_repeats_and_regularisation(images: MakeImages, tmp_path: Path) -> None:
    images("own", *[(64, 64)] * 3)
    images("class", *[(64, 64)] * 9)
    images("rare", *[(64, 64)] * 4)
    data = load(
        {"path": tmp_path / "own", "repeats": 2, "loss_weight": 3},
        {"path": tmp_path / "class", "regularization": True},
        {"path": tmp_path / "rare", "repeats": 0.25},
        prior_loss_weight=0.5,
        captions=CaptionOptions(trigger="sks"),
    )
    batches = data.batches(1)
    drawn = [batches.batch(index) for index in range(batches.first_batch(36))]
    counts = Counter(data.items[batch.views[0].item].image.path.parent.name for batch in drawn)
    # Each of the 36 epochs has the 3 images of `own` twice, a quarter of the 4 images of `rare`,
    # and as many images of `class` as of `own` and `rare` together: 6 + 1 + 7 images.
    assert counts == {"own": 6 * 36, "rare": 36, "class": 7 * 36}
    for batch in drawn:
        folder = data.items[batch.views[0].item].image.path.parent.name
        assert batch.loss_weights.tolist() == [{"own": 3, "class": 0.5, "rare": 1}[folder]]
        assert batch.captions[0].startswith("sks, ") == (folder != "class")


def test_a_data_set_of_regularisation_images_alone_is_rejected(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    with pytest.raises(ConfigError, match="all usable images are regularisation images"):
        load({"path": tmp_path / "a", "regularization": True})


def test_bad_images_are_an_error_or_are_left_out(images: MakeImages, tmp_path: Path) -> None:
    images("a", (64, 64), (64, 64), (15, 90))
    (tmp_path / "a" / "00.png").write_bytes(b"no image")
    (tmp_path / "a" / "phone.heic").write_bytes(b"of a kind that Pillow does not read")
    with pytest.raises(DatasetError, match=r"1 of 3 images .*--skip-bad.*\n  .*00\.png: cannot"):
        load(tmp_path / "a")
    data = load(tmp_path / "a", skip_bad=True)
    assert [item.image.path.name for item in data.items] == ["01.png"]
    lines = data.summary().splitlines()
    assert lines[0] == "dataset: 1 image, 1 per epoch"
    assert lines[2:4] == [
        "  bucket  images  per epoch  cut off at most",
        "   64x64       1          1              0 %",
    ]
    assert lines[4].startswith("left out: 1 image smaller than the smallest bucket, 16 px")
    assert any(line.startswith("left out: 1 image that cannot be used") for line in lines)
    assert any("00.png: cannot be decoded" in line for line in lines)
    assert f"not read in {tmp_path / 'a'}: 1 .heic" in lines


def test_a_data_set_without_usable_images_is_an_error(images: MakeImages, tmp_path: Path) -> None:
    images("a", (15, 15), (64, 64))
    (tmp_path / "a" / "01.png").write_bytes(b"")
    with pytest.raises(DatasetError) as caught:
        load(tmp_path / "a", skip_bad=True)
    message = str(caught.value)
    assert "nothing to train on in" in message
    assert "1 image smaller than the smallest bucket, 16 px per side (give --upscale" in message
    assert "1 image that cannot be used" in message
    assert "00.png: 15x15" in message
    assert "01.png: cannot be decoded" in message
    assert len(load(tmp_path / "a", skip_bad=True, upscale=True)) == 1


def test_fixed_batches_hold_every_image_once(images: MakeImages, tmp_path: Path) -> None:
    images("a", *MIXED)
    data = load(tmp_path / "a", captions=CaptionOptions(trigger="sks", dropout=1.0))
    batches = data.fixed_batches(2)
    assert sorted(view.item for batch in batches for view in batch.views) == list(range(len(MIXED)))
    assert {view for batch in batches for view in batch.views} <= set(data.views())
    # Fixed batches keep all captions, although training would drop them.
    assert all(caption.startswith("sks, image") for b in batches for caption in b.captions)


@pytest.mark.parametrize("size", [0, -1])
def test_fixed_batches_need_a_batch_size_above_0(
    images: MakeImages, tmp_path: Path, size: int
) -> None:
    images("a", (64, 64))
    data = load(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"batches: batch_size is {size}, expected a whole"):
        data.fixed_batches(size)


@pytest.mark.parametrize("held_out", [True, False], ids=["split", "own data set"])
def test_validation_lists_only_the_views_that_it_uses(
    images: MakeImages, tmp_path: Path, held_out: bool
) -> None:
    images("a", (96, 64), (64, 96), (64, 64), (96, 96))
    config = TrainConfig(
        dataset=str(tmp_path / "a"),
        validation_split=0.5 if held_out else 0.0,
        validation_dataset=None if held_out else str(tmp_path / "a"),
        crop="random",
        flip=True,
        color_hue=0.5,
        bucketing=False,
    )
    data = read_datasets(config, partial(load_images, config, resolution=64)).validation
    assert data is not None
    used = {view for batch in data.fixed_batches(2) for view in batch.views}
    assert used == set(data.views())
    assert len(used) == (2 if held_out else 4)
    # Validation does not change colors, although `color_hue` is set.
    assert {view.colors for view in used} == {None}


def test_masks_from_files_are_scaled_cropped_and_mirrored_like_their_images(
    images: MakeImages, tmp_path: Path
) -> None:
    first, second, third = images("a", (128, 64), (128, 64), (128, 64))
    right_half = np.zeros((64, 128), np.uint8)
    right_half[:, 64:] = 255
    Image.fromarray(right_half).save(first.with_name("00-masklabel.png"))
    (tmp_path / "a" / "masks").mkdir()
    Image.fromarray(right_half[::2, ::2]).save(tmp_path / "a" / "masks" / "01.webp", lossless=True)
    data = load(tmp_path / "a", mask="file", flip=True, bucketing=False)
    assert [item.image.path for item in data.items] == [first, second, third]
    assert "3 images, 2 with masks" in data.summary()
    for batch in map(data.batches(1).batch, range(12)):
        masks = data.masks(batch)
        assert masks is not None
        # A mask has the size of the latents: an eighth of the crop of 64x64 px.
        assert masks.shape == (1, 8, 8)
        expected = np.ones((8, 8))
        # The third image has no mask file. The crop is the middle of the image.
        if batch.views[0].item != 2:
            expected[:, :4] = 0
            expected = expected[:, ::-1] if batch.views[0].flipped else expected
        # Scaling up a smaller mask blurs the edge between 0 and 1, so columns 3 and 4, which lie at
        # this edge, are not compared.
        np.testing.assert_allclose(
            masks[0][:, [0, 1, 2, 5, 6, 7]], expected[:, [0, 1, 2, 5, 6, 7]], atol=0.02
        )
        if batch.views[0].item == 0:
            np.testing.assert_array_equal(masks[0], expected)


def test_masks_come_from_transparency_or_are_ones_or_are_absent(
    images: MakeImages, tmp_path: Path
) -> None:
    rgba = np.full((64, 64, 4), 255, np.uint8)
    rgba[:32, :, 3] = 0
    (tmp_path / "a").mkdir()
    Image.fromarray(rgba).save(tmp_path / "a" / "x.png")
    images("b", (64, 64))
    data = load({"path": tmp_path / "a", "caption": "", "mask": "alpha"}, tmp_path / "b")
    masks = data.masks(data.fixed_batches(2)[0])
    assert masks is not None
    np.testing.assert_array_equal(masks.mean(axis=(1, 2)), [0.5, 1.0])
    assert (masks[0, :4] == 0).all()
    plain = load(tmp_path / "b")
    assert plain.masks(plain.fixed_batches(1)[0]) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("file", r"no image has a mask file, such as masks/00\.png or 00-masklabel\.png for .*00"),
     ("alpha", "no image has transparency")],
)  # fmt: skip
def test_a_folder_whose_masks_are_missing_is_reported(
    images: MakeImages, tmp_path: Path, kind: str, reason: str
) -> None:
    images("a", (64, 64))
    images("b", (64, 64))
    with pytest.raises(ConfigError, match=f"/b: mask: {kind} has no effect: {reason}"):
        load(tmp_path / "a", {"path": tmp_path / "b", "mask": kind})
    load(tmp_path / "a", {"path": tmp_path / "b", "mask": "off"})


def test_a_run_does_not_write_into_a_folder_of_its_images(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    list_file = tmp_path / "list.yaml"
    for entry, output in (("path: a", "a"), ("{path: a, recursive: true}", "a/new/run")):
        list_file.write_text(f"- {entry}\n")
        config = TrainConfig(output=str(tmp_path / output))
        with pytest.raises(ConfigError, match=r"the run would write into .*/a, whose images it"):
            load_images(config, str(list_file), 64)
    # `config` still has the output `a/new/run`. Without `recursive`, the run does not read the
    # folders below `a`, so it may write there.
    list_file.write_text("- path: a\n")
    assert len(load_images(config, str(list_file), 64)) == 1


def test_an_error_about_validation_images_names_the_setting(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", (64, 64))
    config = TrainConfig(dataset=str(tmp_path / "a"), validation_dataset=str(tmp_path / "none"))
    with pytest.raises(DatasetError, match=r"^validation_dataset: there is no folder .*none"):
        read_datasets(config, lambda folder: load_images(config, folder, 64))


def test_a_mask_of_another_aspect_ratio_is_reported(images: MakeImages, tmp_path: Path) -> None:
    (path,) = images("a", (64, 64))
    Image.new("L", (64, 32)).save(path.with_name("00-masklabel.png"))
    with pytest.raises(DatasetError, match=r"00-masklabel\.png: is 64x32 .*expected the aspect"):
        load(tmp_path / "a", mask="file")
    # Without masks, the file is read neither as a mask nor as an image.
    assert len(load(tmp_path / "a")) == 1


def test_an_image_that_changed_during_training_is_reported(
    images: MakeImages, tmp_path: Path
) -> None:
    (path,) = images("a", (64, 64))
    data = load(tmp_path / "a")
    Image.new("RGB", (65, 64)).save(path)
    with pytest.raises(DatasetError, match=r"00\.png: has changed since it was checked"):
        data.pixels(data.views()[0])
