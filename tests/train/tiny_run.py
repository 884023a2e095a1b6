"""A run so small that it takes a second, and one's own text to train it on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from powertrain.train import ranks
from powertrain.train.config.reader import Run, read_config
from powertrain.train.reporting.metrics import PartialSink, Sink, StepRecord
from powertrain.train.run import start
from powertrain.train.trainer import Trainer

SEQ, MICRO, VOCAB = 32, 4, 256
CONFIG = """
model: {{architecture: llama, hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64,
  max_position_embeddings: 64, tie_embeddings: false}}
data: {{train: {folder}/text.jsonl, split: "80,20,0", num_workers: 0, cache_folder: {folder}/cache}}
train: {{steps: 12, seq_length: 32, micro_batch_size: 4, precision: fp32}}
evaluation: {{every: 5, steps: 2}}
checkpoint: {{folder: {folder}/run/checkpoints, every: 5, asynchronous: false}}
logging: {{folder: {folder}/run, tensorboard: false}}
"""


def write_config(folder: Path) -> Path:
    """A config file of the tiny run in `folder`, which trains on `text.jsonl` and writes to `run`."""
    lines = [json.dumps({"text": f"line {n} of the text, of {n * n} lines and no more " * 4}) for n in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    file = folder / "tiny.yml"
    file.write_text(CONFIG.format(folder=folder))
    return file


def read(folder: Path, *overrides: str) -> Run:
    return read_config([write_config(folder)], overrides)


def open_trainer(folder: Path, *overrides: str, sinks: Callable[[Trainer], Sequence[Sink]]) -> Trainer:
    return start(read(folder, *overrides), ranks.read_launch_env(), sinks)


class At(PartialSink):
    """A sink that does something once, when it is told of a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.at, self.act = step, act
        self.notes: list[str] = []

    def step(self, record: StepRecord) -> None:
        if record.step == self.at:
            self.act()

    def note(self, text: str) -> None:
        self.notes.append(text)
