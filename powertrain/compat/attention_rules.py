"""Which attention backend other libraries choose for a call, and why: their selection rules, with sources.

A library's rules are a list: a backend's requirement, its failing condition, and the remedy. Read from

    TransformerEngine 2.3   pytorch/dot_product_attention/utils.py and common/fused_attn/fused_attn.cpp of 2025
    TransformerEngine 2.20  the same files of August 2026; rules that changed in between are dated by issues, roughly
    xFormers 0.0.35         ops/fmha at its last full version
    flash-attn              interfaces of flash-attn 2.8, FlashAttention-3 and flash-attn-4 4.0.0 beta

FP8, KV caches and context parallelism are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch

from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends.versions import Installed, assume, cudnn_name, cudnn_number, version_numbers
from powertrain.ops.attention.problem import AttentionProblem, Reason
from powertrain.ops.attention.select import Verdict
from powertrain.runtime.target import Target


@dataclass(frozen=True)
class Versions:
    """A library's version and those of its dependencies."""

    library: tuple[int, ...]
    torch: str
    cudnn: int
    flash_attn: str | None  # None: not installed

    def __str__(self) -> str:
        name = ".".join(map(str, self.library))
        flash = f", flash-attn {self.flash_attn}" if self.flash_attn else ", no flash-attn"
        # it is the library itself
        flash = "" if self.flash_attn == name else flash
        return f"{name} with torch {self.torch}, cuDNN {cudnn_name(self.cudnn)}{flash}"


@dataclass(frozen=True)
class PeerCase:
    """A problem as another library sees it."""

    p: AttentionProblem
    queries: int
    keys: int
    versions: Versions
    # switches are given, not read from the environment: the answer may be for another machine
    switches: Mapping[str, str]

    def off(self, switch: str) -> bool:
        return self.switches.get(switch) == "0"

    @property
    def cudnn(self) -> int:
        return self.versions.cudnn

    @property
    def unequal(self) -> bool:
        return self.p.head_dim_qk != self.p.head_dim_v

    @property
    def widest(self) -> int:
        return max(self.p.head_dim_qk, self.p.head_dim_v)

    @property
    def padding(self) -> bool:
        """TransformerEngine's mask type says padding."""
        # thd has no padding in memory, but TransformerEngine requires a padding mask type for it
        return self.p.layout == "thd" or self.p.has_key_lengths

    @property
    def causal_top_left(self) -> bool:
        return self.p.mask.is_causal and not self.p.mask.bottom_right

    @property
    def arbitrary(self) -> bool:
        """A mask that TransformerEngine has no other name for."""
        m = self.p.mask
        return m.bias == "bool" or m.prefix or m.documents or m.chunk > 0


class Rule(NamedTuple):
    """A need of one or several backends."""

    backends: str  # names, separated by commas
    fails: Callable[[PeerCase], bool]
    text: str
    fix: str
    # versions are tuples: (2, 10) is after (2, 3), unlike as text
    since: tuple[int, ...] = (0,)  # first version of the library that has it
    until: tuple[int, ...] = (999,)  # first version that has it no more


_FA, _FA2, _FA3, _FA4 = (
    "FlashAttention 2,FlashAttention 3,FlashAttention 4",
    *(f"FlashAttention {n}" for n in (2, 3, 4)),
)
_FUSED, _UNFUSED = "FusedAttention", "UnfusedDotProductAttention"
_ALL_TE = f"{_FA},{_FUSED},{_UNFUSED}"
_POWERTRAIN = "use Powertrain's triton"


def _fused_head_dims(c: PeerCase) -> bool:
    """cuDNN's head dims as TransformerEngine checks them; multiples of 8 apart."""
    p, v = c.p, c.cudnn
    if c.widest <= 128:
        return True
    # limits of cuDNN per version and arch, as nvte_get_fused_attn_backend states them
    if p.arch == 90 and c.widest <= 256 and v >= (90500 if p.needs_grad else 90100):
        return not (
            v >= 91100 and p.needs_grad and c.unequal and min(p.head_dim_qk, p.head_dim_v) >= 128
            and (p.head_dim_qk, p.head_dim_v) != (192, 128)
        )  # fmt: skip
    if not p.needs_grad:
        return v >= 91002 or (p.arch >= 100 and v >= 90900)
    if (p.head_dim_qk, p.head_dim_v) == (192, 128):
        return p.arch >= 100 and v >= 91100 and c.versions.library >= (2, 8)
    return (p.head_dim_qk, p.head_dim_v) == (256, 256) and p.arch in (100, 103) and v >= 92300


_FUSED_DIMS_FIX = (
    "head dims up to 128; up to 256 on sm_90 (training: cuDNN 9.5); 192/128 on sm_100 (cuDNN 9.11); or " + _POWERTRAIN
)

# one row a condition, so that the table can be compared with their function
TE_RULES = (
    Rule(_FA, lambda c: c.off("NVTE_FLASH_ATTN"), "NVTE_FLASH_ATTN=0", "unset NVTE_FLASH_ATTN"),
    Rule(_FA2, lambda c: c.off("NVTE_FLASH_ATTN_V2"), "NVTE_FLASH_ATTN_V2=0", "unset NVTE_FLASH_ATTN_V2", (2, 14)),
    Rule(_FA3, lambda c: c.off("NVTE_FLASH_ATTN_V3"), "NVTE_FLASH_ATTN_V3=0", "unset NVTE_FLASH_ATTN_V3", (2, 14)),
    Rule(_FA4, lambda c: c.off("NVTE_FLASH_ATTN_V4"), "NVTE_FLASH_ATTN_V4=0", "unset NVTE_FLASH_ATTN_V4", (2, 14)),
    Rule(_FUSED, lambda c: c.off("NVTE_FUSED_ATTN"), "NVTE_FUSED_ATTN=0", "unset NVTE_FUSED_ATTN"),
    Rule(_UNFUSED, lambda c: c.off("NVTE_UNFUSED_ATTN"), "NVTE_UNFUSED_ATTN=0", "unset NVTE_UNFUSED_ATTN"),
    Rule(_FA4, lambda c: True, "not in this version", "TransformerEngine 2.14 or newer", until=(2, 14)),
    Rule(_FA2, lambda c: not (c.versions.flash_attn or "").startswith("2"), "flash-attn 2 is not installed",
         "pip install flash-attn"),
    Rule(_FA3, lambda c: not (c.versions.flash_attn or "").startswith("3"), "FlashAttention-3 is not installed",
         # not on PyPI: it is built from source
         "build it from flash-attention's folder hopper"),
    Rule(_FA4, lambda c: not (c.versions.flash_attn or "").startswith("4"), "flash-attn-4 is not installed",
         "pip install flash-attn-4", (2, 14)),
    # compute capability
    Rule(f"{_FA2},{_FUSED}", lambda c: c.p.arch < 80, "wants sm_80 or newer", "sm_80, or " + _POWERTRAIN),
    Rule(_FA3, lambda c: c.p.arch != 90, "wants sm_90", "sm_90, or " + _POWERTRAIN),
    Rule(_FA4, lambda c: c.p.arch < 90, "wants sm_90 or newer", "sm_90, or " + _POWERTRAIN, (2, 14)),
    Rule(_FUSED, lambda c: c.p.arch >= 100 and c.cudnn < 90700, "cuDNN before 9.7 has no sm_10x", "cuDNN 9.7"),
    Rule(_FUSED, lambda c: c.cudnn in (91000, 91001), "cuDNN 9.10.0 and 9.10.1 are known to be wrong", "cuDNN 9.11"),
    # dtype
    Rule(f"{_FA},{_FUSED}", lambda c: c.p.dtype not in (torch.float16, torch.bfloat16),
         "takes float16 or bfloat16", "convert to one, or " + _POWERTRAIN),
    # head dims
    Rule(_FA, lambda c: c.unequal, "takes one head dim for all (multi-head latent attention is not supported)",
         "TransformerEngine 2.20, pad v to head_dim_qk, or " + _POWERTRAIN, until=(2, 10)),
    Rule(_FA3, lambda c: c.unequal and not (128 < c.p.head_dim_qk <= 192 and 96 < c.p.head_dim_v <= 128),
         "takes unequal head dims of 129-192 with 97-128 only", _POWERTRAIN, (2, 10)),
    Rule(_FA2, lambda c: c.widest > 256 or c.p.head_dim_qk % 8 > 0 or c.p.head_dim_v % 8 > 0,
         "takes head dims up to 256, multiples of 8", _POWERTRAIN),
    Rule(_FA2, lambda c: c.widest > 192 and c.p.arch not in (80, 90, 100, 120),
         "takes head dims above 192 on sm_80, sm_90, sm_100 and sm_120 only",
         "a head dim up to 192, or " + _POWERTRAIN),
    Rule(_FA3, lambda c: c.widest > 128, "takes head dims up to 128", "TransformerEngine 2.20, or " + _POWERTRAIN,
         until=(2, 10)),
    Rule(_FA3, lambda c: c.widest > 256, "takes head dims up to 256", _POWERTRAIN, (2, 10)),
    Rule(_FUSED, lambda c: c.p.head_dim_qk % 8 > 0 or c.p.head_dim_v % 8 > 0, "takes head dims that are multiples of 8",
         "pad them, or " + _POWERTRAIN),
    Rule(_FUSED, lambda c: not _fused_head_dims(c), "cuDNN {cudnn} on {p.where} does not take these head dims",
         _FUSED_DIMS_FIX),
    Rule(_FUSED, lambda c: c.unequal and c.widest > 128 and c.p.layout == "thd" and c.p.needs_grad,
         "reported to train no unequal head dims in thd, on sm_90 either (TransformerEngine#2354)",
         "TransformerEngine 2.20, or " + _POWERTRAIN, until=(2, 6)),
    # layout
    Rule(_UNFUSED, lambda c: c.p.layout == "thd", "takes no thd",
         "TransformerEngine 2.20, bshd with a padding mask, or " + _POWERTRAIN, until=(2, 10)),
    Rule(_FUSED, lambda c: c.p.layout == "thd" and c.p.arch < 90, "takes thd on sm_90 and newer only",
         "sm_90, bshd with a padding mask, or " + _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.layout == "thd" and c.p.is_grouped and c.cudnn < 90600,
         "takes thd with fewer key heads from cuDNN 9.6 on", "cuDNN 9.6, or " + _POWERTRAIN),
    Rule(f"{_FA2},{_FA4},{_UNFUSED}", lambda c: c.p.layout == "thd" and c.p.has_key_lengths,
         "takes no padding between sequences", "pack the sequences, or " + _POWERTRAIN),
    Rule(_ALL_TE, lambda c: c.p.layout in ("bhsd", "bmghk"), "takes bshd, sbhd and thd", _POWERTRAIN),
    # dropout, sinks, softcap
    Rule(f"{_FA3},{_FA4}", lambda c: c.p.dropout, "has no dropout", "no dropout, or FlashAttention 2"),
    Rule(_FA, lambda c: c.p.mask.sinks, "has no sinks", "FusedAttention, or " + _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.mask.sinks and c.cudnn < 91301, "has sinks from cuDNN 9.13.1 on", "cuDNN 9.13.1"),
    Rule(_ALL_TE, lambda c: c.p.mask.sinks, "this version has no softmax_type", "TransformerEngine 2.8", until=(2, 8)),
    Rule(_ALL_TE, lambda c: c.p.mask.softcap > 0, "DotProductAttention has no softcap", _POWERTRAIN),
    # masks
    Rule(f"{_FA},{_FUSED}", lambda c: c.arbitrary, "takes no arbitrary mask", "UnfusedDotProductAttention, or "
         + _POWERTRAIN),
    Rule(_FA, lambda c: c.causal_top_left and c.queries != c.keys,
         "its causal mask is aligned bottom right, and queries and keys differ in number",
         "attn_mask_type with bottom_right, or " + _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.mask.is_causal and c.p.mask.bottom_right and c.queries > c.keys,
         "bottom-right masks want no more queries than keys", _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.mask.is_causal and c.p.mask.bottom_right and not c.padding and c.cudnn < 90300,
         "bottom-right masks want cuDNN 9.3", "cuDNN 9.3"),
    Rule(_FUSED, lambda c: c.p.mask.has_window and (c.p.mask.right != 0 or c.p.dropout or c.queries > c.keys)
         and c.cudnn < 90600, "windows must be (left, 0), without dropout, before cuDNN 9.6", "cuDNN 9.6"),
    Rule(_FUSED, lambda c: c.p.mask.has_window and (c.p.dropout or c.queries > c.keys),
         "windows want no dropout, and no more queries than keys", _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.layout == "thd" and c.cudnn < 90100, "thd wants cuDNN 9.1", "cuDNN 9.1"),
    # bias
    Rule(f"{_FA3},{_FA4}", lambda c: c.p.mask.alibi, "has no ALiBi", "FlashAttention 2, or " + _POWERTRAIN),
    Rule(_FA, lambda c: c.p.mask.bias == "float", "has no dense bias", "FusedAttention, or " + _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.mask.bias == "float" and c.padding, "has no dense bias with a padding mask",
         _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.mask.alibi and (c.p.arch < 90 or c.padding or not c.p.mask.is_causal),
         "has ALiBi on sm_90 and newer, with a causal mask without padding", _POWERTRAIN),
    # determinism
    Rule(_FUSED, lambda c: c.p.deterministic and c.p.needs_grad and c.p.arch < 90,
         "its backward is not deterministic below sm_90", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1, or " + _POWERTRAIN),
    Rule(_FUSED, lambda c: c.p.deterministic and c.p.needs_grad and c.p.arch >= 100 and c.cudnn < 91801,
         "its backward is not deterministic on sm_10x before cuDNN 9.18.1", "cuDNN 9.18.1, or " + _POWERTRAIN),
)  # fmt: skip


_X3, _X2, _XC = "flash3 (fa3F + fa3B)", "flash2 (fa2F + fa2B)", "cutlass (cutlassF-pt + cutlassB-pt)"
_ALL_X = f"{_X3},{_X2},{_XC}"

XFORMERS_RULES = (
    Rule(_X3, lambda c: c.p.arch != 90, "requires device with capability 9.0", "sm_90"),
    Rule(_X2, lambda c: c.p.arch < 80, "requires device with capability >= (8, 0) (too old)", "sm_80, or "
         + _POWERTRAIN),
    Rule(_XC, lambda c: c.p.arch > 90, "requires device with capability <= (9, 0) (too new)",
         "scaled_dot_product_attention, which runs the same kernel there, or " + _POWERTRAIN),
    Rule(f"{_X3},{_X2}", lambda c: c.p.dtype is torch.float32, "takes float16 and bfloat16", "convert to one"),
    Rule(_XC, lambda c: c.p.dtype is torch.bfloat16 and c.p.arch < 80, "bf16 is only supported on A100+ GPUs",
         "float16, or " + _POWERTRAIN),
    Rule(_X2, lambda c: c.unequal, "query.shape[-1] != value.shape[-1]", "cutlass, or " + _POWERTRAIN),
    Rule(f"{_X3},{_X2}", lambda c: c.widest > 256, "max(query.shape[-1], value.shape[-1]) > 256", _POWERTRAIN),
    Rule(f"{_X3},{_X2}", lambda c: c.p.head_dim_qk % 8 > 0, "query.shape[-1] % 8 != 0", "pad it, or " + _POWERTRAIN),
    Rule(_ALL_X, lambda c: c.p.layout == "bmghk" and c.p.needs_grad,
         "operator does not support BMGHK format (no backward does)", "4-D tensors with key and value repeated, or "
         + _POWERTRAIN),
    Rule(_ALL_X, lambda c: c.p.is_grouped and c.p.layout != "bmghk",
         "wants key and value expanded to the query's heads", "BMGHK (forward only), or " + _POWERTRAIN),
    Rule(f"{_X3},{_X2}", lambda c: c.p.mask.bias != "none", "attn_bias type is <class 'torch.Tensor'>", "cutlass"),
    Rule(_XC, lambda c: c.p.mask.bias == "bool", "attn_bias must be added to the scores", "a float bias, or "
         + _POWERTRAIN),
    Rule(_XC, lambda c: c.p.mask.bias != "none" and not c.p.lengths.keys_multiple_of_8,
         "attn_bias.stride(-2) % 8 != 0", "a slice of a bigger bias, or " + _POWERTRAIN),
    Rule(f"{_X3},{_X2}", lambda c: c.causal_top_left and c.queries != c.keys,
         "its causal mask is aligned bottom right", "LowerTriangularFromBottomRightMask, or cutlass"),
    Rule(_X3, lambda c: c.p.dropout, "dropout > 0.0", "flash2 or cutlass"),
    Rule(_X2, lambda c: c.p.deterministic and c.p.needs_grad, "operator is non-deterministic", "cutlass"),
    Rule(_XC, lambda c: c.p.mask.has_window and c.p.needs_grad and c.p.mask.bottom_right,
         "no backward of local bottom-right masks", "flash2, or " + _POWERTRAIN),
    Rule(_ALL_X, lambda c: c.p.mask.softcap > 0, "memory_efficient_attention has no softcap", _POWERTRAIN),
    Rule(_ALL_X, lambda c: c.p.mask.sinks, "memory_efficient_attention has no sinks", _POWERTRAIN),
    Rule(_ALL_X, lambda c: c.p.mask.alibi, "memory_efficient_attention has no ALiBi slopes", "a float bias, or "
         + _POWERTRAIN),
    Rule(_ALL_X, lambda c: c.p.mask.prefix or c.p.mask.documents or c.p.mask.chunk > 0,
         "no attn_bias class says this mask", "a float bias, or " + _POWERTRAIN),
)  # fmt: skip


@dataclass(frozen=True)
class Library:
    """A library's rules and its order of preference."""

    name: str
    rules: tuple[Rule, ...]
    order: Callable[[PeerCase], tuple[str, ...]]
    versions: tuple[Versions, ...]  # that are known, newest first
    source: str
    switches: tuple[str, ...] = ()  # environment variables it reads


# their order: on Hopper and later FusedAttention is preferred, before it flash-attn
def _te_order(c: PeerCase) -> tuple[str, ...]:
    flash = (_FA3, _FA4, _FA2)
    return (_FUSED, *flash, _UNFUSED) if c.p.arch >= 90 else (*flash, _FUSED, _UNFUSED)


LIBRARIES = {
    "transformer-engine": Library(
        "TransformerEngine", TE_RULES, _te_order,
        # newest first; the versions of torch, cuDNN and flash-attn are those of that release's time
        (Versions((2, 20), "2.11", 91900, "2.8.3"), Versions((2, 3), "2.6", 90800, "2.7.4")),
        "get_attention_backend in dot_product_attention/utils.py; nvte_get_fused_attn_backend in fused_attn.cpp",
        ("NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4", "NVTE_FUSED_ATTN",
         "NVTE_UNFUSED_ATTN"),
    ),
    "xformers": Library(
        "xFormers", XFORMERS_RULES, lambda c: (_X3, _X2, _XC), (Versions((0, 0, 35), "2.11", 91900, None),),
        "ops/fmha/dispatch.py and not_supported_reasons of each operator",
    ),
    "flash-attn": Library(
        "flash-attn", (), lambda c: ("flash-attn-2", "flash-attn-3", "flash-attn-4"),
        (Versions((2, 8, 3), "2.11", 91900, "2.8.3"),), "the packages' interfaces",
    ),
}  # fmt: skip


def versions_of(
    library: str, version: str | None, torch: str | None, cudnn: str | None, flash_attn: str | None
) -> Versions:
    """Versions to answer for: the newest known of the library that is not newer than `version`, changed as said."""
    # a version between two known ones is answered by the rules of the older
    known = LIBRARIES[library].versions
    asked = known[0].library if version is None else version_numbers(LIBRARIES[library].name, version)
    base = next((v for v in known if v.library <= asked), known[-1])
    if library == "flash-attn":
        flash_attn = ".".join(map(str, asked))
    return Versions(
        asked,
        torch or base.torch,
        cudnn_number(cudnn) if cudnn else base.cudnn,
        base.flash_attn if flash_attn is None else None if flash_attn == "none" else flash_attn,
    )


def peer_verdicts(library: str, case: PeerCase) -> tuple[Verdict, ...]:
    """The library's verdict on each of its backends, in its order of preference."""
    verdicts, chosen = [], False
    for name in LIBRARIES[library].order(case):
        if library == "flash-attn":
            reasons = _flash_attn_reasons(name, case)
        else:
            rules = LIBRARIES[library].rules
            reasons = tuple(_reason(rule, case) for rule in rules if _met(rule, name, case))
        # a library takes the first backend without a reason, as our selector does
        verdict = "no" if reasons else "supported" if chosen else "chosen"
        chosen = chosen or verdict == "chosen"
        verdicts.append(Verdict(name, verdict, reasons))
    return tuple(verdicts)


def _met(rule: Rule, name: str, case: PeerCase) -> bool:
    holds = rule.since <= case.versions.library < rule.until
    return holds and name in rule.backends.split(",") and rule.fails(case)


def _reason(rule: Rule, case: PeerCase) -> Reason:
    return Reason(rule.text.format(p=case.p, cudnn=cudnn_name(case.cudnn)), rule.fix)


def _flash_attn_reasons(name: str, case: PeerCase) -> tuple[Reason, ...]:
    """Our own limits for the packages, as far as they are theirs: thd is their own layout."""
    backend = BACKENDS[name]
    # their varlen functions are thd, which our backend calls by bshd's limits
    layout = "bshd" if case.p.layout == "thd" else case.p.layout
    p = replace(case.p, layout=layout, needs_lse_grad=False, compiling=False, dropout_seeded=False)
    if case.p.layout == "thd":
        p = replace(p, has_key_lengths=False)
    package = "flash-attn" if name == "flash-attn-2" else name
    # assumed to be installed: the question is about limits
    with assume(Installed((2, 11), True, case.cudnn, ((package, "here"),))):
        return tuple(backend.why_not(p))


class Change(NamedTuple):
    """Something that would give a problem a backend in that library."""

    description: str
    backend: str


def changes_that_help(library: str, case: PeerCase) -> list[Change]:
    """Every change, and every pair of changes that is not one of them and more, after which the library has a backend.

    Nothing is tried that the problem does not need: a backend that would serve it as it is gives no changes.
    """
    steps = _steps(library, case)
    helpful: list[tuple[frozenset[str], Change]] = []
    # 0 changes first: a problem that is served as it is gets no advice
    for size in (0, 1, 2):
        for chosen in combinations(steps, size):
            names = frozenset(text for text, _ in chosen)
            # a pair that contains a sufficient single change says nothing new
            if any(known <= names for known, _ in helpful):
                continue
            changed = case
            for _, change in chosen:
                changed = change(changed)
            winner = next((v.name for v in peer_verdicts(library, changed) if v.verdict == "chosen"), None)
            if winner is not None:
                helpful.append((names, Change(" and ".join(text for text, _ in chosen), winner)))
    return [change for names, change in helpful if names]


Step = tuple[str, Callable[[PeerCase], PeerCase]]


def _steps(library: str, case: PeerCase) -> list[Step]:
    """Changes that a user could make, one at a time."""

    def facts(**changed: object) -> Callable[[PeerCase], PeerCase]:
        return lambda c: replace(c, p=replace(c.p, **changed))  # type: ignore[arg-type]

    def versions(**changed: object) -> Callable[[PeerCase], PeerCase]:
        return lambda c: replace(c, versions=replace(c.versions, **changed))  # type: ignore[arg-type]

    def without(switch: str) -> Callable[[PeerCase], PeerCase]:
        return lambda c: replace(c, switches={k: v for k, v in c.switches.items() if k != switch})

    steps: list[Step] = [(f"unset {name}", without(name)) for name in case.switches if case.off(name)]
    newest = LIBRARIES[library].versions[0]
    if case.versions.library < newest.library:
        name = LIBRARIES[library].name
        steps.append((f"{name} {'.'.join(map(str, newest.library))}", versions(library=newest.library)))
    if library == "transformer-engine" and case.cudnn < newest.cudnn:
        steps.append((f"cuDNN {cudnn_name(newest.cudnn)}", versions(cudnn=newest.cudnn)))
    if case.p.layout == "thd":
        steps.append(("bshd with padding", facts(layout="bshd", has_key_lengths=True)))
    if case.unequal:
        widest = case.widest
        steps.append((f"v padded to a head dim of {widest}", facts(head_dim_qk=widest, head_dim_v=widest)))
    if case.widest > 128:
        steps.append(("head dims of 128", facts(head_dim_qk=128, head_dim_v=128, aligned=True)))
    if case.p.layout == "bmghk":
        steps.append(("4-D tensors, key and value repeated", facts(layout="bshd")))
    if case.p.layout == "bhsd":
        steps.append(("layout bshd", facts(layout="bshd")))
    if case.p.dtype not in (torch.float16, torch.bfloat16) or (case.p.dtype is torch.bfloat16 and case.p.arch < 80):
        steps.append(("float16", facts(dtype=torch.float16)))
    if case.p.needs_grad:
        steps.append(("no gradients", facts(needs_grad=False)))
    # one GPU per generation stands for it
    for arch in ("A100", "H100", "B200"):
        target = Target.parse(arch)
        if case.p.arch != target.arch:
            steps.append((f"an {arch}" if arch[0] in "AH" else f"a {arch}", facts(target=target)))
    return steps
