"""Set-up of a store: what is refused at the start, and the identity of blocks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.npu.step import HostSlots
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.store import setup
from npuserve.service.store.client import StoreClient
from npuserve.service.store.setup import facts_of, max_saves, open_store


def runner_of(**fields: object) -> Any:
    """Return what a store reads of a runner."""
    settings = {"num_slots": 0, "predicts": False, "backend_name": "a", "dtype_name": "bfloat16",
                "cache_dtype": "bfloat16", "block_size": 16, "config": SimpleNamespace(quantization_name="none")}
    return SimpleNamespace(**{**settings, **fields})


MEMORY: Any = SimpleNamespace(layout="layout", describe=lambda: HostSlots(100, 1 << 20))


def config_of(secret: Path) -> ServerConfig:
    return ServerConfig(kv_offload_memory=1 << 30, kv_store="127.0.0.1:9", kv_store_secret=str(secret))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    return file


def test_no_store_without_the_setting() -> None:
    assert open_store(ServerConfig(kv_offload_memory=1 << 30), [], runner_of(), MEMORY, is_first=True) is None


def test_drafts_of_a_head_are_refused_by_name(secret: Path) -> None:
    with pytest.raises(ConfigError, match="kv_store: is not possible with drafts of a head or a smaller model"):
        open_store(config_of(secret), [], runner_of(predicts=True), MEMORY, is_first=False)


def test_parts_of_a_state_have_space_among_the_calls_beside_the_limit(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of a state begins while fewer slots than the limit are held, so all of its parts may exceed it."""
    monkeypatch.setattr(StoreClient, "_run", lambda self: None)
    memory: Any = SimpleNamespace(layout="layout", describe=lambda: HostSlots(100, 1 << 20, state_parts=13))
    opened = open_store(config_of(secret), [], runner_of(num_slots=4), memory, is_first=False)
    assert opened
    assert opened.max_saves == 25
    opened.client.is_available = True
    assert all(opened.client.save(call, b"", 0) for call in range(24 + 13))
    opened.client.close()


def test_unusable_secret_is_refused_at_the_first_start_alone(tmp_path: Path, secret: Path) -> None:
    for file, error in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"kv_store_secret: {file}: {error}"):
            open_store(config_of(file), [], runner_of(), MEMORY, is_first=True)
        assert open_store(config_of(file), [], runner_of(), MEMORY, is_first=False) is None
    secret.write_text("hidden")
    with pytest.raises(ConfigError, match="must have 32 to 4096 bytes") as raised:
        open_store(config_of(secret), [], runner_of(), MEMORY, is_first=True)
    assert "hidden" not in str(raised.value)


def test_missing_client_is_refused_with_the_next_step(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'npuserve\[store\]'"):
        open_store(config_of(secret), [], runner_of(), MEMORY, is_first=True)


def test_missing_library_of_the_client_is_named(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: libibverbs.so.1: cannot open\n")

    monkeypatch.setattr(setup.subprocess, "run", run)
    with pytest.raises(ConfigError, match=r"ImportError: libibverbs\.so\.1.*Debian's package libibverbs1 has it"):
        open_store(config_of(secret), [], runner_of(), MEMORY, is_first=True)


def test_installed_client_can_be_imported() -> None:
    setup.check_import()


def test_facts_differ_with_whatever_determines_a_block() -> None:
    others = [facts_of(runner_of(**fields), "layout") for fields in (
        {"backend_name": "b"}, {"dtype_name": "float16"}, {"cache_dtype": "int8"}, {"block_size": 32},
        {"config": SimpleNamespace(quantization_name="W8A8")})]
    facts = facts_of(runner_of(), "layout")
    assert len({facts, facts_of(runner_of(), "another"), *others}) == 7
    assert facts_of(runner_of(), "layout") == facts


def test_max_saves_is_bounded_by_slots_and_bytes() -> None:
    assert [max_saves(1, 8), max_saves(100, 8), max_saves(1 << 20, 64 << 20)] == [1, 25, 4]
