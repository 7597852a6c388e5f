"""What the quantization schemes of linear layers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class Device(Protocol):
    """Properties of a device that decide which schemes it supports. `Backend` has them."""

    @property
    def name(self) -> str: ...

    @property
    def int8_zeros(self) -> bool: ...

    @property
    def float8(self) -> bool: ...


class WeightScheme(ABC):
    """Quantization scheme of a linear layer in a checkpoint. A subclass is a frozen dataclass.

    name: name in metadata and logs.
    format: format of a checkpoint of compressed-tensors.
    float8: the weights are float8. They become floats while loading on devices that do not multiply float8.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def format(self) -> str: ...

    @property
    def float8(self) -> bool:
        return False

    @abstractmethod
    def refusal(self, device: Device) -> str:
        """Return what a device does not support of the scheme, and which values it supports; "" for a supported one."""

    @abstractmethod
    def group_json(self, targets: Sequence[str]) -> dict[str, Any]:
        """Return the group of `targets` in config.json's `config_groups`, with the keys that llm-compressor writes."""
