"""The Hopper decoding kernel for MLA caches beside a float64 reference and the universal kernel."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import decode_op
from powertrain.ops.attention.decode import decode_attention, decode_attention_ref
from powertrain.ops.attention.hopper import decode_mla
from tests.gpu.arch import ON_SM90
from tests.gpu.packed_pages import check, problem_of

pytestmark = ON_SM90
NEVER = 1 << 30


class Case(NamedTuple):
    lengths: tuple[int, ...]
    heads: int
    queries: int = 1
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    num_splits: int | None = None
    sinks: bool = False
    is_causal: bool = True


RAGGED = (0, 1, 63, 64, 65, 700, 129, 2111, 500)
CASES = [
    Case((64,), 64),
    Case((128,), 64),
    Case((192, 192), 64, num_splits=1),
    Case((77,), 128),
    Case(RAGGED, 128),
    Case(RAGGED, 16),
    Case(RAGGED, 28, 3),
    Case(RAGGED, 16, 4, 16),
    Case(RAGGED, 128, 2, 32),
    Case(RAGGED, 128, 1, 64),
    Case(RAGGED, 64, 2, 64, torch.float16),
    Case(RAGGED, 28, 4, 128, torch.float16),
    Case(RAGGED, 128, 4, 256),
    Case(RAGGED, 128, 1, 16, num_splits=7),
    Case(RAGGED, 64, 2, 64, num_splits=40),
    Case(RAGGED, 16, 2, 64, num_splits=1),
    Case(RAGGED, 64, 2, 64, sinks=True),
    Case(RAGGED, 28, 2, 0, sinks=True, num_splits=1),
    Case(RAGGED, 128, 1, 1),
    Case(RAGGED, 28, 3, 2, torch.float16),
    Case(RAGGED, 128, 2, 8),
    Case(RAGGED, 16, 4, 4, sinks=True),
    Case(RAGGED, 64, 1, 1, num_splits=3),
    Case(RAGGED, 64, 3, 32, is_causal=False),
    Case((9000,), 128, 1, 64),
    Case((3000, 20, 8000), 28, 2),
    Case((1000,) * 40, 128, 1, 16, torch.float16),
]


class Inputs(NamedTuple):
    query: Tensor
    cache: Tensor
    lengths: Tensor
    table: Tensor | None
    sinks: Tensor | None


def _inputs(case: Case) -> Inputs:
    torch.manual_seed(0)
    b, longest = len(case.lengths), -(-max(case.lengths) // 256) * 256
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    dense = torch.randn(b, longest, 1, 576, device="cuda").to(case.dtype)
    behind = torch.arange(longest, device="cuda") >= lengths[:, None]
    dense[behind] = float("nan")
    sinks = torch.linspace(-1, 3, case.heads, device="cuda") if case.sinks else None
    query = torch.randn(b, case.queries, case.heads, 576, device="cuda").to(case.dtype)
    if case.page_size == 0:
        return Inputs(query, dense, lengths, None, sinks)
    each = longest // case.page_size
    order = torch.randperm(b * each, device="cuda")
    cache = torch.empty(b * each, case.page_size, 1, 576, device="cuda", dtype=case.dtype)
    cache[order] = dense.view(b * each, case.page_size, 1, 576)
    table = order.view(b, each).int()
    # what stands behind a sequence's pages is never used
    unused = torch.arange(each, device="cuda") * case.page_size >= lengths[:, None]
    table[unused] = 2**30
    return Inputs(query, cache, lengths, table, sinks)


def _run(case: Case, inputs: Inputs, backend: str | None = None) -> tuple[Tensor, Tensor]:
    query, cache, lengths, table, sinks = inputs
    if backend == "reference":
        return decode_attention_ref(
            query.double(), cache.double(), None, lengths, page_table=table, sinks=sinks, head_dim_v=512,
            is_causal=case.is_causal,
        )  # fmt: skip
    results = decode_attention(
        query, cache, None, lengths, page_table=table, sinks=sinks, head_dim_v=512, num_splits=case.num_splits,
        is_causal=case.is_causal, return_lse=True,
    )  # fmt: skip
    assert isinstance(results, tuple)
    return results


def _served_by_hopper(monkeypatch: pytest.MonkeyPatch, rows: int = 1) -> list[int]:
    calls = []
    launch = decode_op.launch_mla

    def counted(*given: object) -> None:
        calls.append(1)
        launch(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_op, "MLA_LEAST_ROWS", rows)
    monkeypatch.setattr(decode_op, "launch_mla", counted)
    return calls


def _name(case: Case) -> str:
    lengths = "ragged" if case.lengths == RAGGED else f"{case.lengths[0]}x{len(case.lengths)}"
    name = f"{lengths}-h{case.heads}-q{case.queries}-p{case.page_size}-s{case.num_splits or 0}"
    return name + "-sinks" * case.sinks + "-all" * (not case.is_causal) + "-fp16" * (case.dtype is torch.float16)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(case)
    expected, expected_lse = _run(case, inputs, "reference")
    _served_by_hopper(monkeypatch, NEVER)
    universal, _ = _run(case, inputs)
    calls = _served_by_hopper(monkeypatch)
    out, lse = _run(case, inputs)
    assert calls == [1]
    assert not out.isnan().any()
    error, of_universal = ((x.double() - expected).abs().amax().item() for x in (out, universal))
    print(f"{_name(case)}: error {error:.2e}, universal {of_universal:.2e}")
    assert error <= 1.5 * of_universal + 1e-3
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-4, atol=1e-3)
    again, again_lse = _run(case, inputs)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)


def test_the_reference_sees_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that moves by much moves the result: each row of the last, cut block counts."""
    case = Case((65,), 64)
    inputs = _inputs(case)
    _served_by_hopper(monkeypatch)
    out, _ = _run(case, inputs)
    inputs.cache[0, 64] = inputs.query[0, 0, 0] * 4
    changed, _ = _run(case, inputs)
    torch.testing.assert_close(changed[0, 0, 0].float(), inputs.cache[0, 64, 0, :512].float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(out, changed)


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_a_graph_takes_other_lengths(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((2000, 700, 1, 1500), 128, 2, page_size)
    inputs = _inputs(case)
    _served_by_hopper(monkeypatch)
    _run(case, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = _run(case, inputs)
    for lengths in ((2000, 700, 1, 1500), (100, 699, 0, 1500), (1999, 64, 1, 65)):
        inputs.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        expected, expected_lse = _run(case, inputs)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        of_float64, _ = _run(case, inputs, "reference")
        assert (out.double() - of_float64).abs().amax().item() < 2e-2


SIZES = [(1, 700), (130, 700), (3, 3), (0, 90), (1, 0), (300, 300), (9, 1000), (40, 20)]


@pytest.mark.parametrize("page", [1, 3, 8, 16, 24, 64, 128])
@pytest.mark.parametrize("heads", [16, 28, 128])
def test_packed_queries(heads: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _served_by_hopper(monkeypatch)
    for sizes, around in ((SIZES, (2, 70)), ([(1, 3000 + n) for n in range(20)], (0, 1)), ([(5, 2000)], (0, 0))):
        problem = problem_of(sizes, page, (heads, 1), (576,), around)
        check(problem | {"head_dim_v": 512}, sinks=torch.randn(heads, device="cuda") if page == 64 else None)
    assert calls == [1] * 3


# as many parts as there are blocks, and as few as the keys of one CTA allow
@pytest.mark.parametrize("rounds, least", [(16, 64), (1, 1 << 20)])
@pytest.mark.parametrize("page", [1, 64])
def test_parts(rounds: int, least: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_mla, "_ROUNDS", rounds)
    monkeypatch.setattr(decode_mla, "_LEAST_KEYS", least)
    monkeypatch.setattr(decode_mla, "_result_keys", lambda rows: -(1 << 20))
    calls = _served_by_hopper(monkeypatch)
    for sizes in (SIZES, [(1, n) for n in (5, 4000, 1, 77)], [(64, 4096)], [(2, 64 * n) for n in range(60)]):
        check(problem_of(sizes, page, (32, 1), (576,)) | {"head_dim_v": 512})
    assert calls == [1] * 4


@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of odd and even numbers of blocks behind one another, from one block on."""
    draws = random.Random(seed)
    calls = _served_by_hopper(monkeypatch)
    for _ in range(6):
        most, longest = draws.choice([1, 4, 200]), draws.choice([130, 700, 4000])
        sizes = [(draws.randint(0, most), draws.randint(0, longest)) for _ in range(draws.choice([3, 40, 200]))]
        around, page = draws.choice([(0, 0), (5, 130)]), draws.choice([1, 16, 64, 64])
        problem = problem_of([*sizes, (1, 65)], page, (draws.choice([16, 40, 128]), 1), (576,), around)
        check(problem | {"head_dim_v": 512}, is_causal=draws.random() < 0.7)
    assert calls == [1] * 6


def test_many_launches_leave_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race of the barriers would show now and then."""
    case = Case((4096, 130, 64, 2000, 1, 8000), 128, 1, 64)
    inputs = _inputs(case)
    _served_by_hopper(monkeypatch)
    first, _ = _run(case, inputs)
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        differs += (_run(case, inputs)[0] != first).sum()
    assert differs.item() == 0


def test_other_calls_stay_with_the_universal_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _served_by_hopper(monkeypatch)
    query, cache, lengths, _, _ = _inputs(Case((100, 300), 16, 2))
    options = (
        {"softcap": 20.0},
        {"window_size": (50, 0)},
        {"alibi_slopes": torch.ones(16, device="cuda")},
        {"cache_leftpad": torch.zeros(2, dtype=torch.int32, device="cuda")},
        {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32, device="cuda")},
    )
    for option in options:
        decode_attention(query, cache, None, lengths, head_dim_v=512, **option)  # type: ignore[arg-type]
    assert calls == []
