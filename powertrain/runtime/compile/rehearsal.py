"""What a thread does when the first kernel of a call of its goes to a compile worker: find the backward's kernels."""

import threading
from collections.abc import Callable


class _Rehearsal(threading.local):
    wanted: Callable[[], None] | None = None

    def begin(self) -> None:
        """Once a call: its other kernels compile beside this one then."""
        wanted, self.wanted = self.wanted, None
        if wanted is not None:
            wanted()


rehearsal = _Rehearsal()
