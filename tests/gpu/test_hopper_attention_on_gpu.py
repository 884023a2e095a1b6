"""The Hopper back end of attention on sm_90: a sweep, graphs, packed lengths, poison, large tensors, many launches."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, operands, varlen_attention
from powertrain.ops.attention.backend_preferences import DryRun, dry_run
from powertrain.ops.attention.hopper import backend as hopper_backend
from powertrain.ops.attention.hopper import backward_plans, plans, tile_counter
from powertrain.ops.attention.operands import OpArguments, Operands
from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target
from powertrain.testing import numerics
from tests.cuda_graph import captured
from tests.gpu.arch import ON_SM90
from tests.ops.attention.attention_launches import any_order
from tests.ops.attention.problems import CONFIGS, Config, errors, make

pytestmark = ON_SM90
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16)
SEEDS = range(8)
# head dims, queries
PLANS = (
    (64, 64, 512), (64, 64, 8192), (80, 80, 512), (96, 96, 512), (128, 128, 512), (192, 128, 512), (160, 160, 512),
    (192, 192, 512), (256, 256, 512),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _sums_in_any_order() -> Iterator[None]:
    with any_order():
        yield


def _largest(seed: int) -> int:
    return 700 if seed % 3 == 0 else 260  # several tiles of every plan, and one or two


def _is_taken(config: Config, seed: int) -> bool:
    call, tensors, options = make(config, seed, CUDA, DTYPES[seed % 2], _largest(seed))
    try:
        with dry_run():
            call(**tensors, **options, backend="hopper")
    except DryRun as asked:
        return not list(hopper_backend.why_not(asked.problem))
    raise AssertionError("nobody was asked")


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 128 rows, where tiles of 64 are faster because all run at once."""
    monkeypatch.setattr(plans, "_is_faster_in_small_tiles", lambda operands, small, plan: False)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_sweep(config: Config) -> None:
    """What it takes of every configuration, forward and backward, judged as the universal kernels are."""
    seeds = [seed for seed in SEEDS if _is_taken(config, seed)]
    if not seeds:
        pytest.skip("not for this back end")
    with record() as wanted:
        for seed in seeds:
            call, tensors, options = make(config, seed, CUDA, DTYPES[seed % 2], _largest(seed))
            out, lse = call(**tensors, **options, backend="hopper")
            torch.autograd.backward([out, lse], [torch.ones_like(out), torch.zeros_like(lse)])
    assert not prebuild.build(wanted.specs).failures
    bad = [
        f"{config.name}, seed {seed}, {DTYPES[seed % 2]}: {error}"
        for seed in seeds
        for error in errors(config, seed, CUDA, DTYPES[seed % 2], _largest(seed), "hopper")
        if not error.ok
    ]
    assert not bad, "\n".join(bad)


# queries, keys, alignment: one tile, several; queries that see nothing; keys that none sees; ends within half a block
CORNER_TO_CORNER = [
    (1, 1, "bottom_right"),
    (64, 64, "top_left"),
    (65, 65, "bottom_right"),
    (130, 258, "bottom_right"),
    (428, 300, "bottom_right"),
    (200, 500, "top_left"),
    (1000, 1000, "bottom_right"),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 15.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
    {"sinks": torch.ones(4)},
]


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("dims", [(64, 64), (72, 80), (128, 128), (96, 128), (192, 128), (160, 136)], ids=str)
def test_diagonals_from_corner_to_corner(dims: tuple[int, int]) -> None:
    """Of a tile's masked block the first half of the queries see the first half of the keys, and multiply no more."""
    bad = []
    for n, (queries, keys, align) in enumerate(CORNER_TO_CORNER):
        torch.manual_seed(n)
        shapes = {"query": (2, queries, 4, dims[0]), "key": (2, keys, 2, dims[0]), "value": (2, keys, 2, dims[1])}
        tensors = {name: torch.randn(shape, device=CUDA).to(DTYPES[n % 2]) for name, shape in shapes.items()}
        options = {name: x.to(CUDA) if isinstance(x, Tensor) else x for name, x in OPTIONS[n % 4].items()}

        def through(backend: str, align: Any = align, options: dict[str, Any] = options) -> Any:
            def run(**given: Any) -> tuple[Tensor, Tensor]:
                given |= options | {"is_causal": True, "causal_align": align, "return_lse": True, "backend": backend}
                out, lse = attention(**given)
                return out, lse.masked_fill(lse == -torch.inf, -1.0)

            return run

        found = numerics.errors(through("hopper"), through("plain"), through("reference"), tensors, slack=20)
        bad += [f"{queries} queries, {keys} keys, {align}, {options}: {error}" for error in found if not error.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160])
def test_packed_diagonals_are_those_of_each_sequence(head_dim: int) -> None:
    lengths = [1, 127, 128, 129, 64, 300, 0, 193]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=CUDA)
    q, k, v = (torch.randn(sum(lengths), 4, head_dim, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    found = varlen_attention(q, k, v, starts, max_seqlen_q=300, is_causal=True, backend="hopper")
    for first, end in pairwise(starts.tolist()):
        alone = [x[None, first:end] for x in (q, k, v)]
        exact = attention(*(x.double() for x in alone), is_causal=True, backend="reference")
        torch.testing.assert_close(found[None, first:end].double(), exact, rtol=2e-2, atol=1e-2)


FEW = ("causal", "mqa", "window", "softcap", "thd-causal", "causal-d128", "full-d128", "causal-192-128", "causal-d256")


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_sweep_in_large_tiles(config: Config) -> None:
    test_sweep(config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.name in FEW], ids=lambda config: config.name)
def test_ctas_that_take_many_tiles(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all SMs problems of this size have a tile for each."""
    two = replace(Target.of(CUDA), num_sms=2)
    monkeypatch.setattr(operands, "Target", SimpleNamespace(of=lambda device: two))
    test_sweep(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if c.head_dims == (64, 64) and c.name in FEW], ids=lambda config: config.name
)
def test_three_consumers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of long sequences at head dim 64."""
    plan = plans.plan_for(64, 64, 8192)
    monkeypatch.setattr(plans, "plan_for", lambda d_qk, d_v, queries: plan)
    monkeypatch.setattr(plans, "_is_faster_in_small_tiles", lambda operands, small, plan: False)
    monkeypatch.setattr(plans, "_three_consumers_are_faster", lambda operands, queries: True)
    test_sweep(config)


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _causal_call(d_qk: int, d_v: int, deterministic: bool = False) -> Operands:
    args = OpArguments(*(None,) * 11, "bshd", d_qk**-0.5, 0.0, 0.0, -1, 0, 0, False, deterministic)
    return Operands.of(*_leaves(*((1, 256, 1, d) for d in (d_qk, d_qk, d_v))), args)


def test_self_tests_pass_and_run_once() -> None:
    hopper_backend._self_tests.clear()
    hopper_backend._backward_self_tests.clear()
    tested = [plans.plan_for(*dims) for dims in PLANS]
    calls = [_causal_call(*dims[:2]) for dims in PLANS]
    assert [hopper_backend.fails_here(call, plan) for call, plan in zip(calls, tested, strict=True)] == [None] * len(
        PLANS
    )
    both = product((64, 128, 256), (False, True))
    backwards = [(width, width, turn, backward_plans.plan_for(width, width)) for width, turn in both]
    backwards += [(192, d_v, False, backward_plans.PLAN_OF_96_KEYS) for d_v in (128, 192)]
    found = []
    for d_qk, d_v, fixed, plan in backwards:
        call = _causal_call(d_qk, d_v, fixed)
        schedule = backward_plans.schedule_of(call, plan)
        for splits in (1, 3):
            found.append(hopper_backend.backward_fails_here(call, plan, schedule._replace(num_splits=splits)))
    assert found == [None] * 16
    assert hopper_backend._self_tests == {plan: {0: None} for plan in tested}
    assert hopper_backend._backward_self_tests == {
        (*backward, is_split, False): {0: None} for backward in backwards for is_split in (False, True)
    }


def test_a_graph_of_packed_sequences_takes_other_lengths() -> None:
    leaves = _leaves(*[(1000, 8, 128)] * 3)
    dout = torch.randn(1000, 8, 128, device=CUDA, dtype=torch.bfloat16)
    starts = torch.tensor([0, 300, 300, 777, 1000], dtype=torch.int32, device=CUDA)

    def step() -> tuple[Tensor, ...]:
        out, lse = varlen_attention(
            *leaves, starts, max_seqlen_q=1000, is_causal=True, return_lse=True, backend="hopper"
        )
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    graph, results = captured(step)
    for lengths in ([0, 1000, 1000, 1000, 1000], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [0, 128, 640, 901, 990]):
        starts.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        eager = step()
        assert torch.equal(results[0], eager[0]) and torch.equal(results[1], eager[1])
        for ours, theirs in zip(results[2:], eager[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        assert not any(x[lengths[-1] :].any() for x in (results[0], *results[2:]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_leaks_from_behind_packed_sequences(head_dim: int) -> None:
    """NaN between what is used of sequences, and behind the last: the bits of zeros there."""
    starts = torch.tensor([0, 150, 150, 400], dtype=torch.int32, device=CUDA)
    used = torch.tensor([0, 131, 131, 300], dtype=torch.int32, device=CUDA)
    behind = torch.ones(430, dtype=torch.bool, device=CUDA)
    behind[:131], behind[150:319] = False, False

    def results(value: float) -> Tensor:
        torch.manual_seed(1)
        q, k, v = (torch.randn(430, 4, head_dim, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
        for x in (q, k, v):
            x[behind] = value
        return varlen_attention(
            q, k, v, used, max_seqlen_q=250, cu_seqlens_q_padded=starts, cu_seqlens_k_padded=starts, backend="hopper"
        )

    found = results(float("nan"))
    assert not found[behind].any() and found[~behind].all()
    assert torch.equal(found, results(0.0))


def test_nothing_leaks_from_behind_lengths() -> None:
    lengths = torch.tensor([130, 0, 77], dtype=torch.int32, device=CUDA)
    behind = torch.arange(300, device=CUDA)[None] >= lengths[:, None]

    def results(value: float) -> Tensor:
        torch.manual_seed(1)
        q, k, v = (torch.randn(3, 300, 4, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
        for x in (q, k, v):
            x[behind] = value
        return attention(q, k, v, seqused_q=lengths, seqused_k=lengths, is_causal=True, backend="hopper")

    found = results(float("nan"))
    assert not found[behind].any()
    assert torch.equal(found, results(0.0))


def test_the_host_never_waits() -> None:
    leaves = _leaves(*[(2, 300, 4, 128)] * 3)
    flat = _leaves(*[(600, 4, 128)] * 3)
    starts = torch.tensor([0, 100, 600], dtype=torch.int32, device=CUDA)

    def step() -> None:
        attention(*leaves, is_causal=True, backend="hopper").sum().backward()
        varlen_attention(*flat, starts, max_seqlen_q=500, is_causal=True, backend="hopper").sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "sequence"])
@pytest.mark.usefixtures("most_gpu_memory", "large_tiles")
def test_more_elements_than_an_int32_counts(packed: bool) -> None:
    """At the beginning, across 2^31 and at the end: the bits of the same computed alone, in tiles as large."""
    shape = (131136, 128, 128) if packed else (65, 2048, 128, 128)
    q, k, v = (torch.empty(shape, device=CUDA, dtype=torch.bfloat16).normal_() for _ in range(3))
    if packed:
        starts = torch.arange(0, 131137, 2048, dtype=torch.int32, device=CUDA)
        starts = torch.cat([starts, starts.new_tensor([131136])])
        out = varlen_attention(q, k, v, starts, max_seqlen_q=2048, is_causal=True, backend="hopper")
        places = [slice(0, 2048), slice(63 * 2048, 64 * 2048), slice(64 * 2048, 131136)]
    else:
        out = attention(q, k, v, is_causal=True, backend="hopper")
        places = [slice(0, 1), slice(63, 64), slice(64, 65)]
    for place in places:
        own = [x[place][..., 120:, :] for x in (q, k, v)]
        own = [(x[None] if packed else x).contiguous() for x in own]
        assert torch.equal(
            out[place][..., 120:, :].flatten(), attention(*own, is_causal=True, backend="hopper").flatten()
        )


def test_many_launches_on_two_streams_leave_their_counters() -> None:
    """Tiles are drawn from a counter in memory, which a launch leaves 0 for the next."""
    rng = random.Random(0)
    shapes = [(rng.randint(1, 3), rng.randint(1, 900), rng.choice((1, 4))) for _ in range(20)]
    problems = [[torch.randn(b, s, h, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3)] for b, s, h in shapes]
    expected = [attention(*x, is_causal=True, backend="hopper") for x in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[Any] = []
    for n in range(6000):
        with torch.cuda.stream(streams[n % 2]):
            out = attention(*problems[n % 20], is_causal=True, backend="hopper")
        if n >= 5960:
            found.append((n % 20, out))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[n]) for n, out in found)
    assert len(tile_counter._counters) >= 2 and not any(map(int, tile_counter._counters.values()))


def test_inductor() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1.5, k + 0.5, v * 2, is_causal=True, backend="hopper").sin()

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for length in (260, 333):
        leaves = _leaves(*[(1, length, 4, 64)] * 3)
        dout = torch.randn(1, length, 4, 64, device=CUDA, dtype=torch.bfloat16)
        outs = [f(*leaves) for f in (compiled, run)]
        grads = [torch.autograd.grad(out, leaves, dout) for out in outs]
        for ours, theirs in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_inductor_with_graphs() -> None:
    """Its warm-up raises if anything stays in the graphs' memory."""
    leaves = [torch.randn(1, 260, 4, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    tile_counter._counters.clear()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1.5, k + 0.5, v * 2, is_causal=True, backend="hopper").sin()

    compiled = torch.compile(run, mode="reduce-overhead")
    expected = run(*leaves)
    for _ in range(4):
        torch.testing.assert_close(compiled(*leaves).clone(), expected, rtol=2e-2, atol=2e-2)
