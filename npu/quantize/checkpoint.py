"""Checkpoints in safetensors files, a tensor at a time: one is read, another written, and neither is in memory whole.

The format of a file: 8 bytes with the header's length, the header in JSON, the tensors' bytes one after the other
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npuserve.npu.model.config import ModelError
from npuserve.npu.model.folder import weight_files
from npuserve.npu.model.loader import PIECE

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()} | {torch.int8: "I8"}
"""safetensors' names of dtypes."""

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor of a checkpoint is, and the name of the file that holds it."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source:
    """The tensors of a model's folder. A file is open only while it is read, so that its pages are no memory of ours.

    specs: by name. Raises ModelError for files that are absent or no safetensors, and for tensors of other dtypes.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.specs: dict[str, Spec] = {}
        for path in weight_files(folder):
            with self._open(path.name) as file:
                for name in file.offset_keys():
                    header = file.get_slice(name)
                    if (kind := header.get_dtype()) not in FLOATS:
                        raise ModelError(f"{path}: {name} is {kind}; what is quantized here is {', '.join(FLOATS)}")
                    self.specs[name] = Spec(path.name, FLOATS[kind], tuple(header.get_shape()))

    def read(self, name: str) -> Tensor:
        """A copy, in float32. Raises ModelError if there is none or a number in it is not finite."""
        with self._open(self._spec(name).file) as file:
            return _finite(file.get_tensor(name).to(torch.float32, copy=True), name)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Copies of rows ids [n] int64 of a table, in float32."""
        with self._open(self._spec(name).file) as file:
            return _finite(file.get_tensor(name)[ids].to(torch.float32, copy=True), name)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The tensor as it is, by rows: (first row, rows), at most PIECE bytes each or one row."""
        spec = self._spec(name)
        step = max(1, PIECE // max(1, spec.nbytes // max(1, spec.shape[0])))
        for first in range(0, spec.shape[0], step):
            with self._open(spec.file) as file:
                yield first, file.get_slice(name)[first : first + step]

    def _spec(self, name: str) -> Spec:
        if name not in self.specs:
            raise ModelError(f"{self._folder}: has no tensor {name}, which config.json speaks of")
        return self.specs[name]

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self._folder / name
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a whole safetensors file: {error}") from None


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{name}: has numbers that are not finite (NaN or infinity)")
    return tensor


class Writer:
    """Writes the files of a checkpoint, whose tensors may come in any order and in parts.

    Room for all of them is taken at once, so that a disk that is too small is known before the work. Raises OSError.
    """

    def __init__(self, folder: Path, specs: Mapping[str, Spec]):
        self._folder, self._specs = folder, dict(specs)
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
        """The tensor's rows from `first` on; of its dtype and row shape."""
        spec = self._specs[name]
        assert (tensor.dtype, tensor.shape[1:]) == (spec.dtype, spec.shape[1:]), name
        at = self._places[name] + first * math.prod(spec.shape[1:]) * spec.dtype.itemsize
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        self._left[name] -= len(data)
        while data:
            written = os.pwrite(self._files[spec.file], data, at)
            data, at = data[written:], at + written

    def _create(self, file: str) -> None:
        """Wide numbers come first, so that each tensor is aligned to its own."""
        names = sorted((n for n, spec in self._specs.items() if spec.file == file),
                       key=lambda name: -self._specs[name].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec, begin = self._specs[name], end
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
        """For more than one file, as transformers writes it."""
        if len(self._files) > 1:
            total = sum(spec.nbytes for spec in self._specs.values())
            places = {name: spec.file for name, spec in sorted(self._specs.items())}
            write_json(self._folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})

    def _close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place at the end, with what is in it; what `out` held before is gone
    then, and not earlier. Whatever is raised within leaves `out` as it was, and nothing beside it. Raises OSError."""
    made = out.with_name(f".{out.name}.{secrets.token_hex(4)}.unfinished")
    try:
        made.mkdir()
        yield made
        old = made.with_suffix(".old")
        if out.exists():
            out.rename(old)
        try:
            made.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
