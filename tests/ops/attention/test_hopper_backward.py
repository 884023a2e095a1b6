"""The Hopper backward without a GPU: what it takes, and its machine code."""

import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention.hopper import backward_plans, maps
from powertrain.ops.attention.hopper.backward import launch_backward, why_not_backward, why_not_of
from powertrain.ops.attention.hopper.backward_plans import (
    PLAN_OF_96_KEYS,
    Plan,
    is_plain_call,
    plan_for,
    why_not_96_keys,
)
from powertrain.ops.attention.hopper.plans import pieces_of
from powertrain.ops.attention.operands import BackwardCall, OpArguments, Operands
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.ops.attention.machine_code import NVDISASM, disassembled, instructions

META = torch.device("meta")


def _args(**given: Any) -> OpArguments:
    return OpArguments(*(None,) * 11, "bshd", 0.1, 0.0, 0.0, -1, 0, 0, True)._replace(**given)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({}, None),
        ({"left": 100, "softcap": 30.0, "slopes": _empty(4, dtype=torch.float32)}, None),
        ({"bias": _empty(1, 1, 64, 64)}, "it has no bias"),
        ({"prefix": _empty(2, dtype=torch.int32)}, "it has no prefix"),
        ({"query_documents": _empty(2, 64, dtype=torch.int32)}, "it has no documents"),
        ({"chunk": 16}, "it has no chunk"),
        ({"seed": _empty(2, dtype=torch.int64)}, "it has no dropout"),
    ],
)
def test_features(args: dict[str, Any], reason: str | None) -> None:
    q, k = _empty(2, 64, 4, 128), _empty(2, 64, 2, 128)
    assert why_not_backward(Operands.of(q, k, k, _args(**args))) == reason


def test_tensors() -> None:
    def reason(query: Tensor, key: Tensor | None = None) -> str | None:
        key = query if key is None else key
        return why_not_backward(Operands.of(query, key, key, _args()))

    assert "not float32" in str(reason(_empty(2, 64, 4, 128, dtype=torch.float32)))
    assert all(reason(_empty(2, 64, 4, dim)) is None for dim in (72, 136, 192, 200, 256))
    for dim in (60, 132):
        assert f"head dims must be multiples of 8, are {dim} and {dim}" in str(reason(_empty(2, 64, 4, dim)))
    assert "query is empty" in str(reason(_empty(2, 0, 4, 64), _empty(2, 8, 4, 64)))
    assert "query's rows must be contiguous" in str(reason(_empty(2, 64, 4, 131)[..., :128], _empty(2, 64, 4, 128)))
    assert "int32" in str(reason(_empty(64, 2**18, 64, 64), _empty(64, 8, 64, 64)))
    expanded = _empty(2, 64, 1, 64).expand(-1, -1, 4, -1)
    assert reason(_empty(2, 64, 4, 64), expanded) is None
    assert "query is expanded, strides (256, 0, 64, 1)" in str(reason(_empty(2, 1, 4, 64).expand(-1, 64, -1, -1)))
    assert "query is expanded" in str(reason(_empty(2, 64, 1, 64).expand(-1, -1, 4, -1), _empty(2, 64, 2, 64)))
    assert reason(_empty(1, 64, 4, 64).expand(2, -1, -1, -1)) is None


def _entry(
    head_dim: int, dtype: torch.dtype, need: list[bool], d_v: int = 0, repeats: int = 2, plan: Plan | None = None,
    **given: Any,
) -> Any:  # fmt: skip
    """The main kernel. With 8 `repeats` heads that share keys are split over tiles, with 1 or, up to head dim 128, 2
    they are not."""
    args = _args(**given)
    q, k = _empty(2, 512, 2 * repeats, head_dim, dtype=dtype), _empty(2, 512, 2, head_dim, dtype=dtype)
    out, v = (_empty(*x.shape[:-1], d_v or head_dim, dtype=dtype) for x in (q, k))
    if args.layout == "thd":
        q, k, out, v = (x.flatten(0, 1) for x in (q, k, out, v))
    shape = (2 * repeats, 1024) if args.layout == "thd" else (2, 2 * repeats, 512)
    lse = _empty(*shape, dtype=torch.float32)
    splits = backward_plans.head_splits_for if repeats == 8 else lambda *sizes: 1
    # at head dim 256 weights in memory are the other way
    with (
        record("sm_90") as wanted,
        patch.multiple(backward_plans, _prefers_weights=lambda operands: False, head_splits_for=splits),
    ):
        call = BackwardCall(out, None, q, k, v, out, lse, [*need, False], args)
        launch_backward(call, call.operands(), plan)
    names = [spec.kernel.name for spec in wanted.specs]
    kind = "" if head_dim <= 128 else "_d256" if plan is None else "_d192"
    main = f"_hopper_attention_bwd{kind}_kernel"
    assert names[:2] == ["_hopper_attention_bwd_preprocess_kernel", main]
    # one launch for all that are sums
    assert names[2:] == (["_hopper_attention_sums_kernel"] if need[0] or repeats == 8 else [])
    return entry_for(wanted.specs[1])[0]


ALL = [True, True, True]
STARTS = _empty(3, dtype=torch.int32)
USED = _empty(2, dtype=torch.int32)
IN_TURN = {"deterministic": True}


def _slow(*values: Any, id: str) -> Any:
    """A kernel that is not much unlike one of another case: to compile one takes one to two seconds."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "need", "given"),
    [
        pytest.param(128, torch.bfloat16, ALL, {}, id="causal"),
        _slow(128, torch.float16, ALL, {"right": -1}, id="full"),
        pytest.param(128, torch.bfloat16, [False, True, True], {"right": -1}, id="full-no-dq"),
        _slow(128, torch.bfloat16, ALL, {"right": -1, "softcap": 30.0}, id="full-softcap"),
        pytest.param(64, torch.bfloat16, ALL, {}, id="d64"),
        _slow(128, torch.bfloat16, [False, True, True], {}, id="no-dq"),
        pytest.param(128, torch.bfloat16, ALL, {"left": 100, "softcap": 30.0}, id="window-softcap"),
        pytest.param(
            128, torch.bfloat16, ALL, {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS}, id="thd"
        ),
        pytest.param(80, torch.bfloat16, ALL, {"slopes": _empty(4, dtype=torch.float32)}, id="alibi-d80"),
        pytest.param(
            64,
            torch.float16,
            ALL,
            {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS, "query_used": USED},
            id="thd-lengths-d64",
        ),
        pytest.param(128, torch.bfloat16, ALL, IN_TURN, id="in-turn"),
        _slow(
            64,
            torch.bfloat16,
            ALL,
            {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS, **IN_TURN},
            id="in-turn-thd-d64",
        ),
        _slow(64, torch.bfloat16, ALL, {"right": -1}, id="full-d64"),
        _slow(64, torch.bfloat16, [False, True, True], {"left": 100}, id="window-no-dq-d64"),
        _slow(64, torch.bfloat16, ALL, {"left": 100, "softcap": 30.0}, id="window-softcap-d64"),
        _slow(64, torch.float16, ALL, {"slopes": _empty(4, dtype=torch.float32), **IN_TURN}, id="in-turn-alibi-d64"),
        pytest.param(96, torch.bfloat16, ALL, {}, id="d96"),
        _slow(96, torch.bfloat16, ALL, {"right": -1}, id="full-d96"),
        _slow(72, torch.float16, ALL, {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS}, id="thd-d72"),
        _slow(80, torch.bfloat16, ALL, IN_TURN, id="in-turn-d80"),
        pytest.param(128, torch.bfloat16, ALL, {"repeats": 8}, id="split"),
        _slow(64, torch.bfloat16, ALL, {"repeats": 8, "right": -1}, id="split-full-d64"),
        pytest.param(96, torch.bfloat16, [True, False, True], {"repeats": 8, **IN_TURN}, id="split-in-turn-no-dk-d96"),
        _slow(64, torch.bfloat16, [False, True, True], {"repeats": 8, **IN_TURN}, id="split-in-turn-no-dq-d64"),
    ],
)
def test_products_run_beside_everything_else(
    head_dim: int, dtype: torch.dtype, need: list[bool], given: dict[str, Any]
) -> None:
    """Where registers do not suffice, ptxas waits after every product: then there are as many waits as products."""
    entry = _entry(head_dim, dtype, need, **given)
    facts, plan = entry.manifest["launch"], plan_for(head_dim, head_dim)
    assert facts["num_warps"] == 12
    assert facts["shared"] <= 232448
    ptx = zlib.decompress(entry.members["ptx"]).decode()
    assert ptx.count("cp.async.bulk.tensor.5d.shared") == 6 * len(pieces_of(head_dim))  # q and do, at two places; k, v
    pieces = pieces_of(head_dim)
    parts = sum(piece // min(plan.part, piece) for piece in pieces)
    # 16 bytes a thread: 4 of the part's columns of 64 rows, in each of the parts
    adds = need[0] + (2 * sum(need[1:]) if given.get("repeats") == 8 and not given.get("deterministic") else 0)
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == adds * sum(pieces) // 8
    code = instructions(entry.members["cubin"])
    # each consumer waits for scores, dp and both products of them, at 64 in the loop and outside; the server by parts
    ahead = head_dim <= 96 and not given.get("softcap") and not given.get("deterministic")
    waits = 2 * (6 if ahead else 3) + (parts if need[0] else 0)
    # the waits for dp ahead of the loop and at its end may be one, at its beginning
    assert waits - 2 * ahead <= code["WARPGROUP.DEPBAR"] <= waits
    products = 2 * 2 * sum(pieces) // 16 + 2 * 2 * len(pieces) * plan.block_m // 16
    assert code["HGMMA"] >= (1 + ahead) * products


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(
    ("head_dim", "need", "given"),
    [
        pytest.param(256, ALL, {}, id="causal"),
        pytest.param(256, ALL, {"repeats": 8}, id="split"),
        _slow(160, ALL, {"repeats": 8, "right": -1}, id="split-full-d160"),
        pytest.param(192, [True, False, True], {"repeats": 8, **IN_TURN}, id="split-in-turn-no-dk-d192"),
        _slow(256, [False, True, True], {"repeats": 8, **IN_TURN}, id="split-in-turn-no-dq"),
        _slow(136, ALL, {"repeats": 8, "layout": "thd", "query_starts": STARTS, "key_starts": STARTS}, id="split-thd"),
        pytest.param(200, ALL, {"right": -1}, id="full-d200"),
        pytest.param(256, [False, True, True], {}, id="no-dq"),
        _slow(256, ALL, {"left": 100, "softcap": 30.0}, id="window-softcap"),
        pytest.param(
            256,
            ALL,
            {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS, "query_used": USED},
            id="thd-lengths",
        ),
        _slow(256, ALL, {"slopes": _empty(2, dtype=torch.float32)}, id="alibi"),
        pytest.param(256, ALL, IN_TURN, id="in-turn"),
        pytest.param(192, ALL, {"softcap": 30.0}, id="d192-softcap"),
        _slow(160, ALL, {"right": -1}, id="full-d160"),
        _slow(136, ALL, IN_TURN, id="in-turn-d136"),
    ],
)
def test_wide_products_run_beside_everything_else(head_dim: int, need: list[bool], given: dict[str, Any]) -> None:
    """As above, where the consumers share the columns of dk and dv."""
    entry = _entry(head_dim, torch.bfloat16, need, **{"repeats": 1, **given})
    facts, plan = entry.manifest["launch"], plan_for(head_dim, head_dim)
    assert (facts["num_warps"], facts["name"]) == (12, "_hopper_attention_bwd_d256_kernel")
    assert facts["shared"] <= 232448
    code = instructions(entry.members["cubin"])
    parts_of_heads = sum(need[1:]) if given.get("repeats") == 8 else 0
    in_turn = given.get("deterministic", False)
    ptx = zlib.decompress(entry.members["ptx"]).decode()
    adds = need[0] + (0 if in_turn else parts_of_heads)
    # 16 bytes a thread: 4 of the part's columns of 64 rows, in each of the parts; of dk and dv in each half
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == adds * sum(pieces_of(head_dim)) // 8
    stores = parts_of_heads if in_turn else 0
    assert ptx.count("st.global.v4.f32") == stores * sum(pieces_of(head_dim)) // 8
    # in each consumer scores, dp, dv, dk and the last dv, and in the server one for each part
    pieces = pieces_of(head_dim)
    parts = sum(piece // min(plan.part, piece) for piece in pieces)
    assert code["WARPGROUP.DEPBAR"] <= 2 * 5 + (parts if need[0] else 0)
    # 64x32 and a consumer's half of each piece at a time in the consumers, and up to 64 columns in the server
    products = 2 * sum(pieces) // 16 + 2 * 4 * len(pieces)
    assert code["HGMMA"] >= 2 * products + (4 * parts if need[0] else 0)


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(
    ("head_dim", "need", "given"),
    [
        pytest.param(192, ALL, {}, id="causal"),
        pytest.param(192, ALL, {"d_v": 128, "repeats": 8}, id="d128-of-value-split"),
        _slow(136, ALL, {"d_v": 40}, id="d40-of-value"),
        _slow(160, ALL, {"right": -1}, id="full-d160"),
        _slow(192, [False, True, True], {}, id="no-dq"),
        _slow(136, ALL, {"left": 100}, id="window-d136"),
        _slow(136, ALL, {"layout": "thd", "query_starts": STARTS, "key_starts": STARTS}, id="thd-d136"),
    ],
)
def test_products_of_96_keys_run_beside_everything_else(head_dim: int, need: list[bool], given: dict[str, Any]) -> None:
    """Three consumers of 160 registers, which hold 96 sums a thread: nothing may be on the stack."""
    d_v = given.get("d_v", head_dim)
    entry = _entry(head_dim, torch.bfloat16, need, plan=PLAN_OF_96_KEYS, **given)
    facts = entry.manifest["launch"]
    assert (facts["num_warps"], facts["stack"]) == (16, 0)
    assert facts["shared"] <= 232448
    code = instructions(entry.members["cubin"])
    # in each consumer scores, dp, dk, and where it has them dv and dq
    pieces = -(-d_v // 64)
    assert code["WARPGROUP.DEPBAR"] == 3 * (3 + need[0]) + pieces
    scores, dp = (-(-dim // 32) * 2 for dim in (head_dim, d_v))
    assert code["HGMMA"] == 3 * (scores + dp + 8 + 6 * need[0]) + 8 * pieces
    assert code["UTMAREDG"] == ((5 if head_dim <= 160 else 6) if need[0] else 0)


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.skipif(not NVDISASM.exists(), reason="this Triton brings no nvdisasm")
@pytest.mark.parametrize(
    ("head_dim", "plan"), [(192, PLAN_OF_96_KEYS), pytest.param(128, None, marks=pytest.mark.slow), (256, None)]
)
def test_instructions_are_counted_as_nvdisasm_does(head_dim: int, plan: Plan | None, tmp_path: Path) -> None:
    """In kernels of which each has some that another lacks."""
    cubin = _entry(head_dim, torch.bfloat16, ALL, repeats=1 if plan is None else 2, plan=plan).members["cubin"]
    ours, names = instructions(cubin), disassembled(cubin, tmp_path)
    assert ours == {name: names[name] for name in ours}
    assert ours["HGMMA"] and ours["WARPGROUP.DEPBAR"] and bool(ours["PRMT"]) == (head_dim != 128)
    assert bool(ours["UTMAREDG"]) == (plan is not None)


def test_what_96_keys_refuse() -> None:
    assert all(why_not_96_keys(*dims, True) is None for dims in ((136, 136), (160, 192), (192, 8), (192, 128)))
    for dims in ((200, 128), (128, 128), (192, 200)):
        assert f"136 to 192 of query and key and up to 192 of value, are {dims[0]}" in str(why_not_96_keys(*dims, True))
    plain = {"layout": "thd", "left": 5, "query_starts": STARTS, "key_starts": STARTS}
    assert is_plain_call(_args(**plain))
    for given in ({"deterministic": True}, {"softcap": 3.0}, {"slopes": _empty(4, dtype=torch.float32)}):
        assert not is_plain_call(_args(**given))
        # the other kernels have both head dims up to 128 or above
        assert "on both sides of 128: it has no deterministic order" in str(why_not_of(192, 128, False, False))
        assert why_not_of(192, 136, False, False) is None


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(
    "dims",
    [
        (64, 128),
        (88, 104),
        (136, 256),
        *(pytest.param(dims, marks=pytest.mark.slow) for dims in ((128, 64), (128, 96), (80, 128))),
    ],
)
def test_head_dims_of_keys_and_values_differ(dims: tuple[int, int]) -> None:
    """Each is padded by itself: a panel of 64 columns wholly outside its tensor would be read by TMA."""
    entry = _entry(dims[0], torch.bfloat16, ALL, d_v=dims[1])
    assert entry.manifest["launch"]["shared"] <= 232448


def test_padding_and_plans() -> None:
    """What the barriers by number allow: two stages of ds, four of queries."""
    for dims in ((64, 64), (72, 64), (96, 96), (128, 128)):
        plan = plan_for(*dims)
        assert plan.stages <= 4
        assert plan.ds_stages <= 2
        assert 2 * plan.registers < 504


@pytest.mark.parametrize("takes", [False, True])
def test_maps_of_shared_rows(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch entries, or heads, that share rows are copied for a driver that takes no strides of 0."""
    monkeypatch.setattr(maps, "takes_zero_strides", lambda device: takes)
    monkeypatch.setattr(maps, "_is_on_gpu", lambda x: True)
    q, k = _empty(1, 64, 4, 128).expand(2, -1, -1, -1), _empty(2, 64, 1, 128).expand(-1, -1, 2, -1)
    operands = Operands.of(q, k, _empty(2, 64, 2, 128), _args())
    queries, keys = maps.queries_of(operands, operands.q, 128), maps.keys_of(operands, operands.k, 128)
    assert (queries.tensor is q, keys.tensor is k) == (takes, takes)
    assert (queries.b == 0, keys.h == 0) == (takes, takes)
    values = maps.keys_of(operands, operands.v, 128)
    assert values.tensor is operands.v.tensor
