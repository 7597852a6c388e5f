"""Triton's interpreter, three times as fast.

At each launch, and at each call of a kernel's inner function, the interpreter lists all names of triton.language to put
its own functions in their place, and takes them away after the launch: 0.3 of the time of an emulated step. In a
process that only interprets they can stay. Another 0.25 is a check of integers for overflow whose result nobody reads
unless triton's option `debug` is set.

A third of the rest are objects that each operation makes of its result's shape, and the table of numpy's dtypes. There
are few shapes, so these objects are made once for each. Nothing changes them. A quarter of what is left are checks and
conversions of operands that have one type and one shape already.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
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
    _keep_operands(interpreter)
    _call_builtins_directly(interpreter)


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


def _keep_operands(interpreter: Any) -> None:
    """Let the interpreter find the type of an operation's result once for each pair of types, and take operands of one
    type and one shape as they are.

    Without effect if triton's functions have other parameters.
    """
    from triton.language import core

    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    tensor: Any = core.tensor
    result_types: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def computation_type_impl(a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in result_types:
            result_types[key] = result_type(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return result_types[key]

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        # Tensors of one shape have the same object (_keep_shapes).
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    def binary_op_type_checking_impl(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is tensor is type(rhs) and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
            dtype = lhs.dtype
            if not arithmetic_check or computation_type_impl(dtype, False, dtype, False, div_or_mod) is dtype:
                return broadcast_impl_value(lhs, rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    faster: tuple[Any, ...] = (computation_type_impl, broadcast_impl_value, binary_op_type_checking_impl)
    own: list[Any] = [getattr(semantic, function.__name__, None) for function in faster]
    if all(_have_same_parameters(*pair) for pair in zip(own, faster, strict=True)):
        result_type, broadcast, check = own
        for function in faster:
            setattr(semantic, function.__name__, function)


def _have_same_parameters(function: Callable[..., Any] | None, other: Callable[..., Any]) -> bool:
    """Return whether both have parameters of the same names; False without a function."""
    return function is not None and [*inspect.signature(function).parameters] == [*inspect.signature(other).parameters]


def _call_builtins_directly(interpreter: Any) -> None:
    """Let functions of the language be called without the two functions in between, which only pass arguments on.

    Without effect on a version of triton that puts its functions in place differently.
    """
    from triton.language import core

    if not hasattr(interpreter, "_patch_attr") or not hasattr(interpreter, "interpreter_semantic"):
        return
    semantic = interpreter.interpreter_semantic
    between = core.builtin(lambda: None).__code__

    def put(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is between else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    if _have_same_parameters(interpreter._patch_attr, put):
        interpreter._patch_attr = put
