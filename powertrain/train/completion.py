"""Generate text: prompts in batches, strings and tokens that end an answer, log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from powertrain.models.causal_lm import CausalLM
from powertrain.models.generate import Row, Sampler, complete
from powertrain.train.data.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True)
class Completion:
    """One prompt and what followed.

    text       up to the first of the strings that end it
    row        its tokens, their log-probabilities and why it ended; tokens of an ending string are among them
    """

    prompt: str
    text: str
    row: Row


@dataclass(frozen=True)
class Completer:
    """Continues texts.

    max_new_tokens       None: 128, or as many as the model has positions for behind the longest prompt of a batch
    stops, stop_tokens   an answer ends before the first of these; at the end of a document always
    batch_size           prompts that are continued together, those of similar length
    Raises ValueError naming the argument.
    """

    model: CausalLM
    tokenizer: Tokenizer
    sampler: Sampler
    max_new_tokens: int | None
    stops: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    batch_size: int = 8

    def __post_init__(self) -> None:
        # the letters of a single text would each end an answer, and an empty one every answer
        if isinstance(self.stops, str) or not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ValueError(f"stops must be a list of texts that are not empty, got {self.stops!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        size = self.tokenizer.vocab_size
        # a token that the tokenizer does not have would never end anything
        if wrong := [token for token in self.stop_tokens if not 0 <= token < size]:
            raise ValueError(f"stop tokens must be in [0, {size}), the tokenizer's ids, got {wrong[0]}")

    def __call__(self, prompts: Sequence[str]) -> Iterator[Completion]:
        """Each prompt's continuation, in order; an empty prompt is the beginning of a document.

        Raises ValueError for a prompt that is too long, and for an empty one if the tokenizer has no end-of-document
        token.
        """
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            ids = [self.tokens_of(prompt) for prompt in batch]
            texts = [
                text_behind(self.tokenizer, each) if prompt else self.tokenizer.decode
                for prompt, each in zip(batch, ids, strict=True)
            ]
            for prompt, row, text in zip(batch, self.rows(ids, texts), texts, strict=True):
                yield Completion(prompt, cut(text(row.tokens), self.stops), row)

    def tokens_of(self, prompt: str) -> list[int]:
        tokens = self.tokenizer.encode(prompt)
        if tokens:
            return tokens
        if self.tokenizer.eod is None:
            raise ValueError("prompt must not be empty for a tokenizer with no end-of-document token, got an empty one")
        return [self.tokenizer.eod]

    def rows(self, prompts: Sequence[Sequence[int]], texts: "Sequence[Text] | None" = None) -> list[Row]:
        """What follows tokens, all in one batch. `texts` make text of each one's new tokens; default: they alone do."""
        texts = [self.tokenizer.decode] * len(prompts) if texts is None else texts
        count = self.count_after(max(map(len, prompts), default=0))
        return complete(
            self.model, prompts, max_new_tokens=count, sampler=self.sampler, eod=self.tokenizer.eod,
            stop_tokens=self.stop_tokens, stop=[partial(self._stops, text) for text in texts] if self.stops else None,
        )  # fmt: skip

    def count_after(self, longest: int) -> int:
        """How many tokens are drawn after prompts of at most `longest` tokens."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        # at least one: a prompt that fills all positions gets the error that says so
        return max(1, min(DEFAULT_NEW_TOKENS, self.model.config.max_position_embeddings - longest))

    def text_of(self, row: Row) -> str:
        return cut(self.tokenizer.decode(row.tokens), self.stops)

    def _stops(self, text: "Text", tokens: list[int]) -> bool:
        # the first bytes of a character are U+FFFD until the others have come
        said = text(tokens).rstrip("\ufffd")
        return any(stop in said for stop in self.stops)


Text = Callable[[Sequence[int]], str]


def text_behind(tokenizer: Tokenizer, prompt: Sequence[int]) -> Text:
    """A function that decodes tokens after a prompt: alone, their first word would lose its space to decoders that
    begin every text without one (Llama's)."""
    context, said = prompt, tokenizer.decode(prompt)
    # the last tokens do, if they begin with a whole character
    for count in (1, 2, 4, 8, 16):
        some = tokenizer.decode(prompt[-count:])
        if some and "\ufffd" not in some:
            context, said = prompt[-count:], some
            break
    return lambda tokens: tokenizer.decode([*context, *tokens])[len(said) :]


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of these strings in it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
