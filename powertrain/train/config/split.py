"""`data.split`: the shares of train, validation and test."""


def shares_of(split: str) -> list[float]:
    """The three shares of "969, 30, 1", "8/1/1" or "1"; those that are not given are 0. Raises ValueError."""
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares) or not max(shares) > 0:
        raise ValueError(f"data.split must be one to three shares such as '969, 30, 1', not all 0, got {split!r}")
    # a share of an infinite sum is 0: parts would vanish without a word
    if sum(shares) == float("inf"):
        raise ValueError(f"data.split must have shares whose sum is finite, got {split!r}")
    return shares + [0.0] * (3 - len(shares))
