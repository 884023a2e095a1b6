"""Rotary position embedding of Hugging Face's attention modules: q and k in one launch.

Their forward calls `apply_rotary_pos_emb(q, k, cos, sin)` by its global name. The replaced forward is the same code
over a copy of its globals in which that name is ours: no other model sees it.
"""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.rope import rope
from powertrain.ops.rope_table import RopeTable
from powertrain.patching.verify import SLACK
from powertrain.testing import numerics

KIND = "rotary"
PREFIX = "apply_rotary_pos_emb"  # some models have several
# where cos and sin have the angle of each pair: all angles twice, each twice, or once
ANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda t: t[..., : t.shape[-1] // 2],
    "beside": lambda t: t[..., ::2],
    "once": lambda t: t,
}
Rotate = Callable[..., tuple[Tensor, Tensor]]


def theirs(module: nn.Module) -> dict[str, Rotate]:
    """The rotations that this module's forward may call, by name."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return {}
    # co_names has the globals and attributes that the code reads
    names = [name for name in forward.__code__.co_names if name.startswith(PREFIX)]
    return {name: forward.__globals__[name] for name in names if name in forward.__globals__}


def angles(model: nn.Module, head_dim: int) -> tuple[Tensor, Tensor] | str:
    """cos and sin [1, 7, R] as the model's own rotary module makes them, or why that could not be asked."""
    # the buffer with the frequencies is where every family of transformers keeps them
    makers = [(m, f) for m in model.modules() for name, f in m.named_buffers(recurse=False) if "inv_freq" in name]
    if not makers:
        return "no module with inv_freq makes its cos and sin"
    # the last one: in multimodal models the language model comes behind the vision tower, whose frequencies are others
    maker, frequencies = makers[-1]
    if frequencies.is_meta:
        return "its frequencies are on the meta device; patch the model once its weights are there"
    # only dtype and device of x are read
    x = torch.zeros(1, 7, head_dim, device=frequencies.device)
    made, errors = None, []
    for layer_type in (None, *dict.fromkeys(getattr(getattr(maker, "config", None), "layer_types", None) or ())):
        # models with several frequencies want the kind of layer too
        try:
            # positions from 3 on: position 0 is not rotated and would test nothing
            positions = torch.arange(7, device=x.device)[None] + 3
            made = maker(x, positions) if layer_type is None else maker(x, positions, layer_type)
            break
        except Exception as error:
            errors.append(str(error))
    # models with 3-D rotary positions or complex frequencies return something else
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(t, Tensor) and t.ndim == 3 for t in made)):
        said = f": {errors[-1].splitlines()[0][:80]}" if errors and errors[-1] else ""
        return "its rotary module makes no pair of cos and sin [batch, sequence, rotary dim] of positions" + said
    return made


def find(
    theirs: dict[str, Rotate], cos: Tensor, sin: Tensor, heads: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Rotate] | str:
    """Ours for each of theirs, with the pairing of channels that it has, or why one of them has none.

    heads  of q, of k, head dim
    """
    functions: dict[str, Rotate] = {}
    for name, rotate in theirs.items():
        # compared in the dtype that the model will have
        ours = _find(rotate, cos.to(dtype), sin.to(dtype), heads)
        if isinstance(ours, str):
            return f"{name}: {ours}"
        functions[name] = ours
    return functions


def _find(rotate: Rotate, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]) -> Rotate | str:
    reason = "it rotates other pairs of channels than ours"
    # a part may be cut out before
    for head_dim in dict.fromkeys((heads[2], cos.shape[-1], 2 * cos.shape[-1])):
        q, k = _random((heads[0], heads[1]), head_dim, cos)
        # GPT-NeoX pairs channel i with i + D/2, GPT-J 2i with 2i + 1
        for ours in [_Rotation(rotate, interleaved, angles) for interleaved in (False, True) for angles in ANGLES]:
            try:
                errors = numerics.errors(ours, rotate, rotate, {"q": q, "k": k, "cos": cos, "sin": sin}, slack=SLACK)
            except (ValueError, RuntimeError, TypeError, AssertionError, IndexError) as error:
                reason = f"it takes other arguments: {str(error).splitlines()[0][:80]}" if str(error) else reason
                continue
            if all(e.ok for e in errors):
                return ours
    return reason


def _random(heads: tuple[int, int], head_dim: int, like: Tensor) -> list[Tensor]:
    """q and k [1, heads, 7, head_dim], strided as projections are."""
    generator = torch.Generator(like.device).manual_seed(0)
    shapes = [(1, 7, number, head_dim) for number in heads]
    # transposed views of [b, s, heads, d], as after a projection
    random = [torch.randn(shape, generator=generator, device=like.device) for shape in shapes]
    return [t.to(like.dtype).transpose(1, 2).requires_grad_() for t in random]


class _Rotation:
    """(q, k, cos, sin) -> (q, k), rotated. q [B, H, S, D]; cos and sin [B or 1, S, R or R / 2]."""

    def __init__(self, rotate: Rotate, interleaved: bool, angles: str) -> None:
        self.rotate, self.interleaved, self.angles = rotate, interleaved, angles
        self.last: tuple[Any, ...] = ()  # the table of the cos that all layers of a forward share

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Rotation":
        # a deep copy may share it: it holds a cache and no weights
        return self

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        # inside torch.compile their code is traced and fused by Inductor
        if args or options or torch.compiler.is_compiling() or cos.ndim != 3 or cos.requires_grad:
            return self.rotate(q, k, cos, sin, *args, **options)
        table, positions = self._table(cos, sin)
        turned = rope(
            q.transpose(1, 2), k.transpose(1, 2), table=table, interleaved=self.interleaved, position_ids=positions
        )
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

    def _table(self, cos: Tensor, sin: Tensor) -> tuple[RopeTable, Tensor | None]:
        """One row a token; kept while the same cos comes again, as it does from layer to layer."""
        # in inference mode tensors have no version by which a change could be seen: every layer makes its table
        is_tracked = not (cos.is_inference() or sin.is_inference())
        # identity and versions: comparing values would wait for the GPU; a weak reference does not keep cos alive
        if is_tracked and self.last and self.last[0]() is cos and self.last[1] == (cos._version, sin._version, id(sin)):
            return self.last[2]
        pick = ANGLES[self.angles]
        # float32: our kernel rotates in float32 whatever q's dtype
        table = RopeTable(*(pick(t).float().flatten(0, 1).contiguous() for t in (cos, sin)))
        B, S = cos.shape[:2]
        # batches with position ids of their own get one row of the table per token
        positions = None if B == 1 else torch.arange(B * S, device=cos.device).view(B, S)
        if is_tracked:
            self.last = weakref.ref(cos), (cos._version, sin._version, id(sin)), (table, positions)
        return table, positions


def forward_with(module: nn.Module, ours: dict[str, Rotate]) -> Callable[..., Any]:
    """The class's forward with its rotations exchanged."""
    theirs = type(module).forward
    assert isinstance(theirs, FunctionType)
    # a copy of the function over a copy of its globals: a global patched in place would change every model of that file
    same = FunctionType(
        theirs.__code__, {**theirs.__globals__, **ours}, theirs.__name__, theirs.__defaults__, theirs.__closure__
    )
    same.__kwdefaults__ = theirs.__kwdefaults__

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        # a graph is compiled from their own code, which Inductor fuses
        run = theirs if torch.compiler.is_compiling() else same
        return run(self, *args, **options)

    return forward


def heads(module: nn.Module) -> tuple[int, int, int] | None:
    """(query heads, key heads, head dim) of an attention module, from its attributes and its config's."""
    config = getattr(module, "config", None)

    def first(*names: str) -> int | None:
        values = (_attribute(part, name) for part in (module, config) for name in names)
        # configs differ in where head counts stand: on the module, or in the config
        return next((v for v in values if isinstance(v, int)), None)

    num_heads = first("num_heads", "num_attention_heads")
    head_dim = first("head_dim", "head_size")
    if head_dim is None and num_heads and (hidden := first("hidden_size", "embed_dim")):
        head_dim = hidden // num_heads
    if not num_heads or not head_dim:
        return None
    # transformers derives key heads by groups
    return num_heads, num_heads // (first("num_key_value_groups") or 1), head_dim


def _attribute(part: object, name: str) -> object:
    try:
        return getattr(part, name, None)
    except Exception:  # Gemma 4's config raises an error of its own for a value in which its layers differ
        return None
