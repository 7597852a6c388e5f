"""Weights from safetensors files, with little more memory than the weights take.

Files are memory-mapped and opened once. Each tensor is written, a piece at a time, into the storage made for it in the
backend's own layout (`weights.allocate`), and the pages that were read are handed back at once: otherwise the mapped
file would count as the process's memory as if the model were there twice.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import mmap
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npuserve.kernels.native import LANES
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import ModelConfig, ModelError, check_downloaded, check_links
from npuserve.npu.model.weights import FLOATS, ModelWeights, Targets, allocate

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Takes (bytes done, bytes in all)."""

PIECE = 8 << 20
"""Bytes of a mapped file that are resident at a time."""

MOST_LISTED = 3
"""Names in a list of an error message."""

FIRST_REPORT_SECONDS, REPORT_SECONDS = 1.0, 5.0
"""Time to the first log line of progress, and between two."""


def load_weights(
    folder: Path | str, config: ModelConfig, dtype: torch.dtype, backend: Backend, progress: Progress | None = None,
    *, there: bool = False,
) -> ModelWeights:
    """The weights in `folder`, as `dtype`, on the backend's device. there: the storage that the backend gives out holds
    them already.

    Raises ModelError for tensors that are missing, unknown, of the wrong shape or type, or whose numbers cannot be.
    """
    made = allocate(config, dtype, backend)
    if there:
        return made.weights
    with ExitStack() as stack:
        places, targets = _places(weight_files(Path(folder)), stack), made.targets
        _pass_over(places, config)
        _check(places, targets, Path(folder))
        if progress is None:
            progress = stack.enter_context(reporting(f"loading {Path(folder).name}"))
        total, done = sum(targets[name].nbytes for name in places), 0
        for name, file in places.items():
            target, row = targets[name], 0
            source = file.get_tensor(name).reshape(target.shapes[0])
            for piece in source.split(max(LANES, PIECE // max(1, source[:1].nbytes) // LANES * LANES)):
                try:
                    if target.dtypes is FLOATS:
                        _check_finite(piece, dtype)
                    target.put(row, piece)
                except ValueError as error:
                    raise ModelError(f"{folder}: {name}: {error}") from None
                _drop_pages(piece)
                row += len(piece)
                done += target.nbytes * len(piece) // len(source)
                progress(done, total)
    if merged := sum([inputs.merge() for inputs in made.static]):
        log.info("static scales of inputs differ between the parts of %d fused layers: each takes the range of all its "
                 "parts", merged)
    made.weights.finish(config.vocab_size, backend)
    return made.weights


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, or the shards that model.safetensors.index.json names.

    Raises ModelError if they are absent, or if `check_links` refuses a file of the folder.
    """
    check_links(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        check_downloaded([single])
        return [single]
    if not index.is_file():
        message = f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            message += f"; {pickled[0]} is pickled, which can run code as it is read: convert it to safetensors"
        raise ModelError(message)
    check_downloaded([index])
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index}: must be a JSON object whose weight_map names a file for each tensor") from None
    absent = [str(name) for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise ModelError(f"{index}: names files that are not in the folder: {_listed(absent)}")
    files = [folder / name for name in names]
    check_downloaded(files)
    return files


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
            places[name] = file
    return places


_CACHE_SCALES = re.compile(r".*\.self_attn\.([qkv]_(scale|zero_point)|[kv]_proj\.output_(scale|zero_point))")


def _pass_over(places: dict[str, Any], config: ModelConfig) -> None:
    """Forget the tensors that do no harm."""
    scales = [name for name in places if config.quantization and _CACHE_SCALES.fullmatch(name)]
    if scales:
        log.warning("%d scales of a quantized KV cache, as %s, are passed over: kv_cache_dtype says what the cache is",
                    len(scales), scales[0])
    for name in list(places):
        # Old checkpoints hold frequencies, which follow from the configuration.
        if (name.endswith("rotary_emb.inv_freq") or name in scales
                or (config.tie_word_embeddings and name.startswith("lm_head."))):
            del places[name]


def _check(places: dict[str, Any], targets: Targets, folder: Path) -> None:
    problems: dict[str, list[str]] = {
        "missing": [name for name, target in targets.items() if target.required and name not in places],
        "unknown": [name for name in places if name not in targets],
        "of the wrong shape": [],
        "not of a float type": [],
        "not int8": [],
    }
    for name, file in places.items():
        if name in targets:
            header, target = file.get_slice(name), targets[name]
            if tuple(header.get_shape()) not in target.shapes:
                wanted = " or ".join(str(list(shape)) for shape in target.shapes)
                problems["of the wrong shape"].append(f"{name} {header.get_shape()} instead of {wanted}")
            if header.get_dtype() not in target.dtypes:
                kind = "not of a float type" if target.dtypes is FLOATS else "not int8"
                problems[kind].append(f"{name} {header.get_dtype()}")
    found = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if (configured := _layers(targets)) != (there := _layers(places)):
        found.append(f"config.json has {configured} layers, the files have {there}")
    if found:
        raise ModelError(f"{folder}: the tensors do not fit config.json; " + "; ".join(found))


def _layers(names: Iterable[str]) -> int:
    """Return how many decoder layers have tensors of these names."""
    return len({found[1] for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name))})


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _check_finite(numbers: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for NaN and infinity, and for numbers that are infinite in `dtype`."""
    if numbers.numel():
        low, high = (float(edge) for edge in numbers.aminmax())  # NaN if one of the numbers is
        if not math.isfinite(low) or not math.isfinite(high):
            raise ValueError("has numbers that are not finite (NaN or infinity)")
        if max(-low, high) > torch.finfo(dtype).max:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"has numbers that are too large for {name} ({max(-low, high):.3g}); take another dtype")


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
def reporting(what: str) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, otherwise a log line after a second and then every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    due = time.monotonic() + FIRST_REPORT_SECONDS

    def line(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_SECONDS
            log.info("%s: %d of %d MiB", what, done >> 20, total >> 20)

    yield line
