"""What launchers say in the environment, and what the ranks say to each other before they train."""

import itertools
import json
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from powertrain.models import build
from powertrain.parallel.transport.select import TransportUnavailable
from powertrain.train import preflight
from powertrain.train.config.schema import ParallelConfig
from powertrain.train.fp8 import quantize_stages
from powertrain.train.mesh_shape import check_parallel, mesh_shape
from powertrain.train.model_setup import add_trained_parts, build_model
from powertrain.train.pipeline import my_stages, own_error
from powertrain.train.ranks import (
    LaunchEnv,
    Rendezvous,
    RendezvousError,
    _compare_ranks,
    connect,
    first_host,
    read_launch_env,
)
from tests.distributed.launch import clean_environment, run_ranks
from tests.distributed.worker import run_config

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "a", "MASTER_PORT": "29500"}  # fmt: skip
MASTER = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[08-09],x1",
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_NODEID": "1", "SLURM_JOB_ID": "1234567"}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
           "MV2_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
PMI = {"PMI_RANK": "3", "PMI_SIZE": "6"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "6", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2", **PMI}
JSRUN = {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_RANK": "1",
         "JSM_NAMESPACE_LOCAL_SIZE": "2"}  # fmt: skip
# jsrun sets those of Open MPI to the same values
SPECTRUM = {name.replace("JSM_NAMESPACE", "OMPI_COMM_WORLD"): value for name, value in JSRUN.items()}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", **PMI}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, LaunchEnv(CPU)),
        (TORCHRUN, LaunchEnv(CPU, 3, 8, 1, 2, "torchrun", Rendezvous("a", 29500))),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
         LaunchEnv(CPU, 3, 8, 1, 2, "torchrun", Rendezvous("a", 29500, 2, True))),
        # one process a pod, as Kubernetes operators start it
        ({"RANK": "1", "WORLD_SIZE": "2", **MASTER}, LaunchEnv(CPU, 1, 2, 0, 1, "torchrun", Rendezvous("a", 1))),
        (SRUN, LaunchEnv(CPU, 2, 4, 0, 1, "srun", Rendezvous("n08", 24567))),
        # a batch script's own shell, which runs alone
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, LaunchEnv(CPU)),
        ({**OPENMPI, **MASTER}, LaunchEnv(CPU, 1, 2, 1, 2, "mpiexec", Rendezvous("a", 1))),
        ({**HYDRA, **MASTER}, LaunchEnv(CPU, 1, 2, 0, 1, "mpiexec", Rendezvous("a", 1))),
        # the innermost counts: torchrun within srun, mpiexec within srun
        ({**TORCHRUN, **SRUN}, LaunchEnv(CPU, 3, 8, 1, 2, "torchrun", Rendezvous("a", 29500))),
        ({**OPENMPI, **SRUN, **MASTER}, LaunchEnv(CPU, 1, 2, 1, 2, "mpiexec", Rendezvous("a", 1))),
        # srun --mpi=pmi2 says its rank twice, the local one only in its own words
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, LaunchEnv(CPU, 2, 4, 0, 1, "srun", Rendezvous("n08", 24567))),
        ({**MVAPICH, **MASTER}, LaunchEnv(CPU, 3, 4, 1, 2, "mpirun_rsh", Rendezvous("a", 1))),
        # these speak PMI, which has no local rank: all ranks of a host were on its first GPU
        ({**FLUX, **MASTER}, LaunchEnv(CPU, 3, 6, 1, 3, "flux", Rendezvous("a", 1))),
        ({**JSRUN, **SPECTRUM, **PMI, **MASTER}, LaunchEnv(CPU, 3, 6, 1, 2, "jsrun", Rendezvous("a", 1))),
        ({**PALS, **MASTER}, LaunchEnv(CPU, 3, 6, 1, 2, "mpiexec", Rendezvous("a", 1))),
        # without the number of hosts
        ({"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "6", "FLUX_TASK_LOCAL_ID": "2", **MASTER},
         LaunchEnv(CPU, 5, 6, 2, 3, "flux", Rendezvous("a", 1))),
        # on a Cray srun and Flux set those of PALS
        ({**SRUN, **PALS}, LaunchEnv(CPU, 2, 4, 0, 1, "srun", Rendezvous("n08", 24567))),
        ({**FLUX, **PALS, **MASTER}, LaunchEnv(CPU, 3, 6, 1, 3, "flux", Rendezvous("a", 1))),
        ({**TORCHRUN, **FLUX}, LaunchEnv(CPU, 3, 8, 1, 2, "torchrun", Rendezvous("a", 29500))),
        # each of a host's mpiexecs
        ({**FLUX, **HYDRA, **MASTER}, LaunchEnv(CPU, 1, 2, 0, 1, "mpiexec", Rendezvous("a", 1))),
        ({**JSRUN, **OPENMPI, **MASTER}, LaunchEnv(CPU, 1, 2, 1, 2, "mpiexec", Rendezvous("a", 1))),
    ],
    ids=["none", "torchrun", "elastic", "pod", "srun", "sbatch", "openmpi", "hydra", "torchrun-srun", "openmpi-srun",
         "pmi2", "mvapich", "flux", "jsrun", "pals", "flux-no-hosts", "srun-cray", "flux-cray", "torchrun-flux",
         "hydra-flux", "openmpi-jsrun"],
)  # fmt: skip
def test_launch_env(environment: dict[str, str], expected: LaunchEnv) -> None:
    assert read_launch_env(environment) == expected


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            OPENMPI,
            "MASTER_ADDR and MASTER_PORT must be set for 2 processes of mpiexec to meet, got nothing: mpiexec -x",
        ),
        ({**HYDRA, "MASTER_ADDR": "a"}, "^MASTER_PORT must be set for 2 processes .* mpiexec -genv"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT must be a number from 1 to 65535, .* got 'x'"),
        # any free port, so that the ranks never met; torch's TypeError with the signatures of its constructor
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT must be a number from 1 to 65535, .* got '0'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT must be a number from 1 to 65535, .* got '65536'"),
        ({"RANK": "0"}, "WORLD_SIZE must be a number, as the launcher sets it, got nothing"),
        ({**TORCHRUN, "RANK": "8"}, r"RANK must be in \[0, WORLD_SIZE = 8\), got 8"),
        ({"PMIX_RANK": "0"}, "RANK, WORLD_SIZE.* must be set: PMIx"),
        ({"WORLD_SIZE": "4"}, "RANK must be set beside WORLD_SIZE, got WORLD_SIZE 4 alone"),
        ({"LOCAL_RANK": "1"}, "RANK must be set beside LOCAL_RANK, got LOCAL_RANK 1 alone"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK must be set beside LOCAL_WORLD_SIZE, got"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK must be set beside OMPI_COMM_WORLD_SIZE, got"),
        ({"MPI_LOCALRANKID": "1"}, "PMI_RANK must be set beside MPI_LOCALRANKID, got"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK must be set beside MV2_COMM_WORLD_SIZE, got"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_TASK_RANK must be set beside FLUX_JOB_SIZE, got"),
        ({"FLUX_TASK_RANK": "0"}, "FLUX_JOB_SIZE must be a number, as the launcher sets it, got nothing"),
        ({"JSM_NAMESPACE_LOCAL_RANK": "1"}, "JSM_NAMESPACE_RANK must be set beside JSM_NAMESPACE_LOCAL_RANK, got"),
        ({"PALS_LOCAL_RANKID": "1"}, "PALS_RANKID must be set beside PALS_LOCAL_RANKID, got"),
        ({"PALS_RANKID": "1"}, "PMI_SIZE must be a number, as the launcher sets it, got nothing"),
        (MVAPICH, "4 processes of mpirun_rsh to meet, got nothing: mpirun_rsh ... MASTER_ADDR="),
        (FLUX, "6 processes of flux to meet, got nothing: flux run --env=MASTER_ADDR="),
        ({**JSRUN, **SPECTRUM}, "6 processes of jsrun to meet, got nothing: jsrun -E MASTER_ADDR="),
        (PALS, "6 processes of mpiexec to meet, got nothing: mpiexec --env MASTER_ADDR="),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_RANK": "2"}, "JSM_NAMESPACE_LOCAL_RANK must be below JSM_NAMESPACE_LOCAL_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"LOCAL_RANK must be below LOCAL_WORLD_SIZE, .* got 2 and 2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, r"and that at most WORLD_SIZE \(8\), got 1 and 9"),
    ],
)
def test_launch_env_errors(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch_env(environment)


def test_an_empty_world_size_alone_is_not_set() -> None:
    """`WORLD_SIZE=$UNSET powertrain train` was refused, with a blank where the value should stand."""
    assert read_launch_env({"WORLD_SIZE": ""}) == read_launch_env({})


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert read_launch_env(TORCHRUN).device == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank must be below the 2 GPUs that this process sees, got 2"):
        read_launch_env({**TORCHRUN, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"})
    # one GPU shown to each process, also by launchers that do not say how many they started on a host
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for environment in (TORCHRUN, {**FLUX, "FLUX_JOB_NNODES": "6", **MASTER}, {**PALS, **MASTER}):
        assert read_launch_env(environment).device == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="local rank must be below the 1 GPUs that this process sees, got 1"):
        read_launch_env({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    "nodes, host",
    [("gpu[03-07,11],cpu1", "gpu03"), ("a,b", "a"), ("r1n[2,4]", "r1n2"), ("rack[0-1]-n[1-2]", "rack0-n1"), ("x", "x")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "parallel, shape",
    [
        ({}, (1, 1, 8, 1, 1)),
        ({"tensor": 2}, (1, 1, 4, 1, 2)),
        ({"replicate": 2}, (1, 2, 4, 1, 1)),
        ({"context": 2, "tensor": 2}, (1, 1, 2, 2, 2)),
        ({"strategy": "ddp"}, (1, 8, 1, 1, 1)),
        ({"strategy": "ddp", "context": 2, "tensor": 2}, (1, 2, 1, 2, 2)),
        ({"pipeline": 4}, (4, 1, 2, 1, 1)),
        ({"pipeline": 2, "strategy": "ddp", "tensor": 2}, (2, 2, 1, 1, 2)),
    ],
)
def test_mesh_shape(parallel: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert mesh_shape(ParallelConfig(**parallel), 8) == shape


@pytest.mark.parametrize(
    "parallel, message",
    [
        ({"tensor": 3}, "parallel.tensor must divide the number of processes, 8, got 3"),
        ({"pipeline": 16}, "parallel.pipeline must divide the number of processes, 8, got 16"),
        ({"context": 4, "replicate": 3}, r"parallel.replicate \* parallel.context must divide .* 8, got 3 \* 4"),
        ({"tensor": 16, "strategy": "ddp"}, "parallel.tensor must divide the number of processes, 8, got 16"),
        (
            {"shard": 4},
            r"parallel.pipeline \* replicate \* shard \* context \* tensor must .* 8, got 1 \* 1 \* 4 \* 1 \* 1",
        ),
        ({"shard": 0}, "parallel.shard must be at least 1, or -1 for the remaining factor, got 0"),
        ({"strategy": "ddp", "shard": 8}, "parallel.shard must be 1 with parallel.strategy ddp, got 8"),
    ],
)
def test_mesh_shape_errors(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_shape(ParallelConfig(**parallel), 8)


def test_models_that_tensor_ranks_do_not_divide() -> None:
    balanced = {"model": "deepseek", "sizes": {"balance_loss": 0.1}}
    for case, tensor, message in (
        ({"model": "llama"}, 4, r"parallel.tensor must divide model.num_kv_heads \(2\), got 4"),
        ({"model": "deepseek"}, 8, r"parallel.tensor must divide model.num_heads \(4\), got 8"),
        (balanced, 2, "model.balance_loss must be 0 with parallel.tensor above 1, .* got 0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            check_parallel(run_config({**case, "parallel": {"tensor": tensor}}, 1), 8)


@pytest.mark.parametrize(
    "case, message",
    [
        ({"model": "deepseek"}, "parallel.context must be 1 for model.architecture deepseek, got 8"),
        ({"model": "gpt_neox", "sizes": {"attention_dropout": 0.1}}, "must be 1 with model.attention_dropout, got 8"),
        ({"model": "llama", "train": {"seq_length": 7}}, r"must be at most train.seq_length \(7\), got 8"),
    ],
)
def test_sequences_that_ranks_cannot_share(case: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parallel(run_config({**case, "parallel": {"context": 8}}, 1), 8)


_WINDOW = {"model": "llama", "sizes": {"sliding_window": 3, "num_heads": 6, "hidden_size": 48}}


@pytest.mark.parametrize(
    "case, parallel, message",
    [
        (
            {"model": "gpt_neox", "data": {"document_mask": True}}, {"context": 8},
            r"parallel.context must divide model.num_heads \(4\) with model.position_embedding alibi and "
            "data.document_mask, got 8",
        ),
        (
            {**_WINDOW, "train": {"objective": "sft"}}, {"context": 4, "tensor": 2},
            r"parallel.context must divide model.num_heads / parallel.tensor \(3\) with model.sliding_window 3 and "
            "train.objective sft, got 4",
        ),
        (
            {"model": "llama", "train": {"seq_length": 5, "micro_batch_size": 1}}, {"context": 4, "tensor": 2},
            r"parallel.tensor must be at most the tokens of a micro-batch of one of 4 context ranks \(1; .* got 2",
        ),
        (
            {"model": "llama", "train": {"seq_length": 1, "micro_batch_size": 1}}, {"tensor": 2},
            r"parallel.tensor must be at most the tokens of a micro-batch \(1; .* got 2",
        ),
    ],
)  # fmt: skip
def test_micro_batches_that_ranks_cannot_share(case: dict[str, Any], parallel: dict[str, int], message: str) -> None:
    """Before the first step, on which some of the ranks would wait for others."""
    config = run_config({**case, "parallel": parallel}, 1)
    config = config.model_copy(update={"data": config.data.model_copy(update=case.get("data", {}))})
    with pytest.raises(ValueError, match=message):
        check_parallel(config, 8)


def test_micro_batches_that_ranks_share() -> None:
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"model": "gpt_neox"}, {"context": 8}),
        ({**_WINDOW, "train": {"objective": "sft"}}, {"context": 2}),
        ({"model": "llama", "train": {"seq_length": 5, "micro_batch_size": 2}}, {"context": 4, "tensor": 2}),
    ]
    for case, parallel in cases:
        check_parallel(run_config({**case, "parallel": parallel}, 1), 8)


FACTS = {"host": "h0", "torch": "2.13", "GPU arch": "sm_90", "GPU": "a", "config train.seed": "1"}


def test_alike() -> None:
    assert preflight.compare([FACTS, {**FACTS, "GPU": "b"}, {**FACTS, "host": "h1"}]) == ("", ())


def test_differences_are_named() -> None:
    error, _ = preflight.compare([
        FACTS, {**FACTS, "GPU": "b"}, {**FACTS, "host": "h1", "torch": "2.12"},
        {**FACTS, "host": "h1", "GPU": "b", "config train.seed": "2"},
    ])  # fmt: skip
    assert "torch: 2.13 on ranks 0, 1, 3 (h0, h1); 2.12 on rank 2 (h1)" in error
    assert "config train.seed: 1 on ranks 0, 1, 2 (h0, h1); 2 on rank 3 (h1)" in error


def test_mixed_archs_are_a_note() -> None:
    error, notes = preflight.compare([FACTS, {**FACTS, "host": "h1", "GPU arch": "sm_80"}])
    assert not error
    assert notes == ("ranks differ in GPU arch: sm_90 on rank 0 (h0); sm_80 on rank 1 (h1); the slowest sets the pace",)


def test_a_shared_gpu_is_an_error() -> None:
    assert "a GPU each, but ranks 0, 1 share one on h0" in preflight.compare([FACTS, FACTS]).error


def test_facts_name_every_key() -> None:
    config = run_config({"model": "llama"}, 1)
    facts = preflight.facts(CPU, config)
    assert facts["torch"] == torch.__version__
    assert facts["config train.seed"] == "1234" and facts["config train.loss_scale.window"] == "1000"
    assert facts["config model.hidden_size"] == "32"


_CONNECT = """
from powertrain.train.ranks import connect, read_launch_env
from tests.distributed.worker import run_config
here = read_launch_env()
if here.rank == 0:
    connect(here, run_config({"model": "llama", "parallel": {"timeout_minutes": 0.1}}, 2))
"""


@pytest.mark.slow
def test_an_absent_rank_is_named() -> None:
    first = run_ranks(2, "-c", _CONNECT)[0]
    assert "waiting for rank 1, which may be building kernels" in first.stdout
    assert "rank 1 of 2 did not arrive within 6 s (parallel.timeout_minutes)" in first.stdout


def test_a_host_without_an_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a rank 0 that had not opened its port."""
    here = LaunchEnv(CPU, 1, 2, 1, 2, "srun", Rendezvous("nowhere.invalid", 1))
    unknown = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    monkeypatch.setattr("powertrain.train.ranks._within", lambda seconds, work: None)
    config = run_config({"model": "llama", "parallel": {"timeout_minutes": 0.003}}, 2)
    words = r"for 0 s \(parallel.timeout_minutes\): this machine knows no host nowhere.invalid \(Name or service"
    with pytest.raises(RendezvousError, match=words):
        connect(here, config)


def test_a_port_that_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    """Of another program: torch's store waits for its answer for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here = LaunchEnv(CPU, 1, 2, 1, 2, "torchrun", Rendezvous(*silent.getsockname()))
        config = run_config({"model": "llama", "parallel": {"timeout_minutes": 0.003}}, 2)
        with pytest.raises(
            RendezvousError, match=r"rank 1 reached no store at 127.0.0.1:\d+ .* or another program has"
        ):
            connect(here, config)


def test_a_rank_that_the_others_met_without_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second run at the same port: it waited for collectives of the first one's ranks."""
    store = dist.HashStore()
    store.set("powertrain/0/0/verdict", json.dumps({"error": "", "notes": [], "present": 2}))
    monkeypatch.setattr("powertrain.train.ranks._store", lambda *_: store)
    monkeypatch.setattr("powertrain.train.ranks._rendezvous_count", itertools.repeat(0))
    here = LaunchEnv(CPU, 1, 2, 1, 2, "torchrun", Rendezvous("h0", 29500))
    with pytest.raises(RendezvousError, match=r"rank 1: the ranks at h0:29500 .* have met without this one: another"):
        connect(here, run_config({"model": "llama", "parallel": {"timeout_minutes": 0.01}}, 2))


@pytest.mark.parametrize(
    "sizes, said",
    [
        ((2, 3), "number of ranks: 2 on rank 0 (h0); 3 on rank 1 (h0)"),
        (
            (3, 2),
            "rank 2 of 3 did not arrive within 0 s (parallel.timeout_minutes): rank 1 was started as one of 2; look",
        ),
    ],
)
def test_numbers_of_ranks_that_differ_are_named(sizes: tuple[int, int], said: str) -> None:
    """They waited for each other in gloo, which said that a rank was lost."""
    store = dist.HashStore()
    for rank, size in enumerate(sizes):
        store.set(f"facts {rank}", json.dumps({"host": "h0", "number of ranks": str(size)}))
    _compare_ranks(store, sizes[0], 0.0)
    assert said in json.loads(store.get("verdict"))["error"]


@pytest.mark.parametrize("error", [dist.DistNetworkError("Failed to recv"), RuntimeError("gloo: Connection closed")])
def test_a_rank_lost_while_they_connect_is_said(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others ended with the store's or gloo's error under a traceback."""

    def lost(*_: Any) -> None:
        raise error

    monkeypatch.setattr("powertrain.train.ranks._rendezvous", lost)
    here = LaunchEnv(CPU, 1, 2, 1, 2, "torchrun", Rendezvous("h0", 29500))
    with pytest.raises(RendezvousError, match=f"rank 1: another rank was lost .* at h0:29500 .*: {error}"):
        connect(here, run_config({"model": "llama"}, 2))


def test_a_process_group_that_is_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was torch's error about a default process group, which had others wait at the rendezvous."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    here = LaunchEnv(CPU, 1, 2, 1, 2, "torchrun", Rendezvous("h0", 29500))
    with pytest.raises(RendezvousError, match=r"rank 1: torch.distributed must not be initialized .* of 2 ranks; call"):
        connect(here, run_config({"model": "llama"}, 2))


def test_the_environment_of_tests_has_no_launcher() -> None:
    assert read_launch_env(clean_environment()) == LaunchEnv(CPU)


@pytest.mark.parametrize(
    "case, message",
    [
        ({"model": "deepseek"}, "parallel.pipeline must be 1 for model.architecture deepseek, got 2"),
        ({"model": "llama", "train": {"gradient_accumulation_steps": 1}}, "at least parallel.pipeline .2., .* got 1"),
        ({"model": "llama", "parallel": {"virtual_stages": 2}}, "must be at most model.num_layers .2., got 4"),
        (
            {"model": "llama", "sizes": {"num_layers": 4}, "parallel": {"virtual_stages": 2},
             "train": {"gradient_accumulation_steps": 3}},
            "a multiple of it, got 3",
        ),
        ({"model": "llama", "fp8": {"recipe": "tensor-delayed"}}, "must be 1 with fp8.recipe tensor-delayed, got 2"),
        (
            {"model": "llama", "fp8": {"recipe": "row", "keep": ["first_block"]}},
            "must be 1 with first_block or last_block in fp8.keep, got 2",
        ),
    ],
)  # fmt: skip
def test_what_stages_cannot_train(case: dict[str, Any], message: str) -> None:
    parallel = {"pipeline": 2, **case.get("parallel", {})}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        check_parallel(run_config({**case, "parallel": parallel}, 1), 2)


def test_a_transport_that_ranks_lack_is_named_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended a run with a traceback that did not name the key."""

    def lacks(*_: Any, **__: Any) -> None:
        raise TransportUnavailable("Overlap: no symmetric memory")

    monkeypatch.setattr("powertrain.train.model_setup.parallelize", lacks)
    config = run_config({"model": "llama", "parallel": {"tensor": 2, "transport": "symmetric"}}, 1)
    ranks: Any = SimpleNamespace(mesh="a mesh", device=CPU)
    with pytest.raises(ValueError, match=r"parallel.transport must be auto, .* got symmetric .Overlap: no symmetric"):
        build_model(config, ranks)


def test_a_rank_without_adapters_is_refused() -> None:
    """On every rank, before any waits for another."""
    lora = {"rank": 2, "targets": ["layers.0.mlp.down"]}
    config = run_config({"model": "llama", "parallel": {"pipeline": 2}, "train": {"lora": lora}}, 1)
    for rank in range(2):
        model = build(config.model)
        add_trained_parts(model, config)
        with pytest.raises(ValueError, match=r"train.lora.targets must name layers of every .* got none among \[1\]"):
            my_stages(model, config, rank)


def test_keep_of_stages_names_layers_of_any_rank() -> None:
    """Layer 1 is another rank's; layer 2 is nobody's."""
    fp8 = {"recipe": "row", "keep": ["layers.1.*"]}
    config = run_config({"model": "llama", "parallel": {"pipeline": 2}, "fp8": fp8}, 1)
    model = build(config.model)
    my_stages(model, config, 0)
    report = quantize_stages(model, config)
    assert report is not None and len(report.quantized) == 5
    unknown = config.model_copy(update={"fp8": config.fp8.model_copy(update={"keep": ("layers.2.*",)})})
    with pytest.raises(ValueError, match=r"fp8.keep must name layers, or be of lm_head, .*, got 'layers.2.\*'"):
        quantize_stages(model, unknown)


@pytest.mark.parametrize(
    "parallel, message",
    [
        ({"virtual_stages": 2}, "virtual_stages must be 1 without parallel.pipeline, got 2"),
    ],
)
def test_settings_of_stages_without_stages(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parallel(run_config({"model": "llama", "parallel": parallel}, 1), 1)


def test_the_error_of_a_stage_is_its_own() -> None:
    """Not torch's, which prints the stage's tensors; another error with a cause stays itself."""
    own, torchs = ValueError("bad"), RuntimeError("[Stage 1] failed to run forward: args: ...")
    torchs.__cause__ = own
    ours = RuntimeError("no kernel")
    ours.__cause__ = own
    assert own_error(torchs) is own and own_error(ours) is ours
