"""One layer of a decoder: attention and MLP around a residual stream, one after the other or side by side."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from powertrain.nn.attention import Context
from powertrain.nn.cache import CacheRow
from powertrain.nn.moe import MoE
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

Recompute = Literal["none", "selective", "full"]


class Layer(nn.Module):
    """Base class of decoder layers: (x, residual) -> (x, residual) by `compute`; `recompute` sets what is recomputed.

    Shapes: x and residual [B, S, hidden_size], or a rank's tokens (Context.shape). The residual stream is their sum;
    residual None: x alone, before the first layer.
    `recompute`: operations repeated in backward: nothing; everything but matmuls and attention; the whole layer.
    """

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        # the op itself looks in training alone
        checks.require(0 <= dropout < 1, type(self).__name__, "dropout", "be in [0, 1)", dropout)
        self.dropout = dropout
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.compute(x, residual, context)
        # without draws the host need not read the generator's state, which a CUDA graph that is captured refuses
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.may_draw()}
        if self.recompute == "selective":
            options["context_fn"] = _keep_products
        mlp = getattr(self, "mlp", None)
        if not (isinstance(mlp, MoE) and mlp.training):
            return checkpoint(self.compute, x, residual, context, **options)

        def routed(x: Tensor, residual: Tensor | None) -> tuple[Tensor | None, ...]:
            routed_tensors: list[Tensor] = []
            return *self.compute(x, residual, context._replace(routed=routed_tensors)), *routed_tensors

        # kept outside: inside, torch.compile takes no change of a module, and recomputing would count again
        y, stream, *routed_tensors = checkpoint(routed, x, residual, **options)
        if routed_tensors:  # a user's forward in place of the module's may keep nothing
            mlp.keep(*routed_tensors)
        return y, stream

    def compute(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def may_draw(self) -> bool:
        """Whether the layer may draw random numbers in training: modules with dropout or jitter do, and others than
        ours may."""
        return any(map(_may_draw, self.modules()))

    @property
    def cache_row(self) -> CacheRow:
        """What a `KVCache` stores per token for this layer."""
        raise NotImplementedError

    def normed(self, norm: Callable[..., Any], x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """norm(stream) and the stream, where stream = residual + dropout(x)."""
        # with dropout the sum is a kernel of its own; without, the norm's kernel adds it
        if residual is not None and self.dropout and self.training:
            x, residual = bias_dropout_add(x, None, residual, self.dropout), None
        return (norm(x), x) if residual is None else norm(x, residual)


_OURS = f"{__package__}.", "powertrain.quant."


def _may_draw(part: nn.Module) -> bool:
    is_known = type(part) is nn.Linear or type(part).__module__.startswith(_OURS)
    return not is_known or bool(getattr(part, "dropout", 0.0) or getattr(part, "jitter", 0.0))


class Block(Layer):
    """Attention and MLP; one kernel adds x to the residual stream and computes the next norm.

    attention, mlp            modules that take (x, Context)
    attention_norm, mlp_norm  modules that take (x, residual); with mlp_norm None both halves read attention_norm
    parallel                  stream + attention(norm(stream)) + mlp(norm'(stream)) (GPT-J, GPT-NeoX)
    dropout                   of each half's output; of attention's alone with mlp_dropout false
    """

    @hinted
    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module,
        mlp_norm: nn.Module | None,
        *,
        parallel: bool = False,
        dropout: float = 0.0,
        mlp_dropout: bool = True,
    ) -> None:
        super().__init__(dropout=dropout)
        checks.require(parallel or mlp_norm is not None, "Block", "mlp_norm", "be a module unless parallel", mlp_norm)
        self.mlp_dropout = mlp_dropout
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.parallel = parallel

    @property
    def cache_row(self) -> CacheRow:
        attention: Any = self.attention
        return CacheRow(*attention.cache_shape)

    def compute(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        return (self._parallel if self.parallel else self._sequential)(x, residual, context)

    def _sequential(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        y, stream = self.normed(self.attention_norm, x, residual)
        x = self.attention(y, context)
        assert self.mlp_norm is not None
        y, stream = self.normed(self.mlp_norm, x, stream)
        if self.dropout and self.training and not self.mlp_dropout:
            # added here: the next layer drops out of all that is apart from the stream
            return self.mlp(y, context) + stream, None
        return self.mlp(y, context), stream

    def _parallel(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        y, stream = self.normed(self.attention_norm, x, residual)
        # without a second norm both halves read the same normalized input
        mlp_input = y if self.mlp_norm is None else self.mlp_norm(stream)
        return self.attention(y, context) + self.mlp(mlp_input, context), stream


# operations whose results selective recomputation keeps: matrix products, and attention whatever its backend
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
# ranges of the profiler: FSDP's hooks around a layer's experts make another number of them in backward than in the
# forward after an evaluation, at which PyTorch 2.13 refuses to recompute
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _KEPT or any(word in op.name() for word in ("attention", "gemm", "fp8_linear"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)
