"""Which backend is chosen: for every arch, dtype, head dim, layout and mask; who may steer it; what is said."""

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from powertrain.ops.attention import NoBackendError, attention, attention_backend, explain_attention, select
from powertrain.ops.attention.backend_order import order_of
from powertrain.ops.attention.backend_preferences import BackendPreference, current_preference, nvte_forbids
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.backends.versions import Installed, assume, cudnn_name, cudnn_number
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem, Layout, Lengths, Reason, Use, use
from powertrain.ops.attention.select import verdicts
from powertrain.runtime import float32_products
from powertrain.runtime import settings as settings_module
from powertrain.runtime.dispatch import disable
from powertrain.runtime.errors import PowertrainError
from powertrain.runtime.target import _ARCHS, Target
from powertrain.runtime.tracing import trace
from tests.torch_setup import INTERPRET

PLAIN = Installed((2, 11), True, 91900)
ALL = replace(PLAIN, packages=(("flash-attn", "2.8.3"), ("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36")))
TARGETS = [Target.parse(f"sm_{arch}") for arch in _ARCHS]
CAUSAL = MaskSpec(right=0)

pytestmark = pytest.mark.skipif(INTERPRET, reason="a choice is the same in the interpreter's run")


@pytest.fixture(autouse=True)
def _software(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same software everywhere, and no interpreter, under which our kernels serve the CPU."""
    monkeypatch.delenv("POWERTRAIN_INTERPRET", raising=False)
    settings_module.reload()
    with assume(PLAIN):
        yield
    monkeypatch.undo()
    settings_module.reload()


def problem(arch: str | None = "H100", **facts: Any) -> AttentionProblem:
    usual: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, "mask": CAUSAL}
    return AttentionProblem(target=None if arch is None else Target.parse(arch), **(usual | facts))


def chosen(p: AttentionProblem, preference: BackendPreference | None = None) -> str | None:
    return next((v.name for v in verdicts(p, preference or BackendPreference()) if v.verdict == "chosen"), None)


def reasons(name: str, p: AttentionProblem) -> str:
    return "; ".join(str(reason) for reason in BACKENDS[name].why_not(p))


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# every power of two and multiple of 8 that models have, odd ones, and pairs that differ
HEAD_DIMS = ((1, 1), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (200, 200), (256, 256), (512, 512))
LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "sbhd", "thd", "bmghk")
MASKS = (
    MaskSpec(),
    CAUSAL,
    MaskSpec(right=0, bottom_right=True),
    MaskSpec(left=128, right=0, bottom_right=True),
    MaskSpec(left=128, right=128),
    MaskSpec(chunk=64, right=0),
    MaskSpec(prefix=True, right=0),
    MaskSpec(documents=True),
    MaskSpec(bias="bool"),
    MaskSpec(bias="float", bias_grad=True),
    MaskSpec(alibi=True, right=0),
    MaskSpec(softcap=50.0),
    MaskSpec(sinks=True, right=0),
)


@pytest.mark.parametrize("target", [*TARGETS, None], ids=lambda t: "cpu" if t is None else t.name)
@pytest.mark.parametrize("software", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("count", [150, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
def test_there_is_always_one_and_every_refusal_has_text_and_fix(
    count: int | None, target: Target | None, software: Installed
) -> None:
    flags: tuple[dict[str, Any], ...] = (
        {},
        {"needs_grad": False},
        {"deterministic": True},
        {"dropout": True},
        {"num_kv_heads": 2},
    )
    lengths = (Lengths(), Lengths(16, 64, equal=False), Lengths(512, 64, 2, False, True, False))
    problems = list(itertools.product(DTYPES, HEAD_DIMS, LAYOUTS, MASKS))
    if count is not None:
        # other ones for each target and software
        problems = random.Random(f"{target} {software}").sample(problems, count)
    with assume(software):
        for dtype, dims, layout, mask in problems:
            for flag, length in zip(flags, itertools.cycle(lengths), strict=False):
                p = AttentionProblem(dtype, *dims, target, mask, layout, lengths=length, **flag)
                found = verdicts(p, BackendPreference())
                assert [v.verdict for v in found].count("chosen") == 1, p
                assert {v.name for v in found} == set(BACKENDS)
                for verdict in found:
                    assert (verdict.verdict == "no") == bool(verdict.reasons)
                    assert all(len(r.text) > 8 and len(r.fix) > 8 for r in verdict.reasons), verdict


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_problem_on_a_gpu_can_be_ours(target: Target) -> None:
    for dtype, dims, layout, mask in itertools.product(DTYPES, HEAD_DIMS, LAYOUTS, MASKS):
        assert not reasons("triton", AttentionProblem(dtype, *dims, target, mask, layout))


# the field's cases: who serves them, with nothing installed beside PyTorch
@pytest.mark.parametrize(
    "arch, facts, expected",
    [
        # DeepSeek-V3 on an A100: "No dot product attention backend is available"
        ("A100", {"head_dim_qk": 192, "layout": "thd", "num_heads": 64, "num_kv_heads": 64}, "triton"),
        ("A100", {"head_dim_qk": 192}, "triton"),
        ("H100", {"head_dim_qk": 192}, "hopper"),
        ("H100", {"head_dim_qk": 192, "layout": "thd"}, "hopper"),
        ("A100", {}, "flash"),
        ("A100", {"layout": "thd"}, "flash"),
        ("H100", {}, "hopper"),
        ("H100", {"head_dim_qk": 64, "head_dim_v": 64}, "hopper"),
        ("H100", {"lengths": Lengths(512, 512)}, "hopper"),
        ("H100", {"needs_grad": False}, "hopper"),
        ("RTX 2080", {"dtype": torch.float16}, "efficient"),
        ("RTX 2080", {}, "triton"),  # bfloat16 on sm_75
        ("RTX 3090", {"head_dim_qk": 256, "head_dim_v": 256}, "flash"),
        ("RTX 3090", {"head_dim_qk": 200, "head_dim_v": 200}, "triton"),
        ("RTX 3090", {"head_dim_qk": 200, "head_dim_v": 200, "needs_grad": False}, "flash"),
        ("RTX 3090", {"head_dim_qk": 512, "head_dim_v": 512}, "triton"),
        ("H100", {"head_dim_qk": 256, "head_dim_v": 256}, "hopper"),
        ("H100", {"head_dim_qk": 512, "head_dim_v": 512}, "hopper"),
        ("H100", {"head_dim_qk": 512, "head_dim_v": 128}, "triton"),
        ("H100", {"head_dim_qk": 96, "head_dim_v": 96}, "hopper"),
        ("H100", {"head_dim_qk": 80, "head_dim_v": 80}, "hopper"),
        ("H100", {"head_dim_qk": 40, "head_dim_v": 40}, "hopper"),
        ("H100", {"head_dim_qk": 59, "head_dim_v": 59}, "triton"),
        ("H100", {"dtype": torch.float32}, "efficient"),
        ("H100", {"dtype": torch.float32, "tf32": True}, "triton"),
        ("H100", {"layout": "bmghk"}, "triton"),
        ("H100", {"mask": MaskSpec(left=1024, right=0)}, "hopper"),
        ("H100", {"mask": MaskSpec(bias="bool")}, "triton"),
        ("H100", {"mask": MaskSpec(bias="float", bias_grad=True)}, "triton"),
        ("H100", {"needs_lse": True, "needs_lse_grad": True}, "hopper"),
        ("H100", {"deterministic": True}, "hopper"),
        (None, {"dtype": torch.float32}, "cpu"),
    ],
)
def test_cases_from_the_field(arch: str | None, facts: dict[str, Any], expected: str) -> None:
    assert chosen(problem(arch, **facts)) == expected


def test_triton_comes_before_efficient() -> None:
    """On every arch with tensor cores for tl.dot, efficient is the last of the kernels."""
    for target in TARGETS:
        if target.has_tensor_core_dot:
            names = order_of(problem(target.name)).names
            assert names.index("triton") < names.index("efficient")


@pytest.mark.parametrize(
    "name, arch, facts, source",
    [
        ("cudnn", "H100", {"mask": MaskSpec(bias="bool"), "lengths": Lengths(queries_mod_128_is_64=True)}, "196678"),
        ("cudnn", "B200", {"num_kv_heads": 4}, "193893"),
        ("cudnn", "H100", {"lengths": Lengths(16, 24, equal=False)}, "1072"),
        ("cudnn", "H100", {"lengths": Lengths(equal=False, single_key=True), "mask": MaskSpec()}, "single key"),
        ("cudnn", "A100", {"head_dim_qk": 192}, "above 128"),
        ("cudnn", "H100", {"head_dim_qk": 256}, "unequal head dims"),
        ("cudnn", "B200", {"head_dim_qk": 160, "head_dim_v": 160}, "backward for head dims"),
        ("cudnn", "H100", {"mask": MaskSpec(bias="bool"), "lengths": Lengths(keys_multiple_of_8=False)}, "8 keys"),
        ("flash", "RTX 3090", {"head_dim_qk": 224, "head_dim_v": 224}, "100326"),
        ("flash", "RTX 4090", {"head_dim_qk": 256, "head_dim_v": 256, "dropout": True}, "100326"),
        ("efficient", "T4", {}, "bfloat16 from sm_80"),
        ("cpu", None, {"mask": MaskSpec(bias="bool"), "needs_lse": True}, "LSE of 0"),
        ("hopper", "H100", {"dtype": torch.float32}, "bfloat16 or float16"),
        ("hopper", "H100", {"head_dim_qk": 320}, "up to 256"),
        ("hopper", "H100", {"head_dim_v": 50}, "multiple of 8"),
        ("hopper", "H100", {"aligned": False}, "16 bytes"),
        ("hopper", "H100", {"layout": "bmghk"}, "bmghk"),
        ("hopper", "H100", {"mask": MaskSpec(bias="float")}, "no bias"),
        ("hopper", "H100", {"mask": MaskSpec(documents=True)}, "no documents"),
        ("hopper", "H100", {"mask": MaskSpec(prefix=True)}, "no prefix"),
        ("hopper", "H100", {"mask": MaskSpec(chunk=64)}, "no chunk"),
        ("hopper", "H100", {"dropout": True}, "no dropout"),
        ("flash-attn-4", "H100", {"head_dim_qk": 80, "head_dim_v": 80}, "no multiples of 32"),
        ("flash-attn-4", "H100", {"head_dim_qk": 192, "num_kv_heads": 4}, "fewer key heads"),
        ("flash-attn-4", "A100", {}, "no backward below sm_90"),
        ("flash-attn-4", "B200", {"head_dim_qk": 160, "head_dim_v": 160}, "up to 128"),
        ("flash-attn-2", "A100", {"mask": MaskSpec(softcap=30.0), "dropout": True}, "not both"),
        ("flash-attn-3", "H100", {"head_dim_qk": 96, "head_dim_v": 64}, "unequal head dims"),
    ],
)
def test_known_faults_are_avoided_and_nothing_else(
    name: str, arch: str | None, facts: dict[str, Any], source: str
) -> None:
    with assume(ALL):
        assert source in reasons(name, problem(arch, **facts))
        healthy = {"needs_grad": False, "dtype": torch.float16} if name in ("flash-attn-4", "efficient") else {}
        assert not reasons(name, problem(arch, **healthy)), "a plain problem is served"


def test_old_cudnn_is_avoided() -> None:
    with assume(replace(PLAIN, cudnn=91002)):
        assert "169849" in reasons("cudnn", problem())
    with assume(replace(PLAIN, cudnn=0)):
        assert "got none" in reasons("cudnn", problem())
    assert cudnn_number("9.10.2") == 91002 and cudnn_name(91002) == "9.10.2" and cudnn_number("9.8") == 90800


def test_flash_attn_4_is_refused_where_archs_are_mixed() -> None:
    with assume(replace(ALL, archs=(86, 90))):
        assert "arch that it saw first" in reasons("flash-attn-4", problem())
    with assume(replace(ALL, archs=(90,))):
        assert not reasons("flash-attn-4", problem())


def test_every_reason_of_several_is_given() -> None:
    p = problem("RTX 2080", head_dim_qk=320, layout="thd", mask=MaskSpec(sinks=True), needs_lse_grad=True)
    found = reasons("cudnn", p)
    for words in ("sm_80 to sm_121", "up to 256", "got thd", "no sinks", "LSE"):
        assert words in found


D64: dict[str, Any] = {"head_dim_qk": 64, "head_dim_v": 64, "mask": MaskSpec(right=0, bottom_right=True)}


# measured on an H200 with all three installed: which is fastest depends on length, head dim and gradients
@pytest.mark.parametrize(
    "facts, expected",
    [
        ({}, "hopper"),
        ({"head_dim_qk": 192}, "hopper"),
        ({"head_dim_qk": 64, "head_dim_v": 64}, "hopper"),
        ({"head_dim_qk": 256, "head_dim_v": 256}, "hopper"),
        ({"head_dim_qk": 96, "head_dim_v": 96}, "hopper"),
        ({"head_dim_qk": 96, "head_dim_v": 96, "lengths": Lengths(2048, 2048), "needs_grad": False}, "hopper"),
        ({"head_dim_qk": 80, "head_dim_v": 80}, "hopper"),
        ({"head_dim_qk": 80, "head_dim_v": 80, "lengths": Lengths(2048, 2048), "needs_grad": False}, "hopper"),
        ({"head_dim_qk": 48, "head_dim_v": 48}, "hopper"),
        ({"head_dim_qk": 24, "head_dim_v": 24}, "hopper"),
        ({"head_dim_qk": 8, "head_dim_v": 8}, "cudnn"),
        ({"dropout": True}, "cudnn"),
        ({"lengths": Lengths(64, 64, 512), **D64, "mask": MaskSpec()}, "efficient"),
        ({"lengths": Lengths(16, 16, 512), "mask": MaskSpec(), **D64}, "efficient"),
        ({"lengths": Lengths(64, 64, 256), "num_kv_heads": 4, **D64}, "hopper"),
        ({"head_dim_qk": 192, "head_dim_v": 192}, "hopper"),
        ({"head_dim_qk": 64, "head_dim_v": 64, "mask": MaskSpec(right=0, alibi=True)}, "hopper"),
        ({"head_dim_qk": 64, "head_dim_v": 64, "mask": MaskSpec(right=0, alibi=True), "needs_grad": False}, "triton"),
        # 716 us, flash-attn-4 714
        ({"head_dim_qk": 256, "head_dim_v": 256, "needs_grad": False}, "hopper"),
        ({"lengths": Lengths(2048, 2048), "needs_grad": False}, "hopper"),
        ({"lengths": Lengths(512, 512)}, "hopper"),
        ({"lengths": Lengths(512, 512, 32)}, "hopper"),
        ({"lengths": Lengths(512, 512), "needs_grad": False}, "hopper"),
        ({"lengths": Lengths(512, 512), "needs_grad": False, "head_dim_qk": 64, "head_dim_v": 64}, "hopper"),
        ({"lengths": Lengths(16, 4096, equal=False), "mask": MaskSpec(), "needs_grad": False}, "hopper"),
        ({"lengths": Lengths(16, 4096, equal=False)}, "hopper"),
        (
            {"lengths": Lengths(16, 4096), "head_dim_qk": 192, "head_dim_v": 192, "num_kv_heads": 4},
            "hopper",
        ),
        ({"lengths": Lengths(512, 4096, equal=False), "needs_grad": False, **D64}, "hopper"),
        ({"lengths": Lengths(512, 768, equal=False), "needs_grad": False, **D64}, "hopper"),
        ({"lengths": Lengths(16, 16), "needs_grad": False}, "efficient"),
        ({"lengths": Lengths(16, 16), "num_kv_heads": 4}, "hopper"),
        (
            {"lengths": Lengths(512, 4096), "needs_grad": False, "num_heads": 28, "num_kv_heads": 4, **D64},
            "hopper",
        ),
    ],
)
def test_order_on_hopper_with_everything(facts: dict[str, Any], expected: str) -> None:
    with assume(replace(PLAIN, packages=(("flash-attn-4", "4.0.0b36"),))):
        assert chosen(problem(**facts)) == expected


def test_two_archs_in_one_process_never_share_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RTX 2080 and an RTX 3090: equal facts but for the device."""
    targets = {0: Target.parse("RTX 2080"), 1: Target.parse("RTX 3090")}
    made = []

    def choose(index: int) -> str:
        def p() -> AttentionProblem:
            made.append(index)
            return AttentionProblem(torch.float16, 64, 64, targets[index], CAUSAL)

        return select.choose((torch.float16, 64, 64, torch.device("cuda", index), CAUSAL, "two archs"), p).name

    assert [choose(0), choose(1), choose(0), choose(1)] == ["efficient", "flash", "efficient", "flash"]
    assert made == [0, 1], "each was decided once"


def _cpu(**facts: Any) -> list[torch.Tensor]:
    return [torch.randn(2, 8, 4, 16, **facts) for _ in range(3)]


def _chosen_by_a_call(**options: Any) -> str:
    return str(explain_attention(*_cpu(), **options).chosen)


def test_backend_of_a_call() -> None:
    assert _chosen_by_a_call() == "cpu"
    assert _chosen_by_a_call(backend="reference") == "reference"
    assert _chosen_by_a_call(backend=["cudnn", "reference"]) == "reference"  # in that order, what can
    assert _chosen_by_a_call(backend=["-cpu"]) != "cpu"  # the others follow
    q, k, v = _cpu()
    torch.testing.assert_close(attention(q, k, v), attention(q, k, v, backend="reference"))


def test_a_name_in_backend_is_an_exact_list() -> None:
    with pytest.raises(NoBackendError, match='smallest change: allow "cpu"') as caught:
        attention(*_cpu(), backend="cudnn")
    table = str(caught.value)
    assert all(name in table for name in BACKENDS), "the whole table"
    assert "cuDNN runs on a GPU only" in table and "cuDNN takes float16 or bfloat16" in table
    assert isinstance(caught.value, PowertrainError)


def test_context() -> None:
    with attention_backend("reference"):
        assert _chosen_by_a_call() == "reference"
        assert _chosen_by_a_call(window_size=(2, 0)) == "reference"
        with attention_backend("-reference"):
            assert _chosen_by_a_call() == "cpu"
            assert _chosen_by_a_call(backend="reference") == "reference"  # nearer
        assert _chosen_by_a_call() == "reference"
        assert _chosen_by_a_call(backend="cpu") == "cpu"
    assert _chosen_by_a_call() == "cpu"
    with attention_backend("cudnn"):  # preferred, not able
        assert _chosen_by_a_call() == "cpu"


def test_context_is_of_its_thread() -> None:
    seen = []
    with attention_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(_chosen_by_a_call()))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_backward_needs_no_context() -> None:
    q, k, v = _cpu(requires_grad=True)
    with attention_backend("reference"):
        out = attention(q, k, v)
    out.sum().backward()
    assert q.grad is not None and not q.grad.isnan().any()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def set_to(value: str) -> None:
        monkeypatch.setenv("POWERTRAIN_ATTENTION", value)
        settings_module.reload()

    yield set_to
    monkeypatch.undo()
    settings_module.reload()


def test_environment(environment: Any) -> None:
    environment("reference, -cpu")
    assert _chosen_by_a_call() == "reference"
    with attention_backend("cpu"):
        assert _chosen_by_a_call() == "cpu", "a nearer place allows again"
    environment("")
    assert _chosen_by_a_call() == "cpu"


def test_forbidding_everything_says_what_to_allow(environment: Any) -> None:
    environment(",".join(f"-{name}" for name in BACKENDS))
    with pytest.raises(NoBackendError, match='smallest change: allow "'):
        attention(*_cpu())


def test_unknown_names(environment: Any) -> None:
    with pytest.raises(ValueError, match=r"attention: backend must be one of triton, hopper, cudnn, .* got 'flash3'"):
        attention(*_cpu(), backend="flash3")
    with pytest.raises(ValueError, match="attention_backend: backend must be one of"):
        attention_backend("-nothing")
    environment("tritn")
    with pytest.raises(ValueError, match=r"POWERTRAIN_ATTENTION: backend must be one of .* got 'tritn'"):
        attention(*_cpu())


def test_disable_switches_ours_off() -> None:
    assert not reasons("triton", problem())
    with disable("attention"):
        assert "switched off" in reasons("triton", problem())


def test_transformer_engines_switches() -> None:
    forbids = nvte_forbids
    assert forbids({}) == () and forbids({"NVTE_FLASH_ATTN": "1"}) == ()
    assert forbids({"NVTE_FLASH_ATTN": "0"}) == ("-flash", "-flash-attn-2", "-flash-attn-3", "-flash-attn-4")
    assert forbids({"NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}) == ("-cudnn", "-reference")
    with attention_backend(*forbids({"NVTE_FUSED_ATTN": "0"})):
        assert chosen(problem(), current_preference(None)) == "hopper"


def test_a_decision_is_an_event_once() -> None:
    q, k, v = (x[..., :12] for x in _cpu())
    before = len(trace())
    for _ in range(3):
        attention(q, k, v, softcap=3.25)
    new = [event for event in trace()[before:] if event.kind == "attention"]
    assert len(new) == 1 and "softcap 3.25" in new[0].text and new[0].facts["backend"] in BACKENDS


def test_dropout_is_drawn_from_the_seed_of_the_call_only_by_ours() -> None:
    assert "seed of its own" in reasons("flash", problem(dropout=True, dropout_seeded=True))
    assert [name for name, backend in BACKENDS.items() if backend.uses_philox_seed and name != "plain"] == [
        "triton",
        "chunked",
        "reference",
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool) -> None:
    q, k, v = _cpu(requires_grad=True)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, is_causal=True, causal_align="top_left", backend=["cpu", "reference"])

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(q, k, v), step(q, k, v))


def test_compiling_takes_only_what_can_be_traced() -> None:
    with assume(ALL):
        assert chosen(problem(compiling=True)) == "hopper"
        assert chosen(problem(compiling=True), BackendPreference(forbidden=frozenset({"hopper"}))) == "cudnn"
        assert "host" in reasons("chunked", problem(compiling=True))


def test_precision_of_float32_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def tf32(dtype: torch.dtype) -> bool:
        return explain_attention(*_cpu(dtype=dtype)).columns[0].problem.tf32

    assert not tf32(torch.float32)
    monkeypatch.setattr(float32_products, "fp32_precision", lambda backend, op: "tf32")
    assert tf32(torch.float32) and not tf32(torch.bfloat16)


def test_size_classes() -> None:
    assert [Lengths.of(n, n).size for n in (1, 16, 17, 1024, 1025, 4096, 4097)] == [
        "decode", "decode", "short", "short", "medium", "medium", "long",
    ]  # fmt: skip
    assert Lengths.of(0, 4).empty and Lengths.of(4, 0).empty and Lengths.of(4, 4, batch=0).empty
    assert Lengths.of(4, 4, batch=70000).large and Lengths.of(4, 4, elements=2**31).large
    assert Lengths.of(192, 192).queries_mod_128_is_64 and not Lengths.of(128, 128).queries_mod_128_is_64


@pytest.mark.parametrize("fact", ["empty", "large"])
def test_empty_and_enormous_go_to_ours(fact: str) -> None:
    lengths = Lengths(**{fact: True})
    with assume(ALL):
        assert chosen(problem(lengths=lengths)) == ("triton" if fact == "empty" else "hopper")
        assert chosen(problem("A100", lengths=lengths)) == "triton"


def test_hopper_is_for_hopper() -> None:
    assert "runs on sm_90 only, got sm_80" in reasons("hopper", problem("A100"))
    assert "runs on a GPU" in reasons("hopper", problem(None))


def test_explains_who_differentiates() -> None:
    by = lambda **facts: explain_attention(arch="A100", software=PLAIN, **facts).backward  # noqa: E731
    assert by(is_causal=True) == explain_attention(arch="A100", software=PLAIN, is_causal=True).chosen
    assert by(is_causal=True, needs_grad=False) is None


def test_misaligned_goes_to_ours() -> None:
    assert chosen(problem(aligned=False)) == "triton"
    q, k, v = (torch.randn(2, 8, 4, 17)[..., 1:] for _ in range(3))
    assert not explain_attention(q, k, v).columns[0].problem.aligned
    q, k, v = _cpu()
    assert explain_attention(q, k, v).columns[0].problem.aligned
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert explain_attention(q, k, v, layout="bhsd").columns[0].problem.aligned


def test_many_short_packed_sequences_of_wide_heads_have_the_universal_backward() -> None:
    """One H200, D512, 117 sequences of 71 rows: 11.1 ms by the Hopper kernels, 7.0 by the universal ones."""
    with assume(PLAIN):
        for sequences, rows, expected in ((117, 71, "triton"), (4, 71, "hopper"), (117, 2048, "hopper")):
            p = AttentionProblem(
                torch.bfloat16, 512, 512, Target.parse("H200"), MaskSpec(right=0), "thd",
                lengths=Lengths(rows, rows, sequences),
            )  # fmt: skip
            decision = select.decide(p, BackendPreference(("hopper",), only=True))
            assert decision is not None and decision.backward == expected


@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_inside_a_compiled_function(bias: bool) -> None:
    """torch.func's transforms: a backend was chosen as if none was wanted, and the LSE's gradient was left out."""
    q, k, v, weight = torch.randn(2, 5, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 2, 5)
    given = (q, k, v, torch.randn(2, 2, 5, 7)) if bias else (q, k, v)

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        out, lse = attention(*inputs[:3], attn_bias=inputs[3] if bias else None, return_lse=True)
        return out.cos().sum() + (lse * weight).sum()

    places = tuple(range(len(given)))

    def gradients(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = torch.func.grad(loss, argnums=places)(*inputs)
        return found

    leaves = [x.clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), expected, rtol=1e-5, atol=1e-5)


def test_advice_names_only_backends_that_compute_the_call() -> None:
    """flash and flash-attn-4 were advised where they refused the same call, and triton on a CPU."""
    rng = random.Random(7)
    for _ in range(60):
        explanation = explain_attention(
            arch=rng.choice(("RTX 2080", "A100", "H200", "B200", "RTX 5090", "cpu")),
            dtype=rng.choice((torch.bfloat16, torch.float32)),
            head_dim_qk=rng.choice((40, 72, 128, 192, 320)), head_dim_v=rng.choice((None, 64)),
            queries=rng.choice((1, 512)), needs_grad=rng.random() < 0.5,
            **rng.choice(({}, {"sinks": True}, {"alibi_slopes": True}, {"softcap": 30.0})),
        )  # fmt: skip
        results = explanation.columns[0].verdicts
        able = {one.name for one in results if one.verdict != "no"}
        for reason in (reason for one in results for reason in one.reasons):
            for advised in (change for change in reason.changes if isinstance(change, Use)):
                assert set(advised.names) <= able, str(reason)


def test_advice_behind_other_advice_names_such_backends_too() -> None:
    """triton was advised beside varlen_attention, and beside the CPU's kernel, where it refuses the call."""
    on_gpu = problem(dtype=torch.float64, mask=MaskSpec(documents=True))
    on_cpu = problem(None, layout="thd", compiling=True)
    fixes = {
        (v.name, reason.fix)
        for one in (on_gpu, on_cpu)
        for v in select.verdicts(one, BackendPreference())
        for reason in v.reasons
    }
    assert ("hopper", "use varlen_attention, or chunked") in fixes
    assert ("chunked", "use reference, or move the tensors to a GPU") in fixes


def test_advice_without_a_backend_that_would_do() -> None:
    reason = Reason("cuDNN takes head dims up to 128", use("triton", "flash"), "head dims up to 128", "sm_90")
    assert reason.fix == "use triton or flash, head dims up to 128, or sm_90"
    assert select._possible(reason, ["flash", "efficient"]).fix == "use flash, head dims up to 128, or sm_90"
    assert select._possible(reason, []).fix == "head dims up to 128, or sm_90"
    assert select._possible(Reason("it has no sinks", use("triton")), []).fix == "use triton"
