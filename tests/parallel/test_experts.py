"""Experts spread over ranks that are threads: results, bits under delays, dropped rows, errors, a lost rank."""

from typing import Any

import pytest
import torch

from powertrain.models import configure
from powertrain.models.parallelize import check_expert
from powertrain.ops.moe import moe_permute
from powertrain.parallel.collective_matmul import all_gather_gemm
from powertrain.parallel.experts import combine, dispatch, moe_experts, spread_experts
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import PeerTimeout
from powertrain.parallel.transport.simulated import World
from powertrain.quant import Row, Tensor
from powertrain.runtime.target import Target
from powertrain.train.lint import record_step
from tests.distributed.experts_worker import check, check_wire, simulated
from tests.distributed.worker import MODELS, run_config


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_and_gradients_are_one_ranks(size: int) -> None:
    World(size).run(check)


def test_results_have_the_same_bits_whoever_is_late() -> None:
    first = simulated(3, 0)
    for seed in range(6):
        for found, expected in zip(simulated(3, seed, delay=2e-3), first, strict=True):
            assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_sent_in_fp8_have_the_bits_of_rows_rounded_where_they_arrive(size: int) -> None:
    World(size).run(check_wire)


@pytest.mark.parametrize("way", ["overlapped", "sequential"])
def test_fp8_rows_travel_as_bytes_and_results_as_they_are(way: Any) -> None:
    def one(overlap: Overlap) -> list[tuple[int, torch.dtype, int]]:
        sent: list[tuple[int, torch.dtype, int]] = []
        transport, begin = overlap.transport, overlap.transport.all_to_all_async

        def noted(use: int, like: torch.Tensor, splits: Any, width: int) -> Any:
            sent.append((use, like.dtype, width))
            return begin(use, like, splits, width)

        transport.all_to_all_async = noted  # type: ignore[method-assign]
        rows = torch.randn(4, 20).bfloat16().requires_grad_()
        offsets = torch.tensor([2, 4], dtype=torch.int32)
        gate_up, down = torch.randn(1, 8, 20).bfloat16(), torch.randn(1, 20, 4).bfloat16()
        spread_experts(rows, offsets, gate_up, down, overlap, way=way, wire=Row()).float().sum().backward()
        return sent

    # 20 elements padded to 32, one scale, padded to 48 bytes; then bfloat16 back, and both ways in backward
    plain = (torch.bfloat16, 20)
    wide = [(torch.uint8, 48), plain, plain, plain]
    for sent in World(2).run(one):
        assert [(dtype, width) for _, dtype, width in sent] == wide


def test_autocast_computes_in_its_dtype_and_gradients_come_in_the_weights() -> None:
    def one(overlap: Overlap) -> torch.Tensor:
        x, gate_up, down = torch.randn(6, 8), torch.randn(2, 8, 8, requires_grad=True), torch.randn(2, 8, 4)
        experts = torch.arange(6, dtype=torch.int32)[:, None] % 4
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows, offsets, _ = moe_permute(x, experts, 4)
            y = spread_experts(rows, offsets, gate_up, down, overlap, way="overlapped")
        y.float().sum().backward()
        assert gate_up.grad is not None and gate_up.grad.dtype is torch.float32 and gate_up.grad.any()
        return y

    assert all(y.dtype is torch.bfloat16 for y in World(2).run(one))


def test_no_gradients_travel_that_nobody_wants() -> None:
    """Frozen experts, and experts alone."""

    def one(overlap: Overlap) -> None:
        g = torch.Generator().manual_seed(overlap.rank)
        x, gate_up, down = (torch.randn(*shape, generator=g) for shape in ((6, 8), (2, 8, 8), (2, 8, 4)))
        experts = torch.arange(6, dtype=torch.int32)[:, None] % 4
        for wanted in ([x], [down], [gate_up, down]):
            found = []
            for way in ("overlapped", "sequential"):
                for t in wanted:
                    t.requires_grad_()
                y = moe_experts(x, torch.ones(6, 1), experts, gate_up, down, overlap, way=way)
                found.append(torch.autograd.grad(y.square().sum(), wanted))
                for t in wanted:
                    t.requires_grad_(False)
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b)

    World(2).run(one)


ERRORS = [
    ({"way": "soon"}, "way must be one of 'auto', 'overlapped', 'sequential', got 'soon'"),
    ({"capacity": 0}, "capacity must be None or an integer of at least 1, got 0"),
    ({"rows": torch.zeros(4)}, r"rows must be \[N, H\], got \[4\]"),
    ({"rows": torch.zeros(5, 6)}, "offsets must end at rows' 5 rows, got 4"),
    ({"offsets": torch.tensor([1, 2, 4], dtype=torch.int32)}, "num_experts must be a multiple of the 2 ranks, got 3"),
    ({"offsets": torch.tensor([2, 4])}, "offsets must be int32, got int64"),
    ({"gate_up": torch.zeros(1, 3, 6)}, r"gate_up must be \[E/W, 2I, H\], got \[1, 3, 6\]"),
    ({"gate_up": torch.zeros(2, 8, 6)}, r"gate_up must have shape \[1, 8, 6\] .*, got \[2, 8, 6\]"),
    ({"down": torch.zeros(1, 6, 8)}, r"down must have shape \[1, 6, 4\] .*, got \[1, 6, 8\]"),
    ({"down": torch.zeros(1, 6, 4).double()}, "down must have rows' dtype float32, got float64"),
    ({"wire": Tensor()}, r"wire must be None, Row\(\) or Block\(\), whose scales are a row's own, got tensor"),
    ({"wire": "fp8"}, r"wire must be None, Row\(\) or Block\(\), whose scales are a row's own, got fp8"),
    ({"overlap": None}, "overlap must be an Overlap, got None"),
]


@pytest.mark.parametrize(("change", "said"), ERRORS, ids=lambda value: value[:24] if isinstance(value, str) else "")
def test_errors_name_the_argument(change: dict[str, Any], said: str) -> None:
    def one(overlap: Overlap) -> None:
        arguments: dict[str, Any] = {
            "rows": torch.zeros(4, 6), "offsets": torch.tensor([3, 4], dtype=torch.int32),
            "gate_up": torch.zeros(1, 8, 6), "down": torch.zeros(1, 6, 4), "overlap": overlap, **change,
        }  # fmt: skip
        spread_experts(**arguments)

    with pytest.raises(ValueError, match=f"^spread_experts: {said}"):
        World(2).run(one)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((4, 8, 1), r"must divide model.num_experts \(6\), got 4"),
        ((2, 3, 1), r"must divide the ranks of parallel.shard \(3\), got 2"),
        ((2, 2, 2), "must be 1 with parallel.tensor 2, got 2"),
    ],
)
def test_a_run_is_told_why_its_experts_cannot_be_spread(sizes: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=f"^parallel.expert {said}$"):
        check_expert(configure(**MODELS["deepseek"]), *sizes)
    with pytest.raises(ValueError, match=r"^parallel\.expert must be 1 for model\.architecture llama, got 2$"):
        check_expert(configure(**MODELS["llama"]), 2, 2, 1)


def test_kernels_of_spread_experts_are_foreseen() -> None:
    """Fewer experts a launch: other kernels than those of all of them."""
    case = {"model": "deepseek", "train": {"precision": "bf16"}}
    configs = run_config(case, 2), run_config({**case, "parallel": {"expert": 2}}, 2)
    target = Target.parse("sm_90")
    whole, spread = ({spec.key for spec in record_step(config, target, world_size=2)} for config in configs)
    assert whole < spread
    wired = run_config({**case, "parallel": {"expert": 2}, "fp8": {"recipe": "row", "wire": "fp8"}}, 2)
    names = {spec.kernel.name for spec in record_step(wired, target, world_size=2)}
    assert {"_quantize_row_kernel", "_dequantize_kernel"} <= names


def test_they_are_not_said_to_be_in_the_layer_before() -> None:
    def one(overlap: Overlap) -> list[str]:
        x, experts = torch.ones(4, 2), torch.arange(4, dtype=torch.int32)[:, None] % 2
        said = []
        for way in ("overlapped", "sequential"):
            weights = torch.zeros(1, 4, 2, requires_grad=True), torch.zeros(1, 2, 2)
            all_gather_gemm(torch.zeros(4, 8), torch.zeros(2, 8), overlap, layer="layers.3.mlp.up")
            y = moe_experts(x, torch.ones(4, 1), experts, *weights, overlap, way=way)
            said.append(overlap.transport.layer)
            all_gather_gemm(torch.zeros(4, 8), torch.zeros(2, 8), overlap, layer="layers.3.mlp.up")
            y.sum().backward()
            said.append(overlap.transport.layer)
        return said

    assert World(2).run(one) == [[""] * 4] * 2


def test_what_is_compared_tells_ways_and_wanted_gradients() -> None:
    def one(overlap: Overlap) -> list[str]:
        said: list[str] = []
        overlap.transport.compare = lambda op, counts, operands: said.append(  # type: ignore[method-assign]
            f"{op}: {[t.requires_grad for t in operands if t is not None]}"
        )
        rows, offsets = torch.zeros(4, 6, requires_grad=True), torch.tensor([3, 4], dtype=torch.int32)
        spread_experts(rows, offsets, torch.zeros(1, 8, 6), torch.zeros(1, 6, 4), overlap, way="sequential")
        return said

    assert World(2).run(one) == [["spread_experts, way sequential: [True, False, False]"]] * 2


def test_backward_wants_an_open_overlap() -> None:
    def one(overlap: Overlap) -> None:
        x, experts = torch.ones(4, 2), torch.arange(4, dtype=torch.int32)[:, None] % 2
        weights = torch.zeros(1, 4, 2, requires_grad=True), torch.zeros(1, 2, 2)
        y = moe_experts(x, torch.ones(4, 1), experts, *weights, overlap)
        overlap.close()
        with pytest.raises(ValueError, match="overlap must be open until the last backward"):
            y.sum().backward()

    World(2).run(one)


def test_combine_wants_the_rows_that_were_dispatched() -> None:
    def one(overlap: Overlap) -> None:
        found = dispatch(torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int32), 2, overlap)
        combine(found.rows[1:], found, None, overlap)

    with pytest.raises(ValueError, match=r"^combine: rows must have \d+ rows"):
        World(2).run(one)


def test_a_rank_that_stops_is_named() -> None:
    said = []

    def one(overlap: Overlap) -> None:
        x, experts = torch.ones(4, 2), torch.arange(4, dtype=torch.int32)[:, None] % 3
        weights = torch.zeros(1, 4, 2), torch.zeros(1, 2, 2)
        try:
            moe_experts(x, torch.ones(4, 1), experts, *weights, overlap, way="overlapped")
            if overlap.rank == 1:
                raise KeyError("on rank 1")
            moe_experts(x, torch.ones(4, 1), experts, *weights, overlap, way="overlapped")
        except PeerTimeout as error:
            said.append(str(error))

    with pytest.raises(KeyError, match="on rank 1"):
        World(3).run(one)
    assert len(said) == 2 and all("rank 1 is gone" in text for text in said)
