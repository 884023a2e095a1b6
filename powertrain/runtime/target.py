"""Target: the facts of one GPU that a kernel's plan needs, of a present device or of one given by name.

Sources: shared memory, registers and abilities per arch from the CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability"; SMs, L2 and bandwidth from NVIDIA's Turing, GA100, GA102, Ada, H100, Blackwell and RTX
Blackwell architecture whitepapers and the datasheets of the cards; H200's 60 MiB of L2 and B200's and GB200's SM counts
as their drivers report them. L2 of a cut-down laptop chip is that of its memory bus (a part of the L2 belongs to each
memory controller). Of a real device everything but the bandwidth is read from the driver.
"""

import difflib
import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class _Pretended:
    """Targets that replace the tensors' own in plans. Set by runtime/recording.py, for the process."""

    recorded: "Target | None" = None  # for meta tensors
    emulated: "Target | None" = None  # for CUDA tensors


pretended = _Pretended()


@dataclass(frozen=True)
class Target:
    """One GPU. `Target.parse("RTX 3090 Ti")` without it, `Target.of(tensor.device)` with it."""

    name: str
    arch: int  # 90 for sm_90
    num_sms: int
    shared_per_block: int  # bytes one block may have, opt-in limit
    shared_per_sm: int  # bytes
    registers_per_sm: int  # of 32 bits
    l2_bytes: int
    bandwidth: float  # bytes per second, datasheet

    @staticmethod
    def parse(name: str) -> "Target":
        """The target called `name`.

        name    an arch ("sm_86", "sm_90a", "8.6", "86"), which stands for its best-known card, or a card as people
                write it ("RTX 3090 Ti", "3090ti", "H100 PCIe") or as drivers report it ("NVIDIA A100-SXM4-40GB")
        Raises ValueError with the nearest known names.
        """
        text = str(name).strip()
        match = re.fullmatch(r"(?:sm|compute|cc)?[_ -]?(?:(\d{1,2})\.(\d)|(\d{2,3}))[af]?", text.lower())
        if not match:
            return _card(text)
        major, minor, digits = match.groups()
        arch = int(digits or major + minor)
        if arch not in _ARCHS:
            raise ValueError(f"target must be one of {_arch_names()} or the name of a card, got {name!r}")
        return replace(_card(_ARCHS[arch].example), name=f"sm_{arch}")

    @staticmethod
    def of(device: "torch.device") -> "Target":
        """The target that plans for tensors on `device` are made for: the recorded or emulated one where there is one
        (runtime/recording.py), else the GPU's own, cached; for the CPU and `meta` a tiny one for the interpreter."""
        if device.type == "cuda":
            return pretended.emulated or _of_cuda(_current_cuda() if device.index is None else device.index)
        if device.type == "meta":
            return pretended.recorded or INTERPRETER
        return INTERPRETER

    @property
    def capability(self) -> tuple[int, int]:
        """(9, 0) for sm_90."""
        return divmod(self.arch, 10)

    @property
    def has_tensor_cores(self) -> bool:
        return self.arch >= 70

    @property
    def has_tensor_core_dot(self) -> bool:
        """Triton's `tl.dot` reaches the tensor cores (those of sm_75 it does not)."""
        return self.arch >= 80

    @property
    def has_bf16(self) -> bool:
        """bfloat16 arithmetic; below, conversions to and from float32 only."""
        return self.arch >= 80

    @property
    def has_async_copy(self) -> bool:
        """cp.async: copies from global to shared memory without registers."""
        return self.arch >= 80

    @property
    def has_fp8(self) -> bool:
        """Matrix products of e4m3 and e5m2."""
        return self.arch >= 89

    @property
    def has_tma(self) -> bool:
        """The bulk tensor copy engine."""
        return self.arch >= 90

    @property
    def has_dependent_launch(self) -> bool:
        """Kernels start before the one before them has ended (ops/early_start.py)."""
        return self.arch >= 90

    @property
    def has_clusters(self) -> bool:
        """Blocks that share each other's shared memory."""
        return self.arch >= 90

    @property
    def has_wgmma(self) -> bool:
        """Warpgroup matrix products: Hopper alone."""
        return self.arch == 90

    @property
    def has_tcgen05(self) -> bool:
        """Matrix products through tensor memory: data-centre Blackwell."""
        return self.arch in (100, 103)

    @property
    def has_block_scaled_mma(self) -> bool:
        """Matrix products of MXFP8, MXFP4 and NVFP4 with their scales."""
        return self.arch >= 100

    @property
    def abilities(self) -> dict[str, bool]:
        """Every `has_...` by its name without the prefix."""
        names = (name for name in vars(type(self)) if name.startswith("has_"))
        return {name.removeprefix("has_"): getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Arch:
    shared_per_block: int
    shared_per_sm: int
    example: str  # the card a bare arch stands for


_ARCHS = {
    75: _Arch(64 << 10, 64 << 10, "T4"),
    80: _Arch(163 << 10, 164 << 10, "A100"),
    86: _Arch(99 << 10, 100 << 10, "RTX 3090"),
    87: _Arch(163 << 10, 164 << 10, "Jetson AGX Orin"),
    89: _Arch(99 << 10, 100 << 10, "RTX 4090"),
    90: _Arch(227 << 10, 228 << 10, "H100"),
    100: _Arch(227 << 10, 228 << 10, "B200"),
    103: _Arch(227 << 10, 228 << 10, "B300"),
    120: _Arch(99 << 10, 100 << 10, "RTX 5090"),
    121: _Arch(99 << 10, 100 << 10, "DGX Spark"),
}
_REGISTERS_PER_SM = 65536  # on every arch above

INTERPRETER = Target("interpreter", 90, 2, 227 << 10, 228 << 10, _REGISTERS_PER_SM, 50 << 20, 1e11)

# per arch: card, SMs, L2 in MiB, GB/s
_CARDS = {
    75: """
        T4                                40   4    320
        Quadro RTX 4000                   36   4    416
        Quadro RTX 5000                   48   4    448
        Quadro RTX 6000                   72   6    672
        Quadro RTX 8000                   72   6    672
        TITAN RTX                         72   6    672
        RTX 2060                          30   3    336
        RTX 2060 Max-Q                    30   3    264
        RTX 2060 12GB                     34   3    336
        RTX 2060 Super                    34   4    448
        RTX 2070                          36   4    448
        RTX 2070 Max-Q                    36   4    384
        RTX 2070 Super                    40   4    448
        RTX 2070 Super Max-Q              40   4    352
        RTX 2080                          46   4    448
        RTX 2080 Max-Q                    46   4    384
        RTX 2080 Super                    48   4    496
        RTX 2080 Super Max-Q              48   4    352
        RTX 2080 Ti                       68   5.5  616
        """,
    80: """
        A100                             108  40   1555
        A100 80GB                        108  40   2039
        A100 80GB PCIe                   108  40   1935
        A800                             108  40   1555
        A800 80GB                        108  40   2039
        A800 80GB PCIe                   108  40   1935
        A30                               56  24    933
        """,
    86: """
        A2                                10   2    200
        A10                               72   6    600
        A10G                              80   6    600
        A16                               10   2    200
        A40                               84   6    696
        RTX A400                           6   1     96
        RTX A1000                         18   2    192
        RTX A2000                         26   3    288
        RTX A4000                         48   4    448
        RTX A4500                         56   5    640
        RTX A5000                         64   6    768
        RTX A5500                         80   6    768
        RTX A6000                         84   6    768
        RTX A1000 Laptop                  16   2    176
        RTX A2000 Laptop                  20   2    192
        RTX A3000 Laptop                  32   3    264
        RTX A4000 Laptop                  40   4    384
        RTX A4500 Laptop                  46   4    512
        RTX A5000 Laptop                  48   4    448
        RTX A5500 Laptop                  58   4    512
        RTX 3050                          20   2    224
        RTX 3050 6GB                      18   1.5  168
        RTX 3050 Laptop                   16   2    192
        RTX 3050 Ti Laptop                20   2    192
        RTX 3060                          28   3    360
        RTX 3060 8GB                      28   2    240
        RTX 3060 Laptop                   30   3    336
        RTX 3060 Ti                       38   4    448
        RTX 3070                          46   4    448
        RTX 3070 Laptop                   40   4    448
        RTX 3070 Ti                       48   4    608
        RTX 3070 Ti Laptop                46   4    448
        RTX 3080                          68   5    760
        RTX 3080 12GB                     70   6    912
        RTX 3080 Laptop                   48   4    448
        RTX 3080 Ti                       80   6    912
        RTX 3080 Ti Laptop                58   4    512
        RTX 3090                          82   6    936
        RTX 3090 Ti                       84   6   1008
        """,
    87: """
        Jetson AGX Orin                   16   4    205
        Jetson Orin NX                     8   4    102
        Jetson Orin Nano                   8   4     68
        """,
    89: """
        L4                                58  48    300
        L20                               92  96    864
        L40                              142  96    864
        L40S                             142  96    864
        RTX 2000 Ada                      22  12    224
        RTX 4000 Ada                      48  40    360
        RTX 4000 SFF Ada                  48  40    280
        RTX 4500 Ada                      60  48    432
        RTX 5000 Ada                     100  64    576
        RTX 5880 Ada                     110  96    960
        RTX 6000 Ada                     142  96    960
        RTX 4050 Laptop                   20  12    192
        RTX 4060                          24  24    272
        RTX 4060 Laptop                   24  32    256
        RTX 4060 Ti                       34  32    288
        RTX 4070                          46  36    504
        RTX 4070 Laptop                   36  32    256
        RTX 4070 Super                    56  48    504
        RTX 4070 Ti                       60  48    504
        RTX 4070 Ti Super                 66  48    672
        RTX 4080                          76  64    717
        RTX 4080 Laptop                   58  48    432
        RTX 4080 Super                    80  64    736
        RTX 4090                         128  72   1008
        RTX 4090 D                       114  72   1008
        RTX 4090 Laptop                   76  64    576
        """,
    90: """
        H20                               78  60   4000
        H100                             132  50   3350
        H100 PCIe                        114  50   2000
        H100 NVL                         132  50   3900
        H800                             132  50   3350
        H800 PCIe                        114  50   2000
        H200                             132  60   4800
        H200 NVL                         132  60   4800
        GH200                            132  60   4000
        GH200 144GB                      132  60   4900
        """,
    100: """
        B200                             148 126   8000
        GB200                            152 126   8000
        """,
    103: """
        B300                             148 126   8000
        GB300                            152 126   8000
        """,
    120: """
        RTX PRO 4000 Blackwell            70  48    672
        RTX PRO 4500 Blackwell            82  64    896
        RTX PRO 5000 Blackwell           110  96   1344
        RTX PRO 6000 Blackwell           188 128   1792
        RTX PRO 6000 Blackwell Max-Q     188 128   1792
        RTX PRO 6000 Blackwell Server    188 128   1597
        RTX 5050                          20  24    320
        RTX 5050 Laptop                   20  24    384
        RTX 5060                          30  32    448
        RTX 5060 Laptop                   26  32    384
        RTX 5060 Ti                       36  32    448
        RTX 5070                          48  48    672
        RTX 5070 Laptop                   36  32    384
        RTX 5070 Ti                       70  48    896
        RTX 5070 Ti Laptop                46  48    672
        RTX 5080                          84  64    960
        RTX 5080 Laptop                   60  64    896
        RTX 5090                         170  96   1792
        RTX 5090 D                       170  96   1792
        RTX 5090 Laptop                   82  64    896
        """,
    121: """
        DGX Spark                         48  24    273
        GB10                              48  24    273
        """,
}


@functools.cache
def known_cards() -> tuple[Target, ...]:
    """Every card that `Target.parse` knows by name."""
    cards = []
    for arch, rows in _CARDS.items():
        limits = _ARCHS[arch]
        for row in rows.strip().splitlines():
            name, sms, l2, bandwidth = row.strip().rsplit(maxsplit=3)
            cards.append(
                Target(
                    name,
                    arch,
                    int(sms),
                    limits.shared_per_block,
                    limits.shared_per_sm,
                    _REGISTERS_PER_SM,
                    int(float(l2) * 2**20),
                    float(bandwidth) * 1e9,
                )
            )
    return tuple(cards)


# vendor and family words to ignore
_MAKERS = {"nvidia", "geforce", "rtx", "tesla", "gpu", "jetson", "agx", "blackwell"}
_NOISE = {"generation", "edition", "workstation", "with", "design", "tensor", "core", "superchip"}
_FORM = re.compile(r"\d+gb|hbm\d?e?|sxm\d?|pcie|nvl")


@functools.cache
def _words(name: str) -> frozenset[str]:
    text = name.lower().replace("max-q", "maxq").replace("mobile", "laptop")
    text = re.sub(r"\brtx(?=[a\d])", "rtx ", text)
    text = re.sub(r"\b(\d{4})(ti|super|d)", r"\1 \2 ", text)
    text = re.sub(r"\b(\d+) ?gb?\b", r"\1gb", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - _MAKERS - _NOISE


def _card(name: str) -> Target:
    """The card whose words are all in `name`, the most of them; the remaining words may only be its form or memory."""
    words = _words(name)
    fits = [card for card in known_cards() if _words(card.name) and _words(card.name) <= words]
    best = max(fits, key=lambda card: len(_words(card.name)), default=None)
    if best is not None:
        rest = words - _words(best.name)
        if best.arch == 75:
            # Turing's laptop chips are the desktop's
            rest -= {"laptop"}
        if all(_FORM.fullmatch(word) for word in rest):
            return best
    close = _close_names(name, words)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    raise ValueError(f"target must be a card's name or an arch ({_arch_names()}), got {name!r}.{hint}")


def _close_names(name: str, words: frozenset[str]) -> list[str]:
    """Cards with the same number in their name, else those spelled nearly so."""
    numbers = {word for word in words if word[-1].isdigit()}
    same = [card.name for card in known_cards() if numbers & _words(card.name)]
    return difflib.get_close_matches(
        name, same or [card.name for card in known_cards()], n=4, cutoff=0 if same else 0.6
    )


def _arch_names() -> str:
    return ", ".join(f"sm_{arch}" for arch in _ARCHS)


def _current_cuda() -> int:
    import torch

    return torch.cuda.current_device()


@functools.cache
def _of_cuda(index: int) -> Target:
    import torch

    p = torch.cuda.get_device_properties(index)
    arch = p.major * 10 + p.minor
    like = Target.parse(f"sm_{arch}" if arch in _ARCHS else "sm_90")
    return Target(
        p.name,
        arch,
        p.multi_processor_count,
        getattr(p, "shared_memory_per_block_optin", like.shared_per_block),
        getattr(p, "shared_memory_per_multiprocessor", like.shared_per_sm),
        getattr(p, "regs_per_multiprocessor", _REGISTERS_PER_SM),
        getattr(p, "L2_cache_size", like.l2_bytes),
        _bandwidth(p, like.bandwidth),
    )


def _bandwidth(p: "torch.cuda._CudaDeviceProperties", otherwise: float) -> float:
    """The datasheet's for a card we know, else from the memory's clock and width, else `otherwise`."""
    try:
        return Target.parse(p.name).bandwidth
    except ValueError:
        # kHz, bits
        clock, width = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
        return 2.0 * clock * 1e3 * width / 8 or otherwise
