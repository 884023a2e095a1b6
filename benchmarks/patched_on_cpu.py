"""`python -m benchmarks.patched_on_cpu [SEED] [COUNT]`: random small models on a CPU, patched beside unpatched.

Each line is a model and a task: microseconds a call (a token, in generation) of the thread's CPU time, unpatched and
patched by turns, medians, and their ratio. One thread, no GPU.
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import powertrain

_WORDS, _NEW = 512, 12
_CLASSES = ("Llama", "Qwen2", "Gemma", "Phi", "GPTNeoX", "GPT2", "Bert", "ViT")


def _model(name: str, hidden: int, layers: int, heads: int, kv_heads: int) -> Any:
    import transformers

    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=_WORDS)
        return transformers.GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    sizes["num_attention_heads"] = heads
    if name in ("Llama", "Qwen2", "Gemma", "Phi"):
        sizes["num_key_value_heads"] = kv_heads
    sizes |= {"image_size": 64} if name == "ViT" else {"vocab_size": _WORDS}
    sizes |= {"head_dim": hidden // heads} if name == "Gemma" else {}
    head = {"ViT": "ForImageClassification", "Bert": "ForMaskedLM"}.get(name, "ForCausalLM")
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes))


def _task(model: Any, name: str, task: str, batch: int, length: int, padded: bool) -> Callable[[], Any]:
    if name == "ViT":
        inputs: dict[str, Any] = {"pixel_values": torch.randn(batch, 3, 64, 64, dtype=model.dtype)}
        labels = torch.zeros(batch, dtype=torch.int64)
    else:
        labels = torch.randint(_WORDS, (batch, length))
        inputs = {"input_ids": labels}
        if padded:
            inputs["attention_mask"] = (torch.arange(length) >= length // 3).expand(batch, -1).long()
    model.train(task == "train")
    if task == "generate":
        options = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(**inputs, **options)
    if task == "forward":
        return torch.no_grad()(lambda: model(**inputs))

    def step() -> None:
        model(**inputs, labels=labels).loss.backward()
        model.zero_grad()

    return step


def _times(runs: list[Callable[[], Any]], seconds: float = 1.0) -> list[float]:
    taken: list[list[float]] = [[] for _ in runs]
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    for turn in range(10000):
        for index in (0, 1) if turn % 2 else (1, 0):
            start = time.thread_time()
            runs[index]()
            taken[index].append(time.thread_time() - start)
        # the first three warm up
        if turn > 9 and time.perf_counter() > end:
            break
    gc.enable()
    return [statistics.median(times[3:]) * 1e6 for times in taken]


def main(seed: int, count: int) -> None:
    torch.set_num_threads(1)
    draw, ratios = random.Random(seed), []
    for _ in range(count):
        name, hidden, heads = draw.choice(_CLASSES), draw.choice([64, 128, 256, 512]), draw.choice([2, 4])
        task = draw.choice(["forward", "train"] if name in ("Bert", "ViT") else ["forward", "train", "generate"])
        sizes = hidden, draw.randint(2, 4), heads, draw.choice([heads, heads // 2])
        batch, length, padded = draw.choice([1, 1, 2, 4]), draw.choice([1, 7, 16, 33, 64, 128]), draw.random() < 0.3
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        runs = []
        for is_patched in (False, True):
            torch.manual_seed(0)
            model = _model(name, *sizes).to(dtype)
            if is_patched:
                powertrain.patch(model)
            runs.append(_task(model, name, task, batch, length, padded and length > 1))
        own, ours = (t / (_NEW if task == "generate" else 1) for t in _times(runs))
        ratios.append(ours / own)
        what = f"{name:8}{task:9}{sizes} batch {batch} length {length} {dtype}{' padded' if padded else ''}"
        print(f"{what:85}{own:9.0f}{ours:9.0f}{ratios[-1]:8.3f}", flush=True)
    ratios.sort()
    middle, high = statistics.median(ratios), ratios[int(0.9 * count)]
    print(f"median {middle:.3f}, nine in ten below {high:.3f}, most {ratios[-1]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3] if len(sys.argv) > 2 else (1, 40)))
