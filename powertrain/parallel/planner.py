"""Which way a product takes: overlapped with what travels, or after it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from powertrain.parallel.transport import Transport


class Product(NamedTuple):
    """gather: [rows, depth] travels, then is multiplied; scatter: [rows, width] is the product, and travels."""

    kind: Literal["gather", "scatter"]
    rows: int
    width: int
    depth: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Choice:
    sequential: bool
    why: str


class Planner:
    def __init__(self, transport: "Transport") -> None:
        self.transport = transport
        self.choices: dict[Product, Choice] = {}

    def choose(self, product: Product) -> Choice:
        found = self.choices.get(product)
        if found is None:
            found = self.choices[product] = Choice(self.transport.name == "sequential", "asked for")
        return found

    def explain(self) -> str:
        return "\n".join(f"{product}: {choice}" for product, choice in self.choices.items())
