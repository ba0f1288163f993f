"""Token ids by transformers' CLIPTokenizer, which tests/text expects; needs transformers 5.23.

    python make_transformers.py MERGES.txt.gz | gzip -9n > transformers.json.gz

MERGES.txt.gz is bpe_simple_vocab_16e6.txt.gz as OpenAI publishes it. This script builds the
vocabulary from it as CLIP's own code does.
"""

import gzip
import json
import random
import sys

import transformers
from transformers import CLIPTokenizer

TEXTS = [
    "",
    " ",
    "a",
    "a photo of a cat",
    "A  PHOTO\tof\na   Cat  ",
    "sks person, 1girl, solo, masterpiece, best quality, (red hair:1.2), [blue eyes]",
    "it's they've I'm you'll he'd we're can't 'tis rock'n'roll",
    "1234567890 3.14 1,000 2nd",
    "hello!world... what?! (really) -- yes; no: \"quoted\" 'single'",
    "Grüße aus Köln, œuvre, naïve façade, Ångström",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, \ufb01ne, \u0130stanbul, STRASSE ẞ",
    "日本語のテキスト 中文字符 한국어 العربية עברית हिन्दी ไทย",
    "\U0001f600 \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea emoji\ufe0f",
    "zero\u200bwidth nb\u00a0space ideo\u3000graphic line\u2028sep",
    "<|startoftext|> inside <|endoftext|> text",
    "<|ENDOFTEXT|> upper, half <|endof",
    "a_b-c/d\\e|f{g}h[i]j@k#l$m%n^o&p*q+r=s~t`u",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "x" * 300,
    ", ".join(f"tag number {n}" for n in range(60)),
    # A row of 77 tokens has room for 75 words between the start and the end token.
    "word " * 74,
    "word " * 75,
    "word " * 76,
    "word " * 200,
]


def byte_letters():
    """Return the letters that stand for the 256 bytes, in the order of CLIP's vocabulary.

    Bytes that are printable in Latin-1 come first and stand for themselves. The other bytes get the
    characters from U+0100 on.
    """
    codes = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    letters = [chr(code) for code in codes]
    return letters + [chr(256 + n) for n in range(256 - len(codes))]


def noise(count):
    """Yield texts of random characters."""
    rng = random.Random(20261121)
    # ASCII occurs twice, so that it is drawn twice as often as each of the other ranges.
    ranges = [(32, 127), (32, 127), (160, 384), (0x370, 0x530), (0x3040, 0x30FF), (0x2000, 0x2070)]
    for _ in range(count):
        yield "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 60)))


def main():
    with gzip.open(sys.argv[1]) as file:
        lines = file.read().decode().split("\n")
    # The first line is a header. CLIP uses as many merges as make a vocabulary of 49408 tokens: all
    # letters with and without `</w>` (512), the merges, and two special tokens.
    merge_count = 49408 - 512 - 2
    merges = [tuple(line.split()) for line in lines[1 : 1 + merge_count]]
    letters = byte_letters()
    tokens = letters + [letter + "</w>" for letter in letters] + ["".join(m) for m in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    cases = []
    # By padding token: CLIP-L pads with the end token, OpenCLIP bigG with "!", which is token 0.
    tokenizers = {
        pad: CLIPTokenizer(vocabulary, merges, pad_token=pad) for pad in ("<|endoftext|>", "!")
    }
    for text in [*TEXTS, *noise(60)]:
        case = {"text": text}
        tokenizer = tokenizers["<|endoftext|>"]
        case["ids"] = tokenizer(text, add_special_tokens=False)["input_ids"]
        for name, pad in (("clip_l", "<|endoftext|>"), ("big_g", "!")):
            row = tokenizers[pad](text, padding="max_length", max_length=77, truncation=True)
            case[name] = row["input_ids"]
        cases.append(case)
    print(json.dumps({"transformers": transformers.__version__, "cases": cases}))


main()
