"""Training: configuration, loop, checkpoints."""

from trainable_candle.train.callbacks import Callback, CsvLog, ProgressBar
from trainable_candle.train.config import TrainConfig
from trainable_candle.train.trainer import BatchSource, StepReport, Trainer

__all__ = ["BatchSource", "Callback", "CsvLog", "ProgressBar", "StepReport", "TrainConfig", "Trainer"]
