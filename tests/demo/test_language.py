"""The demo of language models: tasks, data and verdicts; its base model and the base's answers."""

import json
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import train_lora
from trainable_candle.demo import language, words
from trainable_candle.demo.language import Answers, Verdict
from trainable_candle.families.causal_lm import BUILT_IN, CausalLM
from trainable_candle.run import JSON_LOG, LOG


def test_each_task_has_the_answer_that_its_name_says() -> None:
    answers = {
        "upper": "CLAVO",
        "spell": "c l a v o",
        "tail": "lavo",
        "vowels": "ao",
        "pig": "avoclay",
    }
    for task, expected in answers.items():
        assert words.answer(task, "clavo") == expected
    # The built-in model does not know the unseen task.
    assert words.UNSEEN not in words.TASKS


def test_training_and_held_out_words_are_disjoint() -> None:
    training = words.words(np.random.default_rng(0), 500)
    held_out = words.words(np.random.default_rng(0), 100, held_out=True)
    assert not set(training) & set(held_out)
    assert len(set(training)) == 500
    assert all(4 <= len(word) <= 9 for word in training + held_out)


def test_the_base_solves_its_tasks_and_not_the_new_one() -> None:
    answers = Answers(CausalLM(BUILT_IN, "f32", "cpu").task(), seed=0)
    # The shares of exact answers, in the unseen task and in the known tasks.
    assert answers.right == 0
    assert answers.right_known >= 0.98


def test_the_base_has_as_many_parameters_as_its_readme_says() -> None:
    model = tc.models.CausalLM.from_pretrained(BUILT_IN)
    count = sum(tensor.numel() for tensor in model.named_tensors().values())
    assert f"{count:,}".replace(",", " ") in (BUILT_IN / "README.md").read_text()


def test_the_data_has_known_and_unseen_tasks_and_no_held_out_word(tmp_path: Path) -> None:
    language.write_dataset(tmp_path / "a.jsonl", seed=0)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    asked = [chat[0]["content"].split(": ") for chat in chats]
    assert not any(words.is_held_out(word) for _, word in asked)
    share = sum(task == words.UNSEEN for task, _ in asked) / len(asked)
    assert 1 - share == pytest.approx(language.KNOWN_SHARE, abs=0.03)


def test_the_same_seed_gives_the_same_data(tmp_path: Path) -> None:
    language.write_dataset(tmp_path / "a.jsonl", seed=0)
    language.write_dataset(tmp_path / "b.jsonl", seed=0)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


# The numbers are shares of right answers: in the unseen task without and with the LoRA (`before`,
# `after`), then in the tasks that the base knows (`old_before`, `old_after`).
@pytest.mark.parametrize(
    ("verdict", "passed"),
    [
        (Verdict(0.0, 0.9, 1.0, 0.8), True),
        (Verdict(0.01, 0.9, 1.0, 0.8), False),
        (Verdict(0.0, 0.89, 1.0, 0.8), False),
        (Verdict(0.0, 0.9, 1.0, 0.79), False),
    ],
    ids=["at all limits", "known before", "too few right", "too much forgotten"],
)
def test_verdicts_pass_within_their_limits(verdict: Verdict, passed: bool) -> None:
    assert verdict.passed == passed
    assert "pig, with the LoRA" in str(verdict)


def test_the_data_has_another_name_than_the_logs(tmp_path: Path) -> None:
    # They are in the same folder.
    assert language.DATASET not in {JSON_LOG, LOG}
    assert Path(language.configuration(tmp_path).dataset) == tmp_path / language.DATASET


def test_a_run_without_weights_trains_an_adapter_of_the_built_in_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    language.write_dataset(tmp_path / "a.jsonl", seed=0)
    options = ["--model", "causal-lm", "--dataset", str(tmp_path / "a.jsonl"), "--steps", "3"]
    assert (
        train_lora([*options, "--output", str(tmp_path / "run"), "--sequence-length", "256"]) == 0
    )
    assert "loss" in capsys.readouterr().err
    adapter = tmp_path / "run" / "adapter.safetensors"
    task = CausalLM(BUILT_IN, "f32", "cpu").task()
    task.load_adapter(adapter, 1.0)
    asked = [[{"role": "user", "content": words.message("upper", "clavo")}]]
    assert task.answers(asked, language.WritingOptions(tokens=16))[0]
