"""Compiles that are killed, forked, starved and left: nothing hangs, nothing is lost, nothing stays behind."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from powertrain.runtime import settings
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.compile import worker
from powertrain.runtime.errors import CompileError, CompileTimeout
from tests.faults import forks
from tests.runtime import kernels
from tests.runtime.kernels import descendants_of, spec_of, start, wait_until
from tests.runtime.test_faults import _is_clean, compiled_here, fresh  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux processes")

_SLOW_WAYS = ("forkserver", "spawn", "inductor")
_QUICK_WAYS = tuple(way for way in forks.WAYS if way not in _SLOW_WAYS)


@pytest.mark.parametrize(
    "ways", [_QUICK_WAYS, *(pytest.param((way,), marks=pytest.mark.slow, id=way) for way in _SLOW_WAYS)]
)
def test_forked_children_leave_the_workers_alone_and_have_their_own(ways: tuple[str, ...], tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = kernels.environment(tmp_path / "store", TMPDIR=str(temporary), POWERTRAIN_COMPILE_TIMEOUT="60")
    command = [sys.executable, "-m", "tests.faults.forks", *ways]
    # what forks inherits pytest's capture otherwise
    ran = subprocess.run(command, cwd=kernels.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    expected = {"child": "compiled", "worker lives": True, "parent": "compiled"}
    assert found == [{"way": way, **expected} for way in ways], ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert wait_until(lambda: not list(temporary.glob("powertrain-*")), 20), list(temporary.iterdir())


# an exception ends the interpreter as the script's end does, and behind "kill -9" a second process ends so
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("end", "exception")), "daemon thread", "kill -9"]
)
def test_no_folder_of_a_worker_stays(way: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ends = {
        "end": "",
        "exception": "raise RuntimeError",
        # ends the process while a compile runs
        "daemon thread": "import threading, time; threading.Thread(target=lambda: compile.entry_for(spec_of(block=256))"
        ", daemon=True).start(); time.sleep(0.1)",
        "kill -9": "import os; os.kill(os.getpid(), 9)",
    }
    environment = kernels.environment(tmp_path / "store", TMPDIR=str(temporary))
    # a worker that is killed as it works leaves its folder to the next one's start
    for number, each in enumerate([way, "end"] if way == "kill -9" else [way]):
        script = (
            "from powertrain.runtime.compile import service as compile\nfrom tests.runtime.kernels import spec_of\n"
        )
        script += f"compile.entry_for(spec_of(block={128 << number}))\nassert compile.service()._idle\n{ends[each]}"
        command = [sys.executable, "-c", script]
        subprocess.run(command, cwd=kernels.ROOT, env=environment, capture_output=True, timeout=120)
    assert wait_until(lambda: not list(temporary.glob("powertrain-*")), 20)
    assert wait_until(lambda: not descendants_of(str(tmp_path)), 20)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), ValueError("embedded null byte"), SystemExit(3)]
)
def test_whatever_keeps_a_worker_from_starting_reaches_all_who_wait(
    error: BaseException,
    fresh: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: object) -> None:
        raise error

    compile_service.service().close()
    raised: list[BaseException] = []

    def want(block: int) -> None:
        try:
            compile_service.entry_for(spec_of(block=block))
        except CompileError as caught:
            raised.append(caught)

    with monkeypatch.context() as patched:
        patched.setattr(compile_service._Worker, "__init__", refuse)
        threads = [threading.Thread(target=want, args=(16 << i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [type(error).__name__ in str(each) for each in raised] == [True] * 4
    assert compile_service.entry_for(spec_of())[1] == "compiled", "the next one starts"


def _hangs(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """A worker that stands still from its start on: unread requests, or one that answers half a frame."""
    does = {"start": "", "reply": "import os; os.read(0, 4); os.write(1, b'\\x10\\x00'); "}[stage]

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            super().__init__([*command[:3], f"{does}import time; time.sleep(600)"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(compile_service.subprocess, "Popen", Popen)


@pytest.mark.parametrize("stage", ["start", "reply"])
def test_a_worker_that_hangs_ends_at_the_deadline(
    stage: str,
    fresh: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The request is larger than a pipe holds: writing it waits too."""
    compile_service.service().close()
    monkeypatch.setenv("POWERTRAIN_COMPILE_TIMEOUT", "1")
    monkeypatch.setattr(compile_service, "_LOG_AFTER", 0.5)
    settings.reload()
    with monkeypatch.context() as patched:
        _hangs(patched, stage)
        with pytest.raises(CompileTimeout, match="did not compile within 1 s"):
            compile_service.service().compile(spec_of(), "x" * (1 << 20))
    assert "compiling _twice_kernel for sm_80" in capfd.readouterr().err
    assert not compile_service.service()._idle and not compile_service.service()._all


def test_a_start_that_hangs_ends_at_the_deadline_and_serves_the_next(
    fresh: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_service.service().close()
    monkeypatch.setenv("POWERTRAIN_COMPILE_TIMEOUT", "1")
    settings.reload()
    release, make_folder = threading.Event(), worker.make_folder

    def stuck() -> Path:
        release.wait(60)
        return make_folder()

    spec = spec_of()
    with monkeypatch.context() as patched:
        patched.setattr(worker, "make_folder", stuck)
        with pytest.raises(CompileTimeout):
            compile_service.entry_for(spec)
        release.set()
        assert wait_until(lambda: len(compile_service.service()._idle) == 1), "it came too late for the one who asked"
    monkeypatch.setenv("POWERTRAIN_COMPILE_TIMEOUT", "100")
    settings.reload()
    (late,) = compile_service.service()._idle
    assert compile_service.entry_for(spec)[1] == "compiled" and compile_service.service()._idle == [late]


@pytest.mark.parametrize("interval", [0.0005, 0.003])
def test_frames_larger_than_the_pipe_among_signals(interval: float) -> None:
    """Both ways, with a signal that cuts writes and reads short as often as it can."""
    body, noise = random.Random(1).randbytes(3 << 20), random.Random(2)
    echo = "import functools, signal, sys; sys.path[:0] = [sys.argv[1]]\n"
    echo += "from powertrain.runtime.compile import worker as w\n"
    echo += "signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
    echo += "message = w.parse_frame(functools.partial(w._read, 0)); n = message['entry']; "
    echo += "w._write(1, w.frame(message, w._read(0, n)))"
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    asked = compile_service._Worker.__new__(compile_service._Worker)
    asked.process = subprocess.Popen(
        [sys.executable, "-c", echo, str(kernels.ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert asked.process.stdin and asked.process.stdout
    asked._in, asked._out = asked.process.stdin.fileno(), asked.process.stdout.fileno()
    for descriptor in (asked._in, asked._out):
        os.set_blocking(descriptor, False)
    request = {"text": "".join(noise.choices("abcä€😀", k=1 << 18)), "entry": len(body)}
    wait = compile_service._Wait(time.monotonic() + 60, "an echo")
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        asked._write(worker.frame(request, body), wait)
        reply = worker.parse_frame(lambda count: asked._read(count, wait))
        found = asked._read(reply["entry"], wait)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        asked.process.kill()
        asked.process.wait()
        asked.drop()
    assert reply == request and found == body


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_a_worker_that_goes_to_rest_just_as_it_is_asked(
    count: int,
    fresh: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had closed its pipes and was not gone yet, so that it was killed and said to have died for want of memory."""
    rest, random_moment = 0.2, random.Random(17)
    monkeypatch.setattr(worker, "IDLE_SECONDS", rest)
    compile_service.service().close()
    spec = spec_of()
    for _ in range(count):
        assert compile_service.entry_for(spec, again=True)[1] == "compiled"
        time.sleep(rest + random_moment.uniform(-0.02, 0.06))


def test_a_request_that_crosses_the_word_of_rest(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The same moment, held still: the worker has said that it rests, and lives on while it is asked."""
    rests = (
        "import sys, time; sys.path[:] = sys.argv[4:]; from powertrain.runtime.compile import worker as w; "
        "w._write(1, w.frame({'resting': True, 'entry': 0})); import os; os.close(1); time.sleep(0.3)"
    )
    first = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            first.append(command)
            super().__init__([*command[:3], rests, *command[4:]] if len(first) == 1 else command, **options)  # type: ignore[call-overload]

    compile_service.service().close()
    monkeypatch.setattr(compile_service.subprocess, "Popen", Popen)
    assert compile_service.entry_for(spec_of())[1] == "compiled" and len(first) == 2


def test_children_that_somebody_else_collects(fresh: Path) -> None:  # noqa: F811
    """os.wait() takes the worker's exit status: its process id may be another's by now, and is not signalled."""
    compile_service.entry_for(spec_of())
    (idle,) = compile_service.service()._idle
    os.kill(idle.process.pid, signal.SIGKILL)
    while os.wait()[0] != idle.process.pid:
        pass
    assert not idle._is_there()
    assert compile_service.entry_for(spec_of(block=256))[1] == "compiled"


def test_a_forked_child_cannot_end_a_worker(fresh: Path) -> None:  # noqa: F811
    compile_service.entry_for(spec_of())
    (idle,) = compile_service.service()._idle
    pid = os.fork()
    if not pid:
        try:
            idle.end()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert idle.process.poll() is None


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(count: int, fresh: Path, tmp_path: Path) -> None:  # noqa: F811
    """Of the whole process: nothing of it lives on, nothing half-written is found, and the next one compiles."""
    moment = random.Random(20261122)
    for number in range(count):
        process = start(fresh)
        threshold = moment.uniform(0.0, 4.0)
        wait_until(lambda p=process: p.poll() is not None, threshold)
        process.kill()
        process.communicate(timeout=60)
        assert wait_until(lambda: not descendants_of(str(tmp_path))), f"an orphan was left by number {number}"
        assert _is_clean(fresh)
    assert compiled_here() in ("compiled", "store")
