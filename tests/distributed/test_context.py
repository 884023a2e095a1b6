"""Context parallelism on 2 and 4 gloo ranks gives, in float64, what one rank gives: results and every gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks

MOVING = ("ring", "all_gather")
MODES = (*MOVING, "all_to_all")
CAUSAL = {"is_causal": True}
# several documents: long, odd, shorter than there are pieces, of one token, empty
DOCUMENTS = [37, 1, 0, 3, 20, 2, 8]


def case(name: str, modes: tuple[str, ...] = MODES, more: tuple[str, ...] = (), **facts: Any) -> list[dict[str, Any]]:
    """A case of each mode; in `more` modes, which share the code that it is for, it is slow."""
    return [{"name": f"{name}-{mode}", "mode": mode, "slow": mode in more, **facts} for mode in (*modes, *more)]


RING, ALL_TO_ALL = ("ring",), ("all_to_all",)
CASES = [
    *case("causal", length=45, options=CAUSAL, batch=2),
    *case("full", length=45, batch=2),
    *case("fewer_tokens_than_pieces", length=3, options=CAUSAL),
    *case("window", MOVING, ALL_TO_ALL, length=61, options={"is_causal": True, "window_size": (9, 0)}),
    # the keys of most ranks are not seen, nor sent
    *case("narrow_window", MOVING, ALL_TO_ALL, length=64, options={"is_causal": True, "window_size": (2, 0)}),
    *case("window_both_ways", length=61, options={"window_size": (13, 5)}, batch=2),
    *case("window_ahead", RING, ("all_gather", "all_to_all"), length=61, options={"window_size": (-1, 4)}),
    *case("alibi", length=45, options=CAUSAL, alibi=True, batch=2),
    *case("alibi_full_window", RING, ("all_gather", "all_to_all"), length=45, options={"window_size": (11, 30)},
          alibi=True),
    *case("softcap_scale", ("all_gather",), ("ring", "all_to_all"), length=33,
          options={**CAUSAL, "softcap": 3.0, "scale": 0.5}),
    *case("sinks", length=33, options=CAUSAL, sinks=True, batch=2),
    *case("bhsd", RING, ("all_gather", "all_to_all"), length=29, options=CAUSAL, layout="bhsd", batch=2),
    *case("sbhd", ALL_TO_ALL, MOVING, length=29, options=CAUSAL, layout="sbhd", batch=2),
    *case("one_key_head", ("ring", "all_to_all"), ("all_gather",), length=29, options=CAUSAL, heads=[4, 1]),
    *case("three_key_heads", ALL_TO_ALL, MOVING, length=29, options=CAUSAL, heads=[12, 3]),
    *case("odd_heads", ("all_gather",), RING, length=29, options=CAUSAL, heads=[3, 3]),
    *case("chunks", ALL_TO_ALL, length=29, options={**CAUSAL, "chunk_size": 8}),
    *case("prefix", ALL_TO_ALL, length=29, options={**CAUSAL, "prefix_lengths": [7, 20]}, batch=2),
    *case("auto", ("auto",), length=45, options=CAUSAL),
    *case("documents", documents=DOCUMENTS, options=CAUSAL),
    *case("documents_full", RING, ("all_gather", "all_to_all"), documents=DOCUMENTS),
    *case("documents_sinks_softcap", documents=DOCUMENTS, options={**CAUSAL, "softcap": 3.0}, sinks=True),
    *case("documents_window", ("all_to_all", "auto"), documents=DOCUMENTS, options={"window_size": (5, 2)}),
    *case("documents_alibi", ALL_TO_ALL, documents=DOCUMENTS, options=CAUSAL, alibi=True),
]  # fmt: skip
QUICK = [case for case in CASES if not case["slow"]]


@pytest.mark.parametrize(
    "world_size, cases",
    [
        pytest.param(4, QUICK, id="4"),
        pytest.param(4, CASES, id="4-all", marks=pytest.mark.slow),
        pytest.param(2, CASES, id="2-all", marks=pytest.mark.slow),
    ],
)
def test_equals_one_rank(world_size: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    out = str(tmp_path / "errors")
    ranks = run_ranks(world_size, "-m", "tests.distributed.context_worker", json.dumps(cases), out)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout for rank in ranks)
    for rank in range(world_size):
        errors = torch.load(f"{out}.{rank}")
        bad = {c["name"]: e for c, e in zip(cases, errors, strict=True) if not max(e) < 1e-12}
        assert not bad, f"rank {rank}: errors of out, dq, dk, dv, dsinks: {bad}"


@pytest.mark.slow
def test_benchmark_runs() -> None:
    sizes = ["--tokens", "65", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--rounds", "1"]
    ranks = run_ranks(2, "-m", "benchmarks.parallel.context", *sizes)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout for rank in ranks)
    said = ranks[0].stdout
    assert all(name in said for name in ("one cpu alone", "all_gather", "ring", "all_to_all", "nothing sent"))


def test_models_are_the_same_spread(tmp_path: Path) -> None:
    """Loss, logits and gradients of models whose sequences two ranks share, dense, packed and of one token."""
    out = str(tmp_path / "errors")
    ranks = run_ranks(2, "-m", "tests.distributed.context_model_worker", out)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout for rank in ranks)
    for rank in range(2):
        errors = torch.load(f"{out}.{rank}")
        assert len(errors) == 11
        assert all(error < 1e-6 for error in errors.values()), errors  # of nan and a number max may be either
