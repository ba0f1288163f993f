"""Writing and reading safetensors files from Python."""

import errno
import json
import os

import numpy as np
import pytest

import trainable_candle as tc


def test_saved_tensors_load_unchanged(tmp_path):
    tensors = {
        f"{dtype}.{name}": tc.tensor(values, dtype=dtype)
        for dtype in ("f32", "f64", "f16", "bf16", "u8", "u32", "i64")
        for name, values in (
            ("matrix", np.arange(6).reshape(2, 3)),
            ("number", 3),
            ("empty", np.zeros((0, 2))),
        )
    }
    tensors["view"] = tc.arange(12).reshape(3, 4).T[1:]
    tensors["variable"] = tc.Var([1.0])
    path = tmp_path / "file.safetensors"
    tc.save_file(tensors, path, metadata={"made by": "a test"})
    loaded = tc.load_file(str(path))
    assert sorted(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tolist() == tensor.tolist()
        assert not loaded[name].requires_grad
    # The header's length takes 8 bytes. Then come the header, which is JSON, and the data.
    header, _ = json.JSONDecoder().raw_decode(path.read_bytes()[8:].decode("latin1"))
    assert header["__metadata__"] == {"made by": "a test"}
    # No temporary file is left.
    assert [p.name for p in tmp_path.iterdir()] == ["file.safetensors"]


def test_a_missing_file_is_an_error(tmp_path):
    path = tmp_path / "none.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        tc.load_file(path)
    assert isinstance(caught.value, tc.MissingFileError)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(path)
    assert str(caught.value) == f"{path}: there is no such file or folder"


def test_paths_can_be_path_str_or_bytes_but_not_int(tmp_path):
    path = tmp_path / "t.safetensors"
    for given in (path, str(path), os.fsencode(path)):
        tc.save_file({"t": tc.arange(3)}, given)
        assert tc.load_file(given)["t"].tolist() == [0, 1, 2]
        path.unlink()
    with pytest.raises(TypeError, match="load_file: the path is a value of type int, expected"):
        tc.load_file(3)


def test_saving_into_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(tc.FileError):
        tc.save_file({}, tmp_path / "none" / "file.safetensors")
    assert issubclass(tc.FileError, OSError)


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0hello", b"\x80\x04pickle"],
    ids=["empty", "less than a length", "huge length", "header that is no JSON", "pickle"],
)
def test_files_of_another_kind_are_rejected(tmp_path, content):
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(content)
    with pytest.raises(tc.WeightsFormatError, match=r"wrong\.safetensors: "):
        tc.load_file(path)


@pytest.mark.parametrize(
    ("shape", "offsets", "data_bytes", "message"),
    [
        ([2], [0, 8], 4, "incomplete or damaged"),
        ([2], [0, 8], 12, "incomplete or damaged"),
        ([2], [0, 4], 4, "header is damaged"),
        ([2], [4, 12], 12, "header is damaged"),
        ([2**33, 2**33], [0, 8], 8, "header is damaged"),
    ],
    ids=["too few data", "too many data", "too small range", "gap", "overflow"],
)
def test_offsets_that_do_not_fit_the_data_are_rejected(
    tmp_path, shape, offsets, data_bytes, message
):
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))
    with pytest.raises(tc.WeightsFormatError, match=message):
        tc.load_file(path)


# A safetensors file begins with its header's length in little-endian order. These lengths begin
# with the bytes of a pickle of protocol 2 to 5: 0x80 and the protocol's number. The third byte is 1
# or 2. With zeros after the first two bytes, the file would not look like a pickle.
@pytest.mark.parametrize("length", [0x10280, 0x10380, 0x20480, 0x10580], ids=hex)
def test_a_header_length_with_the_bytes_of_a_pickle_is_accepted(tmp_path, length):
    path = tmp_path / "file.safetensors"
    tc.save_file({"x": tc.arange(3)}, path, metadata={"text": ""})
    # Lengthen the metadata until the header has the length.
    padding = length - int.from_bytes(path.read_bytes()[:8], "little")
    tc.save_file({"x": tc.arange(3)}, path, metadata={"text": "." * padding})
    assert path.read_bytes()[:8] == length.to_bytes(8, "little")
    assert tc.load_file(path)["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "start",
    [b"PK\x03\x04", b"\x80\x02}q\x00", b"\x80\x05\x95\x01"],
    ids=["zip archive of torch.save", "protocol 2", "protocol 5"],
)
def test_pickles_are_recognised_and_rejected(tmp_path, start):
    path = tmp_path / "file.safetensors"
    path.write_bytes(start + bytes(100))
    with pytest.raises(tc.WeightsFormatError, match="pickle checkpoint, which is not supported"):
        tc.load_file(path)


@pytest.mark.parametrize(
    "content",
    [bytes(20), bytes(8) + b"{}", b"\x01" + bytes(7) + b"{"],
    ids=["length 0", "length 0 before JSON", "unclosed JSON"],
)
def test_files_with_an_empty_or_unclosed_header_are_rejected(tmp_path, content):
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with pytest.raises(tc.WeightsFormatError, match=r"not a safetensors file|header is damaged"):
        tc.load_file(path)


def test_wrong_arguments_are_reported(tmp_path):
    path = tmp_path / "file.safetensors"
    with pytest.raises(TypeError, match=r"save_file: tensors is a dict \('ndarray' .*Tensors"):
        tc.save_file({"x": np.zeros(2)}, path)
    with pytest.raises(TypeError, match=r"save_file: metadata is a dict \(.*expected a dict of t"):
        tc.save_file({"x": tc.zeros(2)}, path, metadata={"a": 1})
    with pytest.raises(tc.ArgumentError, match="load_file: the path is empty"):
        tc.load_file("")
    with pytest.raises(tc.ArgumentError, match="from_pretrained: the path is empty"):
        tc.models.SDXLUNet.from_pretrained("")
