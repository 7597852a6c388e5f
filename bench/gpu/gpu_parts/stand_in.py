"""Stub of msgspec for machines without it, with the parts that npuserve.npu uses: structs are dataclasses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class Struct:
    """Base of structs. They are not frozen, since frozen dataclasses are slow to construct."""

    def __init_subclass__(cls, **options: Any) -> None:
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, (dict, list, set)):
                setattr(cls, name, field(default_factory=type(default)))
        dataclass(cls)


def msgspec() -> ModuleType:
    module = ModuleType("msgspec")
    module.Struct = Struct  # type: ignore[attr-defined]
    return module
