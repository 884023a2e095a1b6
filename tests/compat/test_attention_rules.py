"""What other libraries would choose: the cases that people reported, by the rules written down."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from powertrain.compat.attention_rules import LIBRARIES, PeerCase, changes_that_help, peer_verdicts, versions_of
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem
from powertrain.runtime.target import _ARCHS, Target

TE = "transformer-engine"
OFF = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}


def _case(
    library: str,
    arch: str,
    *,
    version: str | None = None,
    cudnn: str | None = None,
    switches: dict[str, str] | None = None,
    flash_attn: str | None = None,
    **facts: Any,
) -> PeerCase:
    usual: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "mask": MaskSpec(right=0),
        "layout": "thd",
        "num_heads": 64,
        "num_kv_heads": 64,
    }
    p = AttentionProblem(target=Target.parse(arch), **(usual | facts))
    return PeerCase(p, 588, 588, versions_of(library, version, None, cudnn, flash_attn), switches or {})


def _chosen(library: str, case: PeerCase) -> str | None:
    return next((v.name for v in peer_verdicts(library, case) if v.verdict == "chosen"), None)


# TransformerEngine#1821: DeepSeek-V3, TE 2.3, A100, cuDNN 9.8; with and without the switches
@pytest.mark.parametrize("switches", [{}, OFF])
def test_transformer_engine_has_nothing_for_deepseek_on_an_a100(switches: dict[str, str]) -> None:
    case = _case(TE, "A100", version="2.3", cudnn="9.8", switches=switches)
    assert _chosen(TE, case) is None
    found = {v.name: " ".join(map(str, v.reasons)) for v in peer_verdicts(TE, case)}
    assert "one head dim for all" in found["FlashAttention 2"]
    assert "cuDNN 9.8.0 on sm_80" in found["FusedAttention"] and "thd on sm_90" in found["FusedAttention"]
    assert "takes no thd" in found["UnfusedDotProductAttention"]
    assert ("NVTE_UNFUSED_ATTN=0" in found["UnfusedDotProductAttention"]) == bool(switches)


def test_what_would_help_there() -> None:
    case = _case(TE, "A100", version="2.3", cudnn="9.8", switches=OFF)
    helpful = {change.description: change.backend for change in changes_that_help(TE, case)}
    assert helpful["unset NVTE_FLASH_ATTN and TransformerEngine 2.20"] == "FlashAttention 2"
    assert helpful["unset NVTE_UNFUSED_ATTN and bshd with padding"] == "UnfusedDotProductAttention"
    assert helpful["bshd with padding and head dims of 128"] == "FusedAttention"
    assert not any("cuDNN" in what for what in helpful), "no cuDNN alone takes 192/128 on sm_80"
    without = {change.description for change in changes_that_help(TE, replace(case, switches={}))}
    assert {"TransformerEngine 2.20", "bshd with padding", "v padded to a head dim of 192"} <= without


@pytest.mark.parametrize(
    "arch, options, expected",
    [
        ("A100", {"version": "2.20"}, "FlashAttention 2"),  # pads v
        ("A100", {"version": "2.20", "switches": OFF}, None),
        ("H100", {"version": "2.20"}, "FusedAttention"),
        ("H100", {"version": "2.3", "cudnn": "9.8"}, None),  # TransformerEngine#2354
        ("B200", {"version": "2.8", "cudnn": "9.10.1"}, None),  # TransformerEngine#2285
        ("B200", {"version": "2.8", "cudnn": "9.11"}, "FusedAttention"),
        # Gemma: head dim 512 goes to the unfused one (TransformerEngine#3006)
        ("H100", {"head_dim_qk": 512, "head_dim_v": 512, "layout": "bshd"}, "UnfusedDotProductAttention"),
        # head dim 256 on a B300 is quadratic without a newer cuDNN (TransformerEngine#3360)
        ("B300", {"head_dim_qk": 256, "head_dim_v": 256, "layout": "bshd"}, "UnfusedDotProductAttention"),
        ("A100", {"head_dim_qk": 128, "layout": "bshd", "version": "2.3"}, "FlashAttention 2"),
        ("A100", {"head_dim_qk": 128, "layout": "bshd", "flash_attn": "none"}, "FusedAttention"),
        ("H100", {"head_dim_qk": 128, "layout": "bshd"}, "FusedAttention"),
        ("T4", {"head_dim_qk": 128, "layout": "bshd"}, "UnfusedDotProductAttention"),
        ("H100", {"head_dim_qk": 128, "mask": MaskSpec(softcap=50.0)}, None),
        ("H100", {"head_dim_qk": 128, "layout": "bshd", "mask": MaskSpec(bias="bool")}, "UnfusedDotProductAttention"),
    ],
)
def test_transformer_engine(arch: str, options: dict[str, Any], expected: str | None) -> None:
    assert _chosen(TE, _case(TE, arch, **options)) == expected


@pytest.mark.parametrize(
    "arch, facts, expected",
    [
        ("H100", {"head_dim_qk": 128, "layout": "bshd"}, "flash3 (fa3F + fa3B)"),
        ("A100", {"head_dim_qk": 128, "layout": "bshd"}, "flash2 (fa2F + fa2B)"),
        ("A100", {"layout": "bshd"}, "cutlass (cutlassF-pt + cutlassB-pt)"),
        ("RTX 2080", {"dtype": torch.float16, "layout": "bshd"}, "cutlass (cutlassF-pt + cutlassB-pt)"),
        ("RTX 2080", {"layout": "bshd"}, None),
        # "too new": xformers#1356, #1251
        ("RTX 5090", {"dtype": torch.float32, "layout": "bshd"}, None),
        # no backward takes 5-D tensors (xformers#1045's are 5-D)
        ("RTX 3090", {"head_dim_qk": 128, "layout": "bmghk"}, None),
        ("RTX 3090", {"head_dim_qk": 128, "layout": "bmghk", "needs_grad": False}, "flash2 (fa2F + fa2B)"),
    ],
)
def test_xformers(arch: str, facts: dict[str, Any], expected: str | None) -> None:
    assert _chosen("xformers", _case("xformers", arch, **facts)) == expected


def test_flash_attn() -> None:
    found = {v.name: v for v in peer_verdicts("flash-attn", _case("flash-attn", "A100"))}
    assert "equal head dims" in str(found["flash-attn-2"].reasons[0])
    assert all(v.verdict == "no" for v in found.values()), "nobody trains 192/128 on an A100"
    assert _chosen("flash-attn", _case("flash-attn", "A100", head_dim_qk=128)) == "flash-attn-2"


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_every_refusal_has_text_and_fix(library: str) -> None:
    masks = (MaskSpec(), MaskSpec(bias="float"), MaskSpec(sinks=True), MaskSpec(alibi=True), MaskSpec(left=8, right=0))
    for arch in _ARCHS:
        for mask in masks:
            for facts in ({}, {"dropout": True}, {"deterministic": True}, {"dtype": torch.float32}, {"layout": "bhsd"}):
                case = _case(library, f"sm_{arch}", mask=mask, **facts)
                for verdict in peer_verdicts(library, case):
                    assert (verdict.verdict == "no") == bool(verdict.reasons)
                    assert all(r.text and r.fix for r in verdict.reasons)


def test_changes_lead_where_they_say() -> None:
    assert not changes_that_help(TE, _case(TE, "H100")), "nothing needs to change"


def test_versions() -> None:
    assert versions_of(TE, "2.3", None, None, None).cudnn == 90800
    assert versions_of(TE, "2.3", None, "9.1", "none").flash_attn is None
    assert versions_of(TE, None, "2.9", None, None).torch == "2.9"
    assert versions_of(TE, "1.0", None, None, None).library == (1, 0)
