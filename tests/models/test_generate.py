"""Generation: greedy tokens are the full forward's argmax, for every kind of position and mask; sampling; errors."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powertrain.models import build, configure
from powertrain.models.generate import Sampler, complete, generate, stream
from powertrain.models.step_graph import why_not

SIZES = {
    "architecture": "gpt_neox", "vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "max_position_embeddings": 32, "init_method": "normal", "output_init_method": "normal", "init_std": 0.3,
}  # fmt: skip
LLAMA = {"architecture": "llama", "intermediate_size": 44, "num_kv_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "pythia": {"parallel_residual": True, "rotary_pct": 0.25},
    "gpt3": {"position_embedding": "learned", "tie_embeddings": True},
    "alibi": {"position_embedding": "alibi"},
    # prompts and answers are longer than the window
    "alibi-window": {"position_embedding": "alibi", "sliding_window": 4, "num_kv_heads": 2},
    "no-positions": {"position_embedding": "none"},
    "mistral": {**LLAMA, "sliding_window": 4},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 12},
    "llama-yarn": {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 16}},
    "deepseek": {"architecture": "deepseek", "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
                 "experts_per_token": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                 "v_head_dim": 8},
}  # fmt: skip
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [90, 3, 14, 15]]


def _model(**fields: Any) -> Any:
    model = build(configure(**{**SIZES, **fields}), device="cpu")
    model.init_weights(1)
    return model.eval()


def _greedy_by_full_forward(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_argmax_of_the_full_forward(name: str) -> None:
    """Prompts of three lengths in one batch: none sees another's padding."""
    model = _model(**MODELS[name])
    found = generate(model, PROMPTS, max_new_tokens=8, sampler=Sampler(temperature=0))
    assert found == [_greedy_by_full_forward(model, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == 3


LAYERS = {**MODELS, "amlp": {"layer_types": ["amlp", "attention"], "gmlp_attention_dim": 8}}


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast(name: str) -> None:
    """The cache has the dtype that keys and values then have."""
    model = _model(**LAYERS[name])
    with torch.autocast("cpu", torch.bfloat16):
        # a few whole forwards: close logits may be ordered otherwise in 16 bits
        (row, *_) = complete(model, PROMPTS[1:], max_new_tokens=4, sampler=Sampler(temperature=0))
        whole = model(torch.tensor([[*PROMPTS[1], *row.tokens]]))[0].float().log_softmax(-1)
    wanted = whole[len(PROMPTS[1]) - 1 : -1].gather(-1, torch.tensor(row.tokens)[:, None]).squeeze(-1)
    assert torch.allclose(torch.tensor(row.logprobs), wanted, atol=0.1)


def test_numbers_of_other_libraries() -> None:
    model, ours = _model(), Sampler(temperature=0.5, top_k=5, top_p=0.9, seed=3)
    theirs = Sampler(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        top_p=torch.tensor(0.9, dtype=torch.float64),
        seed=np.uint8(3),  # type: ignore[arg-type]
    )
    found = generate(model, (prompt for prompt in PROMPTS), max_new_tokens=np.int32(4), sampler=theirs)  # type: ignore[arg-type]
    assert found == generate(model, PROMPTS, max_new_tokens=4, sampler=ours)
    assert [row.tokens for row in complete(model, iter(PROMPTS), max_new_tokens=0)] == [[], [], []]  # type: ignore[arg-type]


def test_up_to_the_last_position() -> None:
    model = _model()
    prompt = list(range(30))
    assert generate(model, [prompt], max_new_tokens=2, sampler=Sampler(temperature=0)) == [
        _greedy_by_full_forward(model, prompt, 2)
    ]


def test_no_new_tokens() -> None:
    assert generate(_model(), PROMPTS, max_new_tokens=0) == [[], [], []]


def test_a_model_that_trained_is_in_evaluation_mode() -> None:
    model = _model(hidden_dropout=0.5).train()
    first, second = (generate(model, PROMPTS, max_new_tokens=4, sampler=Sampler(temperature=0)) for _ in range(2))
    assert first == second and not model.training


def test_rows_end_at_their_end_of_document() -> None:
    model = _model()
    whole = generate(model, PROMPTS, max_new_tokens=20, sampler=Sampler(temperature=0))
    eod = whole[1][6]
    cut = generate(model, PROMPTS, max_new_tokens=20, sampler=Sampler(temperature=0), eod=eod)
    assert cut == [row[: row.index(eod)] if eod in row else row for row in whole]
    assert len(cut[1]) <= 6 and all(eod not in row for row in cut)


def test_seeds() -> None:
    """The same seed and prompts give the same tokens, whatever else was drawn."""
    model = _model()

    def rows(seed: int) -> list[list[int]]:
        torch.rand(seed + 3)
        return generate(model, PROMPTS, max_new_tokens=8, sampler=Sampler(seed=seed))

    assert rows(1) == rows(1) != rows(2)


def test_stream_gives_the_tokens_one_by_one() -> None:
    model = _model()
    steps = list(stream(model, PROMPTS, max_new_tokens=5, sampler=Sampler(seed=4)))
    assert [step.shape for step in steps] == [(3,)] * 5 and steps[0].dtype is torch.int64
    assert torch.stack(steps, 1).tolist() == generate(model, PROMPTS, max_new_tokens=5, sampler=Sampler(seed=4))


def _drawn(logits: Tensor, **options: Any) -> Tensor:
    """Shares of the tokens among 4000 draws."""
    tokens = Sampler(**options)(logits.expand(4000, -1))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / 4000


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        # the quotients are beyond float32, and the second temperature is 0 in float32
        ({"temperature": 1e-40}, [1, 0, 0, 0]),
        ({"temperature": 1e-60, "top_k": 3, "top_p": 0.9}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),  # squares
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),  # the fewest that make up 0.7: 0.5 + 0.3
        ({"top_p": 0.81}, [0.5263, 0.3158, 0.1579, 0]),
        ({"top_p": 0.1}, [1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 0, "top_p": 0.0}, [0.5, 0.3, 0.15, 0.05]),  # GPT-NeoX's values for "off"
        ({"top_k": 3, "top_p": 0.6}, [0.625, 0.375, 0, 0]),
    ],
)
def test_what_is_sampled(options: dict[str, Any], expected: list[float]) -> None:
    # in an order that sorting must undo; 4000 draws: a deviation is at most 0.008
    order = torch.tensor([2, 0, 3, 1])
    shares, wanted = _drawn(LOGITS[order], **options), torch.tensor(expected, dtype=torch.float32)[order]
    assert torch.allclose(shares, wanted, atol=0.04) and not shares[wanted == 0].any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature must be at least 0 and finite, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"seed": 2**64}, r"seed must be an integer in \[-2\*\*63, 2\*\*64\), got 18446744073709551616"),
        ({"seed": 1.5}, r"seed must be an integer in .*, got 1.5"),
        ({"top_k": -1}, "top_k must be an integer of at least 0, got -1"),
        ({"top_k": 2.5}, "top_k must be an integer of at least 0, got 2.5"),
        ({"temperature": "1"}, "temperature must be at least 0 and finite, got '1'"),
        ({"top_p": "x"}, r"top_p must be in \[0, 1\], got 'x'"),
        ({"top_p": -0.1}, r"top_p must be in \[0, 1\], got -0.1"),
        ({"top_p": 1.1}, r"top_p must be in \[0, 1\], got 1.1"),
    ],
)
def test_samplers_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**options)


@pytest.mark.parametrize(
    "prompts, count, message",
    [
        ([], 1, r"prompts must hold at least one token each, got lengths \[\]"),
        ([[1], []], 1, r"prompts must hold at least one token each, got lengths \[1, 0\]"),
        ([[1] * 40], 3, r"prompts must have fewer than model.max_position_embeddings \(32\) tokens, got 40"),
        ([[1] * 30], 3, r"max_new_tokens must be at most 2 after a prompt of 30 tokens .* got 3"),
        ([[1]], -1, "max_new_tokens must be an integer of at least 0, got -1"),
        ([[1]], 2.0, "max_new_tokens must be an integer of at least 0, got 2.0"),
        ([[1], [5, 97]], 1, r"prompts\[1\] must hold integers in \[0, 97\), model.vocab_size, got 97"),
        ([[-1]], 1, r"prompts\[0\] must hold integers in \[0, 97\), model.vocab_size, got -1"),
        ([[1.5]], 1, r"prompts\[0\] must be a sequence of integers, got \[1.5\]"),
        ([1, 2], 1, r"prompts\[0\] must be a sequence of integers, got 1"),
        (["ab"], 1, r"prompts\[0\] must be a sequence of integers, got 'ab'"),
    ],
)
def test_prompts_that_cannot_be(prompts: Any, count: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(_model(), prompts, max_new_tokens=count)


@pytest.mark.parametrize("name", ["pythia", "gpt3", "alibi", "mistral"])
def test_log_probabilities_are_those_of_the_full_forward(name: str) -> None:
    """Of the model, whatever the sampler's temperature, for prompts of three lengths."""
    model = _model(**MODELS[name])
    rows = complete(model, PROMPTS, max_new_tokens=6, sampler=Sampler(temperature=0.7, seed=3))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + row.tokens]))[0].double().log_softmax(-1)
        expected = [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(row.tokens)]
        assert row.logprobs == pytest.approx(expected, abs=2e-5) and row.finished == "length"


def test_what_ends_a_row() -> None:
    model = _model()
    greedy = generate(model, PROMPTS, max_new_tokens=8, sampler=Sampler(temperature=0))
    eod, stop = greedy[0][3], greedy[1][2]
    rows = complete(
        model, PROMPTS, max_new_tokens=8, sampler=Sampler(temperature=0), eod=eod, stop_tokens=[stop],
        stop=lambda tokens: len(tokens) == 5,
    )  # fmt: skip
    for row, tokens in zip(rows, greedy, strict=True):
        ends = [(tokens.index(t), kind) for t, kind in ((eod, "eod"), (stop, "stop")) if t in tokens[:5]]
        count, kind = min(ends, default=(5, "stop"))
        assert (row.tokens, row.finished, len(row.logprobs)) == (tokens[:count], kind, count)


def test_prompts_may_be_tensors() -> None:
    model, greedy = _model(), Sampler(temperature=0)
    rows: Any = [torch.tensor(prompt) for prompt in PROMPTS]
    whole: Any = torch.tensor([[1, 2], [3, 4]])
    assert generate(model, rows, max_new_tokens=3, sampler=greedy) == generate(
        model, PROMPTS, max_new_tokens=3, sampler=greedy
    )
    assert generate(model, whole, max_new_tokens=3, sampler=greedy) == generate(
        model, whole.tolist(), max_new_tokens=3, sampler=greedy
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(temperature: float) -> None:
    """Else greedy answers would be of token 0, and a sampled one torch's error, on a GPU an assertion of a kernel."""
    model = _model()
    with torch.no_grad():
        model.embed.weight[3] = torch.nan
    for function in (generate, complete):
        with pytest.raises(ValueError, match=r"the model's logits must be finite, got nan for prompts\[1\]"):
            function(model, PROMPTS, max_new_tokens=2, sampler=Sampler(temperature=temperature))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt3", "alibi", "mistral"])
def test_caches_that_do_not_belong_to_the_tokens(name: str) -> None:
    model, tokens = _model(**MODELS[name]), torch.ones(2, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="cache must have rows for the 6 tokens of each sequence, got 5"):
        model(tokens, cache=model.new_cache(2, 5))
    for batch in (1, 3):
        with pytest.raises(ValueError, match=f"cache must be made for the 2 sequences of tokens, got one for {batch}"):
            model(tokens, cache=model.new_cache(batch, 8))
    cache = model.new_cache(2, 8)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="cache must be made for the 1 sequences of tokens, got one for 2"):
        model(tokens[:1, :1], cache=cache)
    for argument in ("position_ids", "document_ids"):
        with pytest.raises(NotImplementedError, match=f"{argument} must be None with a KV cache"):
            model(tokens[:, :1], cache=cache, **{argument: torch.zeros(2, 1, dtype=torch.int32)})
    # two of them were one for both sequences, a larger one counted keys of zeros
    for lengths, message in (
        (torch.tensor([3]), r"have shape \[2\] \(one of each sequence\), got \[1\]"),
        (torch.tensor([3, 7]), r"be in \[0, 7\), got 7"),
        (torch.tensor([3.0, 2.0]), "be int32 or int64, got float32"),
    ):
        with pytest.raises(ValueError, match=f"CausalLM: lengths must {message}"):
            model(tokens, cache=model.new_cache(2, 8), lengths=lengths)
    with pytest.raises(ValueError, match="CausalLM: lengths must come with a cache, got a int64 tensor"):
        model(tokens, lengths=torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="max_length must be at least 0, got -1"):
        model.new_cache(2, -1)


def test_more_tokens_than_learned_positions() -> None:
    with pytest.raises(ValueError, match=r"tokens must be at most 32 a sequence, got \[1, 33\]"):
        _model(**MODELS["gpt3"])(torch.zeros(1, 33, dtype=torch.int64))
    model = _model(**MODELS["gpt3"])
    with torch.no_grad():
        cache = model.new_cache(1, 40)
        model(torch.zeros(1, 31, dtype=torch.int64), cache=cache)
        # they were "index out of range in self"
        with pytest.raises(ValueError, match=r"CausalLM: positions behind the cache must be in \[0, 32\), got 32"):
            model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=r"CausalLM: position_ids must be in \[0, 32\), got 33"):
        model(torch.zeros(1, 2, dtype=torch.int64), position_ids=torch.tensor([[1, 33]]))


def test_what_a_graph_of_steps_cannot_serve() -> None:
    """`why_not` says it beforehand; on a CPU there are no graphs."""
    model = _model(**MODELS["gpt3"])
    assert why_not(model) == "not all parameters are on one GPU"
    handle = model.layers[1].mlp.register_forward_pre_hook(lambda *_: None)
    assert why_not(model) == "layers.1.mlp has hooks, which a graph does not call"
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert why_not(model) == "modules have global hooks, which a graph does not call"
    handle.remove()
    with torch.autocast("cuda", torch.bfloat16):
        # without a GPU PyTorch leaves it disabled
        enabled = torch.is_autocast_enabled("cuda")
        assert ("autocast" in str(why_not(model))) == enabled
    model.is_last = False
    assert why_not(model) == "the model is sharded over ranks"
    model.is_last = True
    model.layers[0].compile()
    assert why_not(model) == "layers.0 is compiled by torch.compile"
