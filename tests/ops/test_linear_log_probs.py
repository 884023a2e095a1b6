"""linear_log_probs: options, blocks, divergences, main_grad, batch invariance, errors."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain
from powertrain.nn.tensor_parallel import vocab_log_probs as shards
from powertrain.ops import linear_cross_entropy as blocks
from powertrain.ops import log_prob_kernels
from powertrain.ops.cases.cross_entropy import tokens
from powertrain.ops.cases.linear_log_probs import as_tuple, plain
from powertrain.ops.cross_entropy_kernels import Parts
from powertrain.ops.linear_cross_entropy import linear_cross_entropy, new_scratch
from powertrain.ops.linear_log_probs import Teacher, linear_log_probs, linear_log_probs_ref
from powertrain.ops.log_prob_kernels import Options
from powertrain.runtime.recording import record
from powertrain.testing.numerics import check
from tests.torch_setup import INTERPRET, SLOW_IN_INTERPRETER

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# in the interpreter a call takes a second
EVERY_DTYPE = [
    pytest.param(torch.float32, marks=SLOW_IN_INTERPRETER),
    pytest.param(torch.float16, marks=SLOW_IN_INTERPRETER),
    torch.bfloat16,
]
IDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _tensors(
    device: torch.device, dtype: torch.dtype = torch.float32, T: int = 12, D: int = 24, V: int = 301, E: int = 16
) -> dict[str, Any]:
    made = {"x": torch.randn(T, D, device=device), "weight": torch.randn(V, D, device=device) * D**-0.5}
    taught = {
        "teacher_x": torch.randn(T, E, device=device),
        "teacher_weight": torch.randn(V, E, device=device) * E**-0.5,
    }
    tensors = {name: t.to(dtype).requires_grad_() for name, t in made.items()}
    return {**tensors, "target": tokens(T, V, device), **{name: t.to(dtype) for name, t in taught.items()}}


def _check(tensors: dict[str, Any], **options: Any) -> None:
    ours = as_tuple(linear_log_probs, **options)
    options = {name: value for name, value in options.items() if name != "keep_logits"}
    functions = (ours, *(as_tuple(f, **options) for f in (plain, linear_log_probs_ref)))
    # log-probabilities near -6 are rounded at that size; a divergence below 1 is their difference
    check(*functions, tensors, slack=16)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for some rows, or for some columns of the vocabulary."""
    monkeypatch.setattr(blocks, "SCRATCH_BYTES", 8 * 150 * 4)
    monkeypatch.setattr(blocks, "MIN_VOCAB_BLOCK", 8)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=IDS.get)
@pytest.mark.parametrize("beta", [None, 0.0, 0.4, 1.0], ids=["alone", "forward", "js", "reverse"])
def test_many_blocks(beta: float | None, dtype: torch.dtype, device: torch.device) -> None:
    tensors = _tensors(device, dtype, T=19, V=150)
    if beta is None:
        tensors |= {"teacher_x": None, "teacher_weight": None}
    _check(tensors, beta=beta, entropy=True, temperature=1.3, softcap=8.0, top_k=3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("V", [150, 64, 301])
@pytest.mark.parametrize("beta", [None, 0.4], ids=["alone", "js"])
def test_kept_logits(beta: float | None, V: int, device: torch.device) -> None:
    """The same values as without; a second backward too, for nothing saved is overwritten."""
    tensors = _tensors(device, torch.bfloat16, T=19, V=V)
    if beta is None:
        tensors |= {"teacher_x": None, "teacher_weight": None}
    _check(tensors, beta=beta, entropy=True, temperature=1.3, softcap=8.0, top_k=3, keep_logits=True)
    x, weight, target = (tensors[name] for name in ("x", "weight", "target"))
    result = linear_log_probs(x, weight, target, keep_logits=True).log_probs.sum()
    first, second = (torch.autograd.grad(result, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.kernels
def test_what_kept_logits_save(device: torch.device) -> None:
    """T * V elements more."""
    tensors = _tensors(device, T=12, V=301)
    given = tensors["x"], tensors["weight"], tensors["target"]
    saved = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    for keep in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            linear_log_probs(*given, keep_logits=keep)
    assert saved.count(12 * 301) == 1  # of the second call


def _sweep(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "T": draw.choice([1, 2, 17, 33]),
            "D": draw.choice([1, 3, 16, 40]),
            "V": draw.choice([1, 2, 63, 64, 65, 300, 520]),
            "beta": draw.choice([None, 0.0, 1.0, draw.random()]),
            "entropy": draw.random() < 0.5,
            "temperature": draw.choice([1.0, 0.25, 3.0]),
            "softcap": draw.choice([None, 2.0, 30.0]),
            "dtype": draw.choice(DTYPES),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("drawn", _sweep(5, seed=1), ids=str)
def test_drawn_calls(drawn: dict[str, Any], device: torch.device) -> None:
    _check_drawn(drawn, device)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", _sweep(150, seed=2), ids=str)
def test_many_drawn_calls(drawn: dict[str, Any], device: torch.device) -> None:
    _check_drawn(drawn, device)


def _check_drawn(drawn: dict[str, Any], device: torch.device) -> None:
    sizes = {name: drawn.pop(name) for name in ("T", "D", "V", "dtype")}
    tensors = _tensors(device, **sizes)
    if drawn["beta"] is None:
        tensors |= {"teacher_x": None, "teacher_weight": None}
    _check(tensors, **drawn)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS.get)
def test_it_is_minus_the_cross_entropy(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, target, *_ = _tensors(device, dtype).values()
    found = linear_log_probs(x, weight, target).log_probs
    expected = -linear_cross_entropy(x, weight, target, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    ours, theirs = (torch.autograd.grad(out.sum(), (x, weight)) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * torch.finfo(dtype).eps * theirs[1].abs().max().item())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=IDS.get)
def test_main_grad(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, target, *_ = _tensors(device, dtype, T=19, V=150).values()
    main_grad = torch.ones(weight.shape, device=device)
    found = linear_log_probs(x, weight, target, entropy=True, main_grad=main_grad)
    (found.log_probs + found.entropy).sum().backward()
    assert weight.grad is None
    wide = weight.detach().double().requires_grad_()
    exact = linear_log_probs_ref(x.detach().double(), wide, target, entropy=True)
    (dw,) = torch.autograd.grad((exact.log_probs + exact.entropy).sum(), wide)
    atol = 2 * torch.finfo(dtype).eps * dw.abs().max().item()
    torch.testing.assert_close(main_grad, (1 + dw).float(), rtol=1e-5, atol=atol)


def test_tokens_left_out(device: torch.device) -> None:
    x, weight, target, *taught = _tensors(device).values()
    target = target.clone()
    target[0], target[1] = -100, 5
    teacher = Teacher(*taught, beta=0.5)
    found = linear_log_probs(x, weight, target, entropy=True, teacher=teacher, top_k=2)
    assert not any(float(t[0]) for t in found[:3])
    sum(t.sum() for t in found[:3]).backward()
    assert not x.grad[0].any() and x.grad[1].any()


@pytest.mark.kernels
@pytest.mark.parametrize("wrong", [301, -1, -7])
def test_a_target_out_of_range_gives_nan(wrong: int, device: torch.device) -> None:
    x, weight, target, *_ = _tensors(device).values()
    target = target.clone()
    target[1] = wrong
    found = linear_log_probs(x, weight, target).log_probs
    assert found[1].isnan() and not found[2:].isnan().any()
    found[1:].sum().backward()
    assert x.grad[1].isnan().all() and not x.grad[2:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS.get)
def test_top_k(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, target, *_ = _tensors(device, dtype).values()
    found = linear_log_probs(x, weight, target, top_k=5, temperature=0.5)
    log_p = torch.log_softmax((x @ weight.T).float() / 0.5, -1)
    torch.testing.assert_close(found.top_log_probs, log_p.gather(-1, found.top_indices), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.top_log_probs, log_p.topk(5).values, rtol=1e-5, atol=1e-5)
    assert not found.top_log_probs.requires_grad


@pytest.mark.skipif(INTERPRET, reason="NumPy's products of a tile round its rows differently")
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS.get)
def test_batch_invariant_bits(dtype: torch.dtype, device: torch.device) -> None:
    """A token alone, among others, at another place, and in blocks of another height: the same bits."""
    x, weight, target, teacher_x, teacher_weight = _tensors(device, dtype, T=150, D=72).values()

    def results(rows: Tensor) -> tuple[Tensor | None, ...]:
        teacher = Teacher(teacher_x[rows], teacher_weight, beta=0.5)
        return linear_log_probs(
            x[rows], weight, target[rows], entropy=True, teacher=teacher, top_k=2, batch_invariant=True
        )

    with torch.no_grad():
        whole = results(torch.arange(150, device=device))
        for rows in (torch.tensor([149]), torch.arange(70, 101), torch.randperm(150)[:67]):
            rows = rows.to(device)
            for some, every in zip(results(rows), whole, strict=True):
                assert torch.equal(some, every[rows])


@pytest.mark.skipif(INTERPRET, reason="on a CPU the interpreter's launches are not recorded")
def test_batch_invariant_sums_have_one_order_whatever_the_number_of_rows() -> None:
    """Few rows of a long vocabulary are read by several programs each, which add in another order."""

    def blocks_of(rows: int, batch_invariant: bool) -> list[tuple[int, bool]]:
        x, weight = torch.empty(rows, 64, device="meta"), torch.empty(50000, 64, device="meta")
        target = torch.empty(rows, dtype=torch.int64, device="meta")
        with record("sm_90") as wanted:
            linear_log_probs(x, weight, target, teacher=Teacher(x, weight), batch_invariant=batch_invariant)
        names = ("_log_prob_stats_kernel", "_divergence_kernel")
        return [
            next((s.constants["BLOCK"], s.constants["IS_PART"]) for s in wanted.specs if s.kernel.name == name)
            for name in names
        ]

    assert blocks_of(4, True) == blocks_of(4096, True) == [(256, False), (128, False)]
    # 4096 rows go in blocks of fewer than 1024
    assert blocks_of(4, False) == [(512, True), (512, True)] and blocks_of(4096, False) == [(512, False), (128, False)]


def test_batch_invariant_gradients(device: torch.device) -> None:
    tensors = _tensors(device)
    x, weight, target, *_ = tensors.values()
    ours, usual = (
        torch.autograd.grad(linear_log_probs(x, weight, target, batch_invariant=b).log_probs.sum(), (x, weight))
        for b in (True, False)
    )
    torch.testing.assert_close(ours, usual)


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_kernels_of_a_shard(beta: float, device: torch.device) -> None:
    """Kernels against the plain PyTorch that tests/parallel/test_vocab_log_probs.py uses: threads cannot share the
    interpreter."""
    T, V = 15, 24
    made = _tensors(device, T=T, D=8, V=V, E=6)
    options, target, found = Options(-100, 0.7, 3.0, 1.5, beta), made["target"], []
    for off in (False, True):
        with powertrain.disable(*["linear_log_probs"] * off):
            scratch, taught = new_scratch(made["x"], T, V // 3), new_scratch(made["x"], T, V // 3)
            scratch.copy_((made["x"] @ made["weight"][8:16].T).detach())
            taught.copy_(made["teacher_x"] @ made["teacher_weight"][8:16].T)
            total = shards._shard_stats(scratch, target, options, True, 8, V)
            teacher = shards._shard_stats(taught, target, shards._of_teacher(options), False, 8, V)
            stats = torch.stack((total[0], total[1], total[3], teacher[0], teacher[1], torch.zeros_like(total[0])))
            divergence = shards._shard_divergence(scratch, taught, stats, options)
            stats[5] = divergence[1]
            grads = tuple(torch.linspace(0.5, 2.0, T, device=device) * sign for sign in (1.0, -1.0, 0.5))
            shards._shard_grads_(scratch, taught, target, stats, grads, options, 8, V)
            found.append((total, divergence, scratch))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def _share(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Rows are shared by programs with `columns` of a row each."""

    def row_parts(T: int, V: int, *_: Any, **__: Any) -> Parts:
        return Parts(-(-V // columns), columns)

    monkeypatch.setattr(log_prob_kernels, "row_parts", row_parts)


# 300: the last part is less than a block; 257: it is one element; 40: a part is longer than the row
@pytest.mark.parametrize("V, beta", [(300, 0.4), (257, 0.0), (257, 1.0), (40, 0.4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS.get)
@pytest.mark.kernels
def test_rows_in_parts(
    V: int, beta: float, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _share(monkeypatch, 64)
    _check(_tensors(device, dtype, T=3, V=V), beta=beta, entropy=True, temperature=1.3, softcap=8.0)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.kernels
def test_parts_of_a_row_give_what_one_gives(shards: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shard of the vocabulary too; with NaN, infinities, and targets left out, elsewhere and out of range."""
    T, V = 10, 333
    logits = new_scratch(torch.empty(1, device=device), T, V)
    logits.copy_(3 * torch.randn(T, V, device=device))
    logits[0, 200] = torch.nan
    logits[1, :150], logits[2], logits[3] = -torch.inf, -torch.inf, torch.finfo(torch.float32).min
    logits[4], logits[4, 300] = -torch.inf, torch.inf
    start = V * (shards - 1)
    target = torch.tensor([7, 332, 5, 5, 300, 63, 64, -100, shards * V, -1], device=device)
    target[:7] += start
    options = Options(-100, 1.0, 0.0, 0.0, 0.0)

    def results(columns: int) -> Tensor:
        _share(monkeypatch, columns)
        found = torch.full((4, T), 9.0, device=device)
        log_prob_kernels.launch_stats(
            logits, target, options, found[:2], *found[2:], start, shards * V, is_whole=shards == 1
        )
        return found

    torch.testing.assert_close(results(64), results(384), rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.kernels
def test_divergences_of_parts_add_up(beta: float, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With classes that are masked in a whole part, and NaN in one."""
    T, V = 5, 333
    logits, teacher = (new_scratch(torch.empty(1, device=device), T, V) for _ in range(2))
    for scratch in (logits, teacher):
        scratch.copy_(3 * torch.randn(T, V, device=device))
        scratch[0, 60:200] = -torch.inf
    logits[1, 200], teacher[2, 70] = torch.nan, torch.nan
    target, options = torch.zeros(T, dtype=torch.int64, device=device), Options(-100, 1.0, 0.0, 0.0, beta)

    def results(columns: int) -> Tensor:
        _share(monkeypatch, columns)
        totals = torch.empty(2, 2, T, device=device)
        for scratch, total in zip((logits, teacher), totals, strict=True):
            log_prob_kernels.launch_stats(scratch, target, options, total, None, None, 0, V)
        found = torch.full((2, T), 9.0, device=device)
        log_prob_kernels.launch_divergence(logits, teacher, *totals, options, *found)
        return found

    found = results(64)
    torch.testing.assert_close(found, results(384), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[0].isnan().tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_classes_whose_bias_is_minus_infinity_are_left_out(beta: float, device: torch.device) -> None:
    """As a padded vocabulary is masked."""
    V = 6
    made = _tensors(device, T=3, D=4, V=V, E=4)
    bias = torch.zeros(V, device=device).masked_fill(torch.arange(V, device=device) >= 4, -torch.inf)
    target = torch.tensor([0, 3, 1], device=device)

    def results(classes: int) -> list[Tensor]:
        x, weight = (made[name].detach().clone().requires_grad_() for name in ("x", "weight"))
        teacher = Teacher(made["teacher_x"], made["teacher_weight"][:classes], bias[:classes], beta=beta)
        options: Any = dict(bias=bias[:classes], entropy=True, teacher=teacher)
        found = linear_log_probs(x, weight[:classes], target, **options)[:3]
        sum(t.sum() for t in found).backward()
        return [*found, x.grad, weight.grad]

    torch.testing.assert_close(results(V), results(4))


@pytest.mark.parametrize("of", ["x", "teacher_x"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_nan_is_not_left_out(beta: float, of: str, device: torch.device) -> None:
    """A divergence of 0, with a gradient of 0, would hide it."""
    made = _tensors(device, T=2, D=4, V=6, E=4)
    made[of] = made[of].detach().clone()
    made[of][0, 0] = torch.nan
    made["x"].requires_grad_()
    divergence = as_tuple(linear_log_probs, beta)(**made)[1]
    (dx,) = torch.autograd.grad(divergence.sum(), made["x"])
    assert divergence.isnan().tolist() == [True, False] and dx.isnan().any(1).tolist() == [True, False]


@pytest.mark.parametrize("logit", [50.0, -50.0, 200.0])
def test_gradients_of_distributions_far_apart_are_finite(logit: float, device: torch.device) -> None:
    """A ratio of probabilities is exp(50), whose square is no float32."""

    def gradient(function: Any, dtype: torch.dtype) -> Tensor:
        one = torch.ones(1, 1, device=device, dtype=dtype)
        weight = torch.tensor([[0.0], [logit], [1.0]], device=device, dtype=dtype, requires_grad=True)
        teacher = Teacher(one, torch.tensor([[0.5], [0.0], [1.0]], device=device, dtype=dtype), beta=0.3)
        target = torch.zeros(1, device=device, dtype=torch.int64)
        function(one, weight, target, teacher=teacher).divergence.sum().backward()
        return weight.grad.double()

    torch.testing.assert_close(
        gradient(linear_log_probs, torch.float32), gradient(linear_log_probs_ref, torch.float64), rtol=1e-4, atol=1e-6
    )


def test_leading_dims_and_empty(device: torch.device) -> None:
    x, weight, target, *_ = _tensors(device).values()
    flat = linear_log_probs(x, weight, target, top_k=2, entropy=True)
    shaped = linear_log_probs(x.view(3, 4, 24), weight, target.view(3, 4), top_k=2, entropy=True)
    assert shaped.log_probs.shape == (3, 4) and shaped.top_indices.shape == (3, 4, 2) and shaped.divergence is None
    torch.testing.assert_close(shaped.entropy.flatten(), flat.entropy)
    one = linear_log_probs(x[0], weight, target[0], top_k=2, entropy=True)
    assert one.log_probs.shape == () and one.top_indices.shape == (2,)
    torch.testing.assert_close(one.entropy, flat.entropy[0])
    x = torch.randn(0, 24, device=device, requires_grad=True)
    nothing = linear_log_probs(x, weight, target[:0], top_k=1)
    assert nothing.log_probs.shape == (0,) and nothing.top_indices.shape == (0, 1)
    dx, dw = torch.autograd.grad(nothing.log_probs.sum(), (x, weight))
    assert dx.shape == (0, 24) and not dw.any()


@pytest.mark.kernels
def test_compile_with_main_grad_and_teacher(device: torch.device) -> None:
    x, weight, target, *taught = _tensors(device).values()
    totals = [torch.zeros(weight.shape, device=device) for _ in range(2)]

    def loss(main_grad: Tensor) -> Tensor:
        found = linear_log_probs(x, weight, target, teacher=Teacher(*taught, beta=1.0), main_grad=main_grad)
        return found.log_probs.sum() + found.divergence.mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for function, total in zip((loss, compiled), totals, strict=True):
        function(total).backward()
    torch.testing.assert_close(totals[1], totals[0])
    assert totals[0].any()


def test_errors(device: torch.device) -> None:
    x, weight, target, teacher_x, teacher_weight = _tensors(device).values()
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        (r"weight must have shape \[301, 24\]", weight[:, :8], {}),
        ("weight must have x's dtype float32, got bfloat16", weight.bfloat16(), {}),
        ("temperature must be above 0, got 0", weight, {"temperature": 0}),
        ("softcap must be at least 0", weight, {"softcap": -1.0}),
        ("top_k must be from 0 to V = 301, got 400", weight, {"top_k": 400}),
        (r"teacher.beta must be in \[0, 1\], got 2", weight, {"teacher": Teacher(teacher_x, teacher_weight, beta=2.0)}),
        (r"teacher.weight must have shape", weight, {"teacher": Teacher(teacher_x, teacher_weight[:5])}),
        (r"teacher.x must have shape", weight, {"teacher": Teacher(teacher_x[:5], teacher_weight)}),
        (r"teacher.weight must be a tensor, got None", weight, {"teacher": Teacher(teacher_x, None)}),  # type: ignore[arg-type]
        ("main_grad must be float32 and contiguous", weight, {"main_grad": weight.bfloat16()}),
    ]
    for message, weights, options in wrong:
        with pytest.raises(ValueError, match=f"linear_log_probs: {message}"):
            linear_log_probs(x, weights, target, **options)


def test_targets_of_a_vmap_are_refused_by_what_cannot_be_batched(device: torch.device) -> None:
    """PyTorch's error of a boolean index, from the look for a wrong target, hid that of the product by rows."""
    x, weight, target, *_ = (t.detach() for t in _tensors(device).values())
    with pytest.raises(NotImplementedError, match="linear_log_probs"):
        torch.vmap(lambda t: linear_log_probs(x, weight, t, batch_invariant=True).log_probs)(target[None])


@pytest.mark.gpu
def test_peak_memory(device: torch.device) -> None:
    x, weight, target, *_ = _tensors(device, torch.bfloat16, T=8192, D=1024, V=65536).values()
    linear_log_probs(x, weight, target).log_probs.sum().backward()  # cuBLAS takes its workspace
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_log_probs(x, weight, target, entropy=True).log_probs.sum().backward()
    gradients = 2 * (x.numel() + weight.numel()) + 4 * x.numel()
    assert torch.cuda.max_memory_allocated() - before < gradients + (310 << 20)
