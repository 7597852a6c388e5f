"""Ascend backend on the emulated CANN libraries, with the differences from the device."""

from __future__ import annotations

from typing import ClassVar

from npuserve.npu.backends.ascend.backend import AscendBackend


class EmulatedAscend(AscendBackend):
    """Ascend backend of a process in which the emulator is active.

    relaxations: names of the omitted checks (parameter `relax` of `emulator.activate`).
    """

    relaxations: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def missing_cann(cls) -> str:
        """Return "": the emulator has loaded its libraries."""
        return ""

    def chip_name(self) -> str:
        return "emulated"

    def possible_dtypes(self) -> tuple[str, ...]:
        return (*self.dtypes, "float32") if "fp32" in self.relaxations else self.dtypes

    def supports_heads(self, head_dim: int) -> bool:
        return head_dim <= 192 if "small_heads" in self.relaxations else super().supports_heads(head_dim)
