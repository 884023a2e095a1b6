"""Peak FLOP/s of a device, the denominator of MFU."""

# dense bfloat16 or float16 TFLOP/s with float32 accumulation, of the makers' data sheets (their sparse figures halved);
# a name stands for all that begin with it, the longest one that fits counts
_DENSE_16BIT = {
    "B300": 2250.0,
    "B200": 2250.0,
    "GB200": 2450.0,
    "GB300": 2450.0,
    "H200": 989.4,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H800": 989.4,
    "H20": 148.0,
    "GH200": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "A10": 125.0,
    "A10G": 70.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.1,
    "T4": 65.1,
    "RTX 3090": 71.2,
    "RTX 3090 Ti": 80.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
}


def peak_tflops(card: str) -> float | None:
    """Dense 16-bit TFLOP/s of a card as its driver names it ("NVIDIA A100-SXM4-40GB"); None: not known."""
    name = card.removeprefix("NVIDIA ").replace("GeForce ", "").replace("-", " ")
    fitting = [known for known in _DENSE_16BIT if name == known or name.startswith(f"{known} ")]
    return _DENSE_16BIT[max(fitting, key=len)] if fitting else None
