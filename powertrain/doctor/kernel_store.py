"""Check of the kernel store: safe permissions, undamaged files, and a local file system."""

from collections.abc import Iterator

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.compile.kernel_store import Damaged, Store, default_root, distrust
from powertrain.runtime.errors import StoreError
from powertrain.runtime.machine import NETWORK_FILE_SYSTEMS, Machine


def kernel_store(machine: Machine) -> Iterator[Finding]:
    root = default_root()
    if not root.exists():
        yield Finding("ok", f"no kernel was compiled yet (they will be kept in {root})")
        return
    if reason := distrust(root):
        yield Finding(
            "problem", f"the kernel store is refused: {reason}", fix=f"chmod go-w {root}; or POWERTRAIN_STORE"
        )
    store = Store(root)
    keys = list(store.keys())
    damaged = {key: why for key in keys if (why := _damage(store, key))}
    size = sum(store.path(key).lstat().st_size for key in keys)
    if damaged:
        message = f"{len(damaged)} of {len(keys)} kernels are damaged; they would be set aside and compiled again"
        evidence = tuple(f"{store.path(key)}: {why}" for key, why in damaged.items())
        yield Finding("warning", message, evidence, "powertrain doctor --fix", lambda: _set_aside(store, damaged))
    else:
        yield Finding("ok", f"{len(keys)} kernels, {size / 2**20:.1f} MiB, all whole, in {root}")
    kind, point = machine.file_system(root)
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"the kernel store lies on {kind} ({point}): locks between hosts depend on its server"
        yield Finding(
            "warning", message, fix="set POWERTRAIN_STORE to a folder on a local disk; ship kernels as a pack"
        )


def _damage(store: Store, key: str) -> str | None:
    try:
        return None if store.read(key) else "it cannot be read"
    except (Damaged, StoreError) as error:
        return str(error)


def _set_aside(store: Store, damaged: dict[str, str]) -> str:
    for key, why in damaged.items():
        store.quarantine(key, why)
    return "\n".join(f"{store.path(key)}: renamed into {store.root / 'quarantine'}" for key in damaged)


CHECKS = (Check("kernel-store", "are Powertrain's compiled kernels undamaged?", kernel_store),)
