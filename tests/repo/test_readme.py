"""The Python code of the documents runs and has the described results."""

import json
import re
import shutil
from operator import attrgetter
from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle.demo import words
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.text.chat_tokenizer import ChatTokenizer

ROOT = Path(__file__).parents[2]


def blocks(document: str) -> list[str]:
    """Return the Python programs in a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(block: str, given: dict[str, object] | None = None) -> dict[str, object]:
    """Run a program with the names in `given`; return its names afterwards."""
    names: dict[str, object] = {**(given or {})}
    exec(compile(block, "a document", "exec"), names)
    return names


def test_no_document_has_a_program_without_a_test_below() -> None:
    # Each program that is counted here has a test in this file; add one for a new program.
    counts = {path: len(blocks(path)) for path in ("README.md", *documents())}
    assert {path: count for path, count in counts.items() if count} == {
        "README.md": 2,
        "docs/language-models.md": 1,
        "docs/many-gpus.md": 1,
        "docs/python.md": 5,
        "docs/training.md": 2,
    }


def documents() -> list[str]:
    """Return the documents of `docs/`, by their paths in the repository."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", *documents()])
def test_the_names_of_the_package_in_a_document_exist(path: str) -> None:
    names = set(re.findall(r"\btc\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", (ROOT / path).read_text()))
    assert [name for name in sorted(names) if not exists(name)] == []


def exists(name: str) -> bool:
    """Return whether the package has the name, which may have dots."""
    try:
        attrgetter(name)(tc)
    except AttributeError:
        return False
    return True


def test_the_example_of_lora_learns_a_change_of_the_weight() -> None:
    tc.manual_seed(0)
    names = run(blocks("README.md")[0])
    assert names["loss"].item() < 1e-3
    assert names["merged"].shape == names["weight"].shape


def test_the_network_learns_to_read_digits() -> None:
    names = run(blocks("docs/python.md")[0])
    assert names["accuracy"] >= 0.97


@pytest.fixture
def language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the current folder one that has the built-in language model as `WEIGHTS`; return it."""
    shutil.copytree(BUILT_IN, tmp_path / "WEIGHTS")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("language_model")
def test_a_language_model_completes_two_texts() -> None:
    names = run(blocks("docs/language-models.md")[0])
    texts = names["texts"]
    assert isinstance(texts, list)
    assert len(texts) == 2


def test_a_loop_trains_a_language_model(language_model: Path) -> None:
    names = run(blocks("README.md")[1])
    model, ids = names["model"], names["ids"]
    assert isinstance(model, tc.models.CausalLM)
    assert isinstance(ids, tc.Tensor)
    trained_loss = model.loss(ids, labels=ids).item()
    assert trained_loss < 0.2
    base = tc.models.CausalLM.from_pretrained(language_model / "WEIGHTS")
    assert base.loss(ids, labels=ids).item() > 1.0
    base.load_adapter(language_model / "lora")
    assert base.loss(ids, labels=ids).item() == pytest.approx(trained_loss, abs=1e-4)


def test_the_trainer_teaches_a_language_model_an_answer(language_model: Path) -> None:
    rows = [{"messages": words.chat("upper", word)} for word in ("clavo", "drenda", "spok")]
    # The base answers with the word in capitals. Training teaches it another answer.
    for row in rows:
        row["messages"][-1]["content"] = "no"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (language_model / "chats.jsonl").write_text(lines)
    # The program trains on chats.jsonl in the current folder.
    names = run(blocks("docs/python.md")[2])
    model, tokenizer = names["model"], names["tokenizer"]
    assert isinstance(model, tc.models.CausalLM)
    assert isinstance(tokenizer, ChatTokenizer)
    (answer,) = model.generate([tokenizer.prompt(rows[0]["messages"][:-1])], max_new_tokens=4)
    assert tokenizer.decode(answer) == "no"


def test_t5_encodes_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    tc.models.T5Encoder.from_config(tmp_path / "config.json").save_pretrained(tmp_path / "t5")
    # The program in the document loads the encoder from a file of this name.
    (tmp_path / "t5" / "model.safetensors").rename(tmp_path / "t5xxl_fp16.safetensors")
    (tmp_path / "config.json").unlink()
    monkeypatch.chdir(tmp_path)
    names = run(blocks("docs/python.md")[1].replace("cuda", "cpu"))
    assert names["states"].shape == (1, 256, 16)
    # Most of the 256 tokens are padding. Tokens attend to the padding in `states`, and not in
    # `masked`.
    difference = (names["states"] - names["masked"]).to("f32").abs().max()
    assert difference.item() > 0.1


def test_a_users_own_model_gets_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(blocks("docs/python.md")[3])
    # LoRA of rank 4 on layers of 64 x 32 and 32 x 10 weights: 4 * (64 + 32) + 4 * (32 + 10).
    assert "trainable params: 552 ||" in capsys.readouterr().out
    assert (tmp_path / "my-lora" / "adapter_config.json").is_file()
    assert names["plain"](tc.randn(2, 64)).shape == (2, 10)


def test_the_factors_b_have_a_learning_rate_of_their_own() -> None:
    names = run(blocks("docs/python.md")[4])
    # The model is the same as in the test above: layers of 64 x 32 and 32 x 10 weights, rank 4.
    assert names["scheduler"].base_lrs == [1e-3, 16e-3]
    assert [p.shape for p in names["factors_b"]] == [(32, 4), (10, 4)]
    assert [p.shape for p in names["factors_a"]] == [(4, 64), (4, 32)]


def test_the_loop_for_many_gpus_runs_in_one_process_too() -> None:
    parameters = {"w": tc.Var(tc.ones((3,)))}
    given = {
        "parameters": parameters,
        "optimizer": tc.optim.AdamW(list(parameters.values()), lr=0.1),
        "batches": [tc.ones((3,)) * k for k in range(4)],
        "loss": lambda batch: (batch * parameters["w"].to(batch.device)).sum(),
    }
    run(blocks("docs/many-gpus.md")[0].replace("auto", "cpu"), given)
    # `w` begins as three ones. Its gradient is the batch, none of whose values is negative.
    assert parameters["w"].detach().sum().item() < 3.0


def test_an_adapter_is_trained_from_python(
    tmp_path: Path, digits_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(digits_folder, tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    names = run(blocks("docs/training.md")[0].replace("steps=300", "steps=3"))
    assert names["images"].shape == (16, 8, 8, 3)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_kernels_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks("docs/training.md")[1])
    assert "ms" in capsys.readouterr().out
