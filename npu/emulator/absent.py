"""The operators that torch_npu asks for by name and the emulator does not have: each refuses, and names itself.

CANN has them all, so the plugin takes the branches that it takes on a device, where another library would make it fall
back to older operators because a newer one is missing.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEAD = """#include "emulator.h"

#define REFUSED(NAME, OPERATOR) \\
  extern "C" EMU_API __attribute__((weak)) int NAME() { return emu::refuse(#OPERATOR " is not emulated"); }
#define ABSENT(NAME) REFUSED(NAME, NAME) REFUSED(NAME##GetWorkspaceSize, NAME)

"""


def source(torch_npu: Path) -> str:
    """C++ of weak definitions, which those of ops/ replace, for all operators named in the libraries of the package."""
    found: set[bytes] = set()
    for library in sorted((torch_npu / "lib").glob("*.so")):
        found |= set(re.findall(rb"(?<=\0)aclnn[A-Z]\w*(?=\0)", library.read_bytes()))
    names = sorted(name.decode() for name in found if name + b"GetWorkspaceSize" in found)
    return _HEAD + "".join(f"ABSENT({name})\n" for name in names)
