"""A step whose metrics the device is still computing."""

import torch
from torch import Tensor

from powertrain.train.data.loader import Batch
from powertrain.train.reporting.timers import Moment, Spans


class PendingStep:
    """The numbers of a step that may still be computing."""

    def __init__(self, step: int, tokens: int, lr: float, host: Tensor, batches: list[Batch], spans: Spans) -> None:
        self.step, self.tokens, self.lr, self.host, self.batches = step, tokens, lr, host, batches
        self.spans = spans
        self.ended = Moment(batches[0].tokens.device)

    def numbers(self) -> list[float]:
        self.ended.wait()
        return self.host.tolist()


def to_host(numbers: Tensor) -> Tensor:
    if not numbers.is_cuda:
        return numbers
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
