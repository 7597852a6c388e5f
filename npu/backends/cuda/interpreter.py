"""Triton's interpreter, three times as fast.

At each launch, and at each call of a kernel's inner function, the interpreter lists all names of triton.language to put
its own functions in their place, and takes them away after the launch: 0.3 of the time of an emulated step. In a
process that only interprets they can stay. Another 0.25 is a check of integers for overflow whose result nobody reads
unless triton's option `debug` is set.

A third of the rest are objects that each operation makes of its result's shape, and the table of numpy's dtypes. There
are few shapes, so these objects are made once for each. Nothing changes them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class _Kept:
    """Stands for the interpreter's scope, which would take its functions away."""

    def restore(self) -> None:
        pass


def quicken() -> None:
    """Let triton's interpreter put its functions in place once for each module of kernels, not check for overflow, and
    keep the objects of each shape.

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
    _keep_dtypes(interpreter)
    _keep_shapes()
    _keep_plain_values()


def _keep_dtypes(interpreter: Any) -> None:
    """Let the interpreter find numpy's dtype of a type of numbers once."""
    find: Callable[[Any], Any] | None = getattr(interpreter, "_get_np_dtype", None)
    if find is not None:
        find_once = functools.cache(find)
        interpreter._get_np_dtype = lambda dtype: find_once(dtype.scalar) if not dtype.scalar.is_ptr() else find(dtype)


class _Shape(NamedTuple):
    """Attributes of the types of blocks of a shape, and of tensors of such a type."""

    shape: Any
    text: str
    numel: Any
    tensor_shape: Any
    tensor_numel: Any


def _keep_shapes() -> None:
    """Let types of blocks, and tensors, take the objects of their shape from an earlier one.

    Without effect if their attributes would differ from those that triton gives them.
    """
    from triton.language import core

    block_type: Any = core.block_type
    tensor: Any = core.tensor
    init_type = block_type.__init__
    init_tensor = tensor.__init__
    scalar = tensor(None, core.int32)
    shapes: dict[tuple[int, ...], _Shape] = {}

    def find(sizes: tuple[int, ...]) -> _Shape:
        kept = shapes.get(sizes)
        if kept is None:
            block = block_type.__new__(block_type)
            init_type(block, core.int32, list(sizes))
            value = tensor.__new__(tensor)
            init_tensor(value, None, block)
            kept = shapes[sizes] = _Shape(block.shape, str(block.shape), block.numel, value.shape, value.numel)
        return kept

    def init_kept_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        kept = find(tuple([size.value if type(size) is core.constexpr else size for size in shape]))
        self.element_ty = element_ty
        self.shape = kept.shape
        self.numel = kept.numel
        self.name = f"<{kept.text}, {element_ty}>"

    def init_kept_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        if type.is_block():
            kept = find(tuple(type.shape))
            self.shape, self.numel = kept.tensor_shape, kept.tensor_numel
        else:
            self.shape, self.numel = scalar.shape, scalar.numel

    def attributes() -> list[str]:
        of_type = block_type(core.float16, [core.constexpr(2), 4])
        return [repr(sorted((name, str(value)) for name, value in vars(each).items()))
                for each in (of_type, tensor("handle", of_type), tensor("handle", core.int64))]

    try:
        expected = attributes()
        block_type.__init__, tensor.__init__ = init_kept_type, init_kept_tensor
        are_equal = attributes() == expected
    except (AttributeError, TypeError):
        are_equal = False
    if not are_equal:
        block_type.__init__, tensor.__init__ = init_type, init_tensor


def _keep_plain_values() -> None:
    """Let triton find at once that a value is no constexpr, and has none within."""
    from triton.language import core

    unwrap: Callable[[Any], Any] | None = getattr(core, "_unwrap_if_constexpr", None)
    if unwrap is not None:
        plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}
        core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
