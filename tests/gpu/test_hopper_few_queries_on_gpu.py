"""The Hopper forward where queries are few beside keys: heads that share a tile, keys cut into parts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, operands, varlen_attention
from powertrain.ops.attention.hopper import plans
from powertrain.ops.attention.hopper.forward import launch_forward
from powertrain.ops.attention.hopper.self_tests import forward_defect
from powertrain.ops.attention.operands import OpArguments, Operands
from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target
from powertrain.testing import numerics
from tests.cuda_graph import captured
from tests.gpu.arch import ON_SM90
from tests.ops.attention import problems

pytestmark = ON_SM90
PLAIN = problems._Plain.name  # registered there
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16)
CUTS = (1, 2, 3, 40)  # parts; of the most some are empty
CONSUMERS = ((1, 4), (1, 8), (2, 4))  # of so many warps


class Case(NamedTuple):
    queries: int
    keys: int
    heads: tuple[int, int]
    head_dims: tuple[int, int] = (128, 128)
    options: Mapping[str, Any] = MappingProxyType({})
    layout: str = "bshd"
    batch: int = 2


LENGTHS = {
    "seqused_k": torch.tensor([77, 0, 611], dtype=torch.int32),
    "seqused_q": torch.tensor([5, 0, 9], dtype=torch.int32),
}
CASES = [
    Case(1, 700, (8, 2)),
    Case(4, 1000, (32, 2)),
    Case(17, 611, (12, 2), layout="bhsd"),  # 6 heads: a consumer has 60 of 64 rows
    Case(17, 611, (37, 1)),  # 16 heads to a tile, of which 11 are missing in the last
    Case(21, 700, (10, 2)),
    Case(33, 300, (4, 1), layout="sbhd"),
    Case(1, 900, (14, 2)),
    Case(50, 900, (14, 2), layout="bhsd"),
    Case(20, 700, (9, 3), (64, 64)),
    Case(9, 611, (14, 2), options=LENGTHS | {"sinks": torch.linspace(-1, 3, 14)}, batch=3),
    Case(9, 611, (24, 1), (256, 256)),
    Case(64, 4096, (8, 2), batch=1),
    Case(64, 333, (8, 2), options={"is_causal": False}),
    Case(90, 1500, (8, 1), options={"softcap": 15.0}),
    Case(16, 2000, (16, 2), options={"sinks": torch.linspace(-1, 8, 16)}),
    Case(40, 900, (8, 2), options={"is_causal": False, "window_size": (300, 5)}),
    Case(40, 900, (8, 2), options={"is_causal": False, "window_size": (130, 0)}),
    Case(40, 900, (8, 2), options={"causal_align": "top_left"}),
    Case(60, 333, (4, 2), layout="sbhd"),
    Case(60, 500, (4, 4)),  # no heads to pack
    Case(200, 1111, (4, 2), layout="bhsd"),
    Case(30, 700, (4, 2), options={"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])}),
    Case(17, 611, (8, 2), options=LENGTHS, batch=3),
    Case(17, 611, (8, 2), options=LENGTHS | {"sinks": torch.ones(8), "is_causal": False}, batch=3),
    Case(70, 700, (8, 2), (64, 64)),
    Case(50, 700, (16, 1), (64, 64), {"sinks": torch.zeros(16), "window_size": (128, 0), "is_causal": False}),
    Case(20, 500, (8, 2), (96, 72)),
    Case(20, 500, (14, 2), (160, 160)),
    Case(33, 700, (8, 2), (192, 80), layout="bhsd"),
    Case(25, 700, (8, 2), (192, 128)),
    Case(25, 700, (8, 2), (256, 256)),
]


def _through(case: Case, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    options = {name: x.to(CUDA) if isinstance(x, Tensor) else x for name, x in case.options.items()}

    def run(**given: Any) -> tuple[Tensor, Tensor]:
        given = given | {"is_causal": True} | options
        out, lse = attention(**given, layout=case.layout, return_lse=True, backend=backend)  # type: ignore[arg-type]
        return out, lse.masked_fill(lse == -torch.inf, -1.0)

    return run


def _tensors(case: Case, seed: int) -> dict[str, Tensor | None]:
    torch.manual_seed(seed)
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[case.layout]
    sizes = ((case.queries, case.heads[0]), (case.keys, case.heads[1]), (case.keys, case.heads[1]))
    dims = case.head_dims[0], case.head_dims[0], case.head_dims[1]
    return {
        name: torch.randn(case.batch, *size, dim, device=CUDA).to(DTYPES[seed % 2]).permute(order).contiguous()
        for name, size, dim in zip(("query", "key", "value"), sizes, dims, strict=True)
    }


def _errors(
    through: Callable[[str], Callable[..., Any]], tensors: dict[str, Tensor | None], backward: bool = False
) -> list[numerics.Error]:
    three = through("hopper"), through(PLAIN), through("reference")
    return numerics.errors(*three, tensors, backward=backward, slack=20)


def _plan(monkeypatch: pytest.MonkeyPatch, cuts: int, consumers: int, warps: int) -> None:
    """Few queries have so many parts and consumers."""
    monkeypatch.setattr(plans, "num_splits_for", lambda *sizes: cuts)
    monkeypatch.setattr(plans, "plans_of_few", lambda plan, *_: (plans.with_consumers(plan, consumers, warps),))


@pytest.mark.parametrize("sms", [132, 2])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("consumers, warps", CONSUMERS)
def test_sweep(consumers: int, warps: int, cuts: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each CTA with a tile or so, and with many."""
    _plan(monkeypatch, cuts, consumers, warps)
    here = replace(Target.of(CUDA), num_sms=sms)
    monkeypatch.setattr(operands, "Target", SimpleNamespace(of=lambda device: here))
    with record() as wanted:
        for n, case in enumerate(CASES):
            _through(case, "hopper")(**_tensors(case, n))
    forwards = [spec for spec in wanted.specs if spec.kernel.name == "_hopper_attention_fwd_kernel"]
    assert {spec.constants["HEADS_PER_TILE"] for spec in forwards} >= {1, 2, 3, 4, 5, 6, 7, 8, 16}
    assert {spec.constants["SPLIT_KV"] for spec in forwards} == {cuts > 1}
    assert {spec.constants["CONSUMERS"] for spec in forwards} == {consumers}
    assert not prebuild.build(wanted.specs).failures
    bad = []
    for n, case in enumerate(CASES):
        found = _errors(partial(_through, case), _tensors(case, n))
        bad += [f"{case}: {error}" for error in found if not error.ok]
    assert not bad, "\n".join(bad)


class Packed(NamedTuple):
    queries: list[int]
    keys: list[int]
    repeats: int = 4
    options: Mapping[str, Any] = MappingProxyType({})
    behind: int = 0  # rows that no sequence has


PACKED = [
    Packed([64, 64, 64], [700, 128, 3000]),
    Packed([1, 0, 17, 64, 3, 90], [500, 40, 17, 2000, 0, 91], behind=7),
    Packed([5, 1, 1, 1], [5, 900, 130, 1111], 8, {"is_causal": False}),
    Packed([30, 2, 1], [600, 1500, 640], 4, {"is_causal": False, "window_size": (200, 0)}),
    Packed([4, 20, 11], [700, 20, 800], 4, {"sinks": torch.linspace(-2, 3, 8), "softcap": 20.0}, behind=40),
    Packed([1, 0, 17, 64, 3, 90], [500, 40, 17, 2000, 0, 91], 7, behind=7),
    Packed([4, 20, 11], [700, 20, 800], 3, {"sinks": torch.linspace(-2, 3, 6)}, behind=40),
    Packed([64, 1, 0, 200, 17], [64, 1, 0, 200, 17], 5, behind=9),
    Packed([64, 1, 300, 11], [64, 1, 300, 11], 7, {"window_size": (100, 0)}),
    Packed([90, 5, 30, 33], [90, 5, 30, 33], 12, {"is_causal": False, "softcap": 20.0}, behind=3),
    Packed([64, 1, 0, 200, 17], [64, 1, 0, 200, 17], 4, {"sinks": torch.linspace(-2, 3, 8)}, behind=9),
]


@pytest.mark.parametrize(
    "head_dim, consumers, warps",
    [(64, 1, 4), (64, 2, 4), (64, 3, 4), (64, 1, 8), (128, 1, 4), (128, 2, 4), (128, 1, 8), (192, 1, 8), (256, 1, 4),
     (256, 2, 4)],
)  # fmt: skip
@pytest.mark.parametrize("cuts", CUTS)
def test_packed_sequences(
    cuts: int, head_dim: int, consumers: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plan(monkeypatch, cuts, consumers, warps)
    bad = []
    for n, case in enumerate(PACKED):
        torch.manual_seed(n)
        rows = {
            "query": (sum(case.queries), 2 * case.repeats),
            "key": (sum(case.keys), 2),
            "value": (sum(case.keys), 2),
        }
        tensors: dict[str, Tensor | None] = {
            name: torch.randn(count + case.behind, heads, head_dim, device=CUDA).to(DTYPES[n % 2])
            for name, (count, heads) in rows.items()
        }
        starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=CUDA) for x in (case.queries, case.keys)]
        options = {name: x.to(CUDA) if isinstance(x, Tensor) else x for name, x in case.options.items()}

        def through(backend: str, starts: Any = starts, case: Packed = case, options: Any = options) -> Any:
            def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
                given = {"is_causal": True} | options
                out, lse = varlen_attention(
                    query, key, value, starts[0], starts[1], max_seqlen_q=max(case.queries),
                    return_lse=True, backend=backend, **given,
                )  # fmt: skip
                return out, lse.masked_fill(lse == -torch.inf, -1.0)

            return run

        found = _errors(through, tensors)
        bad += [f"{case}: {error}" for error in found if not error.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("consumers, warps", CONSUMERS)
@pytest.mark.parametrize("cuts", CUTS)
def test_nothing_leaks_from_behind_lengths(
    cuts: int, consumers: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plan(monkeypatch, cuts, consumers, warps)
    starts, q_starts = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 700, 700, 1500], [0, 16, 20, 60]))
    used, q_used = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([611, 0, 130], [16, 4, 33]))
    behind, q_behind = torch.ones(1600, dtype=torch.bool, device=CUDA), torch.ones(70, dtype=torch.bool, device=CUDA)
    behind[:611], behind[700:830], q_behind[:20], q_behind[20:53] = False, False, False, False

    def results(value: float) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        q = torch.randn(70, 8, 128, device=CUDA, dtype=torch.bfloat16)
        k, v = (torch.randn(1600, 2, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        q[q_behind], k[behind], v[behind] = value, value, value
        out, lse = varlen_attention(
            q, k, v, q_starts, starts, max_seqlen_q=40, max_seqlen_k=800, seqused_q=q_used, seqused_k=used,
            is_causal=True, return_lse=True, backend="hopper",
        )  # fmt: skip
        return out, lse

    out, lse = results(float("nan"))
    zeros = results(0.0)
    assert torch.equal(out, zeros[0]) and torch.equal(lse, zeros[1])
    assert not out[16:20].any() and not out[q_behind].any() and out[:16].all() and out[20:53].all()
    assert (lse[:, q_behind] == -torch.inf).all() and (lse[:, 16:20] == -torch.inf).all()


def test_a_graph_takes_other_lengths() -> None:
    q = torch.randn(32, 16, 128, device=CUDA, dtype=torch.bfloat16)
    k, v = (torch.randn(4000, 2, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    starts = torch.tensor([0, 8, 24, 32], dtype=torch.int32, device=CUDA)
    k_starts = torch.tensor([0, 1000, 3000, 4000], dtype=torch.int32, device=CUDA)

    def step() -> tuple[Tensor, Tensor]:
        out, lse = varlen_attention(
            q, k, v, starts, k_starts, max_seqlen_q=32, max_seqlen_k=4000, is_causal=True, return_lse=True,
            backend="hopper",
        )  # fmt: skip
        return out, lse

    with record() as wanted:
        step()
    assert [spec.constants.get("SPLIT_KV") for spec in wanted.specs] == [True, None]
    graph, results = captured(step)
    for queries, keys in (([0, 32, 32, 32], [0, 4000, 4000, 4000]), ([0, 1, 2, 3], [0, 1, 2, 900]), ([0] * 4, [0] * 4)):
        starts.copy_(torch.tensor(queries, dtype=torch.int32))
        k_starts.copy_(torch.tensor(keys, dtype=torch.int32))
        graph.replay()
        assert all(torch.equal(ours, eager) for ours, eager in zip(results, step(), strict=True))
        assert not results[0][queries[-1] :].any()


def test_gradients() -> None:
    case = Case(48, 600, (8, 2))
    found = _errors(partial(_through, case), _tensors(case, 0), backward=True)
    assert all(error.ok for error in found), found


def test_self_tests_pass() -> None:
    args = OpArguments(*(None,) * 11, "bshd", 0.1, 0.0, 0.0, -1, 0, 0, True)
    tested = [
        (
            Operands.of(*(torch.randn(1, 256, 1, d, device=CUDA).bfloat16() for d in (*dims[:1], *dims)), args),
            plans.plan_for(*dims, 16)._replace(heads_per_tile=pack, num_splits=cuts, partial=partial),
        )
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
        for pack, cuts, partial in (
            (4, 1, False),
            (7, 1, False),
            (5, 3, False),
            (1, 7, False),
            (16, 7, False),
            (8, 1, True),
        )
    ]
    with record() as wanted:
        for call, plan in tested:
            forward_defect(call, plan, launch_forward)
    assert not prebuild.build(wanted.specs).failures
    assert [forward_defect(call, plan, launch_forward) for call, plan in tested] == [None] * len(tested)
