"""Argument checks: every message names the op, the argument, the expectation and the value."""

from typing import NoReturn

import torch
from torch import Tensor

_PROXY = torch._C._TorchDispatchModeKey.PROXY
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def fail(op: str, argument: str, must: str, got: object) -> NoReturn:
    """Raise `ValueError: op: argument must ..., got ...`."""
    raise ValueError(f"{op}: {argument} must {must}, got {got}")


def require(condition: bool, op: str, argument: str, must: str, got: object) -> None:
    """`fail` unless the condition holds.

    With a tensor's size, or a number that was given, in the text of `must` write `if ...: fail(...)`: torch.compile
    makes a constant of a size that a text contains, and compiles again for each; of a symbolic number it makes no text.
    """
    if not condition:
        fail(op, argument, must, got)


def name(dtype: torch.dtype) -> str:
    """The dtype's name without the `torch.` in front."""
    return str(dtype).removeprefix("torch.")


def floating(op: str, **tensors: Tensor | None) -> None:
    """Each tensor given is float32, float16 or bfloat16; on the CPU float64 is accepted too."""
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            fail(op, argument, "be a tensor", described(tensor))
        if tensor.dtype in FLOATS:
            continue
        if tensor.dtype is torch.float64:
            if tensor.device.type == "cpu":
                continue
            fail(op, argument, "be float32, float16 or bfloat16 on a GPU (float64 works on the CPU)", "float64")
        fail(op, argument, "be float32, float16 or bfloat16", name(tensor.dtype))


def at_least_16_bits(op: str, **tensors: Tensor | None) -> None:
    """Each tensor given is floating point, and no FP8, with which PyTorch does not compute."""
    for argument, x in tensors.items():
        if x is None:
            continue
        tensor(op, argument, x)
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            fail(op, argument, "be floating point, of 16 bits or more", name(x.dtype))


def same_device(op: str, first: str, tensor: Tensor, **others: Tensor | None) -> None:
    for argument, other in others.items():
        if other is None:
            continue
        # an array of NumPy has a device too, "cpu"
        if not isinstance(other, Tensor):
            fail(op, argument, "be a tensor", described(other))
        if other.device != tensor.device:
            fail(op, argument, f"be on {first}'s device {tensor.device}", other.device)


def same_dtype(op: str, first: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Each tensor given has the dtype of `tensor`, the argument named `first`."""
    for argument, other in others.items():
        if other is not None and other.dtype is not tensor.dtype:
            fail(op, argument, f"have {first}'s dtype {name(tensor.dtype)}", name(other.dtype))


def described(value: object) -> str:
    """A value, short enough for an error."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a {name(value.dtype)} tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def tensor(op: str, argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        fail(op, argument, "be a tensor", described(value))


def shape(op: str, argument: str, tensor: Tensor | None, expected: tuple[int, ...] | torch.Size, why: str) -> None:
    """The tensor, if given, is one and has this shape."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        fail(op, argument, f"be a tensor of shape {list(expected)} ({why})", described(tensor))
    if tensor.shape != expected:
        fail(op, argument, f"have shape {list(expected)} ({why})", list(tensor.shape))


def last_dim(op: str, argument: str, value: object, size: int) -> None:
    """The value is a tensor whose last dim has this size."""
    if not isinstance(value, Tensor) or value.dim() < 1 or value.shape[-1] != size:
        fail(op, argument, f"be a tensor [..., {size}]", described(value))


def fail_stride(op: str, argument: str, tensor: Tensor) -> NoReturn:
    """Raise the error for a tensor whose last dim does not have stride 1; sparse tensors report stride 0."""
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        fail(op, argument, "be a dense tensor", f"a tensor of layout {layout}")
    fail(op, argument, "have a last dim of stride 1 (use .contiguous())", f"stride {tensor.stride(-1)}")


def integers(op: str, argument: str, tensor: Tensor | None) -> None:
    """The tensor, if given, is int32 or int64."""
    if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
        fail(op, argument, "be int32 or int64", name(tensor.dtype))


def indices(op: str, argument: str, tensor: Tensor | None, end: float, first: int = 0) -> None:
    """Values on the CPU, where the host can read them, are in [first, end). Those on a GPU, or of a trace, are not."""
    # compiling first: asking for a symbolic number of elements makes a guard
    if torch.compiler.is_compiling() or tensor is None or tensor.device.type != "cpu" or type(tensor) is not Tensor:
        return
    # a transform of torch.func has no values to read, and make_fx would record the read as part of the graph
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_dispatch_mode(_PROXY) is not None:
        return
    if not tensor.numel():
        return
    for worst in tensor.aminmax():
        if not first <= worst < end:
            fail(op, argument, f"be in [{first}, {end})", int(worst))


def pages(op: str, argument: str, table: Tensor, end: int, page_size: int, first: Tensor, last: Tensor) -> None:
    """As `indices` for [0, end), of the pages that hold positions first to last - 1 [rows] of each row of `table`."""
    if table.device.type != "cpu" or type(table) is not Tensor or torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return
    start = torch.arange(table.shape[1], device="cpu") * page_size
    # other numbers of a table may be anything
    is_read = (start + page_size > first[:, None]) & (start < last[:, None]) & (first < last)[:, None]
    indices(op, argument, table[is_read], end)


def sizes(op: str, **counts: int) -> None:
    """Each is at least 0."""
    for argument, count in counts.items():
        require(count >= 0, op, argument, "be at least 0", count)


def one_of(op: str, argument: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        fail(op, argument, f"be one of {', '.join(map(repr, choices))}", repr(value))
