"""The learning rate of a step."""

import math

from powertrain.train.config.schema import ScheduleConfig


def learning_rate(step: int, lr: float, schedule: ScheduleConfig, steps: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of `steps`, in a run whose highest rate is `lr`.

    clamp "safe": warm-up is linear from 0 (step n of w has lr * n / w), decay starts at its end and reaches min_lr at
    `decay_steps`, where the rate stays. The other values are GPT-NeoX's formulas of a time, `_gpt_neox`.
    """
    end = schedule.decay_steps or steps
    if schedule.clamp != "safe" and schedule.kind != "wsd":
        return _gpt_neox(step, lr, schedule, end)
    warmup = schedule.warmup_steps
    if warmup > 0 and step <= warmup:
        return lr * step / warmup
    done = min((step - warmup) / max(1.0, end - warmup), 1.0)
    return max(schedule.min_lr, _decayed(done, step, lr, schedule, end))


def unreached(lr: float, schedule: ScheduleConfig, steps: int) -> str:
    """A line for a run whose warm-up is not over when it ends; "" for any other."""
    # step n of the first n + 1 has the rate lr * n / warmup
    if schedule.warmup_steps < steps:
        return ""
    return (
        f"schedule.warmup_steps ({schedule.warmup_steps:g}) is not below train.steps ({steps}): the learning rate "
        f"stays below optimizer.lr ({lr:g})"
    )


def _decayed(done: float, step: int, lr: float, schedule: ScheduleConfig, end: int) -> float:
    if schedule.kind == "cosine":
        return schedule.min_lr + (lr - schedule.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule.kind == "linear":
        return schedule.min_lr + (lr - schedule.min_lr) * (1.0 - done)
    if schedule.kind == "exponential":
        return lr * math.exp(-done)
    if schedule.kind == "wsd":
        left = (end - step) / max(1, schedule.wsd_decay_steps)
        return schedule.min_lr + (lr - schedule.min_lr) * min(1.0, max(0.0, left))
    return lr


def _gpt_neox(step: int, lr: float, schedule: ScheduleConfig, end: int) -> float:
    """megatron/learning_rates.py of GPT-NeoX; min_lr is a floor under the decay, not under warm-up.

    neox        since 2026-05 (19f294d5): decay over end - warmup; the first step has the rate of the second
    neox-2023   2023-09 (e431ff54) to then: the first step has rate 0
    neox-2022   before 2023-08 (009018e9), Pythia and GPT-NeoX-20B: decay over end, stopped at end - warmup, the cosine
                towards 0
    A cosine of the newer two rises again past `end`.
    """
    warmup, old = schedule.warmup_steps, schedule.clamp == "neox-2022"
    count = min(step, end - warmup) if old else step
    if warmup > 0 and step <= warmup:
        return lr * (max(1, count) if schedule.clamp == "neox" else count) / warmup
    after, span = count - warmup, float(end) if old else end - warmup
    # warm-up takes all of it; theirs divides by 0
    if span <= 0:
        return max(lr, schedule.min_lr)
    rate = lr
    if schedule.kind == "linear":
        rate = lr * (span - after) / span
    elif schedule.kind == "exponential":
        rate = lr * math.exp(-0.693 * after / span)
    elif schedule.kind == "cosine":
        least = 0.0 if old else schedule.min_lr
        rate = least + (lr - least) * 0.5 * (math.cos(math.pi * after / span) + 1.0)
    return max(rate, schedule.min_lr)
