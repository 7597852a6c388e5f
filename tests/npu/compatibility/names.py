"""Resolution of expressions in our sources to names of torch_npu, from the sources alone.

A path is a dotted name: `npu::npu_rms_norm` for an operator, `npu::op.out` for its overload,
`torch_npu.npu.set_device` for a Python function, `torch_npu.npu.Event().record` for a method of an instance,
`torch_npu.npu.Event()[]` for a list of instances. Names are followed through imports, assignments, annotations,
attributes of our objects, arguments of our functions and their return values, in all given files. An attribute is
identified by its name within a file, regardless of its object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SPELLINGS = (("torch.ops.npu.", "npu::"), ("torch.ops.atb.", "atb::"), ("torch.npu.", "torch_npu.npu."),
             ("torch_npu.npu_", "npu::npu_"), ("torch_npu._npu_", "npu::_npu_"))
MAKES = {f"torch_npu.npu.{name}_stream": "torch_npu.npu.Stream()" for name in ("current", "default")}
"""Return types of functions of torch_npu; classes are recognized by their capital letter."""

UNKNOWN = ""
"""Replaces a dotted name if a local name hides it."""
API = ("torch_npu", "torch.ops.npu", "npu::", "atb::")

CONTAINERS = ("list", "tuple", "sorted", "deque", "reversed", "iter")
FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)


class Instance(ast.Call):
    """Expression that stands for an instance of an annotation."""


@dataclass(slots=True)
class Scope:
    """Module, or function of `module`.

    names: values that each name may be bound to.
    attributes: attributes of any object, with a leading dot, in the module's scope.
    """

    module: str
    parent: Scope | None = None
    names: dict[str, list[Bound]] = field(default_factory=dict)

    def bind(self, name: str, value: ast.AST | str, scope: Scope | None = None) -> None:
        self.names.setdefault(name, []).append(Bound(value, scope or self))

    def find(self, name: str) -> list[Bound]:
        return self.names.get(name) or (self.parent.find(name) if self.parent else [])

    def top(self) -> Scope:
        return self.parent.top() if self.parent else self


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """Value in a scope: an expression, a function of ours, or a dotted name."""

    value: ast.AST | str
    scope: Scope


Meaning = str | Bound | None
"""Path of torch or torch_npu, function of ours, or None for anything else."""


def canonical(path: str) -> str:
    for spelling, instead in SPELLINGS:
        if path.startswith(spelling):
            return instead + path.removeprefix(spelling)
    return {"torch.npu": "torch_npu.npu"}.get(path, path)


class Names:
    """Resolver of names. trees: by the module's full name."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.modules = {name: Scope(name) for name in trees}
        self.scopes: dict[ast.AST, Scope] = {}
        self.followed: set[ast.AST] = set()
        """Arguments that are bound to parameters of our functions."""
        self._bases: dict[int, list[ast.expr]] = {}  # base classes, by the id of the scope of __init__
        self._ahead: set[tuple[ast.AST, int]] = set()  # in progress
        self._num_cut = 0  # circles that were cut; what was found inside one depends on where the search began
        self._meanings: dict[tuple[ast.AST, int], Meaning] = {}  # by expression, and id of the scope
        self._paths: dict[ast.AST, str | None] = {}
        self._returns: dict[ast.AST, list[ast.expr]] = {}
        for name, tree in trees.items():
            self._enter(tree, self.modules[name])
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    self._pass(node, self.scopes[node])

    def _enter(self, node: ast.AST, scope: Scope) -> None:
        """Record the bindings in `node` and its children."""
        self.scopes[node] = scope
        if isinstance(node, FunctionNode):
            inner = self.scopes[node] = Scope(scope.module, scope)
            for argument in (n for n in ast.walk(node.args) if isinstance(n, ast.arg)):
                inner.bind(argument.arg, annotated(argument.annotation) if argument.annotation else UNKNOWN)
            scope.bind(node.name, node, inner)
            scope.top().bind(f".{node.name}", node, inner)
            scope = inner
        elif isinstance(node, ast.ClassDef):
            scope.bind(node.name, node)
            for child in node.body:
                if isinstance(child, FunctionNode) and child.name == "__init__":
                    self._enter(child, scope)
                    self._bases[id(self.scopes[child])] = node.bases
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                whole = f"{module}.{alias.name}" if module else alias.name
                scope.bind(alias.asname or whole.split(".")[-1 if module else 0],
                           whole if module or alias.asname else whole.split(".")[0])
        elif isinstance(node, ast.AnnAssign):
            self._assign(node.target, annotated(node.annotation), scope)
            if node.value:
                self._assign(node.target, node.value, scope)
            if isinstance(node.target, ast.Name):  # possibly of a class
                scope.top().bind(f".{node.target.id}", annotated(node.annotation), scope)
        elif isinstance(node, (ast.Assign, ast.NamedExpr)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value, scope)
        elif isinstance(node, ast.withitem) and node.optional_vars:
            self._assign(node.optional_vars, node.context_expr, scope)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._assign(node.target, ast.Subscript(node.iter, ast.Constant(0)), scope)
        for child in ast.iter_child_nodes(node):
            if child not in self.scopes:
                self._enter(child, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, value)
        elif isinstance(target, ast.Attribute):
            scope.top().bind(f".{target.attr}", value, scope)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._assign(one, part, scope)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._assign(one, ast.Subscript(value, ast.Constant(0)), scope)

    def _pass(self, call: ast.Call, scope: Scope) -> None:
        """Bind the arguments of a function of ours, or the fields of a dataclass."""
        if isinstance(call.func, ast.Name):
            targets, skipped = scope.find(call.func.id), 0
        elif ast.unparse(call.func) == "super().__init__":
            targets, skipped = list(self._inherited(scope)), 1
        elif isinstance(call.func, ast.Attribute):
            targets, skipped = scope.top().names.get(f".{call.func.attr}", []), 1
        else:
            return
        for target in targets:
            node, inner, mark = target.value, target.scope, ""
            if isinstance(node, ast.ClassDef):
                made = [n for n in node.body if isinstance(n, FunctionNode) and n.name == "__init__"]
                if made:
                    node, inner, skipped = made[0], self.scopes[made[0]], 1
            if isinstance(node, FunctionNode):
                parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)][skipped:]
            elif isinstance(node, ast.ClassDef):
                parameters, inner, mark = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)
                                           and isinstance(n.target, ast.Name)], target.scope.top(), "."
            else:
                continue
            for parameter, value in [*zip(parameters, call.args, strict=False),
                                     *((k.arg, k.value) for k in call.keywords if k.arg in parameters)]:
                inner.bind(f"{mark}{parameter}", value, scope)
                self.followed.add(value)

    def _inherited(self, scope: Scope) -> Iterator[Bound]:
        """Yield our classes that are bases of the class whose __init__ the scope is."""
        for base in self._bases.get(id(scope), []):
            name = base.value if isinstance(base, ast.Subscript) else base
            for bound in scope.find(name.id) if isinstance(name, ast.Name) else []:
                module, _, own = bound.value.rpartition(".") if isinstance(bound.value, str) else ("", "", "")
                yield from self.modules[module].names.get(own, []) if module in self.modules else [bound]

    def path(self, node: ast.AST) -> str | None:
        """Return the path of torch_npu that an expression resolves to, or None."""
        if node not in self._paths:
            found = self._meaning(node, self.scopes[node])
            self._paths[node] = found if isinstance(found, str) and found.startswith(API) else None
        return self._paths[node]

    def _meaning(self, node: ast.AST, scope: Scope) -> Meaning:
        key = node, id(scope)
        if key in self._meanings:
            return self._meanings[key]
        if key in self._ahead:
            self._num_cut += 1
            return None
        is_first = not self._ahead
        num_cut = self._num_cut
        self._ahead.add(key)
        try:
            meaning = self._read(node, scope)
        finally:
            self._ahead.discard(key)
        if is_first or num_cut == self._num_cut:
            self._meanings[key] = meaning
        return meaning

    def _read(self, node: ast.AST, scope: Scope) -> Meaning:
        if isinstance(node, ast.Name):
            return self._first(scope.find(node.id))
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        if isinstance(node, ast.Call):
            return self._result(node, scope)
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            either = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return self._first(Bound(value, scope) for value in either)
        if isinstance(node, (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)):
            elements = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node.elt]
            name = self._first(Bound(element, scope) for element in elements)
            return f"{name}[]" if isinstance(name, str) else None
        if isinstance(node, ast.Subscript):
            sequence = self._meaning(node.value, scope)
            if not isinstance(sequence, str) or not sequence.endswith("[]"):
                return None
            return sequence if isinstance(node.slice, ast.Slice) else sequence[:-2]
        return None

    def _first(self, bounds: Iterable[Bound]) -> Meaning:
        for bound in bounds:
            found: Meaning
            if isinstance(bound.value, FunctionNode):
                found = bound
            elif isinstance(bound.value, str):
                found = self._imported(bound.value)
            else:
                found = self._meaning(bound.value, bound.scope)
            if found is not None:
                return found
        return None

    def _imported(self, path: str) -> Meaning:
        module, _, name = path.rpartition(".")
        if path in self.modules:
            return path
        if module in self.modules:
            return self._first(self.modules[module].names.get(name, []))
        return canonical(path) if path.split(".")[0] in ("torch", "torch_npu") else None

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Meaning:
        owner = self._meaning(node.value, scope)
        if isinstance(owner, str):
            if owner.endswith("[]"):
                return None
            path = f"{owner}.{node.attr}"
            return self._imported(path) if owner in self.modules else canonical(path)
        found = self._first(scope.top().names.get(f".{node.attr}", []))
        if isinstance(found, Bound) and isinstance(found.value, FunctionNode) and any(
                ast.unparse(d).endswith("property") for d in found.value.decorator_list):
            return self._returned(found)
        return found

    def _result(self, node: ast.Call, scope: Scope) -> Meaning:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        is_lazy_module = called.lstrip("_")[:1].isupper()
        if (called in ("import_module", "__import__") or is_lazy_module) and texts[:1] == ["torch_npu"]:
            return "torch_npu"
        if called == "getattr" and texts:
            return self._attribute(ast.Attribute(node.args[0], texts[0]), scope)
        if called in CONTAINERS and len(node.args) == 1:
            return self._meaning(node.args[0], scope)
        function = self._meaning(node.func, scope)
        if isinstance(function, Bound):
            return self._returned(function)
        if function is None or function in self.modules:
            return None
        return MAKES.get(function) or (f"{function}()" if function.rpartition(".")[2][:1].isupper() else None)

    def _returned(self, function: Bound) -> Meaning:
        node = function.value
        assert isinstance(node, FunctionNode)
        if node not in self._returns:
            values = [annotated(node.returns)] if node.returns else []
            values += [n.value for n in own(node) if isinstance(n, (ast.Return, ast.Yield)) and n.value]
            self._returns[node] = values
        return self._first(Bound(value, function.scope) for value in self._returns[node])


def annotated(node: ast.expr) -> ast.expr:
    """Return an expression for an instance of the annotation: `X`, `X | None` or `"X"`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return annotated(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp):
        return ast.BoolOp(ast.Or(), [annotated(node.left), annotated(node.right)])
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in CONTAINERS:
        inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
        return ast.List([annotated(inner)])
    return Instance(node, [], [])


def own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without nested functions."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (*FunctionNode, ast.Lambda)):
            yield child
            yield from own(child)
