"""Patched models where our kernels do not run: modules run their own code, and little Python is added to it."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import powertrain as pt
from powertrain.patching import attention

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from tests.patching.architectures import causal, shaken  # noqa: E402
from tests.patching.test_patch import batch, encoders, run  # noqa: E402


def _calls(function: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, one call of `function` calls."""
    count = 0

    def on(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    sys.setprofile(on)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma", "Mistral", "Phi3", "GPTNeoX"])
def test_same_bits(name: str, dtype: torch.dtype, padding: str) -> None:
    """In evaluation, generation and training, but for the loss, which is ours."""
    model, inputs = causal(name).to(dtype), batch(padding)
    labels = inputs.pop("labels")
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def results(model: Any) -> list[torch.Tensor]:
        loss, gradients = run(model, {**inputs, "labels": labels})
        assert loss.isfinite() and gradients
        with torch.no_grad():
            model.eval()
            return [model(**inputs).logits, *model.generate(**inputs, **options).logits]

    patched = copy.deepcopy(model)
    report = pt.patch(patched)
    assert {part.kind for part in report.replaced} == {"norm", "mlp", "rotary", "attention", "loss"}
    for new, old in zip(results(patched), results(model), strict=True):
        assert torch.equal(new, old)


@pytest.mark.parametrize("index", range(3), ids=["ViT", "SigLIP", "BERT"])
def test_same_bits_of_encoders(index: int) -> None:
    model, inputs = encoders()[index]
    patched = copy.deepcopy(model)
    assert pt.patch(patched).replaced
    with torch.no_grad():
        assert torch.equal(patched.eval()(**inputs)[0], model.eval()(**inputs)[0])


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_what_sdpa_does_not_compute_is_ours(name: str) -> None:
    """Softcaps and sinks, which transformers' function for sdpa refuses or ignores."""
    model, inputs = causal(name).eval(), batch("left")
    seen = inputs.pop("labels") != -100
    with torch.no_grad():
        old = model(**inputs).logits
        pt.patch(model, kinds=["attention"])
        torch.testing.assert_close(model(**inputs).logits[seen], old[seen], rtol=1e-4, atol=1e-5)


def _model(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    tokens = batch()["input_ids"]
    if kind == "decoder":
        return causal("BigBirdPegasus").eval(), {"input_ids": tokens}
    config = transformers.PegasusXConfig(
        vocab_size=131, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_global_tokens=4, block_size=8,
    )  # fmt: skip
    model = shaken(transformers.PegasusXForConditionalGeneration(config)).eval()
    return model, {"input_ids": tokens, "decoder_input_ids": tokens}


@pytest.mark.parametrize("kind", ["decoder", "encoder and decoder"])
def test_decoders_that_call_themselves_not_causal(kind: str) -> None:
    """Of models that take no sdpa: without padding our attention showed all keys to every query."""
    model, inputs = _model(kind)
    with torch.no_grad():
        old = model(**inputs).logits
        report = pt.patch(model)
        torch.testing.assert_close(model(**inputs).logits, old, rtol=1e-4, atol=1e-5)
    assert "attention" in {part.kind for part in report.replaced}


def test_attention_that_differs_in_the_whole_model_is_left() -> None:
    """Each layer's attention says is_causal=False, which is right with a mask alone; without one it must be causal."""
    model, tokens = causal("Llama").eval(), batch()["input_ids"]
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with torch.no_grad():
        old = model(tokens).logits
        report = pt.patch(model)
        torch.testing.assert_close(model(tokens).logits, old)
    assert "attention" not in {part.kind for part in report.replaced}
    assert {part.why for part in report.left} == {"the whole model's results differed with it"}


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX"])
def test_calls_a_forward(name: str) -> None:
    """Of functions: 6 more a replaced module (10 more an attention), 30 more for mask and head; a layer has 150."""
    model, inputs = causal(name).eval(), batch("none")
    del inputs["labels"]
    patched = copy.deepcopy(model)
    replaced = [part.kind for part in pt.patch(patched).replaced]
    with torch.no_grad():
        own, ours = (_calls(lambda m=m: m(**inputs)) for m in (model, patched))
    attentions = replaced.count("attention")
    assert ours - own <= 6 * (len(replaced) - attentions) + 10 * attentions + 30, (own, ours, replaced)


def test_dynamo_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warned of a cache around a function that each compiled mask asks."""
    # once in a process
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())

    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + attention._supports("no file", "sdpa") + attention._file_names_window("no file")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(asked, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)) == asked(torch.zeros(1)) == 1
