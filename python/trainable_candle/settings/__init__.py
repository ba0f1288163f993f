"""The settings of a training run, in groups with their ranges, help, conditions and synonyms.

`TrainConfig` has all of them, flat. The command line, YAML files and Python read the same
declarations; a model takes the groups that apply to it.
"""

from trainable_candle.settings.config import GROUPS, IMAGE_GROUPS, TrainConfig, group_of, settings
from trainable_candle.settings.setting import Group, Setting, flag, nearest

__all__ = [
    "GROUPS",
    "IMAGE_GROUPS",
    "Group",
    "Setting",
    "TrainConfig",
    "flag",
    "group_of",
    "nearest",
    "settings",
]
