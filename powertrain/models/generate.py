"""New tokens from a model, one forward each, over a KV cache."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from powertrain.models.causal_lm import CausalLM
from powertrain.models.step_graph import StepGraph, capture
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

# float32 has no temperature below, and 0 / 0 would be nan
_SMALLEST = torch.finfo(torch.float32).tiny
_CAPTURED_FROM = 16  # new tokens: a capture takes longer than a few steps


class Sampler:
    """Logits to tokens.

    temperature   0: the most likely token
    top_k, top_p  only the k most likely, or the fewest that make up p; None and 0: all
    seed          the same seed and prompts give the same tokens
    Raises ValueError naming the argument.
    """

    def __init__(
        self, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0
    ) -> None:
        # so written that nan is refused
        if not 0 <= (heat := _number(temperature)) < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature!r}")
        if (k := _integer(top_k or 0)) < 0:
            raise ValueError(f"top_k must be an integer of at least 0, got {top_k!r}")
        if not 0 <= (p := _number(top_p or 0.0)) <= 1:
            raise ValueError(f"top_p must be in [0, 1], got {top_p!r}")
        # what torch.Generator takes
        if not -(2**63) <= (begun := _integer(seed)) < 2**64:
            raise ValueError(f"seed must be an integer in [-2**63, 2**64), got {seed!r}")
        self.temperature, self.top_k, self.top_p, self.seed = heat, k or None, p or None, begun
        self._generator: torch.Generator | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] int64."""
        if self.temperature == 0:
            # ties take the first, as argmax does
            return logits.argmax(-1)
        # made here because a generator belongs to a device, and the first logits tell which
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.seed)
        logits = logits.float()
        # below the largest: however small the temperature, no quotient is inf, of which softmax makes nan
        scaled = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, _SMALLEST)
        chances = self._kept(scaled).softmax(-1)
        return torch.multinomial(chances, 1, generator=self._generator).squeeze(-1)

    def _kept(self, logits: Tensor) -> Tensor:
        """Logits with -inf for tokens that top_k and top_p exclude."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # compared by value: tokens as likely as the k-th stay, whatever the order that topk gives them
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            chances = ordered.softmax(-1)
            # a token goes when those before it make up p already, so one always stays
            left_out = chances.cumsum(-1) - chances >= self.top_p
            logits = logits.masked_fill(left_out.scatter(-1, order, left_out), -torch.inf)
        return logits


def _number(value: Any) -> float:
    """The value as a float if it is a number of any type, else nan."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _integer(value: Any) -> int:
    """The value as an int if it is an integer of any type (also NumPy's), else one below all valid values."""
    try:
        return int(index(value))
    except TypeError:
        return -(2**64)


@hinted
@torch.no_grad()
def stream(
    model: CausalLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampler: Sampler | None = None
) -> Iterator[Tensor]:
    """The next token of every prompt, [B] int64 on the model's device, `max_new_tokens` times.

    prompts   token ids, at least one each; their lengths may differ: none sees another's padding
    Memory: a KV cache of the longest prompt and `max_new_tokens`.
    On a GPU, of 16 tokens or more, the Python code of the model's modules runs up to the third; from there on a step is
    a CUDA graph, which sees new values of the weights, but no module that is exchanged or changed meanwhile. Hooks,
    modes and settings (`disable`) that come meanwhile end it, and steps are computed as before.
    Raises ValueError naming the argument, the expected value and the given one; and where the logits behind a prompt
    are nan or infinite, as those of a damaged model are. On a CPU, where nothing waits, each step's are looked at.
    """
    # one implementation with `complete`, which needs the logits too
    sampler = Sampler() if sampler is None else sampler
    for tokens, _ in _steps(model, prompts, max_new_tokens, sampler):
        yield tokens


@torch.no_grad()
def _steps(
    model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampler: Sampler
) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens [B], the logits [B, V] that they were drawn from)."""
    _check_model("generate", model)
    checks.require(callable(sampler), "generate", "sampler", "be a Sampler", checks.described(sampler))
    device, prompts = model.embed.weight.device, _checked(prompts, model.config.vocab_size)
    longest = max(map(len, prompts))
    max_new_tokens = _checked_length(longest, max_new_tokens, model.config.max_position_embeddings)
    # dropout would make continuations random even at temperature 0
    model.eval()
    cache = model.new_cache(len(prompts), longest + max_new_tokens)
    lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=device)
    # padding behind the prompt is neither attended to nor kept: `lengths` says where it begins
    padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    # the head computes one position a row, each prompt's last token
    logits = model(padded, cache=cache, lengths=lengths, logits_at=lengths.long() - 1)

    graph: StepGraph | None = None
    for number in range(max_new_tokens):
        # of a GPU's only the first: the wait for a prompt is long anyway, and a damaged model shows there
        if number == 0 or not logits.is_cuda:
            _check_finite(logits)
        tokens = sampler(logits)
        yield tokens, logits
        # the last token needs no forward
        if number + 1 == max_new_tokens:
            return
        # the first step has compiled the kernels, and allocated what stays
        if number == 1 and max_new_tokens >= _CAPTURED_FROM:
            graph = capture(model, cache, tokens)
        if graph is not None and not graph.conditions.hold():
            graph = None
        logits = model(tokens[:, None], cache=cache)[:, -1] if graph is None else graph(tokens)


def _check_model(op: str, model: CausalLM, *ends: int) -> None:
    """The model is one, and can write the tokens at which it is to end."""
    checks.require(isinstance(model, CausalLM), op, "model", "be a CausalLM", checks.described(model))
    size = model.config.vocab_size
    for token in ends:
        good = 0 <= token < size
        checks.require(good, op, "eod and stop_tokens", f"be in [0, {size}), model.vocab_size", token)


def _checked(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """The prompts as lists of integers, those given as tensors or arrays, too."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a sequence of sequences of integers, got {checks.described(prompts)}")
    rows = []
    for n, prompt in enumerate(prompts):
        try:
            row = [index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
        except TypeError:
            raise ValueError(f"prompts[{n}] must be a sequence of integers, got {prompt!r}") from None
        # said here: on a GPU the lookup of one that is not there ends all CUDA calls of the process
        if bad := [token for token in row if not 0 <= token < vocab_size]:
            raise ValueError(f"prompts[{n}] must hold integers in [0, {vocab_size}), model.vocab_size, got {bad[0]}")
        rows.append(row)
    if not rows or not all(rows):
        raise ValueError(f"prompts must hold at least one token each, got lengths {[len(row) for row in rows]}")
    return rows


def _checked_length(longest: int, max_new_tokens: int, limit: int) -> int:
    if longest >= limit:
        raise ValueError(f"prompts must have fewer than model.max_position_embeddings ({limit}) tokens, got {longest}")
    if _integer(max_new_tokens) < 0:
        raise ValueError(f"max_new_tokens must be an integer of at least 0, got {max_new_tokens!r}")
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit - longest} after a prompt of {longest} tokens "
            f"(model.max_position_embeddings is {limit}), got {max_new_tokens}"
        )
    return index(max_new_tokens)


def _check_finite(logits: Tensor) -> None:
    # the largest of a row is nan if one is; -inf alone is a word that never comes
    largest = logits.amax(-1)
    if not bool(largest.isfinite().all()):
        row = int((~largest.isfinite()).nonzero()[0, 0])
        raise ValueError(f"the model's logits must be finite, got {float(largest[row])} for prompts[{row}]")


@hinted
def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    eod: int | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to its first `eod` (left out). See `stream`."""
    _check_model("generate", model, *([] if eod is None else [eod]))
    prompts, steps = list(prompts), list[Tensor]()
    ended: Tensor | None = None
    for tokens in stream(model, prompts, max_new_tokens=max_new_tokens, sampler=sampler):
        steps.append(tokens)
        if eod is not None:
            ended = tokens == eod if ended is None else ended | (tokens == eod)
            # every 16 tokens, because reading the result waits for the device
            if len(steps) % 16 == 0 and bool(ended.all()):
                break
    # no prompt ended: rows of equal length
    rows = torch.stack(steps, 1).tolist() if steps else [[] for _ in prompts]
    return [row[: row.index(eod)] if eod in row else row for row in rows]


@dataclass
class Row:
    """The generated continuation of one prompt.

    tokens      without the one that ended it
    logprobs    of each token, in nats, by the model's own distribution (before temperature, top_k and top_p)
    finished    "eod", "stop", or "length": max_new_tokens were drawn
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Literal["eod", "stop", "length"] = "length"


@hinted
def complete(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    eod: int | None = None,
    stop_tokens: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | Sequence[Callable[[list[int]], bool]] | None = None,
) -> list[Row]:
    """What follows each prompt, up to `eod`, one of `stop_tokens`, or where `stop` is true of a row's new tokens; a
    list of as many functions as prompts holds each one's own.

    It ends when every row has. Each step waits for the device, which `generate` does every 16 steps. See `stream`.
    """
    # a token that is no integer would end nothing
    if any(_integer(token) < -(2**63) for token in stop_tokens):
        checks.fail("complete", "stop_tokens", "hold integers", checks.described(stop_tokens))
    _check_model("complete", model, *([] if eod is None else [eod]), *stop_tokens)
    sampler = Sampler() if sampler is None else sampler
    prompts = list(prompts)
    rows = [Row() for _ in prompts]
    stops = [stop] * len(rows) if stop is None or callable(stop) else list(stop)
    if len(stops) != len(rows):
        checks.fail("complete", "stop", f"be one function, or {len(rows)}, one for each prompt", len(stops))
    going = set(range(len(rows)))
    for tokens, logits in _steps(model, prompts, max_new_tokens, sampler):
        # log_softmax of the whole row: the probability under the model, not under the sampler's cut
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        for number, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            # rows that have ended still run in the batch, and their tokens are dropped
            if number not in going:
                continue
            row = rows[number]
            if token == eod or token in stop_tokens:
                row.finished = "eod" if token == eod else "stop"
                going.discard(number)
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if (ends := stops[number]) is not None and ends(row.tokens):
                row.finished = "stop"
                going.discard(number)
        if not going:
            break
    return rows
