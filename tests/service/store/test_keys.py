"""Names and encryption of the values of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.service.scheduling.block_manager import BlockManager, BlockTable
from npuserve.service.store import keys

SECRET, OTHER = b"a" * 32, b"b" * 32


def test_digests_are_equal_for_equal_secrets_salts_and_tokens() -> None:
    def digests(secret: bytes, salt: str, tokens: list[int]) -> list[bytes]:
        blocks = BlockManager(4, 2, key=keys.root_key(secret))
        return blocks.digests(BlockTable(salt), tokens, 2)

    expected = digests(SECRET, "1:a:", [1, 2, 3, 4])
    assert digests(SECRET, "1:a:", [1, 2, 3, 4]) == expected
    for secret, salt, tokens in ((OTHER, "1:a:", [1, 2, 3, 4]), (SECRET, "1:b:", [1, 2, 3, 4]),
                                 (SECRET, "1:a:x", [1, 2, 3, 4]), (SECRET, "1:a:", [0, 2, 3, 4])):
        assert not {*digests(secret, salt, tokens)} & {*expected}


@pytest.mark.parametrize(("text", "is_usable"), [
    (b"x" * 31, False), (b" " * 40, False), (b"x" * 32 + b"\n", True), (b"x" * 4096, True), (b"x" * 4098, False)])
def test_read_secret_has_bounds(tmp_path: Path, text: bytes, is_usable: bool) -> None:
    file = tmp_path / "secret"
    file.write_bytes(text)
    if is_usable:
        assert keys.read_secret(str(file)) == text.strip()
        return
    with pytest.raises(ValueError, match="32 to 4096 bytes"):
        keys.read_secret(str(file))


def test_identity_depends_on_all_bytes(tmp_path: Path) -> None:
    def identity(secret: bytes = SECRET, facts: str = "facts", *folders: Path) -> bytes:
        return keys.identify(secret, facts, map(str, folders or [tmp_path]))

    (tmp_path / "a").write_bytes(bytes(keys.READ_BYTES + 10))
    (tmp_path / "b").write_bytes(b"1")
    expected = identity()
    assert identity() == expected
    others = {identity(OTHER), identity(SECRET, "others"), identity(SECRET, "facts", tmp_path, tmp_path)}
    content = bytearray((tmp_path / "a").read_bytes())
    content[-1] = 1
    (tmp_path / "a").write_bytes(content)
    others.add(identity())
    content[-1] = 0
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").rename(tmp_path / "c")
    others.add(identity())
    assert len(others - {expected}) == 5


def test_value_opens_under_its_own_name_and_keys_alone() -> None:
    mine = keys.StoreKeys(SECRET, b"identity")
    name = mine.name(b"digest")
    value = mine.seal(name, b"block")
    assert mine.seal(name, b"block") != value
    assert mine.open(name, value) == b"block"
    assert mine.open(mine.name(b"other"), value) is None
    assert keys.StoreKeys(OTHER, b"identity").open(name, value) is None
    assert keys.StoreKeys(SECRET, b"another").open(name, value) is None
    for place in range(len(value)):
        assert mine.open(name, value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]) is None
        assert mine.open(name, value[:place]) is None
