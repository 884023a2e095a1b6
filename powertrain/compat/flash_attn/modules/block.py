"""flash_attn.modules.block: blocks that begin with dropout, sum and norm, and return the residual beside the states."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.flash_attn.modules.mha import MHA
from powertrain.compat.flash_attn.modules.mlp import Mlp
from powertrain.compat.flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["Block", "ParallelBlock"]

Make = Callable[[int], nn.Module]


class _StochasticDepth(nn.Module):
    """In training each entry of dim 0 is 0 with probability p, and scaled by 1 / (1 - p) else."""

    def __init__(self, p: float) -> None:
        super().__init__()
        checks.require(0 <= p <= 1, "Block", "drop_path", "be in [0, 1]", p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.empty([len(x)] + [1] * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        return x * (kept / (1 - self.p) if self.p < 1 else kept)


class _Norms(nn.Module):
    """What both blocks share: a mixer, an MLP, and norms of sums."""

    fused_dropout_add_ln: bool
    residual_in_fp32: bool

    def _parts(self, dim: int, mixer_cls: Make | None, mlp_cls: Make | None) -> tuple[nn.Module, nn.Module]:
        mixer = partial(MHA, num_heads=dim // 64) if mixer_cls is None else mixer_cls
        mlp = partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls
        return mixer(dim), mlp(dim)

    def _mark(self, norms: list[nn.Module], sequence_parallel: bool, shared: bool) -> None:
        for p in (p for norm in norms for p in norm.parameters()):
            for name, wanted in (("_sequence_parallel", sequence_parallel), ("_shared_params", shared)):
                if wanted:
                    setattr(p, name, True)

    def _check_fused(self, norm: nn.Module, dropout: nn.Module) -> None:
        fits = isinstance(norm, nn.LayerNorm | RMSNorm) and isinstance(dropout, nn.Dropout)
        must = "make LayerNorm or RMSNorm, and dropout_cls Dropout, for fused_dropout_add_ln"
        got = f"{type(norm).__name__}, {type(dropout).__name__}"
        checks.require(not self.fused_dropout_add_ln or fits, type(self).__name__, "norm_cls", must, got)

    def _fused(self, x: Tensor, norm: Any, dropout: Any, residual: Tensor | None, **more: Any) -> Any:
        return layer_norm_fn(
            x, norm.weight, norm.bias, residual=residual, eps=norm.eps,
            dropout_p=dropout.p if self.training else 0.0, residual_in_fp32=self.residual_in_fp32,
            zero_centered_weight=getattr(norm, "zero_centered_weight", False),
            is_rms_norm=isinstance(norm, RMSNorm), **more,
        )  # fmt: skip

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        """The mixer's."""
        mixer: Any = self.mixer
        return mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


class Block(_Norms):
    """prenorm: h = residual + dropout(x), y = mixer(norm1(h)), h' = h + dropout(y): (mlp(norm2(h')), h').

    Without prenorm: x = norm1(x + dropout(mixer(x))), then norm2(x + dropout(mlp(x))), one tensor. drop_path drops
    sequences' branches. fused_dropout_add_ln: dropout, sum and norm in one kernel. residual_in_fp32: only with prenorm.
    return_residual: mixer and mlp return their input too. mlp_cls=nn.Identity leaves the second half out.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Make | None = None,
        mlp_cls: Make | None = None,
        norm_cls: Make = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        checks.require(prenorm or not residual_in_fp32, "Block", "residual_in_fp32", "be False without prenorm", True)
        self.prenorm, self.return_residual, self.residual_in_fp32 = prenorm, return_residual, residual_in_fp32
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.mixer, mlp = self._parts(dim, mixer_cls, mlp_cls)
        self.dropout1, self.drop_path1, self.norm1 = (
            dropout_cls(resid_dropout1),
            _StochasticDepth(drop_path1),
            norm_cls(dim),
        )
        self.mlp, norms = mlp, [self.norm1]
        if not isinstance(mlp, nn.Identity):
            self.dropout2, self.drop_path2 = dropout_cls(resid_dropout2), _StochasticDepth(drop_path2)
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        self._check_fused(self.norm1, self.dropout1)
        self._mark(norms, sequence_parallel, mark_shared_params)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """(hidden states, residual), or hidden states without prenorm. mixer_subset: the rows that go on."""
        options = dict(mixer_kwargs or {})
        if not self.prenorm:
            checks.require(residual is None, "Block", "residual", "be None without prenorm", "a tensor")
            x = self._after(self.mixer(hidden_states, **options), hidden_states, 1)
            return x if isinstance(self.mlp, nn.Identity) else self._after(self.mlp(x), x, 2)
        x, h = self._before(hidden_states, residual, 1)
        if mixer_subset is not None:
            options["mixer_subset"] = mixer_subset
        x = self.mixer(x, **options)
        h = h if mixer_subset is None else h[:, mixer_subset]
        if not isinstance(self.mlp, nn.Identity):
            x, h = self._before(x, h, 2)
            x = self.mlp(x)
        return x, h

    def _of(self, half: int) -> tuple[Any, Any, Any]:
        return (
            (self.norm1, self.dropout1, self.drop_path1) if half == 1 else (self.norm2, self.dropout2, self.drop_path2)
        )

    def _before(self, x: Tensor, residual: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        norm, dropout, path = self._of(half)
        if self.fused_dropout_add_ln:
            y, h = self._fused(x, norm, dropout, residual, rowscale=self._rows(x, path), prenorm=True)
            return y, h
        h = path(dropout(x))
        h = h if residual is None else h + residual
        y = norm(h.to(norm.weight.dtype))
        return y, h.float() if self.residual_in_fp32 else h

    def _after(self, branch: Any, x: Tensor, half: int) -> Tensor:
        """Norm of the sum of a branch and its input."""
        norm, dropout, path = self._of(half)
        if self.return_residual:
            branch, x = branch
        if self.fused_dropout_add_ln:
            y: Tensor = self._fused(branch, norm, dropout, x, rowscale=self._rows(branch, path), prenorm=False)
            return y
        total: Tensor = norm((path(dropout(branch)) + x).to(norm.weight.dtype))
        return total

    def _rows(self, x: Tensor, path: _StochasticDepth) -> Tensor | None:
        if path.p == 0 or not self.training:
            return None
        return path(torch.ones(x.shape[:-1], device=x.device, dtype=x.dtype))


class ParallelBlock(_Norms):
    """h = residual + dropout(x1) + dropout(x2): (mixer(norm1(h)), mlp(norm2(h)), h), as of GPT-J and GPT-NeoX.

    tied_norm: norm2 is norm1. Other arguments as of `Block`.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Make | None = None,
        mlp_cls: Make | None = None,
        norm_cls: Make = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm, self.fused_dropout_add_ln, self.residual_in_fp32 = (
            tied_norm,
            fused_dropout_add_ln,
            residual_in_fp32,
        )
        self.mixer, mlp = self._parts(dim, mixer_cls, mlp_cls)
        self.dropout1, self.norm1, self.mlp = dropout_cls(resid_dropout1), norm_cls(dim), mlp
        self.dropout2, norms = dropout_cls(resid_dropout2), [self.norm1]
        if not tied_norm:
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        self._check_fused(self.norm1, self.dropout1)
        self._mark(norms, sequence_parallel, mark_shared_params)

    def forward(
        self, hidden_states1: Tensor, hidden_states2: Tensor | None = None, residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """hidden_states1 of the mixer, hidden_states2 of the MLP before (None in the first block)."""
        norm1: Any = self.norm1
        norm2: Any = norm1 if self.tied_norm else self.norm2
        if self.fused_dropout_add_ln:
            more = {} if self.tied_norm else {"weight1": norm2.weight, "bias1": norm2.bias}
            y1, *rest, h = self._fused(
                hidden_states1, norm1, self.dropout1, residual, x1=hidden_states2, prenorm=True, **more
            )
            y2 = rest[0] if rest else y1
        else:
            h = self.dropout1(hidden_states1)
            h = h if hidden_states2 is None else h + self.dropout2(hidden_states2)
            h = h if residual is None else residual + h
            y1 = norm1(h.to(norm1.weight.dtype))
            y2 = y1 if self.tied_norm else norm2(h.to(norm2.weight.dtype))
            h = h.float() if self.residual_in_fp32 else h
        return self.mixer(y1, **(mixer_kwargs or {})), self.mlp(y2), h


__getattr__ = unknown(__name__)
