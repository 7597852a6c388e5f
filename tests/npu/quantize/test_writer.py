from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from npuserve.npu.quantize.source import TensorSpec
from npuserve.npu.quantize.writer import Writer, replaced_folder


def test_writer_aligns_each_tensor_to_its_dtype(tmp_path):
    """As the documentation of safetensors recommends, for readers that map the file."""
    tensors = {
        "int8": torch.arange(3, dtype=torch.int8), "half": torch.rand(3).half(), "wide": torch.rand(3),
        "more": torch.arange(5, dtype=torch.int8), "scale": torch.rand(1),
    }
    with Writer(tmp_path, {name: TensorSpec("model.safetensors", t.dtype, (len(t),)) for name, t in tensors.items()}
                ) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    file = (tmp_path / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:begin])
    assert begin % 8 == 0
    for name, tensor in tensors.items():
        assert (begin + header[name]["data_offsets"][0]) % tensor.itemsize == 0
        assert torch.equal(load_file(tmp_path / "model.safetensors")[name], tensor)


def test_replaced_folder_failed_exchange_restores_the_old_folder(tmp_path, monkeypatch):
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "old").write_text("what was there")

    def refused(path: Path, target: Path) -> Path:
        if path.suffix == ".unfinished":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="Permission denied"), replaced_folder(out) as made:
        (made / "new").write_text("new")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/old"]
