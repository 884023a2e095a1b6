"""Changes to what steers calls for the whole process: settings, `disable`, tuned tiles, `record` and `emulate`.

What is remembered about a call (runtime/replay.py) holds for one value of `epoch`, and not while `unsettled`.
"""

epoch = object()  # no number: of two changes at once, one could count back to a value that was in force before
unsettled = False  # plans change from call to call: they are being measured


def changed() -> None:
    """Calls may go another way from now on."""
    global epoch
    epoch = object()
