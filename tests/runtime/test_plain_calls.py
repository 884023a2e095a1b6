"""Repeated calls on a CPU without kernels: the bits of the whole way, its errors, and few functions of Python."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain as pt
from powertrain.ops.cases import Case, cases
from powertrain.runtime import replay
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(settings().interpret, reason="in the interpreter kernels compute")
_CALLS = 3  # the first one goes the whole way
_PACKAGE = f"{Path(pt.__file__).parent}/"


def _results(case: Case, tensors: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs, then gradients of every input that wants one."""
    torch.manual_seed(1)
    result = case.run(**tensors)
    outputs = list(result) if isinstance(result, tuple) else [result]
    wanted = [t for t in tensors.values() if isinstance(t, Tensor) and t.requires_grad]
    floats = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    grads = torch.autograd.grad(floats, wanted, [*map(torch.ones_like, floats)], allow_unused=True) if floats else ()
    return [x.detach() for x in (*outputs, *grads) if isinstance(x, Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases()])
def test_every_op_gives_the_same_bits(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values at each call."""
    for call in range(_CALLS):
        torch.manual_seed(call)
        tensors = case.inputs(case.tiny, dtype, torch.device("cpu"))
        repeated = _results(case, tensors)
        with monkeypatch.context() as patch:
            patch.setattr(replay, "signature_of", lambda values: None)
            whole = _results(case, tensors)
        for ours, exact in zip(repeated, whole, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)
            assert ours.stride() == exact.stride()


def test_no_tensor_is_kept() -> None:
    made = []
    for case in cases():
        tensors = case.inputs(case.tiny, torch.float32, torch.device("cpu"))
        case.run(**tensors)
        made += [(case.id, name, weakref.ref(x)) for name, x in tensors.items() if x is not None]
    del tensors, case
    gc.collect()  # once: it goes through all of torch
    assert not [(op, name) for op, name, x in made if x() is not None]


@contextmanager
def _calls(names: list[str]) -> Iterator[None]:
    """Functions of this package, and generated ones, that are called within."""

    def note(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and (file.startswith(_PACKAGE) or file in ("<signature>", "<string>")):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


_TABLE = pt.rope_table(8, 16)
# of each op: a call, and how many functions are called in it. Ten are the way to the function that was kept
_BUDGETS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "rms_norm": (lambda x: pt.rms_norm(x, x[0, 0, 0]), 12),
    "activation": (lambda x: pt.activation(x, "gelu"), 11),
    "gated_activation": (lambda x: pt.gated_activation(x, "swiglu"), 12),
    "bias_dropout_add": (lambda x: pt.bias_dropout_add(x, x[0, 0, 0], None, 0.25), 11),
    "cross_entropy": (lambda x: pt.cross_entropy(x, torch.zeros(x.shape[:-1], dtype=torch.int64)), 12),
    "linear_activation": (lambda x: pt.linear_activation(x, x[0, 0], "gelu"), 11),
    "attention": (lambda x: pt.attention(x, x[:], x[:], is_causal=True), 24),
    "rope": (lambda x: pt.rope(x, table=_TABLE), 21),
}


@pytest.mark.parametrize("op", _BUDGETS)
def test_python_calls(op: str) -> None:
    """Python functions that a call enters: most of its host time, and the same number on a noisy machine."""
    run, budget = _BUDGETS[op]
    x = torch.randn(2, 4, 2, 8)
    for _ in range(2):
        run(x)
    names: list[str] = []
    with _calls(names):
        run(x)
    assert names[:2] == ["call", "modes_active"] or op == "linear_activation"
    assert len(names) <= budget, names


def test_errors_of_repeated_calls() -> None:
    x, table = torch.randn(2, 4, 2, 8), pt.rope_table(8, 16)
    logits = torch.randn(4, 5)
    for _ in range(3):
        pt.rope(x, table=table, position_ids=torch.arange(4)[None])
        pt.cross_entropy(logits, torch.arange(4))
        pt.rms_norm(x, x[0, 0, 0])
        with pytest.raises(IndexError, match=r"positions must be in \[0, 16\), the table's, got 17"):
            pt.rope(x, table=table, position_ids=torch.arange(14, 18)[None])
        with pytest.raises(IndexError):
            pt.cross_entropy(logits, torch.arange(4) + 3)
        with pytest.raises(ValueError, match=r"rms_norm: eps must be at least 0 and finite, got -1\.0"):
            pt.rms_norm(x, x[0, 0, 0], eps=-1.0)
        with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[8\]"):
            pt.rms_norm(x, x[0, 0, :, :7])
        with pytest.raises(TypeError, match="rms_norm: zero_centered must be True or False"):
            pt.rms_norm(x, x[0, 0, 0], zero_centered="no")  # type: ignore[arg-type]


def test_what_a_call_depends_on_is_seen() -> None:
    """Modes, settings and contexts between calls of one shape."""
    x = torch.randn(4, 16, requires_grad=True)
    weight = torch.randn(32, 16)

    def layer() -> Tensor:
        return pt.linear_activation(x, weight, "gelu")

    for _ in range(3):
        assert layer().dtype is torch.float32 and layer().requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert layer().dtype is torch.bfloat16
            assert pt.rms_norm(x).dtype is torch.float32
        with torch.no_grad():
            assert not layer().requires_grad
        with torch.inference_mode():
            assert layer().is_inference()
        assert torch.equal(
            pt.attention(*[x[None, :, None]] * 3), pt.attention(*(x[None, :, None].clone() for _ in "qkv"))
        )
        with pt.attention_backend("reference"):
            pt.attention(*[x[None, :, None]] * 3)
        with pt.batch_invariant():
            alone, together = pt.activation(x[:1], "gelu"), pt.activation(x, "gelu")
        assert torch.equal(alone, together[:1])


def test_a_tensor_given_twice() -> None:
    q, k = torch.randn(2, 2, 4, 2, 8)
    for _ in range(2):
        right = pt.rope(q, table=_TABLE), pt.rope(k, table=_TABLE)
        for given in ((q, q), (q, k), (k, q)):
            turned = pt.rope(*given, table=_TABLE)
            assert all(torch.equal(x, right[y is k]) for x, y in zip(turned, given, strict=True))


def test_dropout_draws_at_each_call() -> None:
    x, residual = torch.randn(8, 64), torch.randn(8, 64)
    torch.manual_seed(0)
    first = [pt.bias_dropout_add(x, None, residual, 0.5) for _ in range(3)]
    torch.manual_seed(0)
    again = [pt.bias_dropout_add(x, None, residual, 0.5) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and not torch.equal(first[0], first[1])
    seeds = [torch.tensor([n, 7]) for n in (1, 2, 1)]
    one, two, same = (pt.bias_dropout_add(x, None, residual, 0.5, seed=seed) for seed in seeds)
    assert torch.equal(one, same) and not torch.equal(one, two)


def test_a_function_around_an_op_is_not_taken_for_it() -> None:
    """Of a public function that changes what an op returns, or calls two, nothing is kept."""
    from powertrain.runtime.dispatch import falls_back

    @falls_back("rms_norm")
    def twice(x: Tensor, times: int) -> Tensor:
        return pt.rms_norm(x) * times

    @falls_back("rms_norm")
    def other(x: Tensor) -> Tensor:
        return pt.rms_norm(x * 2)

    x = torch.randn(4, 16)
    for _ in range(3):
        torch.testing.assert_close(twice(x, 2), 2 * pt.rms_norm(x))
        torch.testing.assert_close(other(x + 1), pt.rms_norm(2 * x + 2))
