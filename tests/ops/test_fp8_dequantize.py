"""fp8_dequantize: the kernel beside the formula for every byte, what quantizing and dequantizing keeps, errors."""

import pytest
import torch

from powertrain.ops.fp8.dequantize import fp8_dequantize, fp8_dequantize_ref
from powertrain.ops.fp8.formulas import BY, DTYPES, Quantized
from powertrain.ops.fp8.quantize import fp8_quantize, special_values


# every byte, partial tiles both ways; one row, whose group has the shape of a block's; nothing
@pytest.mark.parametrize("shape", [(150, 270), (1, 129), (0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("format", DTYPES)
def test_values_are_the_formulas(format: str, shape: tuple[int, int], device: torch.device) -> None:
    R, C = shape
    groups = -(-C // 128)
    data = (torch.arange(R * (C + 2), dtype=torch.int32) * 37 % 256).to(torch.uint8).view(R, C + 2).view(DTYPES[format])
    for scales in ((1,), (R,), (R, groups), (-(-R // 128), groups)):
        # no powers of two, so that each product is rounded
        scale_inv = torch.rand(scales) + 0.5
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = fp8_dequantize(Quantized(data.to(device), scale_inv.to(device)), C, dtype)
            expected = fp8_dequantize_ref(data, scale_inv, C, dtype)
            assert found.shape == (R, C) and found.dtype is dtype and found.is_contiguous()
            assert torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
            assert torch.equal(found.cpu().isnan(), expected.isnan())


@pytest.mark.parametrize("by", BY)
def test_scales_of_powers_of_two_lose_nothing_in_bfloat16(by: str, device: torch.device) -> None:
    """And quantizing the values again gives the same values: FP8 rows may be rounded twice on their way."""
    x = special_values()[12:130].to(device)
    copies = fp8_quantize(x, by)
    once = fp8_dequantize(copies.rows, x.shape[1], torch.bfloat16)
    assert torch.equal(once.float(), fp8_dequantize(copies.rows, x.shape[1], torch.float32))
    twice = fp8_dequantize(fp8_quantize(once, by).rows, x.shape[1], torch.bfloat16)
    assert torch.equal(once, twice) and not torch.equal(once, x)


def test_errors_name_the_argument() -> None:
    data, scale = torch.zeros(3, 16).to(torch.float8_e4m3fn), torch.ones(3)
    for q, columns, dtype, said in (
        (Quantized(data.float(), scale), 8, torch.float32, "q.data must be FP8, got float32"),
        (Quantized(data[0], scale), 8, torch.float32, r"q.data must be \[R, C\], got \[16\]"),
        (Quantized(data[:, ::2], scale), 8, torch.float32, r"q.data must have contiguous rows, got \(16, 2\)"),
        (Quantized(data, scale), 17, torch.float32, r"columns must be at most 16 \(of q.data\), got 17"),
        (Quantized(data, scale), 8, torch.int32, "dtype must be one of .*, got torch.int32"),
        (Quantized(data, scale.double()), 8, torch.float32, "q.scale_inv must be float32, got float64"),
        (Quantized(data, scale[:2]), 8, torch.float32,
         r"q.scale_inv must have shape \[1\], \[3\], \[3, 1\] or \[1, 1\], got \[2\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^fp8_dequantize: {said}"):
            fp8_dequantize(q, columns, dtype)
