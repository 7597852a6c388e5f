"""Contents of a torch_npu wheel, read from the file: it is not installed, imported or run.

Operators: libtorch_npu.so holds the text of each schema that it registers, which calls must fit (the wheel's YAML names
some arguments differently). The YAML lists all operators, so that an unreadable schema is an error and not a missing
operator. Python: signatures, as `ast` reads them from the wheel's sources.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

LIBRARY = "torch_npu/lib/libtorch_npu.so"
LISTING = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
RETURNS = b") -> "
SCHEMA = re.compile(rb"([A-Za-z_][\w.]*)\([^\n]*\) -> [^\n]+")
NATIVE = "native"
"""Replaces the arguments of functions in C++, of which only the name is known."""


class WheelError(ValueError):
    """The file is not a readable wheel of torch_npu; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """Name in the wheel's Python.

    node: its definition; None if it is native.
    instance: it is an instance of the class `node`.
    bound: it is a method whose first argument is bound.
    """

    module: str
    node: ast.AST | None
    instance: bool = False
    bound: bool = False


class Wheel:
    """Reader of a wheel. Raises WheelError."""

    def __init__(self, file: Path) -> None:
        name = re.fullmatch(r"torch_npu-([\w.]+)-cp\d+-cp\d+-[\w.]+\.whl", file.name)
        if name is None or not zipfile.is_zipfile(file):
            raise WheelError(f"{file.name}: is not a wheel of torch_npu")
        self.file, self.version = file, name[1]
        self._archive = zipfile.ZipFile(file)
        self._names = frozenset(self._archive.namelist())
        self._modules: dict[str, ast.Module] = {}
        self._ahead: set[tuple[str, str]] = set()  # lookups in progress, since modules import each other in circles

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    @property
    def torch(self) -> str:
        """Return the versions of torch that the wheel requires, such as "==2.13.0.*"."""
        metadata = self._read(f"torch_npu-{self.version}.dist-info/METADATA").decode()
        if (match := re.search(r"^Requires-Dist: torch *(\S+)$", metadata, re.MULTILINE)) is None:
            raise WheelError(f"{self.file.name}: its metadata require no version of torch")
        return match[1]

    def _read(self, name: str) -> bytes:
        if name not in self._names:
            raise WheelError(f"{self.file.name}: holds no {name}")
        return self._archive.read(name)

    @cached_property
    def operators(self) -> dict[str, list[str]]:
        """Return operator name in the namespace npu -> schemas, one per overload: `x.overload(args) -> returns`."""
        listing = self._read(LISTING).decode()
        custom = re.search(r"^custom:\n(.*?)(?=^\w|\Z)", listing, re.MULTILINE | re.DOTALL)
        listed = set(re.findall(r"func: *([\w.]+)\(", custom[1])) if custom else set()
        found = {match[1].decode(): match[0].decode() for match in map(SCHEMA.fullmatch, self._texts(RETURNS)) if match}
        missing = sorted(listed - found.keys())
        if missing or not listed:
            raise WheelError(f"{self.file.name}: {LIBRARY} holds no schema of {', '.join(missing) or 'any operator'}")
        operators: dict[str, list[str]] = {}
        for name in sorted(listed):
            operators.setdefault(name.split(".")[0], []).append(found[name])
        return operators

    def signature(self, path: str) -> str | None:
        """Return the arguments of a Python name, None if it does not exist.

        `torch_npu.npu.set_device` has "device"; a class has the arguments of its constructor. A method of an instance
        is written `torch_npu.npu.Event().record`, and its arguments exclude self.
        """
        symbol = self._find(path)
        return None if symbol is None else self._arguments(symbol)

    def _find(self, path: str) -> Symbol | None:
        symbol: Symbol | None = Symbol("torch_npu", self._module("torch_npu"))
        for part in path.split(".")[1:]:
            symbol = symbol and self._member(symbol, part.removesuffix("()"))
            if part.endswith("()") and symbol and isinstance(symbol.node, ast.ClassDef):
                symbol = Symbol(symbol.module, symbol.node, instance=True)
        return symbol

    def _arguments(self, symbol: Symbol) -> str:
        node = symbol.node
        if isinstance(node, ast.ClassDef) and not symbol.instance:
            instance = replace(symbol, instance=True)
            makers = (self._member(instance, name) for name in ("__init__", "__new__"))
            return next((self._arguments(maker) for maker in makers if maker), NATIVE)
        if not isinstance(node, ast.FunctionDef):
            return NATIVE if node is None else ""
        arguments = copy.deepcopy(node.args)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        if symbol.bound and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list):
            del (arguments.posonlyargs or arguments.args)[0]
        return ast.unparse(arguments)

    def _member(self, symbol: Symbol, name: str) -> Symbol | None:
        node = symbol.node
        if isinstance(node, ast.Module):
            return self._in_module(symbol.module, name)
        if isinstance(node, ast.ClassDef):
            return self._in_class(symbol, node, name)
        return None

    def _in_class(self, symbol: Symbol, node: ast.ClassDef, name: str) -> Symbol | None:
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == name:
                return Symbol(symbol.module, child, bound=symbol.instance)
            if isinstance(child, ast.FunctionDef) and child.name == "__setattr__" and any(
                    isinstance(c, ast.Compare) and f"name == {name!r}" == ast.unparse(c) for c in ast.walk(child)):
                return Symbol(symbol.module, ast.Pass())
        texts = {f"self.{name}", f"cls.{name}"}
        assigned = [n for n in ast.walk(node) if isinstance(n, ast.Assign) and (
            texts & set(map(ast.unparse, n.targets)) or (n in node.body and name in map(ast.unparse, n.targets)))]
        if assigned:
            values = (self._value(symbol.module, n.value) for n in assigned)
            return next(filter(None, values), Symbol(symbol.module, assigned[0]))
        for base in node.bases:
            owner = self._value(symbol.module, base)
            found = self._in_class(replace(owner, instance=symbol.instance), owner.node, name) if (
                owner and isinstance(owner.node, ast.ClassDef)) else None
            if found:
                return found
            if owner is None and ast.unparse(base).startswith("torch_npu._C.") and not name.startswith("__"):
                return Symbol(symbol.module, None) if self._is_native(name) else None
        return None

    def _is_native(self, name: str) -> bool:
        """Return whether the library with Python bindings has a text `name`, as of a method in C++."""
        return b"\0" + name.encode() + b"\0" in self._library

    @cached_property
    def _library(self) -> bytes:
        return self._read(LIBRARY)

    def _texts(self, part: bytes) -> Iterator[bytes]:
        """Yield the texts of the library that contain `part`. A text is between two zeros."""
        end = self._library.find(b"\0")
        while (place := self._library.find(part, end)) >= 0 and (after := self._library.find(b"\0", place)) >= 0:
            yield self._library[self._library.rfind(b"\0", 0, place) + 1 : after]
            end = after

    def _in_module(self, module: str, name: str) -> Symbol | None:
        """Look up a name as Python does: the last definition, then star imports, then submodules."""
        if not self._has(module) or (module, name) in self._ahead:
            return None
        self._ahead.add((module, name))
        try:
            for child in reversed(statements(self._module(module).body)):
                if found := self._bound(module, child, name):
                    return found
            inner = f"{module}.{name}"
            return Symbol(inner, self._module(inner)) if self._has(inner) else None
        finally:
            self._ahead.discard((module, name))

    def _bound(self, module: str, node: ast.stmt, name: str) -> Symbol | None:
        """Return what a statement binds `name` to, or None."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return Symbol(module, node)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return self._value(module, node.value) or Symbol(module, node)
        if isinstance(node, ast.ImportFrom):
            source = self._source(module, node)
            for alias in node.names:
                if (alias.asname or alias.name) == name or (alias.name == "*" and not name.startswith("_")):
                    return self._in_module(source, name if alias.name == "*" else alias.name)
        return None

    def _value(self, module: str, value: ast.expr) -> Symbol | None:
        """Return the meaning of an expression at the top of a module, as far as it is known."""
        if ast.unparse(value).startswith(("torch.npu.", "torch_npu.")) and not isinstance(value, ast.Call):
            return self._find("torch_npu." + ast.unparse(value).removeprefix("torch_npu.").removeprefix("torch."))
        if isinstance(value, ast.Call):
            made = self._value(module, value.func)
            return replace(made, instance=True) if made and isinstance(made.node, ast.ClassDef) else None
        if isinstance(value, ast.Name):
            return self._in_module(module, value.id)
        if isinstance(value, ast.Attribute):
            owner = self._value(module, value.value)
            return self._member(owner, value.attr) if owner else None
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".") if self._file(module).endswith("/__init__.py") else module.split(".")[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])

    def _file(self, module: str) -> str:
        stem = module.replace(".", "/")
        return f"{stem}/__init__.py" if f"{stem}/__init__.py" in self._names else f"{stem}.py"

    def _has(self, module: str) -> bool:
        return self._file(module) in self._names

    def _module(self, name: str) -> ast.Module:
        if name not in self._modules:
            self._modules[name] = ast.parse(self._read(self._file(name)))
        return self._modules[name]


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that run when a module is imported, including those under `if`, `try` and `with`."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                found += statements(getattr(node, field, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                found += statements(handler.body)
    return found
