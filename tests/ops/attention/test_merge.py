"""merge_attentions: parts of an attention put together again, values and gradients; layouts, empty parts, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain
from powertrain.ops.attention.backends.reference import attention_ref
from powertrain.ops.attention.merge import merge_attentions, merge_attentions_ref
from powertrain.testing.numerics import check

B, S, H, K, D = 2, 3, 4, 2, 20


def _qkv(device: torch.device, keys: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    shapes = {"q": (B, S, H, D), "k": (B, keys, K, D), "v": (B, keys, K, D)}
    return {n: torch.randn(s, device=device).to(dtype).requires_grad_() for n, s in shapes.items()}


def _in_parts(merge: Any, ends: list[int]) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        parts = [attention_ref(q, k[:, a:b], v[:, a:b]) for a, b in spans]
        return merge([out for out, _ in parts], [lse for _, lse in parts])

    return run


# one part; two; five, an empty one among them
@pytest.mark.parametrize("ends", [[11], [4, 11], [1, 4, 4, 9, 11]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_parts_make_the_whole(ends: list[int], dtype: torch.dtype, device: torch.device) -> None:
    whole = lambda q, k, v: attention_ref(q, k, v)  # noqa: E731
    check(_in_parts(merge_attentions, ends), _in_parts(merge_attentions_ref, ends), whole, _qkv(device, 11, dtype))


@pytest.mark.parametrize("count", [2, 3])
def test_a_part_of_nan_makes_the_row_nan(count: int, device: torch.device) -> None:
    outs = [torch.randn(B, S, H, D, device=device) for _ in range(count)]
    lses = [torch.randn(B, H, S, device=device) for _ in range(count)]
    lses[-1][0, 0, 0] = torch.nan
    out, lse = merge_attentions(outs, lses)
    assert out[0, 0, 0].isnan().all() and out.isnan().sum() == D
    assert lse[0, 0, 0].isnan() and lse.isnan().sum() == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_that_nobody_saw(count: int, layout: str, device: torch.device) -> None:
    """0, -inf and no gradient, whatever a part holds there; of one part too."""
    shape = {"bshd": (B, S, H, D), "bhsd": (B, H, S, D), "sbhd": (S, B, H, D), "thd": (S, H, D)}[layout]
    lse = torch.full((H, S) if layout == "thd" else (B, H, S), -torch.inf, device=device)
    outs = [torch.full(shape, torch.nan, device=device, requires_grad=True) for _ in range(count)]
    out, merged = merge_attentions(outs, [lse] * count, layout=layout)  # type: ignore[arg-type]
    out.sum().backward()
    assert not out.any() and torch.equal(merged, lse)
    assert all(x.grad is not None and not x.grad.any() for x in outs)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_layouts_and_strides(layout: str, device: torch.device) -> None:
    shape = {"bshd": (B, S, H, D), "bhsd": (B, H, S, D), "sbhd": (S, B, H, D), "thd": (S, H, D)}[layout]
    rows = (H, S) if layout == "thd" else (B, H, S)
    outs = [torch.randn(*shape, 2, device=device)[..., 0], torch.randn(shape[-1], device=device).expand(shape)]
    lses = [torch.randn(*rows, 3, device=device)[..., 1], torch.randn(*rows, device=device)]
    tensors: dict[str, Any] = {"a": outs[0], "b": outs[1], "la": lses[0], "lb": lses[1]}
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}

    def run(function: Any) -> Any:
        return lambda a, b, la, lb: function((a, b, a), (la, lb, lb), layout=layout)

    check(run(merge_attentions), run(merge_attentions_ref), run(merge_attentions_ref), tensors)


def test_a_part_that_saw_nothing_is_not_read(device: torch.device) -> None:
    """Whatever it holds; a row that no part saw gives 0, -inf and zero gradients."""
    outs = [torch.randn(1, 2, 1, D, device=device), torch.full((1, 2, 1, D), torch.nan, device=device)]
    lses = [torch.tensor([[[0.5, -torch.inf]]], device=device), torch.full((1, 1, 2), -torch.inf, device=device)]
    leaves = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = merge_attentions(outs, lses)
    assert torch.equal(out[:, 0], outs[0][:, 0]) and not out[:, 1].any()
    assert lse[0, 0].tolist() == [0.5, -torch.inf]
    grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert not any(g.isnan().any() for g in grads) and not grads[0][:, 1].any()
    assert grads[2].tolist() == [[[1.0, 0.0]]] and not grads[3].any()


@pytest.mark.parametrize("used", [0, 1], ids=["out", "lse"])
def test_only_one_result_used(used: int, device: torch.device) -> None:
    def run(function: Any) -> Any:
        return lambda a, b, la, lb: function((a, b), (la, lb))[used]

    tensors: dict[str, Any] = {n: torch.randn(B, S, H, D, device=device).requires_grad_() for n in "ab"}
    tensors |= {n: torch.randn(B, H, S, device=device).requires_grad_() for n in ("la", "lb")}
    check(run(merge_attentions), run(merge_attentions_ref), run(merge_attentions_ref), tensors)


def test_results_of_one_part_are_copies(device: torch.device) -> None:
    out, lse = torch.randn(1, 2, 3, 4, device=device), torch.zeros(1, 3, 2, device=device)
    before = out.clone(), lse.clone()
    for result in merge_attentions([out], [lse]):
        result.add_(1.0)
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_lses_of_16_bits_give_float32(parts: int, device: torch.device) -> None:
    """On a CPU, and of one part, the LSE was rounded to their dtype."""
    out, lse = torch.randn(1, 2, 3, D, device=device), torch.randn(1, 3, 2, device=device).bfloat16()
    merged, merged_lse = merge_attentions([out] * parts, [lse] * parts)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse.float() + torch.tensor(parts, device=device).log())


def test_large_and_far_apart(device: torch.device) -> None:
    outs = [torch.randn(1, 1, 1, D, device=device) for _ in range(2)]
    for a, b, expected in ((1e4, 1e4 - 200, outs[0]), (-1e4 - 200, -1e4, outs[1])):
        out, lse = merge_attentions(outs, [torch.full((1, 1, 1), x, device=device) for x in (a, b)])
        torch.testing.assert_close(out, expected)
        assert lse.item() == max(a, b)


def test_empty(device: torch.device) -> None:
    part = torch.empty(0, S, H, D, device=device), torch.empty(0, H, S, device=device)
    out, lse = merge_attentions([part[0]] * 2, [part[1]] * 2)
    assert out.shape == part[0].shape and lse.shape == part[1].shape


def test_compiles(device: torch.device) -> None:
    tensors = [torch.randn(1, 2, 1, D, device=device) for _ in range(2)] + [torch.randn(1, 1, 2, device=device)] * 2

    def run(a: Tensor, b: Tensor, la: Tensor, lb: Tensor) -> tuple[Tensor, Tensor]:
        return powertrain.merge_attentions([a, b], [la, lb])

    expected = run(*tensors)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(actual, expected)


def test_errors(device: torch.device) -> None:
    out, lse = torch.randn(B, S, H, D, device=device), torch.randn(B, H, S, device=device)
    with pytest.raises(ValueError, match="merge_attentions: outs must have at least one part, got 0"):
        merge_attentions([], [])
    with pytest.raises(ValueError, match="merge_attentions: lses must be as many as outs, 2, got 1"):
        merge_attentions([out, out], [lse])
    with pytest.raises(ValueError, match=r"lses\[1\] must have shape \[2, 4, 3\] \(batch, heads, queries\)"):
        merge_attentions([out, out], [lse, lse.mT])
    with pytest.raises(ValueError, match=r"outs\[1\] must have the dtype of outs\[0\], float32, got float16"):
        merge_attentions([out, out.half()], [lse, lse])
    with pytest.raises(ValueError, match="layout must be one of"):
        merge_attentions([out, out], [lse, lse], layout="bmghk")
