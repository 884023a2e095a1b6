"""One py3-none-any wheel: pure Python, the license and the command in it, nothing else."""

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not (find_spec("build") and find_spec("hatchling")), reason="needs build and hatchling")
def test_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 1 << 20
    names = zipfile.ZipFile(wheel).namelist()
    suffixes = {Path(name).suffix for name in names if name.startswith("powertrain/")}
    assert suffixes <= {".py", ".typed", ".yml", ".j2", ".json"} and "powertrain/py.typed" in names
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"powertrain"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "powertrain = powertrain.__main__:main" in zipfile.ZipFile(wheel).read(entry).decode()
