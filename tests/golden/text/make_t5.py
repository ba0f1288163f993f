"""Token ids by transformers' T5 tokenizer, for tests/text; needs transformers 5.23.

    python make_t5.py FOLDER | gzip -9n > t5.json.gz

FOLDER holds T5's `spiece.model` as Google publishes it. For each text, the output has the ids, and
a row of 77 tokens (the ids and the end token, padded or truncated) with its mask. It also has rows
of 1 and 8 tokens if they truncate the text.
"""

import json
import random
import sys

import transformers
from transformers import T5TokenizerFast

LENGTHS = (1, 8, 77)
TEXTS = [
    "",
    " ",
    "\n\t ",
    "a",
    "a photo of a cat",
    "  A  PHOTO\tof\na   Cat  ",
    "sks person, 1girl, solo, masterpiece, best quality, (red hair:1.2), [blue eyes]",
    "it's they've I'm you'll he'd we're can't 'tis rock'n'roll",
    "1234567890 3.14 1,000 2nd",
    "hello!world... what?! (really) -- yes; no: \"quoted\" 'single'",
    "Grüße aus Köln, œuvre, naïve façade, Ångström, București, însă",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, \ufb01ne, \u0130stanbul, STRASSE ẞ",
    "full width: \uff21\uff22\uff23\uff11\uff12\uff01\uff1f ｶﾀｶﾅ ㈱ ① ½ ™ Ⅷ ㎏",
    "日本語のテキスト 中文字符 한국어 العربية עברית हिन्दी ไทย",
    "\U0001f600 \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea emoji\ufe0f",
    "zero\u200bwidth nb\u00a0space ideo\u3000graphic line\u2028sep soft\u00adhyphen \ufeffbom",
    "control\u0000\u0001\u007f\u0085\u180e\u2060characters",
    "line one\nline two\r\nline three\ttab\u000bvt\u000cff",
    "<extra_id_0> and <extra_id_99>, x<extra_id_1>y, <extra_id_100>, <EXTRA_ID_0>",
    "inside </s> of <pad>a<unk> text, half </s",
    "▁a ▁▁b under_score",
    "tilde ~ \uff5e \u02dc caret ^ back`tick {brace} <angle> \\ | @ # $ % & *",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "x" * 300,
    "word " * 75,
    "word " * 76,
    "word " * 77,
    ", ".join(f"tag number {n}" for n in range(60)),
    "An oil painting of a lighthouse at dusk, in the style of the old masters. " * 12,
]


def noise(count):
    """Yield texts of random characters."""
    rng = random.Random(20261122)
    # A character comes from ASCII twice as often as from each other range.
    ranges = [(32, 127), (32, 127), (0, 384), (0x370, 0x530), (0x3040, 0x30FF), (0x2000, 0x2070)]
    ranges += [(0xFF00, 0xFFF0), (0x1F300, 0x1F700), (0xAC00, 0xAD00), (0x300, 0x370)]
    for _ in range(count):
        yield "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 40)))


def main():
    tokenizer = T5TokenizerFast.from_pretrained(sys.argv[1])
    cases = []
    for text in [*TEXTS, *noise(60)]:
        case = {"text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
        for length in LENGTHS:
            row = tokenizer(text, padding="max_length", max_length=length, truncation=True)
            # With the end token, a row that is not truncated has one token more than `ids`.
            is_truncated = sum(row["attention_mask"]) <= len(case["ids"])
            if is_truncated or length == 77:
                case[str(length)] = row["input_ids"], row["attention_mask"]
        cases.append(case)
    lines = ",\n".join(json.dumps(case) for case in cases)
    print(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}')


main()
