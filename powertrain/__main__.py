"""`python -m powertrain` is `powertrain`."""

import sys


def main() -> None:
    """The command; a Ctrl-C while its modules are imported ends it as one while it runs does, without a traceback."""
    try:
        from powertrain.cli import app

        app(prog_name="powertrain")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
