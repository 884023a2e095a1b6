"""`powertrain check`: properties of this machine, and every op's error and time compared with plain PyTorch's."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from powertrain.cli.generate import device_of
from powertrain.runtime.console import Console

if TYPE_CHECKING:
    import torch

    from powertrain.ops.cases import Case
    from powertrain.testing.numerics import Error

# elements of the largest input: under a second on a CPU; in float64 within the memory of an 8 GB GPU
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 20, 1 << 25


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"

    @property
    def torch(self) -> "torch.dtype":
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]


def check(
    ops: Annotated[list[str] | None, typer.Argument(help="the ops to run; all if none", show_default=False)] = None,
    dtype: Annotated[Dtype, typer.Option(help="of the inputs")] = Dtype.bf16,
    device: Annotated[str | None, typer.Option(help="such as cuda:1; default: the first GPU, or the CPU")] = None,
) -> None:
    """Describe this machine, then compare every op, forward and backward, with its float64 reference.

    The error may be twice plain PyTorch's in the same dtype plus one rounding; over that, the exit code is 1. Times are
    of forward and backward together; the ratio is plain PyTorch's time over ours.

    \b
    powertrain check
    powertrain check rms_norm rope --dtype fp32
    """
    from powertrain.ops.cases import cases

    try:
        where = device_of(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    chosen = [case for case in cases() if not ops or case.op in ops]
    unknown = set(ops or ()) - {case.op for case in chosen}
    if unknown:
        known = ", ".join(dict.fromkeys(case.op for case in cases()))
        raise typer.BadParameter(f"no op {', '.join(sorted(unknown))}; there are {known}")
    console = Console()
    console = console if console.is_terminal else Console(width=130)
    console.print(machine())
    console.print(_what_runs(where))
    table = Table("op", "shape", "worst", title=f"forward and backward, {dtype.value} on {where}", title_justify="left")
    for column in ("error", "PyTorch's", "allowed", "ms", "PyTorch's ms", "ratio"):
        table.add_column(column, justify="right")
    bad = 0
    with Live(table, console=console, vertical_overflow="visible"):
        for case in chosen:
            row, ok = _row(case, dtype.torch, where)
            table.add_row(*row, style=None if ok else "bold red")
            bad += not ok
    console.print()
    if bad:
        console.print(f"[bold red]{bad} of {len(chosen)} calls err more than allowed, or failed")
        raise typer.Exit(1)
    console.print(f"all {len(chosen)} calls within twice plain PyTorch's error plus one rounding")


def machine() -> Table:
    """Facts of this machine that matter to kernels."""
    import torch
    import triton

    from powertrain import __version__
    from powertrain.runtime.compile.kernel_store import default_root
    from powertrain.runtime.jobs import available_memory, usable_cores
    from powertrain.runtime.target import Target

    table = Table(show_header=False, title="this machine", title_justify="left")
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    table.add_row("powertrain", f"{__version__} with {versions}")
    (cores, cores_why), (memory, memory_why) = usable_cores(), available_memory()
    table.add_row(
        "CPU", f"{platform.machine()}, {cores} {cores_why}, {memory / 2**30:.1f} GiB available ({memory_why})"
    )
    for index in range(torch.cuda.device_count()):
        gpu = Target.of(torch.device("cuda", index))
        memory = torch.cuda.get_device_properties(index).total_memory
        sizes = f"{gpu.num_sms} SMs, {memory / 2**30:.0f} GiB, {gpu.bandwidth / 1e9:.0f} GB/s"
        table.add_row(f"GPU {index}", f"{gpu.name}: sm_{gpu.arch}, {sizes}")
    if not torch.cuda.device_count():
        table.add_row("GPU", "none that torch can see")
    table.add_row("kernel store", str(default_root()))
    return table


def _what_runs(where: "torch.device") -> str:
    from powertrain.runtime.settings import settings

    if where.type == "cuda":
        return "The kernels run on the GPU."
    if settings().interpret:
        return "The kernels run in Triton's interpreter: for their values, not their times."
    return (
        "On a CPU every op takes its PyTorch path, so times differ little (but for attention, which trades time for "
        "memory there); on a GPU it takes its kernel. "
        "To see the kernels' own values here: POWERTRAIN_INTERPRET=1 powertrain check"
    )


def shape_for(case: "Case", where: "torch.device") -> tuple[int, ...]:
    """The benchmark's shape, its largest dims halved until it suits the device; the tiny one in the interpreter."""
    from powertrain.runtime.settings import settings

    if where.type != "cuda" and settings().interpret:
        return case.tiny
    shape, limit = case.full, GPU_ELEMENTS if where.type == "cuda" else CPU_ELEMENTS
    while _largest_input(case, shape) > limit:
        largest = max(shape)
        shape = tuple(size // 2 if size == largest else size for size in shape)
    return shape


def _largest_input(case: "Case", shape: tuple[int, ...]) -> int:
    import torch

    inputs = case.inputs(shape, torch.bfloat16, torch.device("meta"))
    return max(tensor.numel() for tensor in inputs.values() if tensor is not None)


def _row(case: "Case", dtype: "torch.dtype", where: "torch.device") -> tuple[list[str], bool]:
    import torch

    from powertrain.testing.numerics import errors

    shape = shape_for(case, where)
    head = [f"{case.op} {case.label}".strip(), "x".join(map(str, shape))]
    try:
        # the judge draws the output gradients from seed 0
        torch.manual_seed(1)
        tensors = case.inputs(shape, dtype, where)
        worst = max(errors(case.run, case.plain, case.reference, tensors, slack=case.slack), key=_share)
        ours, plain = _times(_Step(case.run, tensors), _Step(case.plain, tensors), where)
    except Exception as error:
        return [*head, f"{type(error).__name__}: {error}"], False
    numbers = [f"{e:.2e}" for e in (worst.ours, worst.plain, worst.allowed)]
    times = [f"{ours:.3f}", f"{plain:.3f}", f"{plain / ours:.2f}"]
    return [*head, worst.name, *numbers, *times], worst.ok


def _share(error: "Error") -> float:
    """As a share of the allowed error; infinite for NaN."""
    if error.ours != error.ours:
        return float("inf")
    return error.ours / error.allowed if error.allowed else error.ours


@dataclass
class _Step:
    """Forward and backward of one call."""

    function: Callable[..., Any]
    tensors: "dict[str, torch.Tensor | None]"

    def __call__(self) -> None:
        import torch

        result = self.function(**self.tensors)
        outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
        leaves = [t for t in self.tensors.values() if t is not None and t.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs], allow_unused=True)


def _times(ours: _Step, plain: _Step, where: "torch.device") -> tuple[float, float]:
    """Milliseconds of each, taken in turns: medians on a GPU, the least on a CPU, which others use too."""
    if where.type == "cuda":
        import torch

        from powertrain.testing.bench import measure

        with torch.cuda.device(where):
            timings = measure({"ours": ours, "plain": plain})
        return timings["ours"].ms, timings["plain"].ms
    samples: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + 0.3
    while len(samples[0]) < 5 or (time.perf_counter() < deadline and len(samples[0]) < 50):
        for step, times in zip((ours, plain), samples, strict=True):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
    return min(samples[0]), min(samples[1])
