"""Every example runs at a small size on a CPU, and its loss is what it should be."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# script -> packages beyond those of powertrain[train]
NEEDS = {
    "pretrain.py": (),
    "fine_tune.py": (),
    "continue_from_hugging_face.py": ("transformers",),
    "patch_hf_trainer.py": ("transformers", "accelerate"),
    "accelerate_loop.py": ("transformers", "accelerate"),
    "lightning_module.py": ("lightning",),
    "trl_sft_peft.py": ("transformers", "trl", "peft", "datasets"),
    "tensor_parallel.py": ("transformers",),
    "own_layer.py": (),
}
# the others take 5 to 10 s each, most of it imports
QUICK = ("own_layer.py",)
RANKS = {"tensor_parallel.py": 2}


def _run(arguments: list[str], folder: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    environment.pop("POWERTRAIN_INTERPRET", None)
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"text.py"}
    assert scripts == set(NEEDS)
    listed = set(re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == scripts | {path.name for path in EXAMPLES.glob("*.ipynb")}


def test_text_serves_any_number_of_steps() -> None:
    rows = runpy.run_path(str(EXAMPLES / "text.py"))["rows"](4 * 600)  # 150 kB of a file of 100
    assert rows.shape == (2400, 64) and rows[0].tolist() != rows[-1].tolist() and int(rows.max()) < 256


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NEEDS])
def test_example(name: str, tmp_path: Path) -> None:
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'powertrain[examples]'")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name in RANKS else []
    output = _run([*launcher, str(EXAMPLES / name), "--steps", "6"], tmp_path)
    losses = [float(value) for value in re.findall(r"\bloss ([\d.]+)(?: to ([\d.]+))?", output)[-1] if value]
    assert all(0 < loss < 8 for loss in losses) and losses == sorted(losses, reverse=True), output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain.py", "continue_from_hugging_face.py"])
def test_a_second_start_goes_on_from_the_first(name: str, tmp_path: Path) -> None:
    """The second start finds the finished run of the first: it has no step left and no loss to print."""
    if any(find_spec(package) is None for package in NEEDS[name]):
        pytest.skip(f"needs {', '.join(NEEDS[name])}")
    for _ in range(2):
        _run([str(EXAMPLES / name), "--steps", "1"], tmp_path)


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    """Valid by the format's rules that matter; its cells, in one process and in order."""
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(sources).replace("steps = 4", "steps = 2") + '\nprint("loss", result.loss)\n')
    output = _run([str(script)], tmp_path)
    assert "def main(" in output and float(output.split("loss ")[-1]) < 8
