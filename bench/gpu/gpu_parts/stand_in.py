"""What stands in for msgspec where it is not installed, as far as npuserve.npu uses it: structs are dataclasses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class Struct:
    """Not frozen, since such a dataclass takes long to make."""

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
