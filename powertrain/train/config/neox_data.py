"""Data and tokenizer of a GPT-NeoX config, translated to ours."""

from typing import Any

from powertrain.train.config.neox_objective import ONLINE, objective
from powertrain.train.config.neox_source import NeoXKeys


def data(keys: NeoXKeys) -> dict[str, Any]:
    # "infer" and "mmap" read the same files
    keys.choice("data_impl", "infer", {"infer": None, "mmap": None},
                {"cached": "an old format; write the data again with `powertrain preprocess`"})  # fmt: skip
    keys.choice("dataset_impl", "gpt2", {"gpt2": None, "pairwise": None}, {"online": ONLINE})
    packings = {"packed": "packed", "pack_until_overflow": "until_overflow", "unpacked": "unpacked"}
    packing = keys.choice("pack_impl", "packed", packings)
    next_tokens = objective(keys) == "pretrain"
    if packing != "packed" and not next_tokens:
        words = "examples are GPT-NeoX's, whole; their order is another shuffle of the same seed"
        keys.add_row("pack_impl", "changes numerics", words)
    if packing == "unpacked" and next_tokens and keys.get("train_label_data_paths") is None:
        keys.wrong(
            ("pack_impl",), "must come with train_label_data_paths where it is unpacked, as in GPT-NeoX; got none"
        )
    if packing == "packed" and keys.get("allow_chopped") is not None:
        keys.add_row("allow_chopped", "ignored", "packed samples ignore it in GPT-NeoX too")
    # GPT-NeoX's default, with its spaces
    split = keys.get("split", "969, 30, 1")
    return {
        **(_pairs(keys) if objective(keys) in ("dpo", "reward") else _sources(keys)),
        "split": split,
        "tokenizer": tokenizer(keys),
        "vocab_multiple": keys.number("make_vocab_size_divisible_by", 128, above=0),
        "packing": packing,
        "allow_chopped": keys.get("allow_chopped", True),
        "eod_mask_loss": keys.get("eod_mask_loss", False),
        "weight_by_num_documents": keys.get("weight_by_num_documents", False),
        "weighted_sampler_alpha": keys.get("weighted_sampler_alpha", 1.0),
        "num_workers": keys.number("num_workers", 2, least=0),
    }


def _pairs(keys: NeoXKeys) -> dict[str, Any]:
    """Sources of chosen and rejected completions: pos_... and neg_..., document for document."""
    parts: dict[str, Any] = {}
    # the sections are translated by name: valid there is validation here
    for part, ours in _PARTS.items():
        names = {
            "path": f"pos_{part}_data_paths", "rejected": f"neg_{part}_data_paths",
            "labels": f"pos_{part}_label_data_paths", "rejected_labels": f"neg_{part}_label_data_paths",
        }  # fmt: skip
        paths = keys.get(names["path"])
        if paths is None:
            keys.wrong((names["path"],), f"must be given for train_impl {keys.get('train_impl')}")
            continue
        weights = keys.get(f"{part}_data_weights", [1.0] * len(paths))
        columns = {field: keys.get(name, [None] * len(paths)) for field, name in names.items()}
        # lists are zipped below, so each length is checked by name first
        for name, values in (*((names[f], v) for f, v in columns.items()), (f"{part}_data_weights", weights)):
            if len(values) != len(paths):
                keys.wrong((name,), f"must have as many entries as {names['path']} ({len(paths)}), got {len(values)}")
        if columns["rejected"] == [None] * len(paths):
            keys.wrong((names["rejected"],), f"must be given beside {names['path']}")
        # not strict: the mistake is noted, and the others shall be too
        rows = zip(*columns.values(), weights, strict=False)
        parts[ours] = [dict(zip((*columns, "weight"), row, strict=True)) for row in rows]
    return parts


_PARTS = {"train": "train", "valid": "validation", "test": "test"}


def _sources(keys: NeoXKeys) -> dict[str, Any]:
    single = keys.get("data_path")
    given = [part for part in _PARTS if keys.get(f"{part}_data_paths") is not None]
    # GPT-NeoX takes one of the two
    if single is not None and given:
        keys.wrong(("data_path",), f"must not stand beside {given[0]}_data_paths")
    if given and len(given) < 3:
        missing = ", ".join(f"{part}_data_paths" for part in _PARTS if part not in given)
        keys.wrong((f"{given[0]}_data_paths",), f"must come with {missing}")
    if given:
        return {ours: _blend(keys, part) for part, ours in _PARTS.items()}
    # GPT-NeoX's own examples split a config over two files
    if single is None:
        keys.wrong(("data_path",), "must be given, or train_data_paths, valid_data_paths and test_data_paths;"
                   " GPT-NeoX's examples keep it in a second file, such as local_setup.yml")  # fmt: skip
    for part in _PARTS:
        for key in (f"{part}_data_weights", f"{part}_label_data_paths"):
            if keys.get(key) is not None:
                keys.wrong((key,), f"must come with {part}_data_paths")
    return {"train": [{"path": single}]}


def _blend(keys: NeoXKeys, part: str) -> list[dict[str, Any]]:
    paths = keys.get(f"{part}_data_paths", [])
    weights = keys.get(f"{part}_data_weights", [1.0] * len(paths))
    labels = keys.get(f"{part}_label_data_paths", [None] * len(paths))
    rewards = keys.get(f"{part}_reward_data_paths", [None] * len(paths))
    lists = {"data_weights": weights, "label_data_paths": labels, "reward_data_paths": rewards}
    for name, values in ((f"{part}_{kind}", values) for kind, values in lists.items()):
        if len(values) != len(paths):
            keys.wrong((name,), f"must have as many entries as {part}_data_paths ({len(paths)}), got {len(values)}")
            return []
    if keys.get("weight_by_num_documents"):
        keys.add_row(f"{part}_data_weights", "ignored", "weight_by_num_documents overrides weights, in GPT-NeoX too")
    return [
        {"path": path, "weight": weight, "labels": label, "rewards": reward}
        for path, weight, label, reward in zip(paths, weights, labels, rewards, strict=True)
    ]


_TOKENIZERS = {
    name: name for name in ("GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "CharLevelTokenizer", "SPMTokenizer")
}
_OTHER_TOKENIZERS = {"TiktokenTokenizer": "convert it to a tokenizer.json and name it with HFTokenizer and vocab_file"}


def tokenizer(keys: NeoXKeys) -> str:
    kind = keys.choice("tokenizer_type", "GPT2BPETokenizer", _TOKENIZERS, _OTHER_TOKENIZERS)
    if kind == "CharLevelTokenizer":
        return "CharLevelTokenizer"
    vocab, merges = keys.get("vocab_file"), keys.get("merge_file")
    # the tokenizer's type is refused already
    # one error is enough: another tokenizer would need another file
    if keys.missing and vocab is None:
        return "CharLevelTokenizer"
    if vocab is None or (merges is None and kind == "GPT2BPETokenizer"):
        missing = "vocab_file" if vocab is None else "merge_file"
        keys.wrong((missing,), f"must be given for {kind}")
    return {"GPT2BPETokenizer": f"gpt2:{vocab}:{merges}", "SPMTokenizer": f"spm:{vocab}"}.get(kind, str(vocab))
