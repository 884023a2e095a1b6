"""`python -m powertrain` is `powertrain`."""

from powertrain.cli import app

if __name__ == "__main__":
    app(prog_name="powertrain")
