"""Names and encryption of the values of a store, from a secret that servers share.

    root of digests   keyed hash of the secret: servers with the same secret have the same digests of equal tokens,
                      position and cache salt, which has the tenant (BlockManager)
    name of a value   npuserve/IDENTITY/ and a keyed hash of the digest, which tells nothing about tokens
    value             AES-256-GCM of the block, with its name as associated data: another value, or a changed one, is
                      refused

The identity is a keyed hash of the model's files, and of what else determines the bytes of a block. Servers with
different identities have different names, and never find each other's blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096
ROOT_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES
"""Bytes of a value beyond those of its block."""
READ_BYTES = 1 << 22


def read_secret(file: str) -> bytes:
    """Return the secret without white space around it. Raises ValueError or OSError for an unusable file."""
    with Path(file).open("rb") as opened:
        secret = opened.read(MAX_SECRET_BYTES + 1).strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(f"must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, as `openssl rand -hex 32` writes")
    return secret


def _derive(secret: bytes, purpose: str, size: int, data: bytes = b"") -> bytes:
    key = blake2b(secret, digest_size=64, person=b"npuserve-store").digest()
    return blake2b(purpose.encode() + b"\0" + data, digest_size=size, key=key).digest()


def root_key(secret: bytes) -> bytes:
    """Return the key of the digests of blocks."""
    return _derive(secret, "digests", ROOT_BYTES)


def identify(secret: bytes, facts: str, folders: Iterable[str]) -> bytes:
    """Return the identity of models by all their files, and of facts. Reads all files. Raises OSError."""
    digest = blake2b(facts.encode(), digest_size=32)
    for folder in folders:
        for file in sorted(path for path in Path(folder).iterdir() if path.is_file()):
            content = blake2b(digest_size=32)
            with file.open("rb", buffering=0) as opened:
                while part := opened.read(READ_BYTES):
                    content.update(part)
            digest.update(blake2b(file.name.encode(), digest_size=32).digest() + content.digest())
        digest.update(b"folder")
    return _derive(secret, "identity", 16, digest.digest())


class StoreKeys:
    """Names and encryption of one model's values."""

    def __init__(self, secret: bytes, identity: bytes) -> None:
        self.prefix = f"npuserve/{identity.hex()}/"
        self._names = _derive(secret, "names", 32, identity)
        self._cipher = AESGCM(_derive(secret, "values", 32, identity))

    def name(self, digest: bytes) -> str:
        """Return the name of a block's value."""
        return self.prefix + blake2b(digest, digest_size=16, key=self._names).hexdigest()

    def seal(self, name: str, block: bytes | bytearray | memoryview) -> bytes:
        """Return the value of a block."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, block, name.encode())

    def open(self, name: str, value: bytes) -> bytes | None:
        """Return the block of a value; None if the value is another one than was saved under this name."""
        try:
            return self._cipher.decrypt(value[:NONCE_BYTES], memoryview(value)[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError):
            return None
