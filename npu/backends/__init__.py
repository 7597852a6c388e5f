"""Devices: the interface (`base`), one module or folder per device, and what devices have in common.

`select` is the only way to a device. It imports a backend's module by name when the backend is selected.
Imports of `npu`: top level.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from npuserve.npu.backends.base import DEFAULT_SETTINGS, Backend, BackendError, DeviceSettings
from npuserve.npu.backends.faults import Fault
from npuserve.npu.step import LostStep

MODULES = {"npu": "ascend.backend", "cuda": "cuda.backend", "cpu": "cpu"}
"""Name -> module of this package, in the order in which "auto" tries them."""

EMULATORS = {"npu": "npuserve.npu.emulator", "cuda": "npuserve.npu.backends.cuda.emulated_backend"}
"""Name -> module whose `emulate(relax)` loads an emulator, which registers its backend (`register_emulated`)."""

_emulated: dict[str, type[Backend]] = {}


def present() -> list[str]:
    """Return the names of the backends that this version contains, whether or not this machine has the device."""
    return [name for name, module in MODULES.items() if importlib.util.find_spec(f"{__name__}.{module}")]


def register_emulated(cls: type[Backend]) -> None:
    """Use `cls` in place of the backend of the same name for the rest of the process."""
    _emulated[cls.name] = cls


def backend_class(name: str) -> type[Backend]:
    """Return the backend's class without starting the device. Raises BackendError if this version lacks the backend."""
    if name not in present():
        raise BackendError(f"device: this version has no backend {name!r}; it has: {', '.join(present())}")
    backend: type[Backend] = _emulated.get(name) or importlib.import_module(f"{__name__}.{MODULES[name]}").BACKEND
    return backend


def select(
    name: str = "auto", emulate: Sequence[str] | None = None, settings: DeviceSettings = DEFAULT_SETTINGS
) -> Backend:
    """Start a backend.

    name: name of the device. "auto": the first of npu, cuda, cpu that is available.
    emulate: start the backend's emulator instead of the device, with these checks omitted. None: use the device.
    settings: how it is used.

    Raises BackendError if the device or its emulator is not available.
    """
    for candidate in present() if name == "auto" else [name]:
        if emulate is not None:
            _emulate(candidate, emulate)
        cls = backend_class(candidate)
        if cls.available():
            return cls(settings=settings)
        if name != "auto":
            raise BackendError(f"device: {cls.unavailable()}")
    raise BackendError(f"device: {' and '.join(present())} not available on this machine")


def select_prefill(name: str, device: Backend) -> Backend | None:
    """Start the backend that computes prompts for `device`, with its int8 levels; None for "same": the device does.

    Raises BackendError if it is not available or is the device itself.
    """
    if name == "same":
        return None
    if name == device.name:
        raise BackendError(f"prefill_device: the whole model runs on {name}; leave prefill_device at same")
    return select(name, settings=DeviceSettings(
        threads=device.settings.threads, int8_levels=device.capabilities.int8_levels))


def fault(error: BaseException) -> Fault | None:
    """Return the reaction to an error of any device; None if no device caused it."""
    if isinstance(error, LostStep):
        return Fault.ENGINE
    return next((fault for name in present() if (fault := backend_class(name).errors.fault(error)) is not None), None)


def explain(error: BaseException) -> str:
    """Return the meaning of a device error and advice; "" if no device has any."""
    return next(filter(None, (backend_class(name).errors.explain(error) for name in present())), "")


def explain_code(code: int) -> str:
    """Return the meaning of an error code of a device's software and advice; "" for an unknown one."""
    return next(filter(None, (backend_class(name).errors.explain_code(code) for name in present())), "")


def is_capture_error(error: BaseException) -> bool:
    """Return True for an error at run time that does not occur without captured steps."""
    return any(backend_class(name).errors.is_capture_error(error) for name in present())


def _emulate(name: str, relax: Sequence[str]) -> None:
    backend_class(name)  # raises for a backend that this version lacks
    if name not in EMULATORS:
        raise BackendError(f"emulate: there is no emulator of {name}")
    importlib.import_module(EMULATORS[name]).emulate(relax)
