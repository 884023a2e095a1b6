"""Scoring of texts by a model: lm_eval's three request types, from text to log-probabilities.

    loglikelihood            of a continuation after a context, and whether it is what greedy decoding gives
    loglikelihood_rolling    of a whole text, in windows of the model's length; each token is scored once
    generate_until           a continuation up to one of some texts

Rules of lm_eval 0.4 (lm_eval/api/model.py, no code): spaces at a context's end belong to the continuation, a text
is tokenized whole and cut where its context's tokens end, an empty context is the end-of-document token, what is too
long loses its beginning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from powertrain.models.causal_lm import CausalLM
from powertrain.models.generate import Sampler
from powertrain.train.completion import Completer
from powertrain.train.data.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]  # tokens that are seen, and the last tokens, which are scored
_GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 0.0}
_MOST_GENERATED = 256  # lm_eval's default


class ScoringStopped(Exception):
    """The caller asked a Scorer to stop."""


class Scorer:
    """Scores texts with a model and its tokenizer.

    batch_size   texts in one forward;  max_length: tokens of a text, default the model's positions
    should_stop  asked ahead of each forward; once it is true ScoringStopped is raised
    Numerics: softmax in float32 of the model's logits, sums in float64.
    Memory: logits of batch_size texts. With a sharded model every rank must make the same calls.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.tokenizer, self.batch_size, self.should_stop = model, tokenizer, batch_size, should_stop
        self.max_length = max_length or model.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(context, continuation) -> (log-probability of the continuation in nats, whether it is greedy).

        Raises ValueError for a continuation that has no tokens of its own, or more than max_length.
        """
        return self.score([self._pair(context, continuation) for context, continuation in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each text, in nats; its first token follows the end-of-document token."""
        windows = [(i, pair) for i, text in enumerate(texts) for pair in self._windows(self.tokenizer.encode(text))]
        sums = [0.0] * len(texts)
        for (index, _), (logprob, _) in zip(windows, self.score([pair for _, pair in windows]), strict=True):
            sums[index] += logprob
        return sums

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """(context, options) -> its continuation up to the first of `until`.

        options   until: a text or several; max_gen_toks (256); temperature (0), top_k, top_p, do_sample (false: greedy)
        Raises ValueError for other options, and where max_gen_toks leaves no room for a context.
        """
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for index, (_, options) in enumerate(requests):
            alike.setdefault(repr(sorted(options.items())), []).append(index)
        for indices in alike.values():
            completer = self._completer(requests[indices[0]][1])
            max_prompt_length = self.max_length - completer.count_after(0)
            prompts = {i: completer.tokens_of(requests[i][0])[-max_prompt_length:] for i in indices}
            for batch in _batches(sorted(indices, key=lambda i: len(prompts[i])), self.batch_size):
                self._stop_if_asked()
                for i, row in zip(batch, completer.rows([prompts[i] for i in batch]), strict=True):
                    answers[i] = completer.text_of(row)
        return answers

    def _stop_if_asked(self) -> None:
        if self.should_stop():
            raise ScoringStopped

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """(log-probability of the scored tokens, whether each is the likeliest) of each pair; long pairs are computed
        first."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]))
        for batch in _batches(order, self.batch_size):
            self._stop_if_asked()
            longest = max(len(pairs[i][0]) for i in batch)
            padded = [[*pairs[i][0], *[0] * (longest - len(pairs[i][0]))] for i in batch]
            logits = self.model(torch.tensor(padded, device=self.device))  # [B, S, V]
            for row, i in zip(logits, batch, strict=True):
                seen, scored = pairs[i]
                logprobs = row[len(seen) - len(scored) : len(seen)].float().log_softmax(-1)  # [scored, V]
                wanted = torch.tensor(scored, device=self.device)
                chosen = logprobs.gather(-1, wanted[:, None]).double().sum()
                scores[i] = (chosen.item(), bool((logprobs.argmax(-1) == wanted).all()))
        return scores

    def _pair(self, context: str, continuation: str) -> Pair:
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        first = self.tokenizer.encode(kept) if kept else [self._end()]
        scored = self.tokenizer.encode(continuation)
        if kept:
            scored = self.tokenizer.encode(kept + continuation)[len(first) :]
        if not 0 < len(scored) <= self.max_length:
            raise ValueError(
                f"continuation must have 1 to {self.max_length} tokens of its own, got {len(scored)} for "
                f"{continuation[:80]!r} after {context[-80:]!r}"
            )
        return (first + scored)[-(self.max_length + 1) :][:-1], scored

    def _windows(self, tokens: list[int]) -> Iterator[Pair]:
        # before[i] is seen before tokens[i]
        before = [self._end(), *tokens]
        for start in range(0, len(tokens), self.max_length):
            end = min(start + self.max_length, len(tokens))
            yield before[max(0, end - self.max_length) : end], tokens[start:end]

    def _end(self) -> int:
        if self.tokenizer.eod is None:
            raise ValueError("tokenizer must have an end-of-document token for texts without a context, got none")
        return self.tokenizer.eod

    def _completer(self, options: Mapping[str, Any]) -> Completer:
        values: dict[str, Any] = {"until": [], "max_gen_toks": _MOST_GENERATED, **_GREEDY, **options}
        samples = values.pop("do_sample", None)
        unknown = values.keys() - {"until", "max_gen_toks", *_GREEDY}
        if unknown:
            raise ValueError(f"generation options must be until, max_gen_toks and of sampling, got {sorted(unknown)}")
        most = int(values["max_gen_toks"])
        if not 0 < most < self.max_length:
            raise ValueError(
                f"max_gen_toks must be in 1 to {self.max_length - 1} (of the model's positions), got {most}"
            )
        temperature = 0.0 if samples is False else values["temperature"]
        sampler = Sampler(temperature=temperature, top_k=values["top_k"], top_p=values["top_p"])
        until = values["until"]
        # lm_eval passes over empty ones, which would end every answer
        stops = [text for text in ([until] if isinstance(until, str) else until or ()) if text]
        return Completer(self.model, self.tokenizer, sampler, most, stops, batch_size=self.batch_size)


def _batches(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode, without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
