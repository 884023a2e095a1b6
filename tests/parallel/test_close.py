"""The order in which shared memory is given back: the watch, which ends a wait for a rank that is gone, goes last."""

from types import SimpleNamespace
from typing import Any

import pytest

from powertrain.parallel.transport import symmetric
from powertrain.parallel.transport.symmetric import SymmetricTransport


@pytest.mark.parametrize("fails", ["never", "before", "while it synchronizes", "in the barrier"])
def test_the_watch_outlives_every_wait(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    watch = SimpleNamespace(failure="gone" if fails == "before" else None, close=lambda: did.append("watch"))

    def synchronize(device: Any) -> None:
        did.append("synchronize")
        if fails == "while it synchronizes":
            watch.failure = "gone"

    def barrier(group: Any) -> None:
        did.append("barrier")
        if fails == "in the barrier":
            raise RuntimeError("connection closed")

    monkeypatch.setattr(symmetric.torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(symmetric.dist, "barrier", barrier)
    transport = SymmetricTransport.__new__(SymmetricTransport)
    transport.__dict__.update(
        watch=watch, device=None, group=None, _shared={0: None}, _captured={None},
        peers=SimpleNamespace(close=lambda: did.append("peers")),
    )  # fmt: skip
    if fails == "in the barrier":
        with pytest.raises(RuntimeError, match="connection closed"):
            transport.close()
    else:
        transport.close()
    waits = {"never": ["synchronize", "barrier"], "before": [], "while it synchronizes": ["synchronize"]}
    assert did == [*waits.get(fails, ["synchronize", "barrier"]), "watch", "peers"]
    assert not transport._shared and not transport._captured
