"""Loader of weights from safetensors files, with little more memory than the weights take.

Files are memory-mapped and opened once. Each tensor is written piece by piece into storage in the backend's layout
(`allocation.allocate`). The pages that were read are released at once: otherwise the mapped file would count as the
process's memory, as if the model were loaded twice.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npuserve.kernels.native import LANES
from npuserve.kernels.native.packed import packs_compact
from npuserve.kernels.weight import WeightForm
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.allocation import allocate, allocate_meta
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.folder import listed, weight_files
from npuserve.npu.model.forms.floats import converted
from npuserve.npu.model.forms.matrix import FormChange, StoredMatrix
from npuserve.npu.model.forms.targets import FLOAT8S, FLOATS, INT32, INT64, Targets
from npuserve.npu.model.layers.shard import Span
from npuserve.npu.model.progress import Progress, reporting
from npuserve.npu.model.storage import check_schemes, matrices
from npuserve.npu.model.weights import ModelWeights

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 8 << 20
"""Maximum resident bytes of a mapped file."""

PIECE_ROWS = 128
"""Rows that the pieces of a tensor are multiples of, but for the last: whole panels of a weight, and whole groups."""

SAMPLES = 3
"""Panels of rows of a tensor that `refused_bytes` reads."""


def load_weights(
    folder: Path | str, config: ModelConfig, dtype: torch.dtype, backend: Backend, progress: Progress | None = None,
    *, loaded: bool = False, embedding: WeightForm | None = None,
) -> ModelWeights:
    """Load the weights in `folder` as `dtype` to the backend's device.

    loaded: the backend's storage contains the weights already (`DeviceMemory.sharing`).
    embedding: of the served model, for an EAGLE-3 head, which may have none.

    Raises ModelError for tensors that are missing, unknown, or of the wrong shape or type, and for invalid numbers.
    Raises BackendError for a quantization that the kernels do not support.
    """
    check_schemes(config, backend)
    allocation = allocate(config, dtype, backend, embedding)
    if loaded:
        return allocation.weights
    with ExitStack() as stack:
        files = _open_files(weight_files(Path(folder)), stack)
        targets = allocation.targets
        _remove_ignored(files, config)
        _check(files, targets, Path(folder), config.prefix)
        if progress is None:
            progress = stack.enter_context(reporting(f"loading {Path(folder).name}"))
        total = sum(targets[name].nbytes for name in files)
        done = 0
        for name, file in sorted(files.items(), key=lambda item: not targets[item[0]].early):
            target = targets[name]
            row = 0
            source = file.get_tensor(name).reshape(target.shapes[0])
            if target.rows:
                source = source.narrow(0, target.rows.first, target.rows.size)
            rows = MAX_PIECE_BYTES // max(1, source[:1].nbytes) // PIECE_ROWS * PIECE_ROWS
            for read in source.split(max(PIECE_ROWS, rows)):
                piece = read.narrow(1, target.columns.first, target.columns.size) if target.columns else read
                try:
                    if target.dtypes is FLOATS:
                        _check_finite(piece, dtype)
                    target.put(row, piece)
                except ValueError as error:
                    raise ModelError(f"{folder}: {name}: {error}") from None
                _drop_pages(read)
                row += len(piece)
                done += target.nbytes * len(piece) // max(1, len(source))
                progress(done, total)
    _report_changes(config, dtype, backend)
    if merged := allocation.finish(config.vocabulary(backend.capabilities.vocabulary_tile).size, backend):
        log.info("static input scales differ between the parts of %d fused layers: each layer takes the range of all "
                 "its parts", merged)
    return allocation.weights


def _report_changes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> None:
    """Log how many layers take more memory than in the checkpoint. Ranks other than 0 log nothing."""
    if config.shard.rank:
        return
    changes: dict[FormChange, Counter[str]] = {}  # numbers of each layer, which may be parts of two matrices
    layers: set[str] = set()
    for matrix in matrices(config, backend.capabilities.vocabulary_tile):
        for name, rows in matrix.parts.items():
            layers.add(name)
            if change := matrix.form.change(name, matrix, dtype, backend):
                changes.setdefault(change, Counter())[name] += rows.size * matrix.inputs
    layers.discard(f"{config.prefix}embed_tokens")
    for change, numbers in changes.items():
        log.warning("%d of %d linear layers %s and take %s MiB instead of %s%s", len(numbers), len(layers), change.text,
                    *(f"{numbers.total() * bits / 2**23:,.1f}" for bits in (change.stored_bits, change.bits)),
                    change.advice and f"; {change.advice}")


def check_weights(folder: Path | str, config: ModelConfig) -> list[str]:
    """Return the names of the tensors that `load_weights` reads, after its checks of the files' headers.

    Raises ModelError for files that cannot be read, and for tensors that are missing, unknown, or of the wrong shape or
    type.
    """
    with ExitStack() as stack:
        files = _open_files(weight_files(Path(folder)), stack)
        _remove_ignored(files, config)
        _check(files, allocate_meta(config, torch.float32).targets, Path(folder), config.prefix)
        return list(files)


def report_ignored_head(folder: Path | str, config: ModelConfig) -> None:
    """Log a warning if the model is tied and its files have an LM head that differs from the embedding.

    Ranks other than 0 read nothing. Raises ModelError for files that cannot be read.
    """
    if config.tie_word_embeddings and config.shard.rank == 0 and config.pooling is None:
        embedding = f"{config.prefix}embed_tokens.weight"
        with ExitStack() as stack:
            if _differ(_open_files(weight_files(Path(folder)), stack), "lm_head.weight", embedding):
                log.warning("lm_head.weight is ignored, and differs from %s: if the model has an LM head of its own, "
                            "set tie_word_embeddings to false in config.json", embedding)


def read_head_rows(folder: Path | str, config: ModelConfig, ids: Sequence[int]) -> Tensor:
    """Return the rows [n, H] float32 of the checkpoint's LM head for these tokens, or of its classifier.

    Raises ModelError for files that cannot be read, and for a matrix that is missing, quantized or too small.
    """
    num_rows = 1 if config.pooling and config.pooling.is_classifier else config.vocab_size
    name = f"{config.head}.weight"
    with ExitStack() as stack:
        files = _open_files(weight_files(Path(folder)), stack)
        if name not in files:
            raise ModelError(f"{folder}: 1 missing: {name}")
        head = files[name].get_slice(name)
        if head.get_dtype() not in FLOATS or head.get_shape() != [num_rows, config.hidden_size]:
            raise ModelError(f"{folder}: {name}: must be floats of the shape [{num_rows}, "
                             f"{config.hidden_size}], got {head.get_dtype()} {head.get_shape()}")
        if wrong := [i for i in ids if i >= num_rows]:
            raise ModelError(f"{folder}: token id {wrong[0]} of its score must be in [0, {num_rows - 1}]")
        return torch.cat([head[i : i + 1] for i in ids]).float()


def refused_bytes(folder: Path | str, config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Estimate `ModelWeights.unplanned_bytes` from SAMPLES panels of rows of each tensor.

    A weight whose sampled rows fit the compact form may still have others that do not.

    Raises ModelError for files that cannot be read.
    """
    plain = [(-(-m.rows // LANES) * LANES * m.inputs * dtype.itemsize, m)
             for m in matrices(config, backend.capabilities.vocabulary_tile) if m.form.is_float]
    compact = [(nbytes, m) for nbytes, m in plain if backend.weights.nbytes(m.rows, m.inputs, dtype) < nbytes]
    if not compact:
        return 0
    with ExitStack() as stack:
        files = _open_files(weight_files(Path(folder)), stack)
        return sum(nbytes for nbytes, m in compact if not all(packs_compact(rows) for rows in _samples(m, files)))


def _samples(matrix: StoredMatrix, files: dict[str, Any]) -> Iterator[Tensor]:
    """Return rows of the matrix at even distances, from each part whose tensor has the expected shape."""
    columns = matrix.columns
    for name, rows in matrix.parts.items():
        if not isinstance(rows, Span):
            continue
        tensor = matrix.tensor_name(name)
        part = files[tensor].get_slice(tensor) if tensor in files else None
        if part is None or part.get_shape() != [rows.whole, columns.whole]:
            continue  # the loader reports it
        scheme = matrix.form.converted.get(name)
        scale = f"{name}.{scheme.scale_name}" if scheme else ""
        if scheme and scale not in files:
            continue
        last = max(rows.size - LANES, 0)
        for first in sorted({rows.first + last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            taken = min(LANES, rows.first + rows.size - first)
            if taken > 0:
                sample = part[first : first + taken, columns.first : columns.first + columns.size]
                if scheme:
                    sample = converted(sample, scheme, files[scale].get_tensor(scale), first, columns.first).bfloat16()
                yield sample


def _open_files(paths: list[Path], stack: ExitStack) -> dict[str, Any]:
    """Return tensor name -> open file, in the order of the tensors in the files."""
    files: dict[str, Any] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a complete safetensors file: {error}") from None
        for name in file.offset_keys():
            if name in files:
                raise ModelError(f"{path}: tensor {name} is in another file too")
            files[name] = file
    return files


def _differ(files: dict[str, Any], *names: str) -> bool:
    """Return whether the files have two tensors, with different numbers."""
    if not all(name in files for name in names):
        return False
    first, second = (files[name].get_tensor(name) for name in names)
    if first.shape != second.shape:
        return True
    step = MAX_PIECE_BYTES // first.itemsize
    for pieces in zip(first.flatten().split(step), second.flatten().split(step), strict=True):
        is_same = torch.equal(*(piece.float() for piece in pieces))
        for piece in pieces:
            _drop_pages(piece)
        if not is_same:
            return True
    return False


_CACHE_SCALES = re.compile(r".*\.self_attn\.([qkv]_(scale|zero_point)|[kv]_proj\.output_(scale|zero_point)|"
                           r"[kv]_proj\.kv_cache_(scale|offset))")


_EXPERT = re.compile(r".*\.experts\.(\d+)\.")


def _remove_ignored(files: dict[str, Any], config: ModelConfig) -> None:
    """Remove tensors that are ignored without effect on the model."""
    scales = [name for name in files if config.quantization and _CACHE_SCALES.fullmatch(name)]
    if scales:
        log.warning("%d scales of a quantized KV cache, as %s, are ignored: kv_cache_dtype defines the cache",
                    len(scales), scales[0])
    for beginning in config.ignored:
        ignored = [name for name in files if name.startswith(beginning)]
        if ignored:
            log.info("%d tensors %s… are not loaded: the model is served for text, without drafts", len(ignored),
                     beginning)
        for name in ignored:
            del files[name]
    if (held := config.held_experts) is not None:
        for name in list(files):
            expert = _EXPERT.match(name)
            if expert and not held.first <= int(expert[1]) < held.first + held.size:
                del files[name]
    for name in list(files):
        # Old checkpoints contain frequencies, which the configuration determines; ModelSlim's have sums of weights of 4
        # bits (forms/modelslim.py). An EAGLE-3 head's t2d follows from its d2t.
        if (name.endswith("rotary_emb.inv_freq") or name in scales
                or (config.quantization and name.endswith(".scale_bias"))
                or (config.tie_word_embeddings and name.startswith("lm_head."))
                or (config.eagle is not None and name == "t2d")
                or (config.pooling is not None and config.pooling.is_classifier and name == f"{config.head}.weight")):
            del files[name]


def _check(files: dict[str, Any], targets: Targets, folder: Path, prefix: str) -> None:
    problems: dict[str, list[str]] = {
        "missing": [name for name, target in targets.items() if target.required and name not in files],
        "unknown": [name for name in files if name not in targets],
        "of the wrong shape": [],
        "not of a float type": [],
        "not int8": [],
        "not int32": [],
        "not int64": [],
        "not float8 (e4m3)": [],
    }
    for name, file in files.items():
        if name in targets:
            header = file.get_slice(name)
            target = targets[name]
            if tuple(header.get_shape()) not in target.shapes:
                wanted = " or ".join(str(list(shape)) for shape in target.shapes)
                problems["of the wrong shape"].append(f"{name} {header.get_shape()} instead of {wanted}")
            if header.get_dtype() not in target.dtypes:
                kind = ("not of a float type" if target.dtypes is FLOATS else
                        "not float8 (e4m3)" if target.dtypes is FLOAT8S else
                        "not int32" if target.dtypes is INT32 else
                        "not int64" if target.dtypes is INT64 else "not int8")
                problems[kind].append(f"{name} {header.get_dtype()}")
    differences = [f"{len(names)} {kind}: {listed(names)}" for kind, names in problems.items() if names]
    if (configured := _layers(targets, prefix)) != (found_layers := _layers(files, prefix)):
        differences.append(f"config.json has {configured} layers, the files have {found_layers}")
    if differences:
        raise ModelError(f"{folder}: the tensors do not fit config.json; " + "; ".join(differences))


def _layers(names: Iterable[str], prefix: str) -> int:
    """Return the number of decoder layers that the tensor names belong to. prefix: that of the decoder's tensors."""
    pattern = re.compile(rf"{re.escape(prefix)}layers\.(\d+)\.")
    return len({match[1] for name in names if (match := pattern.match(name))})


def _check_finite(numbers: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for NaN and infinity, and for numbers that are infinite in `dtype`."""
    if numbers.numel():
        low, high = (float(edge) for edge in numbers.aminmax())  # NaN if any number is NaN
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
    """Release the mapped pages that lie entirely within `piece`, which must not be read afterwards."""
    begin = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (piece.data_ptr() + piece.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _MADVISE and end > begin:
        _MADVISE(begin, end - begin, mmap.MADV_DONTNEED)
