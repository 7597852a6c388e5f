"""Writer of checkpoints in safetensors files, one tensor or part of it at a time.

The format of a file: 8 bytes with the header's length, the header in JSON, the concatenated bytes of the tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from npuserve.npu.quantize.source import FLOATS, TensorSpec

NAMES = {dtype: name for name, dtype in FLOATS.items()} | {
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"}
"""safetensors' names of the dtypes that are written."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Writer:
    """Writer of the files of a checkpoint. Tensors may be written in any order and in parts.

    The files are allocated at once, so that a full disk is found before the work. Raises OSError.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec]):
        self._folder = folder
        self._specs = dict(specs)
        self._places: dict[str, int] = {}
        self._left = {name: spec.nbytes for name, spec in specs.items()}
        self._files: dict[str, int] = {}

    def __enter__(self) -> Writer:
        try:
            for file in sorted({spec.file for spec in self._specs.values()}):
                self._create(file)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                missing = [name for name, left in self._left.items() if left]
                assert not missing, f"not written whole: {missing}"
                for descriptor in self._files.values():
                    os.fsync(descriptor)
                self._write_index()
        finally:
            self._close()

    def write(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Write rows of a tensor from row `first` on, in its dtype and row shape."""
        spec = self._specs[name]
        assert (tensor.dtype, tensor.shape[1:]) == (spec.dtype, spec.shape[1:]), name
        offset = self._places[name] + first * math.prod(spec.shape[1:]) * spec.dtype.itemsize
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        self._left[name] -= len(data)
        while data:
            written = os.pwrite(self._files[spec.file], data, offset)
            data = data[written:]
            offset = offset + written

    def _create(self, file: str) -> None:
        """Allocate a file and write its header. Wide dtypes come first, so that each tensor is aligned."""
        names = sorted((n for n, spec in self._specs.items() if spec.file == file),
                       key=lambda name: -self._specs[name].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec = self._specs[name]
            begin = end
            end += spec.nbytes
            header[name] = {"dtype": NAMES[spec.dtype], "shape": spec.shape, "data_offsets": (begin, end)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        self._places.update({name: begin + header[name]["data_offsets"][0] for name in names})
        descriptor = os.open(self._folder / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._files[file] = descriptor
        os.posix_fallocate(descriptor, 0, begin + end)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)

    def _write_index(self) -> None:
        """Write the index, which every folder has but one whose only file is model.safetensors."""
        if self._files.keys() != {SINGLE}:
            total = sum(spec.nbytes for spec in self._specs.values())
            places = {name: spec.file for name, spec in sorted(self._specs.items())}
            write_json(self._folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})

    def _close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder that atomically replaces `out` on exit.

    If an exception is raised within the context, `out` is unchanged and the new folder is deleted. Raises OSError.
    """
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.mkdir()
        yield unfinished
        old = unfinished.with_suffix(".old")
        if out.exists():
            out.rename(old)
        try:
            unfinished.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
