"""PTX of the conversion of bytes to bfloat16, which Triton's interpreter cannot run."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from torch import Tensor


def halves(word: Tensor) -> Tensor:
    """Return words as pairs of bfloat16 [..., 2]."""
    return word.to(torch.int32).view(torch.bfloat16).view(*word.shape, 2)


def execute(ptx: str, **registers: Tensor) -> dict[str, Tensor]:
    """Execute PTX on registers of words in int64; return all registers."""
    size = next(iter(registers.values()))

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.full_like(size, int(name, 0))

    for line in ptx.strip("{} ").split(";"):
        operation, *names = re.split(r"[\s,]+", line.strip())
        if operation in ("", ".reg"):
            continue
        to, *values = names[0], *map(value, names[1:])
        match operation.split("."):
            case ["prmt", "b32"]:
                a, b, selector = values
                found = torch.zeros_like(a)
                for place in range(4):
                    which = selector >> 4 * place & 7
                    assert not (selector >> 4 * place & 8).any()
                    found |= ((torch.where(which < 4, a, b) >> 8 * (which & 3)) & 0xFF) << 8 * place
            case ["lop3", "b32"]:
                assert int(values[3][0]) == 0xEA  # (a & b) | c
                found = (values[0] & values[1]) | values[2]
            case ["and", "b32"]:
                found = values[0] & values[1]
            case ["shr", "u32"]:
                found = values[0] >> values[1]
            case ["mov", "b32"]:
                (found,) = values
            case ["fma", "rn", "bf16x2"]:
                a, b, c = map(halves, values)
                made = (a.double() * b.double() + c.double()).to(torch.bfloat16)
                found = made.view(torch.int32).squeeze(-1).long() & 0xFFFFFFFF
            case _:
                raise AssertionError(operation)
        registers[to] = found
    return registers


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_every_byte_is_converted_exactly(
    interpreted: ModuleType, kind: str, dtype: torch.dtype, place: int
) -> None:
    """Beside other bytes in the same words; NaN does not occur in a cache."""
    from npuserve.kernels.triton.byte_conversion import bytes_to_bfloat16

    generator = torch.Generator().manual_seed(place)
    words = torch.randint(0, 256, (2, 256, 4), generator=generator, dtype=torch.int64)
    words[0, :, place], words[1, :, place] = torch.arange(256), torch.arange(256).flip(0)
    packed = (words << 8 * torch.arange(4)).sum(-1)
    expected = words[..., place].to(torch.uint8).view(dtype).to(torch.bfloat16).T
    found = halves(execute(bytes_to_bfloat16(place, kind), **{"$1": packed[0], "$2": packed[1]})["$0"])
    number = ~expected.isnan()
    assert number.sum() >= 2 * 254
    assert torch.equal(found[number], expected[number])


def test_four_bytes_are_converted_in_order(interpreted: ModuleType) -> None:
    from npuserve.kernels.triton.byte_conversion import fp8_to_bfloat16

    words = torch.randint(0, 256, (999, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    expected = words.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    done = execute(fp8_to_bfloat16(), **{"$2": (words << 8 * torch.arange(4)).sum(-1)})
    found = torch.cat([halves(done["$0"]), halves(done["$1"])], dim=-1)
    number = ~expected.isnan()
    assert torch.equal(found[number], expected[number])
