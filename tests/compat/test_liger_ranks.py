"""Liger's functions over ranks: a sharded vocabulary, sharded experts; against plain PyTorch on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.compat.liger_kernel import sharded_vocabulary
from powertrain.compat.liger_kernel.transformers import moe
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.simulated import World
from tests.compat import liger_ranks_worker as worker
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.usefixtures("on_cpu")


class Group:
    """A process group's stand-in: a simulated rank."""

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap

    def size(self) -> int:
        return self.overlap.size


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sharded_vocabulary, moe):
        monkeypatch.setattr(module, "Overlap", lambda group: group.overlap)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("check", [worker.check_loss, worker.check_experts], ids=["loss", "experts"])
@pytest.mark.parametrize("size", [1, 3])
def test_values_and_gradients_are_one_ranks(check: Any, size: int) -> None:
    world = World(size)
    world.run(lambda overlap: check(Group(overlap), overlap.rank, overlap.size))
    world.close()


@pytest.mark.slow
def test_over_gloo(tmp_path: Path) -> None:
    for process in run_ranks(2, "-m", "tests.compat.liger_ranks_worker", str(tmp_path)):
        assert process.returncode == 0, process.stdout
    assert len(list(tmp_path.glob("*.done"))) == 2


def test_experts_of_one_process_need_no_group() -> None:
    worker.check_experts(None, 0, 1)


@pytest.mark.usefixtures("simulated")
def test_errors_of_the_loss_name_the_argument() -> None:
    call = sharded_vocabulary.liger_fused_linear_scaled_cross_entropy_tp
    x, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(4).long()
    world = World(1)
    (group,) = world.run(Group)
    with pytest.raises(ValueError, match="tp_group must be a group, or a default group be initialized, got None"):
        call(x, weight, target, None)
    with pytest.raises(ValueError, match="tiles_per_reduce must be one of 1, 2, 4, got 3"):
        call(x, weight, target, group, tiles_per_reduce=3)
    with pytest.raises(ValueError, match=r"input must have shape \[M, H\], got \[8\]"):
        call(x[0], weight, target, group)
    with pytest.raises(ValueError, match=r"target must have shape \[4\]"):
        call(x, weight, target[:3], group)
    with pytest.raises(ValueError, match=r"temperature must be above 0, got 0\.0"):
        call(x, weight, target, group, temperature=0.0)
    with pytest.raises(ValueError, match="weight must have x's dtype float32, got float16"):
        call(x, weight.half(), target, group)
    world.close()


E = 4
ERRORS = [
    ({"num_experts": 5}, "num_experts must be 4, all_B's 4 on 1 ranks, got 5"),
    ({"hidden_states": torch.zeros(3, 5, 7)}, r"all_B must have shape \[4, 6, 7\]"),
    ({"all_B": torch.zeros(6, 8)}, r"all_B must have shape \[E / W, I, H\], got \[6, 8\]"),
    ({"all_C": torch.zeros(E, 5, 8)}, r"all_C must have shape \[4, 6, 8\]"),
    ({"all_A": torch.zeros(E, 6, 8)}, r"all_A must have shape \[4, 8, 6\]"),
    ({"all_A": torch.zeros(E, 8, 6).half()}, "all_A must have hidden_states' dtype float32, got float16"),
    ({"expert_indices": torch.zeros(3, 4, 2).int()}, r"expert_indices must have shape \[3, 5\] and k"),
    ({"expert_indices": torch.zeros(3, 5, 2)}, "expert_indices must be an integer tensor, got float32"),
    ({"expert_weights": torch.zeros(3, 5, 1)}, r"expert_weights must have shape \[3, 5, 2\]"),
    ({"expert_indices": torch.full((3, 5, 2), 4)}, r"experts must be in \[0, 4\), got 4"),
]


@pytest.mark.parametrize(("change", "said"), ERRORS, ids=lambda value: value[:24] if isinstance(value, str) else "")
def test_errors_of_the_experts_name_the_argument(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "hidden_states": torch.zeros(3, 5, 8), "expert_indices": torch.zeros(3, 5, 2).int(),
        "expert_weights": torch.zeros(3, 5, 2), "all_B": torch.zeros(E, 6, 8), "all_C": torch.zeros(E, 6, 8),
        "all_A": torch.zeros(E, 8, 6), "num_experts": E,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        moe.LigerExpertParallelFusedMoe()(**{**given, **change})


def test_experts_of_another_dtype_than_autocast() -> None:
    x, weights = torch.randn(5, 8).half(), torch.rand(5, 2).half()
    gate, up, down = (torch.randn(shape).half() / 3 for shape in ((E, 6, 8), (E, 6, 8), (E, 8, 6)))
    given = (x, torch.randint(0, E, (5, 2)), weights, gate, up, down, E)
    layer = moe.LigerExpertParallelFusedMoe()
    expected = layer(*given)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(*given).float(), expected.float(), rtol=0.05, atol=0.05)
