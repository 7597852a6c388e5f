"""Archive of a model folder's tokenizer files, which a gateway on another machine loads.

The archive of the same files is the same, byte for byte: entries are sorted and have a fixed date.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from npuserve.npu.model.families.config_json import ModelError
from npuserve.npu.model.folder import check_links
from npuserve.service.errors import NoTokenizer, ServeError, Unavailable
from npuserve.service.processes.child import is_transient

FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "*.jinja", "*.model",
    "*.tiktoken")
"""Names and patterns of the files. Weights have other names."""
CHUNK_BYTES = 64 << 10
MAX_BYTES = 200 << 20
"""Maximum size of the files together. smg accepts archives up to this size."""
MAX_FILES = 50
"""Maximum number of files, as in smg."""
DATE = (1980, 1, 1, 0, 0, 0)

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of change and inode of each file."""


@dataclass(frozen=True)
class Bundle:
    """An archive and its SHA-256 in hex. stamp: of the files from which it was made."""

    data: bytes
    sha256: str
    stamp: Stamp

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yield the messages of the archive. The last one has the SHA-256."""
        for offset in range(0, len(self.data), CHUNK_BYTES):
            is_last = offset + CHUNK_BYTES >= len(self.data)
            yield common_pb2.GetTokenizerChunk(
                data=self.data[offset : offset + CHUNK_BYTES], sha256=self.sha256 if is_last else "")


class TokenizerBundle:
    """Archive of one folder's tokenizer files, made at the first call and again after a change of the files."""

    def __init__(self) -> None:
        self._kept: Bundle | None = None
        self._making: asyncio.Task[Bundle | ServeError] | None = None

    async def get(self, folder: Path) -> Bundle:
        """Return the archive. Files are read and compressed in a thread, once for all callers, also cancelled ones.

        Raises NoTokenizer if a file cannot be read or is a link to outside the folder, or if the files are too large.
        Raises Unavailable if the system is short of open files or memory.
        """
        making = self._making
        if making is None:
            making = self._making = asyncio.ensure_future(self._make(folder))
        await asyncio.wait((making,))  # a cancel of this call does not cancel the task
        outcome = making.result()
        if isinstance(outcome, ServeError):
            raise copy.copy(outcome)  # the traceback of each refers to the frames of one call
        return outcome

    async def _make(self, folder: Path) -> Bundle | ServeError:
        """Return the archive, or why there is none: all its callers may have left."""
        try:
            self._kept = await asyncio.to_thread(_bundle, folder, self._kept)
        except ServeError as error:
            return error
        finally:
            self._making = None
        return self._kept


def _bundle(folder: Path, kept: Bundle | None) -> Bundle:
    """Return the archive of the folder: `kept` if its files are unchanged."""
    try:
        check_links(folder)
        files = sorted({path.name: path for name in FILES for path in folder.glob(name) if path.is_file()}.items())
        stats = [(name, path.stat()) for name, path in files]
        stamp = tuple((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in stats)
        if kept is not None and kept.stamp == stamp:
            return kept
        if sum(size for _, size, *_ in stamp) > MAX_BYTES or len(stamp) > MAX_FILES:
            raise NoTokenizer(f"the tokenizer's files must be at most {MAX_FILES} with {MAX_BYTES >> 20} MiB in total")
        data = _archive(files)
    except (ModelError, OSError) as error:  # their texts name paths of this machine
        if is_transient(error):
            raise Unavailable("the tokenizer's files cannot be read now") from None
        raise NoTokenizer("the tokenizer's files cannot be read, or are links to outside the model's folder") from None
    return Bundle(data, hashlib.sha256(data).hexdigest(), stamp)


def _archive(files: list[tuple[str, Path]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, path in files:
            entry = zipfile.ZipInfo(name, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()
