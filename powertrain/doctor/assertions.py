"""A failed assertion or check: its condition is in the traceback, also when the message is empty."""

import re

from powertrain.doctor.excerpt import Excerpt

# what a condition asks -> what it means that it is false, and what to do
_KINDS = (
    (
        r"is_file|is_dir|exists|isfile|isdir|islink",
        "a file or folder that it wants is not there",
        "ls that path (print it): a download or an earlier step is not complete, or its files have other names "
        "(safetensors instead of .bin, another prefix)",
    ),
    (
        r"is_available|is_initialized|_installed|is not None",
        "something that an earlier step provides is missing (None, not installed, not initialized)",
        "the setting or package that the condition names; the warnings above",
    ),
    (
        r"%|// ?\w",
        "sizes do not divide",
        "choose the sizes in the condition so that they divide (heads, GPUs, batch, sequence)",
    ),
    (
        r"\blen\(|> ?0|\.numel\(\)|\.size\(|\.shape|==|<=|>=|<|>",
        "a number or name is another than the program expects",
        "print both sides of the condition; the config, the data and the checkpoint that they come from must be of one "
        "model and release",
    ),
    (
        r"\bin\b|isinstance",
        "a value is none of those that the program knows",
        "print it; the spelling and the kinds that this release takes are in the lines around the check",
    ),
)


def failed_check(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    """The condition of the assert above the message; None: the traceback does not show it."""
    for line in reversed(excerpt.above[-4:]):
        if match := re.search(r"(?:^|[\s>|│❱])assert[ (]\(?(?P<check>.{2,160})", line):
            check = match["check"].split(', f"')[0].split(', "')[0].split(", '")[0].rstrip(" ,\\|│(")
            for pattern, meaning, advice in _KINDS:
                if re.search(pattern, check):
                    return {"check": check, "meaning": meaning, "advice": advice}
            return {"check": check, "meaning": "it is false", "advice": "print the values in it; where they come from"}
    return None
