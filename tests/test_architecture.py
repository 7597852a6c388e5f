"""The rules of the house that a machine can check; docs/architecture.md says why they are."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted(file for folder in ("client", "service", "npu", "kernels")
                for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 450

# Who may import whom, beside their own kind: downstream only, and the wire is known to service and client alone.
ALLOWED = {
    "client": {"v1"}, "service": {"client", "npu", "kernels", "v1"}, "npu": {"kernels"}, "kernels": set[str]()}


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    package = ["npuserve", *file.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_imports_flow_one_way():
    wrong = []
    for file in SOURCE:
        room = file.relative_to(ROOT).parts[0]
        for module in imports(file):
            parts = module.split(".")
            if parts[0] == "npuserve" and len(parts) > 1 and parts[1] not in ALLOWED[room] | {room}:
                wrong.append(f"{name(file)} imports {module}")
            if parts[0] in (*ALLOWED, "protos", "tests"):
                wrong.append(f"{name(file)} imports {module}: the name is npuserve.{module}")
    assert not wrong


def test_kernels_know_no_metrics_and_no_wire():
    foreign = {"prometheus_client", "grpc", "zmq", "msgspec"}
    assert not [f"{name(f)}: {m}" for f in SOURCE if name(f).startswith("kernels/")
                for m in imports(f) if m.split(".")[0] in foreign]


def test_torch_npu_stays_in_its_rooms():
    allowed = re.compile(r"npu/backends/ascend/.*|kernels/.*ascend.*\.py")
    assert not [name(f) for f in SOURCE if not allowed.fullmatch(name(f))
                for m in imports(f) if m.split(".")[0] == "torch_npu"]


def test_devices_are_known_by_name_only_in_their_backends():
    """No comparison of a device or a backend with a name, so that a new one needs no visit elsewhere."""
    wrong = []
    for file in SOURCE:
        if file.is_relative_to(ROOT / "npu" / "backends"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
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


def test_nothing_is_unpickled_and_no_code_of_a_model_is_run():
    """Weights are safetensors, messages msgpack or JSON; a model brings no program but its chat template."""
    modules = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing"}
    wrong = [f"{name(f)} imports {m}" for f in SOURCE for m in imports(f) if m.split(".")[0] in modules]
    for file in SOURCE:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "np.load", "numpy.load", "pd.read_pickle", "yaml.load"):
                wrong.append(f"{name(file)}:{node.lineno}: {called}")
            wrong += [f"{name(file)}:{node.lineno}: {k.arg}" for k in node.keywords
                      if k.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(k.value) != "False"]
    assert not wrong


def test_a_clock_that_is_set_changes_nothing():
    """All times are monotonic but where the day matters: certificates, traces, and what a chat template asks for."""
    allowed = {"service/access/tls.py", "service/rpc/tracing.py", "service/text/chat_template.py",
               "npu/emulator/build.py"}
    clocks = re.compile(r"\btime\.(time|localtime|gmtime)\(\)|\btime\.time_ns\b|\bdatetime\.(now|utcnow|today)\(")
    assert not [name(f) for f in SOURCE if name(f) not in allowed and clocks.search(f.read_text())]


def test_files_are_rooms_not_halls():
    long = {name(f): n for f in [*SOURCE, *TESTS] if (n := len(f.read_text().splitlines())) > MAX_LINES}
    assert not long


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cli.main", {"torch", "grpc", "zmq", "rich", "numpy", "transformers"}),
        ("supervisor.supervisor", {"torch", "grpc", "transformers"}),
        ("frontend.process", {"torch", "transformers"}),
        ("cli.bench.serve", {"torch", "transformers"}),
    ],
)
def test_a_process_loads_no_more_than_it_needs(module: str, absent: set[str]):
    code = f"import sys, npuserve.service.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert f"npuserve.service.{module}" in loaded
    assert not absent & loaded


def test_nothing_that_the_front_end_may_ever_import_imports_torch():
    """Also where an import waits in a function."""
    files = {"npuserve." + ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
             for f in SOURCE}
    reached, ahead = set(), ["npuserve.service.frontend.process"]
    while ahead:
        module = ahead.pop()
        if module in files and module not in reached:
            reached.add(module)
            ahead += imports(files[module])
    assert len(reached) > 5
    assert not [m for m in reached for i in imports(files[m]) if i.split(".")[0] in ("torch", "torch_npu")]


def test_generated_code_is_what_the_protos_make():
    for tool in ("grpc_tools", "mypy_protobuf"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install npuserve[dev]")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", ROOT / "protos" / "generate.sh", "--check"], env={**os.environ, "PATH": path},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def written() -> Iterator[Path]:
    """Text files that the repository holds: tracked, or new and not ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True).stdout
    for relative in filter(None, listed.decode().split("\0")):
        file = ROOT / relative
        if file.is_file() and b"\0" not in file.read_bytes()[:8192]:
            yield file


def test_nothing_is_of_one_machine():
    """No absolute path of somebody's machine."""
    roots = "|".join(("home", "root", "Users", "mnt", "opt", "work", "workspace", "tmp"))
    path = re.compile(rf"(?<![\w.~$}})/-])/({roots})/\w")
    wrong = []
    for file in written():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if path.search(line):
                wrong.append(f"{name(file)}:{number}: {line.strip()[:100]}")
    assert not wrong
