"""`powertrain doctor --kernels`: a tile of every attention backend, on every GPU of this machine and its CPU."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from powertrain.ops.attention.select import Backend

TILE = (2, 256, 4, 64)  # batch, queries, heads, head dim: what is judged
LOAD = (4, 4096, 16, 128)  # what is timed on a GPU
CPU_LOAD = (1, 512, 4, 64)


def doctor(
    kernels: Annotated[bool, typer.Option("--kernels", help="run every attention backend on every device")] = False,
) -> None:
    """Check this machine. Exit code 1 if something errs.

    --kernels runs causal attention, forward and backward, by every backend that takes it, on every GPU and the CPU,
    judges it against float64, and times it. TFLOP/s count 3.5 forwards for forward and backward.
    """
    if not kernels:
        raise typer.BadParameter("say what to check: --kernels")
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    bad = 0
    table = Table("device", "backend", "verdict", title="causal attention, forward and backward", title_justify="left")
    for column in ("error", "allowed", "ms", "TFLOP/s"):
        table.add_column(column, justify="right")
    table.add_column("why not")
    with Live(table, console=console, vertical_overflow="visible"):
        for device in _devices():
            for row, ok in _rows(device):
                table.add_row(*map(escape, row), style=None if ok else "bold red")
                bad += not ok
            table.add_section()
    if bad:
        console.print(f"[bold red]{bad} backends err more than allowed, or failed")
        raise typer.Exit(1)
    gpus = len(_devices()) - 1
    where = f"{gpus} GPU{'s' if gpus > 1 else ''} and the CPU" if gpus else "the CPU; torch sees no GPU"
    console.print(f"every backend that takes this errs no more than allowed, on {where}")


def _devices() -> list["torch.device"]:
    import torch

    return [*(torch.device("cuda", n) for n in range(torch.cuda.device_count())), torch.device("cpu")]


def _rows(device: "torch.device") -> Iterator[tuple[tuple[str, ...], bool]]:
    """A row for each backend that is made for the device."""
    import torch

    from powertrain.ops.attention.explain import explain_attention
    from powertrain.ops.attention.select import BACKENDS

    gpu = device.type == "cuda"
    name = f"{device} {torch.cuda.get_device_name(device)}" if gpu else "cpu"
    verdicts = explain_attention(*_inputs(device, TILE), is_causal=True).columns[0].verdicts
    for verdict in verdicts:
        if verdict.reasons:
            yield (name, verdict.name, "-", "", "", "", "", str(verdict.reasons[0])), True
            continue
        try:
            yield _run(name, BACKENDS[verdict.name], device)
        except Exception as error:
            yield (name, verdict.name, "error", "", "", "", "", f"{type(error).__name__}: {error}"[:300]), False


def _inputs(device: "torch.device", shape: tuple[int, ...]) -> list[Any]:
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        dtype = torch.float16
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def _run(name: str, backend: "Backend", device: "torch.device") -> tuple[tuple[str, ...], bool]:
    from powertrain.ops.attention import attention
    from powertrain.ops.attention.masks import MaskSpec
    from powertrain.ops.attention.reference import attention_ref
    from powertrain.testing.numerics import errors

    def ours(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, is_causal=True, backend=backend.name)

    def plain(query: Any, key: Any, value: Any, upcast: bool = False) -> Any:
        return attention_ref(query, key, value, mask=MaskSpec(right=0), upcast=upcast)[0]

    def exact(query: Any, key: Any, value: Any) -> Any:
        return plain(query, key, value, upcast=True)

    tensors = dict(zip(("query", "key", "value"), _inputs(device, TILE), strict=True))
    worst = max(errors(ours, plain, exact, tensors), key=lambda e: e.ours / max(e.allowed, 1e-30))
    ms, flops = _time(ours, device)
    verdict = "PASS" if worst.ok else "WRONG"
    cells = (f"{worst.ours:.2g}", f"{worst.allowed:.2g}", f"{ms:.3f}", f"{flops / ms / 1e9:.3g}")
    return (name, backend.name, verdict, *cells, "" if worst.ok else worst.name), worst.ok


def _time(ours: Any, device: "torch.device") -> tuple[float, float]:
    """(ms, FLOPs) of a forward and backward."""
    import torch

    b, s, h, d = LOAD if device.type == "cuda" else CPU_LOAD
    tensors = _inputs(device, (b, s, h, d))
    grad = torch.randn_like(tensors[0])
    flops = 3.5 * 4 * b * h * s * s * d / 2

    def step() -> None:
        torch.autograd.grad(ours(*tensors), tensors, grad)

    if device.type == "cuda":
        from powertrain.testing.bench import measure

        with torch.cuda.device(device):
            return measure({"step": step}, seconds=0.1, rounds=20)["step"].ms, flops
    step()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3, flops
