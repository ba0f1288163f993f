"""The files that are read from a data folder, and the errors about unreadable files."""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from trainable_candle.data import (
    DatasetOptions,
    Source,
    check_folder,
    load_dataset,
    read_folder,
    read_pixels,
)
from trainable_candle.data.folder import KOHYA_HINT, RECURSIVE_HINT
from trainable_candle.errors import DatasetError

RED = (200, 10, 30)
# The EXIF tag whose value (1 to 8) says how a viewer has to rotate and mirror the image.
ORIENTATION = 0x0112


def write_image(
    folder: Path, name: str, caption: str | None = "a", size: tuple[int, int] = (4, 3)
) -> Path:
    """Write a red image and, unless `caption` is None, its caption; return the image's path."""
    path = folder / name
    Image.new("RGB", size, RED).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def test_the_error_for_a_folder_without_images_gives_a_fitting_hint(tmp_path: Path) -> None:
    # Kohya's names of folders give repeats, so only a source without `repeats` gets the hint about
    # them. A recursive source already reads the folders inside it, so it gets no hint.
    for entry, hint in (
        (Source(tmp_path), KOHYA_HINT),
        (Source(tmp_path, repeats=2), RECURSIVE_HINT),
        (Source(tmp_path, recursive=True), ""),
    ):
        # The message ends with the suffixes of images, the last of which is .webp, and the hint.
        with pytest.raises(DatasetError) as caught:
            load_dataset(DatasetOptions((entry,)))
        assert str(caught.value).endswith(f".webp{hint}")
    # `check_folder` gives no hint.
    with pytest.raises(DatasetError, match=r"holds no images; expected .*\.webp$"):
        check_folder(tmp_path)


def test_images_come_sorted_with_captions_and_sizes(tmp_path: Path) -> None:
    write_image(tmp_path, "b.png", "a cat\n", (5, 2))
    write_image(tmp_path, "a.JPG", "\ufeffein Hund äöü ", (4, 3))
    (tmp_path / "notes.md").write_text("not an image")
    (tmp_path / ".b.png").write_bytes(b"what some systems leave behind")
    (tmp_path / "deeper").mkdir()
    found = [(p.path.name, p.caption, p.width, p.height) for p in check_folder(tmp_path)]
    assert found == [("a.JPG", "ein Hund äöü", 4, 3), ("b.png", "a cat", 5, 2)]


def test_file_names_may_have_any_characters(tmp_path: Path) -> None:
    names = ["\N{CAT FACE} und 'Söhne'.png", "a.b.c.png", "-rf.png", "#1 100%.png"]
    for name in names:
        write_image(tmp_path, name, name)
    assert {p.path.name: p.caption for p in check_folder(tmp_path)} == {n: n for n in names}


def test_the_default_caption_is_for_images_without_one(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png", None)
    write_image(tmp_path, "b.png", "")
    assert [p.caption for p in check_folder(tmp_path, caption="sks")] == ["sks", ""]


def test_a_missing_folder_a_file_and_an_empty_folder_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"dataset: there is no folder .*none"):
        check_folder(tmp_path / "none")
    with pytest.raises(DatasetError, match=r"a\.png is a file, expected a folder"):
        check_folder(write_image(tmp_path, "a.png"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"holds no images; expected files ending in \.avif"):
        check_folder(tmp_path / "empty")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    write_image(tmp_path, "good.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (tmp_path / "empty.jpg").write_bytes(b"")
    whole = write_image(tmp_path, "cut.png", size=(64, 64)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    write_image(tmp_path, "bare.png", None)
    # A caption in Latin-1, where UTF-8 is expected.
    write_image(tmp_path, "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    with pytest.raises(DatasetError) as caught:
        check_folder(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"dataset: 5 of 6 images in {tmp_path} cannot be used:\n")
    for text in (
        "broken.png: cannot be decoded",
        "empty.jpg: cannot be decoded",
        "cut.png: cannot be decoded",
        "bare.png: no caption; write bare.txt beside it, or give --caption",
        "latin.txt: the caption cannot be read",
    ):
        assert text in message
    assert "good.png" not in message


def test_the_error_lists_at_most_ten_problems(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02d}.png").write_bytes(b"")
    with pytest.raises(DatasetError, match="12 of 12 images") as caught:
        check_folder(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 12  # a heading, ten problems, and the line below
    assert lines[-1] == "  and 2 more"


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    rgba = np.zeros((1, 3, 4), dtype=np.uint8)
    rgba[0, 1] = (*RED, 255)
    rgba[0, 2] = (0, 0, 0, 128)  # half transparent black
    Image.fromarray(rgba).save(tmp_path / "a.png")
    pixels = read_pixels(tmp_path / "a.png")
    np.testing.assert_array_equal(pixels, [[(255, 255, 255), RED, (127, 127, 127)]])
    # An image whose only pixel has colour 0 of the palette, which is marked as transparent.
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([*RED] * 2)
    palette.save(tmp_path / "p.png", transparency=0)
    assert (read_pixels(tmp_path / "p.png") == 255).all()


def test_images_are_rotated_as_exif_says(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[[255, 0, 0], [0, 255, 0]]], dtype=np.uint8))
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # rotate by 90 degrees clockwise
    image.save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_pixels(tmp_path / "a.png"), [[[255, 0, 0]], [[0, 255, 0]]])


def test_grey_images_of_8_and_16_bits_become_rgb_of_8_bits(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 77, 255]], dtype=np.uint8)).save(tmp_path / "8.png")
    np.testing.assert_array_equal(read_pixels(tmp_path / "8.png")[0, :, 0], [0, 77, 255])
    # 0x4D80 of 0xFFFF is 77.2 of 255.
    Image.fromarray(np.array([[0, 0x4D80, 0xFFFF]], dtype=np.uint16)).save(tmp_path / "16.png")
    pixels = read_pixels(tmp_path / "16.png")
    assert pixels.shape == (1, 3, 3)
    np.testing.assert_array_equal(pixels[0, :, 2], [0, 77, 255])


def test_floating_point_pixels_are_rejected(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((2, 2), dtype=np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(DatasetError, match=r"f\.tiff: cannot be decoded: .*floating-point"):
        read_pixels(tmp_path / "f.tiff")


def test_a_decompression_bomb_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_image(tmp_path, "a.png", size=(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DatasetError, match="too large to be decoded safely"):
        read_pixels(path)


def test_an_image_whose_header_gives_too_many_pixels_is_rejected(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    # Width, height, 8 bits for each channel, and 2 for RGB; the zeros are the standard compression
    # and filter, and no interlacing.
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    # The file has no pixels, so a reader that goes on after the header raises another error.
    path = tmp_path / "huge.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b""))
    write_image(tmp_path, "ok.png")
    found = read_folder(Source(tmp_path, caption="x"))
    assert [image.path.name for image in found.images] == ["ok.png"]
    (problem,) = found.problems
    assert problem.startswith(f"{path}: is too large to be decoded safely: ")
    assert "400000000 pixels" in problem
    assert problem.endswith("scale it down")


def test_large_images_are_read_without_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path, "a.png", size=(100, 15))
    # Pillow warns about images with more than this number of pixels, and rejects those with more
    # than twice this number. pytest turns warnings into errors.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert check_folder(tmp_path)[0].width == 100


# The modes of Pillow in which images of each format are written.
MODES = {
    ".png": ("RGB", "L", "P", "1"),
    ".jpg": ("RGB", "L", "CMYK", "YCbCr"),
    ".webp": ("RGB", "L"),
    ".tiff": ("RGB", "L", "P", "1", "CMYK", "YCbCr"),
    ".bmp": ("RGB", "L", "P", "1"),
    ".gif": ("L", "P", "1"),
}
if features.check("avif"):
    MODES[".avif"] = ("RGB", "L")


@pytest.mark.parametrize(("suffix", "mode"), [(s, m) for s, modes in MODES.items() for m in modes])
def test_every_mode_of_every_format_is_read(tmp_path: Path, suffix: str, mode: str) -> None:
    y, x = np.mgrid[:32, :48]
    ramp = Image.fromarray(np.stack([x * 5, y * 7, 255 - x * 5], -1).astype(np.uint8))
    image = ramp.convert(mode)
    image.save(tmp_path / f"a{suffix}")
    (loaded,) = check_folder(tmp_path, caption="x")
    assert (loaded.width, loaded.height) == (48, 32)
    # Lossy formats change colours a little; the bound is in steps of 0 to 255.
    difference = read_pixels(loaded.path).astype(float) - np.asarray(image.convert("RGB"), float)
    assert np.abs(difference).mean() < (3 if suffix in {".jpg", ".webp", ".avif"} else 1e-9)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_and_pixels_have_the_same_orientation(tmp_path: Path, orientation: int) -> None:
    """Orientations 5 to 8 exchange width and height."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    grey = np.arange(0, 256, 16, dtype=np.uint8).reshape(2, 8)
    for suffix in (".png", ".jpg", ".webp"):
        path = tmp_path / f"a{suffix}"
        Image.fromarray(grey).convert("RGB").save(path, exif=exif)
    for image in check_folder(tmp_path, caption="x"):
        assert read_pixels(image.path).shape == (image.height, image.width, 3)
        assert (image.width, image.height) == ((2, 8) if orientation >= 5 else (8, 2))


def test_metadata_has_captions_of_images_below_but_caption_files_come_first(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    write_image(tmp_path / "images", "a.png", None)
    # Folders below are not read, except for the images that the metadata lists.
    write_image(tmp_path / "images", "unlisted.png", None)
    write_image(tmp_path, "b.png", "its own")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "images/a.png", "text": "a cat"}\n{"file_name": "b.png", "text": "no"}\n'
    )
    found = {image.path.name: image.caption for image in check_folder(tmp_path)}
    assert found == {"a.png": "a cat", "b.png": "its own"}


def test_metadata_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png")
    write_metadata(tmp_path, "gone.png")
    with pytest.raises(DatasetError, match=r"names 1 missing file:\n  .*gone\.png"):
        check_folder(tmp_path)


def write_metadata(folder: Path, name: str) -> None:
    """Write a caption for the image `name` into line 2 of the metadata; line 1 is empty."""
    line = json.dumps({"file_name": name, "text": "a cat"})
    (folder / "metadata.jsonl").write_text(f"\n{line}\n")


def test_metadata_names_files_by_relative_paths_that_stay_in_its_folder(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "in side"
    for place in (outside, folder, folder / "below"):
        place.mkdir()
        write_image(place, "a.png", None)
    (folder / "link").symlink_to(outside)
    (folder / "near").symlink_to(folder / "below")
    for name in (
        str(outside / "a.png"),
        str(folder / "a.png"),
        "../outside/a.png",
        "below/../a.png",
        "..",
        ".",
        "link/a.png",
    ):
        write_metadata(folder, name)
        with pytest.raises(DatasetError, match=r"metadata\.jsonl, line 2: .* is not in "):
            check_folder(folder)
    # An image's folder must not be a link to a place outside, but the image itself may, as in
    # Hugging Face's cache, where all files are links.
    (folder / "blob.png").symlink_to(outside / "a.png")
    for name in ("blob.png", "near/a.png", "below/a.png", "./a.png"):
        write_metadata(folder, name)
        captions = {image.caption for image in check_folder(folder, caption="default")}
        assert captions == {"a cat", "default"}


@pytest.mark.parametrize("name", ["x" * 5000 + ".png", "a\0.png", "a/" * 2000 + "a.png", " "])
def test_impossible_file_names_are_problems_of_metadata(tmp_path: Path, name: str) -> None:
    write_image(tmp_path, "a.png")
    write_metadata(tmp_path, name)
    with pytest.raises(DatasetError, match=r"metadata\.jsonl"):
        check_folder(tmp_path)


def test_metadata_nested_too_deeply_is_reported(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text("[" * 100_000)
    with pytest.raises(DatasetError, match="line 1: is not JSON: its values are nested too deeply"):
        check_folder(tmp_path)


def test_nested_folders_are_read_only_if_asked_for_and_hidden_ones_and_masks_never(
    tmp_path: Path,
) -> None:
    for place in ("", "one", "one/two", ".hidden", "masks"):
        (tmp_path / place).mkdir(exist_ok=True)
        write_image(tmp_path / place, "p.png", place or "top")
    write_image(tmp_path / "one", "p-masklabel.png", None)
    nested = read_folder(Source(tmp_path, recursive=True))
    assert [image.caption for image in nested.images] == ["one", "one/two", "top"]
    assert nested.problems == ()
    assert [image.caption for image in check_folder(tmp_path)] == ["top"]


def test_digests_differ_only_if_contents_differ(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png", size=(4, 3))
    write_image(tmp_path, "b.png", size=(4, 3))
    write_image(tmp_path, "c.png", size=(4, 4))
    a, b, c = (image.digest for image in check_folder(tmp_path))
    assert a == b
    assert b != c


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_incomplete_files_of_every_format_are_reported(tmp_path: Path, part: float) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    for suffix in MODES:
        path = tmp_path / f"{suffix[1:]}{suffix}"
        Image.fromarray(pixels).save(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * part)])
    found = read_folder(Source(tmp_path, caption="x"))
    assert found.images == ()
    # Problems are sorted by path.
    for suffix, problem in zip(sorted(MODES), found.problems, strict=True):
        assert f"{suffix[1:]}{suffix}: cannot be decoded: " in problem


@pytest.mark.parametrize("suffix", sorted(MODES))
def test_damaged_images_become_problems_instead_of_exceptions(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / f"a{suffix}"
    Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    for number in range(60):
        damaged = bytearray(data)
        # Overwrite eight of the first 500 bytes, where the header is.
        for position in rng.integers(0, min(len(data), 500), 8):
            damaged[position] = rng.integers(0, 256)
        (tmp_path / f"{number}{suffix}").write_bytes(damaged)
    found = read_folder(Source(tmp_path, caption="x"))
    # 60 files are damaged, some perhaps only in their pixels; one is intact.
    assert 0 < len(found.problems) < 61
    assert found.count == 61


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DatasetError, match=r"1 of 2 images .*\n.*pipe\.jpg: is not a regular file"):
        check_folder(tmp_path)


def test_messages_about_one_image_are_singular(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DatasetError, match="1 of 1 image in"):
        check_folder(tmp_path)


def test_metadata_as_a_csv_table_is_an_error(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png", None)
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,x\n")
    with pytest.raises(DatasetError, match=r"metadata\.csv is not read, write metadata\.jsonl or"):
        check_folder(tmp_path)


def test_two_different_captions_of_one_image_are_an_error(tmp_path: Path) -> None:
    write_image(tmp_path, "a.png", None)
    lines = [{"file_name": "a.png", "text": text} for text in ("x", "x", "y")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DatasetError, match=r"line 3: a\.png has another caption in an earlier"):
        check_folder(tmp_path)
