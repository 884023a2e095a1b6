"""cuDNN's backward behind another forward: what is handed to it, what it is not asked, who forbids it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import (
    attention,
    attention_backend,
    attention_backward,
    backend_registry,
    explain_attention,
)
from powertrain.ops.attention.backends import cudnn_backward
from powertrain.ops.attention.backends.cudnn_backward import cudnn_attention_backward, why_not_cudnn_backward
from powertrain.ops.attention.backends.versions import Installed, assume
from powertrain.ops.attention.layouts import from_bhsd
from powertrain.ops.attention.operands import BackwardCall, OpArguments
from powertrain.ops.attention.problem import Layout
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.ops.attention.attention_launches import META, any_order

PLAIN = Installed((2, 11), True, 91900)
compiled = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")


def _cudnn(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float) -> Any:
    """What aten's op computes, from out and LSE, in float64."""
    *_, max_q, max_k, dropout_p, causal = rest
    assert lse.shape == (*q.shape[:3], 1) and (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
    groups = q.shape[1] // k.shape[1]
    wide = [x.double() for x in (do, q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), out)]
    g, a, b, c, o = wide
    p = torch.exp(a @ b.mT * scale - lse.double())
    p = p.tril() if causal else p
    ds = p * (g @ c.mT - (g * o).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (-1, groups)).sum(2) for x, y in ((ds, a), (p, g)))
    return ds.to(q.dtype) @ b.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _args(layout: Layout = "bshd", **changes: Any) -> OpArguments:
    return OpArguments(*(None,) * 11, layout, 0.1, 0.0, 0.0, -1, 0, 0, True)._replace(**changes)


def _backward(call: BackwardCall) -> tuple[Tensor, ...]:
    return cudnn_attention_backward(call, call.operands())


def _why_not(out: Tensor, args: OpArguments | None = None, dlse: Tensor | None = None, **qkv: Tensor) -> str | None:
    lse = torch.empty(2, 4, 24, device=META)
    call = BackwardCall(
        dout=out, dlse=dlse, out=out, lse=lse, need=[True] * 4, args=_args() if args is None else args, **qkv
    )
    # packed sequences are refused before any size is read
    operands = call._replace(args=call.args._replace(layout="bshd")).operands()
    return why_not_cudnn_backward(call, operands)


def _tensors(layout: Layout, kv_heads: int, device: str = "cpu") -> list[Tensor]:
    """dout, query, key, value and out, b 2, s 24, 4 heads, 192/128."""
    sizes = ((4, 128), (4, 192), (kv_heads, 192), (kv_heads, 128), (4, 128))
    made = [torch.randn(2, heads, 24, d, device=device, dtype=torch.bfloat16) for heads, d in sizes]
    return [from_bhsd(x, layout).contiguous() for x in made]


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_is_handed_over(layout: Layout, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layout, with heads that share keys: cuDNN's arguments give the gradients of the call."""
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", _cudnn, raising=False)
    monkeypatch.setattr(cudnn_backward, "why_not_cudnn_backward", lambda *_: None)
    dout, *inputs, _ = _tensors(layout, 2)
    q, k, v = (x.requires_grad_() for x in inputs)
    options: dict[str, Any] = {"is_causal": causal, "layout": layout, "scale": 0.1, "backend": "reference"}
    out, lse = attention(q, k, v, return_lse=True, **options)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    args = _args(layout, right=0 if causal else -1)
    call = BackwardCall(dout, None, q, k, v, out.detach(), lse.detach(), [True] * 4, args)
    found = _backward(call)
    for ours, theirs in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    some = _backward(call._replace(need=[False, True, False, False]))
    assert [x.numel() > 0 for x in some] == [False, True, False, False]
    assert torch.equal(some[1], found[1])


def test_strides_and_what_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile was told of `empty_like`'s strides; one of the heads that a caller expanded is read and given."""
    given: list[Tensor] = []

    def cudnn(*tensors: Any, **options: Any) -> Any:
        given.extend(tensors[:4])
        return tuple(x.mT.contiguous().mT for x in _cudnn(*tensors, **options))

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", cudnn, raising=False)
    monkeypatch.setattr(cudnn_backward, "why_not_cudnn_backward", lambda *_: None)
    dout, query, key, value, out = _tensors("bshd", 1)
    key, value = (x.expand(-1, -1, 4, -1) for x in (key, value))
    lse = torch.ones(2, 4, 24)
    call = BackwardCall(dout.sum().expand_as(dout), None, query, key, value, out, lse, [True] * 4, _args())
    found = _backward(call)
    assert [x.shape[1] for x in given] == [4, 4, 1, 1] and 0 not in given[0].stride()
    for ours, told in zip(found, call.outputs(), strict=True):
        assert ours.shape == told.shape and ours.stride() == told.stride()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"layout": "thd"}, "takes bshd, bhsd and sbhd, not thd"),
        ({"left": 100}, "no sliding windows"),
        ({"softcap": 30.0}, "no softcap"),
        ({"slopes": torch.ones(4)}, "no ALiBi"),
        ({"chunk": 8}, "no chunks"),
        ({"prefix": torch.ones(2)}, "no prefixes"),
        ({"query_documents": torch.ones(2)}, "no documents"),
        ({"bias": torch.ones(24, 24)}, "no bias"),
        ({"seed": torch.ones(2)}, "seed of its own|dropout"),
        ({"key_used": torch.ones(2)}, "no padded sequences"),
        ({"query_used": torch.ones(2)}, "no padded sequences"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_it_is_not_asked(changes: dict[str, Any], reason: str) -> None:
    _, query, key, value, out = _tensors("bshd", 4, "meta")
    with record("sm_90"), assume(PLAIN):
        assert _why_not(query=query, key=key, value=value, out=out) is None
        found = _why_not(query=query, key=key, value=value, out=out, args=_args(**changes))
        assert found is not None and any(part in found for part in reason.split("|")), found


def test_tensors_it_is_not_asked() -> None:
    _, query, key, value, out = _tensors("bshd", 4, "meta")
    lse = torch.empty(2, 4, 24, device=META)

    def reason(**changes: Any) -> str:
        return _why_not(**{**dict(query=query, key=key, value=value, out=out), **changes}) or "none"

    with record("sm_90"), assume(PLAIN):
        assert reason() == "none"
        assert "LSE cannot be differentiated" in reason(dlse=lse)
        assert "out in query's dtype bfloat16, not float32" in reason(out=out.float())
        assert "query is expanded" in reason(query=query[:1].expand(2, -1, -1, -1))
        assert "multiples of 8" in reason(query=query[..., :190])
        assert "16 bytes" in reason(query=torch.empty(2, 24, 4, 197, device=META, dtype=torch.bfloat16)[..., :192])
        assert "wrong gradients" in reason(value=key, query=query[..., :128], key=key[..., :128])
        assert "single query" in reason(query=query[:, :1], args=_args(right=-1))
        assert "bottom right" in reason(query=query[:, :20])
    with record("sm_90"), assume(Installed((2, 11), True, 91002)):
        assert "before 9.15.1" in reason()
    with record("sm_80"), assume(PLAIN):
        assert "above 128 on sm_90" in reason()


def _launched(d_qk: int, d_v: int, **options: Any) -> set[str]:
    """The kernels of forward and backward by the Hopper back end."""
    q, k, v = (
        torch.empty(2, 512, 8, d, dtype=torch.bfloat16, device=META, requires_grad=True) for d in (d_qk, d_qk, d_v)
    )
    with any_order(), record("sm_90") as wanted:
        out = attention(q, k, v, backend="hopper", **{"is_causal": True} | options)
        out.backward(torch.empty_like(out))
    return {spec.kernel.name for spec in wanted.specs}


@compiled
@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "without"])
@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"deterministic": True}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (160, 160), (256, 256), (192, 192)], ids=str)
def test_what_is_explained_is_what_runs(dims: tuple[int, int], options: dict[str, Any], cudnn: bool) -> None:
    """`explain_attention` names who differentiates what the Hopper forward computed."""
    by = {
        frozenset(): "cudnn",
        frozenset({"_attention_bwd_preprocess_kernel", "_attention_dkdv_kernel", "_attention_dq_kernel"}): "triton",
    }
    given = {name: torch.empty(8, device=META) if name == "sinks" else value for name, value in options.items()}
    with assume(PLAIN), attention_backend(*(() if cudnn else ("-cudnn",))):
        launched = _launched(*dims, **given) - {"_hopper_attention_fwd_kernel"}
        with any_order():
            explained = explain_attention(
                arch="sm_90", backend="hopper", head_dim_qk=dims[0], head_dim_v=dims[1], num_heads=8, queries=512,
                software=PLAIN, **{"is_causal": True} | options,
            )  # fmt: skip
    assert explained.chosen == "hopper"
    assert explained.backward == by.get(frozenset(launched), "hopper")
    differ = f"forward by hopper, backward by {explained.backward}: "
    assert (differ in str(explained)) == (explained.backward != "hopper")


@compiled
def test_backwards_of_the_hopper_forward() -> None:
    universal = {"_attention_bwd_preprocess_kernel", "_attention_dkdv_kernel", "_attention_dq_kernel"}
    with assume(PLAIN):
        assert "_hopper_attention_bwd_kernel" in _launched(128, 128)
        assert "_hopper_attention_bwd_d192_kernel" in _launched(192, 128)
        assert "_hopper_attention_bwd_d192_kernel" in _launched(192, 128, is_causal=False)
        assert "_hopper_attention_bwd_d256_kernel" in _launched(160, 160)
        assert "_hopper_attention_bwd_d256_kernel" in _launched(256, 256)
        assert _launched(192, 128, softcap=30.0) == universal | {"_hopper_attention_fwd_kernel"}


@compiled
@pytest.mark.parametrize("d_qk, d_v", [(128, 128), (192, 128)])
def test_a_part_of_the_keys_is_differentiated_by_the_selectors_choice(
    d_qk: int, d_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def seen(name: str, call: Any) -> Any:
        return lambda *given: (asked.append(name), call(*given))[1]

    for name in ("cudnn", "hopper"):
        monkeypatch.setitem(backend_registry.loaded_backwards, name, seen(name, backend_registry.backward_op(name)))
    q, v = (torch.empty(2, 4096, 8, d, dtype=torch.bfloat16, device=META) for d in (d_qk, d_v))
    lse = torch.empty(2, 8, 4096, device=META)

    def by(wish: str, **options: Any) -> list[str]:
        asked.clear()
        with attention_backend(wish), assume(PLAIN), record("sm_90"):
            attention_backward(v, q, q, v, v, lse, is_causal=True, **options)
        return list(asked)

    with any_order():
        assert by("cudnn") == ["cudnn"] and by("triton") == []
        assert by("hopper") == ["hopper"]
        with attention_backend("-cudnn"):
            assert by("hopper") == ["hopper"]
        assert by("cudnn", grad_lse=lse) != ["cudnn"] and by("cudnn", window_size=(100, 0)) != ["cudnn"]
    # the same bits are wanted every time, which cuDNN refuses
    universal = backend_registry.backward_op("triton")
    monkeypatch.setitem(backend_registry.loaded_backwards, "triton", seen("triton", universal))
    assert by("cudnn") == by("hopper") == (["hopper"] if d_qk == 128 else ["triton"])
