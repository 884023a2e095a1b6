"""Ranks as threads: the functions' results under random delays, and a lost rank."""

import copy

import pytest
import torch

from powertrain.nn.tensor_parallel.vocab import vocab_parallel_linear_cross_entropy
from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.fp8_gather import fp8_all_gather_gemm
from powertrain.parallel.fp8_scatter import fp8_gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap, find
from powertrain.parallel.transport.heartbeat import PeerTimeout
from powertrain.parallel.transport.simulated import World, _SimulatedAllGather
from powertrain.quant import Row
from tests.distributed.overlap_worker import simulated


@pytest.mark.parametrize("size", [2, 3, 4])
def test_functions_and_gradients_are_one_ranks(size: int) -> None:
    for seed in range(2):
        simulated(size, seed)


@pytest.mark.parametrize("size", [1, 2])
def test_numbers_of_rows_are_checked_on_any_number_of_ranks(size: int) -> None:
    """One rank took any, and the program failed on two."""
    x, w = torch.randn(4, 16), torch.randn(16, 16)

    def refused(overlap: Overlap) -> None:
        for rows in ([3] * size, [4] * (size + 1)):
            with pytest.raises(ValueError, match="rows must"):
                all_gather_gemm(x, w, overlap, rows=rows)
            with pytest.raises(ValueError, match="rows must"):
                gemm_reduce_scatter(x, w, overlap, rows=rows)
            with pytest.raises(ValueError, match="rows must"):
                fp8_all_gather_gemm(x, [w], overlap, recipe=Row(), rows=rows)
            with pytest.raises(ValueError, match="rows must"):
                fp8_gemm_reduce_scatter(x, w, overlap, recipe=Row(), rows=rows)

    World(size).run(refused)


def test_results_have_the_same_bits_whoever_is_late() -> None:
    x = [torch.randn(4, 32, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    w = [torch.randn(8, 32, generator=torch.Generator().manual_seed(9 + rank)) for rank in range(3)]

    def layer(overlap: Overlap) -> torch.Tensor:
        y = all_gather_gemm(x[overlap.rank], w[overlap.rank], overlap)
        return gemm_reduce_scatter(y.bfloat16(), w[overlap.rank].T.contiguous().bfloat16(), overlap)

    first = World(3).run(layer)
    for seed in range(10):
        for found, expected in zip(World(3, seed=seed, delay=2e-3).run(layer), first, strict=True):
            assert torch.equal(found, expected)


def test_a_rank_that_stops_is_named() -> None:
    said = []

    def layer(overlap: Overlap) -> None:
        if overlap.rank == 1:
            raise KeyError("on rank 1")
        try:
            all_gather_gemm(torch.ones(2, 4), torch.ones(3, 4), overlap)
        except PeerTimeout as error:
            said.append(str(error))

    with pytest.raises(KeyError, match="on rank 1"):
        World(3).run(layer)
    assert len(said) == 2 and all("rank 1 is gone" in text for text in said)


def test_what_was_sent_may_be_written_to_once_a_call_is_made() -> None:
    world = World(3, seed=1, delay=0.01)

    def layer(overlap: Overlap) -> torch.Tensor:
        x = torch.full((2, 4), float(overlap.rank))
        y = all_gather_gemm(x, torch.eye(4), overlap)
        x.fill_(99.0)
        return y

    expected = torch.arange(3.0).repeat_interleave(2)[:, None].expand(6, 4)
    for found in [y for _ in range(3) for y in world.run(layer)]:
        assert torch.equal(found, expected)
    world.close()


def test_gradients_go_into_main_grad_under_autocast_too() -> None:
    world = World(2)
    flags = torch.arange(8) % 6

    def layer(overlap: Overlap) -> list[torch.Tensor]:
        up, down, head = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((6, 8), (8, 6), (3, 8)))
        for p in (up, down, head):
            p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
        with torch.autocast("cpu", torch.bfloat16):
            states = gemm_reduce_scatter(all_gather_gemm(torch.randn(4, 8), up, overlap), down, overlap)
            vocab_parallel_linear_cross_entropy(states, head, flags, overlap).backward()
        assert up.grad is None and down.grad is None and head.grad is None
        return [up.main_grad, down.main_grad, head.main_grad]  # type: ignore[attr-defined]

    for grads in world.run(layer):
        assert all(grad.abs().sum() > 0 for grad in grads)
    world.close()


def test_main_grads_are_among_what_a_lost_peer_poisons(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[torch.Tensor] = []
    finish = _SimulatedAllGather.finish

    def noted(self: _SimulatedAllGather, outputs: list[torch.Tensor]) -> None:
        finished.extend(outputs)
        finish(self, outputs)

    monkeypatch.setattr(_SimulatedAllGather, "finish", noted)
    world = World(2)

    def layer(overlap: Overlap) -> list[torch.Tensor]:
        up, down = torch.nn.Parameter(torch.randn(6, 8)), torch.nn.Parameter(torch.randn(8, 6))
        up.main_grad, down.main_grad = torch.zeros(6, 8), torch.zeros(8, 6)  # type: ignore[attr-defined]
        gemm_reduce_scatter(all_gather_gemm(torch.randn(4, 8), up, overlap), down, overlap).sum().backward()
        return [up.main_grad, down.main_grad]  # type: ignore[attr-defined]

    for grads in world.run(layer):
        assert all(any(grad is y for y in finished) for grad in grads)
    world.close()


def test_a_closed_overlap_is_named_and_closes_no_other() -> None:
    world = World(2)
    first, second = (Overlap.over(overlap.transport, "the same name") for overlap in world.overlaps)
    first.close()
    assert find("the same name") is second
    second.close()
    world.close()
    with pytest.raises(
        ValueError, match=r"overlap must be open until the last backward .*, got that of group simulated"
    ):
        all_gather_gemm(torch.ones(2, 4), torch.ones(3, 4), world.overlaps[0])


def test_hooks_on_what_is_saved_lose_no_main_grad() -> None:
    world = World(2)

    def layer(overlap: Overlap) -> list[torch.Tensor]:
        up, down = torch.nn.Parameter(torch.randn(6, 8)), torch.nn.Parameter(torch.randn(8, 6))
        up.main_grad, down.main_grad = torch.zeros(6, 8), torch.zeros(8, 6)  # type: ignore[attr-defined]
        with torch.autograd.graph.save_on_cpu():
            y = gemm_reduce_scatter(all_gather_gemm(torch.randn(4, 8), up, overlap), down, overlap)
        y.sum().backward()
        assert up.grad is None and down.grad is None
        return [up.main_grad, down.main_grad]  # type: ignore[attr-defined]

    for grads in world.run(layer):
        assert all(grad.abs().sum() > 0 for grad in grads)
    world.close()


def test_copies_of_a_model_share_its_overlap() -> None:
    world = World(2)
    layer = {"overlap": world.overlaps[0], "size": [2]}
    found = copy.deepcopy(layer)
    assert found["overlap"] is world.overlaps[0] and found["size"] is not layer["size"]
    world.close()
