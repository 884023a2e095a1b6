"""`python -m benchmarks.train.curves [--device cuda] [--out FOLDER]`: 200 steps of ours and of the plain-PyTorch twin.

The same first weights, batches, schedule and clipping, on the Python standard library's source. On a CPU in float32 the
curves must agree to 1e-4; on a GPU in bfloat16 ours must differ from the twin no more than two seeds of the twin do.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.twin import Twin
from powertrain.models import ModelConfig
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.loader import Batch, batches
from powertrain.train.data.sources import open_tokenizer
from powertrain.train.ranks import Ranks
from powertrain.train.reporting.chart import line_chart, series
from powertrain.train.reporting.metrics import PartialSink
from powertrain.train.run import open_run_data, with_vocabulary
from powertrain.train.schedule import learning_rate
from powertrain.train.trainer import Trainer

MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "architecture": "gpt_neox", "hidden_size": 256, "num_layers": 6, "num_heads": 8, "rotary_pct": 0.25,
        "parallel_residual": True, "max_position_embeddings": 512,
    },
    "llama": {
        "architecture": "llama", "hidden_size": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 2,
        "intermediate_size": 704, "max_position_embeddings": 512,
    },
}  # fmt: skip


class Losses(list[float], PartialSink):
    """A sink that is the list of losses."""

    def step(self, record: Any) -> None:
        self.append(record.loss)


def run_config(model: dict[str, Any], *, seed: int = 1234, steps: int = 200, **train: Any) -> RunConfig:
    sections: dict[str, Any] = {
        "model": model,
        "data": {"train": "quickstart", "num_workers": 0},
        "train": {"steps": steps, "seed": seed, "spike_factor": 0, **train},
        "optimizer": {"lr": 2e-3},
        "schedule": {"warmup_steps": steps // 10},
        "evaluation": {"at_end": False},
        "checkpoint": {"save": False},
    }
    config = RunConfig(**sections)
    return with_vocabulary(config, open_tokenizer(config.data).vocab_size)


def losses_of_ours(config: RunConfig, device: torch.device) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run, and the weights it began with."""
    data = open_run_data(config, open_tokenizer(config.data), 1)
    losses = Losses()
    trainer = Trainer(config, Ranks(device), data, [losses])
    tensors = trainer.optimizer.tensors()
    first = {name.removeprefix("model."): t.clone() for name, t in tensors.items() if name.startswith("model.")}
    trainer.fit()
    return list(losses), first


def losses_of_twin(config: RunConfig, device: torch.device, weights: dict[str, torch.Tensor]) -> list[float]:
    """The same run in plain PyTorch: float32 weights, autocast where the run computes in 16 bits."""
    train, model = config.train, Twin(config.model).to(device)
    model.load_state_dict(weights)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": config.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    losses = []
    for step, batch in enumerate(_batches(config)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer.lr, config.schedule, train.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
            loss = model(batch.tokens.to(device), batch.labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _batches(config: RunConfig) -> Iterator[Batch]:
    data = open_run_data(config, open_tokenizer(config.data), 1)
    limit = config.train.steps * config.train.micro_batch_size
    return batches(data.train, micro_batch_size=config.train.micro_batch_size, limit=limit)


def distance(a: list[float], b: list[float]) -> tuple[float, float]:
    """The largest and the mean difference of two curves."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(differences), sum(differences) / len(differences)


_STYLE = """<style>text{font:11px sans-serif;fill:#555}.a{color:#1668c7}.b{color:#d4652f}
.line{fill:none;stroke-width:1.4;stroke:currentColor}.band{fill:currentColor;opacity:.15;stroke:none}.grid{stroke:#ddd}.axis{stroke:#999}
.cursor,.mark{visibility:hidden}</style>"""


def plot(curves: dict[str, list[float]], file: Path) -> None:
    """An SVG of loss curves, ours in blue, the twin in orange."""
    lines = [series(name, list(enumerate(c, 1)), style=s) for (name, c), s in zip(curves.items(), "ba", strict=True)]
    chart = re.sub(r' data-chart="[^"]*"', "", str(line_chart(lines, width=760)))
    chart = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", ">" + _STYLE, 1)
    file.write_text(chart + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    shape = {"seq_length": 512, "micro_batch_size": 32} if on_gpu else {"seq_length": 128, "micro_batch_size": 4}
    for name, model in MODELS.items():
        fields: ModelConfig | dict[str, Any] = model if on_gpu else {**model, "hidden_size": 128, "num_layers": 3}
        ours, twins = [], []
        for seed in (1, 2) if on_gpu else (1,):
            config = run_config(fields, seed=seed, precision="bf16" if on_gpu else "fp32", **shape)  # type: ignore[arg-type]
            losses, first = losses_of_ours(config, device)
            ours.append(losses)
            twins.append(losses_of_twin(config, device, first))
        largest, mean = distance(ours[0], twins[0])
        print(f"{name}: last loss ours {ours[0][-1]:.4f}, twin {twins[0][-1]:.4f}")
        print(f"  ours and twin: largest difference {largest:.2e}, mean {mean:.2e}")
        if on_gpu:
            print("  ours and twin, second seed: largest {:.2e}, mean {:.2e}".format(*distance(ours[1], twins[1])))
            print("  two seeds of the twin:      largest {:.2e}, mean {:.2e}".format(*distance(*twins)))
        kind = "h200_bf16" if on_gpu else "cpu_fp32"
        plot({"plain PyTorch": twins[0], "powertrain": ours[0]}, arguments.out / f"2026-11-21_{kind}_curves_{name}.svg")


if __name__ == "__main__":
    main()
