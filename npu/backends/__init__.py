"""Devices. `select` is the only way to one; each backend's module is imported when it is selected."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from npuserve.npu.backends.base import Backend, BackendError, Fault

MODULES = {"npu": "ascend.backend", "cuda": "cuda.backend", "cpu": "cpu"}
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


def select(name: str = "auto", emulate: Sequence[str] | None = None) -> Backend:
    """The backend of that name; "auto": the first of npu, cuda, cpu that is available. Raises BackendError.

    emulate: the device is an emulated one, which accepts so much more than the real one does; see `Backend.emulate`.
    """
    for candidate in present() if name == "auto" else [name]:
        cls = backend_class(candidate)
        if emulate is not None:
            cls.emulate(emulate)
        if cls.available():
            return cls()
        if name != "auto":
            raise BackendError(f"device: {cls.unavailable()}")
    raise BackendError(f"device: {' and '.join(present())} not available on this machine")


def select_prefill(name: str, device: Backend) -> Backend | None:
    """The backend of that name, to compute prompts for `device`; None for "same": the device does. Raises BackendError,
    also where that is the device itself."""
    if name == "same":
        return None
    if name == device.name:
        raise BackendError(f"prefill_device: the whole model runs on {name}; leave prefill_device at same")
    return select(name)


def fault(error: BaseException) -> Fault | None:
    """What is to be done about an error of a device; None if it is none of any device's."""
    return next((found for name in present() if (found := backend_class(name).fault(error)) is not None), None)
