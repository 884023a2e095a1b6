"""Summary of a run before its first step: model, data, batch, device, environment, config."""

import platform
import shlex
import socket
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import TypeAdapter

import powertrain
from powertrain.models import build
from powertrain.models.flops import flops_per_token
from powertrain.ops.attention.explain import Explanation
from powertrain.runtime import driver, tracing
from powertrain.runtime.reading import read_json, reading
from powertrain.runtime.target import Target
from powertrain.train.checkpoint.store import write_json
from powertrain.train.config.reader import Run
from powertrain.train.config.table import shown
from powertrain.train.lint import explain_run_attention
from powertrain.train.trainer import Trainer

FILE = "about.json"


@dataclass(frozen=True)
class About:
    """Facts of a run, all JSON; counts are plain numbers, times ISO 8601 in UTC.

    flops_per_token      forward and backward, recomputation not counted;  flops_attention: the part that is scores
    peak_flops           dense FLOP/s of one device in the run's precision, None if not known
    attention, why_attention   the backend of the first layer, and the order it comes from
    kernels              result of the prebuild, None on a CPU
    table                the config table's rows: key, value, place, disposition, explanation
    environment          label -> text
    resumed_from         which checkpoint, and the settings that have changed since
    """

    folder: str
    checkpoints: str  # "": none are written
    command: str
    started: str
    resumed_at: int
    steps: int
    architecture: str
    parameters: int
    vocab_size: int
    tokenizer: str
    train_samples: int
    seq_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_size: int
    world_size: int
    precision: str
    device: str
    flops_per_token: float
    flops_attention: float
    peak_flops: float | None
    attention: str
    why_attention: str
    kernels: str | None
    table: list[dict[str, Any]]
    environment: dict[str, str]
    resumed_from: str = ""

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size * self.seq_length

    def write(self) -> None:
        """Keep it in the run's folder, for the report."""
        write_json(Path(self.folder) / FILE, asdict(self))

    @staticmethod
    def read(folder: Path) -> "About":
        """The one that a run wrote. Raises ValueError naming the file, FileNotFoundError if there is none."""
        file = folder / FILE
        try:
            values = read_json(file)
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: a run's folder must hold it; no run has written there") from None
        with reading(file, "be written by a run"):
            # the file may be of another version of this package, or edited: types are checked before a page is made of
            # it
            return TypeAdapter(About).validate_python(values)


def about(trainer: Trainer, run: Run) -> About:
    """Everything that is known of a run that stands before its next step."""
    config, ranks = trainer.config, trainer.ranks
    # on the meta device: as one process alone would have it
    model = build(config.model)
    arch = f"sm_{Target.of(ranks.device).arch}" if ranks.device.type == "cuda" else "cpu"
    attention = explain_run_attention(config, model, arch)
    # the trace is of this process, which prebuilt its kernels before the ranks met
    prebuilt = [event.text for event in tracing.trace() if event.kind == "prebuild"]
    train = config.train
    return About(
        folder=str(config.folder()),
        checkpoints=str(config.checkpoint_folder()) if config.checkpoint.save else "",
        command=shlex.join(["powertrain", *sys.argv[1:]]),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        resumed_at=trainer.progress.step,
        steps=train.steps,
        architecture=config.model.architecture,
        parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=trainer.data.vocab_size,
        tokenizer=config.data.tokenizer,
        train_samples=len(trainer.data.train),
        seq_length=train.seq_length,
        micro_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        dp_size=ranks.dp_size,
        world_size=ranks.world_size,
        precision=train.precision,
        device=device_name(ranks.device),
        flops_per_token=trainer.flops_per_token,
        # with no keys to see, the products with weights are left; the difference is attention's
        flops_attention=flops_per_token(model, train.seq_length) - flops_per_token(model, 0),
        peak_flops=trainer.peak_flops,
        attention="none" if attention is None else str(attention.chosen),
        why_attention="" if attention is None else _why(attention),
        kernels=prebuilt[-1] if prebuilt else None,
        # as text: values may be of any type that YAML has
        table=[{**asdict(row), "value": shown(row.value)} for row in run.table],
        environment=environment(ranks.device),
        resumed_from=trainer.resumed_from,
    )


def device_name(device: torch.device) -> str:
    """The GPU as its driver names it, or the CPU's architecture and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {psutil.cpu_count(logical=False) or psutil.cpu_count()} cores)"


def environment(device: torch.device) -> dict[str, str]:
    """Versions and machine, label -> text."""
    lines = {
        "powertrain": powertrain.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "Triton": _triton(),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "CPU threads of torch": str(torch.get_num_threads()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }
    if device.type == "cuda":
        target, properties = Target.of(device), torch.cuda.get_device_properties(device)
        nccl: Any = torch.cuda.nccl
        lines |= {
            "GPU": f"{properties.name}, sm_{target.arch}, {properties.total_memory / 2**30:.0f} GiB",
            "driver supports CUDA": f"{driver.version() // 1000}.{driver.version() % 1000 // 10}",
            "CUDA of torch": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            # builds of PyTorch for a single GPU may lack NCCL, and asking for its version then fails
            "NCCL": ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else "none",
        }
    return lines


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _why(explanation: Explanation) -> str:
    column = explanation.columns[0]
    return "; ".join(note for note in column.notes if note.startswith(("order:", f"{explanation.chosen}:")))
