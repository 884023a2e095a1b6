"""TransformerEngine's modules outside of FP8, against PyTorch in float64: values, every gradient, layout, errors."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.compat.transformer_engine import pytorch as te
from tests.compat.plain import attend, band, same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")
HERE: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float64}
ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATES = {
    "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": torch.sigmoid,
}  # fmt: skip


def spread(module: nn.Module) -> nn.Module:
    """Parameters far from their first values, so that each of them shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.3, 0.5)
    return module


def norm(x: Tensor, p: dict[str, Tensor], prefix: str, zero_centered: bool) -> Tensor:
    weight, bias = p[f"{prefix}layer_norm_weight"], p.get(f"{prefix}layer_norm_bias")
    weight = weight + 1 if zero_centered else weight
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def act(x: Tensor, kind: str) -> Tensor:
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind](x)
    gate, up = x.chunk(2, -1)
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
        return gate * torch.sigmoid(1.5 * gate) * (up + 1)
    of = GATES[kind]
    return (ACTIVATIONS[of](gate) if isinstance(of, str) else of(gate)) * up


def whole(result: Any) -> Tensor:
    """All results in one tensor."""
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([part.flatten() for part in parts])


def compare(module: nn.Module, expected: Any, inputs: list[Tensor]) -> None:
    """Also the gradients of all parameters."""
    parameters = dict(module.named_parameters())

    def ours(*args: Tensor) -> Tensor:
        return whole(module(*args[: len(inputs)]))

    def plain(*args: Tensor) -> Tensor:
        return whole(expected(dict(zip(parameters, args[len(inputs) :], strict=True)), *args[: len(inputs)]))

    same(ours, plain, [*inputs, *parameters.values()])


@pytest.mark.parametrize("seed", range(8))
def test_linear_and_layernorm_linear(seed: int) -> None:
    draw = random.Random(seed)
    K, N = draw.choice([1, 7, 16]), draw.choice([2, 6, 18])
    split: Any = draw.choice([None, ("a", "b_"), {"a": 1, "b": N - 1}])
    prefixes = [""] if split is None else ["a_", "b_"]
    bias, back, normalized, zero = (draw.random() < 0.5 for _ in range(4))
    options = {"bias": bias, "return_bias": back, "parameters_split": split, **HERE}
    leading = draw.choice([(5,), (2, 3), (1, 2, 3)])
    (x,) = tensors((*leading, K))
    (plain_x,) = tensors((0, K))

    def product(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        weight = torch.cat([p[f"{prefix}weight"] for prefix in prefixes])
        b = torch.cat([p[f"{prefix}bias"] for prefix in prefixes]) if bias else x.new_zeros(0)
        y = x @ weight.T
        return (y, b) if back else (y + b if bias else y,)

    for inputs in (x, plain_x):
        compare(spread(te.Linear(K, N, **options)), product, [inputs])
    kind = "LayerNorm" if normalized else "RMSNorm"
    module = te.LayerNormLinear(
        K, N, normalization=kind, zero_centered_gamma=zero, return_layernorm_output=True, **options
    )

    def normed(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        y = norm(x, p, "", zero)
        return (*product(p, y), y)

    if K > 1:  # the norm of one element is a constant, and its gradient rounding alone
        compare(spread(module), normed, [x])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES, "clamped_swiglu"])
def test_layernorm_mlp(activation: str) -> None:
    draw = random.Random(activation)
    bias, back, zero, recompute = (draw.random() < 0.5 for _ in range(4))
    params = {"limit": 0.7, "alpha": 1.5} if activation == "clamped_swiglu" else None
    module = te.LayerNormMLP(
        6, 10, bias=bias, return_bias=back, normalization=draw.choice(["LayerNorm", "RMSNorm"]), activation=activation,
        activation_params=params, zero_centered_gamma=zero, checkpoint=recompute, return_layernorm_output=True, **HERE,
    )  # fmt: skip

    def expected(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        y = norm(x, p, "", zero)
        out = act(F.linear(y, p["fc1_weight"], p.get("fc1_bias")), activation) @ p["fc2_weight"].T
        b = p["fc2_bias"] if bias else x.new_zeros(0)
        return (out, b, y) if back else (out + b if bias else out, y)

    compare(spread(module), expected, tensors((3, 2, 6)))


@pytest.mark.parametrize("seed", range(3))
def test_grouped_linear_and_padding(seed: int) -> None:
    draw = random.Random(seed)
    splits = [draw.choice([0, 1, 5]) for _ in range(3)]
    rows, beyond = sum(splits), draw.choice([0, 2])
    bias, back = draw.random() < 0.7, draw.random() < 0.4
    module = spread(te.GroupedLinear(3, 4, 6, bias=bias, return_bias=back, **HERE))
    ends = [sum(splits[: i + 1]) for i in range(3)]

    def ours(x: Tensor, *_: Tensor) -> Tensor:
        sizes = splits if seed else torch.tensor(splits)
        result = module(x, sizes)
        return whole((result[0], *result[1])) if back else result.flatten()

    def expected(x: Tensor, *p: Tensor) -> Tensor:
        named = dict(zip(dict(module.named_parameters()), p, strict=True))
        parts = [x[end - m : end] @ named[f"weight{i}"].T for i, (m, end) in enumerate(zip(splits, ends, strict=True))]
        biases = [named[f"bias{i}"] if bias else x.new_zeros(0) for i in range(3)]
        if bias and not back:
            parts = [part + b for part, b in zip(parts, biases, strict=True)]
        y = torch.cat([*parts, x.new_zeros(beyond, 6)])
        return whole((y, *biases)) if back else y.flatten()

    (x,) = tensors((rows + beyond, 4))
    same(ours, expected, [x, *module.parameters()])
    # plain tensors as its parameters, as FSDP has them too
    given = dict(module.named_parameters())
    theirs = torch.func.functional_call(module, {name: value.detach() for name, value in given.items()}, (x, splits))
    torch.testing.assert_close(whole((theirs[0], *theirs[1])) if back else theirs.flatten(), ours(x))
    pad, unpad = te.Fp8Padding(3, 4), te.Fp8Unpadding(3, 4)
    (x,) = tensors((rows, 5))
    padded, sizes = pad(x, splits)
    assert sizes == [-(-m // 4) * 4 for m in splits] and padded.shape[0] == sum(sizes)
    starts = [sum(sizes[:i]) for i in range(3)]
    for i, m in enumerate(splits):
        torch.testing.assert_close(padded[starts[i] : starts[i] + m], x[ends[i] - m : ends[i]])
        assert not padded[starts[i] + m : starts[i] + sizes[i]].any()
    same(lambda x: unpad(pad(x, splits)[0], splits), lambda x: x * 1, [x])
    assert te.Fp8Padding(3).align_size == 16


def heads(y: Tensor, parts: int, groups: int, interleaved: bool) -> list[Tensor]:
    """[..., parts, groups or groups, parts, 4] cut into queries, key and value (or key and value)."""
    shape = (groups, parts, 4) if interleaved else (parts, groups, 4)
    y = y.unflatten(-1, shape).movedim(-3 if not interleaved else -2, 0)
    queries = [*y[:-2]]
    q = torch.stack(queries, -2 if interleaved else -3).flatten(-3, -2) if queries else y[0]
    return [q, y[-2], y[-1]]


@pytest.mark.parametrize("seed", range(10))
def test_multihead_attention(seed: int) -> None:
    draw = random.Random(seed)
    cross, normed, fused, interleaved, bias = (draw.random() < 0.5 for _ in range(5))
    h, g = draw.choice([(2, 2), (4, 2), (3, 1)])
    layout = draw.choice(["sbhd", "bshd"])
    qk = draw.choice([None, "L2Normalization", "RMSNorm", "LayerNorm"])
    before = draw.random() < 0.5
    module = te.MultiheadAttention(
        10, h, 4, attention_dropout=0.0, num_gqa_groups=g, input_layernorm=normed, fuse_qkv_params=fused,
        qkv_weight_interleaved=interleaved, attention_type="cross" if cross else "self", bias=bias, qkv_format=layout,
        attn_mask_type="no_mask" if cross else "causal", return_bias=True, return_layernorm_output=True,
        qk_norm_type=qk, qk_norm_before_rope=before, **HERE,
    )  # fmt: skip
    spread(module)
    s, t, b = 5, 6 if cross else 5, 2
    x, memory = tensors((s, b, 10) if layout == "sbhd" else (b, s, 10), (t, b, 10) if layout == "sbhd" else (b, t, 10))
    rope = te.RotaryPositionEmbedding(4)(8).double()

    def linear(p: dict[str, Tensor], x: Tensor, name: str, parts: tuple[str, ...]) -> Tensor:
        names = [f"{name}." if f"{name}.weight" in p else f"{name}.{part}_" for part in parts]
        names = list(dict.fromkeys(names))
        weight = torch.cat([p[f"{n}weight"] for n in names])
        return F.linear(x, weight, torch.cat([p[f"{n}bias"] for n in names]) if bias else None)

    def turned(x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if layout == "sbhd" else x  # [b, s, h, 4]
        angles = rope[: x.shape[1], 0]
        return x * angles.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * angles.sin()

    def qk_normed(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        if qk is None:
            return x
        if qk == "L2Normalization":
            return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        if qk == "LayerNorm":
            return F.layer_norm(x, (4,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-6)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * p[f"{name}.weight"]

    def expected(p: dict[str, Tensor], x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        first = ("layernorm_query" if normed else "query_layer") if cross else "layernorm_qkv" if normed else "qkv"
        y = norm(x, p, f"{first}.", False) if normed else x
        layers = fused and interleaved
        if cross:
            q = linear(p, y, first, ("query",)).unflatten(-1, (h, 4))
            _, k, v = heads(linear(p, more[0], "key_value", ("key", "value")), 2, g, layers)
        else:
            q, k, v = heads(linear(p, y, first, ("query", "key", "value")), h // g + 2, g, layers)
        if before:
            q, k = qk_normed(q, p, "q_norm"), qk_normed(k, p, "k_norm")
        q, k = turned(q), turned(k)
        if not before:
            q, k = qk_normed(q, p, "q_norm"), qk_normed(k, p, "k_norm")
        v = v.transpose(0, 1) if layout == "sbhd" else v
        out, _ = attend(q, k, v, None if cross else band(s, s, causal=True))
        out = out.transpose(0, 1) if layout == "sbhd" else out
        back = p["proj.bias"] if bias else x.new_zeros(0)
        return (out.flatten(-2) @ p["proj.weight"].T, back, *((y,) if normed else ()))

    parameters = dict(module.named_parameters())
    inputs = [x, memory] if cross else [x]

    def ours(*args: Tensor) -> Tensor:
        kwargs = {"encoder_output": args[1]} if cross else {}
        return whole(module(args[0], rotary_pos_emb=rope.float(), **kwargs))

    def plain(*args: Tensor) -> Tensor:
        p = dict(zip(parameters, args[len(inputs) :], strict=True))
        return whole(expected(p, *args[: len(inputs)]))

    results = []
    for function in (ours, plain):
        out = function(*inputs, *parameters.values())
        weights = torch.arange(out.numel(), dtype=out.dtype).cos()
        used = [*inputs, *parameters.values()]
        results.append((out, *torch.autograd.grad((out * weights).sum(), used, allow_unused=True)))
    for one, other in zip(*results, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)  # the angles are float32


@pytest.mark.parametrize(
    "options",
    [
        {}, {"parallel_attention_mlp": True}, {"output_layernorm": True}, {"layer_type": "decoder"},
        {"apply_residual_connection_post_layernorm": True, "layer_type": "decoder"}, {"bias": False},
    ],
    ids=lambda o: "-".join(o) or "plain",
)  # fmt: skip
def test_transformer_layer(options: dict[str, Any]) -> None:
    """The sum of its parts, each compared above."""
    layer = spread(te.TransformerLayer(8, 12, 2, hidden_dropout=0.0, attention_dropout=0.0, **options, **HERE))
    x, memory = tensors((5, 2, 8), (6, 2, 8))
    post = "apply_residual_connection_post_layernorm" in options

    def expected(x: Tensor, memory: Tensor, *_: Tensor) -> Tensor:
        def added(branch: tuple[Tensor, ...], x: Tensor) -> Tensor:
            y = branch[0] + branch[1] if branch[1].numel() else branch[0]
            return y + (branch[2] if post else x)

        first = layer.self_attention(x, attn_mask_type="causal")
        if layer.parallel_attention_mlp:
            return x + first + layer.layernorm_mlp(x)
        x = added(first, x)
        if layer.layer_type == "decoder":
            x = added(layer.inter_attention(x, encoder_output=memory), x)
        x = added(layer.layernorm_mlp(x), x)
        return layer.layernorm(x) if layer.output_layernorm else x

    leaves = [x, *layer.parameters()]
    same(lambda x, *_: layer(x, encoder_output=memory), lambda x, *p: expected(x, memory, *p), leaves)


def test_dropout_and_drop_path() -> None:
    layer = te.TransformerLayer(8, 12, 2, hidden_dropout=0.5, attention_dropout=0.1, drop_path_rate=0.5, **HERE)
    (x,) = tensors((64, 2, 8), grad=False)
    branches = layer._added((x, x[0, 0], x), torch.zeros(()))  # type: ignore[operator]
    dropped = (branches == x).flatten(1).all(1).float().mean()
    assert 0.2 < dropped < 0.8
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x))
    torch.testing.assert_close(layer._added((x, None), x), 2 * x)  # type: ignore[operator]


def test_state_dicts() -> None:
    """Names of TransformerEngine's checkpoints; those of nn.Linear load too."""
    names = list(te.LayerNormMLP(4, 6, activation="swiglu", **HERE).state_dict())
    parts = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert names == [*parts, "_extra_state"]
    assert list(te.GroupedLinear(2, 4, 6, **HERE).state_dict()) == [
        "weight0", "bias0", "weight1", "bias1", "_extra_state",
    ]  # fmt: skip
    plain, ours = nn.Linear(4, 6, dtype=torch.float64), te.Linear(4, 6, **HERE)
    ours.load_state_dict(plain.state_dict())
    (x,) = tensors((3, 4))
    torch.testing.assert_close(ours(x), plain(x))
    layer = te.TransformerLayer(8, 12, 2, output_layernorm=True, qk_norm_type="RMSNorm", **HERE)
    state = layer.state_dict()
    for name in ("layernorm", "self_attention.q_norm", "self_attention.core_attention"):
        state[f"{name}._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    layer.load_state_dict(state)
    meta = te.Linear(4, 6, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert meta.weight.std() < 0.1 and not meta.bias.any()


def test_initialization() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    drawn = []
    for _ in range(2):
        tracker.set_states({"model-parallel-rng": torch.manual_seed(5).get_state()})
        drawn.append(te.Linear(4, 6, get_rng_state_tracker=lambda: tracker, device="cpu").weight)
    assert torch.equal(*drawn)
    ones = te.LayerNormMLP(4, 6, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_, **HERE)
    assert (
        bool((ones.fc1_weight == 1).all()) and not ones.fc2_weight.any() and bool((ones.layer_norm_weight == 1).all())
    )


def test_torch_autocast() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    layer = te.LayerNormMLP(6, 8, activation="geglu", device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and layer.fc1_weight.grad is not None and layer.fc1_weight.grad.dtype == x.dtype


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "MultiheadAttention", "GroupedLinear"])
def test_torch_autocast_of_joined_weights_of_another_dtype(kind: str, bias: bool) -> None:
    here: dict[str, Any] = {"bias": bias, "device": "cpu", "params_dtype": torch.float16}
    if kind == "GroupedLinear":
        layer, more = te.GroupedLinear(2, 6, 8, **here), ([3, 1],)
    elif kind == "MultiheadAttention":
        layer, more = te.MultiheadAttention(6, 2, attention_dropout=0.0, **here), ()
    else:
        layer, more = getattr(te, kind)(6, 8, parameters_split={"query": 3, "key": 5}, **here), ()
    spread(layer)
    x = torch.randn(4, 1, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, *more)
    grads = torch.autograd.grad(y.float().sum(), list(layer.parameters()))
    wide = layer.float()
    expected = wide(x, *more)
    wanted = torch.autograd.grad(expected.sum(), list(wide.parameters()))
    assert y.dtype is torch.bfloat16
    for found, right in zip((y, *grads), (expected, *wanted), strict=True):
        near = 0.05 * (1 + float(right.detach().abs().max()))
        torch.testing.assert_close(found.float(), right, rtol=0.05, atol=near)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_under_torch_autocast(kind: str, params_dtype: torch.dtype, dtype: torch.dtype) -> None:
    layer = spread(getattr(te, kind)(6, device="cpu", params_dtype=params_dtype))
    x = torch.randn(3, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), layer.double()(x.double()), rtol=0.02, atol=0.04)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_inputs_of_another_size_are_named(kind: str) -> None:
    layer = getattr(te, kind)(*([2] if kind == "GroupedLinear" else []), 4, 6, device="cpu")
    with pytest.raises(ValueError, match=rf"{kind}: inp must have a last dim of 4, got \[3, 8\]"):
        layer(torch.zeros(3, 8), *([[3, 3]] if kind == "GroupedLinear" else []))


def test_parts_of_one_name_and_no_heads_are_refused() -> None:
    # query and query_ are one parameter: half of the outputs were missing
    with pytest.raises(ValueError, match="Linear: parameters_split must have names of different parameters, got"):
        te.Linear(4, 6, parameters_split=("query", "query_"), device="cpu")
    with pytest.raises(ValueError, match="MultiheadAttention: num_attention_heads must be positive, got 0"):
        te.MultiheadAttention(8, 0, device="cpu")


def test_output_layernorm_under_torch_autocast() -> None:
    layer = te.TransformerLayer(8, 12, 2, output_layernorm=True, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 2, 8)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fuse_wgrad_accumulation(dtype: torch.dtype) -> None:
    layer = te.Linear(6, 8, fuse_wgrad_accumulation=True, params_dtype=dtype, device="cpu")
    layer.weight.main_grad = torch.ones(8, 6, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.randn(5, 2, 6, dtype=dtype)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    expected = 1 + x.flatten(0, 1).to(layer.weight.main_grad.dtype).sum(0).expand(8, 6)
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: te.Linear(4, 6, tp_size=2, **HERE), "Linear: tp_size = 2 is not supported"),
        (lambda: te.LayerNormMLP(4, 6, delay_wgrad_compute=True, **HERE), "delay_wgrad_compute = True"),
        (lambda: te.Linear(4, 6, **HERE)(torch.zeros(1, 4).double(), fp8_output=True), "fp8_output = True"),
        (lambda: te.GroupedLinear(2, 4, 6, single_grouped_weight=True, **HERE), "single_grouped_weight = True"),
        (
            lambda: te.GroupedLinear(2, 4, 6, **HERE)(torch.zeros(1, 4).double(), [1, 0], out=torch.zeros(1, 6)),
            "GroupedLinear: out = ",
        ),
    ],
)  # fmt: skip
def test_refused(made: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        made()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: te.Linear(4, 6, **HERE)(torch.zeros(1, 4)), "Linear: inp must have the parameters' dtype float64"),
        (lambda: te.Linear(4, 6, parameters_split={"a": 5}, **HERE), "parameters_split must .* out_features 6"),
        (lambda: te.Linear(4, 6, parallel_mode="both", **HERE), "parallel_mode must be one of None, 'column', 'row'"),
        (lambda: te.LayerNormMLP(4, 6, activation="tanh", **HERE), "activation must be one of"),
        (lambda: te.LayerNormLinear(4, 6, normalization="Norm", **HERE), "normalization must be one of"),
        (lambda: te.LayerNormMLP(4, 6, activation_params={"limit": 1}, **HERE), "activation_params must be None"),
        (lambda: te.GroupedLinear(2, 4, 6, **HERE)(torch.zeros(1, 4).double(), [1, 1]), "m_splits must add up"),
        (lambda: te.GroupedLinear(2, 4, 6, **HERE)(torch.zeros(1, 4).double(), [1]), "m_splits must have shape"),
        (lambda: te.Fp8Padding(2)(torch.zeros(1, 4), [1]), "Fp8Padding: m_splits must have num_gemms 2 sizes, got 1"),
        (lambda: te.MultiheadAttention(8, 4, num_gqa_groups=3, **HERE), "num_gqa_groups must divide"),
        (lambda: te.MultiheadAttention(8, 2, attention_type="cross", **HERE)(torch.zeros(1, 1, 8).double()), "encoder"),
        (lambda: te.TransformerLayer(8, 8, 2, layer_type="decoder", parallel_attention_mlp=True, **HERE), "parallel_a"),
    ],
)  # fmt: skip
def test_errors(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_take_margins_of_sms(name: str) -> None:
    x = torch.randn(2, 8)
    with_margin = getattr(te.ops, name)(8, device="cpu", sm_margin={"forward": 4, "backward": 8, "inference": 0})
    torch.testing.assert_close(with_margin(x), getattr(te, name)(8, device="cpu")(x))
