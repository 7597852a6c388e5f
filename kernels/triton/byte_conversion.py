"""PTX that converts bytes of an int8 or float8e4nv cache to bfloat16, for attention on Hopper and before.

Triton's conversions to bfloat16 take an instruction of a quarter of the rate for each number in float8e4nv, and three
instructions for each number in int8 whose words come from several rows.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def bytes_to_bfloat16(place, kind):
    """Return PTX that converts byte `place` of $1 and of $2 to a pair of bfloat16 in $0.

    kind: "int8" puts seven bits of a number into the mantissa of 128 and subtracts 128, or 256 from negative numbers.
        "fp8" puts exponent and mantissa into the places of those of bfloat16 and multiplies by 2**120.

    Differences and products are fma, which Ampere has too.
    """
    if kind == "int8":
        steps = f"""prmt.b32 pair, $1, $2, {0x400 + 0x101 * place};
            lop3.b32 bits, pair, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xea;
            mov.b32 factor, 0xbf80bf80;
            fma.rn.bf16x2 $0, sign, factor, bits;"""
    else:
        steps = f"prmt.b32 pair, $1, $2, {0x4000 + 0x1010 * place};" + _from_high_bytes("$0")
    return "{ .reg .b32 pair, bits, sign, factor; " + steps + " }"


@triton.constexpr_function
def fp8_to_bfloat16():
    """Return PTX that converts the four bytes of $2 to pairs of bfloat16 in $0 and $1, as `bytes_to_bfloat16` does.

    Triton's conversion takes an instruction of a quarter of the rate for each number.
    """
    steps = [f"prmt.b32 pair, $2, 0, {selector};" + _from_high_bytes(to) for selector, to in (
        (0x1404, "$0"), (0x3424, "$1"))]
    return "{ .reg .b32 pair, bits, sign, factor; " + " ".join(steps) + " }"


@triton.constexpr_function
def _from_high_bytes(to):
    return f"""shr.u32 bits, pair, 4;
        and.b32 bits, bits, 0x07f007f0;
        lop3.b32 sign, pair, 0x80008000, bits, 0xea;
        mov.b32 factor, 0x7b807b80;
        mov.b32 bits, 0x80008000;
        fma.rn.bf16x2 {to}, sign, factor, bits;"""
