"""`powertrain prebuild`, `kernels` and `tour`: from a script to a pack that another process reads."""

import errno
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.runtime import settings
from powertrain.runtime.compile import kernel_store
from powertrain.runtime.compile import service as compile_service
from powertrain.runtime.compile.prebuild import Report
from powertrain.runtime.errors import CompileError

SCRIPT = """
import torch, powertrain
x = torch.empty(4, 512, requires_grad=True)  # on "meta", the default device while recording
powertrain.rms_norm(x, torch.empty(512, requires_grad=True)).sum().backward()
"""


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POWERTRAIN_STORE", str(tmp_path / "store"))
    for forget in (settings.reload, kernel_store.user_store.cache_clear, compile_service._entries.clear):
        forget()
    yield tmp_path
    monkeypatch.undo()
    for forget in (settings.reload, kernel_store.user_store.cache_clear, compile_service._entries.clear):
        forget()


def _run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_from_a_script_to_a_pack(own_store: Path) -> None:
    script, pack = own_store / "step.py", own_store / "kernels.ptp"
    script.write_text(SCRIPT)
    said = _run("prebuild", str(script), "--arch", "sm_80", "--arch", "RTX 4090", "--out", str(pack))
    assert "6 kernels for sm_80, RTX 4090" in said.replace("\n", " ") and "POWERTRAIN_PACKS=" in said
    assert "6 kernels whole, 0 damaged" in _run("kernels", "verify", "--pack", str(pack)).replace("\n", " ")


def test_kernels_lists_verifies_and_clears(own_store: Path) -> None:
    _run("prebuild", "rms_norm", "--arch", "sm_90", "--out", str(own_store / "p.ptp"))
    assert "_norm_fwd_kernel" in _run("kernels")
    path = next((own_store / "store").glob("*/*.ptk"))
    path.write_bytes(path.read_bytes()[:-1])
    assert "1 damaged" in _run("kernels", "verify", code=1).replace("\n", " ")
    assert "files deleted" in _run("kernels", "clear").replace("\n", " ")
    assert "0 kernels whole" in _run("kernels").replace("\n", " ")


def test_paths_are_no_markup(own_store: Path) -> None:
    """rich takes the `[a]` of a path for a style, and prints the path of another file."""
    pack = own_store / "k[a].ptp"
    said = _run("prebuild", "rms_norm", "--arch", "sm_90", "--out", str(pack)).replace("\n", "")
    assert said.count("k[a].ptp") == 2  # and how to use it
    assert _run("kernels", "--pack", str(pack)).replace("\n", "").count("k[a].ptp") == 2  # above the table and below


def test_names_are_whole_in_a_pipe_and_on_a_narrow_screen(own_store: Path) -> None:
    _run("prebuild", "rms_norm", "--arch", "sm_90", "--out", str(own_store / "p.ptp"))
    piped = CliRunner().invoke(app, ["kernels"], env={"COLUMNS": None}).output
    assert "_norm_fwd_kernel" in piped and "…" not in piped
    narrow = CliRunner().invoke(app, ["kernels"], env={"COLUMNS": "60"}).output
    first = "".join(line.split("│")[1].strip() for line in narrow.splitlines() if line.startswith("│"))
    assert "_norm_fwd_kernel" in first


@pytest.mark.parametrize(
    "args, words",
    [
        (("prebuild", "no_such_op"), "unknown ops"),
        (("prebuild", "missing.py"), "no such file"),
        (("prebuild", "rms_norm", "--arch", "Voodoo 2"), "Voodoo 2"),
        (("kernels", "clear", "--pack", "p.ptp"), "read-only"),
        (("tour", "elsewhere"), "must be one of hang, build, archs, attention, mixed, overlap"),
    ],
)
def test_bad_arguments_are_named(own_store: Path, args: tuple[str, ...], words: str) -> None:
    assert words in " ".join(_run(*args, code=2).replace("│", " ").split())


@pytest.mark.parametrize("out", [".", "nowhere/kernels.ptp", "file/kernels.ptp"])
def test_prebuild_refuses_an_out_that_takes_no_file_before_it_compiles(
    own_store: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_store / "file").touch()
    monkeypatch.setattr("powertrain.cli.prebuild.build_with_progress", Mock(side_effect=AssertionError))
    said = CliRunner().invoke(app, ["prebuild", "rms_norm", "--arch", "sm_90", "--out", str(own_store / out)])
    assert said.exit_code == 2 and said.stderr.startswith(f"--out {own_store / out} cannot be written: "), said.stderr


def test_a_pack_without_kernels_is_not_written(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaced the last good pack, with the words to use it."""
    (own_store / "p.ptp").write_text("older")
    nothing = Report(failures={"k for sm_80": CompileError("no")})
    monkeypatch.setattr("powertrain.cli.prebuild.recorded", lambda *_: ["spec"])
    monkeypatch.setattr("powertrain.cli.prebuild.build_with_progress", lambda *_: nothing)
    said = _run("prebuild", "--out", str(own_store / "p.ptp"), code=1)
    assert "not written, since no kernel compiled" in said and "use it" not in said
    assert (own_store / "p.ptp").read_text() == "older"


def test_a_full_disk_below_a_pack(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("powertrain.runtime.compile.kernel_store.zipfile.ZipFile.writestr", full)
    monkeypatch.setattr("powertrain.cli.prebuild.recorded", lambda *_: ["spec"])
    monkeypatch.setattr("powertrain.cli.prebuild.build_with_progress", lambda *_: Report())
    said = CliRunner().invoke(app, ["prebuild", "--out", str(own_store / "p.ptp")])
    words = f"--out {own_store / 'p.ptp'} cannot be written: No space left on device\n"
    assert (said.exit_code, said.stderr) == (2, words)
    assert not list(own_store.glob("*p.ptp*"))


def test_a_missing_pack_is_said(own_store: Path) -> None:
    assert "no such file or folder" in _run("kernels", "--pack", str(own_store / "none.ptp"), code=2)


@pytest.mark.slow  # `make demo` runs the tour
def test_the_tour_compiles_for_eight_archs(own_store: Path) -> None:
    said = _run("tour", "archs")
    assert all(f"sm_{arch}" in said for arch in (75, 80, 86, 89, 90, 100, 103, 120)) and "40 compiled" in said


@pytest.mark.slow
def test_the_tour_shows_the_hang_and_its_end(own_store: Path) -> None:
    said = _run("tour", "hang")
    assert "still waiting for the dead process's lock file" in " ".join(said.replace("│", " ").split())
    assert "_norm_bwd_kernel for sm_90: compiled" in said


@pytest.mark.slow  # `make demo` runs the tour
def test_the_tour_overlaps_two_ranks_and_names_the_killed_one(own_store: Path) -> None:
    said = " ".join(_run("tour", "overlap").replace("│", " ").split())
    assert "symmetric: Overlap: no symmetric memory among these 2 ranks: rank 0: its tensors are on the CPU" in said
    assert "taken: pipelined, over gloo" in said and "all-gather, then 456x256 by 256x1024" in said
    differences = re.findall(r"result and gradients within ([\d.e-]+) of one process", said)
    assert len(differences) == 2 and all(float(d) < 1e-12 for d in differences)
    (killed,) = re.findall(r"kill -9 (\d+)", said)
    assert re.search(rf"PeerTimeout after .* reduce-scatter of .* rank 1 \(host .*, process {killed}\) is gone", said)


def test_the_tour_fails_where_ranks_cannot_meet(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-link")
    said = " ".join(_run("tour", "overlap", code=1).replace("│", " ").split())
    assert "no-such-link" in said and "did not come to the end" in said and "kill -9" not in said


def test_a_store_that_others_can_write_is_not_listed_as_an_empty_one(own_store: Path) -> None:
    """It was listed as `/dev/null/none: 0 kernels whole`."""
    (own_store / "store").mkdir(mode=0o777)
    (own_store / "store").chmod(0o777)
    assert "whole" not in _run("kernels", code=1) + _run("kernels", "clear", code=1)
