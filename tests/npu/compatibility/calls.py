"""Uses of torch_npu in our sources: name, arguments, place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.npu.compatibility.names import Instance, Names

ROOT = Path(__file__).parents[3]
WHOLE = ("torch_npu", "torch_npu.npu", "torch.ops.npu")
BY_TEXT = ("getattr", "hasattr", "setattr")
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")


class UnseenCall(ValueError):
    """Use that cannot be resolved from the sources; the message says where it is and how to write it instead."""


@dataclass(frozen=True, slots=True)
class Use:
    """Use of a name of torch_npu.

    path: as in `names`.
    positional, keywords: kinds of a call's arguments if they are literals or annotated (int, float, str, bool, None,
        list, dtype, Tensor), else "".
    results: number of values that the call must return, exactly if they are unpacked.
    keys: keys of dictionaries written as literals in the arguments.
    called: False if the name is not called.
    """

    where: str
    path: str
    called: bool = False
    positional: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    results: int | None = None
    unpacked: bool = False
    keys: tuple[str, ...] = ()


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Return module -> file for all files that may use torch_npu."""
    files = {}
    for folder in ("npu", "kernels"):
        for file in sorted((root / folder).rglob("*.py")):
            name = ".".join(["npuserve", *file.relative_to(root).with_suffix("").parts])
            files[name.removesuffix(".__init__")] = file
    return files


def uses(files: dict[str, Path], root: Path = ROOT) -> list[Use]:
    """Return the uses of torch_npu in `files`, in order. Raises UnseenCall."""
    trees = {name: ast.parse(file.read_text(), str(file)) for name, file in files.items()}
    names = Names(trees)
    return [use for name, tree in trees.items()
            for use in _File(names, tree, files[name].relative_to(root).as_posix()).uses()]


@functools.cache
def our_uses() -> list[Use]:
    """Return the uses of torch_npu in this repository."""
    return uses(sources())


class _File:
    def __init__(self, names: Names, tree: ast.Module, file: str) -> None:
        self.names, self.tree, self.file = names, tree, file
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def uses(self) -> Iterator[Use]:
        for node in sorted((n for n in ast.walk(self.tree) if isinstance(n, (ast.Call, ast.Attribute, ast.Name))),
                           key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0)):
            yield from self._of(node)

    def _of(self, node: ast.AST) -> Iterator[Use]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_TEXT and node.args:
            yield from self._by_text(node)
        if not isinstance(node, (ast.Attribute, ast.Name)):
            return
        path, parent = self.names.path(node), self.parents[node]
        if path is None or (isinstance(parent, ast.Attribute) and self.names.path(parent)):
            return
        if path in WHOLE:
            passed = isinstance(parent, (ast.Call, ast.keyword, ast.Starred)) and node not in self.names.followed
            if passed and not self._is_by_text(parent):
                raise UnseenCall(f"{self._at(node)}: {ast.unparse(parent)}: {path} is passed on; call its functions "
                                 "where they can be seen")
        elif isinstance(parent, ast.Call) and parent.func is node and not path.endswith("()"):
            yield self._call(parent, path)
        elif isinstance(node, ast.Attribute) and self.names.path(node.value):
            yield Use(self._at(node), path)

    def _at(self, node: ast.expr) -> str:
        return f"{self.file}:{node.lineno}"

    def _is_by_text(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_TEXT

    def _by_text(self, node: ast.Call) -> Iterator[Use]:
        """Yield uses by getattr and similar functions. A name used with a default or in hasattr may be absent."""
        path = self.names.path(node.args[0])
        if path is None or len(node.args) < 2:
            return
        if not isinstance(node.args[1], ast.Constant):
            raise UnseenCall(f"{self._at(node)}: {ast.unparse(node)}: the name is not written out")
        found = self.names.path(node)
        if ast.unparse(node.func) == "getattr" and len(node.args) == 2 and found:
            parent = self.parents[node]
            if isinstance(parent, ast.Call) and parent.func is node:
                yield self._call(parent, found)
            else:
                yield Use(self._at(node), found)

    def _call(self, node: ast.Call, path: str) -> Use:
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise UnseenCall(f"{self._at(node)}: {ast.unparse(node)}: positional arguments are not written out")
        keywords = list(self._keywords(node, node.keywords))
        keys = [str(key.value) for value in (*node.args, *(v for _, v in keywords)) for d in ast.walk(value)
                if isinstance(d, ast.Dict) for key in d.keys if isinstance(key, ast.Constant)]
        parent, results, unpacked = self.parents[node], None, False
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], (ast.Tuple, ast.List)):
            results, unpacked = len(parent.targets[0].elts), True
        elif isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant):
            index = parent.slice.value
            results = index + 1 if isinstance(index, int) else None
        return Use(self._at(node), path, True, tuple(map(self._kind, node.args)),
                   tuple((name, self._kind(value)) for name, value in keywords), results, unpacked, tuple(keys))

    def _keywords(self, call: ast.Call, keywords: Iterable[ast.keyword]) -> Iterator[tuple[str, ast.expr]]:
        """Yield the keywords of a call, with the keys of `**options` if options is a dict literal in the function."""
        for keyword in keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            values: list[ast.AST | str] = [keyword.value]
            if isinstance(keyword.value, ast.Name):
                values = [bound.value for bound in self.names.scopes[call].find(keyword.value.id)]
            for value in values:
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
                    yield from self._keywords(call, value.keywords)
                elif isinstance(value, ast.Dict):
                    texts = [str(key.value) if isinstance(key, ast.Constant) else None for key in value.keys]
                    yield from self._keywords(call, list(map(ast.keyword, texts, value.values)))
                else:
                    values = []
            if not values:
                raise UnseenCall(f"{self._at(call)}: {ast.unparse(call)}: **{ast.unparse(keyword.value)} is not "
                                 "written out in the function")

    def _kind(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return type(node.value).__name__.removesuffix("Type")
        if isinstance(node, ast.Name) and node in self.names.scopes:
            bounds = self.names.scopes[node].find(node.id)
            annotated = [bound for bound in bounds if isinstance(bound.value, Instance) and self._kind(bound.value)]
            kinds = {self._kind(bound.value) if isinstance(bound.value, ast.expr) else ""
                     for bound in annotated[:1] or bounds}
            return kinds.pop() if len(kinds) == 1 else ""
        if isinstance(node, (ast.List, ast.Tuple, ast.ListComp)):
            return "list"
        if isinstance(node, ast.JoinedStr):
            return "str"
        if isinstance(node, ast.UnaryOp):
            return "bool" if isinstance(node.op, ast.Not) else self._kind(node.operand)
        if isinstance(node, ast.Compare):
            return "bool"
        if isinstance(node, ast.Call):  # or the annotation's
            made = ast.unparse(node.func).removeprefix("torch.").replace("len", "int")
            return made if made in ("int", "float", "str", "bool", "list", "dtype", "Tensor") else ""
        return "dtype" if ast.unparse(node).removeprefix("torch.") in DTYPES and "torch." in ast.unparse(node) else ""
