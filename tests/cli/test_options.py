"""Flags set every setting and override files; presets; errors about flags; lengths of help."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainable_candle import families
from trainable_candle.cli import (
    COMMANDS,
    chat,
    combine,
    demo,
    export,
    extract,
    main,
    merge,
    preview_data,
    resize,
    sample,
    verify,
)
from trainable_candle.cli.train import make_parser, read_config
from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.families.causal_lm import BUILT_IN
from trainable_candle.settings import TrainConfig, flag, settings
from trainable_candle.settings.checks import check_groups, check_settings
from trainable_candle.settings.config import canonical
from trainable_candle.settings.foreign import instead

DOCS = Path(__file__).parents[2] / "docs"
# For each setting that can be combined with the others, a value other than the default.
VALUES: dict[str, Any] = {
    "model": "digits",
    "weights": "w",
    "text_encoder": ["t 1.safetensors", "t2"],
    "vae": "ae",
    "text_encoder_precision": "int8",
    "dataset": "d",
    "output": "o",
    "resolution": 512,
    "bucketing": False,
    "bucket_step": 32,
    "min_side": 128,
    "max_side": 2048,
    "upscale": True,
    "crop": "random",
    "random_crops": 2,
    "flip": True,
    "color_brightness": 0.2,
    "color_contrast": 0.3,
    "color_saturation": 0.4,
    "color_hue": 0.1,
    "color_variants": 5,
    "mask": "alpha",
    "prior_loss_weight": 0.5,
    "skip_bad": True,
    "cache": "memory",
    "cache_dir": "c",
    "cuda_graphs": 0,
    "stream_blocks": 2,
    "stream_modulation": True,
    "stream_from": "peers",
    "optimizer_states": "host",
    "caption": "c",
    "trigger": "sks, a dog",
    "caption_dropout": 1.0,
    "caption_shuffle": True,
    "caption_keep_tokens": 1,
    "caption_tag_dropout": 0.2,
    "caption_separator": "|",
    "caption_variants": 0,
    "sequence_length": 64,
    "train_on": "all",
    "adapter": "dora",
    "dora_axis": "input",
    "oft_block_size": 8,
    "oft_side": "output",
    "rank": 3,
    "alpha": 2.5,
    "target_modules": ["to_q", "to_k"],
    "exclude_modules": ["proj"],
    "rslora": True,
    "lora_dropout": 0.1,
    "train_text_encoder": True,
    "initial_adapter": "a",
    "training_adapter": "b",
    "format": "comfyui",
    "adapter_precision": "f16",
    "steps": 12,
    "epochs": 3,
    "batch_size": 4,
    "gradient_accumulation": 5,
    "optimizer": "lion",
    "learning_rate": 1e-3,
    "text_encoder_learning_rate": 1e-5,
    "lora_plus_ratio": 16.0,
    "lr_scheduler": "cosine",
    "warmup_steps": 2,
    "optimizer_args": ["betas=0.9,0.98"],
    "lr_scheduler_args": ["num_cycles=2"],
    "weight_decay": 0.5,
    "max_grad_norm": 0.0,
    "ema_decay": 0.99,
    "seed": 9,
    "prediction_type": "v_prediction",
    "loss": "huber",
    "huber_delta": 0.2,
    "huber_schedule": "snr",
    "timesteps": "logit_normal",
    "timestep_shift": 3.0,
    "resolution_shift": True,
    "loss_weighting": "cosmap",
    "train_guidance": 2.0,
    "min_timestep": 10,
    "max_timestep": 900,
    "min_snr_gamma": 5.0,
    "noise_offset": 0.1,
    "multires_noise_iterations": 6,
    "multires_noise_discount": 0.4,
    "clip_skip": 2,
    "validation_split": 0.1,
    "validate_every": 5,
    "early_stop": 3,
    "sample_prompts": ["a cat, a dog", "a tree"],
    "sample_every": 6,
    "sample_every_epochs": 2,
    "negative_prompt": "blurry",
    "guidance": 3.0,
    "sampler": "euler",
    "sample_steps": 7,
    "sample_size": "64x32",
    "sample_seed": 8,
    "dpo_beta": 0.2,
    "sample_tokens": 9,
    "sample_temperature": 0.5,
    "device": "cuda:1",
    "precision": "bf16",
    "base_precision": "nf4",
    "w8a8": True,
    "gradient_checkpointing": "full",
    "checkpoint_blocks": 3,
    "vram": 8.0,
    "threads": 1,
    "gpus": "0,2",
    "effective_batch": 12,
    "reduce": "bf16",
    "compare_every": 50,
    "step_limit": 30.0,
    "name": "coffee",
    "save_every": 0,
    "save_every_epochs": 4,
    "keep_checkpoints": 7,
    "keep_adapters": 2,
    "log_every": 8,
    "tensorboard": True,
    "wandb": "loras",
    "resume": "latest",
}


def parse(*arguments: str) -> TrainConfig:
    return read_config(make_parser("train-lora", rare=False).parse(arguments))  # rare: in help only


def as_arguments(name: str, value: Any) -> list[str]:
    _, setting = settings()[name]  # the type and the description
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{flag(name)[2:]}"]
    if setting.several:  # one flag, then all values
        return [flag(name), *value]
    if setting.texts:  # a flag for each text, which may contain commas
        return [part for text in value for part in (flag(name), text)]
    return [flag(name), ",".join(value) if isinstance(value, list) else str(value)]


def test_every_setting_has_a_flag() -> None:
    # These settings conflict with settings in VALUES.
    exclusive = {"validation_dataset", "objective", "qat", "init"}
    exclusive |= {"qat_learned_scales", "qat_activations", "stochastic_rounding"}
    assert VALUES.keys() | exclusive == settings().keys()
    default = TrainConfig()
    for name, value in VALUES.items():
        assert value != getattr(default, name)
    arguments = [part for item in VALUES.items() for part in as_arguments(*item)]
    assert parse(*arguments) == TrainConfig(**VALUES)
    assert parse("--validation-dataset", "v").validation_dataset == "v"
    assert parse("--qat", "nf4").qat == "nf4"
    assert parse("--qat", "nf4", "--qat-learned-scales").qat_learned_scales
    assert parse("--qat", "fp8", "--qat-activations").qat_activations
    assert parse("--stochastic-rounding").stochastic_rounding
    assert parse("--init", "loftq", "--base-precision", "nf4").init == "loftq"
    assert parse("--mixed-precision", "bf16").precision == "bf16"
    assert parse("--dtype", "bf16").precision == "bf16"
    assert parse("--batch-size", "auto").batch_size == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--network_dim 8 --network_alpha 4", {"rank": 8, "alpha": 4.0}),
        ("--learning_rate=1e-3 --lr-scheduler constant_with_warmup", {"learning_rate": 1e-3}),
        ("--mixed_precision fp16 --save_precision bf16", {"precision": "f16"}),
        ("--gradient_checkpointing --flip_aug", {"gradient_checkpointing": "full", "flip": True}),
        ("--train_batch_size 4 --max_train_epochs 2", {"batch_size": 4, "epochs": 2}),
        ("--output_name sks --output_dir o", {"name": "sks", "output": "o"}),
        ("--optimizer_type AdamW8bit --text_encoder_lr 1e-5", {"optimizer": "adamw8bit"}),
        ("--shuffle_caption --keep_tokens 2", {"caption_shuffle": True, "caption_keep_tokens": 2}),
        ("--save_every_n_epochs 1", {"save_every_epochs": 1}),
        ("--early_stopping_patience 3", {"early_stop": 3}),
        ("--loraplus_lr_ratio 16", {"lora_plus_ratio": 16.0}),
    ],
)
def test_flags_of_other_tools_set_their_equivalents(text: str, expected: dict[str, Any]) -> None:
    config = parse(*text.split())
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_migration_guide_names_flags_that_work() -> None:
    rows = [line.split("|")[1:5] for line in (DOCS / "migrating.md").read_text().splitlines()
            if line.startswith("| `--")]  # fmt: skip
    assert len(rows) > 30
    parser = make_parser("train-lora", rare=False)
    checked = 0
    for row in rows:
        # The first cell has this package's flags, the other cells have the names in other tools.
        own, *theirs = (re.findall(r"`(?:--)?([a-z_.-]+)", cell) for cell in row)
        for name in (name for names in theirs for name in names):
            checked += 1
            if instead(name):  # no setting is equivalent: the error gives advice
                assert canonical_error(name).startswith(f"`{name}` ")
                continue
            (key,) = canonical({name: 1})
            assert {flag(key)[2:], f"no-{flag(key)[2:]}"} & set(own), name
            if "." in name:
                outer, _, inner = name.partition(".")
                assert canonical({outer: {inner: 1}}) == canonical({name: 1})
            else:
                assert flag(name) in parser._option_string_actions
    assert checked > 100


def canonical_error(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        canonical({name: 1})
    return str(caught.value)


def test_configurations_and_values_of_other_tools_are_converted(tmp_path: Path) -> None:
    ai_toolkit = """
        network: {type: lora, linear: 16, linear_alpha: 8}
        save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
        train: {batch_size: 1, steps: 2000, gradient_checkpointing: true, optimizer: adamw8bit,
                lr: 1e-4, dtype: bf16, train_text_encoder: false, noise_offset: 0.1}
        model: {name_or_path: flux}
        sample: {sample_every: 250, prompts: [a cat], seed: 42, guidance_scale: 4, sample_steps: 20}
        trigger_word: sks
    """
    onetrainer = """{"optimizer": {"optimizer": "ADAMW_8BIT"}, "lora_rank": 16, "lora_alpha": 8,
        "train_dtype": "BFLOAT_16", "output_dtype": "FLOAT_16", "learning_rate": 0.0001,
        "gradient_checkpointing": "ON", "learning_rate_scheduler": "CONSTANT",
        "text_encoder": {"train": false}, "base_model_name": "flux"}"""
    path = tmp_path / "run.yaml"
    for text in (ai_toolkit, onetrainer):
        path.write_text(text)
        config = TrainConfig.from_yaml(path)
        assert (config.rank, config.alpha, config.learning_rate) == (16, 8.0, 1e-4)
        assert (config.optimizer, config.precision) == ("adamw8bit", "bf16")
        assert (config.adapter_precision, config.weights) == ("f16", str(tmp_path / "flux"))
        assert config.gradient_checkpointing == "full"
    for value, expected in (("CPU_OFFLOADED", "offload"), ("off", "none"), ("true", "full")):
        path.write_text(f"gradient_checkpointing: {value}\nmask: off\nmixed_precision: no\n")
        config = TrainConfig.from_yaml(path)
        assert config.gradient_checkpointing == expected
        assert (config.mask, config.precision) == ("off", "f32")
    assert parse("--resolution", "1024,1024").resolution == 1024
    assert parse("--steps", "300", "--lr_warmup_steps", "200").warmup_steps == 200
    assert parse("--lr_warmup_steps", "0").warmup_steps == 0
    assert TrainConfig.from_mapping({"learning_rate_warmup_steps": 200.0}).warmup_steps == 200
    with pytest.raises(ConfigError, match=r"warmup_steps is 0\.1, which is a share of the run;"):
        parse("--lr_warmup_steps", "0.1")
    with pytest.raises(ConfigError, match=r"warmup_steps is 'few' \(str\), expected a whole"):
        parse("--lr_warmup_steps", "few")
    with pytest.raises(ConfigError, match="resolution is 832,1216, expected one number N"):
        parse("--resolution", "832,1216")
    path.write_text("train: {lr: 1, ema_config: {use_ema: true}}\n")
    with pytest.raises(ConfigError, match=r"`train.ema_config.use_ema` .*give --ema-decay alone"):
        TrainConfig.from_yaml(path)
    path.write_text("train: {lrr: 1}\n")
    with pytest.raises(ConfigError, match=r"unknown setting `train.lrr`"):
        TrainConfig.from_yaml(path)


def test_flags_of_other_tools_are_converted_or_their_errors_give_advice() -> None:
    flags = """--fp8_base --t5xxl --clip_l --clip_g --guidance_scale --lr_scheduler_power
        --lr_scheduler_num_cycles --discrete_flow_shift --model_prediction_type --timestep_sampling
        --cache_text_encoder_outputs --network_module --save_model_as --sdpa --full_bf16
        --persistent_data_loader_workers --max_data_loader_n_workers --highvram --xformers
        --weighting_scheme --network_args --network_dropout --apply_t5_attn_mask --torch_compile
        --t5xxl_max_token_length --lowvram --config_file --save_state --zero_terminal_snr
        --loraplus_unet_lr_ratio --loraplus_text_encoder_lr_ratio --loraplus_lr_embedding
        --fp8_t5 --fp8_llm --load_in_4bit --load_in_8bit --quantize --base_model_precision
        --gradient_checkpointing_cpu_offload"""
    for name in flags.split():
        own_form = name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"^{own_form} .*(leave it out|give|--)"):
            parse(name, "raw")  # any value
    config = parse("--blocks_to_swap", "8", "--ae", "ae.safetensors", "--loss_type", "l2")
    assert (config.stream_blocks, config.vae, config.loss) == (8, "ae.safetensors", "mse")


def test_a_preset_sets_only_settings_that_are_not_given(tmp_path: Path) -> None:
    model = ("--model", "sdxl")
    config = parse(*model, "--preset", "quality", "--rank", "4")
    assert (config.rank, config.steps, config.batch_size) == (4, 3000, 4)  # The preset has rank 32.
    # A given value overrides the preset even if it is the default, 16; `epochs` overrides `steps`.
    assert parse(*model, "--preset", "quality", "--rank", "16").rank == 16
    assert parse(*model, "--preset", "fast", "--epochs", "3").steps == TrainConfig().steps
    path = tmp_path / "run.yaml"
    path.write_text("model: causal-lm\npreset: balanced\nrank: 2\n")
    config = parse("--config", str(path))
    assert (config.rank, config.epochs, config.lr_scheduler) == (2, 2, "cosine")
    # A run's file stores the preset's values: a later change of the preset does not change the run.
    path.write_text(parse(*model, "--preset", "fast").to_yaml())
    with pytest.raises(ConfigError, match="preset: `fast` has no effect: all of its settings"):
        parse("--config", str(path), "--preset", "fast")
    with pytest.raises(ConfigError, match="preset: `quik` is not known"):
        parse(*model, "--preset", "quik")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--preset balanced --steps 10",
         "more than the 10 steps of the run; --warmup-steps comes from --preset balanced: give it"),
        ("--preset quality --optimizer adamwschedulefree",
         r"set --ema-decay to 0; --ema-decay comes from --preset quality"),
        ("--preset fast --learning-rate -1", r"learning_rate is -1\.0, expected above 0$"),
    ],
)  # fmt: skip
def test_errors_about_a_value_say_if_a_preset_has_set_it(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("--model", "sdxl", *given.split())


def test_in_a_file_presets_are_checked_and_gpus_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: fast\n")
    with pytest.raises(ConfigError, match="--preset fast depends on the model: give --model"):
        parse("--config", str(path))
    path.write_text("model: digits\npreset: [fast]\n")
    with pytest.raises(ConfigError, match=r"preset: `\['fast'\]` is not known"):
        parse("--config", str(path))
    path.write_text("gpus: [0, 2]\n")
    assert parse("--config", str(path)).gpus == "0,2"
    path.write_text("gpus: 2\n")
    assert parse("--config", str(path)).gpus == "2"


def test_steps_or_epochs_as_a_flag_replace_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(parse("--model", "digits", "--steps", "7").to_yaml())
    config = parse("--config", str(path), "--epochs", "3")
    assert (config.epochs, config.steps) == (3, TrainConfig().steps)
    path.write_text("model: digits\nepochs: 3\n")
    config = parse("--config", str(path), "--steps", "5")
    assert (config.epochs, config.steps) == (None, 5)


def test_repeated_flags_of_a_list_are_joined() -> None:
    config = parse("--target-modules", "to_q,to_k", "--target-modules", "to_v")
    assert config.target_modules == ["to_q", "to_k", "to_v"]


def test_a_preset_gives_only_settings_that_have_an_effect() -> None:
    for model in ("sdxl", "causal-lm"):
        config = parse("--model", model, "--preset", "quality", "--adapter", "oft")
        check_settings(config)
        # OFT has no rank and no dropout: they keep their defaults.
        assert (config.rank, config.lora_dropout, config.lr_scheduler) == (16, 0.0, "cosine")
    config = parse("--model", "causal-lm", "--preset", "quality", "--objective", "dpo")
    check_settings(config)
    assert (config.rank, config.lora_dropout) == (64, 0.0)  # DPO allows no dropout.
    config = parse("--model", "sdxl", "--preset", "quality", "--adapter", "oft", "--rank", "4")
    with pytest.raises(ConfigError, match="give --oft-block-size instead"):
        check_settings(config)


def test_a_preset_limits_the_sequence_length_to_the_context(tmp_path: Path) -> None:
    for length in (512, 4096):
        folder = tmp_path / str(length)
        shutil.copytree(BUILT_IN, folder)
        path = folder / "config.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "max_position_embeddings": length}))
        flags = ("--model", "causal-lm", "--weights", str(folder), "--preset", "fast")
        assert parse(*flags).sequence_length == min(length, 1024)  # 1024: the preset's value
        # Only the preset's value is limited: the run rejects a given value that is too large.
        assert parse(*flags, "--sequence-length", "9999").sequence_length == 9999
    with pytest.raises(MissingFileError, match="--weights: there is no file or folder no"):
        parse("--model", "causal-lm", "--weights", "no", "--preset", "fast")


@pytest.mark.parametrize("model", families.NAMES)
def test_the_presets_of_every_model_are_valid_settings(model: str) -> None:
    for values in families.presets(model).values():
        config = TrainConfig(model=model, **values)
        check_groups(config, families.find(model).groups)
        check_settings(config)


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 4\nsteps: 20\nrslora: true\n")
    config = parse("--config", str(path), "--rank", "8", "--no-rslora")
    assert (config.rank, config.steps, config.rslora) == (8, 20, False)


def test_a_flag_replaces_an_invalid_value_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 0\n")
    assert parse("--config", str(path), "--rank", "8").rank == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rte", "1"], r"unknown flag `--learning-rte`; did you mean `--learning-rate`"),
        (["--network_module", "networks.lora"], "has no .* choose the kind with --adapter"),
        (["--xformers"], "--xformers is not needed here, .*: leave it out"),
        (["--xyzzy"], r"unknown flag `--xyzzy` \(see train-lora --help\)"),
        (["--learn", "1"], "unknown flag `--learn`"),
        (["digits"], "unexpected argument `digits`"),
        (["--rank"], "argument --rank: expected one argument"),
        (["--rank", "many"], "argument --rank: invalid int value: 'many'"),
        (["--rank", "4", "--rank", "8"], "--rank is given twice, as 4 and as 8; give it once"),
        (["--rank", "4", "--network_dim=8"], "--network-dim 8: --rank is already given, as 4"),
        (["--target-modules", " ,"], "--target-modules is empty; give names, or leave it out"),
        (["--name", "a.safetensors"], "expected a file's name without folder and ending"),
        (["--min-timestep", "9", "--max-timestep", "9"], "no timestep is between them"),
        (["--flip", "--no-flip"], "--flip and --no-flip are both given; give one of them"),
        (["--config", "a", "--config", "b"], "--config is given twice, as a and as b"),
        (["--rank", "0"], "command line: rank is 0, expected at least 1"),
        (["--optimizer", "adam8b"], r"optimizer is `adam8b`, .* did you mean `adam8bit`"),
        (["--learning-rate", "nan"], "learning_rate is nan, expected a finite number"),
        (["--config", "none.yaml"], r"none\.yaml: there is no such configuration file"),
    ],
)
def test_errors_about_flags_give_the_flag_and_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        parse(*arguments)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*command.split(), "--help"]
    try:
        status: object = main(arguments)
    except SystemExit as end:  # argparse exits after it prints the help
        status = end.code
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: trainable-candle {command}".rstrip())
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_the_long_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert [name for name in settings() if f"  {flag(name)}" not in text] == []


# Guides that also name flags of other programs.
MIXED = ("benchmarks", "many-gpus", "memory", "migrating", "settings", "unsafe", "wsl")


@pytest.mark.parametrize("name", [p.name for p in DOCS.glob("*.md") if p.stem not in MIXED])
def test_guides_name_flags_that_exist(name: str) -> None:
    commands = (
        sample, merge, chat, preview_data, resize, combine, extract, export, demo, verify,
    )  # fmt: skip
    parsers = [make_parser("train", rare=True), *(c.make_parser("c") for c in commands)]
    actions = [action for parser in parsers for action in parser._actions]
    known = {option for action in actions for option in action.option_strings}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", (DOCS / name).read_text())) - known == set()


def test_the_settings_in_the_training_guide_are_valid() -> None:
    guide = (DOCS / "training.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert block is not None
    assert TrainConfig.from_mapping(yaml.safe_load(block[1])).model == "digits"
