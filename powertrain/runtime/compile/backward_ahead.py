"""Starts compiling a call's backward kernels when its first forward kernel goes to a compile worker."""

import threading
from collections.abc import Callable


class _BackwardAhead(threading.local):
    # finds the kernels of the backward of this thread's call and has other threads compile them
    wanted: Callable[[], None] | None = None

    def begin(self) -> None:
        """Called ahead of each wait for a worker; does something once a call."""
        wanted, self.wanted = self.wanted, None
        if wanted is not None:
            wanted()


backward_ahead = _BackwardAhead()
