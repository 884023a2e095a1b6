"""Everything that differs between Triton 3.6 and 3.9, in one place."""

import os
import sys

from powertrain.runtime.settings import settings

if settings().interpret:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "POWERTRAIN_INTERPRET=1 was set after triton had been imported; set TRITON_INTERPRET=1 too, before"
        )
    os.environ["TRITON_INTERPRET"] = "1"

import triton

if settings().interpret:
    from powertrain.runtime import interpreter

    interpreter.install()

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
