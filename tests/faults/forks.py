"""As a program: compile in this process, in forked ones, and here again; prints what came of it, in lines of JSON."""

import atexit
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from powertrain.runtime.compile import service as compile_service
from tests.runtime.kernels import spec_of

_ARCHS = (80, 86, 89, 90)
_NUMBERS = itertools.count()  # of kernels: each is compiled once


def _spec(number: int) -> compile_service.Spec:
    return spec_of(block=16 << number // 4, arch=_ARCHS[number % 4])


def compiled(number: int) -> str:
    return compile_service.entry_for(_spec(number))[1]


def _forked(number: int, inside: Callable[[int], str] = compiled) -> str:
    """In a child that ends as any Python process does, its inherited atexit included."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            os.write(write, inside(number).encode())
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()  # what it inherited; sys.exit would end only the thread
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        answer = said.read()
    os.waitpid(pid, 0)
    return answer


def _in_thread(number: int) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_forked(number)))
    thread.start()
    thread.join()
    return found[0]


def _nothing_compiled(number: int) -> str:
    return _forked(number, lambda number: "compiled")


def _own_session(number: int) -> str:
    def inside(number: int) -> str:
        os.setsid()
        return _forked(number)

    return _forked(number, inside)


def _process(number: int, method: str) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        return pool.submit(compiled, number).result()


class _Rows(torch.utils.data.Dataset[str]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return compiled(self.number)


def _loader(number: int) -> str:
    (batch,) = torch.utils.data.DataLoader(_Rows(number), num_workers=1, multiprocessing_context="fork")
    return batch[0]


def _while_another_thread_compiles(number: int) -> str:
    """Forks at random moments of a compile: before its worker starts, in its lowering, while it is waited for."""
    other = threading.Thread(target=compiled, args=(next(_NUMBERS),))
    other.start()
    time.sleep(0.01 * (number % 7))
    answer = _forked(number)
    other.join()
    return answer


def _while_others_hold_locks(number: int) -> str:
    """The child waits for no lock that a thread of its parent held."""
    from powertrain.runtime import recording, tracing

    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with recording.record("sm_90"), compile_service._lock, tracing._lock:
            held.set()
            leave.wait(60)

    spec, holder = _spec(number), threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    try:
        return _forked(number, lambda _: compile_service.entry_for(spec)[1])
    finally:
        leave.set()
        holder.join()


def _inductor(number: int) -> str:
    torch.compile(lambda x: (x.sin() + number).cos(), dynamic=False)(torch.randn(64))
    return "compiled"


WAYS: dict[str, Callable[[int], str]] = {
    "fork": _forked,
    "fork, nothing compiled": _nothing_compiled,
    "fork in a thread": _in_thread,
    "session of its own": _own_session,
    "multiprocessing": lambda number: _process(number, "fork"),
    "DataLoader": _loader,
    "while another thread compiles": _while_another_thread_compiles,
    "while others hold locks": _while_others_hold_locks,
    "forkserver": lambda number: _process(number, "forkserver"),
    "spawn": lambda number: _process(number, "spawn"),
    "inductor": _inductor,
}


def main(ways: list[str]) -> None:
    compiled(next(_NUMBERS))
    (worker,) = compile_service.service()._idle
    for way in ways:
        answer = WAYS[way](next(_NUMBERS))
        time.sleep(0.05)  # for a signal on its way
        alive = worker.process.poll() is None and worker in compile_service.service()._idle
        again = compiled(next(_NUMBERS))
        print(json.dumps({"way": way, "child": answer, "worker lives": alive, "parent": again}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
