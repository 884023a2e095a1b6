"""Compile a list of specializations into a pack, ahead of time and in parallel, also on a machine without a GPU."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from powertrain.runtime.compile import kernel_store
from powertrain.runtime.compile.service import Spec, entry_for, service
from powertrain.runtime.compile.triton_compat import VERSION_TEXT
from powertrain.runtime.errors import CompileError

OnDone = Callable[[Spec, "kernel_store.Entry | CompileError", str], None]


@dataclass
class Report:
    """Result of a prebuild."""

    entries: list[kernel_store.Entry] = field(default_factory=list)
    failures: dict[str, CompileError] = field(default_factory=dict)  # "kernel for sm_N" -> why
    sources: dict[str, int] = field(default_factory=dict)  # "compiled", "store", "pack", ... -> how many

    def write_pack(self, path: Path) -> None:
        archs = sorted({entry.manifest["arch"] for entry in self.entries})
        kernel_store.write_pack(
            path, self.entries, {"triton": VERSION_TEXT, "archs": archs, "entries": len(self.entries)}
        )


def build(specs: Iterable[Spec], on_done: OnDone = lambda spec, result, source: None, *, again: bool = False) -> Report:
    """Compile every specialization once; one that fails does not stop the others. `on_done` follows in this thread.

    `again` compiles kernels that a store or pack already has.
    """
    # by key: several calls of a model ask for the same kernel
    wanted = {spec.key: spec for spec in specs}
    report = Report()
    # one more: it lowers while the others' workers compile
    with ThreadPoolExecutor(service().limit + 1) as threads:
        running = {threads.submit(entry_for, spec, again=again): spec for spec in wanted.values()}
        for future in as_completed(running):
            spec = running[future]
            try:
                entry, source = future.result()
            except CompileError as error:
                report.failures[spec.describe()] = error
                on_done(spec, error, "failed")
                continue
            report.entries.append(entry)
            report.sources[source] = report.sources.get(source, 0) + 1
            on_done(spec, entry, source)
    return report
