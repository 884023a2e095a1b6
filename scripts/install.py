"""`python scripts/install.py VENV`: a virtual environment with the versions in constraints.txt and this checkout.

`--docs`: the tools of `make docs` instead, without torch and without this checkout.

Needs Python and nothing else. Says what it will download; does nothing when the environment is already so; starts over
where an earlier run was interrupted; leaves alone an environment that it did not make.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    import os
    import shutil
    import subprocess

    # the default python3 is too old; a newer one may stand beside it
    for other in filter(None, (shutil.which("python3.%d" % minor) for minor in (13, 12, 11, 10))):  # noqa: UP031
        if subprocess.call([other, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            os.execv(other, [other] + sys.argv)  # noqa: RUF005
    sys.exit("Powertrain needs Python 3.10 or newer, this is %s: make ... PYTHON=python3.12" % sys.version)  # noqa: UP031

import argparse
import hashlib
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "torch", "triton", "numpy", "platformdirs", "psutil", "rich", "typer", "pydantic", "yaml", "safetensors",
    "tokenizers", "zstandard", "filelock", "jinja2", "tensorboard", "pytest", "ruff", "mypy",
)  # fmt: skip
DOCS_SECTION = "# For `make docs` only"
EXAMPLES_SECTION = "# For the extra examples only"


def pins(triton: str | None, section: str) -> dict[str, tuple[str, float]]:
    """Package -> (version, MB to download) for this Python, from a section of constraints.txt."""
    found = {}
    for line in section.splitlines():
        match = re.match(r'([\w-]+)==([^\s;]+)(?:; python_version (<|>=) "3.11")?(?:\s*# (\d+))?', line)
        if match and (not match[3] or (match[3] == "<") == (sys.version_info < (3, 11))):
            found[match[1]] = (match[2], float(match[4] or 0.3))
    if triton and "triton" in found:
        found["triton"] = (triton, found["triton"][1])
    return found


def announce(venv: Path, versions: dict[str, tuple[str, float]]) -> None:
    large = {name: pin for name, pin in versions.items() if pin[1] > 1}
    small = [f"{name} {version}" for name, (version, _) in versions.items() if name not in large]
    print(f"Making {venv} with Python {sys.version.split()[0]}. What pip does not have in its cache it will download:")
    for name, (version, size) in large.items():
        note = "  (2500 MB if pip finds a build with CUDA: its libraries and its own Triton come along)"
        print(f"  {name:18} {version:10} {size:4.0f} MB{note if name == 'torch' else ''}")
    print(f"  and {len(small)} small ones: {', '.join(small)}", flush=True)


def pip(venv: Path, title: str, *arguments: str) -> None:
    """Run pip; show the downloads of 1 MB and more and the time taken, or all it said last if it fails."""
    print(f"{title} ...", flush=True)
    start = time.monotonic()
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout or ():
        said.append(line)
        if re.search(r"Downloading .*\(\S+ [MG]B\)", line):
            print(" ", " ".join(line.split()), flush=True)
    if process.wait():
        print("".join(said[-25:]), file=sys.stderr)
        sys.exit(f"pip could not install {' '.join(arguments)}; see above. Run the same make again to go on.")
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


def create(venv: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
        sys.exit(f"{sys.executable} -m venv failed; on Debian and Ubuntu: apt-get install python3-venv")


def install(venv: Path, versions: dict[str, tuple[str, float]], triton: str | None) -> None:
    def pinned(name: str) -> str:
        return f"{name}=={versions[name][0]}"

    with tempfile.TemporaryDirectory() as folder:
        # without triton: the CUDA build of torch demands one version of it, other builds none
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(pinned(name) + "\n" for name in versions if name != "triton"))
        pip(venv, pinned("torch"), "-c", str(constraints), pinned("torch"))
        if triton or "triton" in missing(venv):
            pip(venv, pinned("triton"), "--no-deps", pinned("triton"))
        pip(venv, "the build back end", "-c", str(constraints), "hatchling", "editables")
        pip(venv, "the rest", "-c", str(constraints), "--no-build-isolation", "-e", f"{ROOT}[dev]")


def install_docs(venv: Path) -> None:
    requirements = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert requirements, "pyproject.toml has no extra named docs"
    names = re.findall(r'"([^"]+)"', requirements[1])
    pip(venv, "the tools of make docs", "-c", str(ROOT / "constraints.txt"), *names)


def missing(venv: Path) -> list[str]:
    code = f"import importlib.util as u; print(*(n for n in {NEEDED} if u.find_spec(n) is None))"
    return subprocess.run([str(venv / "bin" / "python"), "-c", code], capture_output=True, text=True).stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--triton", help="this version instead of the pinned one")
    parser.add_argument("--docs", action="store_true", help="the tools of make docs, nothing else")
    options = parser.parse_args()
    venv, stamp = options.venv, options.venv / "powertrain-installed"

    # a link leads to the environment of another checkout, which is not ours to make anew
    if venv.is_symlink() or (venv.exists() and not stamp.exists()):
        lacking = missing(venv) if (venv / "bin" / "python").exists() else ["python"]
        if lacking:
            sys.exit(f"{venv} was not made by this script and lacks {', '.join(lacking)}: remove it, or use VENV=none")
        return
    inputs = [(ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml", "scripts/install.py")]
    wanted = hashlib.sha256(repr((inputs, options.triton, options.docs, sys.version, str(ROOT))).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    tests, _, docs = (ROOT / "constraints.txt").read_text().partition(DOCS_SECTION)
    tests = tests.partition(EXAMPLES_SECTION)[0]
    versions = pins(options.triton, docs if options.docs else tests)
    announce(venv, versions)
    create(venv)
    stamp.write_text("unfinished")
    if options.docs:
        install_docs(venv)
    else:
        install(venv, versions, options.triton)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
