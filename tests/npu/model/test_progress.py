from __future__ import annotations

import torch

from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model import progress as progress_module
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from tests.support.models import random_model, saved


def test_progress_without_terminal_is_logged(tmp_path, monkeypatch, caplog):
    clock = iter(range(0, 10000, 2))
    monkeypatch.setattr("npuserve.npu.model.progress.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    folder = saved(random_model("llama"), tmp_path / "a model")
    with caplog.at_level("INFO"):
        load_weights(folder, ModelConfig.from_folder(folder), torch.float32, CpuBackend())
    assert caplog.messages
    assert all(message.startswith("loading a model: ") for message in caplog.messages)


def test_progress_on_terminal_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_module.reporting("loading a model") as progress:
        progress(1 << 20, 2 << 20)
    captured = capsys.readouterr()
    assert "loading a model" in captured.err
    assert captured.out == ""
