"""The builder's end of a connection from a launcher.py."""

import socket
from dataclasses import dataclass

from powertrain.builder.memory_scheduler import CompileJob


@dataclass(eq=False)
class LauncherConnection:
    """A connection from a launcher.py, with the compiler that it runs or wants to run."""

    connection: socket.socket
    text: bytes = b""
    unit: CompileJob | None = None
    kills: int = 0  # out-of-memory kills since boot when the compiler started

    def receive(self) -> list[list[str]] | None:
        """The words of each request that has arrived; None at the end of the connection."""
        try:
            part = self.connection.recv(4096)
        except OSError:
            part = b""
        if not part:
            return None
        *lines, self.text = (self.text + part).split(b"\n")
        return [line.decode(errors="replace").split(" ") for line in lines]

    def send(self, word: str) -> None:
        try:
            self.connection.sendall(f"{word}\n".encode())
        except OSError:
            # it is gone; its end of file is read next
            pass
