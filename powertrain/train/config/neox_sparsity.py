"""Sparse attention of a GPT-NeoX config, DeepSpeed's layouts of blocks, as the rules of `BlockSparsity`.

Facts from GPT-NeoX at ea7aefd8 (megatron/model/utils.py, transformer.py) and DeepSpeed
(deepspeed/ops/sparse_attention/sparsity_config.py), both Apache-2.0; no code.
"""

from typing import Any

from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.train.config.neox_source import NeoXKeys, given, is_kind

KINDS = ("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer")
_EVERYWHERE = {"block"}
_RANGES = {"global_block_indices", "global_block_end_indices"}
# the inner keys that GPT-NeoX reads
_READ = {
    "local": {"num_local_blocks", "num_sliding_window_blocks"},
    "sparse_fixed": {"num_local_blocks", "num_global_blocks", "num_different_global_patterns",
                     "different_layout_per_head"},
    "sparse_variable": {"num_random_blocks", "local_window_blocks", "different_layout_per_head", *_RANGES},
    "bigbird": {"num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "different_layout_per_head"},
    "bslongformer": {"num_sliding_window_blocks", "different_layout_per_head", *_RANGES},
}  # fmt: skip


def sparsity(keys: NeoXKeys, kinds: list[str]) -> dict[str, Any]:
    """The field `sparsity` of a model whose layers have these kinds; {} without sparse ones."""
    sparse = [kind for kind in KINDS if kind in kinds]
    if not sparse:
        return {}
    if len(sparse) > 1:
        keys.unsupported("attention_config", ", ".join(sparse), "use one of these kinds: a model has one sparsity here")
    if keys.get("num_kv_heads") not in (None, keys.get("num_attention_heads")):
        keys.unsupported("num_kv_heads", keys.get("num_kv_heads"), "GPT-NeoX refuses it with sparse attention too")
    kind = sparse[0]
    section = _Section(keys, kind)
    fields = {
        "local": _local, "sparse_fixed": _fixed, "sparse_variable": _variable, "bigbird": _bigbird,
        "bslongformer": _longformer,
    }[kind](section)  # fmt: skip
    block = section.count("block", 16)
    length = keys.get("seq_length") or block
    if length % block:
        section.wrong("block", f"must divide seq_length ({length}), got {block}")
    needed = section.window
    if needed > length // block:
        section.wrong(section.window_key, f"must be at most {length // block}, the blocks of seq_length, got {needed}")
    keys.add_row("sparsity_config", "mapped", "model.sparsity")
    words = f"model.layer_types: {kind} layers by a mask of blocks; DeepSpeed takes fp16 only, any precision here"
    keys.add_row("attention_config", "mapped", words)
    try:
        return {"sparsity": BlockSparsity(block, **fields)}
    except ValueError as error:
        keys.wrong(("sparsity_config",), str(error).removeprefix("model.sparsity."))
        return {"sparsity": BlockSparsity(block, before=0)}


class _Section:
    """sparsity_config as one kind of attention reads it, each value checked."""

    def __init__(self, keys: NeoXKeys, kind: str) -> None:
        self.keys, self.kind, self.values = keys, kind, keys.section("sparsity_config")
        # blocks of a sliding window, which a sequence must have, and their key
        self.window, self.window_key = 0, ""
        for key in self.values.keys() - _READ[kind] - _EVERYWHERE:
            words = f"GPT-NeoX does not read it for {kind} attention"
            keys.add_inner_row(("sparsity_config", key), self.values[key], "ignored", words)

    def wrong(self, key: str, words: str) -> None:
        self.keys.wrong(("sparsity_config", key) if key in self.values else ("sparsity_config",), words)

    def count(self, key: str, default: int, least: int = 1) -> int:
        return int(self.keys.inner("sparsity_config", key, default, "int", least=least))

    def sliding(self, key: str, default: int) -> int:
        """Blocks before its own that a query sees: half of the window."""
        self.window, self.window_key = self.count(key, default), key
        return self.window // 2

    def no_random(self, default: int) -> None:
        count = self.count("num_random_blocks", default, least=0)
        if count:
            todo = (
                f"give num_random_blocks: 0 in sparsity_config; for {self.kind} blocks are drawn anew in every process"
            )
            self.keys.unsupported("sparsity_config", f"num_random_blocks {count}", todo)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        firsts = self.numbers("global_block_indices", [0], least=0)
        ends = self.values.get("global_block_end_indices")
        if ends is None:
            return tuple((first, first + 1) for first in firsts)
        ends = self.numbers("global_block_end_indices", [], least=1)
        if len(ends) != len(firsts) or any(first >= end for first, end in zip(firsts, ends, strict=False)):
            self.wrong("global_block_end_indices", f"must have an end above each of {firsts}, got {ends}")
            return ()
        return tuple(zip(firsts, ends, strict=True))

    def numbers(self, key: str, default: list[int], least: int) -> list[int]:
        value = self.values.get(key, default)
        if not (isinstance(value, list) and value and all(is_kind(n, "int") and n >= least for n in value)):
            self.wrong(key, f"must be a list of integers of at least {least}, got {given(value)}")
            return default
        return value


def _local(section: _Section) -> dict[str, Any]:
    key = "num_local_blocks" if "num_local_blocks" in section.values else "num_sliding_window_blocks"
    return {"before": section.sliding(key, 4)}


def _fixed(section: _Section) -> dict[str, Any]:
    local, shared = section.count("num_local_blocks", 4), section.count("num_global_blocks", 1)
    patterns = section.count("num_different_global_patterns", 1)
    if patterns > 1:
        todo = "give num_different_global_patterns: 1 in sparsity_config: heads have one layout here"
        section.keys.unsupported("sparsity_config", f"num_different_global_patterns {patterns}", todo)
    if local % shared:
        section.wrong("num_global_blocks", f"must divide num_local_blocks ({local}), got {shared}")
    blocks = (section.keys.get("seq_length") or 0) // section.count("block", 16)
    if blocks % local:
        # DeepSpeed then moves the last window's blocks by the length, which generation would change
        todo = f"give a divisor of the {blocks} blocks of seq_length: a shorter last window has its own rule"
        section.keys.unsupported("sparsity_config", f"num_local_blocks {local}", todo)
    return {"windows": (local,), "last_of_window": min(shared, local)}


def _variable(section: _Section) -> dict[str, Any]:
    section.no_random(0)
    windows = tuple(section.numbers("local_window_blocks", [4], least=1))
    return {"windows": windows, "global_blocks": section.ranges()}


def _bigbird(section: _Section) -> dict[str, Any]:
    section.no_random(1)
    before = section.sliding("num_sliding_window_blocks", 3)
    # rows of the first blocks see the first blocks only, whose columns all see anyway
    return {"before": before, "global_blocks": ((0, section.count("num_global_blocks", 1)),)}


def _longformer(section: _Section) -> dict[str, Any]:
    before = section.sliding("num_sliding_window_blocks", 3)
    return {"before": before, "global_blocks": section.ranges(), "global_rows": True}
