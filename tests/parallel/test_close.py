"""The order in which shared memory is given back: the watch, which ends a wait for a rank that is gone, goes last."""

from types import SimpleNamespace
from typing import Any

import pytest

from powertrain.parallel.transport import symmetric
from powertrain.parallel.transport.heartbeat import Heartbeat, Peer
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


def test_the_host_of_the_store_waits_after_the_failure_of_another() -> None:
    """It left at once: a rank that was later found no store, and named all ranks that had ended."""
    looks: list[str] = []
    kept = {"failure": b"", "gave up 1": b"boom"}

    class Store:
        def check(self, keys: list[str]) -> bool:
            looks.extend(keys)
            # rank 2 is late
            if looks.count("heard 2") == 2:
                kept["heard 2"] = b""
            return all(key in kept for key in keys)

        def get(self, key: str) -> bytes:
            return kept[key]

        def set(self, key: str, value: str) -> None:
            kept[key] = value.encode()

    everyone = [Peer(rank, rank, "h0", "m0", 100 + rank, 0.0) for rank in range(3)]
    peers = Heartbeat.__new__(Heartbeat)
    peers.__dict__.update(
        rank=0, here=everyone[0], all=everyone, _store_host=everyone[0], _store=Store(), _has_store=True, _failed=False,
        _reason=None, gone=lambda: [everyone[1]],
    )  # fmt: skip
    peers.wait_until_heard()
    assert not looks
    assert peers.reported_failure() == "rank 1 (host h0, process 101) gave up: boom"
    peers.wait_until_heard()
    assert looks.count("heard 2") == 2 and "heard 2" in kept
