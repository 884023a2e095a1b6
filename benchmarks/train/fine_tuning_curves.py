"""`python -m benchmarks.train.fine_tuning_curves [--objective sft dpo lora] [--steps N] [--device D] [--out FOLDER]`.

SFT, DPO and LoRA of a Llama by the trainer and by plain PyTorch: the same first weights, batches, rates and clipping.
Plain PyTorch: full logits, F.cross_entropy, SDPA, torch.optim.AdamW(fused=True), float32 weights under autocast where
they are trained, 16-bit ones where they are frozen; compiled with --compile. On a GPU the shape is Llama 1B in
bfloat16, on a CPU a tiny one in float32, where the curves agree to 1e-4.
First weights: --base-steps steps of pretraining on the same text, Python's standard library. A prompt is the first
quarter of a piece of it, the completion the rest; a rejected completion has the same lines in reverse.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train.curves import distance, plot
from benchmarks.train.twin import Twin
from powertrain.models import huggingface
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.loader import Batch, batches
from powertrain.train.data.quickstart import quickstart_files
from powertrain.train.data.sources import open_tokenizer
from powertrain.train.data.tokenizer import save_tokenizer, train_tokenizer
from powertrain.train.mesh_shape import check_parallel
from powertrain.train.ranks import Ranks
from powertrain.train.reporting.metrics import PartialSink, StepRecord
from powertrain.train.run import build_kernels, open_run_data
from powertrain.train.schedule import learning_rate
from powertrain.train.trainer import Trainer

OBJECTIVES = ("sft", "dpo", "lora")
# after so many steps everything is compiled and allocated
WARM = 10


@dataclass(frozen=True)
class Size:
    """characters   of an example, more than fit into a row, so that rows are full
    rows         of a micro-batch, those of rejected completions included
    """

    model: dict[str, Any]
    seq_length: int
    rows: int
    vocabulary: int
    characters: int
    examples: int
    precision: str
    rates: dict[str, float]


ON_GPU = Size(
    {"preset": "llama-1b", "max_position_embeddings": 1024, "tie_embeddings": False},
    seq_length=1024, rows=4, vocabulary=8192, characters=6000, examples=2000, precision="bf16",
    rates={"base": 3e-4, "sft": 1e-4, "dpo": 5e-6, "lora": 5e-4},
)  # fmt: skip
ON_CPU = Size(
    {"architecture": "llama", "vocab_size": 512, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
     "intermediate_size": 96, "max_position_embeddings": 64, "tie_embeddings": False},
    seq_length=64, rows=4, vocabulary=512, characters=400, examples=64, precision="fp32",
    rates={"base": 3e-3, "sft": 3e-3, "dpo": 1e-3, "lora": 1e-2},
)  # fmt: skip


@dataclass
class Curve:
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    peak_bytes: int = 0

    def last(self, count: int = 50) -> float:
        return statistics.fmean(self.losses[-count:])


def prepare(folder: Path, size: Size) -> None:
    """tokenizer.json, text.jsonl, sft.jsonl and pairs.jsonl."""
    text = "".join(path.read_text() for path in quickstart_files().train)
    pieces = [text[at : at + size.characters] for at in range(0, len(text), size.characters)][: size.examples]
    save_tokenizer(train_tokenizer(pieces, size.vocabulary), folder)
    records: dict[str, list[dict[str, str]]] = {"text": [], "sft": [], "pairs": []}
    for piece in pieces:
        prompt, completion = piece[: size.characters // 4], piece[size.characters // 4 :]
        records["text"].append({"text": piece})
        records["sft"].append({"prompt": prompt, "completion": completion})
        reverse = "\n".join(reversed(completion.split("\n")))
        records["pairs"].append({"prompt": prompt, "chosen": completion, "rejected": reverse})
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def run_config(name: str, folder: Path, size: Size, steps: int, seed: int = 1234) -> RunConfig:
    """Of "base", the pretraining, or of an objective that begins with its weights."""
    files = {"base": "text", "dpo": "pairs"}
    train: dict[str, Any] = {
        "objective": {"base": "pretrain", "lora": "sft"}.get(name, name), "steps": steps, "seed": seed,
        "seq_length": size.seq_length, "micro_batch_size": size.rows // 2 if name == "dpo" else size.rows,
        "precision": size.precision, "spike_factor": 0, "lora": {"rank": 16, "alpha": 32} if name == "lora" else None,
    }  # fmt: skip
    config = RunConfig.model_validate({
        "model": size.model,
        "data": {"train": str(folder / f"{files.get(name, 'sft')}.jsonl"), "split": "1,0,0", "num_workers": 0,
                 "tokenizer": str(folder / "tokenizer.json"), "packing": "packed" if name == "base" else "unpacked",
                 "cache_folder": str(folder / "cache")},
        "train": train,
        "optimizer": {"lr": size.rates[name]},
        "schedule": {"warmup_steps": max(steps // 10, 1)},
        "checkpoint": {"save": False, "load": None if name == "base" else str(folder / "base"), "finetune": True},
        "evaluation": {"at_end": False},
        "logging": {"folder": str(folder / name)},
    })  # fmt: skip
    check_parallel(config, 1)
    return config


class _Steps(PartialSink):
    """A sink that keeps losses and times."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.seconds.append(record.seconds)


def ours(config: RunConfig, device: torch.device) -> tuple[Curve, dict[str, Tensor], Trainer]:
    """The run, the weights it began with (on the CPU), and the trainer at its end."""
    build_kernels(config, device, 1)
    sink = _Steps()
    trainer = Trainer(config, Ranks(device), open_run_data(config, open_tokenizer(config.data), 1), [sink])
    if config.checkpoint.load is not None:
        trainer.start_from(Path(config.checkpoint.load))
    first = {name: tensor.cpu().clone() for name, tensor in _weights(trainer)}
    _reset_peak(device)
    trainer.fit()
    timed = sink.seconds[WARM:]
    rate = _tokens(config) * len(timed) / sum(timed) if timed else 0.0
    return Curve(sink.losses, rate, _peak(device)), first, trainer


def _weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in trainer.optimizer.tensors().items():
        if name.startswith("model."):
            yield name.removeprefix("model."), tensor


def write_base(trainer: Trainer, folder: Path, dtype: torch.dtype) -> None:
    """The weights of the pretraining, as a Hugging Face folder, from which the others begin."""
    folder.mkdir()
    tensors = ((name, tensor.cpu()) for name, tensor in _weights(trainer))
    huggingface.write(folder, trainer.config.model, tensors, dtype=dtype)


class PlainLoRA(nn.Module):
    """x weightᵀ + scale (x lora_Aᵀ) lora_Bᵀ, one product after the other."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = linear.weight, scale
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def plain(config: RunConfig, device: torch.device, first: dict[str, Tensor], *, compiled: bool = False) -> Curve:
    """The same run in plain PyTorch, from the same weights."""
    train = config.train
    model = plain_model(config, first, device)
    loss_of = _dpo(config, model, first, device) if train.objective == "dpo" else _mean_loss(model)
    if compiled:
        loss_of = torch.compile(loss_of)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.optimizer.weight_decay},
              {"params": vectors, "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], betas=config.optimizer.betas, eps=config.optimizer.eps, fused=True
    )
    _reset_peak(device)
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step, batch in enumerate(_batches(config)):
        if step == WARM:
            _wait(device)
            started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer.lr, config.schedule, train.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
            loss = loss_of(batch.tokens.to(device), batch.labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _wait(device)
    rate = _tokens(config) * max(len(losses) - WARM, 0) / (time.perf_counter() - started)
    return Curve([loss.item() for loss in losses], rate, _peak(device))


def plain_model(config: RunConfig, first: dict[str, Tensor], device: torch.device) -> Twin:
    """The twin with these weights: trained ones in float32, frozen ones in 16 bits where the run computes in them."""
    with device:
        model = Twin(config.model)
        if (lora := config.train.lora) is not None:
            _freeze(model, config)
            for name in [n.removesuffix(".lora_A") for n in first if n.endswith(".lora_A")]:
                adapted = PlainLoRA(model.get_submodule(name), lora.rank, lora.alpha / lora.rank)
                adapted.lora_A.data, adapted.lora_B.data = adapted.lora_A.data.float(), adapted.lora_B.data.float()
                model.set_submodule(name, adapted)
    model.load_state_dict(first)
    return model


def _freeze(model: Twin, config: RunConfig) -> None:
    """Parameters in the run's precision; rotary tables stay in float32."""
    model.requires_grad_(False)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16 if config.train.precision == "bf16" else torch.float32)


def _mean_loss(model: Twin) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(tokens).flatten(0, 1).float(), labels.flatten())

    return loss


def _dpo(
    config: RunConfig, model: Twin, first: dict[str, Tensor], device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """DPO's loss of rows that alternate between chosen and rejected, with a frozen copy as the reference."""
    with device:
        reference = Twin(config.model)
    reference.load_state_dict(first)
    _freeze(reference, config)
    beta = config.train.preference.beta

    def log_probs(model: Twin, tokens: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(model.logits(tokens).flatten(0, 1).float(), labels.flatten(), reduction="none")
        return -losses.view_as(labels).sum(1)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            known = log_probs(reference, tokens, labels)
        ratio = log_probs(model, tokens, labels) - known
        return -F.logsigmoid(beta * (ratio[0::2] - ratio[1::2])).mean()

    return loss


def _batches(config: RunConfig) -> Iterator[Batch]:
    data = open_run_data(config, open_tokenizer(config.data), 1)
    limit = config.train.steps * config.train.micro_batch_size
    return batches(data.train, micro_batch_size=config.train.micro_batch_size, limit=limit)


def _tokens(config: RunConfig) -> int:
    """Of a step, those of rejected completions included."""
    sides = 2 if config.train.objective == "dpo" else 1
    return sides * config.train.micro_batch_size * config.train.seq_length


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def compare(
    name: str, folder: Path, size: Size, device: torch.device, steps: int, *, seed: int = 1234, compiled: bool = False
) -> tuple[Curve, Curve]:
    """(ours, plain PyTorch) of one objective."""
    config = run_config(name, folder, size, steps, seed)
    curve, first, trainer = ours(config, device)
    # its memory is the twin's
    del trainer
    _reset_peak(device)
    return curve, plain(config, device, first, compiled=compiled)


def make_base(folder: Path, size: Size, device: torch.device, steps: int) -> float:
    """Texts, tokenizer and FOLDER/base; the last loss of the pretraining."""
    prepare(folder, size)
    curve, _, trainer = ours(run_config("base", folder, size, steps), device)
    write_base(trainer, folder / "base", torch.bfloat16 if size.precision == "bf16" else torch.float32)
    return curve.losses[-1]


def row(name: str, our: Curve, twin: Curve) -> str:
    """A line of the table."""
    largest, _ = distance(our.losses, twin.losses)
    speed = f"{our.tokens_per_second:,.0f} | {twin.tokens_per_second:,.0f}"
    ratio = our.tokens_per_second / twin.tokens_per_second if twin.tokens_per_second else float("nan")
    memory = f"{our.peak_bytes / 2**30:.1f} | {twin.peak_bytes / 2**30:.1f}"
    means = f"{our.last():.4f} | {twin.last():.4f} | {our.last() - twin.last():+.4f}"
    return f"| {name} | {means} | {largest:.4f} | {speed} | {ratio:.2f} | {memory} |"


HEADER = """| run | loss, last 50 | plain | difference | largest of a step | tokens/s | plain | ratio | GiB | plain |
|---|---|---|---|---|---|---|---|---|---|"""


def write_curves(file: Path, our: Curve, twin: Curve) -> None:
    lines = [f"{n},{a:.6f},{b:.6f}" for n, (a, b) in enumerate(zip(our.losses, twin.losses, strict=True), 1)]
    file.write_text("\n".join(["step,powertrain,plain_pytorch", *lines]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--base-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--compile", action="store_true", help="torch.compile for plain PyTorch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    device = torch.device(options.device)
    size = ON_GPU if device.type == "cuda" else ON_CPU
    options.out.mkdir(parents=True, exist_ok=True)
    table = [HEADER]
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.perf_counter()
        loss = make_base(folder, size, device, options.base_steps)
        print(f"first weights after {options.base_steps} steps: loss {loss:.4f}, {time.perf_counter() - started:.0f} s")
        for objective in options.objective:
            curves = compare(
                objective, folder, size, device, options.steps, seed=options.seed, compiled=options.compile
            )
            write_curves(options.out / f"fine_tuning_{objective}.csv", *curves)
            plot(
                {"plain PyTorch": curves[1].losses, "powertrain": curves[0].losses},
                options.out / f"fine_tuning_{objective}.svg",
            )
            table.append(row(objective, *curves))
            print("\n".join(table), f"{time.perf_counter() - started:.0f} s", sep="\n", flush=True)
    (options.out / "fine_tuning_curves.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
