"""cross_entropy: every option, size class and error, and the vocabulary in shards."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import powertrain
from powertrain.ops import cross_entropy_kernels, cross_entropy_short_rows
from powertrain.ops.cases.cross_entropy import plain_loss, tokens
from powertrain.ops.cross_entropy import cross_entropy, cross_entropy_bwd_ref, cross_entropy_ref
from powertrain.ops.linear_cross_entropy import linear_cross_entropy
from powertrain.ops.linear_log_probs import linear_log_probs
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check

REDUCTIONS = ["mean", "sum", "none"]


@pytest.fixture(params=[cross_entropy_short_rows.LONGEST_ROW, 0], ids=["several", "one"])
def rows_of_a_program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows by the kernels that take several a program, and by those that take one, as shards of a vocabulary."""
    monkeypatch.setattr(sys.modules["powertrain.ops.cross_entropy"], "LONGEST_ROW", request.param)


def _tensors(T: int, V: int, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    return {"logits": (3 * torch.randn(T, V, device=device)).to(dtype).requires_grad_(), "target": tokens(T, V, device)}


def _check(tensors: dict[str, Tensor | None], **options: Any) -> None:
    ours = partial(cross_entropy, **options)
    options.pop("grad_in_forward", None)
    check(ours, partial(cross_entropy_ref, **options), partial(cross_entropy_ref, **options), tensors)


# 1: one class; 5: no whole vector; 70, 300, 1000: short rows of one chunk, of two, of four; 2049: two blocks of 1024
# float32; 9001: rows at every alignment, ragged end, two blocks of few rows' 8192 float32
@pytest.mark.parametrize("V", [1, 5, 70, 300, 1000, 2049, 9001], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad_in_forward", [False, True], ids=["", "early"])
def test_sizes(V: int, dtype: torch.dtype, grad_in_forward: bool, device: torch.device) -> None:
    _check(_tensors(3, V, device, dtype), grad_in_forward=grad_in_forward)


@pytest.mark.parametrize("V", [2049, 9001], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.kernels
def test_blocks_of_many_rows(V: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_kernels, "stats_block", lambda T, target: 256)
    _check(_tensors(3, V, device, dtype), label_smoothing=0.1)


@pytest.mark.parametrize("V", [10, 300], ids=lambda v: f"V{v}")
@pytest.mark.kernels
def test_short_rows_of_several_tiles_a_program(V: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_short_rows, "_PROGRAMS", 4)
    _check(_tensors(700 if V == 10 else 21, V, device), label_smoothing=0.1)
    for tiles, programs in ((0, 0), (1, 1), (4, 4), (5, 3), (9, 3), (13, 4)):
        assert cross_entropy_short_rows._programs(tiles) == programs


def test_few_rows_take_larger_blocks_unless_bits_must_not_depend_on_their_number() -> None:
    target = Target.parse("sm_90")  # 132 SMs
    blocks = [cross_entropy_kernels.stats_block(T, target) for T in (0, 1, 184, 264, 265, 529, 1057, 8192)]
    assert blocks == [2048, 2048, 2048, 1024, 1024, 512, 256, 256]
    with powertrain.batch_invariant():
        assert cross_entropy_kernels.stats_block(1, target) == 256


def test_few_long_rows_are_shared_by_programs_unless_bits_must_not_depend_on_their_number() -> None:
    target = Target.parse("sm_90")  # 132 SMs
    sizes = {(0, 32000): 1, (1, 50257): 13, (1, 128256): 32, (4, 231944): 29, (1, 300000): 37, (16, 128256): 8}
    sizes |= {(64, 50257): 1, (64, 128256): 2, (67, 256000): 1, (8192, 256000): 1, (3, 0): 1}
    for_divergences = {(1, 16384): 1, (1, 32000): 8, (132, 50257): 13, (264, 128256): 8, (265, 128256): 1}
    for (T, V), programs in {**sizes, **for_divergences}.items():
        options = dict(per_sm=16, pays=16384) if (T, V) in for_divergences else {}
        parts = cross_entropy_kernels.row_parts(T, V, target, **options)
        assert parts.programs == programs, (T, V)
        # no part is empty, and each begins where a whole vector does in aligned rows
        assert (programs - 1) * parts.columns < max(1, V) <= programs * parts.columns and parts.columns % 4096 == 0
    assert cross_entropy_kernels.row_parts(1, 128256, target, batch_invariant=True).programs == 1
    with powertrain.batch_invariant():
        assert cross_entropy_kernels.row_parts(1, 128256, target).programs == 1


def _share(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Long rows are shared by programs with `columns` of a row each."""

    def row_parts(T: int, V: int, *_: Any, **__: Any) -> cross_entropy_kernels.Parts:
        return cross_entropy_kernels.Parts(-(-V // columns), columns)

    monkeypatch.setattr(cross_entropy_kernels, "row_parts", row_parts)


# 1281: rows at every alignment, of which the last part is one element; 1160: the last part is less than a block
@pytest.mark.parametrize("V", [1281, 1160], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad_in_forward", [False, True], ids=["", "early"])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, z_loss=1e-2, softcap=2.0)], ids=["", "all"])
@pytest.mark.kernels
def test_rows_in_parts(
    V: int, dtype: torch.dtype, grad_in_forward: bool, options: dict[str, float], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _share(monkeypatch, 256)
    _check(_tensors(3, V, device, dtype), grad_in_forward=grad_in_forward, **options)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.kernels
def test_parts_of_a_row_give_what_one_gives(shards: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shard of the vocabulary too; with NaN, infinities, and targets left out, elsewhere and out of range."""
    T, V = 10, 333
    logits = 3 * torch.randn(T, V, device=device)
    logits[0, 200] = torch.nan
    logits[1, :150], logits[2], logits[3] = -torch.inf, -torch.inf, torch.finfo(torch.float32).min
    logits[4, 300] = torch.inf
    start = V * (shards - 1)
    target = torch.tensor([7, 332, 5, 5, 5, 63, 64, -100, shards * V, -1], device=device)
    target[:7] += start
    terms = cross_entropy_kernels.Terms(-100, 0.1, 0.0, 0.0)

    def results(columns: int) -> Tensor:
        _share(monkeypatch, columns)
        found = torch.full((3, T), 9.0, device=device)
        where = dict(vocab_start=start, vocab_size=shards * V)
        cross_entropy_kernels.launch_row_stats(logits, target, terms, *found, **where)
        return found

    torch.testing.assert_close(results(64), results(333), rtol=1e-6, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("V", [70, 2049])
def test_long_rows_take_two_kernels(V: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_kernels, "FUSED_ROW_BYTES", 0)
    options = dict(label_smoothing=0.1, z_loss=1e-2, softcap=2.0)
    _check(_tensors(3, V, device, torch.bfloat16), grad_in_forward=True, **options)


@pytest.mark.usefixtures("rows_of_a_program")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_options(
    reduction: str, label_smoothing: float, z_loss: float, softcap: float | None, device: torch.device
) -> None:
    options = dict(reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap)
    _check(_tensors(6, 70, device), **options)
    _check(_tensors(6, 70, device), **options, grad_in_forward=True)


@pytest.mark.usefixtures("rows_of_a_program")
@pytest.mark.parametrize("grad_in_forward", [False, True], ids=["", "early"])
def test_misaligned_and_strided_logits(grad_in_forward: bool, device: torch.device) -> None:
    flat = torch.randn(4 * 70 + 3, device=device, dtype=torch.bfloat16)
    for start, stride, V in ((1, 70, 69), (0, 64, 61), (3, 69, 69)):
        logits = flat.as_strided((4, V), (stride, 1), start).detach().requires_grad_()
        target = tokens(5, V, device)[1:]
        loss = cross_entropy(logits, target, grad_in_forward=grad_in_forward)
        (grad,) = torch.autograd.grad(loss, logits)
        leaf = logits.detach().float().requires_grad_()
        expected = F.cross_entropy(leaf, target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0].bfloat16(), rtol=2e-2, atol=1e-6)


def test_leading_dims_int32_and_ignore_index(device: torch.device) -> None:
    logits = torch.randn(2, 3, 40, device=device)
    target = torch.tensor([[1, 7, 7], [39, 0, 7]], device=device, dtype=torch.int32)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten().long(), ignore_index=7, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, target, ignore_index=7, reduction="none"), expected.view(2, 3))


@pytest.mark.usefixtures("rows_of_a_program")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad_in_forward", [False, True], ids=["", "early"])
def test_none_kept_is_nan_with_zero_gradient(grad_in_forward: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(3, 17, dtype=dtype, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), -100, device=device), grad_in_forward=grad_in_forward)
    loss.backward()
    assert loss.isnan() and not logits.grad.any()


@pytest.mark.usefixtures("rows_of_a_program")
@pytest.mark.parametrize("T", [0, 1])
def test_empty_and_one_row(T: int, device: torch.device) -> None:
    logits = torch.randn(T, 9, device=device, requires_grad=True)
    target = torch.zeros(T, dtype=torch.int64, device=device)
    for reduction in REDUCTIONS:
        loss = cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction=reduction), equal_nan=True)
        loss.sum().backward()
    assert logits.grad.shape == (T, 9)


@pytest.mark.usefixtures("rows_of_a_program")
@pytest.mark.kernels
def test_target_out_of_range_is_nan(device: torch.device) -> None:
    logits = torch.randn(4, 10, device=device, requires_grad=True)
    target = torch.tensor([3, 10, -1, -100], device=device)
    loss = cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True, False]
    assert logits.grad.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.usefixtures("rows_of_a_program")
def test_masked_vocabulary(device: torch.device) -> None:
    logits = torch.randn(3, 40, device=device)
    logits[:, 5:20] = float("-inf")
    logits.requires_grad_()
    target = torch.tensor([0, 25, 39], device=device)
    loss = cross_entropy(logits, target)
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


@pytest.mark.usefixtures("rows_of_a_program")
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_gradient_made_in_forward(dtype: torch.dtype, device: torch.device) -> None:
    tensors = _tensors(5, 70, device, dtype)
    logits, target = tensors["logits"], tensors["target"]
    loss = cross_entropy(logits, target, grad_in_forward=True)
    (2**10 * loss).backward(retain_graph=True)
    exact = torch.autograd.grad(2**10 * F.cross_entropy(logits.double(), target), logits)[0]
    torch.testing.assert_close(logits.grad, exact, rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="a second backward is not possible"):
        loss.backward()


@pytest.mark.kernels
def test_grad_is_the_buffer(device: torch.device) -> None:
    logits, target = _tensors(5, 70, device).values()
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        loss = cross_entropy(logits, target, grad_in_forward=True)
    loss.backward()
    assert logits.grad.data_ptr() in packed


@pytest.mark.kernels
def test_factor_one_leaves_the_gradient_alone(device: torch.device) -> None:
    x = torch.randn(3, 40, device=device)
    kept = x.clone()
    cross_entropy_kernels.scale_rows_(x, torch.ones((), device=device), None)
    assert torch.equal(x, kept)
    rows = torch.tensor([1.0, 2.0, 0.5], device=device)
    cross_entropy_kernels.scale_rows_(x, rows, torch.full((), 4.0, device=device))
    torch.testing.assert_close(x, kept * rows[:, None] * 4)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_vocabulary_in_shards(dtype: torch.dtype, device: torch.device) -> None:
    """What a vocabulary-parallel loss does, the all-reduces written out."""
    T, V, parts = 6, 90, 3
    tensors = _tensors(T, V, device, dtype)
    logits, target = tensors["logits"].detach(), tensors["target"]
    terms = cross_entropy_kernels.Terms(-100, 0.1, 1e-2, 0.0)
    shards, stats = logits.chunk(parts, dim=1), []
    for i, shard in enumerate(shards):
        lse, target_logit, logit_sum = (torch.empty(T, device=device) for _ in range(3))
        where = dict(vocab_start=i * V // parts, vocab_size=V)
        cross_entropy_kernels.launch_row_stats(shard, target, terms, lse, target_logit, logit_sum, **where)
        stats.append((lse, target_logit, logit_sum))
    lse = torch.logsumexp(torch.stack([s[0] for s in stats]), 0).where(target != -100, 0)
    target_logit, logit_sum = (sum(s[i] for s in stats) for i in (1, 2))
    scale, loss = torch.empty((), device=device), torch.empty((), device=device)
    cross_entropy_kernels.launch_losses(lse, target_logit, logit_sum, target, terms, V, scale=scale, loss=loss)
    leaf = logits.clone().requires_grad_()
    expected = cross_entropy(leaf, target, label_smoothing=0.1, z_loss=1e-2)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    dlogits = torch.empty_like(logits)
    one = torch.ones((), device=device)
    for i, (shard, part) in enumerate(zip(shards, dlogits.chunk(parts, dim=1), strict=True)):
        where = dict(vocab_start=i * V // parts, vocab_size=V)
        cross_entropy_kernels.launch_dlogits(shard, target, lse, one, terms, part, scale=scale, **where)
    torch.testing.assert_close(dlogits, leaf.grad)


def test_autocast_keeps_float32(device: torch.device) -> None:
    logits, target = torch.randn(4, 30, device=device), tokens(4, 30, device)
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(cross_entropy(logits, target), plain_loss(logits, target))


def test_errors(device: torch.device) -> None:
    logits, target = torch.randn(2, 7, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"cross_entropy: target must have shape \[2\]"):
        cross_entropy(logits, target[:1])
    with pytest.raises(ValueError, match="target must be int64 or int32, got float32"):
        cross_entropy(logits, target.float())
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'none', got 'avg'"):
        cross_entropy(logits, target, reduction="avg")
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\], got 2"):
        cross_entropy(logits, target, label_smoothing=2)
    with pytest.raises(ValueError, match=r"softcap must be at least 0 \(0: none\), or None, got -1"):
        cross_entropy(logits, target, softcap=-1.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    T, V = 45000, 50257
    logits = torch.randn(T, V, device=device, dtype=torch.bfloat16).requires_grad_()
    target = tokens(T, V, device)
    loss = cross_entropy(logits, target, reduction="none")
    loss.backward(torch.ones_like(loss))
    tail = logits.detach()[-3:].clone().requires_grad_()
    expected = cross_entropy(tail, target[-3:], reduction="none")
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(loss[-3:], expected)
    torch.testing.assert_close(logits.grad[-3:], tail.grad)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_column_of_targets(reduction: Any, device: torch.device) -> None:
    """labels[:, -1] is one dim with the stride of a row, and reshape(-1) leaves it so."""
    labels = torch.randint(0, 17, (6, 5), device=device)
    logits, x, weight = (torch.randn(*s, device=device, requires_grad=True) for s in ((6, 17), (6, 8), (17, 8)))
    for target in (labels[:, -1], labels[:1, 0].expand(6), labels[::2, ::5].expand(3, 2)[:, :1].repeat(2, 1)):
        column = target.view(6)
        for call, leaf in (
            (lambda t: cross_entropy(logits, t, reduction=reduction), logits),
            (lambda t: powertrain.linear_cross_entropy(x, weight, t, reduction=reduction), x),
            (lambda t: powertrain.linear_log_probs(x, weight, t).log_probs, x),
        ):
            ours, exact = (call(t) for t in (column, column.clone()))
            assert torch.equal(ours, exact)
            grads = [torch.autograd.grad(loss.sum(), leaf)[0] for loss in (ours, exact)]
            assert torch.equal(*grads)


def test_one_token_in_16_bits_has_a_float32_loss() -> None:
    x, target = torch.randn(1000).bfloat16(), torch.tensor(3)
    loss = cross_entropy(x, target)
    assert loss.dtype is torch.float32 and torch.equal(loss, cross_entropy(x[None], target[None]))


@pytest.mark.kernels
def test_the_graph_of_a_gradient_made_in_forward_is_refused(device: torch.device) -> None:
    """A gradient penalty would be 0 without a word, and a Hessian-vector product without the loss's own curvature."""
    weight, target = torch.randn(301, 8, device=device, requires_grad=True), torch.arange(3, device=device)
    loss = cross_entropy(torch.randn(3, 8, device=device) @ weight.T, target, grad_in_forward=True)
    with pytest.raises(NotImplementedError, match="cross_entropy: create_graph=True and double backward"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.skipif(settings().interpret, reason="in the interpreter kernels compute")
@pytest.mark.parametrize("wrong", [-3, 5])
def test_plain_pytorch_names_targets_outside(wrong: int) -> None:
    x, weight, target = torch.randn(4, 5), torch.randn(5, 5), torch.tensor([0, wrong, -100, 4])
    calls = {
        "cross_entropy": lambda: cross_entropy(x, target),
        "linear_cross_entropy": lambda: linear_cross_entropy(x, weight, target),
        "linear_log_probs": lambda: linear_log_probs(x, weight, target),
    }
    for op, call in calls.items():
        # the second call is a repeated one
        for _ in range(2):
            with pytest.raises(IndexError, match=rf"^{op}: target must be in \[0, 5\), .* -100, got {wrong}$"):
                call()


def test_the_specification_takes_a_softcap_of_0_for_none() -> None:
    logits, target = torch.randn(3, 5), torch.tensor([0, 4, -100])
    assert torch.equal(cross_entropy_ref(logits, target, softcap=0.0), cross_entropy_ref(logits, target))
    dloss = torch.ones(3)
    zero = cross_entropy_bwd_ref(dloss, logits, target, softcap=0.0)
    assert torch.equal(zero, cross_entropy_bwd_ref(dloss, logits, target))
