"""`python -m powertrain` is `powertrain`."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """The command; a Ctrl-C while its modules are imported ends it as one while it runs does, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from powertrain.cli import app

        app(prog_name="powertrain")
    except KeyboardInterrupt:
        sys.exit(130)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import end the process, since modules that are imported catch the exception
    (NumPy's and torch's do) and the command would go on, or fail for a module that is there by half."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            files = sys.modules.get("powertrain.runtime.atomic_file")
            for folder in tuple(getattr(files, "unfinished", ())):
                import shutil  # is there already, where a folder is

                shutil.rmtree(folder, ignore_errors=True)
                os.write(2, b"SIGINT ended the conversion: nothing of its result is left\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
