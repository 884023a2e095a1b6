"""The public API: every argument and result has a type that says something, and every name of a thing is one name."""

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import powertrain
from powertrain.models.causal_lm import CausalLM

PACKAGES = [
    "powertrain", *(f"powertrain.{name}" for name in ("losses", "quant", "parallel", "nn", "models", "train")),
]  # fmt: skip
# (name, argument): why any value is right there
ANY = {
    ("AdamW.__init__", "params"): "as torch.optim's: groups are dictionaries",
    ("AdamW.add_param_group", "param_group"): "as torch.optim's",
    ("AdamW.load_state_dict", "state_dict"): "as torch.optim's",
    ("explain_attention", "arguments"): "stands for any argument of a call",
    ("explain_decode_attention", "arguments"): "stands for any argument of a call",
    ("configure", "fields"): "the fields of the config, which checks them",
    ("presets", "return"): "fields of configs",
    ("train", "config"): "a mapping as YAML reads it",
}
# one name for each thing, and what it must not be called beside it
OTHER_NAMES = {
    "is_causal": {"causal", "causal_mask"},
    "seqused_q, seqused_k": {"query_lengths", "key_lengths", "seqlens_q", "lengths_q", "q_lens", "seq_lens"},
    "cu_seqlens": {"cu_seq_lens", "cumulative_lengths", "cu_lens"},
    "x": {"input", "inputs", "hidden_states", "tensor"},
    "target": {"labels", "label"},
    "scale": {"softmax_scale", "sm_scale"},
    "dropout_p": {"dropout_prob", "p_dropout"},
    "softcap": {"logit_softcap", "soft_cap", "logits_soft_cap"},
    "eps": {"epsilon", "variance_epsilon"},
}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of every public function, and of the public methods and __init__ of every public class."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", vars(module)):
            thing = getattr(module, name)
            if inspect.isfunction(thing) and not name.startswith("_"):
                yield name, thing
            elif inspect.isclass(thing) and thing.__module__.startswith("powertrain"):
                for key, value in vars(thing).items():
                    method = getattr(value, "__func__", value)
                    if inspect.isfunction(method) and (key == "__init__" or not key.startswith("_")):
                        yield f"{name}.{key}", method


FUNCTIONS = dict(public())


def says_any(hint: Any) -> bool:
    return hint is Any or any(says_any(part) for part in typing.get_args(hint))


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    inner = inspect.unwrap(function)
    names = {"torch": torch, "CausalLM": CausalLM, **inner.__globals__}
    return typing.get_type_hints(inner, globalns=names)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_and_result_is_typed(name: str) -> None:
    function = FUNCTIONS[name]
    found = hints(function)
    taken = [p for p in inspect.signature(inspect.unwrap(function)).parameters if p not in ("self", "cls")]
    if name != "FP8Linear.__init__":  # nn.Linear's own
        assert set(taken) <= found.keys() and "return" in found
    vague = {key for key, hint in found.items() if says_any(hint)}
    assert not {key for key in vague if (name, key) not in ANY}


def test_the_exceptions_are_needed() -> None:
    for name, key in ANY:
        assert says_any(hints(FUNCTIONS[name])[key]), (name, key)


def test_one_name_for_each_thing() -> None:
    for name, function in FUNCTIONS.items():
        if "." in name:  # modules take labels and hidden states, as those of transformers
            continue
        taken = set(inspect.signature(function).parameters)
        for right, others in OTHER_NAMES.items():
            assert not taken & others, f"{name}: {taken & others} should be {right}"


def test_softcap_is_none_where_there_is_none() -> None:
    capped = [f for f in FUNCTIONS.values() if "softcap" in inspect.signature(f).parameters]
    assert len(capped) >= 6
    assert all(inspect.signature(function).parameters["softcap"].default is None for function in capped)


def test_overloads_have_the_keywords_of_the_function() -> None:
    """What type checkers see of `attention` is what it takes."""
    api = importlib.import_module("powertrain.ops.attention.api")
    for function, options in ((powertrain.attention, api._Dense), (powertrain.varlen_attention, api._Packed)):
        taken = inspect.signature(function).parameters.values()
        keywords = {p.name for p in taken if p.kind is p.KEYWORD_ONLY} - {"return_lse"}
        assert keywords == set(options.__annotations__)


@pytest.mark.parametrize("name", sorted(name for name in FUNCTIONS if "." not in name))
def test_docstrings_are_whole(name: str) -> None:
    """A first sentence; the shapes of tensors; the errors of functions that check."""
    function = inspect.unwrap(FUNCTIONS[name])
    text = inspect.getdoc(function) or ""
    assert text.split("\n")[0].endswith((".", ":")), text[:80]
    tensors = [key for key, hint in hints(function).items() if hint in (torch.Tensor, torch.Tensor | None)]
    refers = bool(re.search(r"`\w+`", text))  # to the function that it is a form of
    if any(key != "return" for key in tensors):
        assert "[" in text or refers, "shapes"
    source = inspect.getsource(function)
    if "checks." in source or "raise ValueError" in source:
        assert re.search(r"Raises|raises|ValueError|errors", text) or (refers and "\n" not in text), "errors"
