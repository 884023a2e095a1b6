"""Optimizers beside AdamW: Lion, SGD by torch, 8-bit AdamW by torchao, over float32 masters of this rank's shards.

Lion    u = sign(β1 m + (1 - β1) g);  p = p - lr * weight_decay * p - lr * u;  m = β2 m + (1 - β2) g
        (Chen et al., arXiv:2302.06675, algorithm 2)
SGD     torch.optim.SGD: g = g + weight_decay * p;  m = momentum * m + g;  p = p - lr * m
8 bits  torchao.optim.AdamW8bit (Dettmers et al., arXiv:2110.02861): moments in blocks of 256 values with a scale each
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from powertrain.runtime.extras import require
from powertrain.train.config.schema import OptimizerConfig

Groups = list[dict[str, Any]]
# of an optimizer.kind: its states that have their parameter's shape
KINDS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw8bit": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}


class Lion(torch.optim.Optimizer):
    """Lion, with a few launches for all parameters together; the formulas are above.

    params, lr, betas, weight_decay   as in torch.optim.AdamW; the paper's lr is 3 to 10 times smaller
    State per parameter: exp_avg.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            lr, (beta1, beta2) = group["lr"], group["betas"]
            grads: list[Any] = [p.grad for p in params]
            for p in params:
                self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            averages = [self.state[p]["exp_avg"] for p in params]
            updates = torch._foreach_mul(averages, beta1)
            torch._foreach_add_(updates, grads, alpha=1 - beta1)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, torch._foreach_sign(updates), alpha=-lr)
            torch._foreach_mul_(averages, beta2)
            torch._foreach_add_(averages, grads, alpha=1 - beta2)
        return loss


class TorchRule:
    """A torch optimizer over float32 masters of parameters in 16 bits, and over this rank's shard of sharded ones.

    groups   parameters and their weight_decay, as torch takes them
    make     groups of such tensors -> the optimizer
    kinds    names of its states that have a parameter's shape
    It has what AdamW has: param_groups, state (by parameter, whole shapes), init_state, step, found_inf.
    A step reads found_inf on the host: it waits for the device, which AdamW does not.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer], kinds: Iterable[str]) -> None:
        self.kinds = tuple(kinds)
        self.found_inf: Tensor | None = None
        self.masters = {p: nn.Parameter(_local(p.detach()).float()) for group in groups for p in group["params"]}
        self.inner = make([{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups])
        self.param_groups = self.inner.param_groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def init_state(self) -> None:
        """Make the state that the first step would make, and `state`, which shows it: a checkpoint is loaded into it.

        By a step without gradient and rate, which moves nothing; every torch optimizer makes its state in one.
        """
        if not self.inner.state and not self._is_meta():
            kept = [{name: group[name] for name in ("lr", "weight_decay")} for group in self.param_groups]
            self.set_rate(0.0)
            for group in self.param_groups:
                # SGD's decay is a part of the gradient, which its momentum would begin with
                group["weight_decay"] = 0.0
            for master in self.masters.values():
                master.grad = torch.zeros_like(master)
            self.inner.step()
            self.zero_grad()
            for state in self.inner.state.values():
                if "step" in state:
                    state["step"].zero_()
            for group, values in zip(self.param_groups, kept, strict=True):
                group.update(values)
        self.state = {p: self._shown(p, master) for p, master in self.masters.items()}

    def _shown(self, p: Tensor, master: Tensor) -> dict[str, Tensor]:
        state, shown = self.inner.state[master], {}
        if p.dtype is not torch.float32:
            shown["master"] = _like(p, master.detach())
        for kind in self.kinds:
            held = state.get(kind, torch.zeros_like(master))
            shown[kind] = _like(p, held.dequantize() if _is_quantized(held) else held)
        if "step" in state:
            shown["step"] = state["step"]
        return shown

    def loaded(self) -> None:
        """Call after `state` was filled: copies its dequantized moments back into the 8-bit ones."""
        for p, shown in self.state.items():
            held = self.inner.state[self.masters[p]]
            for kind in self.kinds:
                if _is_quantized(held.get(kind)):
                    held[kind].copy_(_local(shown[kind]))

    def set_rate(self, lr: float) -> None:
        """Set the rate of every group; torchao keeps it in a tensor."""
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = torch.full_like(group["lr"], lr)
            else:
                group["lr"] = lr

    @torch.no_grad()
    def step(self, *, grad_factor: Tensor | None = None) -> None:
        """Update by the gradients times grad_factor; nothing where found_inf is not 0."""
        if self.found_inf is not None and not self.found_inf.is_meta and bool(self.found_inf):
            return
        for p, master in self.masters.items():
            if p.grad is not None:
                grad = _local(p.grad).float()
                master.grad = grad if grad_factor is None else grad * grad_factor
        if self._is_meta():
            # only launches are recorded: these are torch's own kernels
            return
        self.inner.step()
        for p, master in self.masters.items():
            master.grad = None
            if p.dtype is not torch.float32:
                _local(p.detach()).copy_(master)

    def _is_meta(self) -> bool:
        return any(master.is_meta for master in self.masters.values())

    def zero_grad(self) -> None:
        for p, master in self.masters.items():
            p.grad = master.grad = None


def make_rule(groups: Groups, config: OptimizerConfig) -> TorchRule:
    """The rule of an `optimizer.kind` other than adamw. Raises MissingExtra where its package is not installed."""
    options: dict[str, Any] = {"lr": config.lr}
    if config.kind == "sgd":
        kinds = KINDS["sgd"] if config.momentum else ()
        return TorchRule(groups, lambda g: torch.optim.SGD(g, momentum=config.momentum, **options), kinds)
    options["betas"] = config.betas
    if config.kind == "lion":
        return TorchRule(groups, lambda g: Lion(g, **options), KINDS["lion"])
    require_package(config)
    from torchao.optim import AdamW8bit

    return TorchRule(groups, lambda g: AdamW8bit(g, eps=config.eps, **options), KINDS["adamw8bit"])


def require_package(config: OptimizerConfig) -> None:
    """Raise MissingExtra where the package of an `optimizer.kind` is not installed."""
    if config.kind == "adamw8bit":
        require("optimizers", "optimizer.kind adamw8bit")


def _is_quantized(state: Any) -> bool:
    return type(state).__name__ == "OptimState8bit"


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _like(p: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded as `p`."""
    if not isinstance(p, DTensor):
        return local
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )  # fmt: skip
