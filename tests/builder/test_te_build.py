"""TransformerEngine's torch extension from its source distribution, in 3 GiB, with four jobs asked for.

33 C++ files, one of which takes 2.7 GiB; the bare command starts four at once. Needs a package index (a torch with
CUDA and its headers are 2.5 GB), nvcc, g++, 6 GB of disk and half an hour.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from powertrain.builder.history import History
from powertrain.builder.host import nvcc_at
from tests.builder.limit import under_limit

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("nvcc", "ninja", "g++")
LIMIT = 3 * 2**30
JOBS = 4
EXTENSION = "transformer_engine_torch==2.20.2"
MINUTES = 90

PINNED = re.search(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
OTHER_TRITON = PINNED is not None and version("triton") != PINNED[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
    pytest.mark.skipif(OTHER_TRITON, reason="has nothing to do with Triton: once is enough"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # 6 GB


@pytest.fixture
def environment(place: Path) -> dict[str, str]:
    """That of a user who has a torch with CUDA, the source distribution unpacked, and the headers of torch's wheels."""
    # a torch with CUDA, whatever wheels this machine prefers
    own = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    own |= {"PIP_CONFIG_FILE": os.devnull, "PATH": f"{place}/venv/bin:{os.environ['PATH']}"}
    own.pop("PYTHONPATH", None)
    venv.create(place / "venv", with_pip=True)
    torch = version("torch").partition("+")[0]
    pip = [f"{place}/venv/bin/python", "-m", "pip", "-q"]
    for words in (["install", f"torch=={torch}", "setuptools", "wheel"], ["download", "--no-deps", EXTENSION]):
        isolation = ["--no-build-isolation", "--no-binary=:all:"] if words[0] == "download" else []
        done = subprocess.run([*pip, *words, *isolation], cwd=place, env=own, capture_output=True, text=True)
        if done.returncode and re.search(r"No matching distribution|Connection|resolve|timed out", done.stderr):
            pytest.skip(f"no package index here: {done.stderr.strip().splitlines()[-1]}")
        assert not done.returncode, done.stderr
    (archive,) = place.glob("transformer_engine_torch-*.tar.gz")
    shutil.unpack_archive(archive, place)
    (wheels,) = place.glob("venv/lib/python3*/site-packages/nvidia")
    headers = ":".join(str(wheels / part / "include") for part in ("cu13", "cudnn", "nccl"))
    nvcc = nvcc_at(shutil.which("nvcc") or "")
    assert nvcc
    return own | {
        **{"CUDA_HOME": nvcc.home, "CPATH": headers, "MAX_JOBS": str(JOBS), "NVTE_CUDA_ARCHS": "90"},
        **{"NVTE_PYTORCH_FORCE_BUILD": "TRUE", "PIP_NO_CACHE_DIR": "1"},
        **{"XDG_DATA_HOME": str(place / "data"), "COLUMNS": "200"},
    }


def test_it_finishes_where_the_bare_command_is_killed(place: Path, environment: dict[str, str]) -> None:
    (source,) = (path for path in place.glob("transformer_engine_torch-*") if path.is_dir())
    command = [
        "nice",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
        "-w",
        str(place / "wheels"),
        ".",
    ]
    timeout = MINUTES * 60

    shutil.copytree(source, place / "bare")
    loud = [*command[:3], "-v", *command[3:]]
    bare = under_limit(loud, LIMIT, place / "bare.log", cwd=place / "bare", env=environment, timeout=timeout)
    assert bare.code and "cc1plus" in bare.killed, bare.output[-2000:]
    assert "Killed signal terminated program cc1plus" in bare.output
    print(f"bare: exit {bare.code} after {bare.seconds:.0f} s, peak {bare.peak / 2**30:.2f} GiB, killed {bare.killed}")

    governed = ["nice", sys.executable, "-m", "powertrain", "build", "--memory", "3G", "--", *command[1:]]
    inside = environment | {"PYTHONPATH": str(ROOT)}
    ours = under_limit(governed, LIMIT, place / "ours.log", cwd=source, env=inside, timeout=timeout)
    print(ours.output)
    assert ours.code == 0 and not ours.killed, ours.output[-4000:]
    assert list((place / "wheels").glob("transformer_engine_torch-*.whl"))
    history = History(place / "data/powertrain/builds/history.sqlite")
    (record,) = history.last()
    files = {file.name for file in source.rglob("*.cpp")}
    assert len(files) > 30 and files <= set(history.units(record.recipe, record.command))
    print(f"ours: {ours.seconds:.0f} s, CPU {ours.cpu:.0f} s, peak {ours.peak / 2**30:.2f} GiB of {LIMIT / 2**30:.0f}")
