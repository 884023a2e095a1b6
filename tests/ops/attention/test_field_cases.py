"""The calls for which other libraries failed people, each by name: chosen, compiled, right."""

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, explain_attention, varlen_attention
from powertrain.ops.attention.backend_preferences import BackendPreference
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends.versions import Installed, assume
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem, Lengths
from powertrain.ops.attention.select import verdicts
from powertrain.runtime import checks, target
from powertrain.runtime.compile import prebuild
from powertrain.runtime.compile.service import Spec
from powertrain.runtime.recording import emulate, record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check
from tests.torch_setup import SLOW_IN_INTERPRETER

compiles = pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
CUDA = torch.device("cuda")
META = torch.device("meta")


def _dtypes(half: torch.dtype) -> list[Any]:
    """That one, and float32."""
    return [pytest.param(half, id=checks.name(half)), pytest.param(torch.float32, id="fp32", marks=SLOW_IN_INTERPRETER)]


@pytest.fixture(autouse=True)
def _software() -> Iterator[None]:
    """PyTorch alone, everywhere."""
    with assume(Installed((2, 11), True, 91900)):
        yield


def _specs(card: str, step: Callable[[], Any]) -> list[Spec]:
    """What forward and backward of `step` launch on a card."""
    with record(card) as wanted:
        out = step()
        torch.autograd.backward(out, torch.empty_like(out))
    return wanted.specs


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)


def _dense(dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Callable[[], Tensor]:
    """Causal attention of 2 x 1024 x 8 heads."""

    def step() -> Tensor:
        q, k, v = (_meta(2, 1024, 8, d, dtype=dtype) for d in (dims[0], *dims))
        return attention(q, k, v, is_causal=True, backend="triton")

    return step


def _build(specs: list[Spec]) -> prebuild.Report:
    report = prebuild.build(specs)
    assert specs and not report.failures, report.failures
    for entry in report.entries:
        limit = Target.parse(f"sm_{entry.manifest['arch']}").shared_per_block
        assert entry.manifest["launch"]["shared"] <= limit, entry.manifest
    return report


class TestDeepSeekV3OnAnA100:
    """thd, batch 2, 64 heads, sequences of up to 588, head dims 192 and 128, padding_causal, bfloat16, training:
    "No dot product attention backend is available" (TransformerEngine#1821)."""

    HEADS, DIMS, LENGTHS = 64, (192, 192, 128), (588, 411)

    def test_is_served(self) -> None:
        found = explain_attention(
            arch="A100", layout="thd", head_dim_qk=192, head_dim_v=128, num_heads=self.HEADS, queries=588,
            is_causal=True, causal_align="top_left",
        )  # fmt: skip
        assert found.chosen == "triton"

    @compiles
    def test_compiles_for_sm_80(self) -> None:
        def step() -> Tensor:
            starts = torch.empty(3, dtype=torch.int32, device=META)
            q, k, v = (_meta(sum(self.LENGTHS), self.HEADS, d) for d in self.DIMS)
            return varlen_attention(
                q, k, v, starts, max_seqlen_q=588, is_causal=True, causal_align="top_left", backend="triton"
            )

        report = _build(_specs("sm_80", step))
        assert {entry.manifest["arch"] for entry in report.entries} == {80}

    @pytest.mark.gpu
    def test_is_right(self) -> None:
        """sm_80's code, run by this GPU's driver: three heads of 64 against float64."""
        heads = [0, 31, 63]
        starts = torch.tensor([0, 588, 999], dtype=torch.int32, device=CUDA)
        made = [torch.randn(999, self.HEADS, d, device=CUDA, dtype=torch.bfloat16) for d in self.DIMS]
        tensors: dict[str, Tensor | None] = {n: x.requires_grad_() for n, x in zip("qkv", made, strict=True)}

        def through(backend: str, heads_first: bool) -> Callable[..., Tensor]:
            def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (x[:, heads] if heads_first else x for x in (q, k, v))
                options: dict[str, Any] = {"max_seqlen_q": 588, "is_causal": True, "causal_align": "top_left"}
                out: Tensor = varlen_attention(q, k, v, starts, backend=backend, **options)
                return out if heads_first else out[:, heads]

            return run

        with emulate("sm_80"):
            check(through("triton", False), through("chunked", True), through("reference", True), tensors)


class TestAnRTX2080AndAnRTX3090:
    """Both in one process: a build for the 2080 left the 3090 with kernels that did nothing (xformers#1045)."""

    CARDS = ("RTX 2080", "RTX 3090")

    def test_each_is_served(self) -> None:
        asked: dict[str, Any] = {"num_heads": 8, "dtype": torch.float16, "head_dim_qk": 64, "deterministic": False}
        five = explain_attention(arch=self.CARDS, layout="bmghk", **asked).by_gpu
        four = explain_attention(arch=self.CARDS, **asked).by_gpu
        assert five == {"RTX 2080": "triton", "RTX 3090": "triton"}
        assert four == {"RTX 2080": "efficient", "RTX 3090": "flash"}

    @compiles
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
    def test_kernels_are_those_of_the_tensors_card(self, dtype: torch.dtype) -> None:
        """Turn and turn about, nothing of one is used for the other."""

        def step() -> Tensor:
            q, k, v = (_meta(1, 256, 2, 4, 64, dtype=dtype) for _ in range(3))
            return attention(q, k, v, layout="bmghk", backend="triton")

        recorded = [_specs(card, step) for card in (*self.CARDS, *self.CARDS)]
        assert [{spec.arch for spec in specs} for specs in recorded] == [{75}, {86}] * 2
        keys = [{spec.key for spec in specs} for specs in recorded]
        assert keys[0] == keys[2] and keys[1] == keys[3] and not keys[0] & keys[1]

    @compiles
    def test_two_devices_are_two_targets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cards = [Target.parse(card) for card in self.CARDS]
        monkeypatch.setattr(target, "_of_cuda", cards.__getitem__)
        assert [Target.of(torch.device("cuda", n)).arch for n in (0, 1, 0)] == [75, 86, 75]

    @pytest.mark.kernels
    @pytest.mark.parametrize("dtype", _dtypes(torch.float16))
    def test_five_dims_are_four(self, dtype: torch.dtype, device: torch.device) -> None:
        """Query (B, M, num_key_value_groups, num_key_value_heads, K) and its flattened twin: the same bits."""
        groups, heads = 2, 3
        q, dout = (torch.randn(2, 21, groups, heads, 40, device=device).to(dtype) for _ in range(2))
        k, v = (torch.randn(2, 33, groups, heads, 40, device=device).to(dtype) for _ in range(2))
        options: dict[str, Any] = {"is_causal": True, "return_lse": True, "backend": "triton"}
        five = _all_results([q, k, v], dout, layout="bmghk", **options)
        four = _all_results([x.flatten(2, 3) for x in (q, k, v)], dout.flatten(2, 3), **options)
        assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(five, four, strict=True))

    @pytest.mark.kernels
    @pytest.mark.parametrize("dtype", _dtypes(torch.bfloat16))
    def test_expanded_keys_are_groups_of_queries(self, dtype: torch.dtype, device: torch.device) -> None:
        """K and V with stride 0 along the groups: the bits of grouped-query attention on four dims. (Each copy gets an
        equal share of a gradient, which halves exactly unless float16 runs out of exponents.)"""
        groups, heads = 2, 3
        q, dout = (torch.randn(2, 21, groups, heads, 40, device=device).to(dtype) for _ in range(2))
        k, v = (torch.randn(2, 33, heads, 40, device=device).to(dtype) for _ in range(2))
        options: dict[str, Any] = {"is_causal": True, "return_lse": True, "backend": "triton"}
        wide = lambda x: x[:, :, None].expand(2, 33, groups, heads, 40)  # noqa: E731
        five = _all_results([q, k, v], dout, lambda q, k, v: (q, wide(k), wide(v)), layout="bmghk", **options)
        by_head = lambda x: x.transpose(2, 3).flatten(2, 3)  # noqa: E731
        four = _all_results([by_head(q), k, v], by_head(dout), **options)
        out, lse, dq, dk, dv = five
        five = [by_head(out), lse.transpose(1, 2).flatten(1, 2), by_head(dq), dk, dv]
        assert all(torch.equal(a, b) for a, b in zip(five, four, strict=True))


def _all_results(
    leaves: list[Tensor], dout: Tensor, arrange: Callable[..., Any] = lambda *x: x, **options: Any
) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    out, lse = attention(*arrange(*leaves), **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


WIDE, USUAL = [(256, 256), (512, 512)], [(96, 96), (80, 80), (40, 40)]


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("dims", WIDE + USUAL, ids=str)
def test_head_dims_are_served(dims: tuple[int, int], arch: str) -> None:
    """Forward and backward, in every layout, by a kernel that is always there."""
    for layout in ("bshd", "bhsd", "sbhd", "thd", "bmghk"):
        problem = AttentionProblem(torch.bfloat16, *dims, Target.parse(arch), MaskSpec(right=0), layout)
        assert not list(BACKENDS["triton"].why_not(problem))
        assert any(v.verdict == "chosen" and v.name != "reference" for v in verdicts(problem, BackendPreference()))


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("dims", WIDE + USUAL, ids=str)
def test_head_dims_compile(dims: tuple[int, int], arch: str) -> None:
    _build(_specs(arch, _dense(dims)))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm_86", None], ids=["sm_86", "here"])
@pytest.mark.parametrize("dims", WIDE + USUAL, ids=str)
def test_head_dims_are_right(dims: tuple[int, int], arch: str | None) -> None:
    _judge(dims, torch.bfloat16, arch)


@compiles
def test_bfloat16_on_sm_75() -> None:
    """It has no bfloat16 arithmetic: products and sums are float32's, and nothing else is in the code."""
    report = _build(_specs("sm_75", _dense((64, 64))))
    for entry in report.entries:
        ptx = zlib.decompress(entry.members["ptx"]).decode()
        assert "fma.rn.f32" in ptx or "rows" in entry.manifest["kernel"]
        assert not re.findall(r"\b(?:fma|add|sub|mul|mma)[.\w]*bf16", ptx)


@pytest.mark.gpu
def test_bfloat16_on_sm_75_is_right() -> None:
    _judge((64, 64), torch.bfloat16, "sm_75")


def _judge(dims: tuple[int, int], dtype: torch.dtype, arch: str | None) -> None:
    """Values and gradients against float64, run with the code of another arch where one is given."""
    tensors: dict[str, Tensor | None] = {
        name: torch.randn(2, 150, 2, d, device=CUDA, dtype=dtype).requires_grad_()
        for name, d in zip("qkv", (dims[0], *dims), strict=True)
    }

    def through(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: attention(q, k, v, is_causal=True, backend=backend)

    if arch is None:
        return check(through("triton"), through("chunked"), through("reference"), tensors)
    with emulate(arch):
        check(through("triton"), through("chunked"), through("reference"), tensors)


@pytest.mark.parametrize("queries, refused", [(192, True), (576, True), (128, False), (256, False)])
def test_cudnn_is_avoided_at_64_more_than_a_multiple_of_128(queries: int, refused: bool) -> None:
    """With a dense mask it gives NaN for the query's gradient there (pytorch#196678)."""
    mask = MaskSpec(bias="bool")
    problem = AttentionProblem(torch.bfloat16, 64, 64, Target.parse("H100"), mask, lengths=Lengths.of(queries, queries))
    found = verdicts(problem, BackendPreference())
    assert (next(v.verdict for v in found if v.name == "cudnn") == "no") == refused
