"""`python -m benchmarks.parallel.predict`: what training Llama-70B over many 8-GPU hosts should reach, by formulas.

Tensor and sequence parallel over the GPUs of a host, whose products the planner's formula times; FSDP2 over hosts, HSDP
over groups of them, as the trainer does it: weights are gathered for each micro-batch and kept until its backward
(`reshard_after_forward: false`), gradients are summed in float32 with a step's last one. It needs no GPU, and nothing
beyond four of them was measured: docs/scaling.md has the table and says what it assumes.
"""

import argparse
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from powertrain.parallel.cost_model import Product, predict, product_seconds
from powertrain.parallel.transport.base import Choice, Rates

GPUS = (8, 64, 1024, 8192)
WIDTH = 2  # bytes of what is computed with and travels
OPTIMIZER = 12  # bytes a parameter: float32 weight and AdamW's moments
PEAK = 989e12  # FLOP/s that MFU is a share of


class Model(NamedTuple):
    """Llama 3 70B."""

    hidden: int = 8192
    layers: int = 80
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 28672
    vocabulary: int = 128256

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        return self.hidden * (self.qkv + self.heads * self.head_dim + 3 * self.ffn)

    @property
    def outer_weights(self) -> int:
        """Embedding, and head as much again: here one of the two."""
        return self.hidden * self.vocabulary


class Machine(NamedTuple):
    """Bytes/s and FLOP/s of one H200 and its links, measured on one to four; the network's are assumed."""

    rates: Rates = Rates(132, 132 * 5.8e12, 340e9)
    gpus: int = 8  # of a host
    memory_bytes: float = 141e9
    memory: float = 4.0e12  # of kernels that only move data
    attention: tuple[float, float] = 613e12, 531e12  # causal, forward and backward
    head: float = 617e12  # linear_cross_entropy, both
    optimizer: float = 6.91e-12  # AdamW, a parameter
    network: float = 0.8 * 50e9  # a GPU's, of NCCL between hosts
    hop: float = 10e-6  # from host to host
    slowed: float = 0.07  # of the time that NCCL's kernels run beside products: FSDP over 2 and 4 GPUs keeps 93%


class Run(NamedTuple):
    """A step, by default as the trainer takes it.

    tokens     of a step, on all GPUs; a micro-batch of a group of tensor ranks is one sequence
    gradient   bytes of a gradient while it is summed (train.reduce_dtype)
    regather   weights for each micro-batch; False: once a step, which the trainer cannot do yet
    """

    gpus: int
    tensor: int = 8
    sequence: int = 8192
    tokens: int = 2048 * 8192
    most_shards: int = 8  # hosts that share one copy of the weights
    gradient: int = 4
    regather: bool = True

    @property
    def ways(self) -> int:
        """Groups of tensor ranks that read different data."""
        return self.gpus // self.tensor

    @property
    def shards(self) -> int:
        return min(self.ways, self.most_shards)

    @property
    def micro_batches(self) -> int:
        return max(1, self.tokens // (self.sequence * self.ways))


class Times(NamedTuple):
    """Seconds of the same work: without anything that travels, one after the other, and overlapped."""

    alone: float = 0.0
    sequential: float = 0.0
    overlapped: float = 0.0

    def plus(self, *others: "Times | float") -> "Times":
        """With more work; a number is work that meets nobody."""
        every = [self, *(o if isinstance(o, Times) else Times(o, o, o) for o in others)]
        return Times(*(sum(column) for column in zip(*every, strict=True)))


def products(model: Model, run: Run) -> dict[str, Product]:
    """Of a layer's forward, on one rank."""
    rows, bf16 = run.sequence, torch.bfloat16
    return {
        "qkv": Product("gather", rows, model.qkv // run.tensor, model.hidden, bf16),
        "proj": Product("scatter", rows, model.hidden, model.heads * model.head_dim // run.tensor, bf16),
        "fc1": Product("gather", rows, 2 * model.ffn // run.tensor, model.hidden, bf16),
        "fc2": Product("scatter", rows, model.hidden, model.ffn // run.tensor, bf16),
    }


def of_dx(product: Product) -> Product:
    """What backward takes for a forward product's input: the shape turned, the other way of travelling."""
    kind, rows, width, depth, dtype = product
    return Product("scatter" if kind == "gather" else "gather", rows, depth, width, dtype)


def chosen(product: Product, run: Run, machine: Machine) -> Choice:
    if run.tensor > 1:
        return predict(product, run.tensor, machine.rates)
    return Choice("sequential", "one rank", product_seconds(product.rows, product.width, product.depth, machine.rates))


def _times(choice: Choice) -> Times:
    one_by_one = choice.product + choice.collective
    return Times(choice.product, one_by_one, one_by_one if choice.way == "sequential" else choice.overlapped)


def forward_product(product: Product, run: Run, machine: Machine) -> Times:
    return _times(chosen(product, run, machine))


def backward_product(product: Product, run: Run, machine: Machine) -> Times:
    """dx and dw. What was gathered is gathered again, beside dx, whose sum travels too: the link carries both."""
    choice = chosen(of_dx(product), run, machine)
    found = _times(choice).plus(product_seconds(product.width, product.depth, product.rows, machine.rates))
    if product.kind == "scatter":
        return found
    again = chosen(product, run, machine).collective
    travels = choice.collective + again
    return Times(found.alone, found.sequential + again, max(found.overlapped, travels))


def layer(model: Model, run: Run, machine: Machine) -> tuple[Times, Times]:
    """Forward and backward of one layer and micro-batch on one rank."""
    scores = 2 * run.sequence**2 * model.heads // run.tensor * model.head_dim  # causal: half of all pairs
    share = run.sequence // run.tensor * model.hidden * WIDTH
    heads = run.sequence * model.qkv // run.tensor * WIDTH
    inner = run.sequence * model.ffn // run.tensor * WIDTH
    forward, backward = Times(), Times()
    for product in products(model, run).values():
        forward = forward.plus(forward_product(product, run, machine))
        backward = backward.plus(backward_product(product, run, machine))
    # read and written: four shares by each of two norms with residuals, heads twice by rope, SwiGLU's three, then five
    forward = forward.plus(scores / machine.attention[0], (8 * share + 2 * heads + 3 * inner) / machine.memory)
    backward = backward.plus(2.5 * scores / machine.attention[1], (8 * share + 2 * heads + 5 * inner) / machine.memory)
    return forward, backward


class Network(NamedTuple):
    """Seconds of NCCL: a layer's weights gathered, its gradients summed; outer: the embedding's, and the head's."""

    gather: float
    reduce: float
    outer_gather: float
    outer_reduce: float


def network(model: Model, run: Run, machine: Machine) -> Network:
    def between(weights: float, width: int, *, summed: bool) -> float:
        """Rings over the shards' hosts; the sums of shards by trees over the replicas'."""
        shards, replicas = run.shards, run.ways // run.shards
        seconds = (shards - 1) * (weights * width / shards / machine.network + machine.hop)
        if summed and replicas > 1:
            seconds += 2 * (replicas - 1) / replicas * weights * width / shards / machine.network
            seconds += 2 * math.ceil(math.log2(replicas)) * machine.hop
        return seconds

    def outer(width: int, *, summed: bool) -> float:
        """Sharded over all GPUs of the hosts: every one takes its part of the network, and all of it over NVLink."""
        inside = (run.tensor - 1) / run.tensor * model.outer_weights * width / (0.85 * machine.rates.link)
        return max(between(model.outer_weights / run.tensor, width, summed=summed), inside)

    mine = model.layer_weights / run.tensor
    return Network(
        between(mine, WIDTH, summed=False), between(mine, run.gradient, summed=True),
        outer(WIDTH, summed=False), outer(run.gradient, summed=True),
    )  # fmt: skip


class Step(NamedTuple):
    """Seconds of one step. `compute`: without anything that travels; the others with it, more and more of it hidden."""

    compute: float
    nothing_hidden: float
    weights_hidden: float  # behind layers, as FSDP2 does by itself; tensor ranks wait
    all_hidden: float

    def efficiency(self, seconds: float) -> float:
        return self.compute / seconds


def step(model: Model, run: Run, machine: Machine) -> Step:
    forward, backward = layer(model, run, machine)
    head = 6 * run.sequence / run.tensor * model.outer_weights / machine.head
    weights = model.layers * model.layer_weights + 2 * model.outer_weights
    optimizer = weights / run.tensor / run.shards * machine.optimizer
    n, travels = run.micro_batches, network(model, run, machine)
    gatherings = n if run.regather else 1

    def inside(part: str) -> float:
        """Seconds of all micro-batches, the network left out."""
        return n * (model.layers * (getattr(forward, part) + getattr(backward, part)) + head) + optimizer

    def hiding(part: str) -> float:
        """With the network behind layers: of each queue its first or last item shows, and what is longer than them."""
        f, b = (model.layers * getattr(times, part) for times in (forward, backward))
        gathered = model.layers * travels.gather + travels.outer_gather
        reduced = model.layers * travels.reduce + travels.outer_reduce
        shown = gatherings * (travels.outer_gather + travels.gather + max(0.0, gathered - f))
        shown += travels.outer_reduce + travels.reduce + max(0.0, reduced - b)
        hidden = gatherings * min(gathered, f) + min(reduced, b)
        return inside(part) + shown + machine.slowed * hidden

    every = gatherings * (model.layers * travels.gather + 2 * travels.outer_gather)
    every += model.layers * travels.reduce + 2 * travels.outer_reduce
    return Step(inside("alone"), inside("sequential") + every, hiding("sequential"), hiding("overlapped"))


def inbox_bytes(model: Model, run: Run) -> int:
    """Two slots for gatherings, two for scatterings: each of a micro-batch's states."""
    return 0 if run.tensor == 1 else 4 * run.sequence * model.hidden * WIDTH


def memory(model: Model, run: Run) -> float:
    """Bytes of one GPU: float32 shards, gathered weights, unsharded float32 gradients, activations, receive buffers."""
    layers, outer = model.layers * model.layer_weights / run.tensor, 2.0 * model.outer_weights
    states = OPTIMIZER * (layers + outer / run.tensor) / run.shards + (WIDTH + run.gradient) * (layers + outer)
    # a layer keeps four shares of the stream, queries to values, attention's result, gate, up and their product
    kept = 4 * model.hidden + model.qkv + model.heads * model.head_dim + 3 * model.ffn
    return states + model.layers * run.sequence * kept * WIDTH / run.tensor + inbox_bytes(model, run)


def model_flops(model: Model, run: Run) -> float:
    """Of a step, as powertrain.models.flops counts them."""
    products = model.layers * model.layer_weights + model.outer_weights
    scores = model.layers * model.heads * 2 * model.head_dim * run.sequence / 2
    return 6.0 * (products + scores) * run.sequence * run.ways * run.micro_batches


def layer_table(model: Model, run: Run, machine: Machine) -> str:
    """Milliseconds of a layer's products and of the whole layer."""
    lines = [f"| tensor {run.tensor} | alone | sequential | overlapped | way |", "|---|---|---|---|---|"]
    for name, product in products(model, run).items():
        back = of_dx(product)
        lines += [
            f"| {name}: {_shape(product)} | {_ms(forward_product(product, run, machine))} | "
            f"{chosen(product, run, machine).way} |",
            f"| dx: {_shape(back)}; dw | {_ms(backward_product(product, run, machine))} | "
            f"{chosen(back, run, machine).way} |",
        ]
    for name, times in zip(("forward", "backward"), layer(model, run, machine), strict=True):
        lines.append(f"| the layer {name} | {_ms(times)} | |")
    return "\n".join(lines)


def _shape(product: Product) -> str:
    travels = "gathered" if product.kind == "gather" else "scattered"
    return f"{product.rows}x{product.depth} by {product.depth}x{product.width}, {travels}"


def _ms(times: Times) -> str:
    return " | ".join(f"{seconds * 1e3:.3f}" for seconds in times)


def run_table(model: Model, cases: list[tuple[str, Run, Machine]]) -> str:
    lines = [
        "| | shards x replicas x tensor | micro-batches | GB a GPU | nothing hidden | FSDP hidden | and tensor "
        "parallelism | MFU | a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run, machine in cases:
        found, gigabytes = step(model, run, machine), memory(model, run) / 1e9
        shape = f"{run.shards} x {run.ways // run.shards} x {run.tensor}"
        fits = "" if gigabytes * 1e9 < machine.memory_bytes else f" of {machine.memory_bytes / 1e9:.0f}: too many"
        shares = " | ".join(f"{found.efficiency(seconds):.0%}" for seconds in found[1:])
        mfu = model_flops(model, run) / found.all_hidden / (PEAK * run.gpus)
        lines.append(
            f"| {name} | {shape} | {run.micro_batches} | {gigabytes:.0f}{fits} | {shares} | {mfu:.0%} | "
            f"{found.all_hidden:.2f} s |"
        )
    return "\n".join(lines)


def remedies(run: Run, machine: Machine) -> list[tuple[str, Run, Machine]]:
    """What would change the last line, one at a time and the first two together."""
    once, halved = run._replace(regather=False), run._replace(gradient=2)
    return [
        ("weights gathered once a step", once, machine),
        ("gradients summed in bf16", halved, machine),
        ("both", halved._replace(regather=False), machine),
        ("four times the tokens a step", run._replace(tokens=4 * run.tokens), machine),
        ("a network twice as fast", run, machine._replace(network=2 * machine.network)),
    ]


def report(model: Model, machine: Machine, tokens: int = Run(8).tokens) -> str:
    """The tables of docs/scaling.md."""
    runs = [Run(gpus, tokens=tokens) for gpus in GPUS]
    return "\n\n".join(
        [
            run_table(model, [(f"{run.gpus} GPUs", run, machine) for run in runs]),
            run_table(model, remedies(runs[-1], machine)),
            layer_table(model, runs[0], machine),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", type=float, default=40.0, help="GB/s of a GPU between hosts (default: 40)")
    parser.add_argument("--link", type=float, default=340.0, help="GB/s to one peer over NVLink (default: 340)")
    parser.add_argument("--tokens", type=int, default=Run(8).tokens, help="of a step (default: 16.8 million)")
    options = parser.parse_args()
    machine = Machine()
    rates = replace(machine.rates, link=options.link * 1e9)
    print(report(Model(), machine._replace(network=options.network * 1e9, rates=rates), options.tokens))


if __name__ == "__main__":
    main()
