"""Who we are among the processes of a run, and the process groups they share."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from powertrain.train.config import RunConfig


@dataclass(frozen=True)
class Ranks:
    """rank, world_size     among all processes;  local_rank: on this host
    dp_rank, dp_size        among those that read different data
    mesh                    None: one process, nothing distributed
    checkpoint_group        a gloo group for checkpoints alone
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    mesh: DeviceMesh | None = None
    dp_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a value over the ranks that read different data; the tensor itself is changed."""
        if self.dp_group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.dp_group)
            value /= self.dp_size
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. For messages, not for speed."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True)
class Seat:
    """What the launcher says of this process, before it has met any other."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"


def seat() -> Seat:
    """The seat that the environment names; alone, on the first GPU or the CPU, if it names none."""
    return Seat(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def connect(seat: Seat, config: RunConfig) -> Ranks:
    """Join the others: process groups and the mesh that config.parallel asks for."""
    return Ranks(seat.device)


def disconnect(ranks: Ranks) -> None:
    """Leave the process groups, if there are any."""
    if ranks.world_size > 1:
        dist.destroy_process_group()
