"""`python -m benchmarks.train.cpu`: tokens/s on this CPU of our trainer and of transformers' GPT-NeoX, the same model.

Each variant has a process of its own (allocator settings are per process) and they take turns, a few steps each, so
that other work on the machine hits all alike. transformers: its default attention, AdamW as it comes (eager default),
fused, and torch.compile with fused AdamW.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, SEQUENCE, BATCH = 2048, 256, 16
SHAPE = {"hidden_size": 192, "num_layers": 6, "num_heads": 6, "rotary_pct": 0.25, "parallel_residual": True}
VARIANTS = ("powertrain", "transformers", "transformers, fused AdamW", "transformers, torch.compile, fused AdamW")


def _ours(tokens: torch.Tensor) -> Callable[[], Any]:
    from powertrain.models import build, configure
    from powertrain.train.config.schema import OptimizerConfig, TrainConfig
    from powertrain.train.host_memory import keep_freed_memory
    from powertrain.train.optim import Optimizer

    keep_freed_memory()
    config = configure(
        architecture="gpt_neox", vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, activation="gelu", **SHAPE
    )
    model = build(config)
    model.to_empty(device="cpu")
    model.init_weights(0)
    optimizer = Optimizer(model, OptimizerConfig(), TrainConfig(steps=1, seq_length=SEQUENCE, precision="fp32"))

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step(1e-3)

    return step


def _transformers(tokens: torch.Tensor, fused: bool, compiled: bool) -> Callable[[], Any]:
    import transformers

    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=SHAPE["hidden_size"], num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_heads"], intermediate_size=4 * SHAPE["hidden_size"], hidden_act="gelu",
        rotary_pct=SHAPE["rotary_pct"], max_position_embeddings=SEQUENCE, use_parallel_residual=True, use_cache=False,
    )  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused or None)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        forward(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def serve(variant: str) -> None:
    """A variant's process: a line of input is a number of steps, a line of output their seconds."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    if variant == "powertrain":
        step = _ours(tokens)
    else:
        step = _transformers(tokens, "fused" in variant, "compile" in variant)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - start, flush=True)


def main(rounds: int = 8, steps: int = 3) -> None:
    command = [sys.executable, "-m", "benchmarks.train.cpu", "--serve"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {variant: subprocess.Popen([*command, variant], **pipes) for variant in VARIANTS}

    def seconds(variant: str, count: int) -> float:
        process = processes[variant]
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        return float(process.stdout.readline()) / count

    for variant in VARIANTS:
        seconds(variant, 3)
    times = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant in VARIANTS:
            times[variant].append(seconds(variant, steps))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    ours = statistics.median(times["powertrain"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {BATCH} x {SEQUENCE} tokens a step, float32")
    for variant, values in times.items():
        median = statistics.median(values)
        # rounds side by side: what else ran then, ran for both
        ratio = statistics.median(v / o for v, o in zip(values, times["powertrain"], strict=True))
        rate = BATCH * SEQUENCE / median
        print(f"{variant:45} {rate:7.0f} tokens/s   ours is {ratio:.3f}x as fast (of medians {median / ours:.3f}x)")


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main()
