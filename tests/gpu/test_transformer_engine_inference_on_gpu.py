"""InferenceParams on a GPU: bfloat16 beside whole sequences, and a captured step replayed for other lengths."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from powertrain.compat.transformer_engine import pytorch as te

pytestmark = pytest.mark.gpu
H, K, DIM, LONGEST = 8, 2, 64, 96
STEPS = ({7: 33, 2: 50, 9: 1}, {7: 1, 2: 1, 9: 1}, {2: 1, 9: 17}, {4: 20, 9: 1, 2: 1}, {9: 1, 4: 1})


def made(qkv_format: str, is_paged: bool, longest: int) -> te.InferenceParams:
    pages: dict[str, Any] = {"page_size": 16, "total_num_pages": 4 * LONGEST // 16} if is_paged else {}
    cache = te.InferenceParams(
        4, LONGEST, K, DIM, torch.bfloat16, is_paged=is_paged, max_ctx_len=longest, qkv_format=qkv_format, **pages
    )  # fmt: skip
    cache.allocate_memory(1)
    return cache


def module(qkv_format: str) -> te.DotProductAttention:
    return te.DotProductAttention(
        H, DIM, K, qkv_format=qkv_format, attn_mask_type="padding_causal", layer_number=1
    ).eval()  # fmt: skip


def expected(data: dict[int, list[torch.Tensor]], seen: dict[int, int], name: int, new: int) -> torch.Tensor:
    q, k, v = (x[None, : seen[name]].double().cpu() for x in data[name])
    whole = te.DotProductAttention(H, DIM, K, qkv_format="bshd", attn_mask_type="causal").eval()
    return whole(q, k, v)[0, seen[name] - new :]


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
@torch.no_grad()
def test_steps_equal_whole_sequences(qkv_format: str, is_paged: bool) -> None:
    cache, attend = made(qkv_format, is_paged, 50), module(qkv_format)
    shapes = ((LONGEST, H, DIM), (LONGEST, K, DIM), (LONGEST, K, DIM))
    data = {n: [torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in shapes] for n in (2, 4, 7, 9)}
    seen: dict[int, int] = {}
    for step in STEPS:
        seen = {name: seen.get(name, 0) + new for name, new in step.items()}
        parts = [[x[seen[n] - new : seen[n]] for x in data[n]] for n, new in step.items()]
        tensors = [list(one) for one in zip(*parts, strict=True)]
        if qkv_format == "thd":
            inputs = [torch.cat(x) for x in tensors]
        else:
            inputs = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=torch.nan) for x in tensors]
        cache.pre_step(OrderedDict(step))
        out = attend(*inputs, inference_params=cache)
        rows = out.split(list(step.values())) if qkv_format == "thd" else out
        for row, (name, new) in zip(rows, step.items(), strict=True):
            right = expected(data, seen, name, new)
            # bfloat16: probabilities and result are rounded, each by 2^-9
            torch.testing.assert_close(row[:new].double().cpu(), right, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_a_captured_step_holds_for_other_lengths() -> None:
    cache, attend = made("bshd", True, 1), module("bshd")
    q, k, v = (torch.zeros(4, 1, heads, DIM, device="cuda", dtype=torch.bfloat16) for heads in (H, K, K))
    prompts = {
        n: [torch.randn(8 + n, heads, DIM, device="cuda", dtype=torch.bfloat16) for heads in (H, K, K)] for n in (1, 2)
    }
    cache.pre_step(OrderedDict({1: 1, 2: 1, 3: 1, 4: 1}))
    attend(q, k, v, inference_params=cache)
    cache.pre_step(OrderedDict({1: 1, 2: 1, 3: 1, 4: 1}))
    # the second step reads the cache: what the graph shall do
    attend(q, k, v, inference_params=cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, inference_params=cache)
    cache.reset()
    for at in range(8):
        step = OrderedDict(dict.fromkeys((1, 2), 1))
        cache.pre_step(step)
        for row, name in enumerate(step):
            for static, x in zip((q, k, v), prompts[name], strict=True):
                static[row, 0] = x[at]
        graph.replay()
        for row, name in enumerate(step):
            right = expected(prompts, {name: at + 1}, name, 1)
            torch.testing.assert_close(out[row].double().cpu(), right, rtol=1e-2, atol=1e-2)
