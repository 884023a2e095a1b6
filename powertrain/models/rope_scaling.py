"""Hugging Face's `rope_scaling` dictionaries, as our schemes."""

import dataclasses
from typing import Any

from powertrain.ops.rope_table import DynamicNTK, Linear, Llama3, LongRoPE, Scheme, YaRN

_SCHEMES: dict[str, type] = {
    "linear": Linear,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
}


def scheme(scaling: dict[str, Any] | None) -> Scheme | None:
    """The scheme of {"rope_type": "llama3", "factor": 8.0, ...}; its other keys are the scheme's fields.

    Raises ValueError for a type or field that is not known, and for a field that is missing.
    """
    if scaling is None:
        return None
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in scaling.items()}
    kind = fields.pop("rope_type", None) or fields.pop("type", None)
    fields = {key: value for key, value in fields.items() if key not in ("type", "rope_theta")}
    if kind in (None, "default"):
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
    return made
