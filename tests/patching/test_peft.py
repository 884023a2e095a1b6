"""powertrain.patch with PEFT: before the adapters and after them; saved, merged, generated from; quantized bases."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import powertrain as pt
from powertrain.patching import replace

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from tests.patching.architectures import causal  # noqa: E402
from tests.patching.test_patch import Result, batch, judge, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

ATTENTION = ["q_proj", "v_proj"]
KINDS = {
    "attention only": {"target_modules": ATTENTION},
    "all layers": {"target_modules": "all-linear"},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "saved head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
}


def adapted(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Adapters whose second matrix is not zero, as after some steps."""
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return made


def trained(result: Result) -> Result:
    assert any("lora_" in name for name in result[1])
    return result


@pytest.mark.parametrize("order", ["patched first", "adapted first"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_lora_before_and_after(name: str, kind: str, order: str) -> None:
    inputs, options = batch(), KINDS[kind]
    old_model = adapted(causal(name), options)
    exact = trained(run(copy.deepcopy(old_model).double(), inputs))
    old = trained(run(old_model, inputs))
    model = causal(name)
    if order == "patched first":
        report = pt.patch(model)
        model = adapted(model, options)
    else:
        model = adapted(model, options)
        report = pt.patch(model)
    replaced = {part.kind for part in report.replaced}
    assert {"norm", "rotary", "attention"} | ({"loss"} if kind != "saved head" else set()) <= replaced
    judge(trained(run(model, inputs)), old, exact, torch.float32)
    pt.unpatch(model)  # by the wrapper, or by the model inside
    again = run(model, inputs)
    assert torch.equal(again[0], old[0]) and not any(map(replace.installed, model.modules()))


def test_adapted_feed_forward_layers_are_left_to_peft() -> None:
    model = adapted(causal("Llama"), {"target_modules": ["gate_proj"]})
    report = pt.patch(model)
    left = [part for part in report.left if part.kind == "mlp"]
    assert len(left) == 2 and all("gate_proj is a peft Linear" in part.why for part in left)
    assert "loss" in {part.kind for part in report.replaced}  # of the model inside


def test_adapters_are_switched_off_and_on() -> None:
    """`disable_adapter` gives the base model's loss, patched too; adapters change after the patch."""
    base, inputs = causal("Llama"), batch()
    right = run(base, inputs)[0]
    model = adapted(causal("Llama"), KINDS["all layers"])
    pt.patch(model)
    with_adapters = run(model, inputs)[0]
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss.double(), right)
    assert abs(with_adapters - right) > 1e-4
    torch.testing.assert_close(run(model, inputs)[0], with_adapters)


@pytest.mark.parametrize("order", ["patched first", "adapted first"])
def test_saved_merged_and_generated_from(order: str, tmp_path: Path) -> None:
    inputs = batch("left")
    del inputs["labels"]
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = adapted(causal("Llama"), KINDS["all layers"]).eval()
    right = plain.generate(**inputs, **options)
    model = causal("Llama")
    if order == "patched first":
        pt.patch(model)
    model = adapted(model, KINDS["all layers"]).eval()
    if order == "adapted first":
        pt.patch(model)
    assert torch.equal(model.generate(**inputs, **options), right)
    model.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(causal("Llama"), tmp_path).eval()
    assert torch.equal(read.generate(**inputs, **options), right)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, plain(**inputs).logits, rtol=1e-3, atol=1e-4)


def test_gradient_checkpointing_of_an_adapted_model() -> None:
    """Frozen inputs need gradients through checkpointed blocks; both kinds of recomputation."""
    inputs = batch()
    plain = adapted(causal("Qwen3"), KINDS["attention only"])
    model = adapted(causal("Qwen3"), KINDS["attention only"])
    pt.patch(model)
    for reentrant in (False, True):
        for one in (plain, model):
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            one.enable_input_require_grads()
        right, found = trained(run(plain, inputs)), trained(run(model, inputs))
        torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("order", ["patched first", "adapted first"])
def test_a_loss_from_logits(order: str) -> None:
    """CPT weighs the tokens' losses by itself, from the logits, which were None. Other prompts need none."""
    inputs = batch()
    options = {"task_type": "CAUSAL_LM", "tokenizer_name_or_path": None, "opt_weighted_loss_type": "decay"}
    tokens = {"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3, 4]}
    cpt = peft.CPTConfig(**options, **tokens, opt_loss_decay_factor=0.5)
    plain, model = causal("Llama"), causal("Llama")
    if order == "patched first":
        pt.patch(model)
    torch.manual_seed(0)
    plain, model = (peft.get_peft_model(one, copy.deepcopy(cpt)) for one in (plain, model))
    if order == "adapted first":
        assert "loss" in {part.kind for part in pt.patch(model).replaced}
    for one in (plain, model):
        one.prompt_encoder["default"].delta_embedding.weight.data.fill_(0.01)
    # it writes into the labels' mask
    right, found = (run(one, {name: x.clone() for name, x in inputs.items()}) for one in (plain, model))
    torch.testing.assert_close(found[0], right[0])
    torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=1e-6)
    assert right[1]
    prompts = peft.get_peft_model(causal("Llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    pt.patch(prompts)
    assert prompts(**inputs).logits is None


@pytest.mark.parametrize("order", ["patched first", "adapted first"])
def test_a_wrapper_that_keeps_the_forward(order: str) -> None:
    """PEFT's adaption prompts do: `unpatch` took it from the wrapper; a loss replaced by `patch` was not called."""
    inputs = batch()
    adaption = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
    models = []
    for is_patched in (False, True):
        torch.manual_seed(0)
        model = causal("Llama")
        if is_patched and order == "patched first":
            pt.patch(model)
        models.append(peft.get_peft_model(model, copy.deepcopy(adaption)))
    plain, model = models
    if order == "adapted first":
        assert "loss" in {part.kind for part in pt.patch(model).replaced}
    right, found = run(plain, inputs), run(model, inputs)
    torch.testing.assert_close(found[0], right[0])
    torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=1e-6)
    assert right[1] and model(**inputs).logits is None
    pt.unpatch(model)
    assert model(**inputs).logits is not None
    assert torch.equal(run(model, inputs)[0], right[0])


def test_prefixes_under_gradient_checkpointing_are_refused() -> None:
    """Which leaves out the cache that they are in; the message was of models that make other masks."""
    model = peft.get_peft_model(causal("Llama"), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    pt.patch(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"a column for each of 20 keys .gradient checkpointing leaves out the keys"):
        model(**batch())


class Quantized(nn.Linear):
    """As bitsandbytes' and GPTQ's: a subclass of nn.Linear with packed integers and a product of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.abs().amax() / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def quantized(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, Quantized(child))
    return model


@pytest.mark.parametrize("adapters", [False, True], ids=["base", "qlora"])
def test_a_quantized_base_is_left_alone(adapters: bool) -> None:
    inputs = batch()
    models = [quantized(causal("Llama")) for _ in range(2)]
    if adapters:
        models = [adapted(model, KINDS["attention only"]) for model in models]
    plain, model = models
    weights = [m.weight for m in model.modules() if isinstance(m, Quantized)]
    report = pt.patch(model)
    assert "mlp" in {part.kind for part in report.left} and "mlp" not in {part.kind for part in report.replaced}
    assert "norm" in {part.kind for part in report.replaced}
    after = [m.weight for m in model.modules() if isinstance(m, Quantized)]
    assert all(a is b and a.dtype is torch.int8 for a, b in zip(weights, after, strict=True))
    right, found = run(plain, inputs), run(model, inputs)
    torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=1e-5)
