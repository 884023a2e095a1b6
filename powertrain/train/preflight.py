"""Comparison of ranks before training: same program, same configuration, one GPU each."""

import json
import platform
import socket
from collections import defaultdict
from typing import Any, NamedTuple

import torch

import powertrain
from powertrain.runtime.target import Target
from powertrain.train.config.schema import RunConfig

_SHOWN = 8  # differences in one message


class Verdict(NamedTuple):
    """error: why the ranks must not train together, "" if they may;  notes: unusual but allowed."""

    error: str
    notes: tuple[str, ...]


def facts(device: torch.device, config: RunConfig) -> dict[str, str]:
    """The compared facts, by name. Config keys are separate, so that a difference can be named."""
    collected = {
        "host": socket.gethostname(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "Triton": _triton(),
        "powertrain": powertrain.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        nccl: Any = torch.cuda.nccl
        collected["NCCL"] = ".".join(map(str, nccl.version()))
        collected["GPU arch"] = f"sm_{Target.of(device).arch}"
        collected["GPU"] = str(properties.uuid)
    return collected | _flat(config.model_dump(mode="json"), "config")


def compare(everyone: list[dict[str, str]]) -> Verdict:
    """The verdict on all ranks' facts, in the order of ranks. Mixed GPU archs are a note, a shared GPU an error."""
    errors, notes = [], []
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        # these must differ or may; `_shared_gpus` compares them
        if name in ("host", "GPU"):
            continue
        values = [facts.get(name, "nothing") for facts in everyone]
        if len(set(values)) == 1:
            continue
        mixed = f"{name}: {_by_value(values, everyone)}"
        if name == "GPU arch":
            notes.append(f"ranks differ in {mixed}; the slowest sets the pace")
        else:
            errors.append(mixed)
    errors += _shared_gpus(everyone)
    if not errors:
        return Verdict("", tuple(notes))
    more = [f"and {len(errors) - _SHOWN} more"] if len(errors) > _SHOWN else []
    lines = "\n  ".join(errors[:_SHOWN] + more)
    return Verdict(f"the ranks must be alike to train together, got different\n  {lines}", tuple(notes))


def _by_value(values: list[str], everyone: list[dict[str, str]]) -> str:
    """`a on rank 0 (host1), b on ranks 1-3 (host2)`, the commonest value first, then the few who differ by name."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        holders[value].append(rank)
    parts = []
    for value, ranks in sorted(holders.items(), key=lambda item: -len(item[1])):
        hosts = ", ".join(dict.fromkeys(everyone[rank]["host"] for rank in ranks[:_SHOWN]))
        named = ", ".join(map(str, ranks[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
        parts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {named} ({hosts})")
    return "; ".join(parts)


def _shared_gpus(everyone: list[dict[str, str]]) -> list[str]:
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, facts in enumerate(everyone):
        if "GPU" in facts:
            users[facts["host"], facts["GPU"]].append(rank)
    return [
        f"a GPU each, but ranks {', '.join(map(str, ranks))} share one on {host}"
        for (host, _), ranks in users.items()
        if len(ranks) > 1
    ]


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _flat(value: Any, name: str) -> dict[str, str]:
    """Nested dictionaries as `config train.seed` -> its value as JSON."""
    if not isinstance(value, dict) or not value:
        return {name: json.dumps(value)}
    join = " " if name == "config" else "."
    return {key: text for inner, child in value.items() for key, text in _flat(child, f"{name}{join}{inner}").items()}
