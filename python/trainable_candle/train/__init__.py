"""Training: settings, the loop, its callbacks and logs, objectives, and sampling."""

from trainable_candle.settings import TrainConfig
from trainable_candle.train.callbacks import Callback, ProgressBar
from trainable_candle.train.logs import CsvLog, JsonLog, TensorBoardLog
from trainable_candle.train.objective import (
    DiffusionObjective,
    FlowMatching,
    NoisedLatents,
    NoiseSchedule,
)
from trainable_candle.train.sampler import Guided, Sampler, classifier_free_guidance, sample
from trainable_candle.train.source import BatchSource
from trainable_candle.train.trainer import StepReport, Trainer

__all__ = [
    "BatchSource",
    "Callback",
    "CsvLog",
    "DiffusionObjective",
    "FlowMatching",
    "Guided",
    "JsonLog",
    "NoiseSchedule",
    "NoisedLatents",
    "ProgressBar",
    "Sampler",
    "StepReport",
    "TensorBoardLog",
    "TrainConfig",
    "Trainer",
    "classifier_free_guidance",
    "sample",
]
