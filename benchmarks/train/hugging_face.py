"""`python -m benchmarks.train.hugging_face`: models of Hugging Face transformers, as they are, with Liger, and patched.

Forward, loss and backward of a few layers of a real model's shape, bf16, random tokens, gradients kept (no optimizer):
tokens/s and peak memory. Opponents: the model as it is, Liger's `apply_liger_kernel_to_*` with its fused linear cross
entropy, and both with FlashAttention-3 (xFormers' build) as their attention where it is installed. Each eager and with
torch.compile (dynamic=False). Variants of one model run in one process, one after the other, three times round.
"""

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import powertrain
from benchmarks.peers import Flash3

# name -> (config class, shape, Liger's function, layers)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-3-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "llama",
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 151936, "head_dim": 128,
        },
        "qwen3",
    ),
    "gemma-3-4b": (
        "Gemma3TextConfig",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 262208, "head_dim": 256, "sliding_window": 1024,
        },
        "gemma3_text",
    ),
}  # fmt: skip


def build(name: str, layers: int) -> nn.Module:
    import transformers

    config_class, shape, _ = MODELS[name]
    config = getattr(transformers, config_class)(**shape, num_hidden_layers=layers, max_position_embeddings=32768)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def with_liger(model: nn.Module, name: str) -> None:
    from liger_kernel import transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{MODELS[name][2]}")
    apply(model=model, fused_linear_cross_entropy=True, cross_entropy=False)


def with_flash_3(model: Any) -> None:
    """FlashAttention-3 as an attention implementation of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("benchmark_fa3", flash_3)
    AttentionMaskInterface.register("benchmark_fa3", flash_attention_mask)
    model.set_attn_implementation("benchmark_fa3")


@torch.compiler.disable
def flash_3(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float,
    sliding_window: int | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return Flash3.apply(q, k, v, scaling, True, sliding_window - 1 if sliding_window else -1), None


def step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def seconds(run: Callable[[], None], repeats: int) -> float:
    """Of one call, by the clock around `repeats` calls and a synchronisation: host time counts where it is longer."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def variants(name: str, layers: int, flash: bool) -> dict[str, Callable[[], nn.Module]]:
    def make(*changes: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            model = build(name, layers)
            for change in changes:
                change(model)
            return model

        return made

    # Liger exchanges functions of transformers for the whole process: what is as it is comes first
    found = {"transformers": make(), "powertrain.patch": make(powertrain.patch)}
    if flash:
        found["transformers, FlashAttention-3"] = make(with_flash_3)
        found["Liger, FlashAttention-3"] = make(lambda m: with_liger(m, name), with_flash_3)
    return found | {"Liger": make(lambda m: with_liger(m, name))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 512, 128])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--flash-3", metavar="LIBRARY", help="shared library with FlashAttention-3's operators")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.flash_3:
        torch.ops.load_library(options.flash_3)
    rows = []
    for name, compiled in itertools.product(options.models, [mode == "compiled" for mode in options.modes]):
        for variant, make in variants(name, options.layers, bool(options.flash_3)).items():
            rows += measure(name, variant, make, compiled, options.tokens)
            gc.collect()
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def measure(
    name: str, variant: str, make: Callable[[], nn.Module], compiled: bool, sizes: list[int]
) -> list[dict[str, Any]]:
    rows = []
    try:
        model: Any = make()
        if compiled:
            torch._dynamo.reset()
            model = torch.compile(model, dynamic=False)
        for size in sizes:
            # of the whole vocabulary: Inductor adds gradients of one token's embedding one after the other
            tokens = torch.randint(model.config.vocab_size, (1, size), device="cuda")
            run = step(model, tokens)
            for _ in range(3):
                run()
            torch.cuda.reset_peak_memory_stats()
            times = [seconds(run, 3 if size > 1024 else 10) for _ in range(3)]
            row = {
                "model": name, "variant": variant, "compiled": compiled, "tokens": size,
                "tokens/s": round(size / statistics.median(times)),
                "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    except Exception as error:
        print(name, variant, "compiled" if compiled else "eager", "failed:", repr(error)[:300], flush=True)
    return rows


if __name__ == "__main__":
    main()
