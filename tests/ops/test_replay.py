"""Replayed calls: the same bits as the whole way, for every op; and what must not be replayed."""

import gc
import math
import random
import sys
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import powertrain
from powertrain.ops.cases import Case, cases
from powertrain.ops.fp8.current import new_states
from powertrain.ops.gemm import odd_widths
from powertrain.ops.gemm.odd_widths import padded_linear
from powertrain.ops.gemm.padded_mlp import padded_mlp
from powertrain.runtime import invalidation, recording, replay, signature
from powertrain.runtime.dispatch import Op, falls_back
from powertrain.runtime.launch import kernel
from powertrain.runtime.settings import settings
from tests.torch_setup import SLOW_IN_INTERPRETER

pytestmark = pytest.mark.skipif(
    not (settings().interpret or torch.cuda.is_available()), reason="replays kernels: a GPU or the interpreter"
)
_CALLS = 7  # whole, recorded, then replayed; a backward is recorded two calls later
_COMPILED = frozenset({"rms_norm", "attention", "cross_entropy"})  # in a compiled graph, likewise
_CASES = 1  # of each op; its other cases are slow tests here, and the op's own tests run them without replay


@pytest.fixture(autouse=True)
def _replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    invalidation.changed()
    monkeypatch.setattr(signature, "in_interpreter", True)
    yield
    invalidation.changed()


class _Counted:
    """Counts the replays of tapes and routes, and the ops that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tapes = self.routes = self.runs = 0
        build, run, run_op = replay.Tape.__init__, replay.Route.run, Op.run

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

        def counted_op(op: Op, args: Any) -> Any:
            self.runs += 1
            return run_op(op, args)

        monkeypatch.setattr(replay.Tape, "__init__", counting)
        monkeypatch.setattr(replay.Route, "run", counted_route)
        monkeypatch.setattr(Op, "run", counted_op)


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


def _every_case(ops: Container[str] | None = None) -> Iterator[Any]:
    """Slow in the interpreter: an op's further cases, and those of other ops than `ops`."""
    met: Counter[str] = Counter()
    for case in cases():
        met[case.op] += 1
        is_slow = met[case.op] > _CASES or (ops is not None and case.op not in ops)
        yield pytest.param(case, id=case.id, marks=SLOW_IN_INTERPRETER if is_slow else ())


@pytest.mark.parametrize("case", list(_every_case()))
def test_every_op_gives_the_same_bits(case: Case, device: torch.device, counted: _Counted) -> None:
    _same_bits(case, device)
    assert counted.tapes >= 2


@pytest.mark.parametrize("case", list(_every_case(_COMPILED)))
def test_every_op_in_a_compiled_graph(case: Case, device: torch.device, counted: _Counted) -> None:
    """There the dispatcher calls it."""
    torch._dynamo.reset()
    _same_bits(replace(case, run=torch.compile(case.run, fullgraph=True, backend="aot_eager")), device)
    # some activations are left to the compiler
    assert counted.tapes >= 2 or not counted.runs
    assert not counted.routes


def _same_bits(case: Case, device: torch.device) -> None:
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
        whole = _whole(_results, case, tensors)
        assert len(replayed) == len(whole)
        for ours, exact in zip(replayed, whole, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)
            assert ours.stride() == exact.stride()


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


@pytest.mark.parametrize("count", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_random_calls_in_any_order(count: int, device: torch.device, counted: _Counted) -> None:
    """Signatures come again and again, between others; tensors are distinct, the same, or slices of one storage."""
    draws = random.Random(0)
    torch.manual_seed(0)
    calls = [_random_call(draws, device) for _ in range(count // 6)]
    kept = []
    for _ in range(count):
        function, args, options = draws.choice(calls)
        fresh = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in _tensors(args, options)}
        if draws.random() < 0.5:  # new values at new places, with the strides and sharing they had
            args, options = _replaced(args, fresh), dict(zip(options, _replaced(options.values(), fresh), strict=True))
        modes = [
            torch.set_grad_enabled(draws.random() < 0.9),
            torch.inference_mode(draws.random() < 0.05),
            torch.autocast(device.type, torch.bfloat16, enabled=draws.random() < 0.05),
            torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
            if draws.random() < 0.1
            else nullcontext(),
        ]
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            kept.append(_same(_with_gradients, function, args, options, draws.random()))
    assert counted.routes > 10


def _with_gradients(function: Callable[..., Any], args: list[Any], options: dict[str, Any], part: float) -> list[Any]:
    """The results, then the gradients of some of them for some of the tensors."""
    results = function(*args, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    outputs = [out for out in results if out.requires_grad][: 1 if part < 0.3 else None]
    wanted = list({id(t): t for t in _tensors(args, options) if t.requires_grad}.values())[: 1 if part > 0.8 else None]
    if not outputs:
        return [[out.detach() for out in results], []]
    twice = 0.3 < part < 0.4
    seeds = [out.detach() if part < 0.9 else torch.ones_like(out[:1, :1]).expand(out.shape) for out in outputs]
    grads = torch.autograd.grad(outputs, wanted, seeds, create_graph=twice, allow_unused=True)
    return [[out.detach() for out in results], [None if g is None else g.detach() for g in grads]]


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
    with powertrain.disable("rms_norm"):
        for _ in range(3):
            assert "powertrain" not in _norm(*replayed).grad_fn.name()
    before = counted.routes
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
    table = replay.Table("op", replay.route)
    x = torch.randn(4, 16, device=device)
    signature = replay.signature_of((x,))
    assert signature is not None
    for key in range(20):
        table.record(key, signature, lambda: None)
    assert len(table._calls) <= 4


@contextmanager
def _runtime_calls(names: list[str]) -> Iterator[None]:
    """Python functions of the runtime, and generated ones, that are called within; not the interpreter's."""
    folder = f"{Path(replay.__file__).parent}/"

    def note(frame: Any, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        ours = file.startswith("<replay of") or file == "<signature>" or file.rpartition("/")[0] + "/" == folder
        if event == "call" and ours and name not in ("settings", "_are_interpreted", "<genexpr>"):
            names.append(name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_python_calls_of_replays(device: torch.device) -> None:
    """The host time of a call is its Python; the calls in it are what a noisy machine can check."""
    leaves = torch.randn(5, 32, device=device, requires_grad=True), torch.randn(32, device=device, requires_grad=True)
    x, weight = (t.detach() for t in leaves)
    dy = torch.randn_like(x)
    for _ in range(_CALLS):
        _norm(x, weight)
        _norm(*leaves).backward(dy)
    public = ["call", "modes_active", "signature_of", "read", "<lambda>", "find", "run"]
    called: list[str] = []
    with _runtime_calls(called):
        _norm(x, weight)
    assert called == [*public, "run"]
    called.clear()
    with _runtime_calls(called):
        y = _norm(*leaves)
    assert called == [*public, "function", "forward", "forward", "run"]
    if device.type == "cpu":  # on a GPU it runs in a thread of autograd's
        called.clear()
        with _runtime_calls(called):
            y.backward(dy)
        assert called == ["backward", "gradients", "modes_active", "signature_of", "read", "find", "run", "run"]


@pytest.mark.parametrize("N, K, wide, columns", [(13, 8, 8, 16), (8, 13, 16, 8)])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, True, False)])
def test_padded_products(
    N: int, K: int, wide: int, columns: int, needs: tuple[bool, ...], device: torch.device
) -> None:
    """The tensors saved depend on which gradients are wanted; the gradients are the first rows of wider tensors."""
    shapes = ((6, wide), (N, K), (N,))
    dy = torch.randn(6, columns, device=device)
    for _ in range(_CALLS):
        leaves = [torch.randn(*s, device=device, requires_grad=r) for s, r in zip(shapes, needs, strict=True)]
        wanted = [x for x in leaves if x.requires_grad]
        called: list[str] = []
        with _runtime_calls(called):
            y = padded_linear(*leaves, columns)
        found = torch.autograd.grad(y, wanted, dy)
        exact = _whole(padded_linear, *leaves, columns)
        pairs = zip((y, *found), (exact, *torch.autograd.grad(exact, wanted, dy)), strict=True)
        assert all(torch.equal(ours, right) and ours.stride() == right.stride() for ours, right in pairs)
    assert called[-4:] == ["function", "forward", "forward", "run"] and len(called) <= 12
    if device.type == "cpu":
        y, called = padded_linear(*leaves, columns), []
        with _runtime_calls(called):
            torch.autograd.grad(y, wanted, dy)
        assert called == ["backward", "gradients", "modes_active", "signature_of", "read", "find", "run", "run"]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_padded_mlps(gated: bool, autocast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One signature and one function for the whole layer; each of its nodes is replayed in backward."""
    monkeypatch.setattr(odd_widths, "is_slow", lambda x, weight: weight.shape[0] % 8 > 0)
    monkeypatch.setattr(odd_widths, "_FEWEST_ROWS_OF_ODD", 1)
    shapes = dict(weight=(13, 16), down_weight=(16, 13), bias=(13,), down_bias=(16,))
    shapes |= dict(up_weight=(13, 16), up_bias=(13,)) if gated else {}

    def layer(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return padded_mlp(x, kind="swiglu" if gated else "gelu", **given)

    for _ in range(_CALLS):
        x = torch.randn(2, 4, 16, device=device, requires_grad=True)
        given = {name: torch.randn(*shape, device=device, requires_grad=True) for name, shape in shapes.items()}
        forward, backward = [], []
        with _runtime_calls(forward):
            y = layer(x, given)
        with _runtime_calls(backward):
            found = torch.autograd.grad(y, (x, *given.values()), torch.ones_like(y))
        exact = _whole(layer, x, given)
        right = torch.autograd.grad(exact, (x, *given.values()), torch.ones_like(y))
        torch.testing.assert_close((y, *found), (exact, *right), rtol=0, atol=0)
    # 50 to 64 where each op has a signature of its own
    assert len(forward) <= 25 and "backward" not in forward
    # 8 to 11 a node
    assert device.type != "cpu" or len(backward) <= 45


def test_signatures_tell_equal_values_of_other_meaning_apart(device: torch.device) -> None:
    x = torch.randn(4, 16, device=device)
    values: list[Any] = [
        0,
        False,
        0.0,
        -0.0,
        None,
        "0.0",
        "nan",
        (0,),
        [0],
        (False,),
        (0.0,),
        (-0.0,),
        (),
        (None,),
        (0, 0),
    ]
    keys = [replay.signature_of((x, value)) for value in (*values, math.nan)]
    assert None not in keys and len({signature.key for signature in keys if signature}) == len(keys)
    y = torch.randn(4, 16, device=device)
    nested: list[Any] = [(x, y), ([x, y],), ((x, y),), ([x], y), (x, [y]), ([x], [y]), ([x, 1], y), (([x], y),)]
    keys = [replay.signature_of((*value, 3)) for value in nested]
    assert keys.pop() is None and len({signature.key for signature in keys if signature}) == len(keys)
    assert all(signature and [*map(id, signature.tensors)] == [id(x), id(y)] for signature in keys)
    assert replay.signature_of(([], (1,))) is None and replay.signature_of((x, [y, None])) is not None
    first, again = (replay.signature_of((x, float("nan"), (float("nan"),))) for _ in range(2))
    assert first is not None and again is not None and first.key == again.key


def test_tensors_that_begin_anywhere_are_replayed(device: torch.device, counted: _Counted) -> None:
    """Labels one token ahead; where in 16 bytes they begin is part of the signature, as kernels depend on it."""
    for call in range(3 * _CALLS):
        begin = call % 3
        logits, labels = torch.randn(4, 64, device=device), torch.randint(64, (4 + begin,), device=device)
        loss = powertrain.cross_entropy(logits, labels[begin:])
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels[begin:]))
    # 0 and 2 of 8 bytes are alike
    assert counted.tapes == 3 * _CALLS - 2 * 2
    x, memory = torch.randn(4, device=device), torch.randn(8, device=device)
    keys = [replay.signature_of((x, memory[begin : begin + 4])).key for begin in range(5)]  # type: ignore[union-attr]
    assert len(set(keys)) == 4 and keys[0] == keys[4]


def test_tables_hold_no_tensor_of_a_call(device: torch.device) -> None:
    kept = []
    for _ in range(_CALLS):
        x, weight = torch.randn(6, 32, device=device, requires_grad=True), torch.randn(32, device=device)
        y = _norm(x, weight)
        y.square().sum().backward()
        kept += [weakref.ref(t) for t in (x, weight, y, x.grad)]
        del x, weight, y
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_modes_see_the_backward(replayed: tuple[Tensor, Tensor], counted: _Counted) -> None:
    """A FlopCounterMode around the backward alone counts its ops."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    loss = _norm(*replayed).square().sum()
    before = counted.routes
    with Mode():
        loss.backward()
    assert any("norm_bwd" in name for name in seen) and counted.routes == before


def test_a_record_by_another_thread_spoils_a_recording(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `record()` launches do not run: a call recorded meanwhile lacks them."""
    x, weight = torch.randn(7, 32, device=device), torch.randn(32, device=device)
    _norm(x, weight)
    whole, calls = replay.Recorder.forward, []

    def disturbed(self: Any, op: Any, args: Any) -> Any:
        calls.append(op)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_enter_and_leave_record).result()
        return whole(self, op, args)

    with monkeypatch.context() as patch:
        patch.setattr(replay.Recorder, "forward", disturbed)
        _norm(x, weight)
    assert calls and replay.signature_of((x,)) is not None
    with monkeypatch.context() as patch:
        patch.setattr(replay.Route, "run", lambda *_: pytest.fail("it is replayed"))
        _norm(x, weight)


def _enter_and_leave_record() -> None:
    with recording.record():
        pass


def test_recordings_of_the_past_are_dropped(device: torch.device) -> None:
    table = replay.Table("op", replay.route)
    x = torch.randn(4, 16, device=device)
    for _ in range(20):
        invalidation.changed()
        signature = replay.signature_of((x,))
        assert signature is not None
        table.record(signature.key, signature, lambda: None)
    assert len(table._calls) == 1


@kernel()
def _copy_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < N), mask=i < N)


def _copy(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _copy_kernel[(1,)](x, y, x.numel(), BLOCK=64)
    return y


def _op(name: str, schema: str, forward: Callable[..., Any], **options: Any) -> Op:
    return Op(f"test_{name}{schema}", forward, forward, **options)


_one_op = _op("copy", "(Tensor x) -> Tensor", _copy)
_signal_op = _op("signal", "(Tensor x) -> Tensor", _copy, replays=False)
_nested_op = _op("nested", "(Tensor x) -> Tensor", lambda x: _copy(_signal_op(x)))
_unwritten_op = _op("unwritten", "(Tensor x) -> (Tensor, Tensor)", lambda x: (_copy(x), torch.empty_like(x)))
_shared_op = _op("shared", "(Tensor x) -> (Tensor, Tensor)", lambda x: (y := _copy(x), y.view(2, -1)))
_half_op = _op("half", "(Tensor x, Tensor y) -> Tensor", lambda x, y: _copy(x[8:]))
_meta_op = _op("meta", "(Tensor x) -> (Tensor, Tensor)", lambda x: (_copy(x), torch.empty(0, device="meta")))
_other_op = _op("other", "(Tensor x) -> Tensor", _copy)
_Pair = namedtuple("_Pair", "first second")


def _results_of(function: Callable[..., Any], make: Callable[[], list[Tensor]]) -> list[Any]:
    """Of calls on new tensors, the arguments kept alive."""
    kept = [make() for _ in range(_CALLS)]
    return [(args, function(*args)) for args in kept]


@pytest.mark.parametrize("op", [_nested_op, _unwritten_op, _shared_op, _meta_op], ids=lambda op: op.name)
def test_what_a_recording_does_not_show_is_not_replayed(op: Op, device: torch.device, counted: _Counted) -> None:
    for (x,), result in _results_of(op, lambda: [torch.randn(16, device=device)]):
        first = result[0] if isinstance(result, tuple) else result
        assert torch.equal(first, x)
    if op is _shared_op:
        assert result[1].shape == (2, 8)
    assert not counted.tapes


def test_a_view_is_not_taken_for_another_input(device: torch.device) -> None:
    """Two calls whose second input begins where a view of the first does, then others."""
    for call in range(_CALLS):
        x = torch.randn(40, device=device)
        second = x[8:24] if call < 2 else x[16:32]
        assert torch.equal(_half_op(x[:16], second), x[8:16])


def test_results_of_a_public_function(device: torch.device, counted: _Counted) -> None:
    """One tensor of an op among several results, 0-d ones too; a named tuple stays one; an unused twin is no base."""
    several = falls_back("test_several")(lambda x: (None, _one_op(x)))
    named = falls_back("test_named")(lambda x: _Pair(_other_op(x), None))
    for shape in ((16,), (4, 4), ()):
        for (x,), (nothing, copy) in _results_of(several, lambda shape=shape: [torch.randn(shape, device=device)]):
            assert nothing is None and torch.equal(copy, x)
    assert counted.routes == 3 * (_CALLS - 2)
    for (x,), pair in _results_of(named, lambda: [torch.randn(16, device=device)]):
        assert torch.equal(pair.first, x)
    twin = falls_back("test_twin")(lambda x, y: _one_op(y))

    def twins() -> list[Tensor]:
        x = torch.randn(4, 4, device=device)
        return [x, x.view(16)]

    for (x, _), copy in _results_of(twin, twins):
        assert torch.equal(copy, x.view(16))


_product_op = _op("product", "(Tensor x) -> Tensor", lambda x: torch.mm(_copy(x), x.T).relu_())
_dropout_op = _op("dropout", "(Tensor x) -> Tensor", lambda x: torch.dropout(_copy(x), 0.5, True))
_count_op = _op("count", "(Tensor x) -> Tensor", lambda x: _copy(x) * int((x > 0).sum()))
_picked_op = _op("picked", "(Tensor x) -> Tensor", lambda x: _copy(x[x > 0]))


def test_ops_of_pytorch_are_replayed(device: torch.device, counted: _Counted) -> None:
    for (x,), result in _results_of(_product_op, lambda: [torch.randn(4, 4, device=device)]):
        assert torch.equal(result, (x @ x.T).relu())
    assert counted.tapes == _CALLS - 2


@pytest.mark.parametrize("op", [_count_op, _picked_op], ids=lambda op: op.name)
def test_ops_that_depend_on_values_are_not(op: Op, device: torch.device, counted: _Counted) -> None:
    """Values read on the host, sizes that depend on values."""
    results = _results_of(op, lambda: [torch.randn(16, device=device)])
    assert not counted.tapes
    for (x,), result in results:
        assert torch.equal(result, x * int((x > 0).sum()) if op is _count_op else x[x > 0])


def test_a_replay_draws_anew(device: torch.device, counted: _Counted) -> None:
    results = _results_of(_dropout_op, lambda: [torch.randn(100, device=device)])
    assert counted.tapes == _CALLS - 2
    kept = [tuple((result != 0).tolist()) for _, result in results]
    assert len(set(kept)) == _CALLS


def test_a_second_backward_is_refused_after_replays(device: torch.device) -> None:
    target = torch.tensor([1, 2, 3, 0], device=device)
    for _ in range(_CALLS):
        logits = torch.randn(4, 16, device=device, requires_grad=True)
        loss = powertrain.cross_entropy(logits, target, grad_in_forward=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward is not possible"):
            loss.backward()


@pytest.mark.parametrize(
    ("by", "kept"),
    [
        ("tensor", "last"),
        pytest.param("tensor", "delayed", marks=SLOW_IN_INTERPRETER),
        *(pytest.param(by, "", marks=SLOW_IN_INTERPRETER) for by in ("tensor", "row", "block")),
    ],
)
def test_fp8_layers_of_one_shape_keep_apart(by: Any, kept: str, device: torch.device, counted: _Counted) -> None:
    """A backward uses the scales, amaxes, last scales and main_grad of its own layer."""
    layers: list[dict[str, Any]] = []
    for layer in range(2):
        weight = torch.randn(32, 48, device=device).bfloat16().requires_grad_()
        options = {"main_grad": torch.zeros(32, 48, device=device)}
        if kept == "last":
            options["last"] = new_states(3, device)
        if kept == "delayed":
            options["scales"] = torch.full((3,), 2.0**layer, device=device)
            options["amaxes"] = torch.zeros(3, device=device)
        layers.append({"weight": weight, **options})
    wholes = [{name: t.detach().clone() for name, t in layer.items()} for layer in layers]
    for call in range(_CALLS):
        for layer, whole in zip(layers, wholes, strict=True):
            x = torch.randn(2, 8, 48, device=device).bfloat16() * (call + 1)
            dy = torch.randn(2, 8, 32, device=device).bfloat16()
            found = _fp8_step(x, dy, by, layer)
            exact = _whole(_fp8_step, x, dy, by, whole)
            for ours, right in zip(found, exact, strict=True):
                assert torch.equal(ours, right) and ours.stride() == right.stride()
            for name, ours in layer.items():
                assert torch.equal(ours, whole[name]), name
    assert counted.routes >= 2 * 2 * (_CALLS - 4)  # forward and backward of each layer
    if kept == "last":
        assert all((layer["last"][:, 2] == _CALLS).all() and (layer["last"][0, 3] > 1) for layer in layers)


def _fp8_step(x: Tensor, dy: Tensor, by: Any, layer: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = powertrain.fp8_linear(
        x, layer["weight"].requires_grad_(), by=by, **{k: v for k, v in layer.items() if k != "weight"}
    )
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


_strided_op = _op("strided", "(Tensor x) -> Tensor", lambda x: _copy(x.t().reshape(-1)))


@pytest.mark.parametrize("autocast", [False, True])
def test_fresh_values_in_inference_mode(autocast: bool, device: torch.device) -> None:
    """PyTorch does not take its composite ops apart there: `to` and `reshape` may copy and say that they view."""
    weight = torch.randn(16, 16, device=device)
    for call in range(_CALLS):
        x = torch.randn(16, 16, device=device)
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            normed = powertrain.rms_norm(x.t(), weight[0])
            adapted = powertrain.lora_linear(x, weight, weight[:4], weight[:, :4].contiguous())
            copied = _strided_op(x[:4, :4])
        with torch.no_grad():
            again = _strided_op(x[:4, :4])
        exact = torch.nn.functional.rms_norm(x.t(), (16,), weight[0])
        torch.testing.assert_close(normed.float(), exact, atol=0.1, rtol=0.1)
        wide = x @ weight.T + x @ weight[:4].T @ weight[:, :4].T
        assert (adapted.float() - wide).norm() < 0.05 * wide.norm(), call
        assert torch.equal(copied, x[:4, :4].t().reshape(-1)) and torch.equal(again, copied)


def test_autocast_keeps_no_weight_of_a_recording(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8, device=device))
    product = falls_back("test_product")(lambda x, w: torch.nn.functional.linear(x, w))
    for _ in range(_CALLS):
        x = torch.randn(4, 8, device=device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            product(x, weight)
            found = product(x, weight)
        assert torch.equal(found, x.bfloat16() @ weight.detach().bfloat16().T)
        weight.data = weight.data.clone().normal_()


def test_detached_results_stay_detached(device: torch.device) -> None:
    double = falls_back("test_double")(lambda x: x.detach() * 2)
    for _ in range(_CALLS):
        assert not double(torch.randn(8, device=device, requires_grad=True)).requires_grad


def _attention(bias: Tensor | None = None, **options: Any) -> Callable[..., Any]:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return powertrain.attention(query, key, value, attn_bias=bias, backend="triton", **options)

    return call


def _forms(device: torch.device) -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]]:
    """Calls that view, convert or draw something ahead of their op, or return more than its results, and the sizes of
    their tensors."""
    rows = [(2, 9, 2, 16)] * 3
    ids, target = (torch.zeros(*size, dtype=torch.int64, device=device) for size in ((2, 9), (12,)))
    starts = torch.tensor([0, 3, 9], device=device)
    slopes = torch.rand(2, device=device).bfloat16()
    seen = torch.rand(9, 9, device=device) > 0.3
    return {
        "int64 ids, bfloat16 slopes": (_attention(is_causal=True, document_ids=ids, alibi_slopes=slopes), rows),
        "float32 under autocast": (torch.autocast(device.type, torch.bfloat16)(_attention(is_causal=True)), rows),
        "a bias of 3 dims": (lambda q, k, v, bias: _attention(bias)(q, k, v), [*rows, (2, 9, 9)]),
        "a mask of 2 dims": (_attention(seen), rows),
        "ids of queries and of keys": (_attention(document_ids=(ids, ids.int())), rows),
        "lists of tensors": (
            lambda *parts: powertrain.merge_attentions(parts[:2], list(parts[2:])),
            [(2, 9, 2, 16)] * 2 + [(2, 2, 9)] * 2,
        ),
        "dropout": (_attention(dropout_p=0.3), rows),
        "int64 cu_seqlens": (
            lambda q, k, v: powertrain.varlen_attention(q, k, v, starts, backend="triton"), [(9, 2, 16)] * 3,
        ),
        "cross entropy": (lambda x: powertrain.cross_entropy(x, target.view(2, 6)), [(2, 6, 20)]),
        "log probabilities": (lambda x, w: powertrain.linear_log_probs(x, w, target), [(12, 16), (50, 16)]),
        "dropout of a residual": (lambda x, b, r: powertrain.bias_dropout_add(x, b, r, 0.3), [(4, 8), (8,), (4, 8)]),
        "a gradient that is the output's": (
            lambda x, b, r: powertrain.bias_dropout_add(x, b, r, 0.0), [(4, 8), (8,), (4, 8)],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(_forms(torch.device("cpu"))))
def test_what_stands_around_an_op_is_repeated(
    name: str, device: torch.device, counted: _Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, sizes = _forms(device)[name]
    for call in range(_CALLS):
        leaves = [torch.randn(size, device=device, requires_grad=True) for size in sizes]

        def results(leaves: list[Tensor] = leaves, call: int = call) -> list[Tensor]:
            torch.manual_seed(call)
            out = function(*leaves)
            outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None and x.requires_grad]
            return [*outs, *torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs], retain_graph=True)]

        replayed = results()
        if call < _CALLS - 1:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(replay, "signature_of", lambda values: None)
            whole = results()
        assert all(map(torch.equal, replayed, whole))
    # of the function, and of its backward
    assert counted.routes >= 2 * (_CALLS - 4)


@falls_back("test_mixed")
def _mixed(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.nn.functional.linear(x, weight, bias)
    left, right = wide.chunk(2, -1)
    normed = powertrain.rms_norm(left.contiguous())
    return torch.softmax(normed * right.detach().exp(), -1) + x.sum(), wide.view(-1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["mixed", "attention"])
def test_ops_of_pytorch_are_repeated_with_their_gradients(
    name: str, autocast: bool, device: torch.device, counted: _Counted
) -> None:
    sizes: list[tuple[int, ...]] = [(4, 8), (16, 8), (16,)]
    function: Callable[..., Any] = _mixed
    if name == "attention":
        # PyTorch's kernels alone: nothing of ours is differentiated
        sizes, backend = [(2, 9, 2, 16)] * 3, "cpu" if device.type == "cpu" else "efficient"
        function = partial(powertrain.attention, deterministic=False, backend=backend)

    def results(leaves: list[Tensor]) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = function(*leaves)
        outs = list(out) if isinstance(out, tuple) else [out]
        return [*outs, *torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])]

    for _ in range(_CALLS):
        leaves = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
        _same(results, leaves)
    assert counted.routes >= _CALLS - 2


def test_results_between_ops_end_with_their_last_use(device: torch.device, counted: _Counted) -> None:
    kept: list[Any] = []

    @falls_back("test_ends")
    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * 2.0
        return powertrain.rms_norm(x)

    for call in range(_CALLS):
        x = torch.randn(4, 16, device=device, requires_grad=True)
        with _results_alive(kept if call == _CALLS - 1 else []):
            chain(x)
    assert counted.routes >= _CALLS - 2 and len(kept) == 3
    # two at a time: a product's argument and its result
    assert max(kept) <= 2


@contextmanager
def _results_alive(numbers: list[int]) -> Iterator[None]:
    """How many results of a replayed call are alive behind each product."""

    def note(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename == "<replay of several ops>" and event == "c_return":
            numbers.append(sum(isinstance(x, Tensor) for name, x in frame.f_locals.items() if name.startswith("o")) + 1)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        del numbers[3:]


def _slope(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.enable_grad():
        leaf = of(x)
        return torch.autograd.grad((leaf.exp() * leaf).sum(), leaf)[0]


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("of", [lambda x: x.detach().requires_grad_(), lambda x: x], ids=["leaf", "itself"])
def test_gradients_within_a_call(
    of: Callable[[Tensor], Tensor], wants: bool, device: torch.device, counted: _Counted
) -> None:
    function = falls_back("test_slope")(lambda x: _slope(x, of))
    for _ in range(_CALLS):
        x = torch.randn(8, device=device, requires_grad=True)
        with torch.set_grad_enabled(wants):
            found = function(x)
        assert not found.requires_grad
        torch.testing.assert_close(found, x.detach().exp() * (1 + x.detach()))
    assert not counted.routes


def test_what_gradients_are_kept_from_is_not_repeated_with_them(device: torch.device) -> None:
    @falls_back("rms_norm")
    def scaled(x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = x.abs().amax()
        return powertrain.rms_norm(x, largest.expand(8).contiguous())

    for _ in range(_CALLS):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        (found,) = torch.autograd.grad(scaled(x).sum(), x)
        (exact,) = torch.autograd.grad((torch.nn.functional.rms_norm(x, (8,)) * x.detach().abs().amax()).sum(), x)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_a_rotation_in_place_is_counted_as_a_version_each_time(device: torch.device) -> None:
    q, table = torch.randn(1, 9, 2, 16, device=device), powertrain.rope_table(16, 9, device=device)
    for call in range(_CALLS):
        assert powertrain.rope(q, table=table, inplace=True) is q
        assert q._version == call + 1


@pytest.mark.parametrize("has_guards", [True, False])
def test_layouts_are_told_apart(has_guards: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's tensors in more layouts than are tried first, and in the states that Dynamo's guards compare too."""
    monkeypatch.setattr(signature, "_readers", {})
    if not has_guards:
        monkeypatch.setattr(signature, "_TensorGuards", None)
    x, w = torch.randn(8, 8, device=device), torch.randn(8, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: (x, w),
        "shape": lambda: (x[:4], w),
        "stride": lambda: (x.t(), w),
        "dtype": lambda: (x.bfloat16(), w),
        "other dtype": lambda: (x, w.bfloat16()),
        "requires_grad": lambda: (x.clone().requires_grad_(), w),
        "parameter": lambda: (x, torch.nn.Parameter(w)),
        "0-d": lambda: (x, x.new_zeros(())),
        "twice": lambda: (x, x),
        "empty": lambda: (x[:0], w),
        "4 bytes on": lambda: (x.view(-1)[1:33].view(4, 8), w),
        "8 bytes on": lambda: (x.view(-1)[2:34].view(4, 8), w),
    }
    keys = {}
    for _ in range(2):
        for name, make in calls.items():
            found = replay.signature_of(make())
            assert found is not None and keys.setdefault(name, found.key) == found.key
    with torch.no_grad():
        keys |= {f"{name}, no_grad": _key(make()) for name, make in calls.items()}
    with torch.inference_mode():
        keys |= {f"{name}, inference": _key(make()) for name, make in calls.items()}
    assert len(set(keys.values())) == 3 * len(calls)
    assert replay.signature_of((x, w)).key == keys["plain"]  # type: ignore[union-attr]
    assert replay.signature_of((torch._neg_view(x), w)) is None
    for other in (torch.nested.nested_tensor([x, x[:3]]), x.to_sparse(), x.to_sparse_csr(), x.to("meta")):
        assert replay.signature_of((other, w)) is None and replay.signature_of((other.detach(), w)) is None
    assert replay.signature_of((x.to("meta"), w)) is None and replay.signature_of((x, w.to("meta"))) is None


def _key(values: tuple[Any, ...]) -> Any:
    found = replay.signature_of(values)
    assert found is not None
    return found.key


@pytest.mark.parametrize("way", ["misaligned", "other dtype"])
def test_a_weight_that_changes_between_forward_and_backward(way: str, device: torch.device) -> None:
    """As FSDP does: the saved tensor has other memory then. The backward has its own signature."""
    for _ in range(_CALLS):
        grads = []
        fresh = torch.randn(5, 32, device=device), torch.randn(33, device=device)
        for step in (_swapped_step, lambda *args: _whole(_swapped_step, *args)):
            grads.append(step(*(t.clone() for t in fresh), way))
        torch.testing.assert_close(*grads, rtol=0, atol=0)


def _swapped_step(x: Tensor, values: Tensor, way: str) -> list[Tensor]:
    x.requires_grad_()
    weight = torch.nn.Parameter(values[:32].clone())
    y = powertrain.rms_norm(x, weight)
    weight.data = values[1:33] if way == "misaligned" else values[:32].bfloat16()
    return list(torch.autograd.grad(y, (x, weight) if way == "misaligned" else x, torch.ones_like(y)))


def _keeps(name: str, setup: Callable[..., None]) -> Op:
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        last = ctx.held[-1] if isinstance(ctx.held, (list, tuple)) else ctx.held["last"]
        return _copy(dy.contiguous()) * 1 if ctx.first is None else _copy(last) * ctx.scale, None, None

    return Op(
        f"test_keeps_{name}(Tensor x, Tensor y, float scale) -> Tensor", lambda x, y, scale: _copy(x),
        lambda x, y, scale: torch.empty_like(x), backward=backward, setup_context=setup,
    )  # fmt: skip


def _hold_listed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(None, inputs[0], output)
    ctx.first, ctx.held, ctx.scale = inputs[0].shape, [1, inputs[1]], inputs[2]


def _hold_named(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.first, ctx.held, ctx.scale = 1, {"last": inputs[1]}, inputs[2]


def _save_other(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0] * 2)
    ctx.first, ctx.held, ctx.scale = 1, (inputs[1],), inputs[2]


@pytest.mark.parametrize(
    ("op", "replays"),
    [
        (_keeps("listed", _hold_listed), True),
        (_keeps("named", _hold_named), False),
        (_keeps("other", _save_other), False),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else None,
)
def test_what_an_op_keeps(op: Op, replays: bool, device: torch.device, counted: _Counted) -> None:
    """Tensors among its attributes, read when the backward runs; others than arguments and results are not replayed."""
    function = falls_back(op.name)(lambda x, y, scale: op(x, y, scale))
    for call in range(_CALLS):
        x, y = torch.randn(16, device=device, requires_grad=True), torch.randn(16, device=device)
        out = function(x, y, 3.0)
        y.fill_(call)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert torch.equal(out.detach(), x.detach()) and torch.equal(grad, torch.full_like(grad, 3.0 * call))
    assert (counted.routes > 0) is replays


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _other_op(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * dy


def test_gradients_of_another_function_are_not_lost(device: torch.device) -> None:
    """One that has an op of ours in its forward; alone, and beside an op that is differentiated."""
    alone = falls_back("test_alone")(lambda x, weight: _Tripled.apply(x))
    beside = falls_back("test_beside")(lambda x, weight: (_Tripled.apply(x), _norm(x, weight)))
    for _ in range(_CALLS):
        x, weight = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((4, 16), (16,)))
        for y in (alone(x, weight), beside(x, weight)[0]):
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert torch.equal(grad, torch.full_like(grad, 3))


def _copy_past_an_empty_part(x: Tensor) -> Tensor:
    y, between = torch.empty_like(x), torch.empty_like(x)
    for source, target in ((x[16:], between), (x, between), (between[:0], y), (between, y)):
        _copy_kernel[(1,)](source, target, source.numel(), BLOCK=64)
    return y


_emptied_op = _op("emptied", "(Tensor x) -> Tensor", _copy_past_an_empty_part)


def test_an_empty_part_is_anywhere(device: torch.device, counted: _Counted) -> None:
    """Its address is 0, which is no distance from that of what it is a part of."""
    for (x,), result in _results_of(_emptied_op, lambda: [torch.randn(16, device=device)]):
        assert torch.equal(result, x)
    assert counted.tapes == _CALLS - 2
