"""Archive of the tokenizer's files."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import threading
import zipfile
from pathlib import Path

import pytest

from npuserve.service.errors import NoTokenizer, Unavailable
from npuserve.service.gateway import tokenizer_bundle
from npuserve.service.gateway.tokenizer_bundle import CHUNK_BYTES, Bundle, TokenizerBundle
from tests.support.fake_engine import make_folder, until


def entries(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


async def test_bundle_holds_the_tokenizers_files_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", temperature=0.5)
    for name in ("chat_template.jinja", "merges.txt", "model.safetensors", "README.md", "notes.json"):
        (folder / name).write_text(name)
    (folder / "x.jinja").mkdir()
    bundle = await TokenizerBundle().get(folder)
    expected = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json",
                "tokenizer_config.json"]
    found = entries(bundle.data)
    assert list(found) == expected
    assert found == {name: (folder / name).read_bytes() for name in expected}
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()


async def test_bundle_of_the_same_files_is_the_same(tmp_path: Path) -> None:
    one, two = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    for file in two.iterdir():
        os.utime(file, (1, 1))
        file.chmod(0o600)
    assert (await TokenizerBundle().get(one)).sha256 == (await TokenizerBundle().get(two)).sha256


async def test_bundle_is_made_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, bundles, made = make_folder(tmp_path / "m"), TokenizerBundle(), []
    archive = tokenizer_bundle._archive
    monkeypatch.setattr(tokenizer_bundle, "_archive", lambda files: made.append(1) or archive(files))
    first, *others = await asyncio.gather(*(bundles.get(folder) for _ in range(8)))
    assert all(other is first for other in others)
    (folder / "chat_template.jinja").write_text("new")
    second = await bundles.get(folder)
    assert entries(second.data)["chat_template.jinja"] == b"new"
    assert second.sha256 != first.sha256
    assert await bundles.get(folder) is second
    assert len(made) == 2


async def test_bundle_whose_caller_is_cancelled_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, bundles = make_folder(tmp_path / "m"), TokenizerBundle()
    archive, made, may_end = tokenizer_bundle._archive, [], threading.Event()

    def slow_archive(files: list[tuple[str, Path]]) -> bytes:
        made.append(1)
        assert may_end.wait(60)
        return archive(files)

    monkeypatch.setattr(tokenizer_bundle, "_archive", slow_archive)
    for _ in range(2):
        cancelled = asyncio.ensure_future(bundles.get(folder))
        await asyncio.sleep(0)
        await until(lambda: made)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    waiting = asyncio.ensure_future(bundles.get(folder))
    await asyncio.sleep(0)
    may_end.set()
    assert entries((await waiting).data)
    assert len(made) == 1


async def test_bundle_with_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "secret model")
    (tmp_path / "secret").write_text("secret")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(NoTokenizer, match="links to outside the model's folder") as refused:
        await TokenizerBundle().get(folder)
    assert "secret" not in refused.value.message


async def test_bundle_of_the_hubs_cache_follows_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    made = make_folder(tmp_path / "made")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in made.iterdir():
        file.rename(repository / "blobs" / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    found = entries((await TokenizerBundle().get(snapshot)).data)
    assert found["tokenizer.json"] == (repository / "blobs" / "hash-tokenizer.json").read_bytes()


async def test_bundle_without_a_further_open_file_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def archive(files: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    bundles, folder = TokenizerBundle(), make_folder(tmp_path / "m")
    with monkeypatch.context() as limited:
        limited.setattr(tokenizer_bundle, "_archive", archive)
        with pytest.raises(Unavailable, match="cannot be read now"):
            await bundles.get(folder)
    assert entries((await bundles.get(folder)).data)


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_FILES"])
async def test_bundle_of_too_large_or_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    folder, bundles = make_folder(tmp_path / "m"), TokenizerBundle()
    files = entries((await bundles.get(folder)).data)
    monkeypatch.setattr(tokenizer_bundle, limit, sum(map(len, files.values())) if limit == "MAX_BYTES" else len(files))
    assert await TokenizerBundle().get(folder)
    (folder / "x.jinja").write_text("x")
    with pytest.raises(NoTokenizer, match="must be at most"):
        await bundles.get(folder)


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunks_join_to_the_archive_and_the_last_has_the_hash(size: int) -> None:
    data = bytes(size)
    chunks = list(Bundle(data, "f" * 64, ()).chunks())
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + ["f" * 64]
    assert len(chunks) == -(-size // CHUNK_BYTES)
