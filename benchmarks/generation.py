"""`python -m benchmarks.generation`: tokens of generated text, beside plain PyTorch compiled with CUDA graphs.

Random weights, bfloat16, greedy, prompts of one length. The other is `twin.Twin` over static caches, the decoding step
compiled by torch.compile(mode="reduce-overhead"), which replays CUDA graphs; it attends to the whole cache, masked.
Times are of the clock, from a finished prompt to the last token.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train import twin
from powertrain.models import build, configure, generate
from powertrain.models.generate import Sampler, stream

WARM, COUNTED = 24, 128


class Case(NamedTuple):
    preset: str
    batch: int
    prompt: int


CASES = tuple(
    Case(*case)
    for case in (("llama-1b", 1, 128), ("llama-1b", 32, 1024), ("llama-8b", 1, 128), ("llama-8b", 32, 1024),
                 ("pythia-410m", 1, 128), ("gpt-neox-2.7b", 8, 512))
)  # fmt: skip


class Cached(nn.Module):
    """tokens [B, S], position [S] -> logits [B, 1, V] of the last one, with keys and values of earlier tokens."""

    def __init__(self, plain: twin.Twin, batch: int, length: int) -> None:
        super().__init__()
        self.plain, self.length = plain, length
        attention = plain.layers[0].attention
        shape = batch, attention.num_kv_heads, length, attention.head_dim
        weight = plain.embed.weight
        self.caches = [tuple(torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in range(2))
                       for _ in plain.layers]  # fmt: skip

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x, plain = self.plain.embed(tokens), self.plain
        mask = torch.arange(self.length, device=x.device) <= position[:, None]
        cos, sin = plain.cos[position], plain.sin[position]
        for layer, caches in zip(plain.layers, self.caches, strict=True):
            attended = self._attend(layer.attention, layer.attention_norm(x), cos, sin, mask, position, caches)
            if layer.parallel:
                x = x + attended + layer.mlp(layer.mlp_norm(x))
                continue
            x = x + attended
            x = x + layer.mlp(layer.mlp_norm(x))
        return plain.head(plain.norm(x[:, -1:]))

    def _attend(
        self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, position: Tensor, caches: Any
    ) -> Tensor:
        groups = layer.qkv(x).unflatten(-1, (layer.num_kv_heads, layer.group + 2, layer.head_dim))
        q, k, v = (t.flatten(-3, -2).transpose(1, 2) for t in groups.split((layer.group, 1, 1), -2))
        q, k = (twin._rotated(t, cos, sin, layer.turned) for t in (q, k))
        keys, values = caches
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=layer.group > 1)
        return layer.out(out.transpose(1, 2).flatten(-2))


def _timed(step: Callable[[], Any], count: int) -> float:
    """Seconds of the clock for a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def _ours(model: Any, case: Case) -> float:
    prompts = [[1] * case.prompt] * case.batch
    tokens = stream(model, prompts, max_new_tokens=WARM + COUNTED, sampler=Sampler(temperature=0))
    for _ in range(WARM):
        next(tokens)
    return _timed(lambda: next(tokens), COUNTED)


def _twin(plain: twin.Twin, case: Case) -> float:
    cached = Cached(plain, case.batch, case.prompt + WARM + COUNTED).eval()
    step = torch.compile(cached, mode="reduce-overhead", fullgraph=True, dynamic=False)
    tokens = torch.ones(case.batch, case.prompt, dtype=torch.int64, device="cuda")
    position = torch.arange(case.prompt, device="cuda")
    token = cached(tokens, position).argmax(-1)
    position = position[-1:] + 1

    def one() -> None:
        nonlocal token
        torch.compiler.cudagraph_mark_step_begin()
        token = step(token, position).argmax(-1)
        position.add_(1)

    for _ in range(WARM):
        one()
    return _timed(one, COUNTED)


@torch.no_grad()
def run(cases: tuple[Case, ...] = CASES) -> Iterator[str]:
    for case in cases:
        config = configure(preset=case.preset)
        model = build(config, device="cuda").bfloat16().eval()
        model.init_weights(0)
        with torch.device("cuda"):
            plain = twin.Twin(config).bfloat16()
        plain.load_state_dict(model.state_dict())
        times = {"powertrain": _ours(model, case)}
        with mock.patch.object(generate, "capture", return_value=None):
            times["powertrain, without a CUDA graph"] = _ours(model, case)
        times["torch.compile, CUDA graphs"] = _twin(plain, case)
        for name, seconds in times.items():
            label = f"{case.preset}, batch {case.batch}, prompts of {case.prompt}"
            yield f"{label:40} {name:32} {seconds * 1e3:7.3f} ms a token, {case.batch / seconds:8.0f} tokens/s"
        del model, plain
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for line in run():
        print(line, flush=True)
