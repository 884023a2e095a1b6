"""Target: names people and drivers use, facts per arch, and the device's own."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import powertrain
from powertrain.runtime import target as target_module
from powertrain.runtime.target import Target, known_cards

ARCHS = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_spelling_of_an_arch(arch: int) -> None:
    major, minor = divmod(arch, 10)
    spellings = (f"sm_{arch}", f"sm{arch}", f"SM_{arch}", f"{major}.{minor}", str(arch), f"compute_{arch}")
    assert {Target.parse(s) for s in spellings} == {Target.parse(f"sm_{arch}")}
    assert Target.parse(f"sm_{arch}").arch == arch and Target.parse(f"sm_{arch}").capability == (major, minor)


def test_arch_specific_suffix() -> None:
    assert Target.parse("sm_90a") == Target.parse("sm_90")


# (as written or reported, card in the table, arch, SMs)
NAMES = [
    ("RTX 3090 Ti", "RTX 3090 Ti", 86, 84),
    ("rtx3090ti", "RTX 3090 Ti", 86, 84),
    ("3090 Ti", "RTX 3090 Ti", 86, 84),
    ("NVIDIA GeForce RTX 3090", "RTX 3090", 86, 82),
    ("RTX 2080 Ti", "RTX 2080 Ti", 75, 68),
    ("GeForce RTX 2080 SUPER", "RTX 2080 Super", 75, 48),
    ("GeForce RTX 2070 with Max-Q Design", "RTX 2070 Max-Q", 75, 36),
    ("NVIDIA GeForce RTX 2080 Laptop GPU", "RTX 2080", 75, 46),
    ("Tesla T4", "T4", 75, 40),
    ("Quadro RTX 6000", "Quadro RTX 6000", 75, 72),
    ("NVIDIA TITAN RTX", "TITAN RTX", 75, 72),
    ("NVIDIA A100-SXM4-40GB", "A100", 80, 108),
    ("NVIDIA A100-PCIE-40GB", "A100", 80, 108),
    ("NVIDIA A100-SXM4-80GB", "A100 80GB", 80, 108),
    ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 80, 108),
    ("NVIDIA A30", "A30", 80, 56),
    ("NVIDIA A10", "A10", 86, 72),
    ("NVIDIA A10G", "A10G", 86, 80),
    ("NVIDIA A40", "A40", 86, 84),
    ("NVIDIA RTX A6000", "RTX A6000", 86, 84),
    ("NVIDIA RTX A2000 12GB", "RTX A2000", 86, 26),
    ("NVIDIA RTX A2000 Laptop GPU", "RTX A2000 Laptop", 86, 20),
    ("NVIDIA GeForce RTX 3080 12 GB", "RTX 3080 12GB", 86, 70),
    ("Orin", "Jetson AGX Orin", 87, 16),
    ("NVIDIA L4", "L4", 89, 58),
    ("NVIDIA L40S", "L40S", 89, 142),
    ("NVIDIA L40", "L40", 89, 142),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 89, 142),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop", 89, 76),
    ("RTX 4090 mobile", "RTX 4090 Laptop", 89, 76),
    ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D", 89, 114),
    ("4070 ti super", "RTX 4070 Ti Super", 89, 66),
    ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti", 89, 34),
    ("NVIDIA H100 80GB HBM3", "H100", 90, 132),
    ("H100 SXM5", "H100", 90, 132),
    ("NVIDIA H100 PCIe", "H100 PCIe", 90, 114),
    ("NVIDIA H100 NVL", "H100 NVL", 90, 132),
    ("NVIDIA H200", "H200", 90, 132),
    ("NVIDIA GH200 480GB", "GH200", 90, 132),
    ("NVIDIA GH200 144G HBM3e", "GH200 144GB", 90, 132),
    ("NVIDIA B200", "B200", 100, 148),
    ("NVIDIA B300 SXM6", "B300", 103, 148),
    ("NVIDIA GeForce RTX 5090", "RTX 5090", 120, 170),
    ("NVIDIA GB10", "GB10", 121, 48),
    ("NVIDIA DGX Spark", "DGX Spark", 121, 48),
    ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "RTX 5070 Ti Laptop", 120, 46),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell", 120, 188),
]


@pytest.mark.parametrize("name, card, arch, sms", NAMES, ids=[n[0] for n in NAMES])
def test_names(name: str, card: str, arch: int, sms: int) -> None:
    target = Target.parse(name)
    assert (target.name, target.arch, target.num_sms) == (card, arch, sms)


@pytest.mark.parametrize("generation", ["20", "30", "40", "50"])
def test_every_geforce_is_there(generation: str) -> None:
    tiers = {"20": "60 70 80", "30": "50 60 70 80 90", "40": "60 70 80 90", "50": "50 60 70 80 90"}[generation]
    for tier in tiers.split():
        assert Target.parse(f"RTX {generation}{tier}").arch == {"20": 75, "30": 86, "40": 89, "50": 120}[generation]


def test_every_card_parses_to_itself() -> None:
    for card in known_cards():
        assert Target.parse(card.name) == card
        assert Target.parse(f"NVIDIA {card.name}") == card


@pytest.mark.parametrize(
    "name, hint",
    [("RTX 3090 Super", "RTX 3090"), ("RTX 4095", "RTX 4090"), ("RTX 6000", "Quadro RTX 6000"), ("H10O", "H100")],
)
def test_unknown_names_are_never_guessed(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"target must be .*sm_75.*got '{name}'.*Did you mean .*{hint}"):
        Target.parse(name)


@pytest.mark.parametrize(
    "name", ["", "GeForce", "sm_70", "7.0", "sm_999", "MI300X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
)
def test_refused(name: str) -> None:
    with pytest.raises(ValueError, match="target must be"):
        Target.parse(name)


def test_limits_per_arch() -> None:
    limits = {arch: Target.parse(f"sm_{arch}").shared_per_block for arch in ARCHS}
    assert limits[75] == 65536 and limits[80] == limits[87] == 166912
    assert limits[86] == limits[89] == limits[120] == limits[121] == 101376
    assert limits[90] == limits[100] == limits[103] == 232448
    assert all(card.shared_per_block <= card.shared_per_sm for card in known_cards())


def test_abilities() -> None:
    can = {arch: {a for a, yes in Target.parse(f"sm_{arch}").abilities.items() if yes} for arch in ARCHS}
    assert can[75] == {"tensor_cores"}
    assert can[80] == can[86] == can[87] == {"tensor_cores", "tensor_core_dot", "bf16", "async_copy"}
    assert can[89] == can[80] | {"fp8"}
    assert can[90] == can[89] | {"tma", "dependent_launch", "clusters", "wgmma"}
    assert can[100] == can[103] == can[90] - {"wgmma"} | {"tcgen05", "block_scaled_mma"}
    assert can[120] == can[121] == can[100] - {"tcgen05"}


def test_of_the_cpu_is_the_interpreters() -> None:
    target = Target.of(torch.device("cpu"))
    assert (target.name, target.arch, target.num_sms) == ("interpreter", 90, 2)
    assert Target.of(torch.device("meta")) == target


def test_of_while_recording_is_the_recorded() -> None:
    with powertrain.record("sm_80"):
        assert Target.of(torch.device("meta")) == Target.parse("sm_80")
    assert Target.of(torch.device("meta")).name == "interpreter"


def test_of_a_device_reads_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dict(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=131, L2_cache_size=1 << 20,
        shared_memory_per_block_optin=7, shared_memory_per_multiprocessor=8, regs_per_multiprocessor=9,
    )  # fmt: skip
    other = dict(facts, name="NVIDIA Odd Card", major=8, minor=6, memory_clock_rate=10**6, memory_bus_width=256)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(**(other if i else facts)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    target_module._of_cuda.cache_clear()
    try:
        first, second = Target.of(torch.device("cuda:0")), Target.of(torch.device("cuda"))
    finally:
        target_module._of_cuda.cache_clear()
    assert first == Target("NVIDIA H200", 90, 131, 7, 8, 9, 1 << 20, 4.8e12)
    assert (second.name, second.arch, second.bandwidth) == ("NVIDIA Odd Card", 86, 64e9)


@pytest.mark.gpu
def test_of_this_gpu() -> None:
    target = Target.of(torch.device("cuda"))
    named = Target.parse(f"sm_{target.arch}")
    assert target.shared_per_block == named.shared_per_block and target.registers_per_sm == named.registers_per_sm
    assert target is Target.of(torch.device("cuda", torch.cuda.current_device()))


def test_needs_no_torch() -> None:
    code = "import sys; from powertrain.runtime.target import *; Target.parse('L4'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
