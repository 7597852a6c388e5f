"""What the quantization schemes of linear layers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class Products(Protocol):
    """Quantized products that a device computes. `Capabilities` has them."""

    @property
    def int8_zeros(self) -> bool: ...

    @property
    def float8(self) -> bool: ...

    @property
    def w4a8(self) -> bool: ...


class Device(Protocol):
    """What decides which schemes a device supports. `Backend` has it."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Products: ...


class WeightScheme(ABC):
    """Quantization scheme of a linear layer in a checkpoint. A subclass is a frozen dataclass.

    name: name in metadata and logs.
    format: format of a checkpoint of compressed-tensors.
    float8: the weights are float8. They become floats while loading on devices that do not multiply float8.
    int4: the weights have 4 bits. They become floats while loading on devices that do not multiply them.
    act_order: a tensor of the checkpoint assigns columns to groups. The weights become floats while loading.
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

    @property
    def int4(self) -> bool:
        return False

    @property
    def act_order(self) -> bool:
        return False

    def with_scales(self, dtype: str) -> WeightScheme:
        """Return the scheme in a checkpoint of floats of `dtype`, if its scales have the same."""
        return self

    @abstractmethod
    def refusal(self, device: Device) -> str:
        """Return what a device does not support of the scheme, and which values it supports; "" for a supported one."""

    @abstractmethod
    def group_json(self, targets: Sequence[str]) -> dict[str, Any]:
        """Return the group of `targets` in config.json's `config_groups`, with the keys that llm-compressor writes."""
