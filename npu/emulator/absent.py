"""Stubs for operators that torch_npu looks up and the emulator lacks. Each stub fails with an error that names it.

CANN has all of them. With the stubs torch_npu takes the same branches as on a device; without them it would fall back
to older operators.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEAD = """#include "emulator.h"

#define REFUSED(NAME, OPERATOR) \\
  extern "C" EMU_API __attribute__((weak)) int NAME() { return emu::refuse(#OPERATOR " is not emulated"); }
#define ABSENT(NAME) REFUSED(NAME, NAME) REFUSED(NAME##GetWorkspaceSize, NAME)

"""


def source(torch_npu: Path, without: str) -> str:
    """Return C++ weak definitions of all operators named in the package's libraries, overridden by ops/.

    without: beginning of the names of operators that another library has.
    """
    found: set[bytes] = set()
    for library in sorted((torch_npu / "lib").glob("*.so")):
        found |= set(re.findall(rb"(?<=\0)aclnn[A-Z]\w*(?=\0)", library.read_bytes()))
    names = sorted(name.decode() for name in found
                   if name + b"GetWorkspaceSize" in found and not name.startswith(without.encode()))
    return _HEAD + "".join(f"ABSENT({name})\n" for name in names)
