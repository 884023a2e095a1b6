"""`python -m xformers.info`: versions, and the devices on which attention is available."""

import torch

import powertrain
from powertrain.compat.missing import unknown

__all__ = ["print_info"]


def print_info() -> None:
    """Versions, and where the attention is computed.

    `powertrain doctor` and `powertrain explain attention` say more.
    """
    facts = {
        "xFormers": "0.0.35's interface, by Powertrain (no compiled library)",
        "powertrain.version": powertrain.__version__,
        "pytorch.version": torch.__version__,
        "pytorch.cuda": "available" if torch.cuda.is_available() else "not available",
        "memory_efficient_attention": "available on every GPU from sm_75 and on the CPU",
    }
    if torch.cuda.is_available():
        facts["gpu.name"] = torch.cuda.get_device_name()
    for name, value in facts.items():
        print(f"{name + ':':<52}{value}")


if __name__ == "__main__":
    print_info()


__getattr__ = unknown(__name__)
