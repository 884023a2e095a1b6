"""transformers' models with attn_implementation="powertrain" against "eager": values, gradients, generation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.compat import huggingface
from powertrain.patching import attention as implementation
from powertrain.runtime.settings import settings
from tests.compat.plain import attend, band, same, tensors

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 60,
    "bos_token_id": 1,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, attention_dropout=0.0
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    # its attention does not name the window of its masks
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    # nor does this one's, whose use_sliding_window is off
    "smollm3": lambda: transformers.SmolLM3Config(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}
# a kernel takes milliseconds a program in the interpreter: there, the two with most in them
MODELS = ["gemma2", "gpt-oss"] if settings().interpret else list(CONFIGS)
CACHES = ["dynamic"] if settings().interpret else ["dynamic", "static"]
PADDING = {
    "whole": None,
    "right": torch.tensor([[1] * 9, [1] * 6 + [0] * 3]),
    "left": torch.tensor([[0] * 4 + [1] * 5, [1] * 9]),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    huggingface.register()


def _models(name: str) -> tuple[Any, Any]:
    """The same model twice: eager, and ours."""
    torch.manual_seed(0)
    models = []
    for kind in ("eager", "powertrain"):
        config = CONFIGS[name]()
        config._attn_implementation = kind
        models.append(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with torch.no_grad():
        for parameter in models[0].parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0, 0.3)
        for one, other in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            if "sinks" in one[0]:
                one[1].normal_()
            other[1].copy_(one[1])
    assert models[1].config._attn_implementation == "powertrain"
    return models[0], models[1]


def _run(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    logits = model(ids, **options).logits
    mask = options.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    loss = (logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0] * mask).sum()
    named = [p for n, p in model.named_parameters() if "q_proj" in n or "k_proj" in n or "v_proj" in n or "sinks" in n]
    return logits[mask.bool()], list(torch.autograd.grad(loss, [p for p in named if p.requires_grad]))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = _models(name)
    options = {} if PADDING[padding] is None else {"attention_mask": PADDING[padding]}
    biases = []
    inner = implementation.attention
    monkeypatch.setattr(implementation, "attention", lambda *a, **k: biases.append(k["attn_bias"]) or inner(*a, **k))
    ids = torch.randint(1, 60, (2, 9))
    expected, grads = _run(eager, ids, **options)
    out, our_grads = _run(ours, ids, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
    assert biases == [None, None], "every mask here has arguments that say the same"


@pytest.mark.skipif(settings().interpret, reason="masks are made outside of kernels")
@pytest.mark.parametrize("padding", PADDING)
def test_a_model_that_adds_keys_in_its_layers(padding: str) -> None:
    """DeepSeek-V4's compressed keys, for which each layer adds to the mask that the model has made."""
    config = transformers.DeepseekV4Config(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        head_dim=16, q_lora_rank=16, n_routed_experts=2, num_experts_per_tok=1, sliding_window=6, o_groups=2,
        o_lora_rank=8, index_n_heads=2, index_head_dim=16, index_topk=2, partial_rotary_factor=0.5,
        max_position_embeddings=64,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    ids, mask = torch.randint(1, 60, (2, 9)), PADDING[padding]
    tokens = torch.ones_like(ids).bool() if mask is None else mask.bool()
    expected = model(ids, attention_mask=mask, use_cache=False).logits[tokens]
    model.set_attn_implementation("powertrain")
    found = model(ids, attention_mask=mask, use_cache=False).logits[tokens]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _chooses_keys(attn_implementation: str) -> Any:
    """DeepSeek-V3.2: its indexer chooses 3 keys for each query, and gives them to attention as `indices`."""
    config = transformers.DeepseekV32Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, head_dim=8, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=2, index_n_heads=2, index_head_dim=16, index_topk=3,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    config._attn_implementation = attn_implementation
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.mark.skipif(settings().interpret, reason="masks are made outside of kernels")
@pytest.mark.parametrize("device", ["as a GPU", "CPU"])
@pytest.mark.parametrize("theirs", ["eager", "sdpa"])
def test_a_model_that_chooses_keys(theirs: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query saw all keys before it."""
    if device == "CPU":
        monkeypatch.setattr(implementation, "has_kernels", lambda x: False)
        monkeypatch.setattr(implementation, "_has_kernels_on", lambda device: False)
    model, ids = _chooses_keys(theirs), torch.randint(1, 60, (2, 9))
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        expected = model(ids).logits, *model.generate(ids, **options).logits
        model.set_attn_implementation("powertrain")
        found = model(ids).logits, *model.generate(ids, **options).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, cache: str) -> None:
    eager, ours = _models(name)
    ids = torch.randint(1, 60, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    options: dict[str, Any] = {
        "max_new_tokens": 2 if settings().interpret else 8,
        "do_sample": False,
        "attention_mask": mask,
    }
    options |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected, found = (model.generate(ids, **options) for model in (eager, ours))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_batches(name: str) -> None:
    eager, ours = _models(name)
    ids = torch.randint(1, 60, (1, 9))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    expected = torch.cat([eager(ids[:, :5]).logits, eager(ids[:, 5:]).logits], 1)
    ends = torch.tensor([0, 5, 9]).int()
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": torch.tensor(5), "max_length_k": 5}
    for options in ({}, lengths):
        out = ours(ids, position_ids=positions, use_cache=False, **options).logits
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def _layer(**options: Any) -> Any:
    module = SimpleNamespace(is_causal=True)
    return lambda q, k, v, mask=None, **more: huggingface.attention_forward(module, q, k, v, mask, **options, **more)[0]


def _bhsd(*inputs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in inputs]


def test_lengths_without_a_mask() -> None:
    ends = torch.tensor([0, 4, 7]).int()
    inputs = tensors((1, 4, 7, 8), (1, 2, 7, 8), (1, 2, 7, 6))
    for window in (None, 2):
        seen = band(7, 7, causal=True, left=-1 if window is None else window - 1)
        seen[4:, :4] = False
        expected = lambda q, k, v, s=seen: attend(*_bhsd(q, k, v), s)[0]  # noqa: E731
        same(lambda *x, w=window: _layer(cu_seq_lens_q=ends, sliding_window=w)(*x), expected, inputs)
    mask = torch.rand(1, 1, 7, 7) < 0.7
    mask[..., range(7), range(7)] = True
    seen = band(7, 7, causal=False)
    seen[4:, :4], seen[:4, 4:] = False, False
    same(
        lambda *x: _layer(cu_seq_lens_q=ends)(*x, mask),
        lambda *x: attend(*_bhsd(*x), mask & seen)[0],
        inputs,
    )
    with pytest.raises(ValueError, match="query must have a batch of 1 with cu_seq_lens_q, got 2"):
        _layer(cu_seq_lens_q=ends)(*tensors((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 6)))


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_position_bias(kind: str) -> None:
    mask: Any = {"none": None, "bool": torch.rand(2, 1, 5, 5) < 0.7, "float": torch.randn(2, 1, 5, 5).double()}[kind]
    hidden = {"none": band(5, 5, causal=True), "bool": mask, "float": None}[kind]

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        bias = bias + mask if kind == "float" else bias.masked_fill(~hidden, -torch.inf)
        return attend(*_bhsd(q, k, v), bias, 1.0)[0]

    same(
        lambda q, k, v, b: _layer(position_bias=b, scaling=1.0)(q, k, v, mask),
        plain,
        tensors((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), (1, 4, 5, 5)),
    )


def test_layers_without_a_mask() -> None:
    one, keys = tensors((2, 4, 1, 8), (2, 4, 6, 8))
    same(_layer(), lambda *x: attend(*_bhsd(*x))[0], [one, keys, keys])
    same(_layer(sliding_window=3), lambda *x: attend(*_bhsd(*x), band(1, 6, left=2))[0], [one, keys, keys])
    same(_layer(is_causal=False), lambda *x: attend(*_bhsd(*x))[0], [keys, keys, keys])
    both = band(6, 6, left=2, right=2)
    same(_layer(is_causal=False, sliding_window=3), lambda *x: attend(*_bhsd(*x), both)[0], [keys, keys, keys])


@pytest.mark.parametrize("offsets", [(0, 0, 9), (5, 0, 9), (5, 2, 7), (0, 0, 12)], ids=str)
@pytest.mark.parametrize("window", [None, 3], ids=["full", "window"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_marks_say_what_the_mask_says(offsets: tuple[int, int, int], window: int | None, padded: bool) -> None:
    q_offset, kv_offset, keys = offsets
    queries = 9 - q_offset
    tokens = torch.ones(2, 9, dtype=torch.bool)
    if padded:
        tokens[0, :3] = False
    function = masking_utils.causal_mask_function
    function = function if window is None else masking_utils.sliding_window_causal_mask_function(window)
    mask = huggingface.attention_mask(2, queries, keys, q_offset, kv_offset, function, tokens, local_size=window)
    dense = masking_utils.sdpa_mask(
        2, queries, keys, q_offset, kv_offset, function, tokens, window, allow_is_causal_skip=False
    )
    assert mask is None or hasattr(mask, implementation._MARK)
    inputs = tensors((2, 4, queries, 8), (2, 4, keys, 8), (2, 4, keys, 8))
    same(lambda *x: _layer(sliding_window=window)(*x, mask), lambda *x: _layer()(*x, dense.clone()), inputs)


def test_a_mask_for_other_keys_is_named() -> None:
    """As MiniMax makes for decoding; the message named `document_ids`, which nobody gives."""
    tokens = torch.tensor([[0] + [1] * 8, [1] * 9]).bool()
    mask = huggingface.attention_mask(2, 1, 1, 0, 0, masking_utils.causal_mask_function, tokens)
    one, keys = tensors((2, 4, 1, 8), (2, 4, 9, 8))
    with pytest.raises(
        ValueError, match=r"attention_mask must have a column for each of 9 keys .*, got \[2, 1, 1, 1\]"
    ):
        _layer()(one, keys, keys, mask)


def test_right_padding_is_lengths() -> None:
    tokens = torch.tensor([[1] * 6 + [0] * 3, [1] * 9])
    for window in (None, 3):
        function = masking_utils.causal_mask_function
        function = function if window is None else masking_utils.sliding_window_causal_mask_function(window)
        for dtype in (torch.int64, torch.bool):
            lengths = huggingface.attention_mask(2, 9, 9, 0, 0, function, tokens.to(dtype), local_size=window)
            assert lengths is not None and lengths.tolist() == [6, 9]
        dense = masking_utils.sdpa_mask(2, 9, 9, 0, 0, function, tokens.bool(), window, allow_is_causal_skip=False)
        inputs = tensors((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8))

        def rows(*x: Tensor, mask: Tensor, window: int | None = window) -> Tensor:
            """Rows of tokens: those of padding differ, and nobody reads them."""
            return _layer(sliding_window=window)(*x, mask)[tokens.bool()]

        same(lambda *x, m=lengths: rows(*x, mask=m), lambda *x, m=dense: rows(*x, mask=m), inputs)


def test_lengths_say_what_the_mask_says() -> None:
    """Moonshine's decoder calls its attention not causal where there is a mask, of which lengths are one."""
    tokens = torch.tensor([[1] * 6 + [0] * 3, [1] * 9]).bool()
    inputs = tensors((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8))
    for function, causal in (
        (masking_utils.causal_mask_function, True),
        (masking_utils.bidirectional_mask_function, False),
    ):
        lengths = huggingface.attention_mask(2, 9, 9, 0, 0, function, tokens)
        dense = masking_utils.sdpa_mask(2, 9, 9, 0, 0, function, tokens, allow_is_causal_skip=False)
        assert lengths is not None and lengths.dim() == 1
        same(
            lambda *x, m=lengths, c=causal: _layer(is_causal=not c)(*x, m)[tokens],
            lambda *x, m=dense: _layer()(*x, m)[tokens],
            inputs,
        )


def test_lengths_that_come_back() -> None:
    """PaliGemma hands its mask to a language model that asks again; its modules call themselves not causal."""
    tokens = torch.tensor([[1] * 6 + [0] * 3, [1] * 9]).bool()
    function = masking_utils.causal_mask_function
    lengths = huggingface.attention_mask(2, 9, 9, 0, 0, function, tokens)
    mask = huggingface.attention_mask(2, 9, 9, 0, 0, function, lengths)
    dense = masking_utils.sdpa_mask(2, 9, 9, 0, 0, function, tokens, allow_is_causal_skip=False)
    assert lengths is not None and lengths.dim() == 1 and mask is not None and torch.equal(mask, dense)
    inputs = tensors((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8))
    same(lambda *x: _layer(is_causal=False)(*x, mask), lambda *x: _layer()(*x, dense.clone()), inputs)


def test_other_masks_are_not_marked() -> None:
    chunks = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    tokens = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]).bool()
    makers: list[dict[str, Any]] = [
        {"mask_function": chunks, "local_size": 3},
        {"mask_function": masking_utils.bidirectional_mask_function, "attention_mask": tokens},
        {"mask_function": masking_utils.sliding_window_bidirectional_mask_function(3), "local_size": 3},
        {"allow_is_causal_skip": False},
        {"q_offset": 2, "attention_mask": tokens},
    ]
    for options in makers:
        mask = huggingface.attention_mask(2, 6, 6, **options)
        assert mask is not None and not hasattr(mask, implementation._MARK), options


def test_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"transformers 5\.\S+ is too old .* pip install"):
        huggingface.register()


def _decoder_of_an_encoder_decoder() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BigBirdPegasusConfig(
        **sizes, **heads, vocab_size=61, max_position_embeddings=16, attention_type="original_full"
    )
    return transformers.BigBirdPegasusForConditionalGeneration(config)


def _encoder_without_is_causal() -> Any:
    options = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    return transformers.SplinterModel(transformers.SplinterConfig(**options))


@pytest.mark.parametrize("padding", ["whole", "right"])
@pytest.mark.parametrize("make", [_decoder_of_an_encoder_decoder, _encoder_without_is_causal])
def test_models_without_sdpa(make: Any, padding: str) -> None:
    """Without padding every query of BigBirdPegasus' decoder saw all keys, and those of Splinter only earlier ones;
    masks of BigBirdPegasus' encoder, which adds them to scores, were bool."""
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    mask = torch.ones_like(ids) if PADDING[padding] is None else PADDING[padding]
    inputs = {"input_ids": ids} if PADDING[padding] is None else {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs |= {f"decoder_{name}": value for name, value in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
        model.set_attn_implementation("powertrain")
        torch.testing.assert_close(model(**inputs)[0][mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_errors() -> None:
    x = tensors((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8))
    for options, message in [
        ({"output_attentions": True}, "output_attentions = True is not supported; nearest: attn_implementation="),
        ({"cache": object()}, "cache = 'object' is not supported"),
        ({"head_mask": torch.ones(4)}, r"head_mask = \[4\] is not supported; nearest: scaling"),
        ({"sinks": torch.ones(2, 4, 5, 1)}, r"sinks = \[2, 4, 5, 1\] is not supported; nearest: attn_implementation="),
        ({"block_indices": torch.ones(2, 5, 1)}, r"block_indices = \[2, 5, 1\] is not supported; nearest: attn_impl"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            _layer()(*x, **options)
    with pytest.raises(ValueError, match=r"attention_mask must be \[b, h, q, k\] beside indices, got None"):
        _layer()(*x, indices=torch.zeros(2, 5, 1).long())
