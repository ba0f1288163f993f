"""Feed damaged files to the readers that Python calls.

A reader may return a result or raise one of the library's errors or OSError. It must end within a
time limit and use little memory. Runs on Linux.

python tests/fuzz/run.py [--cases 100000] [--seed 0] [--first 0] [READER ...]

The fuzz tests of the readers in Rust are in rust/models/tests/fuzz.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import trainable_candle as tc
from trainable_candle.data.captions import read_caption, read_metadata
from trainable_candle.data.entries import facts_of, intact_facts, packed
from trainable_candle.data.pixels import probe, read_rgb
from trainable_candle.data.sources import parse_sources
from trainable_candle.errors import Error
from trainable_candle.export.gguf_file import Entry, Fact, write
from trainable_candle.models import CausalLM
from trainable_candle.settings import TrainConfig
from trainable_candle.text import CLIPTokenizer, T5Tokenizer, sentencepiece
from trainable_candle.text.chat_tokenizer import ChatTokenizer
from trainable_candle.train.logs import read_json_log, read_log
from trainable_candle.train.state import read_state

if TYPE_CHECKING:
    from collections.abc import Callable

HANG = 120
"""The time limit of a case, s."""
MOST_PIXELS = 1 << 18
"""Pillow's limit for the pixels of an image: a small file can claim a huge image."""
FREE_KIB, FACTOR = 64 * 1024, 10
"""A reader may take FREE_KIB KiB of memory, and FACTOR bytes more for each byte of its input."""
WORDS = [
    b"",
    b"0",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"[",
    b"{",
    b'"',
    b"\\u0000",
    b"\xff\xfe",
    b"\x00",
    b"&a",
    b"*a",
    b"<<: ",
    b"!!python/object",
    b"2026-99-99",
    b"0x",
    b"9" * 30,
    b"9" * 5000,
    b"\n",
    b"\t",
    b": ",
    b"- ",
    b"..",
    b"/",
    "é\u202e".encode(),
    b"\xed\xa0\x80",
    b"model",
    b"path",
    b"file_name",
    b"text",
    b"1_000",
    b".inf",
    b"~",
]
"""Bytes that edits insert: text that parsers of JSON, YAML, numbers, paths or UTF-8 may mistake."""


def mutated(rng: random.Random, valid: bytes) -> bytes:
    """Damage the content of a valid file with one to six random edits.

    Two in 1000 results also begin with brackets, mappings or list items that are nested so deeply
    that a recursive parser may fail.
    """
    data = bytearray(valid)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        length = rng.randint(1, 16)
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case 3:
                data[at : at + rng.randint(0, 4)] = rng.choice(WORDS)
            case 4 if rng.random() < 0.3:
                del data[at:]
            case 5:
                data[at : at + 4] = struct.pack(
                    "<I", rng.choice([0, 1, 255, 2**16, 2**31, 2**32 - 1])
                )
            case _:
                data[at:at] = rng.randbytes(length)
    if rng.random() < 0.002:
        depth = rng.choice([500, 5_000, 50_000])
        data[:] = rng.choice([b"[", b'{"a":', b"- ", b"a: {"]) * depth + data
    return bytes(data)


def mutated_tensors(rng: random.Random, valid: bytes) -> bytes:
    """Damage a safetensors file: any of its bytes, or only the header.

    If only the header is damaged, the length in front of it is that of the damaged header.
    """
    if rng.random() < 0.3:
        return mutated(rng, valid)
    (length,) = struct.unpack("<Q", valid[:8])
    header = mutated(rng, valid[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + valid[8 + length :]


@dataclass(frozen=True)
class Reader:
    """A reader under test, and how to make damaged files for it.

    `read` gets the path of a damaged file, whose name is `file`. `valid` has the contents of valid
    files; `change` damages one of them. `beside` maps the names of other files in the same folder
    to their contents. The damaged file replaces an intact file of the name `file` in `beside`.
    """

    name: str
    file: str
    valid: list[bytes]
    read: Callable[[Path], object]
    beside: dict[str, bytes]
    change: Callable[[random.Random, bytes], bytes] = mutated


def images() -> dict[str, list[bytes]]:
    """Return small valid images, by format."""
    grey = Image.fromarray(np.arange(96, dtype=np.uint8).reshape(8, 12))
    contents: dict[str, list[bytes]] = {}
    for image_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        for mode in ("L", "RGB", "P") if image_format != "JPEG" else ("L", "RGB"):
            file = io.BytesIO()
            grey.convert(mode).save(file, image_format)
            contents.setdefault(image_format.lower(), []).append(file.getvalue())
    return contents


def unigrams() -> tuple[bytes, bytes, bytes]:
    """Return T5's first 60 tokens as a tokenizer.json and as two files spiece.model.

    The second spiece.model also has a normalizer.
    """
    path = files("trainable_candle.text") / "assets" / "t5_spiece.model.gz"
    content = gzip.decompress(path.read_bytes())
    model = sentencepiece.parse(content)
    # Each token is a field of protobuf: a tag, one byte for the length, and that many bytes.
    end = 0
    for _ in range(60):
        end += 2 + content[end + 1]
    # The normalizer's field begins 6 bytes before its name, and is the last in the file.
    normalizer = content[content.rfind(b"nmt_nfkc") - 6 :]
    fields = {
        "added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 60, "content": "<extra_id_0>"}],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""},
        "model": {"unk_id": model.unknown, "vocab": model.pieces[:60]},
    }
    return json.dumps(fields).encode(), content[:end], content[:end] + normalizer


def language_model() -> bytes:
    """Return a GGUF file of a tiny Llama with its tokenizer."""
    # The number of rows of each matrix of the only block; all matrices have 32 columns.
    rows = {"attn_q": 32, "attn_k": 32, "attn_v": 32, "attn_output": 32, "ffn_gate": 32,
            "ffn_up": 32, "ffn_down": 32}  # fmt: skip
    facts: dict[str, Fact] = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 32, "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*"abcdefg", "<s>"], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * 7 + [3], "tokenizer.ggml.bos_token_id": 7,
        "tokenizer.ggml.eos_token_id": 7, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (8, 32), "output_norm.weight": (32,)}
    shapes |= {f"blk.0.{name}.weight": (count, 32) for name, count in rows.items()}
    shapes |= {f"blk.0.{name}.weight": (32,) for name in ("attn_norm", "ffn_norm")}
    entries = [
        Entry(name, shape, "q8_0" if len(shape) > 1 else "f32", partial(tc.ones, shape))
        for name, shape in shapes.items()
    ]
    file = io.BytesIO()
    write(file, facts, entries)
    return file.getvalue()


def readers() -> list[Reader]:
    """Return all readers."""
    tensors = {"a": tc.zeros(3, 4), "b": tc.zeros(2).to("bf16")}
    # The content of a file of the cache: tensors, and facts, which are texts in the file's header.
    entry = packed(tensors, {"size": "[64, 64]"})
    state = {
        "format": 1,
        "step": 3,
        "batches": 6,
        "rng": [1, 2],
        "scaler": None,
        "settings": {"rank": 4},
    }
    config = (
        "model: digits\ndataset: images\nsteps: 5\nlearning_rate: 1e-3\n"
        "target_modules: [a, b]\nflip: true\n"
    )
    sources = (
        "dataset:\n- path: a\n  repeats: 2\n  trigger: t\n"
        "- path: b\n  caption: c\n  recursive: true\n"
    )
    lines = b'{"file_name": "a.png", "text": "a cat"}\n{"file_name": "b/c.png", "caption": "two"}\n'
    all_merges = gzip.decompress(
        (files("trainable_candle.text") / "assets" / "clip_merges.txt.gz").read_bytes()
    )
    merges = b"\n".join(all_merges.split(b"\n")[:40])
    tokens = [
        *"abcdefghij",
        *(f"{c}</w>" for c in "abcdefghij"),
        "!",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = json.dumps({token: i for i, token in enumerate(tokens)}).encode()
    settings = json.dumps({"pad_token": {"content": "!"}, "model_max_length": 77}).encode()
    from tokenizers import Tokenizer, models

    tokenizer_json = (
        Tokenizer(models.BPE(vocab=json.loads(vocabulary), merges=[])).to_str().encode()
    )

    def read_clip(path: Path) -> object:
        return CLIPTokenizer.from_pretrained(path.parent).chunks("a big 'café'!", most=2)

    def read_t5(path: Path) -> object:
        texts = ["a big café", "\uff21 <extra_id_0>"]
        return T5Tokenizer.from_pretrained(path.parent)(texts, length=9)

    def read_header(path: Path) -> object:
        return tc.inspect(path)

    def read_image(path: Path) -> object:
        return probe(path), read_rgb(path)

    def read_language_model(path: Path) -> object:
        tokenizer = ChatTokenizer.from_pretrained(path)
        return tokenizer.encode("a b\u00e9<s>"), tokenizer.stops, CausalLM.from_pretrained(path)

    clip_files = {
        "vocab.json": vocabulary,
        "merges.txt": b"#version\n",
        "tokenizer_config.json": settings,
    }
    text = [
        Reader(
            "captions",
            "a.txt",
            [b"a cat, a dog", "\ufeffhérisson".encode()],
            # `read_caption` gets the path of the image and reads the text file beside it.
            lambda path: read_caption(path.with_suffix(".png")),
            {},
        ),
        Reader("metadata", "metadata.jsonl", [lines], lambda path: read_metadata(path.parent), {}),
        Reader("config", "config.yaml", [config.encode()], TrainConfig.from_yaml, {}),
        Reader("sources", "sources.yaml", [sources.encode()], parse_sources, {}),
        Reader(
            "state",
            "state.json",
            [json.dumps(state).encode()],
            lambda path: read_state(path.parent),
            {},
        ),
        Reader(
            "csv log",
            "log.csv",
            [b"step,loss,lr,grad_norm,seconds\n1,0.5,1e-3,0.1,0.2\n"],
            read_log,
            {},
        ),
        Reader(
            "json log", "log.jsonl", [b'{"step": 1, "loss": 0.5}\n{"step": 2}\n'], read_json_log, {}
        ),
        Reader("vocabulary", "vocab.json", [vocabulary], read_clip, clip_files),
        Reader(
            "merges", "merges.txt", [merges, b"#version\na b\nc d</w>\n"], read_clip, clip_files
        ),
        Reader("tokenizer settings", "tokenizer_config.json", [settings], read_clip, clip_files),
        Reader("tokenizer", "tokenizer.json", [tokenizer_json], read_clip, {}),
        Reader("unigram tokenizer", "tokenizer.json", [unigrams()[0]], read_t5, {}),
    ]
    binary = [
        Reader("header", "a.safetensors", [entry], read_header, {}, mutated_tensors),
        Reader(
            "entry",
            "a.safetensors",
            [entry],
            lambda path: (facts_of(path), intact_facts(path)),
            {},
            mutated_tensors,
        ),
        Reader("tensors", "a.safetensors", [entry], tc.load_file, {}, mutated_tensors),
        Reader("language model", "a.gguf", [language_model()], read_language_model, {}),
        Reader("unigram model", "spiece.model", unigrams()[1:], read_t5, {}),
    ]
    return [
        *text,
        *binary,
        *(Reader(name, f"a.{name}", valid, read_image, {}) for name, valid in images().items()),
    ]


def peak_kib() -> int:
    """Return the peak of resident memory since the last write to clear_refs, KiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


def run(reader: Reader, cases: int, seed: int, first: int) -> None:
    """Read `cases` damaged files, from number `first` on, and print how many had no error.

    An alarm ends the process if a case takes longer than HANG.

    Raises:
        AssertionError: the reader raised an error that is neither `Error` nor `OSError`, or took
            too much memory.
    """
    accepted = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        path = Path(name) / reader.file
        for other, content in reader.beside.items():
            (path.parent / other).write_bytes(content)
        for number in range(first, first + cases):
            rng = random.Random(f"{reader.name} {seed} {number}")
            data = reader.change(rng, reader.valid[number % len(reader.valid)])
            path.write_bytes(data)
            where = f"{reader.name}: case {number} of seed {seed}, {data[:200]!r}"
            # Writing 5 resets the peak of resident memory.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = peak_kib()
            signal.alarm(HANG)
            try:
                reader.read(path)
                accepted += 1
            except (Error, OSError):
                pass
            except BaseException as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            signal.alarm(0)
            taken = peak_kib() - before
            assert taken <= FREE_KIB + FACTOR * len(data) // 1024, f"{where}: took {taken} KiB"
    print(
        f"{reader.name}: {cases} cases of seed {seed} from {first} on, {accepted} accepted",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="cases of each reader")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the random edits")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the number of the first case, to repeat a case that failed",
    )
    parser.add_argument("readers", nargs="*", metavar="READER", help="a reader (default: all)")
    options = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known: list[Any] = readers()
    unknown = set(options.readers) - {reader.name for reader in known}
    if unknown:
        sys.exit(f"no reader {', '.join(unknown)}; expected {', '.join(r.name for r in known)}")
    for reader in known:
        if not options.readers or reader.name in options.readers:
            run(reader, options.cases, options.seed, options.first)


if __name__ == "__main__":
    main()
