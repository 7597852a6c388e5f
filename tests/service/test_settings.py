"""Sources of settings: precedence, conversion and error messages."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from npuserve.cli.main import main
from npuserve.service import settings
from npuserve.service.config import ConfigError, ServerConfig

DOCUMENT = Path(__file__).parents[2] / "docs/configuration.md"

HUGE = 10**400  # exceeds the range of a float


def load(flags: str = "", environ: dict[str, str] | None = None) -> ServerConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(flags.split()), environ or {})


def test_load_for_a_private_server_refuses_what_it_chooses_and_ignores_variables(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    settings.add_arguments(parser)
    variables = {"NPUSERVE_PORT": "none", "NPUSERVE_TLS_CERT": "server.pem", "NPUSERVE_MAX_NUM_SEQS": "3"}
    assert settings.load(parser.parse_args([]), variables, is_private=True) == ServerConfig(max_num_seqs=3)
    for name in settings.CHOSEN_BY_PRIVATE_SERVER:
        args = parser.parse_args([f"{settings.flag(name)}=1"])
        with pytest.raises(ConfigError, match=f"^{settings.flag(name)}: a private server chooses it; remove it$"):
            settings.load(args, {}, is_private=True)
    file = tmp_path / "server.toml"
    file.write_text("port = 50051\n")
    with pytest.raises(ConfigError, match=r"server\.toml:port: a private server chooses it; remove it$"):
        settings.load(parser.parse_args([f"--config={file}"]), {}, is_private=True)


def test_load_without_sources_is_defaults() -> None:
    assert load() == ServerConfig()


def test_settings_table_has_every_field_once() -> None:
    named = [name for group in settings.SETTINGS.values() for name in group]
    assert sorted(named) == sorted(f.name for f in msgspec.structs.fields(ServerConfig))


@pytest.mark.parametrize(("flags", "variable", "in_file", "result"), [
    ("", None, None, 64),
    ("", None, 3, 3),
    ("", "2", None, 2),
    ("", "2", 3, 2),
    ("--max-num-seqs 1", None, None, 1),
    ("--max-num-seqs 1", None, 3, 1),
    ("--max-num-seqs 1", "2", None, 1),
    ("--max-num-seqs 1", "2", 3, 1),
    ("", "", 3, 3),
])
def test_load_flag_over_variable_over_file(
    tmp_path: Path, flags: str, variable: str | None, in_file: int | None, result: int
) -> None:
    file = tmp_path / "server.toml"
    file.write_text("" if in_file is None else f"max_num_seqs = {in_file}\n")
    environ = {} if variable is None else {"NPUSERVE_MAX_NUM_SEQS": variable}
    assert load(f"{flags} --config {file}", environ).max_num_seqs == result
    assert load(flags, environ | {"NPUSERVE_CONFIG": str(file)}).max_num_seqs == result


def test_load_every_type_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('''
        model = "/m"
        port = 1
        drain_seconds = 2
        prefix_cache = false
        dtype = "float32"
        kv_cache_memory = "1KiB"
    ''')
    wanted = ServerConfig(
        model="/m", port=1, drain_seconds=2.0, prefix_cache=False, dtype="float32", kv_cache_memory=1024)
    assert load(f"--config {file}") == wanted
    assert isinstance(load(f"--config {file}").drain_seconds, float)
    assert wanted == load("", {
        "NPUSERVE_MODEL": "/m", "NPUSERVE_PORT": "1", "NPUSERVE_DRAIN_SECONDS": "2", "NPUSERVE_PREFIX_CACHE": "off",
        "NPUSERVE_DTYPE": "float32", "NPUSERVE_KV_CACHE_MEMORY": "1024",
    })
    assert wanted == load("/m --port 1 --drain-seconds 2 --no-prefix-cache --dtype float32 --kv-cache-memory 1k")


def test_load_flag_overrides_boolean_variable() -> None:
    off = {"NPUSERVE_PREFIX_CACHE": "0"}
    assert not load("", off).prefix_cache
    assert load("--prefix-cache", off).prefix_cache


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("123", 123), ("123B", 123), ("1K", 1 << 10), ("512M", 512 << 20), ("4GiB", 4 << 30), ("4 Gi", 4 << 30),
    ("1.5g", 3 << 29), ("2TiB", 2 << 40), ("4GB", 4 * 10**9), ("1kb", 1000),
    ("9007199254740993", 2**53 + 1),
])
def test_parse_size_units(text: str, size: int) -> None:
    assert settings.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "4GiBB", "four", "1 2", "0.9", "0.9B", "0.0001K"])
def test_parse_size_rejects_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        settings.parse_size(text)


def test_load_comma_separated_lists() -> None:
    config = load("--emulate --emulate-relax fp32,small_heads --decode-buckets 8,1,4,4", {})
    assert (config.relaxations, config.buckets) == (("fp32", "small_heads"), (1, 4, 8))
    assert (load("", {}).relaxations, load("", {}).buckets) == ((), ())


@pytest.mark.parametrize(("flags", "environ", "message"), [
    ("--max-num-seqs many", {}, "max_num_seqs: 'many' is not a whole number in [1, 65536] (from --max-num-seqs)"),
    ("--max-num-seqs 1.5", {}, "max_num_seqs: '1.5' is not a whole number in [1, 65536] (from --max-num-seqs)"),
    ("--max-num-seqs 0", {}, "max_num_seqs: 0 is not in [1, 65536] (from --max-num-seqs)"),
    ("", {"NPUSERVE_PORT": "99999"}, "port: 99999 is not in [0, 65535] (from NPUSERVE_PORT)"),
    ("--max-model-len 1", {}, "max_model_len: 1 is not 0 or at least 2: a prompt and an answer need a token each"),
    ("--drain-seconds nan", {}, "drain_seconds: nan is not in [0, 86400] (from --drain-seconds)"),
    ("--device tpu", {}, "device: 'tpu' is not one of auto, npu, cuda, cpu (from --device)"),
    ("--host=", {}, "host: must not be empty; 0.0.0.0 is all addresses (from --host)"),
    (f"--kv-cache-memory {HUGE}", {}, f"kv_cache_memory: {HUGE} is not in [0, {1 << 50}] (from --kv-cache-memory)"),
    ("--kv-cache-memory " + "9" * 5000, {}, "kv_cache_memory: '9999"),
    ("--decode-buckets " + "9" * 5000, {}, "decode_buckets: '9999"),
    ("--kv-cache-memory lots", {}, "kv_cache_memory: 'lots' is not a size such as 4GiB (from --kv-cache-memory)"),
    ("--kv-cache-memory 0.9", {}, "kv_cache_memory: '0.9' is not a size such as 4GiB (from --kv-cache-memory)"),
    ("", {"NPUSERVE_LOG_PROMPTS": "maybe"}, "log_prompts: 'maybe' is not true or false (from NPUSERVE_LOG_PROMPTS)"),
    ("", {"NPUSERVE_MAX_NUM_SEQ": "1"}, "NPUSERVE_MAX_NUM_SEQ: no such setting; did you mean NPUSERVE_MAX_NUM_SEQS?"),
    ("", {"NPUSERVE_port": "1"}, "NPUSERVE_port: no such setting"),
    ("", {"NPUSERVE_BANANA": "1"}, "NPUSERVE_BANANA: no such setting; docs/configuration.md lists them"),
    ("--emulate-relax fp32", {}, "emulate_relax: nothing is emulated; --emulate does (from --emulate-relax)"),
    ("--port 9090", {}, "metrics_port: 9090 is already the port of gRPC; 0 takes a free one (from --port)"),
    ("", {"NPUSERVE_TLS_CERT": "a.pem"}, "tls_key: is missing; tls_cert needs it (from NPUSERVE_TLS_CERT)"),
    ("--max-priority -5", {}, "min_priority: 0 is above max_priority, -5 (from --max-priority)"),
    ("--host ::1 --port 1 --metrics-port 1 --metrics-host ::1", {}, "metrics_port: 1 is already the port of gRPC"),
    ("--otlp-endpoint http://collector", {}, "otlp_endpoint: 'http://collector' must be like http://host:4317"),
    ("--otlp-endpoint http://a:65536", {}, "otlp_endpoint: the port must be in [1, 65535], got 'http://a:65536'"),
    ("--otlp-endpoint http://a:0", {}, "otlp_endpoint: the port must be in [1, 65535], got 'http://a:0'"),
    ("--decode-buckets 1,x", {}, "decode_buckets: '1,x' must be numbers in [1, 65536], as in 1,2,4,8"),
    ("--speculate sufix", {}, "speculate: 'sufix' is neither one of off, auto, suffix, mtp nor the path of a folder; "
                              "did you mean suffix? (from --speculate)"),
    ("--speculate=", {}, "speculate: '' is neither one of off, auto, suffix, mtp nor the path of a folder; a folder "
                         "here is ./NAME"),
    ("--speculate mtp --max-num-batched-tokens 64", {}, "max_num_seqs: 64 leaves no tokens of a step to drafts"),
    ("--decode-buckets 0", {}, "decode_buckets: '0' must be numbers in [1, 65536]"),
    ("--kv-cache-dtype int4", {}, "kv_cache_dtype"),
    ("--config /no/such/file.toml", {}, "/no/such/file.toml: cannot be read: No such file or directory"),
])
def test_load_error_names_source(flags: str, environ: dict[str, str], message: str) -> None:
    devices = re.escape("auto, npu, cuda, cpu")
    pattern = re.escape(message).replace(devices, "auto, .*")
    with pytest.raises(ConfigError, match=f"^{pattern}"):
        load(flags, environ)


@pytest.mark.parametrize("source", ["variable", "file", "flag"])
def test_load_removed_setting_is_refused_with_what_to_do(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('state_folder = "/s"' if source == "file" else "")
    environ = {"NPUSERVE_STATE_FOLDER": "/s"} if source == "variable" else {}
    try:
        load(f"--config {file}", environ) if source != "flag" else main(["serve", "--state-folder", "/s"])
    except ConfigError as error:
        message = str(error)
    except SystemExit:
        message = capsys.readouterr().err
    assert "removed: a stream ends with its server. Leave the setting out" in message


def test_settings_of_the_page_have_the_groups_and_order_of_help() -> None:
    section = DOCUMENT.read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    tables = {group.partition("\n")[0].lower(): re.findall(r"^\| `(\w+)` \|", group, re.MULTILINE)
              for group in section.split("\n### ")[1:]}
    assert list(tables.items()) == [(group.lower(), list(names)) for group, names in settings.SETTINGS.items()]
    assert list(tables)[-1] == "advanced"


@pytest.mark.parametrize(("name", "metavar"), [
    ("tls_cert", "FILE"), ("profile_dir", "FOLDER"), ("drain_seconds", "SECONDS"), ("kv_cache_memory", "SIZE"),
    ("port", "PORT"), ("max_model_len", "TOKENS"), ("max_queue", "N"), ("log_level", "{debug,info,warning,error}"),
])
def test_metavar_names_what_a_value_is(name: str, metavar: str) -> None:
    assert settings._metavar(name) == metavar


def test_metavar_of_no_setting_is_unknown() -> None:
    """Every text needs a word of its own."""
    for field in msgspec.structs.fields(ServerConfig):
        assert settings._metavar(field.name) or field.type is bool


@pytest.mark.parametrize(("toml", "message"), [
    ("max_num_seq = 1", "max_num_seq: no such setting; did you mean max_num_seqs?"),
    ("[server]\nport = 1", "server: no such setting"),
    ("port = ", "not a TOML file"),
    ("port = " + "9" * 5000, "not a TOML file: a number has too many digits"),
    ("port = 0x" + "f" * 6000, "not a TOML file: an integer needs more than 64 bits"),
    (".".join("a" * 101) + " = 1", "not a TOML file: a key has more than 100 parts"),
    ("[ " + " . ".join(['"a"'] * 101) + " ]", "not a TOML file: a key has more than 100 parts"),
    ("a = {b = 1, " + ".".join(["'a'"] * 101) + " = 2}", "not a TOML file: a key has more than 100 parts"),
    (".".join("a" * 100) + " = 1", "a: no such setting"),
    ('port = "a"', "port: 'a' is not a whole number in [0, 65535] (from {file}:port)"),
    ("port = true", "port: True is not a whole number in [0, 65535] (from {file}:port)"),
    ("port = 1.5", "port: 1.5 is not a whole number in [0, 65535] (from {file}:port)"),
    ('tls_cert = "a\\u0000"', "tls_cert: 'a\\x00' has a null character (from {file}:tls_cert)"),
    ("model = 1", "model: 1 is not text (from {file}:model)"),
    ("prefix_cache = 1", "prefix_cache: 1 is not true or false (from {file}:prefix_cache)"),
    ("device = []", "device: [] is not one of"),
    ("port = -1", "port: -1 is not in [0, 65535] (from {file}:port)"),
])
def test_load_error_names_file_and_key(tmp_path: Path, toml: str, message: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=re.escape(message.format(file=file))):
        load(f"--config {file}")


def test_load_key_of_many_parts_needs_little_memory(tmp_path: Path) -> None:
    """The parser alone needs 1.5 GB for 20,000 parts. Text of values is no key."""
    file = tmp_path / "server.toml"
    file.write_text(".".join("a" * 100_000) + " = 1")
    with pytest.raises(ConfigError, match="a key has more than 100 parts"):
        load(f"--config {file}")
    text = ". ".join(["word"] * 101)
    file.write_text(f'served_name = "{text}"\n')
    assert load(f"--config {file}").served_name == text


def test_load_ignores_foreign_variables() -> None:
    others = {
        "NPUSERVE_TEST_MODELS": "/models", "PATH": "/bin",
        # Set by Kubernetes for services named npuserve and npuserve-canary.
        "NPUSERVE_SERVICE_HOST": "10.0.0.1", "NPUSERVE_SERVICE_PORT": "50051", "NPUSERVE_SERVICE_PORT_GRPC": "50051",
        "NPUSERVE_PORT": "tcp://10.0.0.1:50051", "NPUSERVE_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "NPUSERVE_PORT_50051_TCP_ADDR": "10.0.0.1", "NPUSERVE_CANARY_SERVICE_HOST": "10.0.0.2",
        "NPUSERVE_CANARY_PORT": "tcp://10.0.0.2:50051",
    }
    assert load("", others) == ServerConfig()


def test_settings_document_has_every_setting_with_default() -> None:
    cells = [[cell.strip(" `") for cell in line.split("|")] for line in DOCUMENT.read_text().splitlines()]
    rows = {cell[1]: cell[3] for cell in cells if len(cell) == 6 and cell[1] not in ("setting", "---")}
    assert rows == {f.name: settings._show(f.default) for f in msgspec.structs.fields(ServerConfig)}


def test_load_equal_ports_of_two_addresses() -> None:
    assert load("--port 9090 --metrics-host 127.0.0.2").metrics_port == 9090


@pytest.mark.parametrize(("flags", "error"), [
    ("--kv-offload-memory 1GiB --no-prefix-cache",
     "kv_offload_memory: there are no prefixes to keep without prefix_cache"),
    ("--kv-store master:50051 --kv-store-secret f",
     "kv_store: needs kv_offload_memory, through which blocks are saved and loaded"),
    ("--kv-store master --kv-store-secret f --kv-offload-memory 1GiB",
     "kv_store: 'master' must be HOST:PORT of the store's master, with a port in "),
    ("--kv-store master:50051 --kv-offload-memory 1GiB",
     "kv_store_secret: is missing; kv_store needs a file of a secret, the same on all servers that share prefixes, as "
     "`openssl rand -hex 32` writes"),
    ("--kv-store-secret f", "kv_store_secret: there is no store; kv_store names one"),
    ("--kv-store-timeout-seconds 0", r"kv_store_timeout_seconds: 0.0 is not in \[0.01, 60\]"),
    ("--kv-store m:1 --kv-store-secret f --kv-offload-memory 1GiB --tensor-parallel-size 2",
     "kv_store: is not possible with a tensor_parallel_size above 1"),
    ("--kv-events grpc --no-prefix-cache", "kv_events: there are none without prefix_cache"),
    ("--kv-events zmq --kv-events-endpoint 5557", "kv_events_endpoint: '5557' must be like tcp://"),
    ("--kv-events zmq --kv-events-endpoint tcp://*:65536", r"kv_events_endpoint: the port must be in \[0, 65535\]"),
    ("--kv-events zmq --kv-events-replay-endpoint http://x:1", "kv_events_replay_endpoint: 'http://x:1' must be like"),
    ("--kv-events grpc --kv-events-replay-endpoint ipc://x", "kv_events_replay_endpoint: replays need kv_events zmq"),
    ("--kv-events-buffer 3", r"kv_events_buffer: 3 is not in \[64, 1048576\]"),
])
def test_load_contradicting_kv_events_is_refused(flags: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load(flags)


def test_load_kv_events_endpoints() -> None:
    config = load("--kv-events zmq --kv-events-endpoint ipc:///run/kv --kv-events-replay-endpoint tcp://[::]:5558")
    assert (config.kv_events_endpoint, config.kv_events_replay_endpoint) == ("ipc:///run/kv", "tcp://[::]:5558")
    config = load("--kv-events zmq", {"NPUSERVE_KV_EVENTS_ENDPOINT": "tcp://127.0.0.1:6111"})
    assert config.kv_events_endpoint == "tcp://127.0.0.1:6111"  # not a variable of Kubernetes
    with pytest.raises(ConfigError, match="kv_events_endpoint: must not be empty with kv_events zmq"):
        ServerConfig(kv_events="zmq", kv_events_endpoint="")
