"""`powertrain tune`: measure tile sizes of an op on this GPU, within a time limit that the user sets."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from powertrain.cli.check import Dtype
from powertrain.cli.paths import end_unwritten
from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from powertrain.ops.cases import Case


def tune(
    op: Annotated[str | None, typer.Argument(help="without it: the shipped tables", show_default=False)] = None,
    shape: Annotated[str | None, typer.Option(help="such as 16384x4096", show_default=False)] = None,
    dtype: Annotated[Dtype, typer.Option(help="of the inputs")] = Dtype.bf16,
    seconds: Annotated[float, typer.Option(help="stop after this long")] = 60.0,
) -> None:
    """Measure tile sizes of an op on this GPU and store those that are at least 2% faster than the shipped ones.

    They hold for this GPU's model only, and for sizes in the same power of two. Delete the file named at the end to
    go back.

    For attention also: which backend is how fast on this GPU, forward and backward, kept in a table that the selector
    reads before the shipped one. Half of the time is for tiles.

    \b
    powertrain tune                       where each op's shipped tiles were measured
    powertrain tune rms_norm --shape 8192x5120
    powertrain tune attention --seconds 300
    """
    import torch

    from powertrain.ops.cases import cases
    from powertrain.runtime import tuning

    # also nan, with which no time would ever be up
    if not 0 < seconds <= 1e6:
        raise typer.BadParameter(f"--seconds must be a number above 0 and at most 1000000, got {seconds:g}")
    console = Console()
    chosen = cases(op)
    if op is None:
        console.print(_shipped())
        return
    if not chosen and op != "attention":
        raise typer.BadParameter(
            f"unknown op {op!r}; known: {', '.join(sorted({c.op for c in cases()} | {'attention'}))}"
        )
    sizes = _sizes(shape) if shape else None
    if sizes:
        counts = sorted({len(case.full) for case in chosen})
        # an op's cases may have shapes of several kinds
        chosen = [case for case in chosen if len(case.full) == len(sizes)]
        if not chosen:
            raise typer.BadParameter(f"--shape must have {' or '.join(map(str, counts))} sizes for {op}, got {shape}")
    if not torch.cuda.is_available():
        typer.echo("tune needs a CUDA GPU; none is visible here", err=True)
        raise typer.Exit(2)
    device = torch.cuda.get_device_name()
    deadline = time.monotonic() + (seconds / 2 if op == "attention" and chosen else seconds)
    faster: dict[str, dict[str, tuning.Changes]] = {}
    for case in chosen:
        for name, key, changes, before, after in _tune_case(case, sizes or case.full, dtype, deadline):
            words = ", ".join(f"{field}={value}" for field, value in changes.items()) or "as shipped"
            console.print(f"{case.id:28} {name:24} {key:24} {before:.4f} -> {after:.4f} ms  {words}")
            if changes:
                faster.setdefault(name, {})[key] = changes
    if faster:
        about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        path = tuning.table_path(device)
        try:
            tuning.save(device, faster, about)
        except OSError as error:
            end_unwritten(f"the table {path}", error)
        console.print(f"kept in {path}", markup=False)
    elif chosen:
        console.print("nothing was found that is 2% faster than the shipped tiles")
    if op == "attention":
        from powertrain.cli.tune_attention import tune_attention

        tune_attention(console, dtype.torch, seconds / 2 if chosen else seconds)


def _sizes(shape: str) -> tuple[int, ...]:
    parts = shape.split("x")
    if not all(part.isdecimal() and 0 < len(part) < 10 and int(part) for part in parts):
        raise typer.BadParameter(f"--shape must be sizes such as 16384x4096, got {shape!r}")
    return tuple(map(int, parts))


def _tune_case(case: "Case", shape: tuple[int, ...], dtype: Dtype, deadline: float) -> list[tuple[Any, ...]]:
    """(plan function, key, changes, ms before, ms after) for every plan one forward and backward of the case makes."""
    import torch

    from powertrain.runtime import tuning
    from powertrain.runtime.errors import PowertrainError
    from powertrain.testing.bench import measure

    tensors = case.inputs(shape, dtype.torch, torch.device("cuda"))
    results = []
    with tuning.session():
        case.step(tensors)
        for (name, key), plan in list(tuning.met.items()):
            times: list[tuple[float, tuning.Changes]] = []
            for changes in tuning.neighbours(plan, tuning.shipped[name][1]):
                if times and time.monotonic() > deadline:
                    break
                tuning.forced[name] = changes
                try:
                    times.append((measure({"": lambda: case.step(tensors)}, seconds=0.1)[""].ms, changes))
                except (PowertrainError, RuntimeError):
                    # too much shared memory, say: not a choice
                    continue
            tuning.forced.pop(name)
            # none of them runs, the shipped one neither
            if not times:
                continue
            before, (after, changes) = times[0][0], min(times, key=lambda pair: pair[0])
            results.append((name, key, changes if after < 0.98 * before else {}, before, after))
    return results


def _shipped() -> Table:
    from powertrain.ops.cases import cases
    from powertrain.runtime import tuning

    # imports every op
    cases()
    table = Table("plan", "shipped values were measured")
    for name, (where, _) in sorted(tuning.shipped.items()):
        table.add_row(name, where)
    return table
