"""Reading a model's folder. test_model_path.py tests finding and downloading it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.service.config import ConfigError
from npuserve.service.text.model_folder import open_folder, read_eos_ids
from tests.support.fake_engine import EOS, make_folder
from tests.support.real_models import BUILT_IN, model_folder

LINKED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
          "additional_chat_templates/tool_use.jinja", "model.safetensors.index.json", "model.safetensors")


@pytest.mark.parametrize("name", LINKED)
def test_open_folder_with_a_link_out_of_the_folder_names_the_file(tmp_path: Path, name: str) -> None:
    folder, secret = make_folder(tmp_path / "m"), tmp_path / "secret"
    link = folder / name
    secret.write_bytes(link.read_bytes() if link.exists() else b"{}")
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret)
    message = re.escape(f"{link}: is a symbolic link to {secret}; a model's file must lie in its folder ({folder})")
    with pytest.raises(ConfigError, match=message):
        open_folder(folder, "m", "")
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize("target", ["../../models--org--other/blobs/0", "../../blobs-beside/0", "/etc/hostname"])
def test_open_folder_in_the_hub_cache_refuses_links_outside_its_blobs(tmp_path: Path, target: str) -> None:
    folder = make_folder(tmp_path / "models--org--name/snapshots" / ("0" * 40))
    (folder / "chat_template.jinja").symlink_to(target)
    blobs = re.escape(str(tmp_path / "models--org--name/blobs"))
    with pytest.raises(ConfigError, match=rf"chat_template.jinja: is a symbolic link to .* or {blobs}\)"):
        open_folder(folder, "m", "")


def test_open_folder_accepts_the_layout_of_the_hub_cache(tmp_path: Path) -> None:
    """The links are made by the hub's client. The cache is also reached through a link, as on a mounted volume."""
    from huggingface_hub import file_download as hub

    cache = tmp_path / "volume"
    repository = cache / hub.repo_folder_name(repo_id="org/name", repo_type="model")
    folder = make_folder(repository / "snapshots" / ("0" * 40))
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(repository / "blobs" / f"{number:040x}")
        hub._create_symlink(str(blob), str(file), new_blob=False)
        assert os.readlink(file) == f"../../blobs/{blob.name}"
    (tmp_path / "mounted").symlink_to(cache)
    mounted = tmp_path / "mounted" / folder.relative_to(cache)
    for name in (folder, mounted):
        assert open_folder(name, "org/name", "").tokenizer


def test_open_folder_accepts_links_within_the_folder(tmp_path: Path) -> None:
    """The layout of a ConfigMap volume: FILE -> ..data/FILE, ..data -> ..TIME."""
    folder = make_folder(tmp_path / "m" / "..2026_11_23")
    (tmp_path / "m" / "..data").symlink_to(folder.name)
    for file in folder.iterdir():
        (tmp_path / "m" / file.name).symlink_to(Path("..data", file.name))
    (tmp_path / "link").symlink_to("m")
    assert open_folder(tmp_path / "link", "m", "").tokenizer


def test_open_folder_returns_the_served_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "counting")
    assert open_folder(folder, str(folder), "").names == {"counting", str(folder)}
    named = open_folder(folder, str(folder), "mine")
    assert (named.name, named.names) == ("mine", {"mine", str(folder)})
    built_in = open_folder(folder, "", "")
    assert (built_in.name, built_in.names) == ("storyteller", {"storyteller"})
    monkeypatch.chdir(folder)
    assert open_folder(Path("."), ".", "").name == "counting"


@pytest.mark.parametrize(("generation", "config", "eos"), [
    ({"eos_token_id": [151645, 151643]}, {"eos_token_id": 151645}, {151645, 151643}),
    ({"eos_token_id": 2}, {"eos_token_id": 3}, {2, 3}),
    ({}, {"eos_token_id": [7]}, {7}),
    ({"eos_token_id": None}, {"eos_token_id": None}, {EOS}),
    ({"eos_token_id": -1}, {}, {EOS}),
    ({"eos_token_id": 512}, {"vocab_size": 512}, {EOS}),
    ({"eos_token_id": [511, 1 << 70]}, {"eos_token_id": 512, "vocab_size": 512}, {511}),
])
def test_open_folder_reads_eos_token_ids(
    tmp_path: Path, generation: dict[str, object], config: dict[str, object], eos: set[int]
) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_folder(folder, "m", "").eos_token_ids == eos


@pytest.mark.parametrize(("generation", "defaults"), [
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9},
     {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    ({"temperature": 0.6, "min_p": None}, {"temperature": 0.6}),
    ({"do_sample": False, "temperature": 0.6, "top_k": 1.5, "repetition_penalty": 1.1},
     {"temperature": 0.0, "repetition_penalty": 1.1}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({}, {}),
])
def test_open_folder_reads_sampling_defaults(
    tmp_path: Path, generation: dict[str, object], defaults: dict[str, float]
) -> None:
    assert open_folder(make_folder(tmp_path / "m", **generation), "m", "").defaults == defaults


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", None, "has no config.json"),
    ("config.json", "{", "config.json cannot be read"),
    ("config.json", "[]", "config.json is not a JSON object"),
    pytest.param("config.json", "[" * 100_000, "config.json cannot be read: maximum recursion depth", id="nested"),
    ("config.json", '{"eos_token_id": "2"}', "eos_token_id in config.json is '2', not a token id"),
    ("generation_config.json", '{"eos_token_id": [2, null]}', r"eos_token_id in .* is \[2, None\], not a token id"),
    ("tokenizer_config.json", '{"chat_template": 5}', "chat_template: must be text or a list of .*, got 5"),
    ("generation_config.json", '{"top_p": 0}', r"top_p in generation_config.json is 0, not in \(0, 1\]"),
    ("generation_config.json", '{"temperature": NaN}', "temperature in generation_config.json is nan"),
    ("generation_config.json", '{"top_k": true}', "top_k in generation_config.json is True"),
    ("generation_config.json", '{"top_k": 1.5}', "top_k in generation_config.json is 1.5, not a whole number"),
    ("tokenizer.json", "{}", "tokenizer"),
])
def test_open_folder_with_a_bad_file_names_it(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = make_folder(tmp_path / "m")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_folder(folder, "m", "")


@pytest.mark.parametrize(("name", "eos", "defaults", "chat"), [
    (BUILT_IN, 0, {"temperature": 1.0}, False),
    pytest.param("stories260K-qwen3", 2, {}, False, marks=pytest.mark.model),
    pytest.param("minimind2-small", 2, {}, True, marks=pytest.mark.model),
])
def test_open_folder_of_real_models(name: str, eos: int, defaults: dict[str, float], chat: bool) -> None:
    found = open_folder(model_folder(name), name, "")
    assert (found.eos_token_ids, found.defaults) == ({eos}, defaults)
    assert found.tokenizer
    assert (found.tokenizer.chat is not None) == chat


def test_read_eos_ids_returns_those_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3, "vocab_size": 512}))
    assert read_eos_ids(tmp_path) == {3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 512]}))
    assert read_eos_ids(tmp_path) == {2, 3}
