"""Values where they do not stand, and of other types: the error names the keyword, NumPy's numbers are taken."""

import inspect
import math
import operator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import powertrain
import powertrain.losses
import powertrain.parallel

X, W = torch.randn(2, 4, 8), torch.ones(8)
T = torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("rms_norm", (X, W, 1e-5), "rms_norm: eps is keyword-only; write rms_norm(x, weight, eps=1e-05)"),
        ("rms_norm", (X, W, None, 1e-5), "eps is keyword-only; write rms_norm(x, weight, bias, eps=1e-05)"),
        ("rms_norm", (X, W, None, X), "residual is keyword-only"),
        ("layer_norm", (X, W, W, 1e-5), "layer_norm: eps is keyword-only"),
        ("layer_norm", (X, 1e-5), "layer_norm: eps is keyword-only"),
        (
            "cross_entropy",
            (X, T, -100),
            "ignore_index is keyword-only; write cross_entropy(logits, target, ignore_index",
        ),
        ("cross_entropy", (X, T, "sum"), "reduction is keyword-only"),
        ("scaled_softmax", (X, 0.5), "scale is keyword-only"),
        ("attention", (X, X, X, True), "is_causal is keyword-only"),
        ("attention", (X[None], X[None], X[None], X), "attn_bias is keyword-only"),
    ],
)
def test_the_keyword_is_named(name: str, args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(powertrain, name)(*args)
    assert words in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("linear_activation", (X, W, "gelu", W), "bias is keyword-only; write linear_activation(x, weight, kind, bias"),
        ("swiglu", (X, X, W), "swiglu: bias is keyword-only"),
        ("geglu", (X, X, "tanh"), "order is keyword-only"),
        ("gelu", (X, "tanh"), "gelu: approximate is keyword-only; write gelu(x, approximate='tanh')"),
        (
            "rope_table",
            (8, 16, 1e4),
            "rope_table: base is keyword-only; write rope_table(rotary_dim, max_seqlen,",
        ),
        ("explain_attention", (X, X, X, "bshd"), "explain_attention: layout is keyword-only"),
        ("moe_load_balancing_loss", (X, T, "sigmoid"), "moe_load_balancing_loss: score is keyword-only"),
        ("lora", (torch.nn.Linear(4, 4), 8), "lora: rank is keyword-only; write lora(model, rank=8)"),
        ("patch", (torch.nn.Linear(4, 4), ("norm",)), "patch: kinds is keyword-only"),
        ("parallelize", (torch.nn.Linear(4, 4), None, torch.bfloat16), "parallelize: param_dtype is keyword-only"),
        ("parallelize_linears", (torch.nn.Linear(4, 4), None, {}, True), "sequence_parallel is keyword-only"),
        (
            "losses.simpo_loss",
            (W, W, 2.0),
            "simpo_loss: beta is keyword-only; write simpo_loss(chosen, rejected,",
        ),
        ("losses.dpo_loss", (W, W, 0.1), "dpo_loss: beta is keyword-only; write dpo_loss(chosen, rejected, beta=0.1)"),
        ("losses.reward_loss", (W, W, W), "reward_loss: margin is keyword-only"),
        ("parallel.all_gather_gemm", (X, W, None, W), "all_gather_gemm: bias is keyword-only"),
    ],
)
def test_the_keyword_is_named_by_functions_of_several_ops(name: str, args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        operator.attrgetter(name)(powertrain)(*args)
    assert words in str(caught.value)


def test_every_public_function_with_keywords_only_gives_a_hint() -> None:
    for module in (powertrain, powertrain.losses, powertrain.parallel):
        for name in module.__all__ if hasattr(module, "__all__") else vars(module):
            function = getattr(module, name)
            if not inspect.isfunction(function) or not function.__module__.startswith("powertrain"):
                continue
            kinds = [p.kind for p in inspect.signature(function).parameters.values()]
            if inspect.Parameter.KEYWORD_ONLY not in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
                continue
            with pytest.raises(TypeError, match="is keyword-only; write "):
                function(*(X for kind in kinds if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD), X)


def test_other_mistakes_are_as_they_were() -> None:
    with pytest.raises(TypeError, match="no_such"):
        powertrain.rms_norm(X, W, no_such=1)
    with pytest.raises(TypeError, match="missing"):
        powertrain.cross_entropy(X)
    with pytest.raises(ValueError, match="weight must have shape"):
        powertrain.rms_norm(X, W[:3])


def test_no_softcap() -> None:
    q = torch.randn(1, 4, 2, 8)
    lengths = torch.tensor([4], dtype=torch.int32)
    weight = torch.randn(5, 8)
    for softcap in (None, 0.0, 0):
        torch.testing.assert_close(powertrain.attention(q, q, q, softcap=softcap), powertrain.attention(q, q, q))
        decoded = powertrain.decode_attention(q[:, :1], q, q, lengths, softcap=softcap)
        torch.testing.assert_close(decoded, powertrain.decode_attention(q[:, :1], q, q, lengths))
        loss = powertrain.cross_entropy(X, T, softcap=softcap)
        torch.testing.assert_close(loss, powertrain.cross_entropy(X, T))
        loss = powertrain.linear_cross_entropy(X, weight, T % 5, softcap=softcap)
        torch.testing.assert_close(loss, powertrain.linear_cross_entropy(X, weight, T % 5))
    for function in (powertrain.cross_entropy, powertrain.attention):
        with pytest.raises(ValueError, match="softcap must be"):
            function(*((X, T) if function is powertrain.cross_entropy else (q, q, q)), softcap=-1.0)


def test_is_causal_of_the_softmax() -> None:
    for queries in (4, 7):
        x = torch.randn(2, queries, 7)
        seen = torch.ones(queries, 7, dtype=torch.bool).tril(7 - queries)
        expected = torch.softmax(x.masked_fill(~seen, float("-inf")), -1)
        torch.testing.assert_close(powertrain.scaled_softmax(x, is_causal=True), expected)


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("rope", (3,), "rope: q must be a tensor, got 3"),
        ("linear_activation", ([1.0], W, None), r"linear_activation: x must be a tensor, got \[1.0\]"),
        ("moe_load_balancing_loss", (X, [1]), r"moe_load_balancing_loss: experts must be a tensor, got \[1\]"),
        ("moe_update_bias_", ([1], X), r"moe_update_bias_: correction_bias must be a tensor, got \[1\]"),
    ],
)
def test_what_must_be_a_tensor_is_named(name: str, args: tuple[Any, ...], words: str) -> None:
    options = {"table": powertrain.rope_table(8, 9)} if name == "rope" else {}
    with pytest.raises(ValueError, match=words) as caught:
        getattr(powertrain, name)(*args, **options)
    # no AttributeError is shown above it
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: powertrain.rms_norm(X, W[1:]), r"rms_norm: weight must have shape \[8\]"),
        (lambda: powertrain.grouped_gemm(X[0], X[:, :3], T[:, 0]), "grouped_gemm: offsets must be int32, got int64"),
        (lambda: powertrain.moe_route(X[0], top_k=9), "moe_route: top_k must"),
    ],
)
def test_errors_inside_a_whole_compiled_function(call: Any, words: str) -> None:
    """Dynamo could not trace what looks for a better error, and said that alone."""
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(call, backend="eager", fullgraph=True)()


@pytest.mark.parametrize(
    "name, args, options",
    [
        ("rms_norm", (X, W), {"eps": 1e-3}),
        ("cross_entropy", (X, T), {"ignore_index": 5, "label_smoothing": 0.25}),
        ("scaled_softmax", (X,), {"scale": 0.5, "is_causal": True}),
        ("moe_route", (X[0],), {"top_k": 2, "num_groups": 2, "top_groups": 1, "normalize": True}),
        ("moe_permute", (X[0], T[0, :, None].int(), 3), {}),
        ("rope", (X[None],), {"table": powertrain.rope_table(8, 9), "offset": 4}),
        ("attention", (X[None], X[None], X[None]), {"is_causal": True, "softcap": 2.0, "window_size": (1, 0)}),
        ("varlen_attention", (X, X, X, torch.tensor([0, 2])), {"max_seqlen_q": 2, "max_seqlen_k": 2}),
    ],
)
def test_numbers_of_numpy_are_taken(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    types = {bool: np.bool_, int: np.int64, float: np.float64}

    def of_numpy(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(of_numpy, value))
        return types[type(value)](value) if type(value) in types else value

    function = getattr(powertrain, name)
    expected = function(*args, **options)
    results = [function(*map(of_numpy, args), **{key: of_numpy(value) for key, value in options.items()})]
    if name == "rms_norm":
        results.append(function(*args, eps=np.longdouble(options["eps"])))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


C = torch.full((4,), -1.0)


@pytest.mark.parametrize(
    "name, args, options, words",
    [
        # would be true
        ("rms_norm", (X, W), {"zero_centered": "false"}, "rms_norm: zero_centered must be True or False, got 'false'"),
        ("attention", (X[None],) * 3, {"is_causal": []}, r"attention: is_causal must be True or False, got \[\]"),
        ("moe_route", (X[0],), {"top_k": 2, "normalize": None}, "normalize must be True or False, got None"),
        # float() would take it
        ("scaled_softmax", (X,), {"scale": "0.5"}, "scaled_softmax: scale must be a number, got '0.5'"),
        ("decode_attention", (X[:1, :1, None],) * 3 + (T[:1, 0],), {"scale": b"1"}, "scale must be a number, got b'1'"),
        # raised somewhere inside
        ("cross_entropy", (X, T), {"label_smoothing": [0.1]}, r"label_smoothing must be a number, got \[0.1\]"),
        ("moe_route", (X[0],), {"top_k": np.array([1, 2])}, r"top_k must be an integer, got array\(\[1, 2\]\)"),
        ("moe_route", (X[0],), {"top_k": 2**70}, f"top_k must be 1 to 8, .* got {2**70}"),
        ("merge_attentions", (3, 3), {}, "outs must be a sequence of tensors, got 3"),
        ("attention_backward", (X[None],) * 4 + (X[None] > 0, X), {}, "out must be .* of 16 bits or more, got bool"),
        ("rope", (X[None],), {"table": X}, "rope: table must be one that rope_table made, got a float32 tensor"),
        ("rope_table", ("8", 16), {}, "rope_table: rotary_dim must be an integer, got '8'"),
        ("moe_permute", (X[0], T[0, :, None], 2.5), {}, "moe_permute: num_experts must be an integer, got 2.5"),
        ("moe_update_bias_", (W, W.to("meta")), {}, "tokens_per_expert must be on correction_bias's device cpu, got"),
        ("moe_update_bias_", (W.long(), W), {}, "correction_bias must be float32, float16 or bfloat16, got int64"),
        ("explain_attention", (), {"queries": "64"}, "explain_attention: queries must be an integer, got '64'"),
        ("explain_attention", (), {"num_heads": -2}, "explain_attention: num_heads must be at least 1, got -2"),
        ("lora", (3,), {}, "lora: model must be a Module, got 3"),
        ("clip_grad_norm_", ([3], 1.0), {}, r"clip_grad_norm_: parameters must be .*, got \[3\]"),
        ("clip_grad_norm_", ([W], -1.0), {}, "clip_grad_norm_: max_norm must be at least 0, got -1.0"),
        ("clip_grad_norm_", ([W], float("nan")), {}, "clip_grad_norm_: max_norm must be at least 0, got nan"),
        ("clip_grad_norm_", ([W], "1"), {}, "clip_grad_norm_: max_norm must be a number, got '1'"),
        ("AdamW", ([W],), {"master_weights": "no"}, "AdamW: master_weights must be True or False, got 'no'"),
        ("AdamW", (3,), {}, "AdamW: params must be .*, got 3"),
        ("nn.Router", (8, 4, 5), {}, "Router: top_k must be 1 to 4, the experts of 1 groups, got 5"),
        ("nn.Router", (8, "4", 2), {}, "Router: num_experts must be an integer, got '4'"),
        ("nn.MLP", (8, 16), {"kind": "gelu2"}, "MLP: kind must be one of 'gelu', .* got 'gelu2'"),
        ("nn.RMSNorm", (8,), {"eps": "1e-6"}, "RMSNorm: eps must be a number, got '1e-6'"),
        ("nn.LayerNorm", (-8,), {}, "LayerNorm: hidden_size must be at least 0, got -8"),
        ("losses.dpo_loss", (C, C.long(), C, C), {}, "dpo_loss: rejected must be floating-point, .* got int64"),
        ("losses.ipo_loss", (C, C, C.to("meta"), C), {}, "ref_chosen must be on chosen's device cpu, got meta"),
        ("losses.kto_loss", (C, C, C > 0, C[:2]), {}, "kto_loss: kl must have shape .* got .2."),
        ("losses.policy_loss", (C, C, C, T[0]), {"clip": 0.2}, "clip must be a tuple of 2 numbers, got 0.2"),
        ("losses.mean_by_sequence", ([1.0], T[0], 2), {}, r"mean_by_sequence: values must be a tensor, got \[1.0\]"),
    ],
)  # fmt: skip
def test_what_is_of_the_wrong_kind_is_named(
    name: str, args: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        operator.attrgetter(name)(powertrain)(*args, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_errors_of_the_machine_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(powertrain.losses, "_check_alike", full)
    with pytest.raises(torch.OutOfMemoryError):
        powertrain.losses.reward_loss([1.0], C)  # type: ignore[arg-type]


def test_flags_and_numbers_of_other_types_are_taken() -> None:
    expected = powertrain.scaled_softmax(X, scale=1.0, is_causal=True)
    for flag in (1, np.bool_(True), torch.tensor(True)):
        assert torch.equal(powertrain.scaled_softmax(X, scale=Fraction(1), is_causal=flag), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda v: powertrain.scaled_softmax(X, scale=v),
        lambda v: powertrain.rms_norm(X, W, eps=v),
        lambda v: powertrain.cross_entropy(X, T, z_loss=v),
        lambda v: powertrain.cross_entropy(X, T, softcap=v),
        lambda v: powertrain.gated_activation(X, "clamped_swiglu", alpha=v),
        lambda v: powertrain.moe_route(X[0], top_k=2, scaling_factor=v)[0],
    ],
)
def test_a_number_in_a_tensor_is_read_in_each_call(call: Any) -> None:
    """Calls on a CPU that repeat another were answered with the number of the first."""
    for value in (0.25, 0.5, 0.75, 0.5):
        torch.testing.assert_close(call(torch.tensor(value)), call(value))
        torch.testing.assert_close(call(Fraction(value)), call(value))


def test_an_ignore_index_in_a_tensor() -> None:
    """Kernels took its address for the number, and did not compile."""
    target = torch.tensor([1, 2, 1, 3]).expand(2, 4)
    for call in (
        lambda index: powertrain.cross_entropy(X, target, ignore_index=index),
        lambda index: powertrain.linear_cross_entropy(X, W.expand(5, 8), target, ignore_index=index),
        lambda index: powertrain.linear_log_probs(X, W.expand(5, 8), target, ignore_index=index).log_probs,
    ):
        for index in (1, 2):
            torch.testing.assert_close(call(torch.tensor(index)), call(index))


def test_a_number_that_wants_a_gradient_is_refused() -> None:
    """Plain PyTorch gave it one, kernels none without a word."""
    number = torch.tensor(0.5, requires_grad=True)
    for call in (
        lambda: powertrain.scaled_softmax(X, scale=number),
        lambda: powertrain.linear_log_probs(X, X[0], T, temperature=number),
    ):
        with pytest.raises(ValueError, match=r"(scale|temperature) must be a number or a tensor that requires no"):
            call()
        with torch.no_grad():
            call()


Q, D = X[:, :, None], X.transpose(1, 2)
FLOATS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("rms_norm", (X, W), {}, "eps"), ("layer_norm", (X, W), {}, "eps"), ("rope_table", (8, 16), {}, "base"),
    ("scaled_softmax", (X,), {}, "scale"), ("gated_activation", (X, "clamped_swiglu"), {}, "alpha"),
    ("linear_activation", (X, D[0].T.repeat(2, 1), "clamped_swiglu"), {"up_weight": D[0].T.repeat(2, 1)}, "alpha"),
    ("attention", (Q, Q, Q), {}, "scale softcap dropout_p"), ("bias_dropout_add", (X, W, X), {}, "p"),
    ("decode_attention", (Q[:, :1], Q, Q, T[:, 0].int()), {}, "scale softcap"),
    ("cross_entropy", (X, T), {}, "z_loss label_smoothing softcap"),
    ("linear_cross_entropy", (X, X[0], T), {}, "z_loss label_smoothing softcap"),
    ("linear_log_probs", (X, X[0], T), {}, "temperature softcap"),
    ("lora_linear", (X, X[0], X[0, :2], torch.ones(4, 2)), {}, "scale"),
    ("lora", (torch.nn.Sequential(torch.nn.Linear(4, 4)),), {}, "alpha dropout"),
    ("moe_route", (X[0],), {"top_k": 2}, "scaling_factor"), ("moe_update_bias_", (W.clone(), W), {}, "rate"),
    ("AdamW", ([W],), {}, "lr eps weight_decay betas"), ("nn.RMSNorm", (8,), {}, "eps"),
    ("nn.Block", (torch.nn.Identity(),) * 4, {}, "dropout"), ("nn.SelfAttention", (8, 2), {}, "dropout qk_norm_eps"),
    ("losses.dpo_loss", (C,) * 4, {}, "beta label_smoothing"), ("losses.simpo_loss", (C, C), {}, "beta gamma"),
    ("losses.kto_loss", (C, C, C > 0, C[0]), {}, "beta desirable_weight undesirable_weight"),
    ("losses.reward_loss", (C, C), {}, "center"), ("losses.distillation_loss", (X[..., 0], T), {}, "divisor"),
    ("losses.policy_loss", (X[..., 0], X[..., 0], C, T), {"ref_log_probs": X[..., 0]}, "kl_weight divisor"),
]  # fmt: skip


@pytest.mark.parametrize("name, args, options, floats", FLOATS, ids=[name for name, *_ in FLOATS])
def test_numbers_that_are_not_finite_are_refused(
    name: str, args: tuple[Any, ...], options: dict[str, Any], floats: str
) -> None:
    function = operator.attrgetter(name)(powertrain)
    for argument in floats.split():
        for value in (math.nan, math.inf, np.float64("nan"), np.float32("-inf")):
            given = (0.9, value) if argument == "betas" else value
            for _ in range(3):  # a call that was refused is not kept for later ones
                with pytest.raises((ValueError, TypeError), match=rf"{function.__name__}: {argument} must be "):
                    function(*args, **options, **{argument: given})


def test_infinity_is_no_bound() -> None:
    w = torch.nn.Parameter(W.clone())
    w.grad = torch.full_like(w, 3.0)
    assert powertrain.clip_grad_norm_([w], math.inf, norm_type=math.inf) == 3 and w.grad.eq(3).all()
    for bound in (math.nan, -1.0):
        with pytest.raises(ValueError, match="clip must be at least 0"):
            powertrain.losses.policy_loss(X[..., 0], X[..., 0], C, T, clip=(bound, 0.2))


def test_groups_of_an_optimizer_have_finite_numbers() -> None:
    w = torch.nn.Parameter(W.clone())
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(ValueError, match=f"AdamW: {name} must be finite, got nan"):
            powertrain.AdamW([{"params": [w], name: math.nan}])
    optimizer = powertrain.AdamW([w])
    with pytest.raises(ValueError, match="AdamW: lr must be finite, got inf"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(W.clone())], "lr": math.inf})
    assert len(optimizer.param_groups) == 1
