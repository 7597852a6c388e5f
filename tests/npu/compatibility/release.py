"""Schemas and signatures of the names that we use in a released version of torch_npu, and whether our calls fit them.

The folder `versions` holds them as data, so that the tests need no wheel; `python -m tests.npu.compatibility` writes
the data from the wheels and compares it with them.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.npu.compatibility.calls import Use
from tests.npu.compatibility.wheel import NATIVE, Wheel

VERSIONS = ("2.10.0.post4", "2.13.0", "2.14.0")
"""The version pinned by vllm-ascend, ours, and the next one."""
EMULATED = "2.13.0"
"""Version on which our calls run on the emulator: the types and defaults of the others are compared with it."""
FOLDER = Path(__file__).parent / "versions"
ACCEPTED = {
    "int": {"int", "dtype"}, "float": {"float", "int"}, "str": {"str"}, "bool": {"bool"},
    "number": {"float", "int", "bool"}, "Tensor": {"Tensor"}, "Device": {"str"}, "List": {"list"}}
"""Type in a schema -> kinds of literals that may be passed for it."""


@dataclass(frozen=True, slots=True)
class Release:
    """Names in a released version.

    operators: schemas by path; empty if the version lacks the operator.
    python: arguments by path as in `Wheel.signature`; None if the version lacks the name.
    torch: versions of torch that the wheel requires.
    """

    version: str
    wheel: str
    sha256: str
    operators: dict[str, list[str]]
    python: dict[str, str | None]
    torch: str = ""

    @staticmethod
    def of(wheel: Wheel, paths: Iterable[str]) -> Release:
        operators, python = {}, {}
        for path in sorted(set(paths)):
            if path.startswith("npu::"):
                name = operator(path)
                operators[name] = wheel.operators.get(name.removeprefix("npu::"), [])
            elif not path.startswith("atb::"):
                python[path] = wheel.signature(path)
        return Release(wheel.version, wheel.file.name, wheel.sha256, operators, python, wheel.torch)

    @staticmethod
    def load(version: str) -> Release:
        return Release(**json.loads((FOLDER / f"{version}.json").read_text()))

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def operator(path: str) -> str:
    """Return the path without the overload."""
    return path.split(".")[0]


def problems(
    uses: Sequence[Use], release: Release, emulated: Release, among: Sequence[Use] | None = None
) -> list[str]:
    """Return why our uses do not fit a release, one line each. among: all our uses, if `uses` are only some."""
    found = []
    called = {operator(use.path) for use in among or uses}
    arguments = {a.name for name, texts in release.operators.items() if name in called
                 for text in texts for a in torch._C.parse_schema(text).arguments}
    for use in uses:
        if use.path.startswith("npu::"):
            wrong = _operator(use, release, emulated)
        elif use.path.startswith("atb::"):
            wrong = ["the schemas of atb:: cannot be read from a wheel: call an operator of npu::"]
        else:
            wrong = _python(use, release, emulated)
        if use.path == "torch_npu.npu.NPUGraph().update":
            wrong += [f"{key} is an argument of no operator that is called" for key in use.keys if key not in arguments]
        found += [f"{use.where}: {use.path}, torch_npu {release.version}: {problem}" for problem in wrong]
    return found


def _operator(use: Use, release: Release, emulated: Release) -> list[str]:
    name = operator(use.path)
    if name not in release.operators:
        return ["is not in the data: run python -m tests.npu.compatibility write"]
    schemas = [torch._C.parse_schema(text) for text in release.operators[name]]
    if overload := use.path.partition(".")[2]:
        schemas = [s for s in schemas if (s.overload_name or "default") == overload]
    if not schemas:
        return ["there is no such operator"]
    if not use.called:
        return []
    reference = {s.overload_name: s for s in map(torch._C.parse_schema, emulated.operators.get(name, []))}
    tried = [_fit(use, schema, reference.get(schema.overload_name)) for schema in schemas]
    return min(tried, key=len)


def _fit(use: Use, schema: Any, reference: Any) -> list[str]:
    """Return why a call does not fit one schema."""
    found = []
    ordered = [a for a in schema.arguments if not a.kwarg_only]
    if len(use.positional) > len(ordered):
        found.append(f"{len(use.positional)} positional arguments for {len(ordered)}")
    given = {a.name: kind for a, kind in zip(ordered, use.positional, strict=False)}
    for name, kind in use.keywords:
        if name in given:
            found.append(f"{name} is given twice")
        given[name] = kind
    known = {a.name: a for a in schema.arguments}
    found += [f"has no argument {name}; it has {', '.join(known)}" for name in given if name not in known]
    found += [f"{a.name} is missing" for a in schema.arguments if a.name not in given and not a.has_default_value()]
    found += [f"{name} takes {known[name].type}, not {kind}" for name, kind in given.items()
              if name in known and not _takes(str(known[name].type), kind)]
    count = len(schema.returns)
    if use.results is not None and (count != use.results if use.unpacked else count < use.results):
        found.append(f"returns {count} values, not {use.results}")
    for theirs in reference.arguments if reference else ():
        ours = known.get(theirs.name)
        if ours is None:
            continue
        if theirs.name in given and not _alike(str(ours.type), str(theirs.type), given[theirs.name]):
            found.append(f"{theirs.name} takes {ours.type}, and {theirs.type} in {EMULATED}")
        if theirs.name not in given and ours.default_value != theirs.default_value:
            found.append(f"{theirs.name} is {ours.default_value} by default, and {theirs.default_value} in {EMULATED}")
    return found


def _alike(ours: str, theirs: str, kind: str) -> bool:
    """Return True if two types are equivalent for the given kind; for a value that is not None, optional or not."""
    if kind in ("", "None"):
        return ours == theirs
    return _present(ours) == _present(theirs)


def _present(argument: str) -> str:
    return argument.removeprefix("Optional[").removesuffix("]") if argument.startswith("Optional[") else argument


def _takes(argument: str, kind: str) -> bool:
    """Return True if a schema's type, such as "Optional[List[int]]", accepts the kind."""
    optional = argument.startswith("Optional[")
    if kind in ("", "None"):
        return kind == "" or optional
    bare = argument.removeprefix("Optional[").split("[")[0].removesuffix("]")
    return kind in ACCEPTED.get(bare, {kind})


def _python(use: Use, release: Release, emulated: Release) -> list[str]:
    if use.path not in release.python:
        return ["is not in the data: run python -m tests.npu.compatibility write"]
    arguments, reference = release.python[use.path], emulated.python.get(use.path)
    if arguments is None:
        return ["there is no such name"]
    if not use.called or NATIVE in (arguments, reference):
        return []
    ours = signature(arguments)
    try:
        given = ours.bind(*use.positional, **dict(use.keywords)).arguments
    except TypeError as error:
        return [f"{error}; it takes ({arguments})"]
    theirs = signature(reference or "").parameters
    return [f"{name} is {p.default} by default, and {theirs[name].default} in {EMULATED}"
            for name, p in ours.parameters.items()
            if name not in given and name in theirs and p.default != theirs[name].default]


def signature(arguments: str) -> inspect.Signature:
    """Parse arguments such as "device=None, *, priority=0"; a default is its text."""
    node = ast.parse(f"def f({arguments}): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    a, kinds = node.args, inspect.Parameter
    ordered = [(x, kinds.POSITIONAL_ONLY) for x in a.posonlyargs] + [(x, kinds.POSITIONAL_OR_KEYWORD) for x in a.args]
    defaults = [None] * (len(ordered) - len(a.defaults)) + a.defaults
    parameters = [kinds(x.arg, kind, default=ast.unparse(default) if default else kinds.empty)
                  for (x, kind), default in zip(ordered, defaults, strict=True)]
    parameters += [kinds(a.vararg.arg, kinds.VAR_POSITIONAL)] if a.vararg else []
    parameters += [kinds(x.arg, kinds.KEYWORD_ONLY, default=ast.unparse(default) if default else kinds.empty)
                   for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    parameters += [kinds(a.kwarg.arg, kinds.VAR_KEYWORD)] if a.kwarg else []
    return inspect.Signature(parameters)
