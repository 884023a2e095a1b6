"""`powertrain explain fp8 run.yml`: expected effects of FP8 on a run's layers and experts; the GPU may be absent."""

from typing import TYPE_CHECKING

import typer
from rich.table import Table

from powertrain.cli.lint import read_run, sized
from powertrain.runtime.console import Console
from powertrain.runtime.target import Target

if TYPE_CHECKING:
    from powertrain.train.explain_fp8 import Line, SentRows

_COLUMNS = (
    "layers", "N x K", "recipe", "y", "dx", "dW", "quantize", "FP8 ms", "bf16 ms", "saved MiB", "bf16 MiB", "wire MiB",
)  # fmt: skip

_RATES = """\
Expected times of one layer, forward and backward, from rates measured on one H200: layers at 16384x14336x4096,
experts at 32768 rows for 32 experts of 4096x7168"""


def show(files: list[str], arch: list[str]) -> None:
    """Print a table for each GPU; the command ends with 2 if there is nothing to explain."""
    run = read_run(files, world_size=None)
    from powertrain.train.explain_fp8 import explain, sent_rows, shard_ranks

    # wider than most terminals, since a table of twelve columns that wraps cannot be read
    console, (config, _) = Console(width=150, highlight=False, soft_wrap=False), sized(run, None)
    for name in arch:
        try:
            target = Target.parse(name)
            lines = explain(config, target)
        except ValueError as error:
            Console(stderr=True, soft_wrap=True).print(str(error), markup=False, highlight=False)
            raise typer.Exit(2) from None
        tokens = config.train.micro_batch_size * config.train.seq_length
        console.print(f"{target.name}: fp8.recipe {config.fp8.recipe}, {tokens} tokens in a micro-batch")
        if any(line.expected is not None for line in lines):
            console.print(_RATES)
        console.print(_table(lines))
        console.print(_sums(lines, target))
        console.print(_wire(lines, shard_ranks(config), assumed=config.parallel.shard <= 0))
        for sent in sent_rows(config):
            console.print(_sent(sent), soft_wrap=True)


def _table(lines: "tuple[Line, ...]") -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for line in lines:
        row = [f"{line.name}" + (f" ({line.count})" if line.count > 1 else ""), "{}x{}".format(*line.shape)]
        plain, fp8 = line.wire
        wire = f"{plain / 2**20:.0f}" if fp8 is None else f"{fp8 / 2**20:.0f}"
        if line.why and line.expected is None:
            table.add_row(*row, f"{line.recipe}: {line.why}", *[""] * 8, wire)
            continue
        e = line.expected
        figures = (
            [""] * 6 if e is None else [f"{ms:.3f}" for ms in (e.fprop, e.dgrad, e.wgrad, e.quantize, e.total, e.bf16)]
        )
        memory = [""] * 2 if e is None else [f"{size / 2**20:.0f}" for size in (e.saved, e.saved_bf16)]
        slower = "" if e is None or e.wins else ", slower than bf16 with so few tokens"
        recipe = f"{line.recipe}: {line.why}" if line.why else line.recipe + slower
        table.add_row(*row, recipe, *figures, *memory, wire)
    return table


def _sums(lines: "tuple[Line, ...]", target: Target) -> str:
    counted = [line for line in lines if line.expected is not None and not line.why]
    quantized = sum(line.count for line in lines if not line.why)
    if not counted:
        # an expectation from another arch's rates would look like a measurement
        why = "" if not quantized else f": no rate was measured on sm_{target.arch}"
        return f"{quantized} layers in FP8{why}\n"
    fp8 = sum(line.count * line.expected.total for line in counted if line.expected)
    bf16 = sum(line.count * line.expected.bf16 for line in counted if line.expected)
    return f"{quantized} layers in FP8: {fp8:.2f} ms a micro-batch, {bf16:.2f} in bf16\n"


def _wire(lines: "tuple[Line, ...]", ranks: int, assumed: bool) -> str:
    if ranks == 1:
        return "wire: one rank has every weight, nothing is gathered\n"
    plain = sum(line.count * line.wire[0] for line in lines)
    sent = sum(line.count * (line.wire[0] if line.wire[1] is None else line.wire[1]) for line in lines)
    fp8 = sum(line.count for line in lines if line.wire[1] is not None)
    whole = f"{plain / 2**20:.0f} MiB in 16 bits" + (f", {sent / 2**20:.0f} MiB with fp8.wire fp8" if fp8 else "")
    who = f"{ranks} ranks" + (" (assumed, as parallel.shard is not set)" if assumed else "")
    return f"wire: {who} gather {fp8} of these weights in FP8; all weights once: {whole}\n"


def _sent(sent: "SentRows") -> str:
    """Bytes of the rows that go to experts on other ranks, in 16 bits and in FP8."""
    (plain, plain_all), layers = sent.bytes_(False), "1 layer" if sent.count == 1 else f"{sent.count} layers"
    lines = [
        f"rows to {sent.name} of {layers}, over {sent.ranks} ranks: a rank sends {sent.rows} to others on average, if "
        "tokens choose every expert equally often",
        f"  in the model's dtype: {sent.plain} bytes a row, {plain / 2**20:.0f} MiB a forward; with results and "
        f"backward {plain_all / 2**20:.0f} MiB",
    ]
    if sent.fp8 is None:
        return "\n".join([*lines, "  in FP8: by row and by block only, whose scales are a row's own\n"])
    fp8, fp8_all = sent.bytes_(True)
    state = "as this config sends them" if sent.is_fp8 else "with fp8.wire fp8"
    lines.append(
        f"  in FP8 with scales, {state}: {sent.fp8} bytes a row, {fp8 / 2**20:.0f} MiB a forward; with results and "
        f"backward, which are sent in the model's dtype, {fp8_all / 2**20:.0f} MiB\n"
    )
    return "\n".join(lines)
