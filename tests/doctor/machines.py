"""Machines that are not there: files under a folder, programs that answer from a table."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from powertrain.runtime.machine import Machine, Ran

QUERY = "--query-gpu=index,name,compute_cap,driver_version,memory.total"
A100 = "NVIDIA A100-SXM4-80GB, 8.0, 550.54.14, 81920"
H100 = "NVIDIA H100 80GB HBM3, 9.0, 550.54.14, 81559"
RTX_2080 = "NVIDIA GeForce RTX 2080, 7.5, 550.54.14, 8192"
RTX_3090 = "NVIDIA GeForce RTX 3090, 8.6, 550.54.14, 24576"


def machine(root: Path, *gpus: str, answers: dict[str, Ran | None] | None = None, **fields: object) -> Machine:
    """A machine whose nvidia-smi lists `gpus`; answers: {words of a command: what it says}."""
    table: dict[str, Ran | None] = dict(answers or {})
    if gpus:
        table.setdefault(QUERY, Ran(0, "\n".join(f"{index}, {gpu}" for index, gpu in enumerate(gpus))))
        table.setdefault("nvidia-smi -L", Ran(0, "\n".join(f"GPU {index}" for index in range(len(gpus)))))

    def run(command: Sequence[str], seconds: float) -> Ran | None:
        line = " ".join(command)
        return next((said for words, said in table.items() if words in line), None)

    site = root / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    made = Machine(root, {}, (site,), root / "work", root / "home", "python", run)
    return replace(made, **fields)  # type: ignore[arg-type]


def install(machine: Machine, name: str, version: str, *requires: str, files: Sequence[str] = ()) -> None:
    """Metadata of a package, and empty files of it."""
    info = machine.packages[0] / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    for file in files:
        path = machine.packages[0] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def install_torch(machine: Machine, version: str, cuda: str | None, *requires: str) -> None:
    install(machine, "torch", version, *requires)
    folder = machine.packages[0] / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")


def told(findings: object) -> str:
    return "\n".join(f"{f.level}: {f.message} | {' | '.join(f.evidence)} | {f.fix}" for f in findings)  # type: ignore[attr-defined]
