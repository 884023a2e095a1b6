"""Names and positions of our tensors in checkpoints of GPT-NeoX; sources as in neox.py."""

import torch
from torch import Tensor

from powertrain.models.gpt_neox import Config
from powertrain.models.huggingface import shapes
from powertrain.nn.attention import alibi_slopes

# our module -> their names, the one that is written first
NAMES: dict[str, tuple[str, ...]] = {
    "embed": ("word_embeddings",),
    "positions": ("position_embeddings",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.out": ("attention.dense",),
    "mlp.up": ("mlp.linear1", "mlp.dense_h_to_4h"),
    "mlp.down": ("mlp.linear2", "mlp.dense_4h_to_h", "mlp.w2"),
    "norm": ("norm",),
    "head": ("final_linear",),
}
# of a gMLP layer; ours that has another's name has the same one there
_GMLP = {
    "up": "input_linear", "gate_norm": "sgu.norm", "spatial": "sgu.proj", "tiny_attention.qkv": "sgu.attn.proj_qkv",
    "tiny_attention.out": "sgu.attn.proj_ffn", "down": "output_linear",
}  # fmt: skip
NAMES |= {ours: (theirs,) for ours, theirs in _GMLP.items()}
# of a layer with experts, whose tensors are all ranks' experts one behind the other: [experts * inside, hidden]
NAMES |= {"mlp.router": ("mlp.router.layer",), "mlp.experts": ("mlp.experts.mlp",)}
EXPERTS = "mlp.experts"
# biases that GPT-NeoX makes and never adds
UNUSED_BIASES = {"up": "input_linear.bias", "down": "output_linear.bias"}
# a gated MLP whose matrices are apart (mlp_type: llama)
APART = {"mlp.gate": "mlp.w1", "mlp.up": "mlp.w3"}
KINDS = {"weight": ("weight", "scale"), "bias": ("bias", "offset"), "up": ("w1",), "down": ("w2",)}
COLUMNS = ("embed", "head", "attention.qkv", "mlp.up", "mlp.gate")
ROWS = ("attention.out", "mlp.down")
SLOPES = "attention.alibi_embed.slopes"  # of ALiBi, a rank's own heads
_BUFFERS = ("attention.rotary_emb.inv_freq", SLOPES)


def place(name: str, config: Config) -> tuple[int, str, str]:
    """Our tensor -> their layer, our module within it, weight or bias."""
    module, kind = name.rsplit(".", 1)
    if module.startswith("layers."):
        _, layer, inside = module.split(".", 2)
        return int(layer) + 2, inside, kind
    return (
        {"embed": 0, "positions": 0, "norm": config.num_layers + 3, "head": config.num_layers + 4}[module],
        module,
        kind,
    )


def allowed(config: Config, index: int) -> set[str]:
    """Names of the tensors that a layer of theirs may hold."""
    modules = {inside for name in shapes(config) for i, inside, _ in [place(name, config)] if i == index}
    if "attention_norm" in modules:
        # is there but not used where gpt_j_tied is true
        modules.add("mlp_norm")
    unused = {name for module, name in UNUSED_BIASES.items() if module in modules}
    names = [
        f"{name}.{kind}"
        for module in modules
        for name in (*NAMES.get(module, ()), APART.get(module, ""))
        for ours in (("up", "down") if module == EXPERTS else ("weight", "bias"))
        for kind in KINDS[ours]
    ]
    return {*names, *_BUFFERS, *unused}


def from_experts(tensor: Tensor, kind: str, experts: int) -> Tensor:
    """Their [experts * inside, hidden] of all ranks as our up [experts, inside, hidden], or down, transposed."""
    rows = tensor.unflatten(0, (experts, -1))
    return rows.transpose(1, 2).contiguous() if kind == "down" else rows


def to_experts(tensor: Tensor, kind: str) -> Tensor:
    """`from_experts` backwards."""
    return (tensor.transpose(1, 2) if kind == "down" else tensor).flatten(0, 1)


def own_slopes(config: Config) -> Tensor:
    """ALiBi's, of all heads: [num_heads] float32."""
    return alibi_slopes(config.num_heads, torch.device("cpu"))


def has_groups(config: Config) -> bool:
    """Whether query heads share keys and values."""
    return config.num_kv_heads not in (None, config.num_heads)


def heads_of_rank(config: Config, ranks: int) -> tuple[int, int]:
    """Query and kv heads of one rank. Raises ValueError if ranks do not divide them."""
    kv_heads = config.num_kv_heads or config.num_heads
    if kv_heads % ranks:
        raise ValueError(f"num_kv_heads ({kv_heads}) must be a multiple of model_parallel_size, got {ranks}")
    return config.num_heads // ranks, kv_heads // ranks


def is_buffer(name: str) -> bool:
    """Whether a layer's tensor is not a parameter."""
    return name in _BUFFERS
