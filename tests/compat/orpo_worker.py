"""`python -m tests.compat.orpo_worker OUT`, one rank: LigerORPOTrainer's gradients under DDP and FSDP, over gloo."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.compat import orpo_stand_in as stand_in


def sharded(model: nn.Module, parts: tuple[str, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(model.get_submodule(part), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def older(model: nn.Module, parts: tuple[str, ...]) -> nn.Module:
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    for part in parts:
        setattr(model, part, wrap(model.get_submodule(part)))
    return wrap(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain, batch = stand_in.Model(), stand_in.made()
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel}
    for parts in ((), ("body",), ("body", "head")):
        wrappers[f"fsdp2 {parts}"] = partial(sharded, parts=parts)
        wrappers[f"fsdp1 {parts}"] = partial(older, parts=parts)
    module = stand_in.loaded(orpo=SimpleNamespace(ORPOTrainer=stand_in.Trainer))
    trainer = module.LigerORPOTrainer()
    expected, _ = stand_in.plain(trainer, plain, batch, -100)
    grads = torch.autograd.grad(expected, list(plain.parameters()))
    for name, wrap in wrappers.items():
        model = wrap(copy.deepcopy(plain))
        loss, _ = trainer.get_batch_loss_metrics(model, batch)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, msg=name)
        for one, other in zip(whole(model).values(), grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)
    folder.joinpath(f"{dist.get_rank()}.done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
