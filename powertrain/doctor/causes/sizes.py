"""Shapes that do not fit, from the numbers in the message."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.shapes import PATTERN, reading


def _read(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    meaning = reading(excerpt.line, excerpt.above)
    if meaning is None:
        return None
    numbers = " / ".join(re.findall(r"\d+(?:, ?\d+)*", excerpt.line.partition("Error")[2])[:6])
    return {
        "shows": meaning[0],
        "advice": meaning[1],
        "where": meaning[2],
        "numbers": f" {numbers} " if numbers else "",
    }


CAUSES = (
    Cause(
        "sizes-differ",
        PATTERN,
        "sizes do not fit{where}: {shows}",
        "{advice}",
        "尺寸不符{where}：{numbers}；输入、配置与检查点的大小不一致",
        "打印该行涉及的形状，与配置中的 hidden size、heads、最大长度比较；必要时截断、补齐或扩展",
        "https://docs.pytorch.org/docs/stable/notes/broadcasting.html",
        confidence="likely",
        derive=_read,
        derives=("shows", "advice", "where", "numbers"),
    ),
)
