"""decode_projected: the bits of rope_qkv and decode_attention, with keys and values written by the first kernel."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain
from powertrain.ops.attention import decode
from powertrain.ops.attention.decode import decode_attention, decode_projected
from powertrain.ops.batch_invariance import batch_invariant
from powertrain.ops.rope import rope_qkv
from powertrain.ops.rope_table import rope_table
from powertrain.runtime import dispatch
from powertrain.runtime.errors import CompileTimeout
from powertrain.runtime.recording import record
from powertrain.runtime.settings import reload, settings


def _apart(qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    table, kv_heads, window = (options[name] for name in ("table", "num_kv_heads", "window_size"))
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = rope_qkv(
        qkv, table=table, num_heads=heads, num_kv_heads=kv_heads, packing="grouped", offset=lengths
    )  # fmt: skip
    return decode_attention(q, keys, values, lengths, key_new=k, value_new=v, window_size=window)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(8))
def test_the_same_bits(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps: results and caches, also where tokens find no room, and beside a row that no sequence has."""
    draws, direct = random.Random(seed), []
    launch = decode.rotate_append_op
    monkeypatch.setattr(decode, "rotate_append_op", lambda *args: direct.append(1) or launch(*args))
    batch, new, kv_heads, of_each = (draws.choice(x) for x in ([1, 3], [1, 2], [1, 2], [1, 3]))
    (head_dim, rotary), capacity = draws.choice([(16, 16), (16, 4), (24, 8)]), 12
    dtype = draws.choice([torch.float32, torch.bfloat16])
    # positions of a full cache are in the table
    table = rope_table(rotary, capacity + 8, device=device)
    lengths = torch.tensor([draws.choice([0, 5, capacity - 1]) for _ in range(batch)], dtype=torch.int32, device=device)
    shape = batch + 1, capacity, kv_heads, head_dim
    pairs = [[torch.randn(shape, device=device).to(dtype) for _ in range(2)]] * 2
    pairs = [[x.clone() for x in pair] for pair in pairs]
    options = {"table": table, "num_kv_heads": kv_heads, "window_size": draws.choice([(-1, -1), (3, 0)])}
    for _ in range(3):
        qkv = torch.randn(batch, new, kv_heads * (of_each + 2), head_dim, device=device).to(dtype)
        assert torch.equal(
            decode_projected(qkv, *pairs[0], lengths, **options), _apart(qkv, *pairs[1], lengths, **options)
        )
        assert all(map(torch.equal, *pairs))
        lengths = (lengths + new).clamp(max=capacity)
    # without a repeated call's recording, each goes this way
    assert direct


def _meta(**changed: Any) -> dict[str, Any]:
    cache = torch.empty(4, 64, 2, 16, dtype=torch.bfloat16, device="meta")
    call = {
        "qkv": torch.empty(4, 1, 8, 16, dtype=torch.bfloat16, device="meta"), "key_cache": cache,
        "value_cache": torch.empty_like(cache), "cache_seqlens": torch.empty(4, dtype=torch.int32, device="meta"),
        "table": rope_table(16, 64, device=torch.device("meta")), "num_kv_heads": 2,
    }  # fmt: skip
    return {**call, **changed}


def _kernels(**changed: Any) -> list[str]:
    with record("A100") as wanted, torch.no_grad():
        decode_projected(**_meta(**changed))
    return [spec.kernel.name for spec in wanted.specs]


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_one_launch_less() -> None:
    direct, apart = _kernels(), ["_rope_kernel", "_append_kernel"]
    assert "_append_kernel" not in direct and direct[0] == "_rope_kernel"
    # caches of two layouts, lengths in int64, and ops that are computed by plain PyTorch
    values = torch.empty(4, 2, 64, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    assert _kernels(value_cache=values)[:2] == apart
    assert _kernels(cache_seqlens=torch.empty(4, dtype=torch.int64, device="meta"))[:2] == apart
    with powertrain.disable("rope_qkv"):
        assert _kernels()[0] == "_append_kernel"


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"key_cache": torch.empty(4, 64, 2, 16, device="meta")}, "key_cache must have query's dtype bfloat16"),
        ({"num_kv_heads": 1}, "key_new must have shape"),
        ({"cache_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}, "offset must"),
        ({"window_size": (3, -7)}, "window_size must"),
        ({"qkv": torch.empty(4, 1, 7, 16, dtype=torch.bfloat16, device="meta")}, "num_heads must be a multiple"),
        ({"key_cache": torch.empty(4, 64, dtype=torch.bfloat16, device="meta")}, "key_cache must have 4 dims"),
        ({n: _meta()[n].double() for n in ("qkv", "key_cache", "value_cache")}, "qkv must be float32, float16 or"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused_as_by_the_two(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _kernels(**changed)


def test_gradients_and_batch_invariance_are_refused() -> None:
    call = _meta()
    with record("A100"), pytest.raises(NotImplementedError, match="decode_attention has no gradients"):
        decode_projected(**{**call, "qkv": call["qkv"].requires_grad_()})
    with batch_invariant(), pytest.raises(NotImplementedError, match="compute whole sequences, without a KV cache"):
        _kernels()


@pytest.mark.kernels
def test_a_failed_compile_leaves_attention_its_kernel(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def fail(*arguments: Any) -> Any:
        raise CompileTimeout("_rope_kernel did not compile")

    monkeypatch.setattr(decode, "rotate_append_op", fail)
    call = _small(device)
    with pytest.raises(CompileTimeout):
        decode_projected(**call)
    monkeypatch.setattr(dispatch, "_holds", [])
    monkeypatch.setenv("POWERTRAIN_ON_COMPILE_FAILURE", "reference")
    reload()
    try:
        out = decode_projected(**call)
        assert dispatch.disabled_ops == ("rope_qkv",)
    finally:
        monkeypatch.undo()
        reload()
        dispatch._changed()
    torch.testing.assert_close(out, decode_projected(**call))


def _small(device: torch.device) -> dict[str, Any]:
    keys, values = (torch.zeros(2, 8, 1, 16, device=device) for _ in range(2))
    return {
        "qkv": torch.ones(2, 1, 4, 16, device=device), "key_cache": keys, "value_cache": values,
        "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32, device=device),
        "table": rope_table(16, 8, device=device), "num_kv_heads": 1,
    }  # fmt: skip
