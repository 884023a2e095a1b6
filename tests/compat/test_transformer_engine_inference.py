"""InferenceParams: steps over a cache equal the forward of whole sequences, as sequences come and go."""

import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.pytorch.attention import inference

pytestmark = pytest.mark.usefixtures("on_cpu")
D = torch.float64
H, K, DIM = 4, 2, 6
E = H * DIM
LONGEST = 12
# id to new tokens: ragged prompts; one finishes, a gap; one joins in front of another's place; a prompt in two parts;
# all as long as each other; one brings nothing
STEPS = (
    {7: 3, 2: 5, 9: 1}, {7: 1, 2: 1, 9: 1}, {2: 1, 9: 3}, {4: 2, 9: 1}, {4: 3, 9: 1, 7: 2}, {4: 2, 9: 2, 7: 2},
    {9: 0, 7: 1},
)  # fmt: skip


def params(**options: Any) -> te.InferenceParams:
    sizes: dict[str, Any] = {"num_heads_kv": K, "head_dim_k": DIM, "dtype": D, "max_ctx_len": 5}
    if options.get("is_paged"):
        sizes |= {"page_size": 4, "total_num_pages": 4 * LONGEST // 4}
    return te.InferenceParams(4, LONGEST, **{**sizes, **options})


def packed(parts: list[Tensor], qkv_format: str, extra: int = 0) -> Tensor:
    """New tokens of each sequence [n, ...] in one tensor; NaN where there is none."""
    if qkv_format == "thd":
        return torch.cat([*parts, parts[0].new_full((extra, *parts[0].shape[1:]), torch.nan)])
    longest = max(len(part) for part in parts) + extra
    out = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), torch.nan)
    for row, part in enumerate(parts):
        out[row, : len(part)] = part
    return out.transpose(0, 1).contiguous() if qkv_format == "sbhd" else out


def unpacked(out: Tensor, lengths: list[int], qkv_format: str) -> list[Tensor]:
    if qkv_format == "thd":
        return list(out[: sum(lengths)].split(lengths))
    out = out.transpose(0, 1) if qkv_format == "sbhd" else out
    return [row[:length] for row, length in zip(out, lengths, strict=True)]


def compare(
    steps: Any, whole: Any, data: dict[int, list[Tensor]], qkv_format: str, extra: int = 0, **options: Any
) -> None:
    """`steps(*tensors, params)` in STEPS gives the rows of `whole(*tensors of one sequence)`."""
    cache = params(qkv_format=qkv_format, **options)
    seen: dict[int, int] = {}
    for step in STEPS:
        # one that comes back is a new sequence
        seen = {name: seen.get(name, 0) for name in step}
        spans = {name: slice(seen[name], seen[name] + new) for name, new in step.items()}
        count = len(data[2])
        tensors = [packed([data[n][i][spans[n]] for n in step], qkv_format, extra) for i in range(count)]
        cache.pre_step(OrderedDict(step))
        found = unpacked(steps(*tensors, cache), list(step.values()), qkv_format)
        for (name, new), out in zip(step.items(), found, strict=True):
            seen[name] += new
            right = whole(*(x[: seen[name]] for x in data[name]))[spans[name]]
            torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-9)


DPA: tuple[dict[str, Any], ...] = (
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding_causal_bottom_right", "window_size": (3, 0), "softmax_type": "learnable"},
    {"attn_mask_type": "padding_causal", "softmax_type": "off-by-one", "alibi": True},
)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("options", DPA, ids=["causal", "window-sink", "alibi-sink"])
def test_attention_over_a_cache(options: dict[str, Any], qkv_format: str, is_paged: bool) -> None:
    options = dict(options)
    bias = {"core_attention_bias_type": "alibi"} if options.pop("alibi", False) else {}
    module = te.DotProductAttention(H, (DIM, 5), K, qkv_format=qkv_format, layer_number=3, **options).eval()
    if module.softmax_offset is not None:
        nn.init.normal_(module.softmax_offset)
    shapes = ((LONGEST, H, DIM), (LONGEST, K, DIM), (LONGEST, K, 5))
    data = {name: [torch.randn(*shape, dtype=D) for shape in shapes] for name in (2, 4, 7, 9)}

    def steps(q: Tensor, k: Tensor, v: Tensor, cache: te.InferenceParams) -> Tensor:
        if 3 not in cache.cache_manager.cache:
            cache.allocate_memory(3)
        out = module(q, k, v, inference_params=cache, max_seqlen_kv=LONGEST, **bias)
        assert qkv_format == "thd" or out.isfinite().all()
        return out

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(
            q[None], k[None], v[None], qkv_format="bshd", attn_mask_type="causal_bottom_right", **bias
        )[0]  # fmt: skip

    # padding beyond the longest sequence, as of a fixed shape
    compare(steps, whole, data, qkv_format, extra=2, is_paged=is_paged, head_dim_v=5)


def test_every_key_is_seen_without_a_causal_mask() -> None:
    module = te.DotProductAttention(H, DIM, K, qkv_format="bshd", attn_mask_type="padding", layer_number=1).eval()
    q, k, v = (torch.randn(2, LONGEST, heads, DIM, dtype=D) for heads in (H, K, K))
    for is_paged in (False, True):
        cache = params(is_paged=is_paged)
        cache.allocate_memory(1)
        for new in ((4, 2), (1, 2), (3, 1)):
            cache.pre_step(OrderedDict(zip("ab", new, strict=True)))
            ends = list(cache.sequences.values())
            rows = [torch.arange(end - n, end) for end, n in zip(ends, new, strict=True)]
            parts = [packed([x[row][rows[row]] for row in range(2)], "bshd") for x in (q, k, v)]
            out = module(*parts, inference_params=cache)
            for row, (end, n) in enumerate(zip(ends, new, strict=True)):
                whole = (q[row : row + 1, rows[row]], k[row : row + 1, :end], v[row : row + 1, :end])
                right = module(*whole, attn_mask_type="no_mask")
                torch.testing.assert_close(out[row, :n], right[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_layers_with_rotary_positions(qkv_format: str, is_paged: bool) -> None:
    draw = random.Random(f"{qkv_format}{is_paged}")
    interleaved, before = draw.random() < 0.5, draw.random() < 0.5
    common: dict[str, Any] = {
        "num_gqa_groups": K, "params_dtype": D, "device": "cpu", "rotary_pos_interleaved": interleaved,
        "qk_norm_type": "RMSNorm", "qk_norm_before_rope": before, "normalization": "RMSNorm",
    }  # fmt: skip
    layers = nn.ModuleList(
        te.TransformerLayer(E, 16, H, layer_number=number, attn_input_format=qkv_format, **common) for number in (1, 2)
    ).eval()
    plain = nn.ModuleList(
        te.TransformerLayer(E, 16, H, layer_number=number, attn_input_format="bshd", **common) for number in (1, 2)
    ).eval()
    plain.load_state_dict(layers.state_dict())
    # exactly as many positions as a sequence may have: padding lies beyond them
    freqs = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(LONGEST)
    data = {name: [torch.randn(LONGEST, E, dtype=D)] for name in (2, 4, 7, 9)}

    def steps(x: Tensor, cache: te.InferenceParams) -> Tensor:
        x = x.nan_to_num(0.0)
        for layer in layers:
            x = layer(x, self_attn_mask_type="padding_causal", rotary_pos_emb=freqs, inference_params=cache)
        return x

    def whole(x: Tensor) -> Tensor:
        x = x[None]
        for layer in plain:
            x = layer(x, rotary_pos_emb=freqs)
        return x[0]

    compare(steps, whole, data, qkv_format, is_paged=is_paged)


def test_rotary_function_with_start_positions_of_packed_sequences() -> None:
    freqs = te.RotaryPositionEmbedding(DIM)(LONGEST)
    x, ends = torch.randn(5, H, DIM, dtype=D), torch.tensor([0, 3, 5])
    # one more start than sequences, as an InferenceParams has
    found = te.attention.rope.apply_rotary_pos_emb(
        x, freqs, "thd", start_positions=torch.tensor([4, 0, 9]), cu_seqlens=ends
    )
    for first, last, start in ((0, 3, 4), (3, 5, 0)):
        part = te.attention.rope.apply_rotary_pos_emb(x[None, first:last], freqs[start:], "bshd")
        torch.testing.assert_close(found[first:last], part[0], rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rotary_function_of_one_projection(layout: str, interleaved: bool) -> None:
    rope = te.attention.rope
    freqs = [te.RotaryPositionEmbedding(DIM, interleaved=interleaved, rotary_base=base)(LONGEST) for base in (1e4, 1e2)]
    qkv, sizes = torch.randn(3, 2, 2, 4 * DIM, dtype=D), [2 * DIM, DIM, DIM]
    start = torch.tensor([4, 1, 7])[: qkv.shape[layout.index("b")]]
    found = rope.apply_fused_qkv_rotary_pos_emb(qkv, *freqs, sizes, layout, start, interleaved)
    q, k, v = qkv.split(sizes, -1)
    options: dict[str, Any] = {"tensor_format": layout, "start_positions": start, "interleaved": interleaved}
    heads = [rope.apply_rotary_pos_emb(part, freqs[0], **options) for part in q.split(DIM, -1)]
    assert found[0].shape == (3, 2, 4, DIM) and torch.equal(found[0], torch.stack(heads, -2).flatten(2, 3))
    assert torch.equal(found[1], rope.apply_rotary_pos_emb(k, freqs[1], **options)) and torch.equal(found[2], v)
    with pytest.raises(
        ValueError, match="qkv_split_arg_list must be the sizes of queries, key and value in qkv's last"
    ):
        rope.apply_fused_qkv_rotary_pos_emb(qkv, *freqs, [DIM, DIM, DIM], layout)


def test_sequences_and_pages() -> None:
    cache = params(is_paged=True)
    manager = cache.cache_manager
    cache.pre_step(OrderedDict({7: 3, 2: 5, 9: 4}))
    assert manager.get_sequence_lengths() == [3, 5, 4] and manager.get_sequence_count() == 3
    assert [manager.get_page_list(name) for name in (7, 2, 9)] == [[0], [1, 2], [3]]
    assert cache.cu_seqlens_q.tolist() == cache.cu_seqlens_kv.tolist() == [0, 3, 8, 12, 12]
    cache.pre_step(OrderedDict({2: 1, 9: 1, 5: 2}))
    assert cache.get_seqlens_pre_step().tolist()[:3] == [5, 4, 0]
    assert cache.cu_seqlens_q.tolist() == [0, 1, 2, 4, 4] and cache.cu_seqlens_kv.tolist() == [0, 6, 11, 13, 13]
    # page 0 is free again, behind those that never were used
    assert manager.page_table.tolist() == [[1, 2, 0], [3, 4, 0], [5, 0, 0], [0, 0, 0]]
    assert [page.page_id for page in manager.free_pages] == [6, 7, 8, 9, 10, 11, 0]
    assert not any(page.allocated for page in manager.free_pages)
    manager.print_cache()
    manager.allocate_sequence(1, 5)
    assert manager.get_page_count(1) == 2
    cache.reset()
    assert len(manager.free_pages) == 12 and not manager.page_table.any() and not cache.sequences


def test_pages_as_one_tensor() -> None:
    dense, paged = params(), params(is_paged=True)
    for step in ({1: 6, 2: 2}, {2: 3, 1: 1}):
        k, v = torch.randn(2, max(step.values()), K, DIM, dtype=D), torch.randn(2, max(step.values()), K, DIM, dtype=D)
        for cache in (dense, paged):
            if not cache.cache_manager.cache:
                cache.allocate_memory(1)
            cache.pre_step(OrderedDict(step))
            keys, values, _, _, longest, formats = cache.step(1, k, v, "bshd")
            assert longest == LONGEST and formats == "bshd"
        assert keys.shape == values.shape == (12, 4, K, DIM)
    dense_pair = dense.step(1, k, v, "bshd")[:2]
    for one, other in zip(dense_pair, paged.convert_paged_to_nonpaged(1), strict=True):
        for row, length in enumerate(paged.sequences.values()):
            assert torch.equal(one[row, :length], other[row, :length])


class Recorder(inference.NonPagedKVCacheManager):
    """A manager of one's own, with the interface of KVCacheManager."""

    steps = 0

    def step(self, *args: Any) -> tuple[Tensor, Tensor]:
        type(self).steps += 1
        return super().step(*args)


class Disordered(inference.NonPagedKVCacheManager):
    def pre_step(self, step_dict: Any) -> Any:
        return OrderedDict(reversed(super().pre_step(step_dict).items()))


@pytest.mark.parametrize("is_paged", [False, True])
def test_padding_is_not_cached(is_paged: bool) -> None:
    cache = params(is_paged=is_paged, dtype=torch.float32, qkv_format="thd")
    cache.allocate_memory(1)
    k, v = torch.randn(2, 9, K, DIM)
    right: dict[int, list[Tensor]] = {1: [], 2: []}
    for step in ({1: 3, 2: 2}, {2: 4, 1: 1}):
        cache.pre_step(OrderedDict(step))
        # rows behind the step's tokens are padding
        keys, values = cache.step(1, k, v, "thd")[:2]
        for name, rows in zip(
            step, torch.stack((k, v), 1).split([*step.values(), 9 - sum(step.values())]), strict=False
        ):
            right[name] += rows
    if is_paged:
        keys, values = cache.convert_paged_to_nonpaged(1)
    for row, name in enumerate(cache.sequences):
        found = torch.stack((keys, values), 2)[row]
        assert torch.equal(found[: cache.sequences[name]], torch.stack(right[name]))
        # a page that a sequence has not got is read as page 0
        assert is_paged or not found[cache.sequences[name] :].any()


def test_a_manager_of_ones_own_and_no_gradient() -> None:
    module = te.DotProductAttention(H, DIM, K, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1)
    q, k, v = (torch.randn(1, 3, heads, DIM, dtype=D, requires_grad=True) for heads in (H, K, K))
    cache = params(custom_cache_manager=Recorder)
    cache.allocate_memory(1)
    for _ in range(2):
        cache.pre_step(OrderedDict({0: 3}))
        out = module(q, k, v, inference_params=cache)
        with pytest.raises(NotImplementedError, match="inference_params has no gradients"):
            out.sum().backward()
    assert Recorder.steps == 2 and q.grad is None
    with pytest.raises(
        ValueError, match=r"cache_manager.pre_step must return step_dict's sequences \[0, 1\], in order"
    ):
        params(custom_cache_manager=Disordered).pre_step(OrderedDict({0: 1, 1: 1}))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"dtype": None}, "dtype must be given"),
        ({"num_heads_kv": None}, "num_heads_kv must be given"),
        ({"qkv_format": "bhsd"}, "qkv_format must be one of 'bshd'"),
        ({"max_ctx_len": None, "qkv_format": "thd"}, "max_ctx_len must be given for qkv_format 'thd'"),
        ({"max_ctx_len": 13}, "max_ctx_len must be 1 to max_sequence_length 12, got 13"),
        ({"is_paged": True, "page_size": 5}, "page_size must divide max_sequence_length 12, got 5"),
        ({"is_paged": True, "total_num_pages": 11}, "total_num_pages must be 12"),
    ],
)
def test_what_cannot_be_made(made: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params(**made)


def test_steps_that_cannot_be() -> None:
    small = inference.PagedKVCacheManager(3, 4, K, DIM, D, max_batch_size=4, max_seqlen=LONGEST)
    small.pre_step(OrderedDict({1: 5}))
    with pytest.raises(ValueError, match="total_num_pages must be at least 5 for 2 sequences of 14 tokens, got 3"):
        small.pre_step(OrderedDict({1: 4, 2: 5}))
    assert small.get_sequence_lengths() == [5] and len(small.free_pages) == 1
    cache = params()
    for step, message in (
        ({}, "step_dict must have a sequence"),
        (dict.fromkeys(range(5), 1), "step_dict must have at most max_batch_size 4 sequences, got 5"),
        ({1: -1}, r"step_dict\[1\] must be at least 0, got -1"),
        ({1: 1, 2: 13}, r"step_dict\[2\] must leave at most max_sequence_length 12 tokens in the sequence, got 13"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.pre_step(OrderedDict(step))
    with pytest.raises(ValueError, match="is_paged must be True to convert"):
        cache.convert_paged_to_nonpaged(1)


def test_calls_that_cannot_be() -> None:
    options: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "padding_causal"}
    module = te.DotProductAttention(H, DIM, K, layer_number=1, **options)
    q, k, v = (torch.zeros(2, 3, heads, DIM, dtype=D) for heads in (H, K, K))
    cache = params()
    cache.allocate_memory(1)
    call: dict[str, Any] = {"inference_params": cache}
    with pytest.raises(ValueError, match="pre_step must be called before the model"):
        module(q, k, v, **call)
    cache.pre_step(OrderedDict({0: 3, 1: 1}))
    with pytest.raises(ValueError, match="attn_mask_type must have padding for inference_params, got 'causal'"):
        module(q, k, v, attn_mask_type="causal", **call)
    with pytest.raises(ValueError, match="layer_number must be given for inference_params"):
        te.DotProductAttention(H, DIM, K, **options)(q, k, v, **call)
    with pytest.raises(ValueError, match="inference_params must be None in training with dropout"):
        te.DotProductAttention(H, DIM, K, attention_dropout=0.1, layer_number=1, **options)(q, k, v, **call)
    with pytest.raises(NotImplementedError, match="core_attention_bias with inference_params"):
        bias = torch.zeros(1, 1, 3, 3, dtype=D)
        module(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias, **call)
    with pytest.raises(NotImplementedError, match="bottom_right_diagonal with inference_params = False"):
        module(q, k, v, attn_mask_type="padding", window_size=(1, 1), bottom_right_diagonal=False, **call)
    with pytest.raises(ValueError, match="new_k must be float64, InferenceParams' dtype, got float32"):
        module(q.float(), k.float(), v.float(), **call)
    with pytest.raises(ValueError, match=r"new_k must have 2 sequences of at least 3 tokens, 'bshd', as the step"):
        module(q[:, :2], k[:, :2], v[:, :2], **call)
    with pytest.raises(ValueError, match=r"new_k must have the step's 4 tokens, got \[3, 2, 6\]"):
        module(q[0], k[0], v[0], qkv_format="thd", **call)
    with pytest.raises(ValueError, match="layer_number must be given for inference_params"):
        te.MultiheadAttention(E, H, kv_channels=DIM, params_dtype=D, device="cpu")(
            torch.zeros(3, 2, E).double(), **call
        )
    cross = te.MultiheadAttention(E, H, layer_number=1, attention_type="cross", params_dtype=D, device="cpu")
    with pytest.raises(NotImplementedError, match="inference_params with attention_type = 'cross'"):
        cross(torch.zeros(3, 2, E).double(), encoder_output=torch.zeros(3, 2, E).double(), **call)
