"""Backend of each op of a run, reason, share of a step: one step under torch.profiler; and late compiles."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from powertrain.ops.attention.backend_order import order_of
from powertrain.ops.attention.select import describe
from powertrain.runtime import dispatch, tracing

# the step of a process whose kernels are timed: the first two still load, allocate and choose
PROFILED = 3
PRODUCTS, ATTENTION, OTHERS = "matrix products", "attention", "other PyTorch operators"


@dataclass(frozen=True)
class KernelRow:
    """One op in one step.

    backend        "Triton, ours", "cuBLAS", "PyTorch" ...;  kernels: their names, the longest-running first
    why            reason of the choice
    milliseconds   of the device, all calls together;  share: of the whole step
    """

    op: str
    backend: str
    device: str
    kernels: tuple[str, ...]
    why: str
    calls: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class KernelTable:
    """One step's rows, the longest first, time outside operators last; its milliseconds, profiler included."""

    step: int
    device: str
    milliseconds: float
    rows: tuple[KernelRow, ...]

    @staticmethod
    def of(fields: dict[str, Any]) -> "KernelTable":
        """The table whose `asdict` came through JSON."""
        rows = (KernelRow(**{**row, "kernels": tuple(row["kernels"])}) for row in fields["rows"])
        return KernelTable(**{**fields, "rows": tuple(rows)})


class LateCompile(RuntimeError):
    """A kernel was compiled after the first step, and train.recompiles is "error"."""


class StepWatch:
    """Watches steps: profiles one of them, and reports kernels compiled after the first.

    emit         (kind, value) for "kernels" with a KernelTable and "note" with a text
    recompiles   "warn" emits a note, "error" raises LateCompile; compiles of evaluations between steps are ignored
    profiles     whether this process profiles at all
    The profiled step takes longer: about 1 us an operator on a CPU, and on a GPU a wait for it before and after.
    """

    def __init__(
        self, device: torch.device, recompiles: str, emit: Callable[[str, Any], None], *, profiles: bool = True
    ) -> None:
        self.device, self.recompiles, self.emit = device, recompiles, emit
        self._count = 0
        self._profiled = PROFILED if profiles else 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` of the run."""
        self._count += 1
        before = len(tracing.trace())
        # counted in this process, not by the run's number: a resumed run loads its kernels again
        if self._count != self._profiled:
            yield
        # torch allows one profiler at a time; the user's own comes first
        elif torch._C._autograd._profiler_enabled():
            self.emit("note", f"step {number}: no kernel table, another profiler is running")
            yield
        else:
            with _profiled(self.device, number) as tables:
                yield
            for table in tables:
                self.emit("kernels", table)
            if not tables:
                self.emit("note", f"step {number}: no kernel table, the profiler saw nothing run on {self.device}")
        if self._count > 1:
            self._report(late_compiles(tracing.trace()[before:]), number)

    def _report(self, late: list[str], step: int) -> None:
        for text in late:
            note = f"step {step}: compiled after the first step: {text}"
            if self.recompiles == "error":
                raise LateCompile(f"{note}. train.recompiles is error; warn lets the run go on")
            self.emit("note", note)


def late_compiles(events: Iterable[tracing.Event]) -> list[str]:
    """A line for each compiled kernel: name, constants, compile time, and the shapes of the launch that needed it."""
    events = list(events)
    # a compile is traced by key; the load that follows it knows the launch's shapes
    shapes = {e.facts["key"]: e.facts["shapes"] for e in events if e.kind == "load"}
    lines = []
    for event in events:
        if event.kind == "kernel" and event.facts["source"] == "compiled":
            tensors = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.get(event.facts["key"], {}).items())
            constants = ", ".join(f"{name}={value}" for name, value in event.facts["constants"].items())
            lines.append(f"{event.text} for {tensors or 'a recorded launch'} ({constants})")
    return lines


@contextmanager
def _profiled(device: torch.device, step: int) -> Iterator[list[KernelTable]]:
    """Profile the block; the yielded list holds the table afterwards, or nothing where CUPTI has no permission."""
    tables: list[KernelTable] = []
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)
    # on a GPU without the CPU's events, which would slow the host and so lengthen the gaps between kernels
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    started = time.perf_counter()
    profiler = profile(activities=[activity])
    with ExitStack() as stack:
        with _silent_kineto():
            profiler.start()
        stack.callback(_stop, profiler)
        with dispatch.named_spans(not is_gpu):
            yield tables
        if is_gpu:
            torch.cuda.synchronize(device)
        milliseconds = (time.perf_counter() - started) * 1e3
    events = profiler.events()
    events_of_kernels = _on_gpu(events) if is_gpu else _on_cpu(events)
    name = torch.cuda.get_device_name(device) if is_gpu else "CPU"
    if is_gpu and events_of_kernels:
        # by the GPU's own clock: the host's includes the profiler's start and the last wait
        milliseconds = _span(events)
    if events_of_kernels:
        tables.append(_table(events_of_kernels, name, step, milliseconds))


def _stop(profiler: profile) -> None:
    with _silent_kineto():
        profiler.stop()


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """Kineto (torch 2.13) writes "USDT: ... profiler_start" to stderr, past Python, into the middle of a bar."""
    with ExitStack() as stack:
        # a process without stderr has nothing to keep quiet
        with suppress(OSError):
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            stack.callback(os.dup2, stderr, 2)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        yield


class ProfiledKernel(NamedTuple):
    op: str
    backend: str
    kernel: str
    milliseconds: float


def _table(profiled: list[ProfiledKernel], device: str, step: int, milliseconds: float) -> KernelTable:
    groups: dict[tuple[str, str], list[ProfiledKernel]] = {}
    for item in profiled:
        groups.setdefault((item.op, item.backend), []).append(item)
    why = _reasons()
    rows = []
    for (op, backend), items in groups.items():
        spent = sum(item.milliseconds for item in items)
        share = spent / milliseconds if milliseconds else 0.0
        reason = why.get(op, _WHY.get(op, ""))
        rows.append(KernelRow(op, backend, device, _names(items), reason, len(items), spent, share))
    rows.sort(key=lambda row: -row.milliseconds)
    # shown as a row, so that shares add up to the step and idle time is not hidden
    rest = milliseconds - sum(row.milliseconds for row in rows)
    if rest > 0:
        waiting = "between kernels: the device waits for the host" if profiled and device != "CPU" else _HOST
        rows.append(KernelRow("outside operators", "-", device, (), waiting, 0, rest, rest / milliseconds))
    return KernelTable(step, device, milliseconds, tuple(rows))


_HOST = "Python, PyTorch's dispatch and autograd, reading data, and the profiler itself"
_WHY = {
    PRODUCTS: "of linear layers, and inside linear_cross_entropy: PyTorch's",
    OTHERS: "PyTorch's, in the model and the loop: residual sums, copies, zeros",
    "communication": "torch.distributed",
    "copies": "between host and device, and zeros",
}


def _names(items: list[ProfiledKernel]) -> tuple[str, ...]:
    """Each kernel's name once, the longest-running first."""
    spent: dict[str, float] = {}
    for _, _, kernel, milliseconds in items:
        spent[kernel] = spent.get(kernel, 0.0) + milliseconds
    return tuple(sorted(spent, key=lambda name: -spent[name]))


def _reasons() -> dict[str, str]:
    """Op -> why it is served as it is, of the decisions that were traced."""
    reasons = {}
    for event in tracing.trace():
        if event.kind == "dispatch":
            reasons[event.facts["op"]] = event.text.partition(": ")[2]
        elif _is_choice(event):
            problem, backend = event.facts["problem"], event.facts["backend"]
            reasons[ATTENTION] = f"{backend} serves {describe(problem)}; order: {order_of(problem).reason}"
        elif _is_compiled(event):
            op = _op_of(event.facts["module"])
            if op != ATTENTION:
                reasons[op] = f"its tensors are on a GPU; code for sm_{event.facts['arch']}"
    return reasons


def _is_compiled(event: tracing.Event) -> bool:
    # what was not compiled ahead is a kernel's event too, with an error and no kernel
    return event.kind == "kernel" and "module" in event.facts


def _op_of(module: str) -> str:
    return ATTENTION if ".attention." in module else module.rpartition(".")[2]


# kernels of others by the words in their names; the first that fits
_LIBRARIES = (
    (r"nccl", "communication", "NCCL"),
    (r"sdpa|flash|fmha|attention|compute_dot_do_o|convert_dq", ATTENTION, "a library's"),
    (r"nvjet|gemm|cutlass|cublas|gemv|splitk", PRODUCTS, "cuBLAS or CUTLASS"),
    (r"^mem(cpy|set)", "copies", "driver"),
    (r"^triton_", "torch.compile", "Inductor"),
)


def _on_gpu(events: Iterable[Any]) -> list[ProfiledKernel]:
    ours = {e.facts["kernel"]: _op_of(e.facts["module"]) for e in tracing.trace() if _is_compiled(e)}
    attention = _attention_backend()
    return [
        ProfiledKernel(*served(event.name, ours, attention), event.time_range.elapsed_us() / 1e3)
        for event in _kernels(events)
    ]


def _kernels(events: Iterable[Any]) -> list[Any]:
    return [event for event in events if event.device_type.name == "CUDA"]


def _attention_backend() -> str | None:
    """The backend that was chosen for attention last, with gradients."""
    return next((str(e.facts["backend"]) for e in reversed(tracing.trace()) if _is_choice(e)), None)


def _is_choice(event: tracing.Event) -> bool:
    """A backend was chosen for an attention that has a backward."""
    return event.kind == "attention" and "problem" in event.facts and event.facts["problem"].needs_grad


def served(name: str, ours: dict[str, str], attention: str | None) -> tuple[str, str, str]:
    """(op, backend, short name) of a GPU kernel. ours: kernel -> op; attention: the backend it was given to."""
    if name in ours:
        return ours[name], "Triton, ours", name
    # a kernel's name is all that the profiler gives for kernels that are not ours
    for pattern, op, backend in _LIBRARIES:
        if re.search(pattern, name.lower()):
            return op, attention or backend if op == ATTENTION else backend, _short(name)
    return OTHERS, "PyTorch", _short(name)


def _short(name: str) -> str:
    """A C++ kernel's name without its return type, namespaces and arguments."""
    plain = re.sub(r"^(void|static)\s+|<unnamed>::|\(anonymous namespace\)::", "", name)
    plain = plain.partition("(")[0].partition("<")[0]
    return (plain.rpartition("::")[2] or plain or name)[:60]


def _span(events: Iterable[Any]) -> float:
    """Milliseconds from the first kernel's start to the last one's end."""
    ranges = [event.time_range for event in _kernels(events)]
    return (max(r.end for r in ranges) - min(r.start for r in ranges)) / 1e3


_PRODUCTS_ON_CPU = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation"}


def _on_cpu(events: Iterable[Any]) -> list[ProfiledKernel]:
    """Time of every PyTorch operator itself, given to the op of ours around it, or around its forward."""
    operators = [e for e in events if e.name.startswith(("aten::", "c10d::", "gloo:"))]
    of_forward: dict[int, str] = {}
    for event in operators:
        # an operator that is not differentiated carries the number of the next one that is: the last one counts
        if event.sequence_nr >= 0 and not _backward_number(event):
            of_forward[event.sequence_nr] = _around(event)
    profiled = []
    for event in operators:
        op = _around(event) or of_forward.get(_backward_number(event) or -1, "")
        if event.name in _PRODUCTS_ON_CPU and not op:
            op = PRODUCTS
        elif "scaled_dot_product" in event.name:
            op = ATTENTION
        elif event.name.startswith(("c10d::", "gloo:")):
            op = "communication"
        profiled.append(ProfiledKernel(op or OTHERS, "PyTorch", event.name, event.self_cpu_time_total / 1e3))
    return profiled


def _around(event: Any) -> str:
    """The innermost op of ours, or the optimizer, whose span the event lies in; "" for none."""
    while event is not None:
        if event.name.startswith(dispatch.SPAN):
            return str(event.name.removeprefix(dispatch.SPAN))
        if event.name.startswith("Optimizer.step"):
            return "adamw"
        event = event.cpu_parent
    return ""


def _backward_number(event: Any) -> int | None:
    """The sequence number of the forward operator whose gradient the event computes; None outside backward."""
    while event is not None:
        if event.name.startswith("autograd::engine::evaluate_function"):
            return int(event.sequence_nr)
        event = event.cpu_parent
    return None
