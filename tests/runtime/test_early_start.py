"""Kernels that start before the one before has ended: how they are launched, and that they wait before they read."""

import ctypes
import re
import struct
import zlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.activations import activation, gated_activation
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.early_start import starts_early
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import rope_table
from powertrain.runtime import driver, replay
from powertrain.runtime.call_recorder import observed_call
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.launch import Loaded, kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from tests.ops.attention.attention_launches import launch, launch_hopper_attention

native = pytest.mark.skipif(settings().interpret, reason="the warm path and machine code are those of compiled kernels")
_WAIT_TWICE = "_hopper_attention_bwd_d192_kernel", "_hopper_attention_bwd_d256_kernel"
_FILL_SMS = (
    "_hopper_attention_fwd_kernel", "_hopper_attention_fwd_d512_kernel", "_hopper_attention_bwd_kernel",
    "_hopper_attention_bwd_d192_kernel", "_hopper_attention_bwd_d256_kernel",
)  # fmt: skip
FACTS = {"name": "k", "num_warps": 4, "shared": 512, "global_scratch": 0, "profile_scratch": 0}


class Driver:
    """Replaces cuLaunchKernelEx: the configurations of its launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        monkeypatch.setattr(driver, "configured_launcher", lambda: self.launch)

    def launch(self, config: int, handle: int, params: int, extra: None) -> int:
        layout = driver.LaunchConfig._LAYOUT
        *sizes, stream, attributes, count = layout.unpack(ctypes.string_at(config, layout.size))
        # CUlaunchAttribute: its id, padding, 64 bytes of value
        given = struct.unpack("@I4xi60x", ctypes.string_at(attributes, 72)) if count else ()
        self.launches.append(((*sizes, stream), given))
        return 0


@native
def test_warm_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With programmatic stream serialization (6), into a graph where the driver holds it; as others where it was not
    loaded so."""

    @kernel()
    def _early_kernel(x_ptr, N, STARTS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    fake, plain = Driver(monkeypatch), []
    namespace = _early_kernel.launch.__globals__
    namespace["launch_kernel"] = lambda: lambda *args: plain.append(args[:4]) or 0
    namespace["current_device"], namespace["current_stream"] = lambda: -1, lambda device: 77
    for early, captures, held in ((True, False, False), (True, True, False), (True, True, True), (False, False, True)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        monkeypatch.setattr(driver, "graphs_hold_early_starts", lambda held=held: held)
        loaded = Loaded(["*fp32", "i32"], FACTS, driver.Function(1234, 0), starts_early=early)
        # found by every key
        _early_kernel._tables[-1] = type("Keys", (dict,), {"get": lambda self, key, loaded=loaded: loaded})()
        _early_kernel[(5, 2)](torch.empty(4, device="meta"), 3, STARTS_EARLY=early)
    sizes = (5, 2, 1, 128, 1, 1, 512, 77)
    assert fake.launches == [(sizes, (6, 1)), (sizes, ()), (sizes, (6, 1))]
    assert plain == [(1234, 5, 2, 1)]


@pytest.mark.parametrize(
    "code, version, held", [(0, 12020, False), (0, 12030, True), (0, 13000, True), (3, 13000, False)]
)
def test_drivers_whose_graphs_hold_early_starts(
    code: int, version: int, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(address: Any) -> int:
        address._obj.value = version
        return code

    monkeypatch.setattr(driver, "_cuda", lambda: SimpleNamespace(cuDriverGetVersion=ask))
    assert driver.graphs_hold_early_starts.__wrapped__() is held


@pytest.mark.parametrize("early", [True, False])
def test_replayed_launch(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver(monkeypatch)
    loaded = Loaded(["*fp32", "*fp32"], FACTS, driver.Function(1234, 0), starts_early=early)

    def forward(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        replay.recorder().launched(SimpleNamespace(name="k"), loaded, (1,), [x, y], {})  # type: ignore[union-attr]
        return y

    x = torch.randn(4)
    with observed_call([x]) as recorder:
        result = recorder.forward(SimpleNamespace(name="op", replays=True, forward=forward), (x,))
    tape = recorder.op_tape(result, 77)
    assert tape is not None, recorder.failure
    tape.run(x)
    assert [given for _, given in fake.launches] == [(6, 1) if early else ()]


def test_where() -> None:
    here = {card: starts_early(Target.parse(card)) for card in ("A100", "L4", "H200", "B200")}
    assert here == {"A100": False, "L4": False, "H200": not settings().interpret, "B200": not settings().interpret}


def _kernels(card: str, heads: tuple[int, int] = (32, 8), **options: Any) -> dict[str, str]:
    """The PTX of the kernels that a decoding call launches."""
    with record(card) as wanted:
        cache = torch.empty(64, 16, heads[1], 128, device="meta", dtype=torch.bfloat16)
        query = torch.empty(8, 1, heads[0], 128, device="meta", dtype=torch.bfloat16)
        lengths, pages = (torch.empty(*s, device="meta", dtype=torch.int32) for s in ((8,), (8, 64)))
        decode_attention(query, cache, cache, lengths, page_table=pages, **options)
    return {spec.kernel.name: zlib.decompress(entry_for(spec)[0].members["ptx"]).decode() for spec in wanted.specs}


_TOUCH = re.compile(r"\b(ld|st|atom|red)\.([a-z]+\.)*global|cp\.async")


def _touched_early(ptx: str) -> list[str]:
    """Accesses of global memory that are reached from the entry without a wait, by any warp."""
    # only the compiler's labels are jumped to from afar; those inside inline assembly are loops of their own
    name, blocks = "", {"": list[str]()}
    for line in ptx[ptx.index(".entry") :].splitlines():
        label = re.match(r"\s*(\$L\w+):(.*)", line)
        if label:
            name = label[1]
            blocks[name] = []
        blocks[name].append(label[2].strip() if label else line.strip())
    following = dict(pairwise(blocks))
    early, seen, todo = [], set(), [""]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in blocks[name]:
            if "griddepcontrol.wait" in line:
                break
            if _TOUCH.search(line):
                early.append(line)
            # a jump, or by a table of labels, which is a block of its own
            todo += re.findall(r"\$L\w+", line)
            if re.match(r"(bra|brx|ret|exit)\b", line):
                break
        else:
            todo += [following[name]] if name in following else []
    return early


@native
@pytest.mark.parametrize("heads", [(28, 4), (32, 8)], ids=["by the universal kernel", "by a list"])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_memory_is_touched_after_the_wait(num_splits: int | None, heads: tuple[int, int]) -> None:
    """A load ahead of the wait may read memory that the previous kernel has not written yet."""
    found = _kernels("H200", heads, num_splits=num_splits)
    assert len(found) == (3 if num_splits is None else 2)
    for name, ptx in found.items():
        if name in _FILL_SMS:
            assert not _touched_early(ptx), name
            continue
        assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait"), name
        assert _TOUCH.search(ptx), name
        assert not _touched_early(ptx), name


@native
def test_every_warp_waits() -> None:
    """Of the Hopper attention: with a wait left out, some job's first access is found."""
    with record("H200") as wanted:
        launch_hopper_attention(torch.bfloat16)
    specs = [spec for spec in wanted.specs if "_hopper_attention" in spec.kernel.name]
    assert all(spec.constants["STARTS_EARLY"] for spec in specs)
    jobs = {}
    for spec in specs:
        ptx = zlib.decompress(entry_for(spec)[0].members["ptx"]).decode()
        # small programs that all follow would wait on the SMs that are free first, and leave others idle
        lets = ptx.count("griddepcontrol.launch_dependents")
        assert lets == (0 if spec.kernel.name in _FILL_SMS else 1), spec.describe()
        assert not _touched_early(ptx), spec.describe()
        waits = [found.start() for found in re.finditer("griddepcontrol.wait", ptx)]
        jobs[spec.kernel.name] = len(waits)
        # the kernels of 64 and of 96 keys a tile load keys ahead of their jobs, which wait anew
        if len(waits) > 1 and spec.kernel.name not in _WAIT_TWICE:
            assert all(_touched_early(ptx[:at] + "nothing" + ptx[at + 19 :]) for at in waits), spec.describe()
    assert jobs["_hopper_attention_bwd_d192_kernel"] == 5
    assert jobs["_hopper_attention_bwd_kernel"] == 3


@native
def test_universal_kernels_wait_and_let_none_start() -> None:
    with record("H200") as wanted:
        launch("causal", (64, 64), torch.bfloat16)
    assert len({spec.kernel.name for spec in wanted.specs}) == 4
    for spec in wanted.specs:
        ptx = zlib.decompress(entry_for(spec)[0].members["ptx"]).decode()
        assert spec.constants["STARTS_EARLY"] and not _touched_early(ptx), spec.describe()
        assert "griddepcontrol.launch_dependents" not in ptx, spec.describe()


def _few_rows() -> None:
    """Forward and backward of the ops whose kernels start early if they are small."""

    def leaf(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

    x, wide, w, wide_w = leaf(40, 256), leaf(300, 512), leaf(256), leaf(512)
    q, k = leaf(1, 40, 4, 64), leaf(1, 40, 2, 64)
    outs = [
        rms_norm(x, w, w, residual=leaf(40, 256))[0], layer_norm(x, w, w), activation(x, "gelu", w),
        gated_activation(wide, "swiglu", bias=wide_w), bias_dropout_add(wide, wide_w, wide, 0.1),
        bias_dropout_add(x, w, x, 0.0), *rope(q, k, table=rope_table(64, 40, device="meta")),
    ]  # fmt: skip
    torch.autograd.grad(outs, [x, wide, w, wide_w, q, k], [torch.empty_like(out) for out in outs])


@native
def test_small_kernels_wait() -> None:
    with record("H200") as wanted:
        _few_rows()
    early = [spec for spec in wanted.specs if spec.constants.get("STARTS_EARLY")]
    assert {spec.kernel.name for spec in early} == {
        "_norm_fwd_kernel", "_norm_bwd_kernel", "_activation_fwd_kernel", "_activation_bwd_kernel", "_rope_kernel",
        "_bias_dropout_add_fwd_kernel", "_bias_dropout_add_bwd_kernel", "_column_sums_kernel",
    }  # fmt: skip
    for spec in early:
        ptx = zlib.decompress(entry_for(spec)[0].members["ptx"]).decode()
        assert _TOUCH.search(ptx) and not _touched_early(ptx), spec.describe()
        # none lets the next one start, and so wait beside it, while it waits itself
        assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents"), spec.describe()


@native
def test_no_scratch() -> None:
    """Maps are made by the host: nothing is allocated for a launch of the Hopper attention."""
    with record("H200") as wanted:
        launch_hopper_attention(torch.bfloat16)
    for spec in wanted.specs:
        if spec.kernel.archs:
            facts = entry_for(spec)[0].manifest["launch"]
            assert not facts["global_scratch"] and not facts["profile_scratch"], spec.describe()


@native
def test_none_before_hopper() -> None:
    assert all("griddepcontrol" not in ptx for ptx in _kernels("A100").values())
