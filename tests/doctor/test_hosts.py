"""--hostfile, with an ssh that runs everything on this machine, or refuses."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.doctor.finding import Finding, worst
from powertrain.doctor.hosts import Host, check_hosts, launch_lines, read_hostfile
from powertrain.runtime.machine import Machine, run_program
from tests.doctor.machines import told

# what comes behind the options and the host is a command line for the other host's shell
SSH = """#!/bin/sh
while [ "$1" = -o ]; do echo "$2" >> "{log}"; shift 2; done
[ "$1" = -- ] || exit 9  # else a host could be an option
shift; host=$1; shift
case $host in
{cases}
esac
exec sh -c "$*"
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    # this machine stands for both hosts, whose GPUs are compared with the slots of the file
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]

    def run(hostfile: str, *cases: str, **variables: str) -> list[Finding]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(SSH.format(log=tmp_path / "options", cases="\n".join(cases) or "none) ;;"))
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
        (tmp_path / "hosts").write_text(hostfile)
        variables = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port), **variables}
        here = Machine(variables=variables, python=sys.executable, run=run_program)
        return list(check_hosts(tmp_path / "hosts").run(here))

    return run


def test_hosts_that_are_ready(check: Callable[..., list[Finding]], tmp_path: Path) -> None:
    findings = check("node1 slots=2\nnode2 slots=2\n")
    said = told(findings)
    assert worst(findings) == "ok", said
    assert "node2: ssh without a password" in said and "the same versions on 2 hosts" in said
    assert "is reached from every host" in said
    assert "node2: torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=" in said
    assert "mpiexec -np 4 -H node1:2,node2:2 -x MASTER_ADDR=" in said
    options = (tmp_path / "options").read_text()
    assert "BatchMode=yes" in options and "ConnectTimeout=5" in options


@pytest.mark.parametrize(
    "case, words, fix",
    [
        ("Permission denied (publickey,password).", "asks for a password", "ssh-copy-id node2"),
        ("ssh: Could not resolve hostname node2: Name or service not known", "has no address", "/etc/hosts"),
        ("ssh: connect to host node2 port 22: Connection timed out", "cannot be reached by ssh", "ssh -v node2"),
        ("Host key verification failed.", "key is unknown, or another", "ssh-keygen -R node2"),
        ("sh: 1: /opt/env/bin/python: not found", "no Python at the path", "same environment"),
    ],
)
def test_hosts_that_refuse(check: Callable[..., list[Finding]], case: str, words: str, fix: str) -> None:
    findings = check("node1\nnode2\n", f"node2) echo '{case}' >&2; exit 255;;")
    (problem,) = [finding for finding in findings if finding.level == "problem"]
    assert words in problem.message and fix in (problem.fix or "") and problem.evidence == (case,)


def test_versions_that_differ(check: Callable[..., list[Finding]]) -> None:
    facts = '{"python": "3.11.7", "gpus": ["NVIDIA H100, 550.54"], "torch": "2.9.0"}'
    other = facts.replace("2.9.0", "2.8.0").replace("550.54", "535.10")
    cases = [f"node{n}) echo 'FACTS {said}'; exit;;" for n, said in ((1, facts), (2, facts), (3, other))]
    said = told(check("node1\nnode2\nnode3:8\n", *cases))
    assert "torch differs between hosts | node1: 2.9.0 | node2: 2.9.0 | node3: 2.8.0 | install torch==2.9.0" in said
    assert "GPUs or drivers differ" in said and "node3 has 1 GPUs, the file gives it 8 ranks" in said


def test_meeting_places(check: Callable[..., list[Finding]]) -> None:
    assert "another machine on each host" in told(check("node1\nnode2\n", MASTER_ADDR="localhost"))
    assert "MASTER_PORT must be a number" in told(check("node1\nnode2\n", MASTER_PORT="http"))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} of node1 is taken" in told(check("node1\nnode2\n", MASTER_PORT=str(port)))


def test_the_same_host_twice(check: Callable[..., list[Finding]]) -> None:
    assert "node1 is listed twice" in told(check("node1\nnode1\n", "node1) exit 255;;"))


def test_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two hosts\nnode1 slots=8\n\nnode-2.local:4 # fast\n10.0.0.3\n")
    assert read_hostfile(file) == [Host("node1", 8), Host("node-2.local", 4), Host("10.0.0.3", None)]
    file.write_text("node1\nnode2 gpus=8\n")
    with pytest.raises(ValueError, match="hosts:2: must be HOST, HOST:N or HOST slots=N, got 'node2 gpus=8'"):
        read_hostfile(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="at least one host"):
        read_hostfile(file)


def test_a_wrong_hostfile_is_a_problem(check: Callable[..., list[Finding]]) -> None:
    (finding,) = check("node1 = 8\n")
    assert finding.level == "problem" and "hosts:1" in finding.message


def test_uneven_hosts_have_no_torchrun_line() -> None:
    lines = launch_lines([Host("a", 8), Host("b", 4)], [8, 4], "a", "29500")
    assert "as many ranks on every host" in lines[0] and "mpiexec -np 12 -H a:8,b:4" in lines[1]
