"""attention_backward: parts of the keys differentiated where they are make the gradients of the whole."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, attention_backward, merge_attentions, varlen_attention
from powertrain.ops.attention.triton import plans
from powertrain.runtime.target import Target
from powertrain.testing import numerics
from tests.ops.attention.problems import BY_NAME, _slack, make
from tests.torch_setup import HAS_GPU, INTERPRET, SLOW_IN_INTERPRETER

RANKS, S, DQK, DV = 3, 27, 40, 24
B, H, K = (1, 2, 1) if INTERPRET else (2, 4, 2)  # the interpreter takes its time for every program
BACKEND = "triton" if HAS_GPU or INTERPRET else "chunked"
Part = tuple[Tensor, Tensor, Tensor]


def check(ours: Any, plain: Any, reference: Any, tensors: dict[str, Tensor | None], dtype: torch.dtype) -> None:
    """The judge, with the slack that every backward from an LSE in float32 needs."""
    found = numerics.errors(ours, plain, reference, tensors)
    bad = [e for e in found if not e.ours <= e.allowed + _slack(e, dtype, tensors)]
    assert not bad, bad


class Ring:
    """What `RANKS` ranks would do, one after another. Of every sequence, rank n holds the nth third."""

    def __init__(self, layout: str, causal: bool, device: torch.device) -> None:
        self.layout, self.causal = layout, causal
        self.starts = torch.tensor([0, 6, 6, 27], device=device)  # thirds: 2, 0 and 7 tokens
        self.packed = {"cu_seqlens_q": (self.starts // RANKS).int()} if layout == "thd" else {}
        shard = torch.arange(S, device=device) // (S // RANKS)
        if layout == "thd":
            sequence = torch.searchsorted(self.starts[1:], torch.arange(S, device=device), right=True)
            first, length = self.starts[sequence], self.starts.diff()[sequence]
            shard = (torch.arange(S, device=device) - first) // (length // RANKS)
        self.rows = [torch.nonzero(shard == n).flatten() for n in range(RANKS)]
        self.dim = {"bshd": 1, "bhsd": 2, "sbhd": 0, "thd": 0}[layout]

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
        shapes = {"query": (H, DQK), "key": (K, DQK), "value": (K, DV)}
        made = {}
        for name, (heads, d) in shapes.items():
            x = torch.randn(S, B, heads, d, device=device).to(dtype)
            order = {"bshd": (1, 0, 2, 3), "bhsd": (1, 2, 0, 3), "sbhd": (0, 1, 2, 3)}
            made[name] = x[:, 0] if self.layout == "thd" else x.permute(order[self.layout])
        return {name: x.contiguous().requires_grad_() for name, x in made.items()}

    def split(self, *tensors: Tensor) -> list[Part]:
        return [tuple(x.index_select(self.dim, rows) for x in tensors) for rows in self.rows]

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, self.dim).index_select(self.dim, torch.cat(self.rows).argsort())

    def seen(self, rank: int) -> range:
        """The ranks whose keys a rank's queries see."""
        return range(rank + 1 if self.causal else RANKS)

    def options(self, rank: int, other: int) -> dict[str, Any]:
        return {"is_causal": self.causal and rank == other, **self.packed} | (
            {} if self.layout == "thd" else {"layout": self.layout}
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's results merged, then those of all ranks together."""
        function = varlen_attention if self.layout == "thd" else attention
        shards = self.split(query, key, value)
        merged = []
        for rank, (mine, _, _) in enumerate(shards):
            parts = [
                function(mine, *shards[other][1:], return_lse=True, backend=BACKEND, **self.options(rank, other))
                for other in self.seen(rank)
            ]
            merged.append(merge_attentions([o for o, _ in parts], [lse for _, lse in parts], layout=self.layout))
        lse = torch.cat([lse for _, lse in merged], -1)[..., torch.cat(self.rows).argsort()]
        return self.join([out for out, _ in merged]), lse

    def whole(self, backend: str) -> Callable[..., Any]:
        def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
            options: dict[str, Any] = {"is_causal": self.causal, "return_lse": True, "backend": backend}
            if self.layout == "thd":
                return varlen_attention(query, key, value, self.starts.int(), **options)
            return attention(query, key, value, layout=self.layout, **options)

        return run


class _ByParts(torch.autograd.Function):
    """Forward of a ring, and its backward by `attention_backward`."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.ring = ring
        out, lse = ring.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        ring, (q, k, v, out, lse) = ctx.ring, ctx.saved_tensors
        shards = ring.split(q, k, v, out, dout)
        dq, dk, dv = ([torch.zeros_like(shard[n], dtype=torch.float32) for shard in shards] for n in range(3))
        for rank, (mine, _, _, its_out, its_dout) in enumerate(shards):
            its_lse, its_dlse = (x[..., ring.rows[rank]] for x in (lse, dlse))
            for other in ring.seen(rank):
                shares = attention_backward(
                    its_dout, mine, *shards[other][1:3], its_out, its_lse, grad_lse=its_dlse, layout=ring.layout,
                    **{name: x for name, x in ring.options(rank, other).items() if name != "layout"},
                )  # fmt: skip
                for total, share in zip((dq[rank], dk[other], dv[other]), shares, strict=True):
                    total += share
        return (None, *(ring.join(parts).to(q.dtype) for parts in (dq, dk, dv)))


def _rings(*quick: tuple[str, bool, torch.dtype], layouts: tuple[str, ...]) -> list[Any]:
    """Each case; in the interpreter those that are not `quick` are slow."""
    every = product(layouts, (False, True), (torch.float32, torch.bfloat16))
    return [pytest.param(*case, marks=() if case in quick else SLOW_IN_INTERPRETER) for case in every]


@pytest.mark.parametrize(
    "layout, causal, dtype",
    _rings(
        ("bshd", True, torch.bfloat16), ("thd", True, torch.float32), ("sbhd", False, torch.float32),
        layouts=("bshd", "bhsd", "sbhd", "thd"),
    ),
)  # fmt: skip
def test_a_ring_is_the_whole(layout: str, causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    ring = Ring(layout, causal, device)
    run = lambda query, key, value: _ByParts.apply(ring, query, key, value)  # noqa: E731
    check(run, ring.whole("plain"), ring.whole("reference"), ring.inputs(dtype, device), dtype)


@pytest.mark.parametrize(
    "layout, causal, dtype",
    _rings(("bshd", False, torch.bfloat16), ("thd", True, torch.bfloat16), layouts=("bshd", "thd")),
)
def test_a_ring_by_autograd_alone(layout: str, causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Through the LSEs of the parts."""
    ring = Ring(layout, causal, device)
    check(ring.forward, ring.whole("plain"), ring.whole("reference"), ring.inputs(dtype, device), dtype)


class _Whole(torch.autograd.Function):
    """An attention of one part."""

    @staticmethod
    def forward(ctx: Any, call: Any, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call(q, k, v, **options, backend=BACKEND)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        options = dict(ctx.options)
        for side in "qk":
            padded = options.pop(f"cu_seqlens_{side}_padded", None)
            if padded is not None:
                options[f"seqused_{side}"] = options[f"cu_seqlens_{side}"].diff()
                options[f"cu_seqlens_{side}"] = padded
        q, k, v, out, lse = ctx.saved_tensors
        layout = {"layout": "thd"} if "cu_seqlens_q" in options else {}
        return None, None, *attention_backward(dout, q, k, v, out, lse, grad_lse=dlse, **layout, **options)


# every argument about masks, lengths and dropout, and the layouts that a ring above does not have
NAMES = [
    "bmghk", "window-causal", "chunk", "prefix", "documents", "alibi-batch", "bias-no-grad", "bias-bool", "softcap",
    "dropout", "lengths-causal", "thd-padded", "strided", "thd-window",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_argument(name: str, device: torch.device) -> None:
    _, tensors, options = make(BY_NAME[name], 3, device, torch.float32, 30)
    if "attn_bias" in tensors:
        options["attn_bias"] = tensors.pop("attn_bias")
    function = varlen_attention if "cu_seqlens_q" in options else attention

    def through(backend: str | None) -> Callable[..., Any]:
        def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
            if backend is None:
                out, lse = _Whole.apply(lambda *a, **o: function(*a, return_lse=True, **o), options, query, key, value)
            else:
                out, lse = function(query, key, value, return_lse=True, backend=backend, **options)
            return out, lse.masked_fill(lse == -torch.inf, -1.0)

        return run

    check(through(None), through("plain"), through("reference"), tensors, torch.float32)


def test_a_shared_prefix(device: torch.device) -> None:
    """A cascade: one part is seen by all queries as a single long sequence, sinks are in the LSE."""
    q = torch.randn(2, 5, H, DQK, device=device)
    sinks = torch.randn(H, device=device)
    parts = [torch.randn(1, 9, K, DQK, device=device), torch.randn(2, 6, K, DQK, device=device)]
    k = torch.cat([parts[0].expand(2, -1, -1, -1), parts[1]], 1).requires_grad_()
    q.requires_grad_()
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True, backend="reference")
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, [q, k], dout)
    one = lambda x: x.detach().flatten(0, 1)[None]  # noqa: E731
    rows = lse.detach().transpose(0, 1).flatten(1)[None]
    dq, dk, dv = attention_backward(one(dout), one(q), parts[0], parts[0], one(out), rows)
    own = attention_backward(dout, q, parts[1], parts[1], out, lse)
    torch.testing.assert_close(dq.view_as(q) + own[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((dk + dv)[0], expected[1][:, :9].sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own[1] + own[2], expected[1][:, 9:], rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing_here(device: torch.device) -> None:
    """They get nothing from this part, whether or not another part saw something."""
    q, k = (torch.randn(1, 2, 1, 16, device=device) for _ in range(2))
    out, dout = torch.randn_like(q), torch.randn_like(q)
    lse = torch.tensor([[[0.5, -torch.inf]]], device=device)
    hidden = torch.zeros(2, 2, dtype=torch.bool, device=device)
    for grad in attention_backward(dout, q, k, k, out, lse, attn_bias=hidden):
        assert not grad.any()


def test_float64(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))
    out, lse = attention(q, k, v, return_lse=True, backend="reference")
    grads = attention_backward(torch.ones_like(out), q, k, v, out, lse)
    for grad, expected in zip(grads, torch.autograd.grad(out.sum(), [q, k, v]), strict=True):
        torch.testing.assert_close(grad, expected)


def test_errors(device: torch.device) -> None:
    q = torch.randn(2, 5, 4, 8, device=device)
    lse = torch.zeros(2, 4, 5, device=device)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    for message, arguments, options in (
        (r"lse must have shape \[2, 4, 5\]", (q, q, q, q, q, lse.mT), {}),
        (r"grad_lse must have shape \[2, 4, 5\]", (q, q, q, q, q, lse), {"grad_lse": lse[0]}),
        (r"out must have shape \[2, 5, 4, 8\]", (q, q, q, q, q[..., :4], lse), {}),
        ("grad_out must have query's dtype float32, got float16", (q.half(), q, q, q, q, lse), {}),
        ("lse must be float32, got float16", (q, q, q, q, q, lse.half()), {}),
        ("cu_seqlens_q must be None for layout bshd, got one", (q, q, q, q, q, lse), {"cu_seqlens_q": starts}),
        ("cu_seqlens_q must be given for thd", (q[0],) * 5 + (lse[0],), {"layout": "thd"}),
        (
            r"seqused_k must have shape \[1\] \(batch\), got \[2\]",
            (q[0],) * 5 + (lse[0],),
            {"layout": "thd", "cu_seqlens_q": starts, "seqused_k": starts},
        ),
        ("dropout_seed must be that of the forward", (q, q, q, q, q, lse), {"dropout_p": 0.5}),
        ("attn_bias must not require a gradient", (q, q, q, q, q, lse), {"attn_bias": q[0, :, 0, :5].requires_grad_()}),
    ):
        with pytest.raises(ValueError, match=f"attention_backward: {message}"):
            attention_backward(*arguments, **options)


@pytest.mark.parametrize(
    ("arch", "head_dim", "block"), [("sm_80", 512, 16), ("sm_80", 384, 32), ("sm_89", 264, 16), ("sm_89", 256, 32)]
)
def test_tiles_of_a_bias_gradient_in_tf32_fit(arch: str, head_dim: int, block: int) -> None:
    """32 x 32 take 192 bytes of shared memory for each column of query and of value."""
    plan = plans.plan_dbias(4, head_dim, head_dim, True, False, Target.parse(arch))
    assert (plan.block_m, plan.block_n) == (block, block)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_in_inference_mode(layout: Any, device: torch.device) -> None:
    """PyTorch's error of a tensor without a gradient was all that it gave on a CPU, also for tensors made there."""

    def problem() -> tuple[list[Tensor], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        lead = (7,) if layout == "thd" else (1, 7)
        tensors = [torch.randn(*lead, h, 16, generator=generator).to(device) for h in (H, H, K, K)]
        options: dict[str, Any] = {"alibi_slopes": torch.full((H,), 0.5, device=device), "is_causal": True}
        if layout == "thd":
            options["cu_seqlens_q"] = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
        return tensors, options

    def gradients() -> tuple[Tensor, ...]:
        (grad, *qkv), options = problem()
        function = varlen_attention if layout == "thd" else attention
        out, lse = function(*qkv, **options, return_lse=True)
        return attention_backward(grad, *qkv, out, lse, layout=layout, **options)

    expected = gradients()
    with torch.inference_mode():
        found = gradients()
        made, options = problem()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    out, lse = (varlen_attention if layout == "thd" else attention)(*made[1:], **options, return_lse=True)
    again = attention_backward(made[0], *made[1:], out, lse, layout=layout, **options)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def _part(device: torch.device) -> tuple[Tensor, ...]:
    grad, *qkv = (torch.randn(1, 3, 2, 16, device=device) for _ in range(4))
    return grad, *qkv, *attention(*qkv, return_lse=True)


def test_transforms_are_refused(device: torch.device) -> None:
    """Kernels gave zeros to torch.func.grad without a word, plain PyTorch an error of its own."""
    grad, *rest = _part(device)
    with pytest.raises(NotImplementedError, match=r"attention_backward: torch.func.grad, vmap and their kin"):
        torch.func.grad(lambda x: attention_backward(x, *rest)[0].sum())(grad)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda x: attention_backward(x, *rest))(torch.stack([grad, grad]))


def test_in_a_compiled_function(device: torch.device) -> None:
    part = _part(device)
    torch._dynamo.reset()
    found = torch.compile(attention_backward, backend="eager")(*part)
    torch.testing.assert_close(found, attention_backward(*part), rtol=1e-5, atol=1e-5)
    if BACKEND == "chunked":
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"reads lengths on the host.* leave fullgraph="):
            torch.compile(attention_backward, backend="eager", fullgraph=True)(*part)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_nan_in_a_row_is_in_its_lse_and_in_the_gradients(sinks: bool, device: torch.device) -> None:
    """An LSE of -inf says that a row sees no key: the backward would leave it out."""
    q, k, v = (torch.randn(1, 5, 1, 16, device=device, requires_grad=True) for _ in range(3))
    q.data[0, 3, 0, 2] = torch.nan
    options = {"sinks": torch.zeros(1, device=device, requires_grad=True)} if sinks else {}
    out, lse = attention(q, k, v, return_lse=True, is_causal=True, backend=BACKEND, **options)
    assert out.isnan().any(-1).flatten().tolist() == lse.isnan().flatten().tolist() == [n == 3 for n in range(5)]
    dq, dk, dv, *dsinks = torch.autograd.grad(out.sum(), [q, k, v, *options.values()])
    assert dq.isnan().all(-1).flatten().tolist() == [n == 3 for n in range(5)]
    # of the keys that it sees
    assert dk[:, :4].isnan().all() and dv[:, :4].isnan().all()
    assert all(d.isnan().all() for d in dsinks)
