"""Ranks as threads: the functions' results under random delays, and a lost rank."""

import pytest
import torch

from powertrain.parallel.functions import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.peers import PeerTimeout
from powertrain.parallel.simulate import World
from tests.distributed.overlap_worker import simulated


@pytest.mark.parametrize("size", [2, 3, 4])
def test_functions_and_gradients_are_one_ranks(size: int) -> None:
    for seed in range(2):
        simulated(size, seed)


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
