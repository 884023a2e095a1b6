"""The promises every op makes, checked for every call in the catalog.

They run on whatever carries the op here: the kernels on a GPU or in the interpreter, plain PyTorch on a CPU.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import powertrain
from powertrain.ops.cases import Case, cases
from powertrain.testing.numerics import check
from tests.torch_setup import HAS_GPU

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MATMULS = (
    "attention",
    "varlen_attention",
    "grouped_gemm",
    "fp8_linear",
    "fp8_grouped_gemm",
    "lora_linear",
)  # cast under autocast

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)


def _later_cases() -> set[str]:
    """Cases of an op behind its first."""
    first = {case.op: case.id for case in reversed(cases())}
    return {case.id for case in cases()} - set(first.values())


_LATER = _later_cases()


# of what an op's node in the graph does, whatever options its kernels get: the later cases of an op are slow, but on a
# GPU, where a call costs next to nothing
every_op = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.id, marks=pytest.mark.slow if c.id in _LATER and not HAS_GPU else ()) for c in cases()],
)


def _inputs(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    return case.inputs(case.tiny, dtype, device)


def _check(case: Case, tensors: dict[str, Tensor | None]) -> None:
    check(case.run, case.plain, case.reference, tensors, slack=case.slack)


def _outputs(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t.is_floating_point()]


def _scalar(result: Any) -> Tensor:
    return sum((out.float() * out.float()).sum() for out in _outputs(result))


def _with_dtypes() -> list[Any]:
    """Every case in three dtypes; of an op's later cases those of 16 bits are slow: its first has their casts."""
    rows = []
    for case in cases():
        for dtype in DTYPES:
            is_slow = dtype is not torch.float32 and case.id in _LATER and not HAS_GPU
            marks = pytest.mark.slow if is_slow else ()
            rows.append(pytest.param(case, dtype, id=f"{IDS[dtype]}-{case.id}", marks=marks))
    return rows


@pytest.mark.parametrize("case, dtype", _with_dtypes())
def test_values_and_gradients(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    _check(case, _inputs(case, device, dtype))


@every_case
def test_disable_takes_plain_pytorch(case: Case, device: torch.device) -> None:
    with powertrain.disable(case.op):
        result = case.run(**_inputs(case, device))
        _check(case, _inputs(case, device))
    names = {out.grad_fn.name() for out in _outputs(result) if out.grad_fn is not None}
    assert not any("powertrain" in name for name in names)


@every_case
def test_strided_inputs(case: Case, device: torch.device) -> None:
    def strided(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point() or x.dim() < 2:
            return x
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), device=device)
        wide[..., : x.shape[-1]] = x.detach()
        return wide[..., : x.shape[-1]].requires_grad_(x.requires_grad)

    _check(case, {n: strided(t) for n, t in _inputs(case, device).items()})


@every_op
def test_every_second_element(case: Case, device: torch.device) -> None:
    """Integers, biases and tables too: a kernel without a stride would read the elements in between."""
    tensors = _inputs(case, device)
    torch.manual_seed(0)
    exact = _outputs(case.run(**tensors))
    for name, x in tensors.items():
        if x is None or x.dim() == 0 or (case.op.endswith("attention") and x.is_floating_point() and x.dim() > 2):
            continue  # queries, keys and values have a last dim of stride 1
        pairs = torch.stack([x.detach(), x.detach().flip(0)], -1)
        torch.manual_seed(0)
        ours = _outputs(case.run(**{**tensors, name: pairs[..., 0].requires_grad_(x.requires_grad)}))
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@every_case
def test_each_input_frozen_in_turn(case: Case, device: torch.device) -> None:
    names = [n for n, t in _inputs(case, device).items() if t is not None and t.requires_grad]
    for frozen in names:
        tensors = _inputs(case, device)
        tensors[frozen].requires_grad_(False)
        _check(case, tensors)


@every_case
def test_autocast(case: Case, device: torch.device) -> None:
    """docs/autocast.md: only ops that contain a matrix product cast; the others compute as ever."""
    tensors = _inputs(case, device)
    expected = _outputs(case.run(**tensors))
    with torch.autocast(device.type, torch.bfloat16):
        actual = _outputs(case.run(**tensors))
    dtypes = [t.dtype for t in expected]
    if case.op in MATMULS:
        dtypes[0] = torch.bfloat16
    assert [t.dtype for t in actual] == dtypes
    for a, b in zip(actual, expected, strict=True):
        if case.op in ("linear_cross_entropy", "linear_log_probs", *MATMULS):
            # lora_linear adds two products that are rounded to 8 bits each, relative to the largest
            atol = max(2e-2, 2**-7 * b.abs().max().item()) if case.op == "lora_linear" else 2e-2
            torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=atol)
            assert not torch.equal(a, b)
        elif case.op != "bias_dropout_add":  # which draws another mask every time
            assert torch.equal(a, b)


@every_case
def test_no_grad_saves_nothing(case: Case, device: torch.device) -> None:
    def refuse(tensor: Tensor) -> None:
        raise AssertionError("a tensor was saved")

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, lambda x: x):
        result = case.run(**_inputs(case, device))
    assert not any(out.requires_grad for out in _outputs(result))


@every_op
def test_expanded_and_transposed_grad_output(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device)
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]

    def gradients(make: Any) -> tuple[Tensor, ...]:
        outputs = [out for out in _outputs(case.run(**tensors)) if out.requires_grad]
        return torch.autograd.grad(outputs, leaves, [make(out) for out in outputs], allow_unused=True)

    dense = gradients(lambda out: torch.full_like(out, 0.5))
    expanded = gradients(lambda out: torch.full((), 0.5, dtype=out.dtype, device=device).expand_as(out))
    transposed = gradients(
        lambda out: torch.full_like(out.mT.contiguous(), 0.5).mT if out.dim() > 1 else torch.full_like(out, 0.5)
    )
    for a, b, c in zip(dense, expanded, transposed, strict=True):
        if a is not None:
            torch.testing.assert_close(b, a)
            torch.testing.assert_close(c, a)


@every_case
def test_twice_gives_the_same_bits(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device, torch.bfloat16)
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    first, second = (
        (out := _outputs(case.run(**tensors)), torch.autograd.grad(_scalar(tuple(out)), leaves, allow_unused=True))
        for _ in range(2)
    )
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert a is b is None or torch.equal(a, b)


@every_op
def test_compile_fullgraph(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device)
    torch._dynamo.reset()
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    expected = _outputs(case.run(**tensors))
    actual = _outputs(compiled(**tensors))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    pair = [torch.autograd.grad(_scalar(tuple(out)), leaves, allow_unused=True) for out in (actual, expected)]
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b)


@every_op
@pytest.mark.kernels
def test_double_backward_says_so(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device)
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    with pytest.raises((NotImplementedError, RuntimeError), match=r"double backward|second backward"):
        # gradients that no graph leads from are refused here
        grads = torch.autograd.grad(_scalar(case.run(**tensors)), leaves, create_graph=True, allow_unused=True)
        torch.autograd.grad(sum(g.sum() for g in grads if g is not None), leaves, allow_unused=True)


@every_op
@pytest.mark.kernels
def test_vmap_says_so(case: Case, device: torch.device) -> None:
    tensors = {n: t.detach() if t is not None else None for n, t in _inputs(case, device).items()}
    floats = [n for n, t in tensors.items() if t is not None and t.is_floating_point()]

    def call(*batched: Tensor) -> Any:
        return case.run(**{**tensors, **dict(zip(floats, batched, strict=True))})

    with pytest.raises(NotImplementedError, match="vmap is not implemented"):
        torch.vmap(call)(*(torch.stack([tensors[n], tensors[n]]) for n in floats))


@every_op
def test_func_grad_is_right_or_says_so(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device)
    wanted = [n for n, t in tensors.items() if t is not None and t.requires_grad]
    torch.manual_seed(0)
    exact = torch.autograd.grad(_scalar(case.run(**tensors)), [tensors[n] for n in wanted], allow_unused=True)

    def loss(*leaves: Tensor) -> Tensor:
        torch.manual_seed(0)
        return _scalar(case.run(**{**tensors, **dict(zip(wanted, leaves, strict=True))}))

    leaves = tuple(tensors[n].detach() for n in wanted)
    try:
        ours = torch.func.grad(loss, argnums=tuple(range(len(wanted))))(*leaves)
    except NotImplementedError as error:
        assert "torch.func.grad and similar transforms are not implemented; use torch.autograd.grad" in str(error)
        return
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-3, atol=1e-4)


@every_op
@pytest.mark.parametrize(
    "make", [list, torch.Tensor.numpy, lambda x: 1.5, lambda x: "x"], ids="list numpy 1.5 x".split()
)
def test_an_argument_that_is_no_tensor_is_named(case: Case, make: Any, device: torch.device) -> None:
    tensors = _inputs(case, device)
    # parts of a table, of a teacher and of lists; and a case's own code looks at qkv
    others = ("cos", "sin", "teacher", "a", "b", "lse", "qkv")
    for name in (n for n, t in tensors.items() if t is not None and not n.startswith(others)):
        value = make(tensors[name].detach().cpu())
        with pytest.raises((ValueError, TypeError), match=rf"^{case.op}: \w+ (must|is keyword-only)"):
            case.run(**{**tensors, name: value})


def test_a_tensor_that_is_not_dense_is_named(device: torch.device) -> None:
    x = torch.randn(3, 16, device=device)
    with pytest.raises(ValueError, match="rms_norm: x must be a dense tensor, got a tensor of layout nested"):
        powertrain.rms_norm(torch.nested.nested_tensor([x, x]))
    with pytest.raises(ValueError, match="rms_norm: weight must be a dense tensor, got a tensor of layout sparse_coo"):
        powertrain.rms_norm(x, torch.ones(16, device=device).to_sparse())
    # whose strides are 0, for which the error asked to be 1
    q = x[None, None]
    with pytest.raises(ValueError, match="attention: query must be a dense tensor, got a tensor of layout sparse_coo"):
        powertrain.attention(q.to_sparse(), q, q)
    lse = torch.zeros(1, 3, 1, device=device)
    with pytest.raises(ValueError, match=r"outs\[1\] must be a dense tensor, got a tensor of layout sparse_coo"):
        powertrain.merge_attentions([q, q.to_sparse()], [lse, lse])


@every_op
@pytest.mark.kernels
def test_threads_at_once(case: Case, device: torch.device) -> None:
    """Each thread its own call; the interpreter runs them one after the other."""
    if case.op == "bias_dropout_add":
        pytest.skip("threads draw seeds in any order")
    tensors = _inputs(case, device)
    exact = _outputs(case.run(**tensors))
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: _outputs(case.run(**tensors)), range(6)))
    for result in results:
        # products of PyTorch may split their sums by the threads of the CPU that are free
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5, equal_nan=True)


@every_op
def test_meta_tensors_have_the_real_shapes(case: Case, device: torch.device) -> None:
    real = _outputs(case.run(**_inputs(case, device)))
    tensors = {
        n: t if t is None else t.detach().to("meta").requires_grad_(t.requires_grad)
        for n, t in _inputs(case, device).items()
    }
    meta = _outputs(case.run(**tensors))
    assert [(t.shape, t.dtype, t.requires_grad) for t in meta] == [(t.shape, t.dtype, t.requires_grad) for t in real]
    case.step(tensors)


@every_op
def test_fake_tensors_have_the_real_shapes(case: Case, device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = _outputs(case.run(**_inputs(case, device, torch.bfloat16)))
    with FakeTensorMode():
        fake = _outputs(case.run(**_inputs(case, device, torch.bfloat16)))
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


@pytest.mark.gpu
@every_case
def test_cuda_graph_and_side_stream(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device, torch.bfloat16)
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]

    def step() -> list[Tensor]:
        out = _outputs(case.run(**tensors))
        grads = torch.autograd.grad(_scalar(tuple(out)), leaves, allow_unused=True)
        return [*out, *(g for g in grads if g is not None)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [t.clone() for t in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for t in captured:
        t.fill_(float("nan")) if t.is_floating_point() else t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


@every_op
def test_lazy_minus(case: Case, device: torch.device) -> None:
    """Of the imaginary part of a conjugate the sign is a bit of the tensor, not in memory."""

    def lazy(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        y = torch._neg_view(-x.detach())  # as torch.complex(a, b).conj().imag is, which has a stride of 2
        assert y.is_neg() and torch.equal(y, x)
        return y

    tensors = _inputs(case, device)
    plain = {name: x.detach() if isinstance(x, Tensor) else x for name, x in tensors.items()}
    torch.manual_seed(0)
    exact = _outputs(case.run(**plain))
    torch.manual_seed(0)
    for ours, wanted in zip(_outputs(case.run(**{n: lazy(x) for n, x in tensors.items()})), exact, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@every_op
def test_forward_mode_is_right_or_says_so(case: Case, device: torch.device) -> None:
    """Of each input alone, with and without a gradient of its own: torch.library drops tangents without a word."""
    tensors = _inputs(case, device)
    leaves = {n: t for n, t in tensors.items() if t is not None and t.requires_grad}
    torch.manual_seed(0)
    grads = torch.autograd.grad(_weighted(case.run(**tensors)), list(leaves.values()), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None:
            continue
        tangent = torch.randn_like(leaf)
        for primal in (leaf, leaf.detach()):
            torch.manual_seed(0)
            try:
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(primal, tangent)
                    found = forward_ad.unpack_dual(_weighted(case.run(**{**tensors, name: dual}))).tangent
            except NotImplementedError as error:
                assert "forward-mode differentiation is not implemented" in str(error)
                continue
            assert found is not None, name
            # the sum of terms some of which cancel
            torch.testing.assert_close(found, (grad * tangent).sum(), rtol=1e-3, atol=1e-3 * grad.norm().item())


def _weighted(result: Any) -> Tensor:
    """A number that is linear in the results: what a loss that is not squared gives back."""
    weights = torch.Generator().manual_seed(1)
    return sum(
        (out.float() * torch.randn(out.shape, generator=weights, dtype=torch.float32).to(out.device)).sum()
        for out in _outputs(result)
    )


@every_op
def test_no_part_of_a_second_derivative_is_left_out(case: Case, device: torch.device) -> None:
    """Of the gradient of one input with respect to one other: the graph must lead there, or the call must be refused.
    A loss that is linear in the results hides the way through the gradient given to backward."""
    tensors = _inputs(case, device)
    leaves = {n: t for n, t in tensors.items() if t is not None and t.requires_grad}
    wide = {n: t if t is None or not t.is_floating_point() else t.detach().double() for n, t in tensors.items()}
    wide |= {n: wide[n].requires_grad_() for n in leaves}
    for of in leaves:
        torch.manual_seed(0)
        (exact,) = torch.autograd.grad(
            _weighted(case.reference(**wide)), wide[of], create_graph=True, allow_unused=True
        )
        if exact is None or not exact.requires_grad:
            continue
        torch.manual_seed(0)
        try:
            (grad,) = torch.autograd.grad(
                _weighted(case.run(**tensors)), tensors[of], create_graph=True, allow_unused=True
            )
        except NotImplementedError as error:
            assert "double backward" in str(error)
            continue
        for by in leaves:
            (wanted,) = torch.autograd.grad(exact.sum(), wide[by], retain_graph=True, allow_unused=True)
            if wanted is None or not wanted.abs().max() > 1e-6:
                continue
            try:
                (found,) = torch.autograd.grad(grad.sum(), tensors[by], retain_graph=True, allow_unused=True)
            except (NotImplementedError, RuntimeError) as error:
                assert "double backward" in str(error) or "derivative for aten::" in str(error)
                continue
            assert found is not None and found.abs().max() > 0, f"d{of}/d{by}"


@every_op
def test_gradients_in_batches_are_right_or_refused(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device)
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    out = next(out for out in _outputs(case.run(**tensors)) if out.requires_grad)
    many = torch.randn(2, *out.shape, device=device).to(out.dtype)
    exact = torch.autograd.grad(out, leaves, many[0], allow_unused=True)
    out = next(out for out in _outputs(case.run(**tensors)) if out.requires_grad)
    try:
        ours = torch.autograd.grad(out, leaves, many, allow_unused=True, is_grads_batched=True)
    except NotImplementedError as error:
        assert "is_grads_batched and vmap of a backward are not implemented" in str(error)
        return
    if case.op != "bias_dropout_add":  # which draws another mask every time
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(None if a is None else a[0], b, rtol=1e-3, atol=1e-4)


@every_op
def test_default_dtype_changes_nothing(case: Case, device: torch.device) -> None:
    tensors = _inputs(case, device)

    def results() -> list[Tensor | None]:
        torch.manual_seed(0)
        outputs = _outputs(case.run(**tensors))
        leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
        return [*outputs, *torch.autograd.grad(_weighted(tuple(outputs)), leaves, allow_unused=True)]

    exact = results()
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(ours, exact, strict=True):
        assert a is b is None or torch.equal(a, b)
