"""The learning rate of a step."""

import math

from powertrain.train.config.schema import ScheduleConfig


def learning_rate(step: int, lr: float, schedule: ScheduleConfig, steps: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of `steps`, in a run whose highest rate is `lr`.

    Warm-up is linear, GPT-NeoX's and Megatron's: step n of w has lr * n / w, so the first step has 0. Decay
    starts at the end of warm-up and reaches min_lr at `decay_steps`. After that the rate stays at min_lr, but with
    clamp "neox" GPT-NeoX's own formulas hold and go on: a cosine rises again.
    """
    warmup = schedule.warmup_steps
    if warmup > 0 and step <= warmup:
        return lr * step / warmup
    end = schedule.decay_steps or steps
    done = (step - warmup) / max(1.0, end - warmup)
    if schedule.clamp == "safe":
        done = min(done, 1.0)
    if schedule.clamp == "neox" and schedule.kind in ("linear", "exponential"):
        return max(schedule.min_lr, _gpt_neox(step - warmup, lr, schedule.kind, end))
    return max(schedule.min_lr, _decayed(done, step, lr, schedule, end))


def _gpt_neox(after_warmup: float, lr: float, kind: str, end: int) -> float:
    """GPT-NeoX's linear and exponential decay, towards 0 and one half; min_lr is a floor, not the final value."""
    if kind == "linear":
        return lr * (end - after_warmup) / end
    return lr * math.exp(-0.693 * after_warmup / end)


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
