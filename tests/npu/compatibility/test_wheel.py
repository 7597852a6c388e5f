"""A wheel made by the test is read as a published one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.npu.compatibility import __main__ as program
from tests.npu.compatibility.calls import Use
from tests.npu.compatibility.release import VERSIONS
from tests.npu.compatibility.wheel import LIBRARY, LISTING, NATIVE, Wheel, WheelError

SCHEMAS = ("npu_a(Tensor input, *, float eps=1e-06) -> Tensor", "npu_a.out(Tensor input, Tensor(a!) out) -> Tensor(a!)",
           "_npu_b(int n) -> (Tensor, int[])", "wrap_c(Tensor x) -> Tensor")
LISTED = """backend: NPU
custom:
- func: npu_a(Tensor self, *, float eps=1e-06) -> Tensor
  exposed: true
- device_check: NoCheck
  func: npu_a.out(Tensor self, Tensor(a!) out) -> Tensor(a!)
- func: _npu_b(int n) -> (Tensor, int[])
quant:
- func: something_else(Tensor x) -> Tensor
"""
SOURCES = {
    "__init__": "import torch\nimport torch_npu.npu\n",
    "npu/__init__": """
from .streams import Stream, Event as Mark
from .things import *
from . import settings
if True:
    def pick(device, /, *others, index: int = 0, **rest) -> int: return 0
config = settings.Settings()
def overwritten(a): ...
def overwritten(b, *, c=(1, 2)): ...
""",
    "npu/streams": """
import torch_npu._C
class Stream(torch_npu._C._StreamBase):
    def __new__(cls, device=None, priority=0): return super().__new__(cls)
    def wait(self, event: 'Event') -> None: ...
class Event(Stream):
    def __init__(self, timing=False): self.mode = Mode()
    @staticmethod
    def of(stream): ...
class Mode:
    side = None
    def __new__(cls): cls.side = torch.npu.Stream()
""",
    "npu/things": "from torch_npu.npu import overwritten as first\nfrom .streams import Mode\ndef _hidden(): ...\n"
                  "def seen(x=[1]): ...\n",
    "npu/settings": "class Settings:\n    def __setattr__(self, name, value):\n        if name == 'allow': return\n",
}


def make(folder: Path, version: str = "2.13.0", schemas: tuple[str, ...] = SCHEMAS, listing: str = LISTED) -> Path:
    file = folder / f"torch_npu-{version}-{program.TAG}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(LIBRARY, b"\x7fELF\0junk(\0native_method\0" + "\0".join(schemas).encode() + b"\0tail -> x\0")
        archive.writestr(LISTING, listing)
        archive.writestr(f"torch_npu-{version}.dist-info/METADATA",
                         f"Name: torch_npu\nRequires-Dist: torch=={version}.*\n")
        for name, text in SOURCES.items():
            archive.writestr(f"torch_npu/{name}.py", text)
    return file


def test_wheel_operators(tmp_path: Path) -> None:
    wheel = Wheel(make(tmp_path))
    assert (wheel.version, wheel.torch) == ("2.13.0", "==2.13.0.*")
    assert wheel.operators == {"npu_a": list(SCHEMAS[:2]), "_npu_b": [SCHEMAS[2]]}


@pytest.mark.parametrize(("path", "arguments"), [
    ("torch_npu.npu.Stream", "device=None, priority=0"),
    ("torch_npu.npu.Stream().wait", "event"),
    ("torch_npu.npu.Stream().native_method", NATIVE),
    ("torch_npu.npu.Stream().no_such_method", None),
    ("torch_npu.npu.Mark", "timing=False"),
    ("torch_npu.npu.Mark().wait", "event"),
    ("torch_npu.npu.Mark().of", "stream"),
    ("torch_npu.npu.Mark().mode.side.wait", "event"),
    ("torch_npu.npu.Mark().mode.gone", None),
    ("torch_npu.npu.Event", None),
    ("torch_npu.npu.pick", "device, /, *others, index=0, **rest"),
    ("torch_npu.npu.overwritten", "b, *, c=(1, 2)"),
    ("torch_npu.npu.first", "b, *, c=(1, 2)"),
    ("torch_npu.npu.seen", "x=[1]"),
    ("torch_npu.npu._hidden", None),
    ("torch_npu.npu.things._hidden", ""),
    ("torch_npu.npu.config.allow", ""),
    ("torch_npu.npu.config.forbid", None),
    ("torch_npu.npu.no_such_name", None),
    ("torch_npu.no_such_module.name", None),
])
def test_wheel_python_signatures(tmp_path: Path, path: str, arguments: str | None) -> None:
    assert Wheel(make(tmp_path)).signature(path) == arguments


def test_wheel_unreadable_schema_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match=r"holds no schema of _npu_b$"):
        _ = Wheel(make(tmp_path, schemas=SCHEMAS[:2])).operators
    with pytest.raises(WheelError, match="holds no schema of any operator"):
        _ = Wheel(make(tmp_path, listing="backend: NPU\n")).operators


def test_wheel_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torch_npu-2.13.0-cp311-cp311-any.whl").write_text("text")
    for name in ("torch_npu-2.13.0-cp311-cp311-any.whl", "torch-2.13.0-cp311-cp311-any.whl"):
        with pytest.raises(WheelError, match="is not a wheel of torch_npu"):
            Wheel(tmp_path / name)
    empty = tmp_path / "torch_npu-2.14.0-cp311-cp311-any.whl"
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(WheelError, match=r"holds no torch_npu/"):
        _ = Wheel(empty).operators


def test_check_fails_on_other_data_and_wrong_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPUSERVE_WHEELS", str(tmp_path))
    monkeypatch.setattr(program, "FOLDER", tmp_path / "versions")
    for version in VERSIONS:
        make(tmp_path, version)
    monkeypatch.setattr(program, "sources", lambda: {"kernel": tmp_path / "kernel.py"})
    monkeypatch.setattr(program, "uses", lambda files: [])
    assert program.main(["check"]) == 1
    assert "+++ torch_npu-2.14.0" in capsys.readouterr().out
    assert program.main(["write"]) == 0
    assert program.main(["check"]) == 0
    assert "all fit" in capsys.readouterr().out
    wrong = Use("k.py:1", "npu::npu_a", True, ("",), (("epsilon", ""),))
    monkeypatch.setattr(program, "uses", lambda files: [wrong])
    assert program.main(["write"]) == 1
    assert "k.py:1: npu::npu_a, torch_npu 2.14.0: has no argument epsilon" in capsys.readouterr().out
    assert program.main(["now"]) == 2
