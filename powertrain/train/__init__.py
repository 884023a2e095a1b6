"""Training: configuration, data, the loop, checkpoints, reports. `train(config)` runs one."""

from typing import TYPE_CHECKING

from powertrain.runtime.extras import require
from powertrain.runtime.lazy_exports import resolve

if TYPE_CHECKING:
    from powertrain.train.api import TrainResult, train

require("train", "powertrain.train")

_PUBLIC = {"train": "powertrain.train.api", "TrainResult": "powertrain.train.api"}

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> object:
    return resolve(__name__, name, _PUBLIC)
