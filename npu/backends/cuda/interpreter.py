"""Triton's interpreter, twice as fast.

At each launch, and at each call of a kernel's inner function, the interpreter lists all names of triton.language to put
its own functions in their place, and takes them away after the launch: 0.3 of the time of an emulated step. In a
process that only interprets they can stay. Another 0.25 is a check of integers for overflow whose result nobody reads
unless triton's option `debug` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


class _Kept:
    """Stands for the interpreter's scope, which would take its functions away."""

    def restore(self) -> None:
        pass


def quicken() -> None:
    """Let triton's interpreter put its functions in place once for each module of kernels, and not check for overflow.

    Without effect on a version of triton that works differently. Needs triton, with TRITON_INTERPRET=1.
    """
    from triton.runtime import interpreter

    options: Any = getattr(interpreter.interpreter_builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    put: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if put is None or hasattr(put, "modules"):
        return
    modules: dict[int, Any] = {}  # by their identity; the values keep them alive

    def put_once(function: Any) -> _Kept:
        if id(names := function.__globals__) not in modules:
            put(function)
            modules[id(names)] = names
        return _Kept()

    put_once.modules = modules  # type: ignore[attr-defined]
    interpreter._patch_lang = put_once
