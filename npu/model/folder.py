"""Files of a model's folder. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from npuserve.npu.model.families.config_json import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of a Git LFS pointer (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""

MODELSLIM_WEIGHTS = "quant_model_weight*.safetensors"
"""Pattern of the name of a checkpoint of ModelSlim."""

EXAMPLE = "Qwen/Qwen3-0.6B"
"""Name on the hub of a model that is served, for error messages."""

OTHER_FORMATS = (
    ("adapter_config.json", "holds a LoRA adapter, which is not served; merge it into its model (merge_and_unload and "
     "save_pretrained of peft) and serve that folder"),
    ("*.gguf", "holds a GGUF file, which is not read; serve the model that it was made from, in safetensors, or 4 bits "
     "of that: npuserve quantize MODEL OUT --scheme w4a16"),
    ("*.onnx", "holds an ONNX file, which is not read; serve the model that it was made from, in safetensors"),
    ("params.json", "holds a model in Mistral's or Meta's own format; serve its version for transformers, with "
     "config.json and *.safetensors"),
)
"""Pattern of a file that only another format has, and what a folder with it holds."""

_HEADER_SIZE_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""A safetensors file begins with the size of its header, at most this one, and the header, a JSON object of tensors."""

MAX_LISTED = 3
"""Maximum number of names listed in an error message."""


def check_downloaded(files: Iterable[Path]) -> None:
    """Raise ModelError for the first file that is a Git LFS pointer, the placeholder of a file not downloaded."""
    for path in files:
        try:
            with path.open("rb") as file:
                pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        except OSError:
            continue  # the reader of the file reports the error
        if pointer:
            raise ModelError(
                f"{path}: is a Git LFS pointer, not the file itself; download it with: git -C {path.parent} lfs pull")


def content_of(folder: Path) -> str:
    """Return what a folder without config.json or weights holds, and what to serve, as the end of a sentence."""
    description = next((text for pattern, text in OTHER_FORMATS if any(folder.glob(pattern))), "")
    if not description and "gguf" in str(folder).lower():
        return f"is named for GGUF, which is not read; serve the model that it was made from, such as {EXAMPLE}"
    return description


def _check_readable(files: Iterable[Path]) -> None:
    """Raise ModelError for the first file that cannot be opened. safetensors reports each such file as absent."""
    for path in files:
        try:
            path.open("rb").close()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def check_links(folder: Path) -> None:
    """Raise ModelError for the first file of a model's folder that is a symbolic link to outside the folder.

    A file of a snapshot in the Hugging Face cache may be a link into the blobs of its repository:
    models--ORG--NAME/snapshots/REVISION/FILE -> models--ORG--NAME/blobs/HASH. The folder itself may be a link.
    """
    root = Path(os.path.realpath(folder))
    allowed = [root]
    repository = root.parent.parent
    if root.parent.name == "snapshots" and repository.name.startswith("models--"):
        allowed.append(repository / "blobs")
    for path in sorted(path for pattern in ("*", "additional_chat_templates/*", "*/config.json")
                       for path in folder.glob(pattern)):
        target = Path(os.path.realpath(path))  # unlike resolve(), it accepts circular links
        if not any(target.is_relative_to(root) for root in allowed):
            raise ModelError(f"{path}: is a symbolic link to {target}; a model's file must lie in its folder "
                             f"({' or '.join(map(str, allowed))}): put a copy or a hard link there")


def has_tensor(folder: Path, name: str) -> bool:
    """Return whether the weights of a folder have a tensor. False if they cannot be read: their loader reports it."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    try:
        if not single.is_file():
            return name in json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        with single.open("rb") as file:
            size = int.from_bytes(file.read(_HEADER_SIZE_BYTES), "little")
            return size <= _MAX_HEADER_BYTES and name in json.loads(file.read(size))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, or the shards that model.safetensors.index.json names; ModelSlim has another name.

    Raises ModelError if they are absent or cannot be read, or if `check_links` refuses a file of the folder.
    """
    check_links(folder)
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if not single.is_file() and not index.is_file():
        single = next(iter(sorted(folder.glob(MODELSLIM_WEIGHTS))), single)
        index = next(iter(sorted(folder.glob(f"{MODELSLIM_WEIGHTS}.index.json"))), index)
        if index.is_file():
            single = folder / "model.safetensors"
    if single.is_file():
        _check_readable([single])
        check_downloaded([single])
        return [single]
    if not index.is_file():
        if other := content_of(folder):
            raise ModelError(f"{folder}: {other}")
        message = f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            message += f"; {pickled[0]} is pickled, which can run code as it is read: convert it to safetensors"
        raise ModelError(message)
    _check_readable([index])
    check_downloaded([index])
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{index}: must be a JSON object whose weight_map names a file for each tensor") from None
    absent = [str(name) for name in names
              if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise ModelError(f"{index}: names files that are not in the folder: {listed(absent)}")
    files = [folder / name for name in names]
    _check_readable(files)
    check_downloaded(files)
    return files


def listed(names: Sequence[str]) -> str:
    """Return the first names, joined, and the number of further names."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
