"""Replayed calls: the same bits as the whole way, for every op; and what must not be replayed."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import powertrain
from powertrain.ops.cases import Case, cases
from powertrain.runtime import replay, steering
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(
    not (settings().interpret or torch.cuda.is_available()), reason="replays kernels: a GPU or the interpreter"
)
_CALLS = 7  # whole, recorded, then replayed; a backward is recorded two calls later


@pytest.fixture(autouse=True)
def _replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    steering.changed()
    monkeypatch.setattr(replay, "in_interpreter", True)
    yield
    steering.changed()


# their forwards also call products or copies of PyTorch
_NOT_REPLAYED = ("linear_cross_entropy", "linear_log_probs", "lora_linear")


class _Counted:
    """Counts the replays of tapes and routes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tapes = self.routes = 0
        build, run = replay.Tape.__init__, replay.Route.run

        def counting(tape: Any, *args: Any) -> None:
            build(tape, *args)
            whole = tape.run

            def counted(*given: Any) -> Any:
                self.tapes += 1
                return whole(*given)

            tape.run = counted

        def counted_route(route: Any, tensors: Any) -> Any:
            self.routes += 1
            return run(route, tensors)

        monkeypatch.setattr(replay.Tape, "__init__", counting)
        monkeypatch.setattr(replay.Route, "run", counted_route)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    return _Counted(monkeypatch)


def _results(case: Case, tensors: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs, then gradients of every input that wants one."""
    result = case.run(**tensors)
    outputs = list(result) if isinstance(result, tuple) else [result]
    wanted = [t for t in tensors.values() if isinstance(t, Tensor) and t.requires_grad]
    floats = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    grads: list[Any] = []
    if floats:
        draws = torch.Generator(floats[0].device).manual_seed(1)
        seeds = [torch.randn(x.shape, generator=draws, device=x.device).to(x.dtype) for x in floats]
        grads = list(torch.autograd.grad(floats, wanted, seeds, allow_unused=True))
    return [x.detach() for x in (*outputs, *grads) if isinstance(x, Tensor)]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_every_op_gives_the_same_bits(
    case: Case, device: torch.device, counted: _Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values, at other addresses, at each call."""
    kept = []
    for call in range(_CALLS):
        torch.manual_seed(call)
        tensors = case.inputs(case.tiny, torch.bfloat16, device)
        random = torch.random.get_rng_state()
        replayed = _results(case, tensors)
        kept.append((tensors, replayed))  # so that no address comes twice
        if call < _CALLS - 2:
            continue
        torch.random.set_rng_state(random)
        with monkeypatch.context() as patch:
            patch.setattr(replay, "signature_of", lambda values: None)
            whole = _results(case, tensors)
        assert len(replayed) == len(whole)
        for ours, exact in zip(replayed, whole, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)
            assert ours.stride() == exact.stride()
    assert counted.tapes >= 2 or case.op in _NOT_REPLAYED


def _whole(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call without replays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "signature_of", lambda values: None)
        return function(*args, **kwargs)


def _same(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call's results, which are those of the whole way bit for bit."""
    results = function(*args, **kwargs)
    torch.testing.assert_close(results, _whole(function, *args, **kwargs), rtol=0, atol=0, equal_nan=True)
    return results


def _random_call(draws: random.Random, device: torch.device) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    def randn(*shape: int) -> Tensor:
        x = torch.randn(*shape, device=device, requires_grad=draws.random() < 0.5)
        return x

    rows, hidden = draws.choice([3, 8]), draws.choice([16, 36])
    if draws.random() < 0.5:
        x = randn(rows, hidden)
        if draws.random() < 0.3:
            x = randn(hidden, rows).t() if draws.random() < 0.5 else randn(rows, 2 * hidden)[:, :hidden]
        weight = draws.choice([None, randn(hidden)])
        options = {"eps": draws.choice([1e-6, 1e-5]), "zero_centered": draws.random() < 0.5}
        options |= {"residual": draws.choice([None, x, randn(rows, hidden)])}
        return powertrain.rms_norm, [x, weight], options
    shape = (1, draws.choice([4, 9]), draws.choice([2, 4]), 16)
    q, k, v = (randn(*shape) for _ in range(3))
    if draws.random() < 0.5:  # three slices of one storage, in any order
        q, k, v = draws.sample(list(randn(3, *shape).unbind()), 3)
    if draws.random() < 0.2:
        v = k
    options = {"is_causal": draws.random() < 0.5, "softcap": draws.choice([None, 2.0])}
    options |= {"return_lse": draws.random() < 0.5, "window_size": draws.choice([(-1, -1), (2, 0)])}
    return powertrain.attention, [q, k, v], options


def test_random_calls_in_any_order(device: torch.device, counted: _Counted) -> None:
    """Signatures come again and again, between others; tensors are distinct, the same, or slices of one storage."""
    draws = random.Random(0)
    torch.manual_seed(0)
    calls = [_random_call(draws, device) for _ in range(12)]
    kept = []
    for _ in range(40):
        function, args, options = draws.choice(calls)
        fresh = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in _tensors(args, options)}
        if draws.random() < 0.5:  # new values at new places, with the strides and sharing they had
            args, options = _replaced(args, fresh), dict(zip(options, _replaced(options.values(), fresh), strict=True))
        with torch.set_grad_enabled(draws.random() < 0.7):
            kept.append(_same(function, *args, **options))
    assert counted.routes > 10


def _tensors(args: list[Any], options: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*args, *options.values()) if isinstance(x, Tensor)]


def _replaced(values: Iterable[Any], fresh: dict[int, Tensor]) -> list[Any]:
    return [fresh.get(id(value), value) for value in values]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return powertrain.rms_norm(x, weight)


@pytest.fixture
def replayed(device: torch.device, counted: _Counted) -> tuple[Tensor, Tensor]:
    """Arguments of `_norm` whose calls are replayed, forward and backward."""
    x, weight = (
        torch.randn(5, 32, device=device, requires_grad=True),
        torch.randn(32, device=device, requires_grad=True),
    )
    for _ in range(_CALLS):
        _norm(x, weight).square().sum().backward()
    before = counted.routes
    _norm(x, weight).square().sum().backward()
    assert counted.routes == before + 2
    return x, weight


def test_disable_ends_and_resumes_it(replayed: tuple[Tensor, Tensor], counted: _Counted) -> None:
    before = counted.routes
    with powertrain.disable("rms_norm"):
        for _ in range(3):
            assert "powertrain" not in _norm(*replayed).grad_fn.name()
    assert counted.routes == before
    for _ in range(3):
        assert "powertrain" in _norm(*replayed).grad_fn.name()
    assert counted.routes > before


def test_a_bad_argument_is_still_named(replayed: tuple[Tensor, Tensor]) -> None:
    x, weight = replayed
    with pytest.raises(ValueError, match="rms_norm: weight must have shape"):
        _norm(x, weight[:16])


def test_double_backward_is_still_refused(replayed: tuple[Tensor, Tensor]) -> None:
    x, weight = replayed
    (grad,) = torch.autograd.grad(_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_only_wanted_gradients(device: torch.device, needs: tuple[bool, bool]) -> None:
    x, weight = (torch.randn(*s, device=device, requires_grad=n) for s, n in zip(((5, 32), (32,)), needs, strict=True))
    for _ in range(_CALLS):
        x.grad = weight.grad = None
        _norm(x, weight).square().sum().backward()
        ours = x.grad, weight.grad
        x.grad = weight.grad = None
        _whole(lambda: _norm(x, weight).square().sum().backward())
        for grad, exact, need in zip(ours, (x.grad, weight.grad), needs, strict=True):
            assert (grad is not None) is need
            assert grad is None or torch.equal(grad, exact)


def test_checkpointing_and_saved_tensor_hooks(replayed: tuple[Tensor, Tensor]) -> None:
    x, weight = replayed

    def grads(step: Callable[[], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(step().square().sum(), (x, weight)))

    exact = _whole(grads, lambda: _norm(x, weight))
    for _ in range(_CALLS):
        again = grads(lambda: torch.utils.checkpoint.checkpoint(_norm, x, weight, use_reentrant=False))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            hooked = grads(lambda: _norm(x, weight))
        for ours in (again, hooked):
            assert all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))


def test_modes_see_the_op(replayed: tuple[Tensor, Tensor], counted: _Counted) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    before = counted.routes
    with Mode():
        _norm(*replayed)
    assert any("norm_fwd" in name for name in seen) and counted.routes == before


def test_inference_mode(replayed: tuple[Tensor, Tensor]) -> None:
    with torch.inference_mode():
        for _ in range(_CALLS):
            assert _same(_norm, *(t.detach() for t in replayed)).is_inference()


def test_threads(replayed: tuple[Tensor, Tensor]) -> None:
    if replayed[0].device.type == "cpu":
        pytest.skip("Triton's interpreter is not made for threads")
    x, weight = replayed

    def work(seed: int) -> bool:
        draws = torch.Generator(x.device).manual_seed(seed)
        own = torch.randn(x.shape, generator=draws, device=x.device)
        exact = powertrain.ops.norm.rms_norm_ref(own, weight.detach())
        return all(torch.allclose(powertrain.rms_norm(own, weight.detach()), exact, atol=1e-5) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_the_table_is_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_SIGNATURES", 4)
    table = replay.Table("op", replay.Recorder.route)
    x = torch.randn(4, 16, device=device)
    signature = replay.signature_of((x,))
    assert signature is not None
    for key in range(20):
        table.record(key, signature, lambda: None)
    assert len(table._calls) <= 4


def test_python_calls_of_a_replayed_forward(replayed: tuple[Tensor, Tensor]) -> None:
    """The host time of a call is its Python; their number is what a noisy machine can check. 9 on 2026-11-23."""
    if replayed[0].device.type == "cpu":
        pytest.skip("the interpreter's own calls count too")
    x, weight = (t.detach() for t in replayed)
    for _ in range(_CALLS):
        _norm(x, weight)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    _norm(x, weight)
    sys.setprofile(None)
    assert calls <= 20, f"{calls} Python calls"
