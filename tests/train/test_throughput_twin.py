"""The opponent of benchmarks/train/throughput.py beside plain PyTorch: its optimizer, and FlashAttention-3 as an op."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from benchmarks import peers
from benchmarks.train.throughput import MAX_NORM, Case, clipped_adamw, run_config, twin
from benchmarks.train.twin import Twin

CPU = torch.device("cpu")
CASE = Case(
    {
        "architecture": "llama", "vocab_size": 160, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "intermediate_size": 96, "max_position_embeddings": 32,
    },
    seq_length=32,
    batch=2,
)  # fmt: skip


def _first_weights() -> dict[str, Tensor]:
    # larger than usual, so that the norm of the gradients is far beyond what is clipped
    return {name: (2 * value).bfloat16() for name, value in Twin(run_config(CASE).model).state_dict().items()}


def _copy(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def test_steps_are_those_of_plain_adamw_over_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_3_LIBRARY", raising=False)
    step, optimizer = twin(CASE, CPU, _first_weights())
    seen: list[list[Tensor]] = []

    def update(weights: list[Tensor], gradients: list[Tensor], *state: Any) -> None:
        seen.append(gradients)
        clipped_adamw(weights, gradients, *state)

    optimizer.update = update
    masters = _copy(optimizer.masters)
    groups = [
        {"params": [m for m in masters if m.dim() > 1], "weight_decay": 0.1},
        {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, 1e-4, (0.9, 0.95))
    losses = []
    for _ in range(5):
        with torch.compiler.set_stance("force_eager"):
            losses.append(float(step()))
        for master, gradient in zip(masters, seen[-1], strict=True):
            assert gradient.dtype == torch.bfloat16
            master.grad = gradient.float()
        assert torch.nn.utils.clip_grad_norm_(masters, MAX_NORM) > 2 * MAX_NORM
        plain.step()
        # averages cancel: their error is that of their largest terms
        assert_close(optimizer.averages, [plain.state[m]["exp_avg"] for m in masters], rtol=1e-5, atol=1e-9)
        assert_close(optimizer.squares, [plain.state[m]["exp_avg_sq"] for m in masters], rtol=1e-5, atol=1e-14)
        assert_close(optimizer.masters, masters, rtol=1e-6, atol=1e-9)
        for p, master in zip(optimizer.parameters, optimizer.masters, strict=True):
            assert torch.equal(p, master.bfloat16())
            assert p.grad is None
    assert losses[-1] < losses[0]


def _problem(scale: float) -> list[Any]:
    """Arguments of the update: a matrix and a vector."""
    shapes = (8, 24), (24,)
    masters = [torch.randn(s) for s in shapes]
    moments = ([torch.zeros(s) for s in shapes] for _ in range(2))
    gradients = [scale * torch.randn(s).bfloat16() for s in shapes]
    return [[m.bfloat16() for m in masters], gradients, masters, *moments, [torch.ones(()) for _ in range(2)]]


def test_gradients_are_clipped_to_the_norm_and_not_beyond() -> None:
    for scale in (100.0, 1e-3):
        arguments = _problem(scale)
        clipped_adamw(*arguments)
        norm = torch.cat([g.float().flatten() for g in arguments[1]]).norm()
        # the first average is a tenth of the gradient
        found = 10 * torch.cat([a.flatten() for a in arguments[3]]).norm()
        assert_close(found, norm.clamp(max=MAX_NORM), rtol=1e-5, atol=0)


def test_a_step_is_compiled_once() -> None:
    compiled = _problem(10.0)
    expected = [_copy(a) for a in compiled]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    update = torch.compile(clipped_adamw, dynamic=False, fullgraph=True, backend=counter)
    for _ in range(3):
        update(*compiled)
        clipped_adamw(*expected)
    assert counter.frame_count == 1
    assert_close(compiled, expected, rtol=1e-6, atol=1e-9)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)


@pytest.fixture
def flash_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library's two operators in plain PyTorch, by formulas: below an op there is no autograd."""

    def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> list[Tensor]:
        assert is_causal
        k, v = (t.float().repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        scores = _scores(q.float(), k, softmax_scale)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).to(q.dtype).contiguous()
        return [out, scores.logsumexp(-1), q.new_empty(0), q.new_empty(0)]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, is_causal: bool,
    ) -> None:  # fmt: skip
        assert is_causal and dout.is_contiguous()
        group = q.shape[2] // k.shape[2]
        dout, out, q = dout.float(), out.float(), q.float()
        k, v = (t.float().repeat_interleave(group, 2) for t in (k, v))
        p = (_scores(q, k, softmax_scale) - softmax_lse[..., None]).exp()
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v) - (dout * out).sum(-1).transpose(1, 2)[..., None]
        ds = p * dp * softmax_scale
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, k))
        dk.copy_(torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (-1, group)).sum(3))
        dv.copy_(torch.einsum("bhqk,bqhd->bkhd", p, dout).unflatten(2, (-1, group)).sum(3))

    options = "float softmax_scale, bool is_causal"
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define(f"fwd(Tensor q, Tensor k, Tensor v, {options}) -> Tensor[]")
        library.define(
            "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!) dq, "
            f"Tensor(b!) dk, Tensor(c!) dv, {options}) -> ()"
        )
        library.impl("fwd", forward, "CPU")
        library.impl("bwd", backward, "CPU")
        monkeypatch.setattr(peers, "flash_3", lambda: torch.ops.flash_attn_3)
        yield


def test_flash_3_is_an_op_of_the_compiled_graph(flash_3: None) -> None:
    attend = peers.flash_3_op()
    assert attend is not None
    config, weights = run_config(CASE).model, _first_weights()
    models = [Twin(config, attend), Twin(config)]
    tokens, labels = torch.randint(config.vocab_size, (2, 2, 16)).unbind()
    for model in models:
        model.load_state_dict(weights)
    compiled = torch.compile(models[0], dynamic=False, fullgraph=True, backend="aot_eager")
    losses = compiled(tokens, labels), models[1](tokens, labels)
    for loss in losses:
        loss.backward()
    assert_close(*losses)
    assert_close(*([p.grad for p in model.parameters()] for model in models))


def test_flash_3_op_is_a_right_custom_op(flash_3: None) -> None:
    q = torch.randn(2, 8, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    # of a product of all three, so not contiguous
    kv = torch.randn(2, 8, 2, 3, 16, dtype=torch.bfloat16)
    k, v = (kv[..., i, :].requires_grad_() for i in range(2))
    torch.library.opcheck(peers._flash_3_forward, (q, k, v))
    attend = peers.flash_3_op()
    assert attend is not None
    turned = (t.transpose(1, 2) for t in (q, k, v))
    expected = F.scaled_dot_product_attention(next(turned), next(turned), next(turned), is_causal=True, enable_gqa=True)
    assert_close(attend(q, k, v), expected.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_without_its_library_there_is_no_flash_3_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_3_LIBRARY", raising=False)
    assert peers.flash_3_op() is None
