"""Messages about shapes: the numbers in them say more than that two sizes differ."""

import re
from collections.abc import Callable
from math import prod

from powertrain.doctor.frames import code_line

# (the numbers of the message) -> (what they show, what to do)
Reading = Callable[[re.Match[str]], tuple[str, str]]


def _sizes(a: int, b: int, more: str = "") -> tuple[str, str]:
    """Two sizes that had to be equal."""
    low, high = sorted((a, b))
    if high - low == 1:
        return (
            f"{a} and {b} differ by one: a special token, a shifted label or one position of a cache is counted in one "
            f"of them only{more}",
            "make both from the same ids (labels with the input, mask with the cache); where a library's own code "
            "does it: a release that fits the model's",
        )
    if low == 1 or (low and high % low == 0 and high // low <= 64):
        times = f"{high} is {high // low} x {low}"
        return (
            f"{times}: one of them is repeated, gathered or split over heads, GPUs, beams or image tiles, the other "
            f"is not{more}",
            "print both shapes there; repeat_interleave or expand the smaller, or divide by the same count; heads and "
            "key/value heads of the config",
        )
    return (
        f"{a} and {b} are two different sizes: of the input and of what the model was configured or saved for{more}",
        "print both shapes there; compare them with hidden_size, heads and maximal length in the config",
    )


def _pair(match: re.Match[str]) -> tuple[str, str]:
    return _sizes(int(match["a"]), int(match["b"]))


def _view(match: re.Match[str]) -> tuple[str, str]:
    wanted = [int(size) for size in re.findall(r"-?\d+", match["shape"])]
    known, size = abs(prod(size for size in wanted if size != -1)), int(match["size"])
    if known and size % known == 0:
        times = f"it holds {size // known} times as many elements"
    else:
        times = f"{size} is no multiple of {known}"
    return (
        f"a tensor of {size} elements cannot be seen as {match['shape']}: {times}, so the batch, the length or the "
        "heads are others than that line assumes (sequences of different lengths, grouped key/value heads, a last "
        "batch that is smaller)",
        "derive the sizes from x.shape instead of the config; batch size 1 or padding for packed sequences; the "
        "release of the library that the model's code was written for",
    )


def _expand(match: re.Match[str]) -> tuple[str, str]:
    new, old = int(match["a"]), int(match["b"])
    if new > old > 256:
        return (
            f"the input has length {new}, and a table or mask ends at {old}",
            f"truncation=True, max_length={old}; or a larger maximal length (max_position_embeddings) and a model "
            "trained for it",
        )
    return _sizes(new, old)


def _cat(match: re.Match[str]) -> tuple[str, str]:
    a, b = int(match["a"]), int(match["b"])
    if abs(a - b) == 1:
        return (
            f"two maps of {a} and {b} meet: the input's size is halved and doubled again, and is odd on the way",
            "resize or pad the input so that its sides are multiples of 32 (or of the model's stride)",
        )
    return _sizes(a, b)


def _batches(match: re.Match[str]) -> tuple[str, str]:
    return _sizes(int(match["a"]), int(match["b"]), " (inputs and targets of the loss)")


def _norm(match: re.Match[str]) -> tuple[str, str]:
    got = re.findall(r"\d+", match["b"])[-1]
    return _sizes(int(re.findall(r"\d+", match["a"])[-1]), int(got), " (last dim of a norm)")


def _rank(match: re.Match[str]) -> tuple[str, str]:
    return (
        "a tensor has fewer or more dims than that line assumes: a missing or extra batch dim, a squeeze() of a batch "
        "of one, or a library that returns another form",
        "print x.shape there; unsqueeze(0) for a missing batch dim; squeeze(dim) instead of squeeze()",
    )


def _mask(match: re.Match[str]) -> tuple[str, str]:
    return (
        f"the attention mask has size {match['b']}, and these queries and keys need {match['a']}: the mask, the cache "
        "and the input are of different lengths",
        "a mask as long as cache and input together; use_cache=False in training; the transformers release that the "
        "model's code was written for",
    )


def _small(match: re.Match[str]) -> tuple[str, str]:
    return (
        "the input is smaller than a kernel or a pooling window of the model",
        "larger inputs (the size the model was made for), or fewer strides",
    )


def _split(match: re.Match[str]) -> tuple[str, str]:
    parts = sum(int(size) for size in re.findall(r"\d+", match["b"]))
    return (
        f"a dim of {match['a']} is split into parts of {parts} altogether: fused weights (query, key, value; gate, up) "
        "of other sizes than the config says",
        "heads, key/value heads and head_dim of the config beside the checkpoint's",
    )


def _einsum(match: re.Match[str]) -> tuple[str, str]:
    return _sizes(int(match["a"]), int(match["b"]), " (a letter of einsum)")


def _index_mask(match: re.Match[str]) -> tuple[str, str]:
    return (
        f"a mask of {match['a']} selects from a tensor of {match['b']}: mask and ids are not of one batch or length ("
        "left padding, a generated token, ids without the batch dim)",
        "the mask that the tokenizer returned with these ids; the transformers release that the model's or trainer's "
        "code was written for",
    )


def _images(match: re.Match[str]) -> tuple[str, str]:
    return (
        f"the prompt has {match['a']} places for image features, and the images gave {match['b']}: truncated prompts, "
        "a missing image token, or a processor of another release",
        "no truncation (a larger max_length); one image token for each image in the text; processor and model from one "
        "revision and release",
    )


_READINGS: tuple[tuple[str, Reading], ...] = (
    (r"size of tensor a \((?P<a>[1-9]\d*)\) must match the size of tensor b \((?P<b>[1-9]\d*)\)", _pair),
    (r"shape '(?P<shape>\[[-\d, ]{1,200}\])' is invalid for input of size (?P<size>\d+)", _view),
    (r"expanded size of the tensor \((?P<a>\d+)\) must match the existing size \((?P<b>\d+)\)", _expand),
    (
        r"Sizes of tensors must match except in dimension \d+\. (?:Expected size|Got) (?P<a>\d+) (?:but got size|and) "
        r"(?P<b>\d+)",
        _cat,
    ),
    (r"Expected input batch_size \((?P<a>\d+)\) to match target batch_size \((?P<b>\d+)\)", _batches),
    (r"normalized_shape=(?P<a>\[\d[\d, ]{0,80}\]), expected input .{1,80}input of size ?(?P<b>\[\d[\d, ]{0,80}\])",
     _norm),
    (r"subscript \w+ has size (?P<a>\d+) for operand \d+ which does not broadcast with previously seen size (?P<b>\d+)",
     _einsum),
    (r"sum exactly to (?P<a>\d+) \(input tensor's size at dimension -?\d+\), but got split_sizes=(?P<b>\[[\d, "
     r"]{1,200}\])",
     _split),
    (r"Attention (?:mask|weights) should be of size (?P<a>\([\d, ]{1,80}\)), but is (?P<b>[\w.(\[\d, "
     r"\])]{1,80})", _mask),
    (r"The shape of the mask \[(?P<a>\d+)(?:, \d+)*\] at index \d does not match the shape of the indexed tensor "
     r"\[(?P<b>\d+)(?:, \d+)*\]", _index_mask),
    (r"[Ii]mage features and image tokens do not match.{0,10}tokens: (?P<a>\d+), features:? (?P<b>\d+)", _images),
    (r"Dimension out of range \(expected to be in|too many indices for tensor of dimension|number of dims don't match "
     r"in "
     r"permute|does not match the length of the desired ordering|"
     r"Expected \dD (?:or \dD )?.{0,60}input to conv|expected \dD? (?:or \dD )?input \(got|Dimension specified as",
     _rank),
    (r"Calculated padded input size per channel|Output size is too small|Kernel size can't be greater than "
     r"actual", _small),
)  # fmt: skip

PATTERN = "|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern) for pattern, _ in _READINGS)


def reading(line: str, above: list[str]) -> tuple[str, str, str] | None:
    """What the numbers of the message show, what to do, and the line of code (" in `...`"); None: no such message."""
    for pattern, read in _READINGS:
        if match := re.search(pattern, line):
            shows, advice = read(match)
            code = code_line(above)
            return shows, advice, f" in `{code}`" if code else ""
    return None
