"""The keys of GPT-NeoX's optimizers as our optimizer section.

Facts from GPT-NeoX (Apache-2.0; no code): megatron/training.py (get_optimizer), megatron/optimizers.py (Lion),
megatron/model/word_embeddings.py (use_bnb_optimizer).
"""

import re
from typing import Any

from powertrain.train.config.neox_source import NeoXKeys, given, is_kind

_OTHER_OPTIMIZERS = {
    # AdamW is what most of these configs want
    **dict.fromkeys(("onebitadam", "sm3", "madgrad_wd", "lamb", "adafactor", "muon"), "use Adam, which is AdamW"),
    "cpu_torch_adam": "its weight decay is L2, not decoupled; use Adam, which is AdamW",
}
# cpu_adam is AdamW on the host's memory, for ZeRO-Offload
_KINDS = {"adam": "adamw", "adamw": "adamw", "cpu_adam": "adamw", "lion": "lion", "sgd": "sgd"}
_BETAS = {"adamw": [0.9, 0.999], "adamw8bit": [0.9, 0.999], "lion": [0.9, 0.99]}
# implementation choices of torch's and Apex's optimizers
# they change memory or speed
_SAME_RESULT = ("set_grad_none", "fused", "foreach", "torch_adam", "capturable")


def optimizer(keys: NeoXKeys) -> dict[str, Any]:
    """The fields of optimizer; mistakes and rows go to `keys`."""
    section = keys.section("optimizer")
    params = section.get("params") or {}
    if not isinstance(params, dict):
        keys.wrong(("optimizer", "params"), f"must be a section, got {given(params)}")
        params = {}
    kind = _kind(keys, section)
    for key in section.keys() - {"type", "params"}:
        keys.wrong(("optimizer", key), "is unknown; known: type, params")
    # torch's defaults, which GPT-NeoX leaves standing
    values: dict[str, Any] = {"lr": 0.001, "eps": 1e-8} if kind.startswith("adam") else {"lr": 0.001}
    values |= {"betas": _BETAS[kind]} if kind in _BETAS else {"momentum": 0.0}
    known = tuple(values)
    values |= {key: _number(keys, key, value) for key, value in params.items() if key in known}
    for key, value in params.items():
        _param(keys, key, value, kind, known)
    for key in ("lr", "eps"):
        if key in values and (not is_kind(values[key], "float") or values[key] <= 0):
            keys.wrong(("optimizer", "params", key), f"must be a number above 0, got {given(values[key])}")
    if "betas" in values and not _are_betas(values["betas"]):
        keys.wrong(("optimizer", "params", "betas"), f"must be two numbers in [0, 1), got {given(values['betas'])}")
    if "momentum" in values and not _are_betas([values["momentum"]] * 2):
        keys.wrong(("optimizer", "params", "momentum"), f"must be a number in [0, 1), got {given(values['momentum'])}")
    decay = keys.number("weight_decay", 0.1, least=0)
    # GPT-NeoX decays neither norms nor biases, torch all
    return {"kind": kind, **values, "weight_decay": decay, "decay_norms_and_biases": False}


def _number(keys: NeoXKeys, key: str, value: Any) -> Any:
    """1.0e_8, of GPT-NeoX's gmlp_small.yml, as 1.0e-8; any other value as it is."""
    # NeoXArgs checks that optimizer is a section and no more: the text reaches Adam, which cannot compute with it
    if not (isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e_\d+", value)):
        return value
    words = f"{value} is text to YAML, with which GPT-NeoX's optimizer fails; read as {value.replace('_', '-')}"
    keys.add_inner_row(("optimizer", "params", key), value, "changes numerics", words)
    return float(value.replace("_", "-"))


def _are_betas(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 2 and all(is_kind(b, "float") and 0 <= b < 1 for b in values)


def _kind(keys: NeoXKeys, section: dict[str, Any]) -> str:
    name = section.get("type", "Adam")
    # an unknown type goes on as AdamW, so that its parameters are checked too
    kind = _KINDS.get(str(name).lower(), "adamw")
    words = {
        "adamw": "AdamW: decoupled weight decay, which Adam means in GPT-NeoX too",
        "lion": "Lion, in plain PyTorch",
        "sgd": "torch.optim.SGD; GPT-NeoX takes mup's MuSGD, which is the same without muP's shapes",
    }[kind]
    if str(name).lower() in _OTHER_OPTIMIZERS:
        keys.unsupported("optimizer", f"type: {name}", _OTHER_OPTIMIZERS[str(name).lower()])
    elif str(name).lower() not in _KINDS:
        keys.wrong(("optimizer", "type"), f"must be Adam, AdamW, cpu_adam, Lion or SGD, got {given(name)}")
    elif "optimizer" in keys.values:
        keys.add_row("optimizer", "mapped", words + ("; on the GPU" if str(name).lower() == "cpu_adam" else ""))
    else:
        keys.add_row("optimizer", "mapped", "AdamW with lr 0.001, betas 0.9, 0.999: GPT-NeoX's defaults", "Adam")
    # GPT-NeoX asks for it with Adam only
    if kind == "adamw" and keys.get("use_bnb_optimizer"):
        return _eight_bits(keys)
    return kind


def _eight_bits(keys: NeoXKeys) -> str:
    # StableEmbedding would be another model
    if keys.get("pos_emb", "learned") == "learned":
        advice = (
            "use other positions: GPT-NeoX puts a layer norm after learned ones then (bitsandbytes' StableEmbedding)"
        )
        keys.unsupported("use_bnb_optimizer", True, advice)
    words = "optimizer.kind: adamw8bit, by torchao (pip install torchao); bitsandbytes rounds its moments otherwise"
    keys.add_row("use_bnb_optimizer", "changes numerics", words)
    return "adamw8bit"


def _param(keys: NeoXKeys, key: str, value: Any, kind: str, known: tuple[str, ...]) -> None:
    path = ("optimizer", "params", key)
    if key == "weight_decay":
        # GPT-NeoX hands both to the constructor, which raises for a repeated keyword
        keys.wrong(path, "must be the top-level key weight_decay; GPT-NeoX passes both and fails")
    elif key in ("adam_w_mode", "bias_correction") and value is not True:
        keys.unsupported("optimizer", f"{key}: {value}", "remove it; Adam is AdamW with bias correction")
    elif key == "amsgrad" and value:
        keys.unsupported("optimizer", f"{key}: {value}", "remove it")
    elif key in ("nesterov", "dampening", "maximize") and kind == "sgd" and value:
        keys.unsupported("optimizer", f"{key}: {value}", "remove it; only momentum is there")
    elif key in _SAME_RESULT:
        keys.add_inner_row(path, value, "ignored", "an implementation choice of Adam; the result is the same")
    elif key in ("betas", "eps", "momentum") and key not in known:
        keys.wrong(path, f"must be left out with optimizer.type {kind}, which has none")
    elif key not in (*known, "adam_w_mode", "bias_correction", "amsgrad", "max_grad_norm", "nesterov", "dampening"):
        keys.wrong(path, f"is unknown; known: {', '.join(known)}")
