"""Rules of the code that a machine can check; docs/architecture.md gives their reasons."""

from __future__ import annotations

import ast
import functools
import gc
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCE = sorted(file for folder in ("cli", "client", "common", "service", "npu", "kernels")
                for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCH = sorted((ROOT / "bench").rglob("*.py"))

MAX_LINES = 600
LONG_FILES = {"service/scheduling/scheduler.py": "the owner of the sequences, and all that moves them"}
"""File of more than MAX_LINES lines -> why it is not split."""

MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {
    "kernels/triton/linear.py: product_kernel": "one pass over a tile, whose values stay in registers",
    "kernels/triton/linear.py: sums_of": "one loop over a tile, whose values stay in registers",
    "kernels/triton/experts.py: experts_product_kernel": "one pass over a tile, whose values stay in registers",
    "kernels/triton/paged_attention.py: paged_attention_kernel": "one pass over a tile, whose values stay in registers",
    "npu/execution/load.py: load_runner": "the parts of a load, in order",
    "npu/execution/runner.py: __init__": "the parts of a step, each made of those before it",
}
"""Function of more than MAX_FUNCTION_LINES lines -> why it is not split."""

MAX_FILES = 12
LARGE_FOLDERS = {
    "cli": "one file per command, and what they share",
    "kernels": "one file per kernel",
    "kernels/triton": "one file per kernel, and the launches of each",
    "service": "what its folders share",
    "service/structured_output/translation": "one file per language of constraints, and what they share",
    "service/scheduling": "one file per rule of the scheduler",
    "bench/gpu/gpu_parts": "one file per part of the run",
    "bench/serving": "one file per question that it answers, and what they share",
    "bench/reliability": "one file per question that it answers, and what they share",
    "npu/execution": "one file per part of a step",
}
"""Folder of more than MAX_FILES files, its __init__.py not counted -> why it is not split."""

TOP_LEVEL = {
    "cli": {"service", "client", "common", "npu", "kernels", "v1"},
    "service": {"common", "npu", "kernels", "v1"},
    "client": {"common", "v1"},
    "common": {"v1"},
    "npu": {"kernels"},
    "kernels": set[str](),
}
"""Folder -> other folders from which it may import."""

FOLDERS: dict[str, dict[str, set[str]]] = {
    "service": {
        "": set(),
        "ipc": {"", "structured_output"},
        "processes": {""},
        "streams": {"", "ipc"},
        "text": {"", "processes"},
        "rpc": {"", "ipc", "processes"},
        "access": {"", "rpc"},
        "parsing": {"", "structured_output", "text"},
        "requests": {"", "ipc", "structured_output", "text", "rpc", "access", "parsing"},
        "gateway": {"", "ipc", "processes", "streams", "text", "rpc", "access", "parsing", "requests"},
        "frontend": {
            "", "ipc", "processes", "streams", "text", "rpc", "access", "parsing", "requests", "gateway"},
        "speculation": set(),
        "store": {"", "processes"},
        "scheduling": {"", "ipc", "speculation", "store", "structured_output"},
        "structured_output": {"", "processes", "text"},
        "ranks": {"", "processes", "speculation"},
        "engine": {
            "", "ipc", "processes", "streams", "scheduling", "speculation", "store", "structured_output", "text",
            "ranks"},
        "supervisor": {"", "processes", "text", "ranks"},
    },
    "npu": {
        "": set(),
        "storyteller": set(),
        "cann": {""},
        "quantization": set(),
        "backends": {"", "cann", "quantization"},
        "emulator": {"", "backends", "cann"},
        "model": {"", "backends", "quantization"},
        "execution": {"", "backends", "model"},
        "profiling": {"", "backends", "model", "execution"},
        "quantize": {"", "model", "quantization"},
    },
}
"""Top-level folder -> folder in it -> folders in it from which that one may import; "" is the top level."""


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module", autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """Leave the garbage collector off while it would visit millions of syntax nodes."""
    gc.disable()
    yield
    syntax.cache_clear()
    gc.enable()


@functools.cache
def syntax(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions of a file, also nested ones."""
    statements: list[ast.AST] = [ast.parse(file.read_text(), str(file))]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        statements += [child for child in ast.iter_child_nodes(node)
                       if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def imports(file: Path, *, for_types: bool = True) -> tuple[str, ...]:
    """Return the full names of all modules that a file imports, also in functions.

    `from a import b` gives both a and a.b, since b may be a module.

    for_types: also under TYPE_CHECKING.
    """
    package = ["npuserve", *file.relative_to(ROOT).parent.parts]
    found: list[str] = []
    nodes = ast.walk(syntax(file))
    unused = {inner for node in nodes if not for_types and is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(syntax(file)):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(found)


@functools.cache
def modules() -> Mapping[str, Path]:
    """Return import name -> file of all modules of the source."""
    return {"npuserve." + ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
            for f in SOURCE}


def imported_modules(module: str) -> set[str]:
    """Return the modules of the source that a module imports; a package only where a name is taken from it."""
    names = set(imports(modules()[module]))
    found = names & modules().keys() - {module}
    taken = {n.rpartition(".")[0] for n in names - modules().keys()}
    return {i for i in found if modules()[i].name != "__init__.py" or i in taken}


def test_imports_between_top_level_folders_have_one_direction():
    wrong = []
    for file in SOURCE:
        folder = file.relative_to(ROOT).parts[0]
        for module in imports(file):
            parts = module.split(".")
            if parts[0] == "npuserve" and len(parts) > 1 and parts[1] not in TOP_LEVEL[folder] | {folder}:
                wrong.append(f"{name(file)} imports {module}")
            if parts[0] in (*TOP_LEVEL, "protos", "tests", "bench"):
                wrong.append(f"{name(file)} imports {module}: the name is npuserve.{module}")
    assert not wrong


def inner_folder(file: Path) -> str:
    """Return the folder below service/ or npu/ that holds a file; "" for a file at its top level."""
    parts = file.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else ""


@pytest.mark.parametrize("top", FOLDERS)
def test_imports_between_folders_have_one_direction(top: str):
    wrong = []
    for file in (f for f in SOURCE if f.is_relative_to(ROOT / top)):
        folder = inner_folder(file)
        for module in imported_modules("npuserve." + ".".join(
                file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")):
            target, allowed = modules()[module], FOLDERS[top][folder]
            inside = target.is_relative_to(ROOT / top)
            if inside and inner_folder(target) not in {*allowed, folder}:
                wrong.append(f"{name(file)} imports {module}")
    assert not wrong


@pytest.mark.parametrize("top", FOLDERS)
def test_every_folder_has_a_direction(top: str):
    found = {inner_folder(f) for f in SOURCE if f.is_relative_to(ROOT / top)}
    assert found == set(FOLDERS[top])
    TopologicalSorter(FOLDERS[top]).prepare()


def test_no_import_circle():
    """Imports in functions and under TYPE_CHECKING count."""
    try:
        TopologicalSorter({module: imported_modules(module) for module in modules()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_folder_has_a_docstring():
    folders = {file.parent for file in SOURCE if not file.parent.name.startswith("__")}
    assert not [name(folder) for folder in folders
                if not ((file := folder / "__init__.py").exists() and ast.get_docstring(syntax(file)))]


def test_no_folder_has_too_many_files():
    counts = Counter(name(f.parent) for f in [*SOURCE, *BENCH] if f.name != "__init__.py")
    assert {folder for folder, files in counts.items() if files > MAX_FILES} == set(LARGE_FOLDERS)


def test_no_file_is_too_long():
    lines = {name(f): len(f.read_text().splitlines()) for f in [*SOURCE, *TESTS, *BENCH]}
    assert {file: n for file, n in lines.items() if n > MAX_LINES and file not in LONG_FILES} == {}
    assert not [file for file in LONG_FILES if lines[file] <= MAX_LINES]


def test_no_function_is_too_long():
    lengths = {f"{name(file)}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
               for file in [*SOURCE, *TESTS, *BENCH] for node in functions(file)}
    assert {function for function, n in lengths.items() if n > MAX_FUNCTION_LINES} == set(LONG_FUNCTIONS)


def test_kernels_import_no_metrics_and_no_grpc():
    foreign = {"prometheus_client", "grpc", "zmq", "msgspec"}
    assert not [f"{name(f)}: {m}" for f in SOURCE if name(f).startswith("kernels/")
                for m in imports(f) if m.split(".")[0] in foreign]


def test_torch_npu_is_imported_by_ascend_code_only():
    allowed = re.compile(r"npu/backends/ascend/.*|kernels/.*ascend.*\.py")
    assert not [name(f) for f in SOURCE if not allowed.fullmatch(name(f))
                for m in imports(f) if m.split(".")[0] == "torch_npu"]


def test_device_names_occur_only_in_backends():
    """No comparison of a device or a backend with a name, so that a new backend changes nothing elsewhere."""
    wrong = []
    for file in SOURCE:
        if file.is_relative_to(ROOT / "npu" / "backends"):
            continue
        for node in ast.walk(syntax(file)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                subjects = [s.id if isinstance(s, ast.Name) else s.attr if isinstance(s, ast.Attribute) else ""
                            for s in sides]
                constants = [c for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)]
                if any(re.search(r"(^|_)(device|backend)(_name|_type)?$", s) for s in subjects) and any(
                    isinstance(c.value, str) and c.value for c in constants
                ):
                    wrong.append(f"{name(file)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong


def test_nothing_is_unpickled_and_no_model_code_runs():
    """Weights are safetensors, messages msgpack or JSON; the only program of a model is its chat template."""
    forbidden = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
                 "multiprocessing"}
    wrong = [f"{name(f)} imports {m}" for f in SOURCE for m in imports(f) if m.split(".")[0] in forbidden]
    for file in SOURCE:
        for node in ast.walk(syntax(file)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "np.load", "numpy.load", "pd.read_pickle", "yaml.load"):
                wrong.append(f"{name(file)}:{node.lineno}: {called}")
            wrong += [f"{name(file)}:{node.lineno}: {k.arg}" for k in node.keywords
                      if k.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(k.value) != "False"]
    assert not wrong


def test_only_monotonic_clocks_are_read():
    """Except where the date matters: dates for clients, certificates, traces, the chat template's date, the emulator's
    build."""
    allowed = {"service/clock.py", "service/access/tls.py", "service/rpc/tracing.py",
               "service/text/chat_template.py", "npu/emulator/build.py"}
    clocks = re.compile(r"\btime\.(time|localtime|gmtime)\(\)|\btime\.time_ns\b|\bdatetime\.(now|utcnow|today)\(")
    assert not [name(f) for f in SOURCE if name(f) not in allowed and clocks.search(f.read_text())]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cli.main", {"torch", "grpc", "zmq", "rich", "numpy", "transformers"}),
        ("cli.serve", {"torch", "grpc", "transformers"}),
        ("service.frontend.process", {"torch", "transformers", "llguidance"}),
        ("cli.bench.serve", {"torch", "transformers"}),
    ],
)
def test_process_loads_only_what_it_needs(module: str, absent: set[str]):
    code = f"import sys, npuserve.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert f"npuserve.{module}" in loaded
    assert not absent & loaded


def test_front_end_never_imports_torch_or_the_grammar_library():
    """Also not by an import in a function."""
    reached, ahead = set(), ["npuserve.service.frontend.process"]
    while ahead:
        module = ahead.pop()
        if module in modules() and module not in reached:
            reached.add(module)
            ahead += imports(modules()[module], for_types=False)
    assert len(reached) > 5
    assert not [m for m in reached for i in imports(modules()[m], for_types=False)
                if i.split(".")[0] in ("torch", "torch_npu", "llguidance")]


def test_files_read_by_steps_are_all_that_their_tests_import():
    """.ci/run does not repeat tests of kernels and steps whose files are unchanged. Names of modules in strings are
    imports."""
    script = (ROOT / ".ci" / "run").read_text()
    functions = [re.search(rf"^{function}\(\) {{\n.*?^}}", script, re.MULTILINE | re.DOTALL)
                 for function in ("checksums", "files_read_by_steps")]
    command = "\n".join(["pip() { true; }", *(match[0] for match in functions if match), "files_read_by_steps"])
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    listed = {ROOT / line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    names = modules() | {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
                         for f in TESTS + BENCH}
    reached: set[Path] = set()
    always = ("tests/e2e/", "tests/cli/", "tests/npu/emulator/", name(Path(__file__)))
    ahead = [f for f in TESTS if f.name.startswith("test_") and not name(f).startswith(always)
             and (name(f).startswith(("tests/kernels/", "tests/npu/")) or "emulator.child" in f.read_text())]
    while ahead:
        file = ahead.pop()
        if file not in reached:
            reached.add(file)
            texts = {n.value for n in ast.walk(syntax(file)) if isinstance(n, ast.Constant)}
            ahead += [names[module] for module in names.keys() & {*imports(file), *texts}]
    assert len(reached) > 200
    assert not {name(file) for file in reached - listed}


def test_import_graph_is_up_to_date():
    page = (ROOT / "docs" / "architecture.md").read_text()
    done = subprocess.run([sys.executable, ROOT / "docs" / "import_graph.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"-->\n{done.stdout}<!--" in page, "run python docs/import_graph.py --write"


def test_table_of_places_names_what_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Where is")[2].partition("##")[0]
    files = re.findall(r"`([\w/]+\.py)`(?:, `([\w.]+)`)?", table)
    assert len(files) > 10
    for file, function in files:
        assert (ROOT / file).exists(), file
        names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text()))
                 if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}
        assert names.issuperset(filter(None, function.split("."))), f"{file}: {function}"


def text_files() -> Iterator[Path]:
    """Yield the text files of the repository: tracked, or new and not ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True).stdout
    for relative in filter(None, listed.decode().split("\0")):
        file = ROOT / relative
        if file.is_file() and b"\0" not in file.read_bytes()[:8192]:
            yield file


def test_no_absolute_paths_of_a_machine():
    roots = "|".join(("home", "root", "Users", "mnt", "opt", "work", "workspace", "tmp"))
    path = re.compile(rf"(?<![\w.~$}})/-])/({roots})/\w")
    wrong = []
    for file in text_files():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if path.search(line):
                wrong.append(f"{name(file)}:{number}: {line.strip()[:100]}")
    assert not wrong
