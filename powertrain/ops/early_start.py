"""Programmatic dependent launch (sm_90 and later): a kernel starts before the preceding one on the stream has ended.

A kernel with the constant STARTS_EARLY is launched as soon as every program of the kernel before has called
`let_next_kernel_start` or ended; its own threads call `await_kernel_before` ahead of their first access to memory, and
wait there until all of that kernel is done and visible. As each kernel of a row waits, so are all those before it. What
it costs to launch a kernel and to read its code is then hidden by the one before: 1.4 to 3 us of a decoding call of
three kernels on one H200 (benchmarks/results/2026-11-24_h200_decode.md), 0.3 us of each small kernel in a graph
(2026-11-28_h200_few_rows.md there). Graphs hold early starts where the driver is of CUDA 12.3 or later.

A kernel whose programs fill the SMs and end at different times does not call `let_next_kernel_start`: the next kernel's
programs, of which many fit on one SM, would all wait on the SMs that are free first and then compute there, while other
SMs have nothing to do. Without the call the next kernel is prepared early and launched when the last program has ended.
us, one H200, forward and backward of attention, with the call in every kernel and without it in those: one packed
sequence of 137 tokens, 32/8 heads of 128: 54, 33; B1 S137 64/64 40, 29 (2026-11-29_h200_early_starts.md there).

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

_INTERPRETED = settings().interpret
# the most programs and elements of a small kernel, for each SM
_MOST_PROGRAMS, _MOST_ELEMENTS = 4, 8192


def starts_early(target: Target) -> bool:
    """The value of STARTS_EARLY."""
    return target.has_dependent_launch and not _INTERPRETED


def starts_early_if_small(target: Target, programs: int, elements: int) -> bool:
    """The value of STARTS_EARLY for a kernel that is small if it has few programs and elements.

    A launch that starts early distributes 0.8 programs a ns on one H200, other launches several times as many: norms of
    65536 rows took 20 % longer. Programs that wait for an SM go to the first that is free, so that some SMs get more
    than others: 256 rows of 16384 took 8.3 us instead of 6.5."""
    sms = target.num_sms
    return starts_early(target) and programs <= _MOST_PROGRAMS * sms and elements <= _MOST_ELEMENTS * sms


@triton.jit
def let_next_kernel_start(STARTS_EARLY: tl.constexpr):
    """The kernel behind this one may start, when all programs have come here. At the beginning: it starts when the last
    of our programs has, and then only where they leave registers and shared memory."""
    if STARTS_EARLY:
        gdc_launch_dependents()


@triton.jit
def await_kernel_before(STARTS_EARLY: tl.constexpr):
    """In a kernel that is launched with STARTS_EARLY: nothing before it may touch memory, in any warp. In kernels whose
    warps have different jobs every job begins with it, so that what comes before the jobs is hidden."""
    if STARTS_EARLY:
        gdc_wait()


@triton.jit
def wait_for_kernel_before(STARTS_EARLY: tl.constexpr):
    """Both, as the first statement of a kernel."""
    let_next_kernel_start(STARTS_EARLY)
    await_kernel_before(STARTS_EARLY)


@triton.jit
def wait_then_let_next_start(STARTS_EARLY: tl.constexpr):
    """Both, as the first statement of a small kernel: only one kernel waits at a time.

    If each let the next start at once, programs of up to eight kernels would wait on some SMs and not on others: 64
    rows of 16384 took 4.3 us on one H200, in this order 3.3, without early starts 3.6."""
    await_kernel_before(STARTS_EARLY)
    let_next_kernel_start(STARTS_EARLY)
