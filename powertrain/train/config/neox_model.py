"""Model of a GPT-NeoX config, translated to ours. Facts as in neox.py."""

import math
from typing import Any

from powertrain.train.config import neox_sparsity
from powertrain.train.config.neox_data import tokenizer
from powertrain.train.config.neox_experts import experts
from powertrain.train.config.neox_source import NeoXKeys, given, is_kind
from powertrain.train.data.tokenizer import load_tokenizer, padded_vocab_size

_ACTIVATIONS = {
    "gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu", "geglu": "geglu", "reglu": "reglu",
    "swiglu": "swiglu",
}  # fmt: skip
# names that GPT-NeoX computes and that there is no kernel for: refused by name, not as typing errors
_OTHER_ACTIVATIONS = dict.fromkeys(("softsign", "mish", "bilinear", "glu"), f"use one of {', '.join(_ACTIVATIONS)}")
_GATED = ("geglu", "reglu", "swiglu")
# TransformerEngine's norms compute the same function
_NORMS = {"layernorm": "layer_norm", "te_layernorm": "layer_norm", "rmsnorm": "rms_norm", "te_rmsnorm": "rms_norm"}
_INITS = {
    name: name
    for name in (
        "normal", "scaled_normal", "orthogonal", "xavier_uniform", "xavier_normal", "wang_init", "small_init",
        "single_residual_scaled_normal",
    )
}  # fmt: skip
_NO_SCALED_ORTHOGONAL = {"scaled_orthogonal": "use orthogonal, or scaled_normal"}


def model(keys: NeoXKeys) -> dict[str, Any]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if keys.lacks(name):
            keys.wrong((name,), "must be given")
    layer_types, sparse = _layer_types(keys)
    # GPT-NeoX can share one layer's weights among several; ours never do
    unique = keys.get("num_unique_layers")
    if unique is not None and unique != keys.get("num_layers"):
        keys.unsupported("num_unique_layers", unique, "remove it; every layer has its own parameters")
    kinds = {"regular": "regular", "llama": "llama"}
    # identity leaves the MLP out, which makes another model
    kind = keys.choice("mlp_type", "regular", kinds, {"identity": "every layer has an MLP"})
    others = dict.fromkeys(("scalenorm", "non_parametric_layernorm"), "use layernorm or rmsnorm")
    norm = keys.choice("norm", "layernorm", _NORMS, others)
    is_layer_norm = norm == "layer_norm"
    # the key exists in GPT-NeoX and is not read there: the result is the same either way
    if is_layer_norm and not keys.get("use_bias_in_norms", True):
        keys.add_row("use_bias_in_norms", "ignored", "layer norms have a bias, as in GPT-NeoX, which never reads it")
    # GPT-NeoX counts the keys before the query's own, ours all that it sees
    window = keys.number("sliding_window_width", above=-1)
    mlp = _llama_mlp(keys) if kind == "llama" else _mlp(keys)
    return {
        "architecture": "gpt_neox",
        "vocab_size": _vocab_size(keys),
        "hidden_size": keys.get("hidden_size"),
        "num_layers": keys.get("num_layers"),
        "num_heads": keys.get("num_attention_heads"),
        "num_kv_heads": keys.get("num_kv_heads"),
        "max_position_embeddings": keys.get("max_position_embeddings"),
        "tie_embeddings": not keys.get("no_weight_tying", False),
        "norm": norm,
        # different defaults: 1e-5 for layer norms, 1e-8 for RMS norms
        "norm_eps": keys.get("layernorm_epsilon", 1e-5) if is_layer_norm else keys.get("rms_norm_epsilon", 1e-8),
        "norm_bias": is_layer_norm,
        "attention_bias": keys.get("use_bias_in_attn_linear", True),
        **mlp,
        "layer_types": layer_types,
        **sparse,
        **_gmlp(keys, layer_types, mlp["intermediate_size"]),
        **experts(keys, mlp["activation"]),
        **_positions(keys),
        "parallel_residual": keys.get("gpt_j_residual", False),
        "shared_norm": keys.get("gpt_j_residual", False) and keys.get("gpt_j_tied", False),
        # one more: itself included
        "sliding_window": None if window is None else window + 1,
        "hidden_dropout": keys.get("hidden_dropout", 0.0),
        "attention_dropout": keys.get("attention_dropout", 0.0),
        "init_method": keys.choice("init_method", "normal", _INITS, _NO_SCALED_ORTHOGONAL),
        "output_init_method": keys.choice("output_layer_init_method", "scaled_normal", _INITS, _NO_SCALED_ORTHOGONAL),
        "init_std": keys.get("init_method_std", 0.02),
    }


def _positions(keys: NeoXKeys) -> dict[str, Any]:
    known = {name: name for name in ("rotary", "learned", "alibi", "none")}
    refused = dict.fromkeys(("sinusoidal", "rpe"), f"use one of {', '.join(known)}")
    kind = keys.choice("pos_emb", "learned", known, refused)
    if kind != "rotary":
        for key in ("rotary_pct", "rotary_emb_base"):
            # a row in the table, since a key without effect surprises
            keys.add_row(key, "ignored", f"pos_emb is {kind}")
    pct = keys.number("rotary_pct", 1.0, above=0)
    if pct > 1:
        keys.wrong(("rotary_pct",), f"must be at most 1, got {given(pct)}")
        pct = 1.0
    return {"position_embedding": kind, "rotary_pct": pct, "rope_theta": keys.get("rotary_emb_base", 10000)}


def _mlp(keys: NeoXKeys) -> dict[str, Any]:
    """activation and width: gated MLPs get two thirds of intermediate_size, so that both kinds have as many weights."""
    name = str(keys.get("activation", "gelu")).lower()
    kind = keys.choice("activation", "gelu", _ACTIVATIONS, _OTHER_ACTIVATIONS)
    # the fused kernel of GPT-NeoX computes the tanh form, whatever the name says
    if name == "gelu" and keys.get("bias_gelu_fusion"):
        kind = "gelu_tanh"
        keys.add_row(
            "bias_gelu_fusion", "changes numerics", "GELU becomes its tanh approximation, as in GPT-NeoX; false: erf"
        )
    elif keys.get("bias_gelu_fusion"):
        keys.add_row("bias_gelu_fusion", "mapped", f"no effect with activation {name}, as in GPT-NeoX")
    width = keys.number("intermediate_size", above=0)
    factor = keys.number("expansion_factor", above=0)
    if width is not None and factor is not None:
        keys.wrong(("expansion_factor",), "must not stand beside intermediate_size")
    hidden = keys.get("hidden_size") or 1
    # an int, as there: a factor of 8/3 rounds down
    width = width or (int(factor * hidden) if factor else 4 * hidden)
    if keys.get("te_layernorm_mlp"):
        return _te_mlp(keys, kind, int(width))
    return {
        "activation": kind,
        "intermediate_size": _mlp_width(keys, width, name in _GATED),
        "mlp_bias": keys.get("use_bias_in_mlp", True),
    }


def _te_mlp(keys: NeoXKeys, kind: str, width: int) -> dict[str, Any]:
    """TransformerEngine's LayerNormMLP as GPT-NeoX calls it: tanh GELU, the whole width, biases, an eps of its own."""
    # GPT-NeoX builds LayerNormMLP without handing the eps on
    for key, eps in (("layernorm_epsilon", 1e-5), ("rms_norm_epsilon", 1e-8)):
        used = key.startswith("rms") == ("rms" in str(keys.get("norm", "layernorm")))
        if used and keys.get(key, eps) != eps:
            todo = f"with te_layernorm_mlp the MLP's norm has {eps:g} in GPT-NeoX whatever the key says: write that"
            keys.unsupported(key, keys.get(key), todo)
    # TransformerEngine's GELU is the tanh form
    kind = "gelu_tanh" if kind == "gelu" else kind
    words = f"TransformerEngine's MLP: model.activation {kind}, intermediate_size {width}, biases; by our kernels"
    keys.add_row("te_layernorm_mlp", "mapped", words)
    return {"activation": kind, "intermediate_size": width, "mlp_bias": True}


_LLAMA_MULTIPLE = 256


def _llama_mlp(keys: NeoXKeys) -> dict[str, Any]:
    """mlp_type llama of GPT-NeoX 2023 to 2024: gated, without biases, 8/3 of hidden_size rounded up to 256."""
    gated = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu", "swiglu": "swiglu"}
    kind = keys.choice("activation", "gelu", gated)
    width = keys.number("intermediate_size", above=0)
    if width is None:
        rows = int(2 * (keys.get("hidden_size") or 1) * 4 / 3)
        width = math.ceil(rows / _LLAMA_MULTIPLE) * _LLAMA_MULTIPLE
    # the first matrix and the second are rounded apart there, so some widths cannot be built at all
    keys.add_row("mlp_type", "mapped", f"model.activation {kind}, intermediate_size {width}, mlp_bias false")
    return {"activation": kind, "intermediate_size": int(width), "mlp_bias": False}


def _mlp_width(keys: NeoXKeys, width: int, gated: bool) -> int:
    """GPT-NeoX rounds the first matrix's rows to 2m, the second's columns to m; they must fit each other."""
    # the default of 1 leaves every width as it is
    m = int(keys.number("mlp_multiple_of", 1, above=0))
    rows = int(width * 2 / 3) if gated else width
    columns = rows // 2 if gated else rows
    rows = math.ceil(rows / (2 * m)) * 2 * m
    columns = math.ceil(columns / m) * m
    if (rows // 2 if gated else rows) != columns:
        key = next((k for k in ("intermediate_size", "expansion_factor") if k in keys.values), "hidden_size")
        words = f"makes an MLP of {rows} rows into {columns} columns in GPT-NeoX, which do not fit"
        keys.wrong((key,), f"{words}; use a multiple of {6 * m if gated else 2 * m}")
        # any width that lets validation go on: the error is noted
        return 1
    if gated:
        words = f"model.intermediate_size {columns}: gated, so two thirds of {width} in two matrices"
        keys.add_row("intermediate_size", "mapped", words, width)
    return int(columns)


_OTHER_ATTENTION = ("rwkv", "mamba")
# flash and global compute the same; which kernel runs is the selector's choice
_LAYER_TYPES = {
    "global": "attention", "flash": "attention", "gmlp": "gmlp", "amlp": "amlp",
    **dict.fromkeys(neox_sparsity.KINDS, "sparse"),
}  # fmt: skip


def _layer_types(keys: NeoXKeys) -> tuple[tuple[str, ...], dict[str, Any]]:
    """model.layer_types: the kinds of the layers, up to where they repeat; and the field sparsity, if one needs it."""
    config = keys.get("attention_config")
    layers = keys.get("num_layers")
    all_attention = ("attention",), dict[str, Any]()
    # num_layers is missing or wrong, which another error says
    if config is None or not isinstance(layers, int):
        return all_attention
    try:
        kinds = _expanded(config, layers)
    except ValueError as error:
        keys.wrong(("attention_config",), str(error))
        return all_attention
    others = sorted({kind for kind in kinds if kind not in _LAYER_TYPES})
    if others and set(others) <= set(_OTHER_ATTENTION):
        keys.unsupported(
            "attention_config", ", ".join(others), f'use [[["flash"], {layers}]]; sliding_window_width is a local one'
        )
    elif others:
        # a misspelt kind is an error of the user, a known one a missing feature
        keys.wrong(("attention_config",), f"must name {', '.join(_LAYER_TYPES)} layers, got {', '.join(others)}")
    elif len(kinds) != layers:
        keys.wrong(("attention_config",), f"must have {layers} layers (num_layers), got {len(kinds)}")
    else:
        return _shortest_period([_LAYER_TYPES[kind] for kind in kinds]), neox_sparsity.sparsity(keys, kinds)
    return all_attention


def _shortest_period(kinds: list[str]) -> tuple[str, ...]:
    count = len(kinds)
    # the shortest period: layer_types is shown and saved, and [attention] reads better than 24 times that
    lengths = (n for n in range(1, count + 1) if count % n == 0 and kinds[:n] * (count // n) == kinds)
    return tuple(kinds[: next(lengths)])


def _gmlp(keys: NeoXKeys, layer_types: tuple[str, ...], mlp_width: int) -> dict[str, Any]:
    """Fields of gMLP layers, whose width is 4 * hidden_size and whose gates are as long as a sample in GPT-NeoX."""
    if not {"gmlp", "amlp"} & set(layer_types):
        keys.add_row("gmlp_attn_dim", "ignored", "of gmlp layers, which there are none of (attention_config)")
        return {}
    # GPT-NeoX's gMLP under tensor parallelism normalizes a rank's channels by themselves
    if keys.get("model_parallel_size", 1) > 1:
        todo = "use 1 with gmlp layers: there each rank's channels have a norm and gates of their own, another model"
        keys.unsupported("model_parallel_size", keys.get("model_parallel_size"), todo)
    # a gated activation has two matrices where gMLP has its own gate
    if str(keys.get("activation", "gelu")).lower() in _GATED or keys.get("mlp_type") == "llama":
        keys.wrong(("activation",), f"must have no gate with gmlp layers, got {keys.get('activation')}")
    width = 4 * (keys.get("hidden_size") or 1)
    has_others = not set(layer_types) <= {"gmlp", "amlp"}
    if has_others and mlp_width != width:
        todo = f"gmlp layers have {width} (4 * hidden_size) in GPT-NeoX, the others must have as many here"
        keys.unsupported("intermediate_size", mlp_width, todo)
    if not has_others:
        for key in ("intermediate_size", "expansion_factor", "mlp_multiple_of", "use_bias_in_mlp"):
            keys.add_row(key, "ignored", f"gmlp layers have {width} channels (4 * hidden_size) and no biases")
    length, positions = keys.get("seq_length"), keys.get("max_position_embeddings")
    # gates have one weight per position: another length is another model
    if length is not None and positions is not None and length != positions:
        if str(keys.get("pos_emb", "learned")).lower() == "learned" or length > positions:
            keys.wrong(("max_position_embeddings",), f"must be seq_length ({length}) with gmlp layers, got {positions}")
        keys.add_row("max_position_embeddings", "mapped", f"seq_length ({length}), which gmlp layers have weights for")
        positions = length
    words = "model.layer_types: no residual connection, no biases but the gate's, as there"
    keys.add_row("attention_config", "mapped", f"{words}; the gate spans the sequence (docs/coming-from-gpt-neox.md)")
    return {
        "gmlp_attention_dim": keys.number("gmlp_attn_dim", 64, above=0),
        # None: 4 * hidden_size, which GPT-NeoX's gMLP has whatever the key says
        "intermediate_size": None,
        "max_position_embeddings": positions,
    }


def _expanded(config: list[Any], layers: int) -> list[str]:
    """[[["global", "flash"], 6]] and ["global", ...] as a name for each layer; "all" repeats to the end."""
    # the flat form, one name a layer
    if all(isinstance(item, str) for item in config):
        return list(config)
    kinds: list[str] = []
    for item in config:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and item[0]):
            raise ValueError(f'must be a list such as [[["flash"], {layers}]], got {given(config)}')
        names, count = item
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"must name layer types, got {given(names)}")
        # what is left, in whole repetitions
        if count == "all":
            count = max(layers - len(kinds), 0) // len(names)
        if not is_kind(count, "int") or not 0 <= count <= layers:
            raise ValueError(f'must repeat types 0 to {layers} times or "all", got {given(count)}')
        kinds += names * count
    return kinds


_GPT2_VOCABULARY = 50257


def _vocab_size(keys: NeoXKeys) -> int:
    """Rows of the embedding: the tokenizer's vocabulary padded to make_vocab_size_divisible_by * tensor parallel."""
    # a padded size in the config needs no tokenizer file
    if keys.get("padded_vocab_size") is not None:
        return int(keys.number("padded_vocab_size", 1, above=0))
    multiple = keys.number("make_vocab_size_divisible_by", 128, above=0)
    size, where = _vocabulary(keys)
    padded = padded_vocab_size(size, multiple, max(keys.get("model_parallel_size", 1), 1))
    keys.add_row("make_vocab_size_divisible_by", "honoured", f"{size} tokens ({where}), padded to {padded}", multiple)
    return padded


def _vocabulary(keys: NeoXKeys) -> tuple[int, str]:
    """The tokenizer's number of ids, and where that is known from."""
    name = tokenizer(keys)
    try:
        return load_tokenizer(name).vocab_size, name
    except FileNotFoundError as error:
        # GPT-2's vocabulary is fixed, so a missing file need not stop the reading of a config
        if name.startswith("gpt2:"):
            return _GPT2_VOCABULARY, f"GPT-2's, assumed: {error}"
        keys.wrong(("vocab_file",), f"must exist, or padded_vocab_size be given: {error}")
    except (ValueError, OSError) as error:
        keys.wrong(("vocab_file",), f"must be a tokenizer: {error}")
    # the error is noted; 1 keeps the sizes computable
    return 1, name
