"""Import of large packages, such as torch."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def import_large(name: str) -> ModuleType:
    """Import a module without garbage collections, which take a fifth of the time of an import of torch.

    Almost all objects of an import stay: later collections skip them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class TorchError(Exception):
    """Reason why torch cannot be imported."""


def import_torch() -> None:
    """Import torch. Raises TorchError if it is not installed, or if one of its libraries cannot be loaded."""
    try:
        import_large("torch")
    except (ImportError, OSError) as error:
        raise TorchError(f"torch cannot be imported: {error}") from None
