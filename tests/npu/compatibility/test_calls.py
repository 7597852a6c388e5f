"""Detection of uses of torch_npu, in all the forms that sources may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.npu.compatibility.calls import UnseenCall, Use, uses

HELPER = """
def device_api():
    import torch_npu
    return torch_npu
"""


def seen(tmp_path: Path, text: str, helper: str = HELPER) -> list[Use]:
    files = {}
    for name, content in (("helper", helper), ("kernel", text)):
        files[f"npuserve.kernels.{name}"] = tmp_path / f"{name}.py"
        files[f"npuserve.kernels.{name}"].write_text(content)
    return [use for use in uses(files, tmp_path) if use.where.startswith("kernel.py")]


RMS = "npu::npu_rms_norm"


@pytest.mark.parametrize("text", [
    "import torch_npu\ntorch_npu.npu_rms_norm(x, g, epsilon=eps)",
    "import torch_npu as t\nt.npu_rms_norm(x, g, epsilon=eps)",
    "from torch_npu import npu_rms_norm as norm\nnorm(x, g, epsilon=eps)",
    "import torch\ntorch.ops.npu.npu_rms_norm(x, g, epsilon=eps)",
    "def f(x):\n    import torch_npu\n    op = torch_npu.npu_rms_norm\n    return op(x, g, epsilon=eps)",
    "from npuserve.kernels.helper import device_api\ndevice_api().npu_rms_norm(x, g, epsilon=eps)",
    "from npuserve.kernels import helper\nnpu = helper.device_api()\nnpu.npu_rms_norm(x, g, epsilon=eps)",
    "import importlib\nnpu = importlib.import_module('torch_npu')\nnpu.npu_rms_norm(x, g, epsilon=eps)",
    "npu: Any = _Module('torch_npu')\nnpu.npu_rms_norm(x, g, epsilon=eps)",
    "import torch_npu\ngetattr(torch_npu, 'npu_rms_norm')(x, g, epsilon=eps)",
    "import torch_npu\noptions = {'epsilon': eps}\ntorch_npu.npu_rms_norm(x, g, **options)",
    "import torch_npu\ndef f(x):\n    options = dict(epsilon=eps)\n    torch_npu.npu_rms_norm(x, g, **options)",
    "class A:\n    def __init__(self):\n        import torch_npu\n        self.api = torch_npu\n"
    "    def f(self):\n        return self.api.npu_rms_norm(x, g, epsilon=eps)",
    "class A:\n    @property\n    def api(self):\n        import torch_npu\n        return torch_npu\n"
    "    def f(self):\n        return self.api.npu_rms_norm(x, g, epsilon=eps)",
])
def test_uses_find_operator(tmp_path: Path, text: str) -> None:
    found = [use for use in seen(tmp_path, text) if use.called]
    assert [(use.path, use.positional, use.keywords) for use in found] == [(RMS, ("", ""), (("epsilon", ""),))]


def test_uses_follow_arguments_into_base_class(tmp_path: Path) -> None:
    """Arguments are followed into another file, and past another class with another module.

    As an argument of an unknown function the module is no longer followed.
    """
    base = ("class Base:\n    def __init__(self, streams):\n        self._streams = streams\n"
            "    def f(self):\n        self._streams.synchronize()")
    derived = ("import torch\nfrom npuserve.kernels.helper import Base\nclass A(Base[int]):\n"
               "    def __init__(self):\n        super().__init__(torch.npu)\n        {}\n"
               "class B(Base):\n    def __init__(self):\n        super().__init__(torch.cuda)")
    files = {f"npuserve.kernels.{name}": tmp_path / f"{name}.py" for name in ("helper", "kernel")}
    for file, text in zip(files.values(), (base, derived.format("pass")), strict=True):
        file.write_text(text)
    assert [(use.where, use.path) for use in uses(files, tmp_path)] == [("helper.py:5", "torch_npu.npu.synchronize")]
    files["npuserve.kernels.kernel"].write_text(derived.format("anything(torch.npu)"))
    with pytest.raises(UnseenCall, match=r"kernel\.py:6: .* is passed on"):
        uses(files, tmp_path)


@pytest.mark.parametrize(("text", "paths"), [
    ("import torch\ntorch.npu.Event(enable_timing=True).record(s)",
     ["torch_npu.npu.Event", "torch_npu.npu.Event().record"]),
    ("import torch\ndef f(s: torch.npu.Stream | None):\n    s.wait_event(e)",
     ["torch_npu.npu.Stream", "torch_npu.npu.Stream().wait_event"]),
    ("import torch\ntorch.npu.current_stream().synchronize()",
     ["torch_npu.npu.current_stream", "torch_npu.npu.Stream().synchronize"]),
    ("import torch\nclass B:\n    graph: 'torch.npu.NPUGraph'\ndef f(b):\n    b.graph.replay()",
     ["torch_npu.npu.NPUGraph().replay"]),
    ("import torch\nclass B:\n    def __init__(self):\n        self.graph = torch.npu.NPUGraph()\n"
     "    def f(self):\n        with torch.npu.graph(self.graph, pool=p): pass\n        self.graph.replay()",
     ["torch_npu.npu.NPUGraph", "torch_npu.npu.graph", "torch_npu.npu.NPUGraph().replay"]),
    ("import torch\nclass B:\n    graph: Any\n    ends: list[Any]\ndef f(b):\n    b.graph.replay()\n"
     "    b.ends[0].record(s)\n    b.ends.append(x)\nB(torch.npu.NPUGraph(), ends=[torch.npu.Event() for _ in x])",
     ["torch_npu.npu.NPUGraph().replay", "torch_npu.npu.Event().record", "torch_npu.npu.NPUGraph",
      "torch_npu.npu.Event"]),
    ("import torch\ndef f(graph):\n    graph.mode.update()\ndef g():\n    a, b = torch.npu.NPUGraph(), 1\n    f(a)",
     ["torch_npu.npu.NPUGraph().mode.update", "torch_npu.npu.NPUGraph"]),
    ("import torch\nmade, end = all = [torch.npu.Event() for _ in range(2)]\nend.wait()\nfor e in all: e.record()",
     ["torch_npu.npu.Event", "torch_npu.npu.Event().wait", "torch_npu.npu.Event().record"]),
    ("import torch_npu\ntorch_npu.npu.config.allow_internal_format = True",
     ["torch_npu.npu.config.allow_internal_format"]),
    ("import torch_npu\ntorch_npu.npu_fused_infer_attention_score.out(q, k, v, out=o)",
     ["npu::npu_fused_infer_attention_score.out"]),
    ("import torch_npu\nif hasattr(torch_npu, 'npu_new'): pass\ngetattr(torch_npu, 'other', None)", []),
])
def test_uses_find_python_names(tmp_path: Path, text: str, paths: list[str]) -> None:
    assert [use.path for use in seen(tmp_path, text)] == paths


def test_uses_record_literals(tmp_path: Path) -> None:
    text = ("import torch, torch_npu\n"
            "y, rstd = torch_npu.npu_a(x, [1], -1, layout='TND', dtype=torch.int8, mask=None)\n"
            "z = torch_npu.npu_b(x)[0]\ng = torch.npu.NPUGraph()\ng.update(cpu_update_input=[{'lengths': n}])")
    a, b, _, update = seen(tmp_path, text)
    assert a.positional == ("", "list", "int")
    assert a.keywords == (("layout", "str"), ("dtype", "dtype"), ("mask", "None"))
    assert (a.results, a.unpacked, b.results, b.unpacked) == (2, True, 1, False)
    assert update.keys == ("lengths",)
    assert a.where == "kernel.py:2"


def test_uses_record_kinds_of_annotations_and_constants(tmp_path: Path) -> None:
    text = ("import torch_npu\nFORMAT = 29\nx = 'text'\n"
            "def f(x: torch.Tensor, eps: float, y, *, keep: bool = True):\n    n, z = len(y), 3\n"
            "    torch_npu.npu_a(x, FORMAT, eps, y, keep, n, z)\n    for z in y: torch_npu.npu_a(z)")
    first, second = seen(tmp_path, text)
    assert first.positional == ("Tensor", "int", "float", "", "bool", "int", "")
    assert second.positional == ("",)  # z is bound twice


@pytest.mark.parametrize("text", [
    "import torch_npu\ngetattr(torch_npu, name)(x)",
    "import torch_npu\nrun(torch_npu)",
    "import torch_npu\ntorch_npu.npu_rms_norm(*args)",
    "import torch_npu\ndef f(**options):\n    torch_npu.npu_rms_norm(x, **options)",
    "import torch\nrun(api=torch.ops.npu)",
])
def test_uses_unresolvable_call_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnseenCall, match=r"^kernel\.py:\d+: "):
        seen(tmp_path, text)


def test_uses_ignore_other_names(tmp_path: Path) -> None:
    assert seen(tmp_path, "import torch\nx = torch.zeros(3)\nx.npu_rms_norm()\nother.npu_rms_norm(*args)") == []
