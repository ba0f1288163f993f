"""Training runs of language models: from a file of chats to answers with the adapter; errors."""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.cli import main
from trainable_candle.data.chats.packing import joined
from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.families.causal_lm import CausalLM
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.text.writing import WritingOptions
from trainable_candle.train.logs import read_json_log

GOLDEN = Path(__file__).parents[1] / "golden" / "llm" / "llama"
QUESTIONS = ("one", "two", "three", "four")
SPECIAL = ["<|pad|>", "<|begin|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Llama with a tokenizer whose tokens are single bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("llama")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, folder / name)
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end_of_text|>", "bos_token": "<|begin|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of eight chats: four questions of one word, each twice; answers reverse the word."""
    path = tmp_path_factory.mktemp("chats") / "train.jsonl"
    examples = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": question[::-1]},
            ]
        }
        for question in QUESTIONS
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in examples * 2))
    return path


def config_of(weights: Path, chats: Path, output: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "model": "causal-lm",
            "weights": str(weights),
            "dataset": str(chats),
            "output": str(output),
            "device": "cpu",
            "precision": "f32",
            "sequence_length": 128,
            "steps": 3,
            "optimizer": "adamw",
            "learning_rate": 1e-2,
            **settings,
        }
    )


def train(config: TrainConfig, lines: list[str] | None = None) -> Any:
    """Train, and append the reported lines to `lines`."""
    reported = [] if lines is None else lines
    return train_adapter(config, progress=False, report=reported.append)


def parameters(run: Any) -> dict[str, bytes]:
    """Return the bytes of each parameter of a run's adapter, by its name."""
    named = run.adapter.named_parameters()
    return {name: var.detach().numpy().tobytes() for name, var in named.items()}


def test_a_run_teaches_answers_and_every_command_gives_them(
    weights: Path,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    given = {"sample_prompts": ["one"], "sample_tokens": 8, "validation_split": 0.25}
    run = train(config_of(weights, chats, tmp_path / "run", steps=60, **given), lines)
    output = run.output
    log = [row for row in read_json_log(output / "train.jsonl") if "validation_loss" in row]
    first, last = log[0], log[-1]
    assert first["step"] == 0
    assert first["validation_loss"] == pytest.approx(first["validation_base_loss"], rel=1e-6)
    assert last["validation_loss"] < 0.2 * first["validation_loss"]
    assert last["validation_perplexity"] == pytest.approx(math.exp(last["validation_loss"]))
    assert last["validation_base_loss"] == first["validation_base_loss"]
    preview = (output / "samples" / "step-000060.txt").read_text()
    assert "prompt: one\nbase: " in preview
    assert "tuned: eno\n" in preview
    text = "\n".join(lines)
    assert "chat template: ChatML, as the tokenizer has none; answers end with" in text
    # Of the eight chats, a quarter is held out for validation.
    assert "6 of 6 answers end in a stop token" in text
    assert "memory while training" in text

    peft_config = json.loads((output / "peft" / "adapter_config.json").read_text())
    assert peft_config["base_model_name_or_path"] == str(weights)
    assert peft_config["task_type"] == "CAUSAL_LM"
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert peft_config["target_modules"] == names
    assert (peft_config["r"], peft_config["lora_alpha"]) == (16, 32)
    assert isinstance(peft_config["lora_alpha"], int)
    stored = tc.load_file(output / "peft" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in stored
    # Three blocks, seven linear layers in each, two factors.
    assert len(stored) == 3 * 7 * 2

    chat = [{"role": "user", "content": "two"}]
    for file in (output / "adapter.safetensors", output / "peft"):
        task = families.load("causal-lm", weights, "f32", "cpu")
        task.load_adapter(file, 1.0)
        assert "".join(task.answer(chat, WritingOptions(tokens=8))) == "owt"
    flags = ["--model", "causal-lm", "--weights", str(weights), "--device", "cpu"]
    flags += ["--adapter", str(output / "peft"), "--tokens", "8"]
    capsys.readouterr()
    assert main(["chat", *flags, "--prompt", "two", "--prompt", "one"]) == 0
    assert capsys.readouterr().out == "owt\neno\n"
    # An empty line ends the conversation.
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n\nnever read\n"))
    assert main(["chat", *flags]) == 0
    assert capsys.readouterr().out == "owt\n"
    assert main(["chat", *flags, "--top-k", "2"]) == 2
    assert "no effect without --temperature" in capsys.readouterr().err
    written = tmp_path / "new" / "texts.txt"
    assert main(["sample", *flags, "--prompt", "two", "--output", str(written)]) == 0
    assert capsys.readouterr().out == "owt\n"
    assert written.read_text() == "prompt: two\ntext: owt\n"
    rendered = "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert main(["sample", *flags, "--prompt", rendered, "--raw"]) == 0
    assert capsys.readouterr().out == "owt\n"
    # The texts of a prompt get consecutive seeds. `sample` prints an empty line after each text.
    temperature = ["--temperature", "3"]
    count = ["--seed", "4", "--count", "2"]
    assert main(["sample", *flags, "--prompt", "two", *temperature, *count]) == 0
    texts = capsys.readouterr().out.split("prompt: two\n")[1:]
    for seed, text in zip((4, 5), texts, strict=True):
        assert main(["chat", *flags, "--prompt", "two", *temperature, "--seed", str(seed)]) == 0
        assert capsys.readouterr().out + "\n" == text
    merged_by_command = tmp_path / "merged by command"
    flags = ["--model", "causal-lm", "--weights", str(weights), "--adapter", str(output / "peft")]
    assert main(["merge", *flags, "--output", str(merged_by_command)]) == 0
    assert (merged_by_command / "config.json").read_bytes() == (
        weights / "config.json"
    ).read_bytes()
    assert tc.load_file(merged_by_command / "model.safetensors")["lm_head.weight"].dtype == "bf16"
    merged = tmp_path / "merged"
    task.save_merged(merged)  # The last `task` of the loop above, with the adapter in `peft`.
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (merged / name).read_bytes() == (weights / name).read_bytes()
    merged_task = families.load("causal-lm", merged, "f32", "cpu")
    assert "".join(merged_task.answer(chat, WritingOptions(tokens=8))) == "owt"


def test_a_run_continues_from_the_adapter_of_another_run_if_the_layers_agree(
    weights: Path, chats: Path, tmp_path: Path
) -> None:
    first = train(config_of(weights, chats, tmp_path / "a", steps=20))
    given = {"validation_split": 0.25, "steps": 1}
    losses = []
    for name, file in (("b", "adapter.safetensors"), ("c", "peft")):
        initial = str(first.output / file)
        run = train(config_of(weights, chats, tmp_path / name, initial_adapter=initial, **given))
        first_row = next(
            row for row in read_json_log(run.output / "train.jsonl") if "validation_loss" in row
        )
        losses.append(first_row["validation_loss"])
        assert losses[-1] < 0.8 * first_row["validation_base_loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    fewer_layers = {"initial_adapter": str(first.output / "peft"), "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"for other layers than --target-modules: .*mlp"):
        train(config_of(weights, chats, tmp_path / "d", **fewer_layers))


def test_accumulated_batches_train_like_one_large_batch(
    weights: Path, chats: Path, tmp_path: Path
) -> None:
    given = {"sequence_length": 80, "optimizer": "sgd", "steps": 2}
    one_batch = train(config_of(weights, chats, tmp_path / "a", batch_size=4, **given))
    accumulated = train(config_of(weights, chats, tmp_path / "b", gradient_accumulation=4, **given))
    expected_parameters = one_batch.adapter.named_parameters()
    largest = 0.0
    for name, var in accumulated.adapter.named_parameters().items():
        expected = expected_parameters[name].detach().numpy()
        largest = max(largest, float(np.abs(expected).max()))
        np.testing.assert_allclose(var.detach().numpy(), expected, rtol=1e-4, atol=1e-7)
    assert largest > 0


def test_padding_a_batch_changes_neither_loss_nor_gradients(
    weights: Path, chats: Path, tmp_path: Path
) -> None:
    task = families.load("causal-lm", weights, "f32", "cpu")
    task.family.config = config_of(weights, chats, tmp_path / "run", sequence_length=80)
    split = task.read(lambda _: None)
    tc.manual_seed(5)
    parameters = task.attach().named_parameters()
    for var in parameters.values():
        var.set(tc.randn(var.shape) * 0.1)
    data = task.prepare(split, lambda _: None).train
    # Three examples in two rows have fewer than 160 tokens and fewer than 20 bounds (positions at
    # which an example begins or ends), so the padding below adds tokens and bounds.
    rows = [split.train.examples[:2], split.train.examples[2:3]]

    def result(padding_multiple: int = 1, least_bounds: int = 0) -> tuple[float, dict[str, Any]]:
        """Return the loss and the gradients of `rows`.

        They are padded to a multiple of `padding_multiple` tokens, and to at least `least_bounds`
        bounds of examples.
        """
        for var in parameters.values():
            var.zero_grad()
        batch = joined(rows, padding_multiple, least_bounds)
        assert len(batch.input_ids) % padding_multiple == 0
        loss = data.loss(data.inputs(batch))
        loss.backward()
        return float(loss.item()), {name: var.grad.numpy() for name, var in parameters.items()}

    loss, gradients = result()
    padded_loss, padded_gradients = result(padding_multiple=160, least_bounds=20)
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        tolerance = 1e-5 * np.abs(gradient).max()
        np.testing.assert_allclose(padded_gradients[name], gradient, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("scaling", "repeats"),
    [
        (None, True),
        ({"rope_type": "llama3"}, True),
        ({"type": "dynamic", "factor": 2.0}, False),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, False),
        # In models from GGUF files, this kind of scaling replaces Llama 3's. Equal factors for
        # short and long sequences give angles that do not depend on the length.
        ({"rope_type": "longrope", "short_factor": [2.0], "long_factor": [2.0]}, True),
    ],
    ids=["none", "llama3", "dynamic", "longrope", "longrope with equal factors"],
)
def test_steps_can_be_recorded_unless_rotary_angles_depend_on_lengths(
    monkeypatch: pytest.MonkeyPatch, scaling: dict[str, Any] | None, repeats: bool
) -> None:
    """`repeats`: whether a CUDA graph of one step can be replayed for other texts."""
    # `settings` has the fields of the model's `config.json`.
    monkeypatch.setattr(CausalLM, "settings", {"rope_scaling": scaling})
    assert CausalLM(GOLDEN, None, "cpu").repeats is repeats


def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(
    weights: Path, chats: Path, tmp_path: Path
) -> None:
    given = {"sequence_length": 80, "lora_dropout": 0.1, "steps": 6, "save_every": 3}
    uninterrupted = train(config_of(weights, chats, tmp_path / "a", **given))
    train(config_of(weights, chats, tmp_path / "b", **{**given, "steps": 3}))
    resumed = train(config_of(weights, chats, tmp_path / "b", resume="latest", **given))
    assert parameters(resumed) == parameters(uninterrupted)


def test_resuming_on_edited_examples_is_reported(
    weights: Path, chats: Path, tmp_path: Path
) -> None:
    data = shutil.copyfile(chats, tmp_path / "chats.jsonl")
    train(config_of(weights, data, tmp_path / "run", steps=1))
    given = {"steps": 2, "resume": "latest"}
    lines: list[str] = []
    train(config_of(weights, data, tmp_path / "run", **given), lines)
    assert not any("digest" in line for line in lines)
    data.write_text(data.read_text().replace("eno", "one"))
    train(config_of(weights, data, tmp_path / "run", **{**given, "steps": 3}), lines)
    (line,) = (line for line in lines if "digest" in line)
    assert line.startswith("resume: digest of the examples is '")
    assert line.endswith("the run will not repeat the earlier one")


@pytest.mark.parametrize(("base", "tolerance"), [("int8", 0.005), ("fp8", 0.01), ("nf4", 0.05)])
def test_losses_on_a_quantized_base_are_near_those_on_an_unquantized_one(
    weights: Path, chats: Path, tmp_path: Path, base: str, tolerance: float
) -> None:
    def losses(name: str, **settings: Any) -> list[float]:
        # With a higher learning rate, small changes of the base change the losses too much.
        given = {"steps": 30, "learning_rate": 2e-3, **settings}
        run = train(config_of(weights, chats, tmp_path / name, **given))
        return [row["loss"] for row in read_json_log(run.output / "train.jsonl") if "loss" in row]

    found, expected = losses("codes", base_precision=base), losses("values")
    assert expected[-1] < 0.1 * expected[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * expected[0])


def test_a_resumed_run_on_a_quantized_base_ends_bit_for_bit_like_an_uninterrupted_one(
    weights: Path, chats: Path, tmp_path: Path
) -> None:
    given = {
        "base_precision": "nf4", "gradient_checkpointing": "full", "steps": 4, "save_every": 2,
    }  # fmt: skip
    uninterrupted = train(config_of(weights, chats, tmp_path / "a", **given))
    train(config_of(weights, chats, tmp_path / "b", **{**given, "steps": 2}))
    lines: list[str] = []
    resumed = train(config_of(weights, chats, tmp_path / "b", resume="latest", **given), lines)
    assert parameters(resumed) == parameters(uninterrupted)
    changed = {**given, "base_precision": "int8", "steps": 5}
    train(config_of(weights, chats, tmp_path / "b", resume="latest", **changed), lines)
    assert any(
        "base_precision is 'int8', was 'nf4': the run will not repeat" in line for line in lines
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        # The tiny Llama has 256 positions.
        ({"sequence_length": 300}, ConfigError, "made for 256 positions"),
        ({"flip": True}, ConfigError, "--flip: has no effect on the model `causal-lm`"),
        ({"target_modules": ["query"]}, ConfigError, "`query` is not a layer"),
        ({"format": "kohya"}, ConfigError, "--format kohya cannot represent the layers"),
        # The first 8 tokens of each example belong to the question.
        ({"sequence_length": 8}, DatasetError, "no token would be learnt"),
        ({"sample_prompts": ["x" * 300]}, ConfigError, "made for 256 positions"),
    ],
    ids=["sequence", "image setting", "layer", "format", "short sequence", "prompt"],
)
def test_wrong_settings_are_rejected_before_the_output_folder_is_made(
    weights: Path,
    chats: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        train(config_of(weights, chats, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_another_models_tokenizer_is_rejected(weights: Path, chats: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(weights, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["n"] = 1000  # An id beyond the model's 320.
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=r"token n \(1000\), and the model has 320 tokens"):
        train(config_of(folder, chats, tmp_path / "run"))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointing_does_not_change_the_trained_parameters(
    weights: Path, chats: Path, tmp_path: Path, policy: str
) -> None:
    plain = train(config_of(weights, chats, tmp_path / "a"))
    recomputed = train(config_of(weights, chats, tmp_path / "b", gradient_checkpointing=policy))
    assert parameters(recomputed) == parameters(plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": "dora", "rslora": True, "ema_decay": 0.5},
        {"adapter": "lokr", "optimizer": "adamw8bit"},
        {"adapter": "oft", "gradient_checkpointing": "full", "ema_decay": 0.5},
        {"precision": "bf16", "optimizer": "lion", "learning_rate": 1e-3},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_settings_of_image_runs_work_for_texts(
    weights: Path, chats: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    # A row of a batch packs as many examples as fit into 256 tokens. So the batch of each step has
    # all eight examples, and the losses of the steps can be compared.
    given = {"sequence_length": 256, "batch_size": 2, "steps": 8, **settings}
    run = train(config_of(weights, chats, tmp_path / "run", **given))
    losses = [row["loss"] for row in read_json_log(run.output / "train.jsonl")]
    assert losses[-1] < losses[0]


def test_model_and_data_can_be_names_on_the_hub(
    weights: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run asks `huggingface_hub` for the files that it needs."""
    patterns: dict[str, list[str]] = {}

    def snapshot(name: str, repo_type: str, allow_patterns: list[str], **_: Any) -> str:
        patterns[repo_type] = allow_patterns
        return {"model/tiny": str(weights), "data/chats": str(chats.parent)}[name]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    config = config_of(weights, chats, tmp_path / "run", steps=1)
    train_adapter(config.with_(weights="model/tiny", dataset="data/chats"), progress=False)
    assert (tmp_path / "run" / "peft").is_dir()
    needed = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert needed <= set(patterns["model"])
    assert {"*.jsonl", "data/*.parquet"} <= set(patterns["dataset"])


def test_an_adapter_of_another_base_or_model_is_reported(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tc.models.CausalLM.from_pretrained(weights).add_adapter(tc.LoraConfig(r=2))
    adapter.save(tmp_path / "peft", format="peft")
    path = tmp_path / "peft" / "adapter_config.json"
    fields = json.loads(path.read_text()) | {"base_model_name_or_path": "some/base"}
    path.write_text(json.dumps(fields))
    flags = ["chat", "--model", "causal-lm", "--device", "cpu", "--prompt", "one"]
    assert main([*flags, "--adapter", str(path.parent)]) == 2
    error = capsys.readouterr().err
    assert "the model is the built-in one; the adapter's base is some/base" in error
    assert "give --weights some/base" in error

    image_adapter = tmp_path / "image.safetensors"
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    factors = {"lora_down.weight": tc.ones((2, 640)), "lora_up.weight": tc.ones((640, 2))}
    tc.save_file({f"{module}.{name}": values for name, values in factors.items()}, image_adapter)
    assert main([*flags, "--weights", str(weights), "--adapter", str(image_adapter)]) == 2
    assert f"is for another model: its modules, such as {module}, are" in capsys.readouterr().err
