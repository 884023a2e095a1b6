"""Base class of the decoders: embedding, layers, final norm, head and loss."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.config import ModelConfig
from powertrain.models.init import init_weights
from powertrain.nn.attention import Context, check_cached
from powertrain.nn.block import Layer
from powertrain.nn.cache import KVCache
from powertrain.ops.attention.step_schedule import DecodeSchedule, is_captured
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.linear_cross_entropy import linear_cross_entropy, whole_logits
from powertrain.runtime import checks
from powertrain.runtime.dispatch import autocast_dtype, is_traced
from powertrain.runtime.positional import hinted

# FSDP gathers the head's weight only inside its module's forward, so code that needs it is passed in
# a function of the head's input [B, S, D], its weight [V, D] and its bias
Read = Callable[[Tensor, Tensor, Tensor | None], Any]


class CausalLM(nn.Module):
    """A causal language model: tokens to logits, or to the loss; in training the logits are never stored.

    Shapes: B batch, S sequence, V vocabulary.
        forward(tokens [B, S] int64) -> logits [B, S, V]; on a GPU their rows may be wider in memory
        forward(tokens, labels [B, S] int64) -> mean loss over labels that are not -100, in nats, float32 []
        position_ids [B, S], document_ids [B, S], document_starts [n + 1]: packed documents; see Context
        cache: keys and values of earlier tokens; tokens are the new ones. `lengths` [B] int32 says how many of S count
        read: called with the head's input [B, S, D], weight [V, D] and bias, its result is returned: here, because
            parameters that FSDP shards are whole only while their module's forward runs
        logits_at [B] int64: the one position of each row whose logits are wanted -> [B, V]
    A stage of a pipeline (powertrain/models/pipeline.py) has some of the layers: all but the first take the residual
    stream `stream`, in the shape of `hidden_states`, and all but the last return it.
    Built on the meta device it takes no memory; `to_empty` and `init_weights` follow.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[Layer],
        norm: nn.Module | None,
        *,
        learned_positions: bool = False,
        dropout: float = 0.0,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        self.sharding = Unsharded()
        # a single process is a pipeline of one stage
        self.is_first = self.is_last = True  # of a pipeline's stages
        self.embed: Any = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned_positions else None
        self.layers: Any = nn.ModuleList(layers)
        self.norm = norm
        self.head: Any = None
        # a tied head has no parameters of its own: two names for one parameter would be two in an optimizer
        if not config.tie_embeddings:
            self.head = Head(config.hidden_size, config.vocab_size, bias=head_bias)

    @hinted
    def init_weights(self, seed: int) -> None:
        """Every parameter anew: the same values for a seed whatever the device's kind, sharding or number of ranks."""
        # names, not order, seed the values: see init.py
        init_weights(self, self.config, seed)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        cache: KVCache | None = None,
        lengths: Tensor | None = None,
        logits_at: Tensor | None = None,
        z_loss: float = 0.0,
        read: Read | None = None,
        stream: Tensor | None = None,
    ) -> Any:
        # tensor and context parallelism replace `sharding`; the model itself names no ranks
        _check_tokens(tokens, labels, logits_at, self.config.vocab_size)
        packed = Context(position_ids, document_ids, cache, document_starts=document_starts)
        if cache is not None:
            _check_cached(tokens, packed, lengths, self.layers)
            packed = packed._replace(schedule=_schedule_of(cache))
        elif lengths is not None:
            checks.fail("CausalLM", "lengths", "come with a cache", checks.described(lengths))
        context = self.sharding.context(tokens, packed)
        states = self.hidden_states(tokens, context, stream)
        # the next stage goes on from the residual stream
        if not self.is_last:
            return states
        if cache is not None:
            cache.advance(tokens.shape[1] if lengths is None else lengths)
        head = partial(_head, self.embed.weight, None) if self.head is None else self.head
        # logits are wanted for whole sequences, the loss only for this rank's tokens
        if labels is None:
            states = self.sharding.gather_states(states, tokens)
        if read is not None:
            return head(states, read=read)
        if logits_at is not None:
            # one position a row before the head: a prompt's logits would be S times the vocabulary
            states = states[torch.arange(len(states), device=states.device), logits_at]
        if labels is None:
            return head(states)
        return self.sharding.loss(partial(head, z_loss=z_loss), states, labels)

    def hidden_states(self, tokens: Tensor, context: Context, stream: Tensor | None = None) -> Tensor:
        """The head's input [B, S, hidden_size]; under tensor parallelism this rank's tokens [t, hidden_size]. Of a
        stage that is not the last the residual stream behind its layers."""
        # (x, residual): the addition of a layer's output is left to the next norm, which fuses it
        if stream is None:
            x, residual = self._embedded(tokens, context), None
        elif self.dropout and self.training:
            x, residual = stream, None
        else:
            # as a sum with nothing: its gradient is rounded where one process rounds it, behind the sum with the norm's
            x, residual = stream.new_zeros(stream.shape[-1]).expand_as(stream), stream
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        if residual is not None and self.dropout and self.training:
            x, residual = bias_dropout_add(x, None, residual, self.dropout), None
        if not self.is_last:
            # rounded as the next layer's norm would round it, whose kernel may be another one without the residual
            return x if residual is None else x + residual
        x, residual = self.sharding.after_layers(x), None if residual is None else self.sharding.after_layers(residual)
        if self.norm is None:
            return x if residual is None else x + residual
        # the last addition is fused into the final norm
        return self.norm(x) if residual is None else self.norm(x, residual)[0]

    def _embedded(self, tokens: Tensor, context: Context) -> Tensor:
        x = self.embed(self.sharding.local_part(tokens, tokens))
        # learned positions are added behind the lookup, as in GPT-2
        if self.positions is not None:
            if tokens.shape[1] > self.config.max_position_embeddings and context.position_ids is None:
                longest = self.config.max_position_embeddings
                raise ValueError(f"CausalLM: tokens must be at most {longest} a sequence, got {list(tokens.shape)}")
            positions = _positions(tokens, context)
            if positions.dim() > 1:
                name = "position_ids" if context.cache is None else "positions behind the cache"
                checks.indices("CausalLM", name, positions, self.config.max_position_embeddings)
            x = x + self.positions(self.sharding.local_part(positions, tokens))
        return self.sharding.before_layers(F.dropout(x, self.dropout, self.training) if self.dropout else x)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @hinted
    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_length` tokens, on the weights' device.

        In the dtype of keys and values: the weights', or autocast's.
        """
        weight = self.embed.weight
        rows = [layer.cache_row for layer in self.layers]
        return KVCache(rows, batch, max_length, device=weight.device, dtype=autocast_dtype(weight) or weight.dtype)


class Unsharded:
    """The token sharding of a model without sharding. Tensor parallelism replaces it by parallelize.TokenSharding."""

    def context(self, tokens: Tensor, context: Context) -> Context:
        """The `Context` of layers for `tokens` [B, S]."""
        return context

    def local_part(self, x: Tensor, tokens: Tensor) -> Tensor:
        """This rank's part of x [B, S] or [S], which has one value for each of `tokens` [B, S]."""
        return x

    def before_layers(self, x: Tensor) -> Tensor:
        """The residual stream before the first layer."""
        return x

    def after_layers(self, x: Tensor) -> Tensor:
        """The residual stream after the last layer."""
        return x

    def gather_states(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The head's input for all `tokens`: [B, S, D]."""
        return states

    def loss(self, mean_loss: Callable[..., Tensor], states: Tensor, labels: Tensor) -> Tensor:
        """The mean over all labels [B, S], by a function (states, labels) -> mean."""
        return mean_loss(states, labels)


# a module of its own, so that FSDP can shard it as a unit
class Head(nn.Linear):
    """states [..., D] -> logits [..., V]; with labels [...] their mean loss, and no logits are stored."""

    def forward(
        self, states: Tensor, labels: Tensor | None = None, *, z_loss: float = 0.0, read: Read | None = None
    ) -> Any:
        return _head(self.weight, self.bias, states, labels, z_loss=z_loss, read=read)


def _head(
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    labels: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    read: Read | None = None,
) -> Any:
    if read is not None:
        return read(states, weight, bias)
    if labels is None:
        return whole_logits(states, weight, bias)
    # the loss from states and weight directly: [tokens, vocabulary] logits are never in memory
    return linear_cross_entropy(states, weight, labels, bias=bias, z_loss=z_loss)


def _check_tokens(tokens: Tensor, labels: Tensor | None, logits_at: Tensor | None, vocab_size: int) -> None:
    checks.tensor("CausalLM", "tokens", tokens)
    checks.integers("CausalLM", "tokens", tokens)
    checks.require(tokens.dim() == 2, "CausalLM", "tokens", "be [B, S]", list(tokens.shape))
    checks.indices("CausalLM", "tokens", tokens, vocab_size)
    if logits_at is None:
        return
    # another number of them would be broadcast over the rows
    checks.shape("CausalLM", "logits_at", logits_at, tokens.shape[:1], "one of each sequence")
    checks.integers("CausalLM", "logits_at", logits_at)
    checks.indices("CausalLM", "logits_at", logits_at, tokens.shape[1], -tokens.shape[1])
    checks.require(labels is None, "CausalLM", "logits_at", "be None with labels", checks.described(logits_at))


def _check_cached(tokens: Tensor, context: Context, lengths: Tensor | None, layers: Iterable[Layer]) -> None:
    cache = context.cache
    if not isinstance(cache, KVCache):
        checks.fail("CausalLM", "cache", "be a KVCache (new_cache)", checks.described(cache))
    check_cached("CausalLM", context, *tokens.shape)
    if cache.is_empty and cache.rows != [layer.cache_row for layer in layers]:
        checks.fail("CausalLM", "cache", "be this model's (new_cache)", f"one for layers of {cache.rows[:1]}")
    checks.integers("CausalLM", "lengths", lengths)
    checks.shape("CausalLM", "lengths", lengths, tokens.shape[:1], "one of each sequence")
    # rows that no token has filled would be read as keys
    checks.indices("CausalLM", "lengths", lengths, tokens.shape[1] + 1)


def _schedule_of(cache: KVCache) -> DecodeSchedule | None:
    """That of the layers of one forward, within which the lengths do not change."""
    # prompts attend to themselves; without a capture layers would look at it for nothing; the last, of a cache whose
    # lengths the user has replaced
    if cache.is_empty or is_traced(cache.lengths) or not is_captured(cache.lengths) or cache.lengths.is_inference():
        return None
    return DecodeSchedule(cache.lengths)


def _positions(tokens: Tensor, context: Context) -> Tensor:
    """Position of each token, [B, S] or [S]."""
    if context.position_ids is not None:
        return context.position_ids
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    # an empty cache starts at 0; reading its lengths would be a tensor operation for nothing
    if context.cache is None or context.cache.is_empty:
        return positions
    return context.cache.lengths[:, None].long() + positions
