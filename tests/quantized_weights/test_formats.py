"""Packing of codes, float8 tables and block formats."""

import pytest
import torch

from anyaccel.quantized_weights.formats import Blocks, make_float8_table, pack_bits, unpack_bits


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_codes_are_unpacked(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (24,), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.numel() == 24 * bits // 8
    assert torch.equal(unpack_bits(packed, bits), codes)


def test_the_first_code_can_be_in_the_high_bits() -> None:
    packed = torch.tensor([0x1F, 0xA0], dtype=torch.uint8)
    assert unpack_bits(packed, 4, high_first=True).tolist() == [1, 15, 10, 0]
    assert unpack_bits(packed, 4).tolist() == [15, 1, 0, 10]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_tables_have_the_values_of_torch(dtype: torch.dtype) -> None:
    values = torch.randn(64).to(dtype)
    assert torch.equal(make_float8_table(dtype)[values.view(torch.uint8).long()], values.float())


def test_blocks_have_scales_offsets_and_a_padded_end() -> None:
    form = Blocks(name="int8", shape=(3, 2), block=4)
    parts = {
        "codes": torch.tensor([1, 2, 3, 4, 5, 6, 0, 0], dtype=torch.uint8),
        "scales": torch.tensor([2.0, 10.0]),
        "offsets": torch.tensor([0.0, 1.0]),
    }
    assert form.dequantize(parts).tolist() == [[2, 4], [6, 8], [51, 61]]


def test_scales_can_be_codes_with_factors() -> None:
    form = Blocks(name="nf4", shape=(1, 6), block=2, scale_block=2)
    parts = {
        "codes": torch.ones(6, dtype=torch.uint8),
        "scales": torch.tensor([0, 1, 1], dtype=torch.uint8),
        "scale_table": torch.tensor([1.0, 3.0]),
        "scale_factors": torch.tensor([10.0, 100.0]),
        "scale_offset": torch.tensor([0.5]),
    }
    assert form.dequantize(parts).tolist() == [[10.5, 10.5, 30.5, 30.5, 300.5, 300.5]]
