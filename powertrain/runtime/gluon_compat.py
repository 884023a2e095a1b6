"""Gluon (Triton's lower-level language) as our kernels use it: one name where Triton 3.6 and 3.9 differ.

    name here       Triton 3.6, 3.7                    3.8                3.9
    tma_load        tma.async_copy_global_to_shared    both names         tma.async_load
    tma_store       tma.async_copy_shared_to_global    both names         tma.async_store
    tma_store_add   the builder's create_async_tma_reduce                 tma.async_atomic_add
    expect          keyword `bytes`                                       keyword `bytes_per_cta`; here by position
    reinterpret     smem._reinterpret                                     smem.reinterpret
    barrier         gl.thread_barrier                                     gl.barrier

Below them operations that Gluon lacks, as PTX: flags between GPUs and the fences that go with TMA. Scalars given to
inline assembly are the same in every thread, so each runs in all threads of the partition that calls it.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

__all__ = [
    "address_of",
    "async_copy",
    "await_next_tile",
    "await_phase",
    "barrier",
    "fence_proxy_async",
    "fetch_next_tile_async",
    "gl",
    "gluon",
    "hopper",
    "kept",
    "load_acquire",
    "mbarrier",
    "named_barrier_arrive",
    "named_barrier_sync",
    "named_barrier_sync_divergent",
    "no_tile_fetched",
    "prefetch",
    "reinterpret",
    "stores_landed",
    "tma",
    "tma_load",
    "tma_store",
    "tma_store_add",
    "trouble",
    "warpgroup_index",
]

tma_load: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)  # of a partition's threads
tma_store: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)


@_core.builtin
def _tma_reduce_add(tensor_desc, coord, src, _semantic=None):  # type: ignore[no-untyped-def]
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@_core.builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
    """The bytes of `smem` as another shape and layout of as many."""
    method = getattr(smem, "reinterpret", None) or smem._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


tma_store_add: Any = getattr(tma, "async_atomic_add", None) or _tma_reduce_add


def trouble() -> str | None:
    """Features that our Gluon kernels use and this Triton lacks, or None."""
    wanted = {
        "tma.make_tensor_descriptor": tma,
        "warpgroup_mma": hopper,
        "warpgroup_mma_wait": hopper,
        "fence_async_shared": hopper,
        "mbarrier.expect": mbarrier,
        "warp_specialize": gl,
        "inline_asm_elementwise": gl,
        "NVMMADistributedLayout": gl,
        "NVMMASharedLayout": gl,
    }
    missing = [name for name, module in wanted.items() if not hasattr(module, name.rpartition(".")[2])]
    missing += [name for name in ("barrier", "tma_load", "tma_store") if globals()[name] is None]
    return f"this Triton's Gluon has no {', '.join(missing)}" if missing else None


def why_not_hopper(target: Target) -> str | None:
    """Why no Gluon kernel for sm_90 runs on a target, or None."""
    if target.arch != 90:
        return "it runs on sm_90 only"
    if settings().interpret:
        return "Gluon has no interpreter"
    return trouble()


@gluon.jit
def kept(value):  # type: ignore[no-untyped-def]
    """`value`, hidden from the optimizer: Triton 3.6 drops a loop-carried value that is used only as the bound of an
    inner loop, and the inner loop then starts anew each time."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_acquire(ptr):  # type: ignore[no-untyped-def]
    """The int32 at `ptr`, which any GPU or copy engine may write; writes made before it are visible afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _threads():  # type: ignore[no-untyped-def]
    """The number of the calling thread in its partition: of several warps a vector, of one warp a scalar, which stands
    for a value of each lane."""
    if gl.num_warps() > 1:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.arange(0, 32 * gl.num_warps(), layout)
    else:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %laneid;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def no_tile_fetched():  # type: ignore[no-untyped-def]
    """0 in place of `fetch_next_tile_async`."""
    return _threads() * 0


@gluon.jit
def fetch_next_tile_async(ptr):  # type: ignore[no-untyped-def]
    """Issue an atomic add of 1 to the int32 at `ptr`, once per partition, without waiting for the old value, which
    `await_next_tile` returns."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        setp.eq.u32 first, $2, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.add.s32 $0, [$1], 1;
        }""",
        "=r,l,r",
        [ptr, _threads()],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_next_tile(tile_idx):  # type: ignore[no-untyped-def]
    """The old value that the calling partition's `fetch_next_tile_async` gets, in all its threads."""
    if gl.num_warps() > 1:
        return gl.sum(tile_idx, 0)
    else:
        return gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [tile_idx], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def prefetch(ptr):  # type: ignore[no-untyped-def]
    """Ask for the line at `ptr`, for a later load to find it in the L1; one that may not be read is ignored."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1
    )


# Triton sets a barrier of the whole partition between two waits for the same mbarriers. Two warpgroups of one partition
# that are not to wait for one another wait by these two instead.


@gluon.jit
def address_of(bars):  # type: ignore[no-untyped-def]
    """Where mbarriers [COUNT, 1] lie, as an address of shared memory, before they are initialized. Gluon does not give
    it: a mark is stored in the first one, and each warp searches shared memory for it, from the end, where Triton puts
    small buffers.

    The mark is removed by an ordinary store. `mbarrier.init` does not remove it for ordinary loads: another call, or
    the next kernel on the SM, would find it."""
    MARK: gl.constexpr = 0x5A17C0DE3B9F2E00
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    words = reinterpret(bars, gl.int64, [bars.shape[0], 1], plain)
    words.slice(0, 1).store(gl.full([1, 1], MARK, gl.int64, layout))
    barrier()
    address = gl.inline_asm_elementwise(
        # each warp by itself, 32 words at a time
        """{
        .reg .pred none;
        .reg .b32 at, lane, found;
        .reg .b64 word;
        mov.u32 at, global_smem;
        mov.u32 found, %dynamic_smem_size;
        add.u32 at, at, found;
        and.b32 at, at, -8;
        mov.u32 lane, %laneid;
        shl.b32 lane, lane, 3;
        sub.u32 at, at, lane;
        add.u32 at, at, 248;
        SEARCH:
        sub.u32 at, at, 256;
        ld.shared.b64 word, [at];
        setp.eq.b64 none, word, $1;
        vote.sync.ballot.b32 found, none, 0xffffffff;
        setp.eq.u32 none, found, 0;
        @none bra.uni SEARCH;
        bfind.u32 found, found;
        shfl.sync.idx.b32 $0, at, found, 31, 0xffffffff;
        }""",
        "=r,l",
        [gl.to_tensor(MARK)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
    words.slice(0, 1).store(gl.full([1, 1], 0, gl.int64, layout))
    barrier()
    return address


@gluon.jit
def await_phase(address, parity):  # type: ignore[no-untyped-def]
    """`mbarrier.wait`, by each warp for itself, for the mbarrier at an address of shared memory."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        WAIT:
        mbarrier.try_wait.parity.shared.b64 done, [$1], $2;
        @!done bra.uni WAIT;
        mov.b32 $0, 0;
        }""",
        "=r,r,r",
        [address, parity],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warpgroup_index():  # type: ignore[no-untyped-def]
    """Of the calling warp, in a CTA: a number that differs between the warpgroups of a partition."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 7;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1
    )


# barriers of the hardware by number; Triton takes 0, 1 and one for each partition from 2 on


@gluon.jit  # type: ignore[untyped-decorator]
def _named_barrier(instruction: gl.constexpr, number, threads: gl.constexpr):  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise(
        f"{instruction} $1, {threads}; mov.b32 $0, $1;",
        "=r,r",
        [gl.to_tensor(number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def named_barrier_sync(number, threads: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until `threads` threads, the callers included, have arrived at barrier `number`; the others call
    `named_barrier_arrive`."""
    _named_barrier("bar.sync", number, threads)


@gluon.jit  # type: ignore[untyped-decorator]
def named_barrier_sync_divergent(number, threads: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same where other warps wait at another place of the code: `bar.sync` requires one place for all waiters."""
    _named_barrier("barrier.sync", number, threads)


@gluon.jit  # type: ignore[untyped-decorator]
def named_barrier_arrive(number, threads: gl.constexpr):  # type: ignore[no-untyped-def]
    """Arrive at barrier `number` of `threads` threads without waiting."""
    _named_barrier("bar.arrive", number, threads)


@gluon.jit
def fence_proxy_async(value):  # type: ignore[no-untyped-def]
    """Writes that this thread has acquired become visible to TMA (the async proxy). Returns `value`."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stores_landed(value):  # type: ignore[no-untyped-def]
    """Wait until this thread's TMA stores are written, not only read from shared memory; then include them in its
    releases, to other GPUs too. Returns `value`."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; fence.acq_rel.sys; mov.b32 $0, $1;",
        "=r,r",
        [value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
