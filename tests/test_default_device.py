"""torch.set_default_device: tensors that the library makes for itself are where their readers are, whatever it says."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from powertrain.patching.attention import _agrees, _known

ROOT = Path(__file__).resolve().parent.parent / "powertrain"
FACTORIES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
# these use no tensors of another device, or (anomaly.py) read the default device on purpose
ANYWHERE = {"ops/adamw_kernels.py", "ops/grad_norm.py", "ops/rope_table.py", "train/anomaly.py"}


def _without_device(path: Path) -> Iterator[int]:
    """Lines of calls such as torch.zeros(3)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
            continue
        keywords = {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) == "torch" and not keywords & {"device", None}:
            yield node.lineno


def test_factories_name_a_device() -> None:
    """Modules' parameters are made on the default device: nn, models and compat are not looked at."""
    found = [
        f"{name}:{line}"
        for folder in ("ops", "parallel", "patching", "quant", "runtime", "train")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in ANYWHERE
        for line in _without_device(path)
    ]
    assert not found


def test_packed_rows_are_recognized() -> None:
    ids, at = torch.tensor([[0, 0, 0, 1, 1]]), torch.arange(5)
    mask = (ids[:, :, None] == ids[:, None]) & (at[:, None] >= at)
    # a device without values stands for a GPU beside tensors of the CPU
    with torch.device("meta"):
        assert _agrees(mask[:, None], ids, (-1, 0)) and not _agrees(~mask[:, None], ids, (-1, 0))
        assert _known(lambda b, h, q, k: (q >= k) & (q - k < 3), 3, None) == (2, 0)
