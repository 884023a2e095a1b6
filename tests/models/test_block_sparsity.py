"""Attention to blocks: DeepSpeed's layouts as loops, models against plain PyTorch with that mask, decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.models import configure
from powertrain.models.flops import flops_per_token
from powertrain.models.generate import Sampler, generate
from powertrain.models.parallelize import check_context
from powertrain.nn.attention import Context, SelfAttention
from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.nn.cache import CacheRow, KVCache
from tests.models.test_gpt_neox import SIZES, check_against_plain, check_bfloat16_against_plain, make_model

Sees = Callable[[int, int], bool]


def _local(n: int) -> Sees:
    return lambda r, c: c >= r - n // 2


def _fixed(n: int, shared: int) -> Sees:
    """A window from its first block; of each window the last blocks, from their own row on."""

    def sees(r: int, c: int) -> bool:
        window = any(start <= r < start + n and start <= c < start + n for start in range(0, 64, n))
        first = n - shared
        return window or any(i <= c < i + shared and r >= i for i in range(first, 64, n))

    return sees


def _variable(sizes: list[int], firsts: list[int]) -> Sees:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = list(zip(starts, sizes, strict=True)) + [(start, sizes[-1]) for start in range(sum(sizes), 64, sizes[-1])]
    return lambda r, c: c in firsts or any(s <= r < s + n and s <= c < s + n for s, n in spans)


def _longformer(n: int, ranges: list[tuple[int, int]]) -> Sees:
    return lambda r, c: c >= r - n // 2 or any(a <= c < b or a <= r < b for a, b in ranges)


# ours and the rule of DeepSpeed's class; BigBird without random blocks
LAYOUTS: dict[str, tuple[dict[str, Any], Sees]] = {
    "local": ({"before": 2}, _local(4)),
    "local-odd": ({"before": 1}, _local(3)),
    "fixed": ({"windows": (3,), "last_of_window": 1}, _fixed(3, 1)),
    "variable": ({"windows": (1, 3), "global_blocks": ((1, 2),)}, _variable([1, 3], [1])),
    "bigbird": ({"before": 1, "global_blocks": ((0, 2),)}, lambda r, c: c >= r - 1 or c < 2),
    "bslongformer": ({"before": 1, "global_blocks": ((3, 5),), "global_rows": True}, _longformer(3, [(3, 5)])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [32, 27, 3])
def test_masks(layout: str, length: int) -> None:
    fields, sees = LAYOUTS[layout]
    rules = BlockSparsity(4, **fields)
    wanted = [[j <= i and sees(i // 4, j // 4) for j in range(length)] for i in range(length)]
    mask = rules.mask(length, torch.device("cpu"))
    assert torch.equal(mask, torch.tensor(wanted)[None, None])
    # the bound by which kernels skip keys leaves none out
    i, j = torch.arange(length)[:, None], torch.arange(length)
    assert rules.left < 0 or not (mask[0, 0] & (j < i - rules.left)).any()
    some = torch.tensor([[length - 1, length + 5], [0, length // 2]])
    found = rules.mask_at(some, length)
    assert torch.equal(found[0, 0, 0], mask[0, 0, -1]) and torch.equal(found[1, 0, 1], mask[0, 0, length // 2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_count_the_keys(layout: str) -> None:
    """Of 32 positions in blocks of 4; a query's own key counts half, as without sparsity."""
    rules = BlockSparsity(4, **LAYOUTS[layout][0])
    seen = rules.mask(32, torch.device("cpu")).sum().item() - 32 / 2
    assert rules.keys_seen(32) == seen / 32
    fields = {"layer_types": ("sparse",), "sparsity": {"block": 4, **LAYOUTS[layout][0]}}
    sparse, full = (flops_per_token(make_model(**f), 32) for f in (fields, {}))
    # two layers, 32 channels of queries and of values
    assert full - sparse == pytest.approx(6 * 2 * 64 * (32 / 2 - rules.keys_seen(32)))
    # without keys the products with weights are left, as a run's summary asks for them
    assert flops_per_token(make_model(**fields), 0) == flops_per_token(make_model(), 0)


@pytest.mark.parametrize("fields", [{}, {"position_embedding": "alibi", "sliding_window": 9}], ids=["rotary", "alibi"])
@pytest.mark.parametrize("layout", ["local", "fixed"])
def test_loss_and_gradients(layout: str, fields: dict[str, Any]) -> None:
    """One sparse layer, one with full attention: only that has ALiBi and the sliding window."""
    rules = {"block": 4, **LAYOUTS[layout][0]}
    check_against_plain(make_model(layer_types=("sparse", "attention"), sparsity=rules, **fields))


def test_bfloat16() -> None:
    check_bfloat16_against_plain(make_model(layer_types=("sparse",), sparsity={"block": 4, "before": 1}))


def test_dropout_is_of_the_result() -> None:
    """DeepSpeed's sparse attention has no dropout; GPT-NeoX applies it to what comes out."""
    layer = SelfAttention(16, 2, sparsity=BlockSparsity(4, before=1), dropout=0.5)
    x = torch.randn(1, 12, 16)
    layer.out.weight.data = torch.eye(16)
    whole = layer.eval()(x)
    found = layer.train()(x)
    kept = found != 0
    assert 0.2 < kept.float().mean() < 0.8
    torch.testing.assert_close(found[kept], 2 * whole[kept])


def test_documents_are_apart() -> None:
    layer = SelfAttention(16, 2, sparsity=BlockSparsity(4, before=1)).eval()
    x, ids = torch.randn(1, 12, 16), torch.tensor([[0] * 6 + [1] * 6], dtype=torch.int32)
    torch.testing.assert_close(layer(x, Context(document_ids=ids))[:, :6], layer(x[:, :6]))
    # of two rows, the end repeated
    starts = torch.tensor([0, 6, 12, 14, 24, 24], dtype=torch.int32)
    two, ids = torch.cat([x, x]), torch.tensor([[0] * 6 + [1] * 6, [0] * 2 + [1] * 10], dtype=torch.int32)
    torch.testing.assert_close(layer(two, Context(document_starts=starts)), layer(two, Context(document_ids=ids)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_is_the_full_forward(layout: str) -> None:
    """Prompts of different lengths, so that rows stand at different places in their blocks."""
    model = make_model(layer_types=("sparse",), sparsity={"block": 2, **LAYOUTS[layout][0]}).eval()
    prompts = [[3, 5, 7], [11, 2, 9, 4, 1, 8, 30]]
    rows = generate(model, prompts, max_new_tokens=8, sampler=Sampler(temperature=0))
    with torch.no_grad():
        for prompt, row in zip(prompts, rows, strict=True):
            tokens = list(prompt)
            for _ in range(8):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            assert row == tokens[len(prompt) :]


def test_several_tokens_behind_a_cache() -> None:
    model = make_model(layer_types=("sparse",), sparsity={"block": 4, "before": 1}).eval()
    tokens = torch.randint(0, 97, (2, 23))
    with torch.no_grad():
        cache = model.new_cache(2, 23)
        parts = [model(part, cache=cache) for part in tokens.split((5, 3, 8, 7), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-4)


def test_no_tokens_behind_a_cache() -> None:
    model = make_model(layer_types=("sparse",), sparsity={"block": 4, "before": 1}).eval()
    tokens = torch.randint(0, 97, (2, 7))
    with torch.no_grad():
        cache = model.new_cache(2, 7)
        parts = [model(part, cache=cache) for part in tokens.split((5, 0, 2), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-4)


def test_rows_behind_a_cache_are_not_written() -> None:
    layer = SelfAttention(16, 2, sparsity=BlockSparsity(4, before=1)).eval()
    cache = KVCache([CacheRow(2, 8, 8)], 2, 6, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        layer(torch.randn(2, 4, 16), Context(cache=cache))
        cache.advance(torch.tensor([4, 1]))
        before = cache.keys[0].clone()
        layer(torch.randn(2, 5, 16), Context(cache=cache))
    assert torch.equal(cache.keys[0][0, :4], before[0, :4]) and torch.equal(cache.keys[0][1, :1], before[1, :1])
    assert (cache.keys[0][0, 4:] != before[0, 4:]).any() and cache.keys[0].shape[1] == 6


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"block": 0, "before": 1}, "block must be at least 1, got 0"),
        ({"block": 4}, "before or windows must be given"),
        ({"before": 1, "windows": (2,)}, "before or windows must be given, not both"),
        ({"before": -1}, "before must be at least 0, got -1"),
        ({"windows": (2, 0)}, "windows must have sizes of at least 1"),
        ({"windows": (2, 3), "last_of_window": 1}, "last_of_window must be 0, or at most the one size"),
        ({"before": 1, "global_blocks": ((3, 3),)}, "global_blocks must be ranges"),
    ],
)
def test_wrong_rules(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configure(**SIZES, layer_types=("sparse",), sparsity=rules)


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"block": 2.5, "before": 1}, "block must be an integer, got 2.5"),
        ({"windows": 2}, "windows must be a tuple of integers, got 2"),
        ({"before": 1, "global_blocks": (1, 2)}, r"global_blocks must be .* got \(1, 2\)"),
        ({"before": 1, "global_rows": "no"}, "global_rows must be True or False, got 'no'"),
    ],
)
def test_rules_of_another_kind(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockSparsity(**rules)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.sparsity must be given with sparse layers"):
        configure(**SIZES, layer_types=("sparse",))
    with pytest.raises(ValueError, match=r"model.sparsity must be null without sparse layers"):
        configure(**SIZES, sparsity={"before": 1})
    config: Any = configure(**SIZES, layer_types=("sparse",), sparsity={"before": 1})
    with pytest.raises(ValueError, match=r"parallel.context must be 1 with sparse layers"):
        check_context(config, 2)


def test_a_row_is_softmax_over_its_blocks() -> None:
    """The layer itself against scores masked by a written rule, without our mask."""
    layer = SelfAttention(8, 1, sparsity=BlockSparsity(2, before=1)).double().eval()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    q, k, v = layer.qkv(x)[0].split(8, -1)
    rows: list[Tensor] = []
    for i in range(9):
        first = max(i // 2 - 1, 0) * 2
        rows.append(F.softmax(q[i] @ k[first : i + 1].T / 8**0.5, -1) @ v[first : i + 1])
    torch.testing.assert_close(layer(x)[0], layer.out(torch.stack(rows)))


@pytest.mark.parametrize(
    "fields", [{"layer_types": ["sparse"], "sparsity": {"before": 1}}, {"position_embedding": "alibi"}]
)
def test_training_after_inference_mode(fields: dict[str, Any]) -> None:
    """Masks and slopes are kept by sizes; evaluation, which may make them, must not make what no backward may save."""
    # a length and a number of heads of no other test
    model = make_model(num_heads=1, **fields)
    tokens = torch.randint(SIZES["vocab_size"], (1, 27))
    with torch.inference_mode():
        model(tokens, tokens)
    model(tokens, tokens).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
