"""Hugging Face's rotary parameters, as our schemes: `rope_scaling` of transformers 4, `rope_parameters` of 5."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from powertrain.ops.rope_table import DynamicNTK, Linear, Llama3, LongRoPE, Scheme, YaRN, check_scheme

_SCHEMES: dict[str, type] = {
    "linear": Linear,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
}


def scheme(scaling: dict[str, Any] | None, theta: float | None = None) -> Scheme | None:
    """The scheme of {"rope_type": "llama3", "factor": 8.0, ...}; its other keys are the scheme's fields.

    theta   the model's, which a rope_theta among the keys must equal; None: not compared
    Raises ValueError for a type or field that is not known, for a field that is missing, and for fields without a type.
    """
    if scaling is None:
        return None
    # JSON has lists, frozen dataclasses tuples
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in scaling.items()}
    # older configs of transformers have `type`
    kind = fields.pop("rope_type", None) or fields.pop("type", None)
    fields.pop("type", None)
    given = fields.pop("rope_theta", theta)
    if theta is not None and given != theta:
        raise ValueError(f"rope_scaling.rope_theta must be left out, or be model.rope_theta ({theta}), got {given}")
    if kind in (None, "default"):
        if fields:
            types = ", ".join(_SCHEMES)
            raise ValueError(f"rope_scaling.rope_type must be one of {types} with {', '.join(fields)}, got {kind!r}")
        return None
    if kind not in _SCHEMES:
        raise ValueError(f"rope_scaling.rope_type must be default, {', '.join(_SCHEMES)}, got {kind!r}")
    known = dataclasses.fields(_SCHEMES[kind])
    unknown = sorted(set(fields) - {f.name for f in known})
    missing = [f.name for f in known if f.name not in fields and f.default is dataclasses.MISSING]
    if unknown or missing:
        names = ", ".join(f.name for f in known)
        raise ValueError(f"rope_scaling of type {kind} must have {names}; missing {missing}, unknown {unknown}")
    made: Scheme = _SCHEMES[kind](**fields)
    check_scheme("model", "rope_scaling", made)
    return made


class HFRope(NamedTuple):
    """theta: base; scaling: as `scheme` takes it, or None; fraction: share of a head's channels that turn."""

    theta: float
    scaling: dict[str, Any] | None
    fraction: float


def from_hf_rope(values: Mapping[str, Any], *, fraction: float = 1.0) -> HFRope:
    """The rotary embedding of a config.json, in the spelling of transformers 4 or 5; `fraction` is its default.

    Raises ValueError naming unsupported parameters.
    """
    # null entries are those that a class does not use
    rope = {
        k: v for k, v in (values.get("rope_scaling") or values.get("rope_parameters") or {}).items() if v is not None
    }
    for key, value in rope.items():
        # one set per kind of layer: our layers share one table
        if isinstance(value, Mapping):
            raise ValueError(f"config.json: rope_parameters must be one set for all layers, got one for {key}")
    spelled = rope.pop("type", "default")
    kind = rope.pop("rope_type", spelled)
    theta = rope.pop("rope_theta", values.get("rope_theta", values.get("rotary_emb_base", 10000.0)))
    fraction = rope.pop(
        "partial_rotary_factor", values.get("partial_rotary_factor", values.get("rotary_pct", fraction))
    )
    if kind == "default":
        return HFRope(float(theta), None, float(fraction))
    longest = values.get("max_position_embeddings")
    # longrope picks its factors by the length of the batch in transformers
    if kind == "longrope":
        raise ValueError("config.json: rope_type longrope is not supported: its angles there depend on the batch")
    if kind in ("yarn", "llama3", "dynamic"):
        # the trained length may stand at either level of the config
        given = values.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", longest))
        rope["original_max_position_embeddings"] = given
    if kind == "dynamic" and rope["original_max_position_embeddings"] != longest:
        raise ValueError(
            "config.json: rope_type dynamic must have original_max_position_embeddings equal to "
            f"max_position_embeddings ({longest}), got {rope['original_max_position_embeddings']}: beyond it the "
            "angles depend on the batch"
        )
    scaling = {"rope_type": kind, **rope}
    scheme(scaling)
    return HFRope(float(theta), scaling, float(fraction))


def to_hf_rope(theta: float, scaling: dict[str, Any] | None, fraction: float = 1.0) -> dict[str, Any]:
    """The keys of a config.json, in both spellings, so that transformers 4 and 5 read the same.

    Raises ValueError for a scheme whose angles are fixed here and depend on the batch there.
    """
    rope = dict(scaling or {})
    # either may have been written in the model's config; transformers 5 reads `rope_type` alone
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    if kind == "longrope":
        raise ValueError("model.rope_scaling must not be longrope: its angles depend on the batch in transformers")
    rope = {"rope_type": kind, **rope, "rope_theta": theta}
    if fraction != 1.0:
        rope["partial_rotary_factor"] = fraction
    # both spellings: transformers 5 reads rope_parameters, 4 rope_theta and rope_scaling
    return {"rope_theta": theta, "rope_scaling": None if scaling is None else dict(rope), "rope_parameters": rope}
