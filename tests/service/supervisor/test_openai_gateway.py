from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.supervisor.openai_gateway import read_keys


def test_openai_keys_are_lines_of_name_and_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\n\nweb:12345678\n phone.1:abc:defgh \n")
    assert read_keys(str(file)) == ["web:12345678", "phone.1:abc:defgh"]


@pytest.mark.parametrize(("content", "message"), [
    (b"", "has no key; write lines NAME:KEY"),
    (b"# nothing\n", "has no key; write lines NAME:KEY"),
    (b"web:1234567\n", "line 1 of .* is not NAME:KEY, with a key of at least 8"),
    (b"a:12345678\nweb 12345678\n", "line 2 of .* is not NAME:KEY"),
    (b"a:12345678\na:87654321\n", "a name occurs twice"),
    (b"\xff\xfe", "it is not UTF-8"),
])
def test_openai_keys_that_are_unusable_name_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^openai_api_keys: .*{message}"):
        read_keys(str(file))


def test_openai_keys_without_a_file_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^openai_api_keys: .* cannot be read: No such file"):
        read_keys(str(tmp_path / "none"))


@pytest.mark.parametrize(("settings", "message"), [
    ({"openai_api_keys": "a"}, "openai_api_keys: there are no HTTP clients without openai_port"),
    ({"openai_port": 50051}, "openai_port: 50051 is already the port of gRPC"),
    ({"openai_port": 9090}, "openai_port: 9090 is already the port"),
    ({"openai_port": 8000, "api_keys": "keys"}, "openai_api_keys: is missing"),
    ({"openai_port": 8000, "tls_cert": "a", "tls_key": "b", "tls_client_ca": "c"}, "openai_port: HTTP clients"),
    ({"openai_port": 65536}, "openai_port: 65536 is not in"),
])
def test_openai_settings_that_contradict_others_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        ServerConfig(**settings)  # type: ignore[arg-type]
