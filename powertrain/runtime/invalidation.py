"""The `epoch`: a new one for each change of what all calls depend on (`disable`, tuned tiles, `record`, `emulate`).

Recordings of calls (runtime/replay.py) are valid for one `epoch`, and not while `unsettled`.
"""


class Epoch:
    """The time between two changes. No number: two changes at once could set it back to one that was in force before.
    Of a class of ours, as torch.compile makes no plain `object()` in a function that contains a `disable`."""


epoch = Epoch()
unsettled = False  # plans change from call to call: they are being measured


def changed() -> None:
    """Calls may go another way from now on."""
    global epoch
    epoch = Epoch()
