"""The settings of a training run, in groups with their ranges, help, conditions and synonyms.

`TrainConfig` has the settings of all groups as its own fields. The command line, YAML files and
Python use these declarations; a model takes the groups that apply to it.
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
