"""attention of few tokens, dense and packed: forward with backward in one go, beside FlashAttention-3 and PyTorch's
kernels.

Forward and backward timed apart, each behind an idle GPU, do not show what the kernels of one call cost each other.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.attention_choice import (
    PEER,
    WAYS,
    Problem,
    Variants,
    call_of,
    differs,
    flash_3_call,
    times,
    training,
)
from powertrain.ops.attention.select import NoBackendError
from powertrain.runtime.errors import PowertrainError
from powertrain.testing.bench import Timing, note

PYTORCH = ("cudnn", "flash")
BEHIND = 0.97


def _dense(batch: int, length: int, *rest: int, causal: bool = True) -> Problem:
    return Problem((length,) * batch, None, *rest, causal, None, False)


def _packed(*lengths: int, heads: tuple[int, int, int], causal: bool = True) -> Problem:
    return Problem(lengths, None, *heads, causal, None, True)


def _lengths(count: int, longest: int) -> list[int]:
    source = random.Random(count)
    return [source.randint(1, longest) for _ in range(count)]


PROBLEMS = (
    _dense(1, 128, 32, 8, 128), _dense(1, 137, 64, 64, 128, causal=False), _dense(2, 300, 28, 4, 128),
    _dense(1, 1000, 12, 12, 64), _dense(8, 197, 12, 12, 64, causal=False), _dense(2, 400, 16, 16, 192),
    _packed(137, heads=(64, 64, 128), causal=False), _packed(137, heads=(32, 8, 128)),
    _packed(287, heads=(20, 4, 128), causal=False), _packed(600, heads=(32, 8, 128)),
    _packed(2000, heads=(32, 8, 128)), _packed(1000, heads=(12, 12, 64)), _packed(130, heads=(16, 16, 256)),
    _packed(300, 700, heads=(16, 16, 64)), _packed(400, 500, heads=(16, 16, 192)),
    _packed(*_lengths(4, 300), heads=(32, 8, 128)), _packed(*_lengths(8, 90), heads=(32, 8, 128)),
    _packed(*_lengths(8, 90), heads=(12, 12, 64), causal=False), _packed(*_lengths(64, 290), heads=(32, 8, 128)),
    _packed(*_lengths(64, 290), heads=(16, 16, 96)),
)  # fmt: skip


def launch() -> None:
    for problem in PROBLEMS:
        leaves, dout, call, options = call_of(problem, "meta")
        training(partial(call, **options), leaves, dout)


def _variants(problem: Problem) -> tuple[Variants, list[str]]:
    """Those that agree with ours, and a line for each that does not."""
    leaves, dout, call, options = call_of(problem)
    calls: dict[str, Callable[..., Tensor]] = {"powertrain": partial(call, **options)}
    calls |= {name: partial(call, backend=name, **options) for name in PYTORCH}
    theirs = flash_3_call(problem, options)
    if theirs is not None:
        calls[PEER] = theirs
    found: Variants = {}
    said: list[str] = []
    expected: list[Tensor] = []
    for name, function in calls.items():
        run: Callable[[], list[Tensor]] = partial(training, function, leaves, dout)
        try:
            grads = run()
        except NoBackendError:
            continue
        except (PowertrainError, RuntimeError) as error:
            said.append(f"{problem.label} | {name}: {str(error).splitlines()[0]}")
            continue
        expected = expected or grads
        if any(map(differs, grads, expected)):
            said.append(f"{problem.label} | {name}: WRONG, not timed")
        else:
            found[name] = run
    return found, said


def run() -> Iterator[str]:
    lines: list[tuple[float, str]] = []
    for problem in PROBLEMS:
        variants, said = _variants(problem)
        yield from said
        ms: dict[str, Any] = times(variants, WAYS["training"])
        label = f"{problem.label} both"
        for name, value in ms.items():
            note(label, name, Timing(value, 0.0, 0.0))
        ours = ms.pop("powertrain")
        ratio = min(ms.values(), default=float("nan")) / ours
        lines.append(
            (ratio, f"{ratio:.2f} {label}: {ours:.4f} ms, " + ", ".join(f"{n} {x:.4f}" for n, x in ms.items()))
        )
        yield lines[-1][1]
        torch.cuda.empty_cache()
    behind = [line for ratio, line in sorted(lines) if ratio < BEHIND]
    yield "\n".join([f"{len(behind)} of {len(lines)} over 3 % slower than the best opponent", *behind])
