"""`batch_invariant`: a sequence's bits are the same alone, in a padded batch and in packed rows."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import powertrain
from powertrain import losses
from powertrain.models import build, configure
from powertrain.nn.lora import LoRALinear
from powertrain.ops.attention import attention, varlen_attention
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.gemm.row_invariant import row_invariant_linear_
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.linear_log_probs import linear_log_probs
from powertrain.runtime.settings import settings

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
    "init_method": "normal", "output_init_method": "normal", "init_std": 0.2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "num_kv_heads": 2, "intermediate_size": 44},
    "neox": {"architecture": "gpt_neox", "parallel_residual": True, "rotary_pct": 0.25},
    "neox-alibi": {"architecture": "gpt_neox", "position_embedding": "alibi", "sliding_window": 5, "num_kv_heads": 1},
    "neox-learned": {"architecture": "gpt_neox", "position_embedding": "learned", "tie_embeddings": True},
}
FAST = ("llama", "neox")


@pytest.fixture(autouse=True)
def products_by_element(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NumPy's matmul rounds a row by its place in the tile, as tensor cores do not; sums of each element do not."""
    if settings().interpret:
        matmul = np.matmul

        def by_element(x: Any, y: Any, dtype: Any = None) -> Any:
            if x.ndim != 2 or x.dtype.kind != "f":
                return matmul(x, y, dtype=dtype)
            columns = np.ascontiguousarray(y.T)
            return np.stack([(row * columns).sum(-1, dtype=dtype) for row in x])

        monkeypatch.setattr(np, "matmul", by_element)
    yield


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    fields = {**SIZES, **MODELS[name]}
    if fields["architecture"] == "llama":
        fields = {k: v for k, v in fields.items() if "init" not in k}
    model = build(configure(**fields), device="cpu")
    model.init_weights(1)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1
    return model.to(dtype)


def read(model: Any, tokens: Tensor, **packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(states [B, S, D], logits [B, S, V], log-probabilities of each next token [B, S]) of rows of tokens."""

    def of(states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        found = linear_log_probs(states, weight, tokens.roll(-1, 1), bias=bias)
        return states, torch.nn.functional.linear(states, weight, bias), found.log_probs

    found: tuple[Tensor, Tensor, Tensor] = model(tokens, read=of, **packed)
    return found


def packings(sequences: list[Tensor], chance: random.Random) -> Iterator[tuple[list[tuple[int, int, int]], Any]]:
    """Two batches: (sequence, row, first token) of each, and the arguments of the model."""
    longest = max(map(len, sequences))
    some = chance.sample(range(len(sequences)), chance.randint(2, len(sequences)))
    padded = torch.zeros(len(some), longest + chance.randrange(4), dtype=torch.int64)
    for row, number in enumerate(some):
        padded[row, : len(sequences[number])] = sequences[number]
    yield [(number, row, 0) for row, number in enumerate(some)], {"tokens": padded}
    order = chance.sample(range(len(sequences)), len(sequences))
    width = longest + chance.randrange(10)
    rows: list[list[int]] = [[]]
    for number in order:
        if sum(len(sequences[n]) for n in rows[-1]) + len(sequences[number]) > width:
            rows.append([])
        rows[-1].append(number)
    tokens, documents = torch.zeros(len(rows), width, dtype=torch.int64), torch.empty(len(rows), width).int()
    positions, places = torch.zeros_like(tokens), []
    for row, numbers in enumerate(rows):
        at = 0
        documents[row] = len(numbers)
        for place, number in enumerate(numbers):
            stop = at + len(sequences[number])
            tokens[row, at:stop], documents[row, at:stop] = sequences[number], place
            positions[row, at:stop] = torch.arange(stop - at)
            places.append((number, row, at))
            at = stop
        positions[row, at:] = torch.arange(width - at)
    yield places, {"tokens": tokens, "document_ids": documents, "position_ids": positions}


def compare(name: str, seed: int, dtype: torch.dtype, most: int = 12, count: int = 4) -> None:
    chance = random.Random(seed)
    model = make_model(name, dtype)
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(1, 61, (chance.randint(2, most),), generator=generator) for _ in range(count)]
    with torch.no_grad(), powertrain.batch_invariant():
        alone = [read(model, sequence[None]) for sequence in sequences]
        for places, arguments in packings(sequences, chance):
            found = read(model, **arguments)
            for number, row, first in places:
                length = len(sequences[number])
                for what, one, all_ in zip(("states", "logits", "log_probs"), alone[number], found, strict=True):
                    # the last label differs: what comes next
                    stop = length - (what == "log_probs")
                    same = torch.equal(one[0, :stop], all_[row, first : first + stop])
                    assert same, f"{name} {dtype} seed {seed}: {what} of sequence {number} differ"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)] if settings().interpret else range(3))
@pytest.mark.parametrize("name", FAST)
def test_a_sequence_has_its_bits_anywhere(name: str, seed: int) -> None:
    compare(name, seed, torch.bfloat16 if seed else torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_sweep(name: str, dtype: torch.dtype, seed: int) -> None:
    """Longer sequences than a tile of keys."""
    compare(name, seed, dtype, most=60, count=6)


def test_it_is_the_same_model() -> None:
    """Values and gradients are those of the usual order of sums, but for roundings."""
    for name in ["llama"] if settings().interpret else MODELS:
        model, tokens = make_model(name), torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
        found = []
        for context in (False, True):
            model.zero_grad()
            if context:
                with powertrain.batch_invariant():
                    log_probs = read(model, tokens)[2]
                    log_probs.sum().backward()
            else:
                log_probs = read(model, tokens)[2]
                log_probs.sum().backward()
            found.append([log_probs.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        for plain, invariant in zip(*found, strict=True):
            torch.testing.assert_close(invariant, plain, rtol=2e-4, atol=2e-4)


def test_adapters_are_invariant_too() -> None:
    model = powertrain.lora(make_model("llama"), rank=3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05
    tokens = torch.randint(1, 61, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), powertrain.batch_invariant():
        whole = read(model, tokens)[1]
        for row in range(3):
            assert torch.equal(read(model, tokens[row : row + 1])[1][0], whole[row])


def test_an_adapter_of_one_token() -> None:
    """One row is a product of another kind in most libraries."""
    layer = LoRALinear(torch.nn.Linear(64, 96), 8, 2.0, dora=True)
    with torch.no_grad(), powertrain.batch_invariant():
        layer.lora_B.normal_()
        x = torch.randn(17, 64)
        assert torch.equal(layer(x[:1]), layer(x)[:1])


@pytest.mark.skipif(settings().interpret, reason="takes 50 s there, and its parts are in the tests above")
def test_a_policy_gradient_run_has_no_drift() -> None:
    """Completions sampled one at a time from whole forwards, without a KV cache; the trainer packs them. Their
    log-probabilities differ by exactly 0 in every step, so that the ratio of the loss is exactly 1."""
    model = make_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator, chance = torch.Generator().manual_seed(0), random.Random(0)
    with powertrain.batch_invariant():
        for _ in range(3):
            sequences, sampled = [], []
            for _ in range(3):
                tokens = torch.randint(1, 61, (chance.randint(1, 3),), generator=generator)
                known: list[Tensor] = []
                for _ in range(4):
                    with torch.no_grad():
                        logits = model(tokens[None])[0, -1:]
                        states = model(tokens[None], read=lambda states, weight, bias: (states, weight, bias))
                    chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[0]
                    with torch.no_grad():
                        known.append(linear_log_probs(states[0][0, -1:], states[1], chosen, bias=states[2]).log_probs)
                    tokens = torch.cat([tokens, chosen])
                sequences.append(tokens)
                sampled.append(torch.cat(known))
            *_, (places, arguments) = packings(sequences, chance)
            found = read(model, **arguments)[2]
            ours = [found[row, at + len(sequences[n]) - 5 : at + len(sequences[n]) - 1] for n, row, at in places]
            theirs = [sampled[n] for n, *_ in places]
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            sequence = torch.arange(3).repeat_interleave(4)
            values = torch.tensor([1.0, -1.0, 0.5])
            loss = losses.policy_loss(torch.cat(ours), torch.cat(theirs), values, sequence)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_attention_of_every_layout(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 7, h, 16, generator=generator) for h in (4, 2, 2))
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    plain, lse = attention(q, k, v, is_causal=True, return_lse=True)
    with powertrain.batch_invariant():
        out, lse_2 = attention(
            *(x.permute(order) for x in (q, k, v)),
            is_causal=True,
            return_lse=True,
            layout=layout,  # type: ignore[arg-type]
        )
        starts = torch.tensor([0, 7, 14], dtype=torch.int32)
        packed = varlen_attention(*(x.flatten(0, 1) for x in (q, k, v)), starts, is_causal=True)
    torch.testing.assert_close(out.permute(order), plain)
    torch.testing.assert_close(lse_2, lse)
    assert torch.equal(packed.unflatten(0, (2, 7)), out.permute(order))


def test_what_has_no_fixed_order_is_refused() -> None:
    q = torch.randn(1, 4, 2, 16)
    bias, lengths = torch.zeros(4, 4), torch.tensor([4], dtype=torch.int32)
    with powertrain.batch_invariant():
        for options, words in (
            ({}, "attention that is not causal self-attention"),
            ({"is_causal": True, "attn_bias": bias}, "attention with attn_bias"),
            ({"is_causal": True, "dropout_p": 0.1}, "attention with dropout"),
            ({"is_causal": True, "chunk_size": 2}, "attention with chunk_size"),
            ({"is_causal": True, "seqused_k": lengths}, "attention with seqused or padded cu_seqlens"),
        ):
            with pytest.raises(NotImplementedError, match=words):
                attention(q, q, q, **options)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="document_ids must ascend"):
            attention(q, q, q, is_causal=True, document_ids=torch.tensor([[1, 0, 0, 1]]))
        with pytest.raises(NotImplementedError, match="without a KV cache"), torch.no_grad():
            decode_attention(q, q, q, lengths)
        with pytest.raises(NotImplementedError, match="mixture of experts"):
            grouped_gemm(torch.randn(4, 16), torch.randn(1, 16, 16), lengths)
    attention(q, q, q)


def test_rows_of_a_product() -> None:
    """Against the op itself: the context's linear layers are `row_invariant_linear_`."""
    x, weight = torch.randn(5, 16), torch.randn(8, 16)
    with powertrain.batch_invariant():
        y = torch.nn.functional.linear(x, weight)
    assert torch.equal(y, row_invariant_linear_(x, weight, None, torch.empty(5, 8)))
    with pytest.raises(ValueError, match="input must have a last dim of 16"), powertrain.batch_invariant():
        torch.nn.functional.linear(x[:, :8], weight)


def test_products_of_any_bias_and_of_no_columns() -> None:
    x, weight, numbers = torch.randn(5, 16), torch.randn(8, 16), torch.randn(16)
    with powertrain.batch_invariant():
        for bias in (numbers[::2], numbers[:1]):
            torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), x @ weight.T + bias)
        empty = torch.nn.functional.linear(x[:, :0], weight[:, :0], numbers[:8])
        assert torch.equal(empty, numbers[:8].expand(5, 8))
        with pytest.raises(ValueError, match="bias must have 8 elements"):
            torch.nn.functional.linear(x, weight, numbers[:4])
        with pytest.raises(ValueError, match="weight must have input's dtype float32, got bfloat16"):
            torch.nn.functional.linear(x, weight.bfloat16())
