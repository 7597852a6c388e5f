"""Devices. `select` is the only way to one; each backend's module is imported when it is selected."""

from __future__ import annotations

import importlib
import importlib.util

from npuserve.npu.backends.base import Backend, BackendError

MODULES = {"npu": "ascend", "cuda": "cuda", "cpu": "cpu"}
"""Name -> module of this package, in the order in which "auto" tries them."""


def present() -> list[str]:
    """Names of the backends that this version has, available here or not."""
    return [name for name, module in MODULES.items() if importlib.util.find_spec(f"{__name__}.{module}")]


def backend_class(name: str) -> type[Backend]:
    """The backend's class, without starting the device. Raises BackendError for one that this version lacks."""
    if name not in present():
        raise BackendError(f"device: this version has no backend {name!r}; it has: {', '.join(present())}")
    found: type[Backend] = importlib.import_module(f"{__name__}.{MODULES[name]}").BACKEND
    return found


def select(name: str = "auto") -> Backend:
    """The backend of that name; "auto": the first of npu, cuda, cpu that is available. Raises BackendError."""
    candidates = present() if name == "auto" else [name]
    for candidate in candidates:
        cls = backend_class(candidate)
        if cls.available():
            return cls()
    raise BackendError(f"device: {' and '.join(candidates)} not available on this machine")
