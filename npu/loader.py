"""Weights from safetensors files, with little more memory than the weights take.

Files are memory-mapped and opened once. Each tensor is written, a piece at a time, into the storage made for it in the
backend's own layout (`weights.allocate`), and the pages that were read are handed back at once: otherwise the mapped
file would count as the process's memory as if the model were there twice.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npuserve.npu.backends.base import Backend
from npuserve.npu.model_config import ModelConfig, ModelError
from npuserve.npu.weights import ModelWeights, Targets, allocate

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Takes (bytes done, bytes in all)."""

PIECE = 8 << 20
"""Bytes of a mapped file that are resident at a time."""

_DTYPES = ("F32", "F16", "BF16", "F64")


def load_weights(
    folder: Path | str, config: ModelConfig, dtype: torch.dtype, backend: Backend, progress: Progress | None = None
) -> ModelWeights:
    """The weights in `folder`, as `dtype`, on the backend's device.

    Raises ModelError that names every tensor that is missing, unknown, misshapen or not of a float type.
    """
    with ExitStack() as stack:
        places = _places(weight_files(Path(folder)), stack)
        weights, targets = allocate(config, dtype, backend)
        if config.tie_word_embeddings:
            places.pop("lm_head.weight", None)
        _check(places, targets, Path(folder))
        if progress is None:
            progress = stack.enter_context(reporting(Path(folder).name))
        total, done = sum(target.nbytes for target in targets.values()), 0
        for name, file in places.items():
            source, target, row = file.get_tensor(name), targets[name], 0
            for piece in source.split(max(1, PIECE // max(1, source[:1].nbytes))):
                target.write(row, piece)
                _drop_pages(piece)
                row += len(piece)
                done += target.nbytes * len(piece) // len(source)
                progress(done, total)
    weights.fill_padding(config.vocab_size)
    return weights


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names. ModelError if they are absent."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        message = f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            message += f"; {pickled[0]} is pickled, which can run code as it is read: convert it to safetensors"
        raise ModelError(message)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index}: must be a JSON object whose weight_map names a file for each tensor") from None
    absent = [str(name) for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise ModelError(f"{index}: names files that are not in the folder: {', '.join(absent)}")
    return [folder / name for name in names]


def _places(files: list[Path], stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it, in the order in which the files hold them."""
    places: dict[str, Any] = {}
    for path in files:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a whole safetensors file: {error}") from None
        for name in file.offset_keys():
            if name in places:
                raise ModelError(f"{path}: tensor {name} is in another file too")
            if not name.endswith("rotary_emb.inv_freq"):  # old checkpoints hold it; it follows from the configuration
                places[name] = file
    return places


def _check(places: dict[str, Any], targets: Targets, folder: Path) -> None:
    problems = {
        "missing": [name for name in targets if name not in places],
        "unknown": [name for name in places if name not in targets],
        "of the wrong shape": [],
        "not of a float type": [],
    }
    for name, file in places.items():
        if name in targets:
            header, wanted = file.get_slice(name), list(targets[name].shape)
            if header.get_shape() != wanted:
                problems["of the wrong shape"].append(f"{name} {header.get_shape()} instead of {wanted}")
            if header.get_dtype() not in _DTYPES:
                problems["not of a float type"].append(f"{name} {header.get_dtype()}")
    found = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if found:
        raise ModelError(f"{folder}: the tensors do not fit config.json; " + "; ".join(found))


def _madvise() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_MADVISE = _madvise()


def _drop_pages(piece: Tensor) -> None:
    """Hand back the mapped pages that lie wholly within `piece`, which is read no more."""
    begin = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (piece.data_ptr() + piece.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _MADVISE and end > begin:
        _MADVISE(begin, end - begin, mmap.MADV_DONTNEED)


@contextmanager
def reporting(name: str) -> Iterator[Progress]:
    """Shows progress on stderr: a bar on a terminal, otherwise a log line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"loading {name}")
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 5.0:
            last = time.monotonic()
            log.info("loading %s: %d of %d MiB", name, done >> 20, total >> 20)

    yield line
