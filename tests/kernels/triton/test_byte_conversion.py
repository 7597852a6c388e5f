"""PTX of the conversion of bytes to bfloat16 (kernels/triton/paged_attention.py), which the interpreter cannot run."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from torch import Tensor


def halves(word: Tensor) -> Tensor:
    """Return words as pairs of bfloat16 [..., 2]."""
    return word.to(torch.int32).view(torch.bfloat16).view(*word.shape, 2)


def execute(ptx: str, first: Tensor, second: Tensor) -> Tensor:
    """Execute PTX on words in int64; return $0 as pairs of bfloat16."""
    registers = {"$1": first, "$2": second}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.full_like(first, int(name, 0))

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
    return halves(registers["$0"])


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_every_byte_is_converted_exactly(
    interpreted: ModuleType, kind: str, dtype: torch.dtype, place: int
) -> None:
    """Beside other bytes in the same words; NaN does not occur in a cache."""
    from npuserve.kernels.triton.paged_attention import bytes_to_bfloat16

    generator = torch.Generator().manual_seed(place)
    words = torch.randint(0, 256, (2, 256, 4), generator=generator, dtype=torch.int64)
    words[0, :, place], words[1, :, place] = torch.arange(256), torch.arange(256).flip(0)
    packed = (words << 8 * torch.arange(4)).sum(-1)
    expected = words[..., place].to(torch.uint8).view(dtype).to(torch.bfloat16).T
    found = execute(bytes_to_bfloat16(place, kind), *packed)
    number = ~expected.isnan()
    assert number.sum() >= 2 * 254
    assert torch.equal(found[number], expected[number])
