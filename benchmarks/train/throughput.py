"""`python -m benchmarks.train.throughput [CASE...]`: steps of our trainer and of a compiled plain-PyTorch twin.

In turns, in one process, the same batches; MFU counts model FLOPs (powertrain/models/flops.py) against the card's dense
bfloat16 rate. The twin is the strongest that we can write:
- bfloat16 weights; model and loss compiled by torch.compile(dynamic=False);
- where a step has less than 16k tokens also by mode="reduce-overhead", which replays forward and backward from CUDA
  graphs as the trainer does there;
- attention by FlashAttention-3 where FLASH_3_LIBRARY names its library, as an op that does not break the graph, else by
  PyTorch's scaled_dot_product_attention;
- clipping to a global norm of 1 and AdamW over float32 masters, in one function compiled in the same way: it reads the
  bfloat16 gradients as they are; one pass over a parameter updates master and moments in place and writes the weight.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import flash_3_op
from benchmarks.train.twin import Twin
from powertrain.models.flops import flops_per_token
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.packed import Sample
from powertrain.train.ranks import Ranks
from powertrain.train.reporting.peak_flops import peak_tflops
from powertrain.train.trainer import Trainer

_WARM = 10  # steps of the trainer: its graphs are captured in the eighth
_FEW_TOKENS = 1 << 14


@dataclass(frozen=True)
class Case:
    model: dict[str, Any]
    seq_length: int
    batch: int
    twin: bool = True


_NEOX = {"vocab_size": 50304, "max_position_embeddings": 2048}
CASES = {
    "llama-1.2b": Case({"preset": "llama-1b", "max_position_embeddings": 4096}, 4096, 4),
    "gpt-neox-125m": Case({"preset": "gpt-neox-125m", **_NEOX}, 2048, 16),
    "gpt-neox-1.3b": Case({"preset": "gpt-neox-1.3b", **_NEOX}, 2048, 8),
    "pythia-1.4b": Case({"preset": "pythia-1.4b", **_NEOX}, 2048, 8),
    # little work for each launch: the GPU waits for Python without CUDA graphs
    "pythia-70m": Case({"preset": "pythia-70m", **_NEOX}, 2048, 4),
    "pythia-160m": Case({"preset": "pythia-160m", **_NEOX}, 2048, 2),
    "pythia-410m": Case({"preset": "pythia-410m", **_NEOX}, 1024, 1),
    # no twin: the experts' layer has one of its own (benchmarks/ops/moe.py)
    "deepseek-1b": Case({"preset": "deepseek-1b", "max_position_embeddings": 4096}, 4096, 4, twin=False),
}


class RandomTokens:
    """Samples without files: as long as wanted, the same for a number."""

    def __init__(self, vocab_size: int, seq_length: int) -> None:
        self.vocab_size, self.seq_length = vocab_size, seq_length

    def __len__(self) -> int:
        return 1 << 40

    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, self.vocab_size, self.seq_length + 1)
        return Sample(tokens[:-1], tokens[1:], None)


@dataclass
class _Data:
    train: RandomTokens
    validation: None = None
    test: None = None
    tokenizer: None = None
    identity: str = ""


def run_config(case: Case, **train: Any) -> RunConfig:
    return RunConfig(
        model=case.model,  # type: ignore[arg-type]
        data={"train": "synthetic", "num_workers": 0},  # type: ignore[arg-type]
        train={"steps": 1 << 20, "seq_length": case.seq_length, "micro_batch_size": case.batch, **train},  # type: ignore[arg-type]
        checkpoint={"save": False},  # type: ignore[arg-type]
    )


def ours(case: Case, device: torch.device) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    """One step of the trainer: what `fit` does for it, on a batch that is on the device already."""
    config = run_config(case)
    data: Any = _Data(RandomTokens(config.model.vocab_size, case.seq_length))
    trainer = Trainer(config, Ranks(device), data)
    batch = next(trainer._stream()).to(device)

    def step() -> torch.Tensor:
        loss = trainer._forward_backward([batch])
        trainer.optimizer.step(1e-4)
        trainer._graphs.end_step()
        return loss[0]

    # the trainer has seen by then whether the GPU waits for Python
    for _ in range(_WARM):
        step()
    return step, trainer.model


LR, BETAS, EPS, DECAY, MAX_NORM = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


@torch.no_grad()
def clipped_adamw(
    weights: list[Tensor], gradients: list[Tensor], masters: list[Tensor], averages: list[Tensor],
    squares: list[Tensor], powers: list[Tensor],
) -> None:  # fmt: skip
    """A step of AdamW, everything in place; powers: of the betas, with the number of steps so far."""
    norm = torch.stack([g.float().square().sum() for g in gradients]).sum().sqrt()
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    # tensors, or every step would be compiled; not a count, since Inductor repeats scalars in each parameter's kernel,
    # and pow takes longer than a product
    for power, beta in zip(powers, BETAS, strict=True):
        power.mul_(beta)
    first, second = (1 - power for power in powers)
    for weight, gradient, master, average, square in zip(weights, gradients, masters, averages, squares, strict=True):
        clipped = gradient.float() * factor
        average.lerp_(clipped, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(clipped, clipped, value=1 - BETAS[1])
        change = average / first / ((square / second).sqrt() + EPS)
        # norms and biases do not decay
        master.mul_(1 - LR * DECAY if master.dim() > 1 else 1.0).sub_(LR * change)
        weight.copy_(master)


class MasterAdamW:
    """The twin's optimizer. The float32 parameters become its masters, and the model's are bfloat16 from then on."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.masters = parameters, [p.data for p in parameters]
        for p in parameters:
            p.data = p.data.bfloat16()
        self.weights = [p.detach() for p in parameters]
        self.averages, self.squares = ([torch.zeros_like(m) for m in self.masters] for _ in range(2))
        self.powers = [torch.ones((), device=self.masters[0].device) for _ in BETAS]
        self.update: Callable[..., None] = torch.compile(clipped_adamw, dynamic=False)

    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.update(self.weights, gradients, self.masters, self.averages, self.squares, self.powers)
        for p in self.parameters:
            p.grad = None


def twin(
    case: Case, device: torch.device, state: dict[str, Tensor], mode: str | None = None
) -> tuple[Callable[[], Tensor], MasterAdamW]:
    """One step of the twin, whose weights begin as `state`; mode: torch.compile's."""
    config = run_config(case)
    with device:
        model = Twin(config.model, flash_3_op())
    model.load_state_dict(state)
    optimizer = MasterAdamW(list(model.parameters()))
    compiled = torch.compile(model, dynamic=False, mode=mode)
    data = RandomTokens(config.model.vocab_size, case.seq_length)
    samples = [data.sample(i) for i in range(case.batch)]
    tokens, labels = (torch.from_numpy(np.stack([s[i] for s in samples])).to(device) for i in (0, 1))

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(tokens, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


def _seconds(step: Callable[[], torch.Tensor], steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def _peak_gib(step: Callable[[], torch.Tensor], others: int) -> float:
    """Highest memory of a step, what other variants hold left out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**30


def measure(name: str, rounds: int = 5, steps: int = 4) -> list[str]:
    """A line per variant: ms a step, tokens/s, MFU, peak memory, first loss."""
    case, device = CASES[name], torch.device("cuda")
    step, model = ours(case, device)
    flops = flops_per_token(model, case.seq_length)
    peak = (peak_tflops(torch.cuda.get_device_name()) or float("nan")) * 1e12
    variants: dict[str, Callable[[], torch.Tensor]] = {"powertrain": step}
    memory, losses = {}, {}
    # on the host, so that it counts as no variant's memory
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    losses["powertrain"] = [float(step()) for _ in range(3)]
    memory["powertrain"] = _peak_gib(step, 0)
    few = case.batch * case.seq_length < _FEW_TOKENS
    for mode in ((None, "reduce-overhead") if few else (None,)) if case.twin else ():
        held = torch.cuda.memory_allocated()
        label = "twin, torch.compile" + (", FA3" if flash_3_op() else "") + (", CUDA graphs" if mode else "")
        variants[label], _ = twin(case, device, state, mode)
        losses[label] = [float(variants[label]()) for _ in range(3)]
        memory[label] = _peak_gib(variants[label], held)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, function in variants.items():
            times[variant].append(_seconds(function, steps))
            time.sleep(0.5)
    tokens = case.batch * case.seq_length
    best = {variant: statistics.median(values) for variant, values in times.items()}
    lines = []
    for variant, seconds in best.items():
        spread = (max(times[variant]) - min(times[variant])) / seconds
        lines.append(
            f"{name:14} {variant:24} {seconds * 1e3:8.1f} ms ±{spread:4.1%}  {tokens / seconds:9.0f} tokens/s  "
            f"MFU {tokens / seconds * flops / peak:5.1%}  {memory[variant]:6.1f} GiB  "
            f"losses {', '.join(f'{loss:.4f}' for loss in losses[variant])}"
        )
    return lines


if __name__ == "__main__":
    cases = sys.argv[1:] or list(CASES)
    if len(cases) == 1:
        print("\n".join(measure(cases[0])), flush=True)
    for case in cases if len(cases) > 1 else ():  # a process each, so that one's memory is not counted as another's
        subprocess.run([sys.executable, "-m", "benchmarks.train.throughput", case], check=True)
