"""One py3-none-any wheel: its metadata, and a user's first commands, with its requirements alone."""

import email
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (find_spec("build") and find_spec("hatchling")), reason="needs build, hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    # 0.7 of its 2 MB are the history of other libraries' names, which diagnose reads
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 5 << 19
    names = zipfile.ZipFile(wheel).namelist()
    suffixes = {Path(name).suffix for name in names if name.startswith("powertrain/")}
    assert suffixes <= {".py", ".typed", ".yml", ".j2", ".json"} and "powertrain/py.typed" in names
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"powertrain"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "powertrain/train/quickstart.yml" in names
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "powertrain = powertrain.__main__:main" in zipfile.ZipFile(wheel).read(entry).decode()


def test_metadata(wheel: Path) -> None:
    """An index refuses unknown classifiers, and resolves no link between files of a long description."""
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))))
    for field in ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Author", "Keywords"):
        assert metadata[field], field
    trove = pytest.importorskip("trove_classifiers")
    classifiers = metadata.get_all("Classifier") or []
    assert classifiers and set(classifiers) <= trove.classifiers
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = str(metadata.get_payload())
    assert "pip install powertrain" in description.split("```")[1]
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert all(link.startswith("https://") for link in links), links
    assert {"train", "data", "all"} <= set(metadata.get_all("Provides-Extra") or [])


def _required(wheel: Path, extra: str) -> set[str]:
    """The distributions that the wheel with an extra requires, those that they require included."""
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))))
    waiting = [(Requirement(text), extra) for text in metadata.get_all("Requires-Dist") or []]
    found: set[str] = set()
    while waiting:
        requirement, asked = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": asked}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or name == "powertrain":
            continue
        found.add(name)
        inner = [(Requirement(text), "") for text in distribution(name).requires or []]
        for each in requirement.extras:
            inner += [(wanted, each) for wanted, _ in inner]
        waiting += inner
    return found


def _link(site: Path, names: set[str]) -> None:
    """Links to distributions of this environment."""
    for name in names:
        found = distribution(name)
        for top in {Path(str(file)).parts[0] for file in found.files or ()} - {".."}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and links to the packages that it requires, and no other package."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    _link(next(folder.glob("lib/python*/site-packages")), _required(wheel, ""))
    # --no-compile: the commands below import a part of the package
    options = ["--no-deps", "--no-index", "--no-compile", "-q"]
    install = ["-m", "pip", "--python", str(folder), "install", *options, str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def extra(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the packages that the extra `train` adds. Making a second environment took 4 s."""
    folder = tmp_path_factory.mktemp("extra")
    _link(folder, _required(wheel, "train") - _required(wheel, ""))
    return folder


def _run(command: list[str], folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "POWERTRAIN_INTERPRET")}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def test_ops_and_help_need_no_extra(bare: Path, tmp_path: Path) -> None:
    version = _run([str(bare / "powertrain"), "--version"], tmp_path)
    assert version.returncode == 0 and re.fullmatch(r"powertrain \d+\.\d+\.\d+\S*\n", version.stdout)
    written = _run([str(bare / "powertrain"), "init", "my run.yml"], tmp_path)
    assert written.returncode == 0 and "powertrain train 'my run.yml'" in written.stdout, written.stderr
    code = (
        "import torch, powertrain as pt; x = torch.randn(2, 8, 4, 16)\n"
        "y = pt.rms_norm(pt.attention(x, x, x, is_causal=True), torch.ones(16)); assert y.isfinite().all()\n"
        "assert '/site-packages/powertrain/' in pt.__file__"
    )
    result = _run([str(bare / "python"), "-c", code], tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "words", [["train", "quickstart"], ["lint", "quickstart"], ["generate", ".", "--prompt", "x"], ["report", "."]]
)
def test_a_missing_extra_is_one_line(words: list[str], bare: Path, tmp_path: Path) -> None:
    result = _run([str(bare / "powertrain"), *words], tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "pip install 'powertrain[train]'" in result.stderr and "yaml" in result.stderr


def test_a_missing_extra_in_python(bare: Path, tmp_path: Path) -> None:
    result = _run([str(bare / "python"), "-c", "from powertrain.models import build"], tmp_path)
    assert result.stderr.splitlines()[-1].endswith("pip install 'powertrain[train]'")


SMALL = ["model.num_layers=1", "train.seq_length=32", "train.micro_batch_size=1"]


def test_the_first_run(bare: Path, extra: Path, tmp_path: Path) -> None:
    quick = _run([str(bare / "powertrain"), "train", "quickstart", *SMALL, "train.steps=2"], tmp_path, extra)
    assert quick.returncode == 0, quick.stdout + quick.stderr
    assert (tmp_path / "runs/quickstart/checkpoints/step_00000002/checkpoint.json").is_file()


@pytest.mark.slow  # tests/test_cli_init.py reads what `init` writes, and the run above starts from the wheel
def test_a_run_of_ones_own_text(bare: Path, extra: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question. " * 200)
    written = _run([str(bare / "powertrain"), "init", "--data", "book.txt", "--steps", "2"], tmp_path, extra)
    assert written.returncode == 0, written.stderr
    own = _run([str(bare / "powertrain"), "train", "run.yml", *SMALL], tmp_path, extra)
    assert own.returncode == 0 and "validation loss" in own.stdout, own.stdout + own.stderr
    assert "runs/run/checkpoints" in own.stdout and list((tmp_path / "runs/run/checkpoints").glob("step_*"))
