"""`python -m benchmarks.train.layer`: one Llama-8B layer, forward and backward, beside plain PyTorch compiled.

Plain PyTorch attends by FlashAttention-3 where FLASH_3_LIBRARY names its library, else by scaled_dot_product_attention.

Hidden 4096, 32/8 heads of 128, ffn 14336, 2 x 8192 tokens, bfloat16 weights and activations. Ours as it is chosen, and
with parts of it taken away; times of interleaved calls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import flash_3_op
from benchmarks.train import twin
from powertrain.models import llama
from powertrain.nn.attention import Context
from powertrain.ops.attention import attention_backend
from powertrain.runtime.dispatch import disable
from powertrain.testing.bench import measure

BATCH, LENGTH = 2, 8192
CONFIG = llama.Config(
    vocab_size=256, hidden_size=4096, num_layers=1, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    max_position_embeddings=LENGTH,
)  # fmt: skip


def _tensor(scale: float = 1.0) -> Tensor:
    return (torch.randn(BATCH, LENGTH, CONFIG.hidden_size, device="cuda") * scale).bfloat16()


def run() -> list[str]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        ours = llama._block(CONFIG, 0).bfloat16()
        plain = twin.Twin(CONFIG, flash_3_op()).bfloat16()
    plain.layers[0].load_state_dict(ours.state_dict())
    x, dy = _tensor().requires_grad_(), _tensor(0.01)
    compiled = torch.compile(plain.layers[0])

    def both(layer: Callable[[], Any], weights: list[Tensor]) -> list[Tensor]:
        y = layer()
        y = y if isinstance(y, Tensor) else y[0] + y[1]
        return [y.detach(), *torch.autograd.grad(y, [x, *weights], dy)]

    own, others = list(ours.parameters()), list(plain.layers[0].parameters())

    def of_ours() -> list[Tensor]:
        return both(lambda: ours(x, None, Context()), own)

    def without(*names: str) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            with disable(*names):
                return of_ours()

        return call

    def attended_by(*names: str) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            with attention_backend(*names):
                return of_ours()

        return call

    opponent = "plain PyTorch, compiled" + (", FA3" if flash_3_op() else "")
    variants = {
        "ours": of_ours,
        "ours, attention by cuDNN": attended_by("cudnn"),
        "ours, activation apart": without("linear_activation"),
        opponent: lambda: both(lambda: compiled(x, plain.cos, plain.sin), others),
    }
    expected = variants[opponent]()
    names = ["y", "dx", *(name for name, _ in ours.named_parameters())]
    for name, found, exact in zip(names, of_ours(), expected, strict=True):
        error = (found.float() - exact.float()).norm() / exact.float().norm()
        assert error < 3e-2, f"{name}: relative error {error}"
    timings = measure(variants, seconds=2.0, rounds=30)
    best = timings["ours"].ms
    return [
        f"Llama-8B layer, 2 x 8192 tokens | {name:28} | {t.ms:7.3f} ms ±{t.spread:4.1%} | {t.ms / best:.3f}x ours | "
        f"{t.peak_mib:7.0f} MiB"
        for name, t in timings.items()
    ]


if __name__ == "__main__":
    print("\n".join(run()))
