"""powertrain.patch on transformers' architectures: what is replaced, the same loss and gradients, and back again."""

import contextlib
import copy
import inspect
import pickle
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.module import register_module_forward_hook

import powertrain as pt
from powertrain.patching import replace
from powertrain.patching.patch import KINDS, table

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from tests.patching.architectures import CAUSAL, causal, shaken  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")
QUICK = ("Llama", "Gemma2", "Phi3", "GPTNeoX", "GptOss", "Cohere2", "DeepseekV3")
# what is left alone, and why; everything else of every architecture must be replaced
LEFT = {
    "Mixtral": {"mlp"}, "GptOss": {"mlp"}, "Qwen3Moe": {"mlp"}, "Olmoe": {"mlp"}, "GraniteMoe": {"mlp"},
    "DeepseekV3": {"rotary"}, "Llama4Text": {"rotary"}, "GPTJ": {"rotary", "attention"}, "Olmo": {"norm"},
    "Falcon": {"mlp", "attention"}, "Bloom": {"mlp", "rotary", "attention"}, "Apertus": {"mlp"},
    "GPT2": {"mlp", "rotary"}, "OPT": {"mlp", "rotary", "loss"},
}  # fmt: skip
ROUTED = {"Mixtral", "GptOss", "Qwen3Moe", "Qwen2Moe", "Olmoe", "GraniteMoe", "DeepseekV3", "Llama4Text"}
Result = tuple[Tensor, dict[str, Tensor]]


def batch(padding: str = "right") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 131, (2, 20), generator=generator)
    mask = torch.ones_like(tokens)
    if padding == "right":
        mask[1, 15:] = 0
    elif padding == "left":
        mask[1, :5] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Result:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    grads = {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().double(), grads


def judge(new: Result, old: Result, exact: Result, dtype: torch.dtype) -> None:
    """At most twice the unpatched model's error, and roundings."""
    eps = torch.finfo(dtype).eps
    loss = exact[0].abs()
    assert (new[0] - exact[0]).abs() <= 2 * (old[0] - exact[0]).abs() + eps * loss
    assert new[1].keys() == old[1].keys()
    for name, grad in exact[1].items():
        scale = grad.norm().clamp_min(1e-12)
        ours, theirs = ((result[1][name] - grad).norm() / scale for result in (new, old))
        # a parameter of one number sums every token's terms, which cancel (Apertus' alphas: to a thousandth)
        # in float32 17 and 33 of Gemma 2's queries, whose gradients pass a tanh, on another CPU with torch 2.11
        few = 64 if dtype is torch.float32 else 4
        roundings = few if grad.numel() > 1 else 1000
        assert ours <= 2 * theirs + roundings * eps, f"{name}: {ours:.3g}, unpatched {theirs:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CAUSAL]
)
def test_same_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    model = causal(name, dtype)
    inputs = batch()
    exact, old = run(copy.deepcopy(model).double(), inputs), run(model, inputs)
    keys = list(model.state_dict())
    report = pt.patch(model)
    replaced = {part.kind for part in report.replaced}
    assert replaced == set(KINDS) - LEFT.get(name, set()), table(report)
    if name in ROUTED and dtype is torch.bfloat16:
        # a rounding sends a token to another expert
        assert (run(model, inputs)[0] - exact[0]).abs() < 0.02 * exact[0]
    else:
        judge(run(model, inputs), old, exact, dtype)
    assert list(model.state_dict()) == keys
    pt.unpatch(model)
    again = run(model, inputs)
    assert torch.equal(again[0], old[0]) and all(torch.equal(again[1][k], old[1][k]) for k in old[1])


def test_configs_whose_layers_differ() -> None:
    """Gemma 4's unified text model: its config raises, by no AttributeError, where layers differ in head dim."""
    model = causal("Gemma4UnifiedText")
    report = pt.patch(model)
    assert "attention" in {part.kind for part in report.replaced}, table(report)


def test_scales_that_are_learned() -> None:
    """TimesFM 2.5 multiplies its queries by a parameter of this name, and says 1 to the attention itself."""
    config = transformers.TimesFm2_5Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8,
    )  # fmt: skip
    report = pt.patch(shaken(transformers.TimesFm2_5Model(config)))
    assert "attention" in {part.kind for part in report.replaced}, table(report)


@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 4, 128)])
def test_roundings_are_no_other_function(heads: tuple[int, int, int]) -> None:
    """Both were refused once, for differences of 1e-6."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    from powertrain.patching.attention import find

    config = transformers.LlamaConfig(
        hidden_size=heads[0] * heads[2], num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=heads[2]
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        module = LlamaAttention(config, 0)
    assert find(module, heads, torch.float32, torch.device("cpu")) is None


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "Llama4Text"])
def test_masks(name: str, padding: str) -> None:
    """Windows, chunks and padding on either side give the same logits where there are tokens."""
    model, inputs = causal(name).eval(), batch(padding)
    labels = inputs.pop("labels")
    with torch.no_grad():
        old = model(**inputs).logits
        pt.patch(model, kinds=["attention"])
        new = model(**inputs).logits
    seen = labels != -100
    torch.testing.assert_close(new[seen], old[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3Text", "Gemma2"])
def test_packed_rows_are_packed_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that start again, as collators for packing give them: no mask is read, with windows and softcap too."""
    from powertrain.patching import attention as module

    draws = torch.Generator().manual_seed(0)
    model, tokens = causal(name), torch.randint(3, 131, (2, 20), generator=draws)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 13), (1, 11, 8))])
    inputs = {"input_ids": tokens, "position_ids": positions, "labels": tokens, "use_cache": False}
    exact, old = run(copy.deepcopy(model).double(), inputs), run(model, inputs)
    pt.patch(model, kinds=["attention"])
    monkeypatch.setattr(module, "attention", None)
    judge(run(model, inputs), old, exact, torch.float32)


def test_a_mask_beside_packed_rows_is_read() -> None:
    """Blocks that see each other both ways, as images' tokens do, are no packed sequences."""
    from transformers.masking_utils import create_causal_mask

    model = causal("Llama").eval()
    pt.patch(model, kinds=["attention"])
    positions = torch.cat([torch.arange(7), torch.arange(13)])[None]
    options = dict(
        config=model.config, inputs_embeds=torch.zeros(1, 20, 4), attention_mask=None, past_key_values=None,
        position_ids=positions,
    )  # fmt: skip
    marked = [
        getattr(create_causal_mask(**options, **more), "_powertrain_mask", None)
        for more in ({}, {"or_mask_function": lambda b, h, q, k: k == 19})
    ]
    assert marked[0] is not None and marked[0]["starts"].tolist()[:3] == [0, 7, 20] and marked[1] is None


def test_packed_positions_and_a_given_mask() -> None:
    model = causal("Llama").eval()
    tokens = batch("none")["input_ids"]
    positions = torch.cat([torch.arange(7), torch.arange(13)]).expand(2, -1)
    own = torch.zeros(2, 1, 20, 20).masked_fill(torch.rand(2, 1, 20, 20) < 0.3, float("-inf"))
    own[..., 0] = 0
    calls: list[dict[str, Any]] = [{"position_ids": positions}, {"attention_mask": own}, {"use_cache": False}]
    with torch.no_grad():
        old = [model(tokens, **call).logits for call in calls]
        pt.patch(model)
        for call, right in zip(calls, old, strict=True):
            torch.testing.assert_close(model(tokens, **call).logits, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [torch.ones(2, 20, 20).long().tril(), torch.ones(20).long()], ids=["3", "1"])
def test_masks_of_other_dims_are_refused(mask: Tensor) -> None:
    """Causal ones of three dims gave results of nonsense; without `patch` they are an error of PyTorch."""
    model = causal("Llama")
    pt.patch(model, kinds="attention")
    with pytest.raises(ValueError, match=r"attention_mask must be \[b, keys\] or .*, got"):
        model(batch()["input_ids"], attention_mask=mask)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name: str, cache: str) -> None:
    model, inputs = causal(name).eval(), batch("left")
    del inputs["labels"]
    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    right = model.generate(**inputs, **options)
    pt.patch(model)
    assert torch.equal(model.generate(**inputs, **options), right)


def test_in_inference_mode() -> None:
    """Its tensors have no versions, which the table of angles was kept by."""
    model, inputs = causal("Llama").eval(), batch("none")
    del inputs["labels"]
    right = model(**inputs).logits
    pt.patch(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(**inputs).logits, right, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


@pytest.mark.parametrize("name", ["Gemma2", "DeepseekV3"])
def test_where_patch_is_called(name: str) -> None:
    """Under autocast parts were judged in bfloat16: Gemma's tanh of gelu became the exact one. In inference mode the
    loss was left, and a default dtype of float16 was an error."""
    model, inputs = causal(name), batch()
    right, wanted = run(model, inputs), pt.patch(copy.deepcopy(model))
    autocast = torch.autocast("cpu", torch.bfloat16)
    for context in (torch.no_grad(), torch.inference_mode(), autocast, default_dtype(torch.float16)):
        patched = copy.deepcopy(model)
        with context:
            report = pt.patch(patched)
        assert (report.replaced, report.left) == (wanted.replaced, wanted.left)
        judge(run(patched, inputs), right, run(copy.deepcopy(model).double(), inputs), torch.float32)


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        model = causal("Llama").eval()
        right = model(batch()["input_ids"]).logits
        report = pt.patch(model)
        torch.testing.assert_close(model(batch()["input_ids"]).logits, right, rtol=1e-4, atol=1e-5)
    assert [part.kind for part in report.left] == ["loss"] and "inference_mode" in report.left[0].why


def test_trainer_calls() -> None:
    """What trainers pass and read: tokens counted over accumulated batches, labels shifted before, eval's logits."""
    model, inputs = causal("Llama"), batch()
    calls = [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"shift_labels": inputs["labels"].roll(-1)},
    ]
    old = [run(model, inputs | call) for call in calls]  # type: ignore[operator]
    parameters = inspect.signature(model.forward).parameters
    pt.patch(model)
    assert inspect.signature(model.forward).parameters == parameters
    for call, right in zip(calls, old, strict=True):
        new = run(model, inputs | call)  # type: ignore[operator]
        torch.testing.assert_close(new[0], right[0])
    assert model(**inputs).logits is None
    assert model.eval()(**inputs).logits.shape == (2, 20, 131)


def test_positional_arguments() -> None:
    """Labels by position were a TypeError; with tokens by position, and labels by name, the logits were in memory."""
    model, inputs = causal("Llama"), batch()
    right = model(**inputs).loss
    pt.patch(model)
    tokens, mask, labels = inputs.values()
    for arguments in [(tokens, mask, None, None, None, labels), (tokens, mask)]:
        found = model(*arguments) if len(arguments) > 2 else model(*arguments, labels=labels)
        torch.testing.assert_close(found.loss, right)
        assert found.logits is None
    with torch.no_grad():
        assert model(tokens, mask, None, None, None, labels).logits is not None
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(tokens, input_ids=tokens, labels=labels)
    with pytest.raises(ValueError, match=r"labels must have shape \[2, 20\], got \[2, 19\]"):
        model(tokens, labels=labels[:, 1:])


def test_a_loss_function_that_is_set_later() -> None:
    """transformers' models take one by this attribute; the fused loss stood in its place."""
    model, inputs = causal("Llama"), batch()
    pt.patch(model)
    model.loss_function = lambda logits, labels, vocab_size, **options: (logits - labels.unsqueeze(-1)).mean()
    new = run(model, inputs)
    pt.unpatch(model)
    judge(new, run(model, inputs), run(copy.deepcopy(model).double(), inputs), torch.float32)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bias_of_scaled_logits(when: str) -> None:
    """A head that was set on the patched model had its bias added unscaled; one that was there kept its logits."""
    model, inputs = causal("Cohere2"), batch()
    if when == "after":
        pt.patch(model)
    model.set_output_embeddings(nn.Linear(64, 131))
    if when == "before":
        assert "loss" in {part.kind for part in pt.patch(model).replaced}
    new = run(model, inputs)
    pt.unpatch(model)
    judge(new, run(model, inputs), run(copy.deepcopy(model).double(), inputs), torch.float32)


def test_gradient_checkpointing() -> None:
    model, inputs = causal("Qwen3"), batch()
    pt.patch(model)
    plain = run(model, inputs)
    model.gradient_checkpointing_enable()
    again = run(model, inputs)
    assert torch.equal(plain[0], again[0]) and all(torch.equal(plain[1][k], again[1][k]) for k in plain[1])


def test_models_that_share_a_config_are_patched_apart() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    first, second = (transformers.LlamaForCausalLM(config) for _ in range(2))
    assert first.config is second.config
    pt.patch(first)
    assert first.config._attn_implementation == "powertrain" and second.config._attn_implementation == "sdpa"
    # every part of the model has the same one
    assert {id(m.config) for m in first.modules() if hasattr(m, "config")} == {id(first.config)}
    assert "attention" in [part.kind for part in pt.patch(second).replaced]
    pt.unpatch(first)
    assert first.config._attn_implementation == "sdpa" and second.config._attn_implementation == "powertrain"


# without a cache, as in training, transformers looks for packed rows, whose mask is a function of its own
@pytest.mark.parametrize("use_cache", [True, False])
def test_compiled_model(use_cache: bool) -> None:
    model, inputs = causal("Llama"), batch("none")
    inputs.pop("attention_mask")
    model.config.use_cache = use_cache
    pt.patch(model)
    right = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(**inputs).loss
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(loss.double(), right[0], rtol=1e-5, atol=1e-5)
    grads = {name: p.grad.double() for name, p in model.named_parameters()}
    torch.testing.assert_close(grads, right[1], rtol=1e-3, atol=1e-5)


def test_compiled_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, and no dense mask: whether the masks are windows was asked with tensors, whose values broke it."""
    model = causal("Mistral", num_hidden_layers=1).eval()
    tokens = [torch.randint(3, 131, (2, n)) for n in (20, 25)]
    with torch.no_grad():
        right = [model(x).logits for x in tokens]
        pt.patch(model)
        # what makes a dense mask
        monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", None)
        torch._dynamo.reset()
        # not fullgraph=True, which lets Dynamo keep values that are read
        compiled = torch.compile(model, backend=(counter := CompileCounter()), dynamic=True)
        for x, logits in zip(tokens, right, strict=True):
            torch.testing.assert_close(compiled(x).logits, logits, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


class LoRA(nn.Linear):
    """As PEFT's: a subclass or wrapper in place of the linear layer, put there after the model was patched."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def test_a_layer_exchanged_later_is_seen() -> None:
    plain, patched = causal("Llama").eval(), causal("Llama").eval()
    pt.patch(patched)
    tokens = batch("none")["input_ids"]
    for model in (plain, patched):
        mlp = model.model.layers[0].mlp
        lora = LoRA(64, 96, bias=False)
        lora.load_state_dict(mlp.gate_proj.state_dict())
        mlp.gate_proj = lora
        model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(patched(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        patched.train()(tokens, labels=tokens).loss, plain.train()(tokens, labels=tokens).loss, rtol=1e-4, atol=1e-5
    )


def test_hooks_that_were_taken_off() -> None:
    """accelerate leaves the class's own method on the instance, for which layers were left to their own code."""
    model = causal("Llama")
    for module in model.modules():
        module.forward = MethodType(type(module).forward, module)
    report = pt.patch(model)
    assert {part.kind for part in report.replaced} == set(KINDS) and not report.left, table(report)
    pt.unpatch(model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    (left,) = pt.patch(model, kinds="mlp").left
    assert (left.name, left.why[:22]) == ("model.layers.0.mlp", "up_proj has hooks, a f")  # it was "a torch Linear"


def test_global_hooks_see_the_layers_of_an_mlp() -> None:
    models = causal("Llama").eval(), nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    for model, x, layers in zip(models, (batch("none")["input_ids"], torch.randn(2, 64)), (3, 2), strict=True):
        assert any(part.kind == "mlp" for part in pt.patch(model).replaced)
        seen: list[str] = []
        names = {part: name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        handle = register_module_forward_hook(lambda part, *_, of=seen, names=names: of.append(names.get(part, "")))
        model(x)
        handle.remove()
        assert len([name for name in seen if "0.mlp." in name or name in ("0", "2")]) == layers


def test_a_layer_exchanged_before_is_left() -> None:
    model = causal("Llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.__class__ = LoRA
    report = pt.patch(model)
    left = [part for part in report.left if part.kind == "mlp"]
    assert [part.name for part in left] == ["model.layers.0.mlp"] and "up_proj is a" in left[0].why
    assert "model.layers.1.mlp" in [part.name for part in report.replaced]


def test_copies_pickles_and_saving(tmp_path: Any) -> None:
    model, inputs = causal("Llama"), batch()
    old = model.config.to_dict()
    pt.patch(model)
    right = run(model, inputs)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(twin, inputs)[0], right[0])  # runs on its own weights
    assert pickle.loads(pickle.dumps(twin)).state_dict().keys() == model.state_dict().keys()
    assert model.config.to_dict() == old
    pt.unpatch(twin)
    assert not any(map(replace.installed, twin.modules())) and twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "powertrain"


def test_a_model_inside_another_is_named() -> None:
    """A wrapper's attention and loss were left without a word."""
    report = pt.patch(nn.Sequential(causal("Llama")))
    assert {(part.kind, part.name) for part in report.left} == {("attention", "0"), ("loss", "0")}
    assert "it is inside a Sequential" in table(report) and "patch it by itself" in table(report)


def test_pickled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has not patched: attention is registered, and the model can be patched again."""
    model, inputs = causal("Llama"), batch()
    pt.patch(model)
    right, saved = run(model, inputs), pickle.dumps(model)
    for mapping in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.delitem(mapping._global_mapping, "powertrain")
    loaded = pickle.loads(saved)
    judge(run(loaded, inputs), right, right, torch.float32)
    report = pt.patch(loaded)
    assert {part.kind for part in report.replaced} == set(KINDS) - {"attention"} and not report.left, table(report)
    assert torch.equal(run(loaded, inputs)[0], right[0])
    pt.unpatch(loaded)
    assert loaded.config._attn_implementation == "sdpa" and not any("forward" in vars(m) for m in loaded.modules())


def test_unpatch_of_a_pickled_model() -> None:
    """The class's own methods, which pickle leaves on the instances, stayed: replicas ran the original's weights."""
    model = causal("Llama")
    pt.patch(model)
    loaded = pickle.loads(pickle.dumps(model))
    pt.unpatch(loaded)
    assert not any("forward" in vars(m) or "_replicate_for_data_parallel" in vars(m) for m in loaded.modules())
    assert "forward" not in vars(replica_of(loaded.model.norm))


def test_a_part_and_then_the_model() -> None:
    """The part's attention stayed ours behind `unpatch`: its configs had been exchanged since."""
    model, inputs = causal("Llama"), batch()
    exact, right = run(copy.deepcopy(model).double(), inputs), run(model, inputs)
    pt.patch(model.model)
    pt.patch(model)
    judge(run(model, inputs), right, exact, torch.float32)
    pt.unpatch(model)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}
    assert torch.equal(run(model, inputs)[0], right[0])


def test_an_attention_that_is_set_later() -> None:
    """`unpatch`, and `patch` with other kinds, keep an attention that the user set after the first `patch`."""
    model, inputs = causal("Llama").eval(), batch("none")
    del inputs["labels"]
    pt.patch(model, kinds=["attention"])
    model.set_attn_implementation("eager")
    pt.patch(model, kinds=["norm"])
    assert model(**inputs, output_attentions=True).attentions[0].shape == (2, 4, 20, 20)
    pt.unpatch(model)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    pt.patch(model)
    assert model.config._attn_implementation == "powertrain"
    pt.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def replica_of(module: nn.Module) -> nn.Module:
    """As nn.parallel.replicate makes them, which needs GPUs: parameters are plain tensors."""
    replica: Any = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        replica._modules[name] = replica_of(child)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            setattr(replica, name, parameter.detach().clone().requires_grad_())
    return replica


def test_replicas_run_their_own_weights() -> None:
    """nn.DataParallel, in which Trainer puts a model where several GPUs are visible: replicas ran the original."""
    model, inputs = causal("Llama"), batch()
    report = pt.patch(model)
    right = run(model, inputs)
    model.zero_grad()
    replica = replica_of(model)
    loss = replica(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), right[0])
    assert all(parameter.grad is None for parameter in model.parameters())
    found = {f"{name}.weight": m.weight.grad for name, m in replica.named_modules() if "weight" in vars(m)}
    assert found.keys() == right[1].keys()
    torch.testing.assert_close({name: grad.double() for name, grad in found.items()}, right[1])
    assert {part.kind for part in report.replaced} == set(KINDS)
    pt.unpatch(model)
    assert not any({"forward", "_replicate_for_data_parallel"} & vars(m).keys() for m in model.modules())


def test_twice_is_once() -> None:
    model = causal("Llama")
    first = pt.patch(model)
    forwards = {m: m.__dict__.get("forward") for m in model.modules()}
    assert not pt.patch(model).replaced or first
    assert forwards == {m: m.__dict__.get("forward") for m in model.modules()}
    pt.unpatch(model)
    pt.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def test_on_the_meta_device() -> None:
    """Shapes alone are enough for modules; what needs values says so."""
    with torch.device("meta"):
        model = causal("Llama")
    report = pt.patch(model)
    assert {part.kind for part in report.replaced} >= {"norm", "mlp", "attention"}
    assert any(part.kind == "loss" and "meta" in part.why for part in report.left)


# modules that look like those we know and are not


class WrongNorm(nn.Module):
    """Divides by the mean magnitude, not by the root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class TwoInputNorm(WrongNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * gate)


class MLP(nn.Module):
    def __init__(self, activation: nn.Module, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation, self.dropout, self.scale = activation, nn.Dropout(dropout), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(self.up(x)))) * self.scale


@pytest.mark.parametrize(
    "module, what",
    [
        (nn.LayerNorm(64), "layer_norm"),
        (nn.LayerNorm(64, bias=False), "layer_norm"),
        (nn.RMSNorm(64, eps=1e-5), "rms_norm, te casting"),
        (WrongNorm(), ""),
        (TwoInputNorm(), ""),
        (nn.BatchNorm1d(64), ""),
        (nn.GroupNorm(4, 64), ""),
        (MLP(nn.GELU()), "linear_activation, gelu"),
        (MLP(nn.GELU(approximate="tanh")), "linear_activation, gelu_tanh"),
        (MLP(nn.SiLU()), "linear_activation, silu"),
        (MLP(nn.Softplus()), ""),
        (MLP(nn.GELU(), dropout=0.1), ""),
        (MLP(nn.GELU(), scale=1.01), ""),
        (nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), "linear_activation, gelu"),
        (nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.GELU(), nn.Linear(96, 64)), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value or "left"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_modules_of_other_libraries(module: nn.Module, what: str, dtype: torch.dtype) -> None:
    model = shaken(nn.ModuleDict({"part": copy.deepcopy(module)})).to(dtype)
    report = pt.patch(model)
    assert [part.what for part in report.replaced] == ([what] if what else []), table(report)


def encoders() -> list[tuple[nn.Module, dict[str, Tensor]]]:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    pixels = {"image_size": 32, "patch_size": 8}
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    tokens = batch("none")["input_ids"]
    audio = torch.randn(2, 80, 100, generator=torch.Generator().manual_seed(0))
    whisper = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=50, vocab_size=131, pad_token_id=0,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    bert = transformers.BertConfig(**small, **none, vocab_size=131)
    return [
        (transformers.ViTModel(transformers.ViTConfig(**small, **none, **pixels)), {"pixel_values": image}),
        (transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**small, **pixels)), {"pixel_values": image}),
        (transformers.BertModel(bert), {"input_ids": tokens, "attention_mask": batch()["attention_mask"]}),
        (transformers.WhisperModel(whisper), {"input_features": audio, "decoder_input_ids": tokens}),
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(4), ids=["ViT", "SigLIP", "BERT", "Whisper"])
def test_encoders(index: int) -> None:
    torch.manual_seed(0)
    model, inputs = encoders()[index]
    shaken(model).eval()
    right = model(**inputs).last_hidden_state
    report = pt.patch(model)
    assert {"norm", "attention"} <= {part.kind for part in report.replaced}, table(report)
    torch.testing.assert_close(model(**inputs).last_hidden_state, right, rtol=1e-3, atol=1e-4)


def test_report_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    model = causal("Llama")
    model.model.layers[1].mlp.up_proj.__class__ = LoRA
    pt.patch(model, explain=True)
    text = capsys.readouterr().out
    for words in ("replaced:", "rms_norm, llama casting", "less memory traffic", "left as they are:", "up_proj is a"):
        assert words in text
    with pytest.raises(ValueError, match="kinds must be of norm, mlp, rotary, attention, loss, got 'norms'"):
        pt.patch(model, kinds=["norms"])
    with pytest.raises(ValueError, match=r"patch: model must be an nn\.Module, got the class Linear"):
        pt.patch(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unpatch: model must be an nn\.Module, got str"):
        pt.unpatch("model")  # type: ignore[arg-type]
