"""The universal kernels against the judge: every mask, layout and head dim, forward and backward."""

import pytest
import torch

from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.triton import backward_dbias
from tests.ops.attention.problems import CONFIGS, Config, errors
from tests.torch_setup import SLOW_IN_INTERPRETER

pytestmark = pytest.mark.kernels


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_one_tensor_three_times_expanded_along_heads(device: torch.device) -> None:
    """The query's gradient is not taken for that of a shared key."""
    x = torch.randn(1, 9, 1, 16, device=device, requires_grad=True)
    found = []
    for backend in ("triton", "reference"):
        heads = x.expand(-1, -1, 3, -1)
        out = attention(heads, heads, heads, is_causal=True, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_weights_that_grow_with_distance(packed: bool, device: torch.device) -> None:
    """ALiBi's slopes may be negative: then what a row behind a sequence would see has no bound."""
    slopes = torch.tensor([-3.0, -2.0], device=device)
    starts = torch.tensor([0, 70, 100], dtype=torch.int32, device=device)
    leaves = [torch.randn(1, 100, 2, 16, device=device, requires_grad=True) for _ in range(3)]

    def grads(backend: str) -> tuple[torch.Tensor, ...]:
        if packed:
            q, k, v = (x[0] for x in leaves)
            out = varlen_attention(q, k, v, starts, max_seqlen_q=70, alibi_slopes=slopes, backend=backend)
        else:
            out = attention(*leaves, alibi_slopes=slopes, backend=backend)
        return torch.autograd.grad(out.square().sum(), leaves)

    for found, exact in zip(grads("triton"), grads("reference"), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


# others run the same code on as many dims or more
_SLOW = {"causal-d128", "full-d128", "window-d128", "full-192-128", "causal-d256", "causal-d80", "causal-d96"}


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=c.name, marks=SLOW_IN_INTERPRETER if c.name in _SLOW else ()) for c in CONFIGS],
)
def test_values_and_gradients(config: Config, device: torch.device) -> None:
    number = CONFIGS.index(config)
    largest = 40 if max(config.head_dims) <= 128 else 18
    bad = [e for e in errors(config, number, device, DTYPES[number % 3], largest) if not e.ok]
    assert not bad


@pytest.mark.parametrize("name", ["bias-batch", "bias-rows", "bias-one", "dropout-bias"])
def test_gradients_of_a_bias_whose_scores_are_not_stored(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they were too many: a program for each tile of the bias."""
    monkeypatch.setattr(backward_dbias, "_MOST_STORED", 0)
    number = next(i for i, config in enumerate(CONFIGS) if config.name == name)
    # other sizes than above, so that no call is replayed with what that one had stored
    assert not [e for e in errors(CONFIGS[number], number + 1000, device, DTYPES[number % 3], 35) if not e.ok]


def test_a_dropout_seed_with_a_stride(device: torch.device) -> None:
    q, seeds = torch.randn(1, 9, 2, 16, device=device), torch.tensor([[3, 8], [5, 9]], device=device)
    ours, exact = (attention(q, q, q, dropout_p=0.5, dropout_seed=s) for s in (seeds[:, 0], seeds[:, 0].clone()))
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
def test_documents_of_no_queries_or_keys(queries: int, keys: int, device: torch.device) -> None:
    q, k = (torch.randn(2, n, 1, 16, device=device, requires_grad=True) for n in (queries, keys))
    ids = tuple(torch.zeros(2, n, dtype=torch.int32, device=device) for n in (queries, keys))
    out = attention(q, k, k, document_ids=ids)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert out.shape == q.shape and not out.any() and not dq.any() and not dk.any()
