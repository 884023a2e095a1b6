"""Stands in for a compiler: requests memory from the scheduler, runs the compiler, repeats it on request.

Started once a compile as `python -IS launcher.py SOCKETS COMPILER ARGUMENTS...`, so it imports little. The builder is
the nearest ancestor with a socket in SOCKETS (named after its process); without one the compiler simply runs, so that
a build folder which remembers this launcher works without us. Lines both ways:

    want PID NAME KIND ->          a compile begins; NAME is its source file; KIND is gcc (has a low-memory mode) or -
                       <- go       run it | go low_memory: in less memory | pass: a running compiler called it
    started PID        ->          the process group of the compiler
                       <- kill     end it; it will be run again
    ended STATUS BYTES ->          as os.waitstatus_to_exitcode gives it; the most that one of its processes took
                       <- again    wait for the next `go` | done: that was its result

End of file means that the builder is gone: the compiler is killed, paused or not.
"""

import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than the rest of this
    import typing

_SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c", ".C", ".c++", ".cp")
GONE = 1  # exit code when the builder is gone
# gcc collects its garbage when its heap has grown by 10% instead of 100%. pybind.cpp of TransformerEngine 2.20, gcc 12,
# -O3: 2.08 GiB instead of 2.69, 1.7 times the CPU time, the same bytes. Its own default is less only where the machine
# is small; it does not see a container's limit
LOW_MEMORY = ("--param", "ggc-min-expand=10")


def main(sockets: str, command: list[str]) -> int:
    name = source(command)
    builder = name and _builder(sockets)
    if not name or not builder:
        # not a compilation, or no supervisor
        os.execv(command[0], command)
    kind = "gcc" if is_gcc(command[0]) else "-"
    builder.sendall(f"want {os.getpid()} {name} {kind}\n".encode())
    return _Launch(builder, command).run()


def source(command: list[str]) -> str | None:
    """The name of the file that this call of a compiler compiles; None if it links or only answers a question."""
    sources = [argument for argument in command[1:] if argument.endswith(_SOURCES) and not argument.startswith("-")]
    return _plain(os.path.basename(sources[-1])) if sources else None


def _plain(name: str) -> str:
    """A name as one word of text, whatever bytes it is of."""
    text = name.encode(errors="replace").decode()[-200:]
    return "".join(letter if letter.isprintable() and letter != " " else "_" for letter in text)


def is_gcc(compiler: str) -> bool:
    """Whether this is gcc or g++, by the name of the file at the end of its links."""
    name = os.path.basename(os.path.realpath(compiler))
    return ("gcc" in name or "g++" in name) and "clang" not in name


def _builder(sockets: str) -> "socket.socket | None":
    pid = os.getppid()
    while pid > 1:
        path = f"{sockets}/{pid}"
        if os.path.exists(path):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(path)
                return connection
            except OSError:
                # left behind by a builder that was killed
                connection.close()
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            return None
    return None


class _Launch:
    def __init__(self, builder: socket.socket, command: list[str]) -> None:
        self.builder = builder
        self.command = command
        self.child = 0
        self.text = b""
        # a signal writes to this pipe, so that one select waits for signals and for the builder
        read, write = os.pipe()
        os.set_blocking(write, False)
        os.set_inheritable(write, False)
        self.woken = read
        signal.set_wakeup_fd(write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._forward)

    def run(self) -> int:
        while True:
            word = self._line()
            if word == "pass":
                self._become(self.command)
            if word not in ("go", "go low_memory"):
                return GONE
            compiler, *arguments = self.command
            status = self._compile([compiler, *(LOW_MEMORY if word == "go low_memory" else ()), *arguments])
            if status is None:
                return GONE
            self.builder.sendall(f"ended {status} {self.most}\n".encode())
            answer = self._line()
            # a kill that was sent before the builder read "ended"
            while answer == "kill":
                answer = self._line()
            if answer != "again":
                return _like(status)

    def _compile(self, command: list[str]) -> int | None:
        """The compiler's exit code, or minus the signal that ended it; None if the builder went away."""
        self.child = os.fork()
        if not self.child:
            # so that all of it can be ended at once
            os.setpgid(0, 0)
            self._become(command)
        self.builder.sendall(f"started {self.child}\n".encode())
        while True:
            ended, status, usage = os.wait4(self.child, os.WNOHANG)
            if ended:
                self.most = usage.ru_maxrss * 1024
                self.child = 0
                return os.waitstatus_to_exitcode(status)
            ready, _, _ = select.select([self.builder.fileno(), self.woken], [], [])
            if self.woken in ready:
                os.read(self.woken, 4096)
            if self.builder.fileno() in ready and self._line() in ("kill", None):
                self._forward(signal.SIGKILL)
                if not self.alive:
                    os.waitpid(self.child, 0)
                    return None

    def _become(self, command: list[str]) -> "typing.NoReturn":
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execv(command[0], command)

    alive = True
    most = 0  # bytes

    def _line(self) -> str | None:
        """The builder's next line; None, and `alive` is False, when it is gone."""
        while b"\n" not in self.text:
            try:
                part = self.builder.recv(4096)
            except OSError:
                part = b""
            if not part:
                self.alive = False
                return None
            self.text += part
        line, _, self.text = self.text.partition(b"\n")
        return line.decode()

    def _forward(self, number: int, *_: object) -> None:
        """A signal that ends us ends the compiler."""
        if not self.child:
            if number != signal.SIGKILL:
                # still waiting for memory
                os._exit(128 + number)
            return
        try:
            os.killpg(self.child, number)
            # a stopped process acts on a signal only when it is continued
            os.killpg(self.child, signal.SIGCONT)
        except ProcessLookupError:
            # its own group is not there yet
            os.kill(self.child, number)


def _like(status: int) -> int:
    """End as the compiler did, by the same signal if it was one."""
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
