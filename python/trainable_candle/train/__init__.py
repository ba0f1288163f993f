"""Training: configuration, loop, checkpoints."""

from trainable_candle.train.callbacks import Callback, ProgressBar
from trainable_candle.train.config import TrainConfig
from trainable_candle.train.logs import CsvLog, JsonLog, TensorBoardLog
from trainable_candle.train.objective import FlowMatching
from trainable_candle.train.trainer import BatchSource, StepReport, Trainer

__all__ = [
    "BatchSource",
    "Callback",
    "CsvLog",
    "FlowMatching",
    "JsonLog",
    "ProgressBar",
    "StepReport",
    "TensorBoardLog",
    "TrainConfig",
    "Trainer",
]
