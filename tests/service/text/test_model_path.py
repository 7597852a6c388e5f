"""Finding and downloading a model."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from npuserve.npu import storyteller
from npuserve.service.config import ConfigError
from npuserve.service.text import model_path
from npuserve.service.text.model_folder import open_folder
from npuserve.service.text.model_path import fetch, resolve
from tests.support.fake_engine import make_folder


def test_resolve_finds_the_built_in_model_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("") == storyteller.FOLDER
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve("~/m") == tmp_path / "m"


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./gone", "../gone/too", "~/gone", "a/b/c"])
def test_resolve_of_a_missing_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        resolve(name)


def test_resolve_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve(str(tmp_path / "model.gguf"))


def test_resolve_of_a_path_that_cannot_be_read_names_it(tmp_path: Path) -> None:
    """As a folder that this user may not enter."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=f"^model: {tmp_path}/loop/model cannot be read: Too many levels of symbolic"):
        resolve(f"{tmp_path}/loop/model")


def test_resolve_of_an_unknown_home_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model: ~nobody-here/model: the home directory is unknown"):
        resolve("~nobody-here/model")


def test_download_without_a_folder_for_it_names_hf_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/.cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=r"^model: a/b cannot be downloaded .*: /.cache: Permission denied; HF_HOME "):
        model_path._download("a/b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(ConfigError, match=r"^model: a/b is no folder here .* home directory is unknown; set HF_HOME"):
        model_path._download("a/b")


def test_download_takes_the_files_of_modules_and_no_other_weights() -> None:
    from huggingface_hub.utils import filter_repo_objects

    needed = [
        "config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "chat_template.jinja", "modules.json", "config_sentence_transformers.json",
        "1_Pooling/config.json", "1_LogitScore/config.json", "additional_chat_templates/tool_use.jinja"]
    others = ["README.md", "original/consolidated.safetensors", "onnx/model.onnx", "original/tokenizer.model",
              "2_Dense/model.safetensors", "other/model.safetensors.index.json", "onnx/tokenizer.json",
              "a/b/config.json"]
    kept = filter_repo_objects(
        needed + others, allow_patterns=model_path.HUB_FILES, ignore_patterns=model_path.HUB_OTHER_FILES)
    assert list(kept) == needed


@pytest.mark.slow
def test_resolve_of_a_hub_name_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hub's client, offline: first the model is missing, then it is in the cache."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    with pytest.raises(ConfigError) as missing:
        resolve("Qwen/Qwen3-0.6B")
    assert str(missing.value).startswith("model: Qwen/Qwen3-0.6B is no folder here, was not downloaded before, and")
    assert "\n" not in str(missing.value)
    with pytest.raises(ConfigError, match="neither a folder here nor a model on the hub"):
        resolve("not a name!")
    repository, commit = cache / "models--Qwen--Qwen3-0.6B", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    make_folder(repository / "snapshots" / commit)
    assert resolve("Qwen/Qwen3-0.6B") == repository / "snapshots" / commit
    found = open_folder(resolve("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B", "")
    assert (found.name, found.names) == ("Qwen/Qwen3-0.6B", {"Qwen/Qwen3-0.6B"})


@pytest.mark.slow
def test_resolve_of_a_mistyped_folder_suggests_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, said in (
        ("modle/", "model: there is no folder modle/ (did you mean model?)"),
        ("modle", "model: modle is no folder here (did you mean model?), was not downloaded "),
        ("modle/qwen", "model: modle/qwen is no folder here (did you mean model?), was not "),
        ("other", "model: other is no folder here, was not downloaded before, "),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
            resolve(name)


@pytest.mark.slow
async def test_fetch_of_an_unknown_model_raises_the_error_of_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the download process, offline: its error message reaches the caller unchanged."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"^model: org/name is no folder here, was not downloaded before, and"):
        await fetch("org/name")
    (tmp_path / "hub/models--org--name/refs").mkdir(parents=True)
    (tmp_path / "hub/models--org--name/refs/main").write_text("0" * 40)
    folder = make_folder(tmp_path / "hub/models--org--name/snapshots" / ("0" * 40))
    assert await fetch("org/name") == folder


async def test_fetch_with_a_failed_process_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"^model: org/name cannot .* its download ended with code 1$"):
        await fetch("org/name")


async def test_fetch_whose_process_cannot_be_started_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ConfigError, match=r"^model: org/name cannot .* no process can be started: .*No such file"):
        await fetch("org/name")
