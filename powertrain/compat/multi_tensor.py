"""Arithmetic on lists of tensors, as Apex's amp_C and TransformerEngine's multi_tensor_* have it, by torch's foreach.

Every function takes (chunk_size, noop_flag, tensor_lists, ...); chunk_size is a hint of theirs. noop_flag is an int
tensor on the device: functions that look for values that are not finite set it, Adam and SGD do nothing where it is
set; LAMB, NovoGrad and Adagrad do not read it, as there. Nothing waits for the GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from powertrain.runtime import checks

Lists = Sequence[Sequence[Tensor]]


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """[inputs, outputs]: outputs = scale * inputs; noop_flag becomes 1 where an input is not finite."""
    sources, results = _lists("multi_tensor_scale", tensor_lists, 2)
    if not sources:
        return
    # before the results are written, which may be the inputs
    _flag(noop_flag, sources)
    # 16-bit inputs are scaled in float32, as Apex's kernel does
    wide = [x.float() if x.dtype.itemsize < 4 else x for x in sources]
    torch._foreach_copy_(list(results), torch._foreach_mul(wide, scale))


def multi_tensor_scale_tensor(chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: Tensor) -> None:
    """`multi_tensor_scale` by a tensor of one element, which stays on its device."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale.reshape(()))


def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """[x, y, outputs]: outputs = a * x + b * y; arg_to_check 0 or 1 looks at x or y only, -1 at both."""
    x, y, results = _lists("multi_tensor_axpby", tensor_lists, 3)
    if not x:
        return
    total = torch._foreach_mul([t.float() if t.dtype.itemsize < 4 else t for t in x], a)
    torch._foreach_add_(total, [t.to(s.dtype) for t, s in zip(y, total, strict=True)], alpha=b)
    _flag(noop_flag, {0: x, 1: y}.get(arg_to_check, [*x, *y]))
    torch._foreach_copy_(list(results), total)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """[tensors]: (their 2-norm together [1], each one's [n], empty unless per_tensor), float32, float64 with float64.

    noop_flag becomes 1 where the norm is not finite.
    """
    (tensors,) = _lists("multi_tensor_l2norm", tensor_lists, 1)
    # an empty list is legal there: parameter groups may be empty
    if not tensors:
        none = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
        return none, none[:0]
    # float32 sums of 16-bit squares
    wide = torch.float64 if any(x.dtype is torch.float64 for x in tensors) else torch.float32
    each = torch.stack([_over_shards(norm) for norm in torch._foreach_norm(list(tensors), 2, dtype=wide)])
    total = torch.linalg.vector_norm(each).reshape(1)
    noop_flag.logical_or_(~total.isfinite())
    return total, each if per_tensor else each.new_empty(0)


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """[inputs, outputs]: outputs = scale * inputs; the norms of the inputs, as there, by `multi_tensor_l2norm`."""
    sources, _ = _lists("multi_tensor_l2norm_scale", tensor_lists, 2)
    # before the outputs are written, which may be the inputs
    norms = multi_tensor_l2norm(chunk_size, noop_flag, [sources], per_tensor)
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)
    return norms


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """[tensors]: the norms of inv_scale * tensors, which stay as they are; noop_flag as of `multi_tensor_l2norm`."""
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    # the norm is homogeneous: no pass over scaled tensors
    total, each = total * inv_scale.abs(), each * inv_scale.abs()
    noop_flag.logical_or_(~total.isfinite())
    return total, each


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """[gradients, parameters, exp_avg, exp_avg_sq], with a fifth list the float32 master parameters, which are then
    updated.

    mode 0: weight_decay is added to the gradient (Adam); 1: decoupled (AdamW).
    """
    lists = len(tensor_lists)
    checks.require(lists in (4, 5), "multi_tensor_adam", "tensor_lists", "be 4 or 5 lists", lists)
    grads, parameters, means, squares = (list(tensors) for tensors in tensor_lists[:4])
    source = list(tensor_lists[4]) if lists == 5 else parameters
    # a tensor and not a bool: the decision stays on the device
    keep = noop_flag.reshape(()) == 0
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    # tensor by tensor: this form is for scripts that call amp_C themselves, powertrain.AdamW is one launch
    for g, p, m, v, w in zip(grads, parameters, means, squares, source, strict=True):
        wide = torch.float64 if w.dtype is torch.float64 else torch.float32
        g, x = g.to(wide), w.to(wide)
        g = g + weight_decay * x if mode == 0 else g
        mean = beta1 * m.to(wide) + (1 - beta1) * g
        square = beta2 * v.to(wide) + (1 - beta2) * g * g
        update = (mean / correction1) / ((square / correction2).sqrt() + epsilon)
        update = update + weight_decay * x if mode == 1 else update
        new = torch.where(keep, x - lr * update, x)
        m.copy_(torch.where(keep, mean, m.to(wide)))
        v.copy_(torch.where(keep, square, v.to(wide)))
        w.copy_(new)
        # with master weights the model's copy is rounded from the new master
        if w is not p:
            p.copy_(new)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam` of four lists whose lr, step and inv_scale are tensors of one element: no wait for the GPU.

    The gradients become inv_scale times themselves, unless noop_flag is set.
    """
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    _capturable("multi_tensor_adam_capturable", 4, noop_flag, tensor_lists, inv_scale, numbers)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam_capturable` with a fifth list, the float32 master parameters."""
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    _capturable("multi_tensor_adam_capturable_master", 5, noop_flag, tensor_lists, inv_scale, numbers)


def _capturable(
    op: str, count: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, numbers: tuple[Any, ...]
) -> None:
    """`multi_tensor_adam` of `count` lists; numbers are its arguments from lr on, lr and step as tensors."""
    checks.require(len(tensor_lists) == count, op, "tensor_lists", f"be {count} lists", len(tensor_lists))
    lr, beta1, beta2, epsilon, step, *rest = numbers
    grads = _unscaled(noop_flag, tensor_lists[0], inv_scale)
    # chunk_size 0: a hint that is not read
    numbers = (lr.reshape(()), beta1, beta2, epsilon, step.reshape(()).double(), *rest)
    multi_tensor_adam(0, noop_flag, [grads, *tensor_lists[1:]], *numbers)


def _unscaled(noop_flag: Tensor, grads: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """inv_scale times the gradients, float32; they are overwritten by it."""
    keep = noop_flag.reshape(()) == 0
    # not rounded to the gradients' dtype for the moments, as in Apex's kernel
    wide = [_wide(g) * inv_scale.reshape(()) for g in grads]
    for g, new in zip(grads, wide, strict=True):
        g.copy_(torch.where(keep, new.to(g.dtype), g))
    return wide


def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """A loss scale's update that backs off at the `hysteresis`th overflow in a row; all tensors have one element.

    In place, without a wait for the GPU; returns current_scale. found_inf above 0: an overflow. Growth by growth_factor
    after growth_interval steps without one, unless the scale would be infinite.
    """
    overflow = found_inf.reshape(current_scale.shape) > 0
    left = hysteresis_tracker.reshape(current_scale.shape) - overflow.to(hysteresis_tracker.dtype)
    backs_off = overflow & (left <= 0)
    steps = growth_tracker.reshape(current_scale.shape) + 1
    is_due = ~overflow & (steps == growth_interval)
    grown = current_scale * growth_factor
    grows = is_due & grown.isfinite()
    scale = torch.where(backs_off, current_scale * backoff_factor, torch.where(grows, grown, current_scale))
    growth_tracker.copy_(torch.where(overflow | is_due, 0, steps).reshape(growth_tracker.shape))
    hysteresis_tracker.copy_(torch.where(overflow, left, hysteresis).reshape(hysteresis_tracker.shape))
    return current_scale.copy_(scale)


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """[gradients, parameters, momentum buffers], with a fourth list copies of the parameters in another dtype."""
    lists = len(tensor_lists)
    checks.require(lists in (3, 4), "multi_tensor_sgd", "tensor_lists", "be 3 or 4 lists", lists)
    keep = noop_flag.reshape(()) == 0
    copies = tensor_lists[3] if lists == 4 else [None] * len(tensor_lists[0])
    for g, p, buffer, copy in zip(*tensor_lists[:3], copies, strict=True):
        # momentum buffers are float32 in mixed precision; 16-bit ones count in float32 too
        old = _wide(buffer)
        x, g = p.to(old.dtype), g.to(old.dtype) * scale
        g = g if wd_after_momentum else g + wd * x
        # PyTorch's rule too: the first step initializes the buffer with the gradient, undamped
        moving = g if first_run else momentum * old + (1 - dampening) * g
        step = (g + momentum * moving if nesterov else moving) if momentum else g
        step = step + wd * x if wd_after_momentum else step
        new = torch.where(keep, x - lr * step, x)
        if momentum:
            buffer.copy_(torch.where(keep, moving, old))
        p.copy_(new)
        if copy is not None:
            copy.copy_(new)


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """[gradients, parameters, exp_avg, exp_avg_sq]: one step of LAMB; the gradients stay as they are.

    Gradients are divided by global_grad_norm / max_grad_norm where that is above 1. A tensor's step is multiplied by
    |parameters| / |update|, without weight decay only with use_nvlamb. mode as of `multi_tensor_adam`. Values that are
    not finite reach the parameters, as there.
    """
    grads, parameters, means, squares = (list(tensors) for tensors in _lists("multi_tensor_lamb", tensor_lists, 4))
    clip = (global_grad_norm.reshape(()) / max_grad_norm).clamp(min=1)
    numbers = (lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging, mode, use_nvlamb)
    for g, p, m, v in zip(grads, parameters, means, squares, strict=True):
        x = _wide(p)
        for kept, new in zip((m, v, p), _lamb(g.to(x.dtype) / clip, x, m, v, *numbers), strict=True):
            kept.copy_(new)


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_lamb` whose lr, step, max_grad_norm, inv_scale are tensors of one element: no wait for the GPU.

    [gradients, parameters, exp_avg, exp_avg_sq], with a fifth list the second are float32 and the fifth their copies
    in another dtype. The gradients count inv_scale times; global_grad_norm and max_grad_norm are of them as they are.
    Where noop_flag is set, nothing changes. found_inf is not read, as there.
    """
    op, lists = "multi_tensor_lamb_mp", len(tensor_lists)
    checks.require(lists in (4, 5), op, "tensor_lists", "be 4 or 5 lists", lists)
    grads, parameters, means, squares = (list(tensors) for tensors in _lists(op, tensor_lists, lists)[:4])
    copies: Sequence[Tensor | None] = tensor_lists[4] if lists == 5 else [None] * len(grads)
    keep = noop_flag.reshape(()) == 0
    clip = (global_grad_norm.reshape(()) / max_grad_norm.reshape(())).clamp(min=1)
    # float64: 1 - beta ** step would lose digits in float32
    at = step.reshape(()).double()
    numbers = (
        lr.reshape(()),
        beta1,
        beta2,
        epsilon,
        at,
        bias_correction,
        weight_decay,
        grad_averaging,
        mode,
        use_nvlamb,
    )
    for g, p, m, v, copy in zip(grads, parameters, means, squares, copies, strict=True):
        x = _wide(p)
        g = g.to(x.dtype) * inv_scale.reshape(()).to(x.dtype) / clip.to(x.dtype)
        for kept, new in zip((m, v, p), _lamb(g, x, m, v, *numbers), strict=True):
            kept.copy_(torch.where(keep, new.to(kept.dtype), kept))
        if copy is not None:
            copy.copy_(torch.where(keep, p.to(copy.dtype), copy))


def _lamb(
    g: Tensor, x: Tensor, m: Tensor, v: Tensor, lr: float | Tensor, beta1: float, beta2: float, epsilon: float,
    step: int | Tensor, bias_correction: int, weight_decay: float, grad_averaging: int, mode: int, use_nvlamb: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """exp_avg, exp_avg_sq and parameter x after a step with the clipped gradient g, in x's dtype."""
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    g = g + weight_decay * x if mode == 0 else g
    taken = 1 - beta1 if grad_averaging else 1.0
    mean, square = beta1 * m.to(x.dtype) + taken * g, beta2 * v.to(x.dtype) + (1 - beta2) * g * g
    update = (mean / correction1) / ((square / correction2).sqrt() + epsilon)
    update = update + weight_decay * x if mode == 1 else update
    if use_nvlamb or weight_decay:
        size, change = x.norm(), update.norm()
        update = update * torch.where((size != 0) & (change != 0), size / change, 1.0)
    return mean, square, x - lr * update


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """[gradients, parameters, exp_avg] and grad_norms, float32 [n], running norms: one step of NovoGrad.

    norm_type 2: sqrt(beta2 * old² + (1 - beta2) * new²); 0, of the largest magnitude: beta2 * old + (1 - beta2) * new.
    moment_mode 0: division and weight decay are in the moment; 1: after it.
    """
    op = "multi_tensor_novograd"
    grads, parameters, means = (list(tensors) for tensors in _lists(op, tensor_lists, 3))
    checks.one_of(op, "norm_type", norm_type, (0, 2))
    kind = 2 if norm_type == 2 else torch.inf
    # tensor by tensor: float64 may stand beside float32
    new = torch.stack([norm.to(grad_norms.dtype) for norm in norms_of([_wide(g) for g in grads], kind)])
    if norm_type == 2:
        grad_norms.copy_((beta2 * grad_norms**2 + (1 - beta2) * new**2).sqrt())
    else:
        grad_norms.copy_(beta2 * grad_norms + (1 - beta2) * new)
    correction1, correction2 = (1 - beta1**step, (1 - beta2**step) ** 0.5) if bias_correction else (1.0, 1.0)
    taken = 1 - beta1 if grad_averaging else 1.0
    for g, p, m, norm in zip(grads, parameters, means, grad_norms.unbind(), strict=True):
        x, denominator = _wide(p), norm / correction2 + epsilon
        g = g.to(x.dtype)
        if moment_mode == 0:
            g = g / denominator + weight_decay * x
        mean = beta1 * m.to(x.dtype) + taken * g
        update = mean / correction1
        if moment_mode == 1:
            update = update / denominator + weight_decay * x
        m.copy_(mean)
        p.copy_(x - lr * update)


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """[gradients, parameters, sums of squares]: one step of Adagrad; mode as of `multi_tensor_adam`."""
    for g, p, total in zip(*_lists("multi_tensor_adagrad", tensor_lists, 3), strict=True):
        x = _wide(p)
        g = g.to(x.dtype) + (weight_decay * x if mode == 0 else 0.0)
        square = total.to(x.dtype) + g * g
        update = g / (square.sqrt() + epsilon) + (weight_decay * x if mode == 1 else 0.0)
        total.copy_(square)
        p.copy_(x - lr * update)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def norms_of(tensors: Sequence[Tensor], kind: float) -> Sequence[Tensor]:
    """The norm of each; 0 of a tensor without elements, where torch knows no largest magnitude."""
    norms = torch._foreach_norm([x if x.numel() else x.new_zeros(1) for x in tensors], kind)
    return [_over_shards(norm) for norm in norms]


def _over_shards(norm: Tensor) -> Tensor:
    """That of the whole tensor, where ranks have shards of it (DTensor)."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _lists(op: str, tensor_lists: Lists, count: int) -> Lists:
    checks.require(len(tensor_lists) == count, op, "tensor_lists", f"be {count} lists", len(tensor_lists))
    lengths = [len(tensors) for tensors in tensor_lists]
    checks.require(len(set(lengths)) == 1, op, "tensor_lists", "be of one length", lengths)
    return tensor_lists


def _flag(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    if tensors:
        # an inf or nan anywhere is one in the largest magnitude
        # one stacked test for all tensors
        finite = torch.stack([x.isfinite() for x in norms_of(tensors, torch.inf)])
        noop_flag.logical_or_(~finite.all())
