"""Liger's functions and modules against plain PyTorch in float64, forward and backward; models through `patch`."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from powertrain.compat.liger_kernel import transformers as liger
from powertrain.compat.liger_kernel.transformers import functional as lf
from powertrain.compat.liger_kernel.transformers.rms_norm import LigerRMSNormForGemma
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_norms(offset: float, casting: str) -> None:
    x, r, w, b = tensors((2, 3, 8), (2, 3, 8), (8,), (8,))
    plain = lambda x, w: F.rms_norm(x, (8,), w + offset, 1e-5)  # noqa: E731
    same(lambda x, w: lf.liger_rms_norm(x, w, 1e-5, offset, casting), plain, [x, w])
    added = lambda x, r, w: torch.cat(lf.liger_fused_add_rms_norm(x, r, w, 1e-5, offset, casting))  # noqa: E731
    same(added, lambda x, r, w: torch.cat((plain(x + r, w), x + r)), [x, r, w])
    same(lambda x, w, b: lf.liger_layer_norm(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, (8,), w, b), [x, w, b])
    with pytest.raises(ValueError, match="casting_mode"):
        lf.liger_rms_norm(x, w, 1e-5, casting_mode="other")


def test_norm_modules() -> None:
    x, r = tensors((2, 3, 8), (2, 3, 8))
    same(liger.LigerRMSNorm(8).double(), lambda x: F.rms_norm(x, (8,), None, 1e-6), [x])
    same(LigerRMSNormForGemma(8).double(), lambda x: F.rms_norm(x, (8,), None, 1e-6), [x])
    assert liger.LigerRMSNorm(8, elementwise_affine=False).double()(x).shape == x.shape
    same(liger.LigerLayerNorm(8).double(), lambda x: F.layer_norm(x, (8,), eps=1e-6), [x])
    y, total = liger.LigerFusedAddRMSNorm(8).double()(x, r)
    torch.testing.assert_close((y, total), (F.rms_norm(x + r, (8,), None, 1e-6), x + r))


def test_activations_and_softmax() -> None:
    a, b = tensors((2, 3, 8), (2, 3, 8))
    same(lf.liger_swiglu, lambda a, b: F.silu(a) * b, [a, b])
    same(lf.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, [a, b])
    same(liger.LigerReLUSquared(), lambda a: F.relu(a).square(), [a])
    same(liger.LigerSoftmax(), lambda a: F.softmax(a, -1), [a])


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_rope(batched: bool, rotary_dim: int | None) -> None:
    q, k = tensors((2, 4, 5, 8), (2, 2, 5, 8))
    size = rotary_dim or 8
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 9]]) if batched else torch.arange(5)[None]
    angles = positions[..., None] * 50.0 ** -(torch.arange(size // 2) * 2 / size)
    cos, sin = (x.repeat(1, 1, 2) for x in (angles.cos(), angles.sin()))

    def turned(x: Tensor) -> Tensor:
        c, s, part = cos[:, None].double(), sin[:, None].double(), x[..., :size]
        a, b = part.chunk(2, -1)
        return torch.cat((part * c + torch.cat((-b, a), -1) * s, x[..., size:]), -1)

    def both(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(liger.liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=rotary_dim), 1)

    same(both, lambda q, k: torch.cat((turned(q), turned(k)), 1), [q, k])


def test_rope_in_float64() -> None:
    q, k = tensors((1, 2, 5, 8), (1, 1, 5, 8))
    angles = torch.randn(1, 5, 4, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    # tables that were rounded to float32 are off by 1e-8
    for found, x in zip(liger.liger_rotary_pos_emb(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(found, turned(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("cos", "sin", "said"),
    [
        ((4, 8), (4, 8), r"cos must have shape \[1 or 3, 4, rotary dim\], got \[4, 8\]"),
        ((1, 5, 8), (1, 5, 8), r"cos must have shape .*, got \[1, 5, 8\]"),
        ((2, 4, 8), (2, 4, 8), r"cos must have shape .*, got \[2, 4, 8\]"),
        # the first four channels of sin were taken
        ((1, 4, 8), (1, 4, 6), r"sin must have shape \[1, 4, 8\] \(shape of cos\), got \[1, 4, 6\]"),
    ],
    ids=str,
)
def test_rope_refuses_tables(cos: tuple[int, ...], sin: tuple[int, ...], said: str) -> None:
    q = torch.zeros(3, 2, 4, 8)
    with pytest.raises(ValueError, match=f"liger_rope: {said}"):
        liger.liger_rotary_pos_emb(q, q, torch.ones(cos), torch.ones(sin))


def test_z_loss_of_capped_logits_in_16_bits() -> None:
    logits = (torch.randn(6, 5) * 20).bfloat16()
    loss = liger.LigerCrossEntropyLoss(lse_square_scale=1.0, softcap=30.0, reduction="none", return_z_loss=True)
    found = loss(logits, torch.tensor([0, 3, 1, 4, 2, 2])).z_loss
    expected = (30 * torch.tanh(logits.double() / 30)).logsumexp(-1).square()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0},
        # a softcap of 0 is none; the z-loss beside the loss was NaN
        {"lse_square_scale": 0.01, "softcap": 0.0},
    ],
    ids=str,
)
def test_losses(reduction: str, options: dict[str, Any]) -> None:
    x, w, b = tensors((6, 4), (11, 4), (11,))
    target = torch.tensor([0, 3, -100, 10, 5, 5])

    def capped(z: Tensor) -> Tensor:
        return 5.0 * torch.tanh(z / 5.0) if options.get("softcap") else z

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z = capped(F.linear(x, w, b))
        extra = options.get("lse_square_scale", 0.0) * torch.logsumexp(z, -1).square() * (target != -100)
        extra = extra if reduction == "none" else extra.sum() / (5 if reduction == "mean" else 1)
        smoothing = options.get("label_smoothing", 0.0)
        return F.cross_entropy(z, target, reduction=reduction, label_smoothing=smoothing) + extra

    fused = liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options)
    same(lambda x, w, b: fused(w, x, target, b), plain, [x, w, b])
    loss = liger.LigerCrossEntropyLoss(reduction=reduction, **options)
    same(lambda x, w, b: loss(F.linear(x, w, b), target), plain, [x, w, b])
    asked = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    out = liger.LigerCrossEntropyLoss(reduction=reduction, **options, **asked)(F.linear(x, w, b), target)
    torch.testing.assert_close(out.loss, plain(x, w, b))
    squares = options.get("lse_square_scale", 0.0) * capped(F.linear(x, w, b)).logsumexp(-1).square() * (target != -100)
    z_loss = squares if reduction == "none" else squares.sum() / (5 if reduction == "mean" else 1)
    torch.testing.assert_close(out.z_loss, z_loss)
    found = F.linear(x, w, b).argmax(-1)
    assert out.predicted_tokens.tolist() == found.masked_fill(target == -100, -1).tolist()
    right = (found == target).float()
    expected = right if reduction == "none" else right.sum() / (5 if reduction == "mean" else 1)
    torch.testing.assert_close(out.token_accuracy, expected)
    with pytest.raises(NotImplementedError, match="use_token_scaling"):
        liger.LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)(w, x, target)
    with pytest.raises(NotImplementedError, match="weight"):
        liger.LigerCrossEntropyLoss(weight=b)(F.linear(x, w, b), target)


def test_mlps() -> None:
    (x,) = tensors((2, 3, 8))
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu")
    for cls, act in ((liger.LigerSwiGLUMLP, F.silu), (liger.LigerGEGLUMLP, lambda x: F.gelu(x, approximate="tanh"))):
        m = cls(config).double()
        same(
            lambda x, *_, m=m: m(x), lambda x, a, b, c, f=act: F.linear(f(x @ a.T) * (x @ b.T), c), [x, *m.parameters()]
        )
    phi = liger.LigerPhi3SwiGLUMLP(config).double()
    gate, up = phi.gate_up_proj.weight.chunk(2)
    torch.testing.assert_close(phi(x), F.linear(F.silu(x @ gate.T) * (x @ up.T), phi.down_proj.weight))
    with pytest.raises(ValueError, match="hidden_act"):
        liger.LigerSwiGLUMLP(types.SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="gelu"))


def test_global_hooks_see_the_layers_of_an_mlp() -> None:
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu")
    mlp, seen = liger.LigerSwiGLUMLP(config), []
    handle = register_module_forward_hook(lambda part, *_: seen.append(part))
    mlp(torch.randn(2, 8))
    handle.remove()
    assert set(seen) == {mlp, mlp.gate_proj, mlp.up_proj, mlp.down_proj}


def test_mlps_whose_layers_were_exchanged() -> None:
    """LoRA's layers in the places of gate and up: their weight was read, and the adapters had no effect."""

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
            self.adapter = nn.Linear(8, 12, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.adapter(x)

    (x,) = tensors((2, 3, 8))
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu")
    tanh = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    for cls, act in ((liger.LigerSwiGLUMLP, F.silu), (liger.LigerTiledSwiGLUMLP, F.silu), (liger.LigerGEGLUMLP, tanh)):
        m = cls(config).double()
        m.up_proj = Adapted(m.up_proj)
        torch.testing.assert_close(m(x), m.down_proj(act(m.gate_proj(x)) * m.up_proj(x)))
        m.gate_proj = Adapted(m.gate_proj)
        same(
            lambda x, *_, m=m: m(x), lambda x, *_, m=m, f=act: m.down_proj(f(m.gate_proj(x)) * m.up_proj(x)),
            [x, *m.parameters()],
        )  # fmt: skip
    mixtral = liger.LigerBlockSparseTop2MLP(config).double()
    mixtral.w3 = nn.Linear(8, 12).double()  # with a bias
    torch.testing.assert_close(mixtral(x), mixtral.w2(F.silu(mixtral.w1(x)) * mixtral.w3(x)))


def test_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from powertrain.compat.liger_kernel.transformers import monkey_patch
    from powertrain.patching import replace

    for name in ("from_pretrained", "_from_config"):
        monkeypatch.setattr(transformers.PreTrainedModel, name, transformers.PreTrainedModel.__dict__[name])
    monkeypatch.setattr(monkey_patch, "_wanted", {})
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip

    def kinds(model: nn.Module) -> set[str]:
        return {type(m).__name__ for m in model.modules() if replace.installed(m)}

    plain = transformers.AutoModelForCausalLM.from_config(config)
    assert not kinds(plain)
    liger._apply_liger_kernel_to_instance(model=plain, rope=False)
    assert {"LlamaRMSNorm", "LlamaMLP"} <= kinds(plain) and "LlamaAttention" not in kinds(plain)
    with_flags = liger.AutoLigerKernelForCausalLM.from_config(config, rope=False, rms_norm=False, layer_norm=False)
    assert kinds(with_flags) == {"LlamaMLP", "LlamaForCausalLM"}
    with_flags.save_pretrained(tmp_path)
    options: dict[str, Any] = {"swiglu": False, "fused_linear_cross_entropy": False, "output_loading_info": True}
    loaded, _ = liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, **options)
    assert kinds(loaded) == {"LlamaRMSNorm", "LlamaAttention"}
    liger.apply_liger_kernel_to_llama(swiglu=False)
    later = transformers.AutoModelForCausalLM.from_config(config)
    assert {"LlamaRMSNorm", "LlamaAttention"} <= kinds(later) and "LlamaMLP" not in kinds(later)
    # chosen by those who read the logits: the fused loss stood in its place, whose outputs have none
    liger.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)
    for model in (
        transformers.AutoModelForCausalLM.from_config(config),
        liger.AutoLigerKernelForCausalLM.from_config(config, cross_entropy=True, fused_linear_cross_entropy=False),
    ):
        tokens = torch.arange(6)[None]
        assert "LlamaRMSNorm" in kinds(model) and model.train()(input_ids=tokens, labels=tokens).logits is not None
    # the norms that a misspelled flag should keep would be replaced
    with pytest.raises(TypeError, match=r"apply_liger_kernel_to_llama: unknown flag rmsnorm; did you mean rms_norm\?"):
        liger.apply_liger_kernel_to_llama(rmsnorm=False)
    # as Liger's own, which transformers calls with its users' dictionary
    liger._apply_liger_kernel_to_instance(model=plain, rmsnorm=False)
    with pytest.raises(ImportError, match="apply_liger_kernel_to_llama"):
        from powertrain.compat.liger_kernel.transformers import apply_liger_kernel_to_lama  # noqa: F401


LABELS = torch.tensor([1, -100, 0, 3, -100])
KEPT = LABELS != -100


@pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_jensen_shannon(beta: float, labels: Tensor | None) -> None:
    """Rows with ignored labels are left out; the teacher has no gradient."""
    x, y = tensors((5, 7), (5, 7))
    p = y.detach().log_softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return F.kl_div(b, a, log_target=True, reduction="none").sum(-1)

    def plain(x: Tensor) -> Tensor:
        q = x.log_softmax(-1)
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        rows = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
        return (rows if labels is None else rows[KEPT]).mean()

    same(lambda x: liger.LigerJSD(beta)(x.log_softmax(-1), y.log_softmax(-1), labels), plain, [x])


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
def test_total_variation_and_kl(reduction: str) -> None:
    x, y = tensors((5, 7), (5, 7))
    q = y.detach().softmax(-1)

    def plain(x: Tensor) -> Tensor:
        distance = (x.softmax(-1) - q).abs() / 2 * KEPT[:, None]
        return distance if reduction == "none" else distance.sum() / {"batchmean": 3, "mean": 21, "sum": 1}[reduction]

    same(lambda x: liger.LigerTVDLoss(reduction)(x.softmax(-1), q, LABELS), plain, [x])
    kl = liger.LigerKLDIVLoss(reduction=reduction)
    same(lambda x: kl(x.log_softmax(-1), q), lambda x: F.kl_div(x.log_softmax(-1), q, reduction=reduction), [x])


def test_divergence_errors() -> None:
    (x,) = tensors((5, 7))
    with pytest.raises(ValueError, match="beta must be between 0 and 1, got 2"):
        lf.liger_jsd(x, x, beta=2)
    with pytest.raises(ValueError, match="reduction must be one of"):
        lf.liger_tvd(x, x, reduction="max")
    # these were spread over the rows, or a raw error
    for function in (lf.liger_jsd, lf.liger_tvd, lf.liger_kl_div):
        with pytest.raises(ValueError, match=r"target must have shape \[5, 7\] \(shape of input\), got \[1, 7\]"):
            function(x, x[:1])
    for function in (lf.liger_jsd, lf.liger_tvd):
        with pytest.raises(ValueError, match=r"shift_labels must have shape \[5\] .*, got \[5, 1\]"):
            function(x, x, LABELS[:, None])


def test_ignored_rows_of_any_numbers() -> None:
    """Log-probabilities of -inf in rows without a label, as of padding: their gradients were NaN."""
    (x, y) = tensors((5, 7), (5, 7))
    for function, infinite in ((lf.liger_jsd, -torch.inf), (lf.liger_tvd, torch.nan)):
        rows = [torch.where(KEPT[:, None], t.log_softmax(-1), 0.0).detach() for t in (x, y)]
        of = [torch.where(KEPT[:, None], t, infinite).requires_grad_() for t in rows]
        rows[0].requires_grad_()
        losses = function(*rows, LABELS), function(*of, LABELS)
        grads = [torch.autograd.grad(loss, q)[0] for loss, q in zip(losses, (rows[0], of[0]), strict=True)]
        assert torch.equal(losses[0], losses[1]) and torch.equal(grads[0], grads[1]) and grads[0].any()


def test_dyt_and_group_norm() -> None:
    x, alpha, gamma, beta = tensors((2, 3, 8), (1,), (8,), (8,))
    same(lf.liger_dyt, lambda x, a, g, b: (a * x).tanh() * g + b, [x, alpha, gamma, beta])
    assert liger.LigerDyT(8, beta=False).double()(x).shape == x.shape and liger.LigerDyT(8).alpha.item() == 0.5
    (x,) = tensors((2, 6, 5))
    module = liger.LigerGroupNorm(6, 3, bias=True).double()

    def plain(x: Tensor) -> Tensor:
        groups = x.reshape(2, 3, -1)
        mean, var = groups.mean(-1, keepdim=True), groups.var(-1, correction=0, keepdim=True)
        normed = ((groups - mean) / (var + 1e-6).sqrt()).reshape(x.shape)
        return normed * module.weight[:, None] + module.bias[:, None]

    same(module, plain, [x])
    with pytest.raises(ValueError, match=r"X must be \[B, 6, ...\], got \[2, 5, 6\]"):
        module(x.mT)
