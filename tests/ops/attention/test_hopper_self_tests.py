"""Self-tests of the Hopper backend without a GPU: the small problem has the call's features, and wrong results fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.hopper import backward_plans, plans, self_tests
from powertrain.ops.attention.hopper.forward import launch_forward
from powertrain.ops.attention.hopper.self_tests import SmallProblem
from powertrain.ops.attention.operands import BackwardCall, OpArguments, Operands
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.ops.attention.attention_launches import META

pytestmark = pytest.mark.skipif(settings().interpret, reason="launches nothing: the same as in the run on the CPU")

CPU = torch.device("cpu")
LENGTHS = torch.tensor([200], dtype=torch.int32)
CASES: dict[str, dict[str, Any]] = {
    "causal": {"right": 0},
    "full": {},
    "window": {"left": 40, "right": 0},
    "two-sided window": {"left": 40, "right": 7},
    "softcap": {"right": 0, "softcap": 2.0},
    "alibi": {"right": 0, "slopes": torch.ones(4)},
    "sinks": {"right": 0, "sinks": torch.ones(4, dtype=torch.bfloat16)},
    "more keys": {"right": 0, "keys": 300, "bottom_right": True},
    "more keys, top left": {"right": 0, "keys": 300},
    "fewer keys": {"right": 0, "keys": 200},
    # top left: the last rows see nothing
    "window beyond the keys": {"left": 5, "right": 0, "keys": 200},
    "sinks beyond the keys": {"left": 5, "right": 0, "keys": 200, "sinks": torch.ones(4)},
    "lengths in one tensor": {"keys": 300, "query_used": LENGTHS, "key_used": LENGTHS},
    "lengths in one tensor, causal": {"right": 0, "keys": 300, "query_used": LENGTHS, "key_used": LENGTHS},
    "packed": {"right": 0, "query_starts": torch.tensor([0, 100, 256], dtype=torch.int32)},
}


def _operands(
    d_qk: int = 64, d_v: int = 64, keys: int = 256, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Operands:
    """A call of 256 queries, 4 heads."""
    args = OpArguments(*(None,) * 11, "bshd", d_qk**-0.5, 0.0, 0.0, -1, -1, 0, False)._replace(**options)
    shape: tuple[int, ...] = (1,)
    if args.query_starts is not None:
        args, shape = args._replace(layout="thd", key_starts=args.query_starts), ()
    sizes = (256, d_qk), (keys, d_qk), (keys, d_v)
    return Operands.of(*(torch.randn(*shape, n, 4, d).to(dtype) for n, d in sizes), args)


def _by_reference(small: SmallProblem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    args = small.args
    options: dict[str, Any] = {
        "is_causal": args.right == 0, "window_size": (args.left, args.right), "softcap": args.softcap or None,
        "alibi_slopes": args.slopes, "sinks": args.sinks, "return_lse": True, "backend": "reference",
        "seqused_q": args.query_used, "seqused_k": args.key_used,
    }  # fmt: skip
    if args.layout == "thd":
        result: tuple[Tensor, Tensor] = varlen_attention(query, key, value, args.query_starts, **options)
        return result
    align = "bottom_right" if args.bottom_right else "top_left"
    result = attention(query, key, value, causal_align=align, **options)
    return result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [1, 4])
def test_the_small_problem_is_right(name: str, heads: int) -> None:
    """Out, LSE and gradients are those of the reference."""
    small = SmallProblem.like(_operands(**CASES[name]), heads)
    dout, *inputs = (x.clone().requires_grad_() for x in small.inputs)
    out, lse = _by_reference(small, *(x.float() for x in inputs))
    grads = torch.autograd.grad(out, inputs, dout.float())
    torch.testing.assert_close(out.view(small.out.shape), small.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.view(small.lse.shape), small.lse, rtol=1e-4, atol=1e-4)
    for ours, exact in zip(grads, small.grads, strict=True):
        torch.testing.assert_close(ours.float().reshape(exact.shape), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_right_results_are_not_called_wrong(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither where rows see nothing, whose LSE is -inf, nor where lengths are shared."""
    call = _operands(**CASES[name])
    small = SmallProblem.like(call)
    dout, *inputs = (x.clone().requires_grad_() for x in small.inputs)
    right = _by_reference(small, *inputs)
    plan = plans.plan_for(64, 64, 512)
    assert self_tests.forward_defect(call, plan, lambda *_: right) is None
    grads = torch.autograd.grad(right[0], inputs, dout)
    monkeypatch.setattr(self_tests, "launch_backward", lambda *_: (*grads, torch.empty(0)))
    plan = backward_plans.plan_for(64, 64)
    assert self_tests.backward_defect(call, plan, backward_plans.schedule_of(call, plan)) is None


def _slow_where(is_slow: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())


# the wider the heads, the longer the reference; packs are the same at every width
@pytest.mark.parametrize(
    "head_dims, pack, partial",
    [
        _slow_where(pack in (4, 16) and dims in ((128, 128), (256, 256)), dims, pack, partial)
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
        for pack, partial in ((1, False), (4, False), (7, False), (16, False), (8, True))
    ],
)
def test_forwards_see_what_is_wrong(head_dims: tuple[int, int], pack: int, partial: bool) -> None:
    call = _operands(*head_dims, right=0)
    plan = plans.plan_for(*head_dims, 512)._replace(heads_per_tile=pack, partial=partial)
    heads = pack - partial
    small = SmallProblem.like(call, heads)
    right = _by_reference(small, *small.inputs[1:])
    assert self_tests.forward_defect(call, plan, lambda *_: right) is None
    right[0][0, 3, 0, 5] = float("nan")
    expected = f"its self-test gave 1 wrong results of {192 // heads * heads * (head_dims[1] + 1)}"
    assert self_tests.forward_defect(call, plan, lambda *_: right) == expected


@pytest.mark.parametrize(
    "width, name, deterministic, splits",
    [
        # masks are the reference's and splits the problem's, and the reference takes four times as long at 256
        _slow_where(width == 256 and (name, splits) != ("causal", 2), width, name, deterministic, splits)
        for splits in (1, 2)
        for width in (64, 256)
        for name in ("causal", "full", "packed")
        for deterministic in (False, True)
    ],
)
def test_backwards_see_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, width: int, name: str, deterministic: bool, splits: int
) -> None:
    call = _operands(width, width, deterministic=deterministic, **CASES[name])
    small = SmallProblem.like(call, splits)
    dout, *inputs = (x.clone().requires_grad_() for x in small.inputs)
    grads = list(torch.autograd.grad(_by_reference(small, *inputs)[0], inputs, dout))
    asked: list[BackwardCall] = []
    plan = backward_plans.plan_for(width, width)
    monkeypatch.setattr(self_tests, "launch_backward", lambda call, *_: asked.append(call) or (*grads, torch.empty(0)))
    schedule = backward_plans.schedule_of(call, plan)._replace(num_splits=splits)
    assert self_tests.backward_defect(call, plan, schedule) is None
    assert asked[0].args.deterministic == deterministic and asked[0].out.shape == dout.shape
    grads[1] = -grads[1]
    assert f"wrong results of {sum(x.numel() for x in grads)}" in str(self_tests.backward_defect(call, plan, schedule))


def _specs(run: Callable[[], Any]) -> dict[str, str]:
    with record("sm_90") as wanted:
        run()
    return {spec.kernel.name: spec.key for spec in wanted.specs}


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("d, dtype", [(128, torch.bfloat16), (72, torch.float16)])
def test_a_call_needs_the_kernels_that_were_tried(name: str, d: int, dtype: torch.dtype) -> None:
    """So a first call compiles one forward and one backward."""
    call = _operands(d, d, dtype=dtype, **CASES[name])
    small = SmallProblem.like(call)
    tried = Operands.of(*(x.to(META) for x in small.inputs[1:]), _on_meta(small.args))
    asked = Operands.of(*(x.tensor.to(META) for x in (call.q, call.k, call.v)), _on_meta(call.args))
    plan = plans.plan_of(asked)
    of_call = _specs(lambda: launch_forward(asked, plan))
    assert of_call == _specs(lambda: launch_forward(tried, plan))

    def backward(of: Operands) -> dict[str, str]:
        out, lse = of.outputs()
        tensors = (out, None, of.q.tensor, of.k.tensor, of.v.tensor, out, lse)
        return _specs(lambda: self_tests.launch_backward(BackwardCall(*tensors, [True] * 3 + [False], of.args), of))

    assert backward(asked) == backward(tried)


class _Stop(Exception):
    pass


@pytest.mark.parametrize("sequences, heads, kv_heads, d", [(1, 32, 8, 128), (1, 8, 2, 256), (16, 8, 8, 64)])
def test_heads_in_parts_and_sequences_by_length_are_tried(
    monkeypatch: pytest.MonkeyPatch, sequences: int, heads: int, kv_heads: int, d: int
) -> None:
    """Their backward is another kernel."""
    args = OpArguments(*(None,) * 11, "bshd", d**-0.5, 0.0, 0.0, -1, 0, 0, False)
    tokens, shape = 512, (1,)
    if sequences > 1:
        starts = torch.arange(sequences + 1, dtype=torch.int32) * (tokens // sequences)
        args, shape = args._replace(layout="thd", query_starts=starts, key_starts=starts), ()
    call = Operands.of(*(torch.randn(*shape, tokens, n, d).bfloat16() for n in (heads, kv_heads, kv_heads)), args)
    plan = backward_plans.plan_of(call)
    # which a GPU's number of SMs decides
    found = {"longest_first": True} if sequences > 1 else {"num_splits": 4}
    schedule = backward_plans.schedule_of(call, plan)._replace(**found)
    given: list[Any] = []

    def stop(*arguments: Any) -> None:
        given.extend(arguments)
        raise _Stop

    with monkeypatch.context() as patch, pytest.raises(_Stop):
        patch.setattr(self_tests, "launch_backward", stop)
        self_tests.backward_defect(call, plan, schedule)

    def specs(of: Operands, schedule: backward_plans.Schedule) -> dict[str, str]:
        of = Operands.of(*(x.tensor.to(META) for x in (of.q, of.k, of.v)), _on_meta(of.args))
        out, lse = of.outputs()
        tensors = (out, None, of.q.tensor, of.k.tensor, of.v.tensor, out, lse)
        needed = BackwardCall(*tensors, [True] * 3 + [False], of.args)
        return _specs(lambda: self_tests.launch_backward(needed, of, plan, schedule))

    assert specs(given[1], given[3]) == specs(call, schedule)


def _on_meta(args: OpArguments) -> OpArguments:
    moved = {id(x): x.to(META) for x in args if isinstance(x, Tensor)}
    return OpArguments(*(moved.get(id(x), x) for x in args))
