"""`npuserve collect` with programs and files of the test. tests/e2e/test_emulated.py has a server that logs prompts."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from npuserve.cli.collect import redaction, sources
from npuserve.cli.collect.archive import Archive, Part
from npuserve.cli.collect.command import accept_report
from npuserve.cli.main import main
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.private_folder import private_folder
from npuserve.service.supervisor.running_servers import running_servers, write_description
from tests.support.processes import is_running, until

MAPPING = """
        NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
        0                              0                              0                              Ascend 910B4
        3                              0                              1                              Ascend 910B4
        3                              1                              -                              Mcu
"""
NPU_SMI = """#!/bin/sh
case "$*" in
  "info -m") cat "$(dirname "$0")/mapping" ;;
  "info -t topo") exec sleep 60 ;;
  "info -t health -i 3") echo "Health : Alarm"; echo broken >&2; exit 7 ;;
  *) echo "report of $*" ;;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {each.name.removeprefix("npuserve-collect/"): tar.extractfile(each).read()  # type: ignore[union-attr]
                for each in tar}


def manifest(found: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(found["manifest.json"])}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty home folder, and a PATH without programs of devices."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("ASCEND_PROCESS_LOG_PATH", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_collect_without_a_device_misses_none_of_its_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "report.tar.gz"
    assert main(["collect", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert not re.search("npu-smi|ascend|nvidia", out, re.IGNORECASE)
    assert {line["name"]: line["status"] for line in manifest(members(path)).values()
            if "ascend" in line["name"].lower()} == {"ascend": "absent"}


@pytest.mark.slow
def test_collect_for_a_device_lists_what_is_missing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "report.tar.gz"
    assert main(["collect", "--output", str(path), "--device", "npu"]) == 0
    out = capsys.readouterr().out
    assert "missing    npu-smi/info: no program npu-smi" in out
    assert f"missing    plog: no log of CANN in {home}/home/ascend/log" in out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = members(path)
    assert {"settings.json", "variables.json", "software.json", "host/proc/meminfo", "host/lscpu"} <= set(found)
    software = json.loads(found["software.json"])
    assert software["packages"]["msgspec"]
    assert software["device_software"] == {"driver": "", "firmware": "", "cann": ""}
    lines = manifest(found)
    assert lines["npu-smi/topology"] == {
        "name": "npu-smi/topology", "status": "missing", "bytes": 0, "detail": "no program npu-smi"}
    assert set(lines) >= set(found) - {"manifest.json"}


def served(folder: Path, **settings: Any) -> None:
    """Write the description of a server, as the supervisor of this process would."""
    write_description(folder, ServerConfig(**settings), "127.0.0.1:7", "http://127.0.0.1:8/metrics", time.time())


@pytest.mark.slow
def test_collect_describes_the_running_server(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the defaults of its own command line, and no server that has ended."""
    with private_folder() as folder:
        served(folder, model="/models/teller", max_num_seqs=7, api_keys="/secret-keys")
        assert main(["collect", "--output", str(home / "a.tar.gz")]) == 0
        found = members(home / "a.tar.gz")
        settings = json.loads(found["settings.json"])
        assert (settings["model"], settings["max_num_seqs"], settings["api_keys"]) == ("/models/teller", 7, "removed")
        detail = manifest(found)["settings.json"]["detail"]
        assert detail.startswith(f"of the server with process id {os.getpid()}, which listens on 127.0.0.1:7, version ")
        assert f"settings.json: {detail}" in capsys.readouterr().out
        assert "settings-command-line.json" not in found
        assert main(["collect", "--output", str(home / "a.tar.gz"), "--max-num-seqs", "3"]) == 0
        found = members(home / "a.tar.gz")
        assert json.loads(found["settings.json"])["max_num_seqs"] == 7
        assert json.loads(found["settings-command-line.json"])["max_num_seqs"] == 3
        with private_folder() as other:
            served(other, max_num_seqs=9)
            assert {server.settings["max_num_seqs"] for server in running_servers()} == {7, 9}
    assert list(running_servers()) == []
    capsys.readouterr()
    assert main(["collect", "--output", str(home / "a.tar.gz")]) == 0
    out = capsys.readouterr().out
    assert "settings.json: of this command line, not of a server" in out
    assert f"no server of this user was found in {home}: run npuserve collect where it runs" in out


def test_collect_passes_over_other_folders(home: Path) -> None:
    (home / "npuserve-foreign").mkdir()
    (home / "npuserve-file").touch()
    with private_folder() as folder:
        assert list(running_servers()) == []  # it does not listen yet
        (folder / "server.json").write_text("{}")
        assert list(running_servers()) == []


def test_collect_without_a_home_is_complete(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user without an entry in /etc/passwd."""
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert main(["collect", "--output", str(home / "a.tar.gz"), "--device", "npu"]) == 0
    assert manifest(members(home / "a.tar.gz"))["plog"]["detail"] == "no log of CANN in ~/ascend/log"


@pytest.mark.slow
def test_collect_runs_npu_smi_for_each_npu_with_time_limits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npuserve.cli.collect.command.COMMAND_SECONDS", 1.0)
    program(home / "bin", "npu-smi", NPU_SMI)
    (home / "bin" / "mapping").write_text(MAPPING)
    began = time.monotonic()
    assert main(["collect", "--output", str(home / "a.tar.gz")]) == 0
    assert time.monotonic() - began < 40
    found = members(home / "a.tar.gz")
    lines = manifest(found)
    assert found["npu-smi/info"] == b"report of info\n"
    assert found["npu-smi/0/health"] == b"report of info -t health -i 0\n"
    assert found["npu-smi/3/health"] == b"Health : Alarm\n"
    assert (lines["npu-smi/3/health"]["status"], lines["npu-smi/3/health"]["detail"]) == (
        "failed", "exit code 7: broken")
    assert (lines["npu-smi/topology"]["status"], lines["npu-smi/topology"]["detail"]) == ("timeout", "killed after 1 s")
    assert {name.split("/")[1] for name in lines if name.count("/") == 2 and name.startswith("npu-smi")} == {"0", "3"}


@pytest.mark.slow
def test_collect_after_its_time_skips_commands(home: Path) -> None:
    program(home / "bin", "npu-smi", "#!/bin/sh\nexec sleep 5\n")
    assert main(["collect", "--output", str(home / "a.tar.gz"), "--seconds", "1"]) == 0
    lines = manifest(members(home / "a.tar.gz"))
    assert lines["npu-smi/mapping"]["detail"] == "the time was over"
    assert {lines[name]["status"] for name in ("npu-smi/mapping", "npu-smi/topology", "host/lscpu")} == {"skipped"}


def test_collect_takes_the_newest_logs_of_cann(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(sources, "MAX_LOGS_BYTES", 150)
    folder = home / "home" / "ascend" / "log" / "debug" / "plog"
    folder.mkdir(parents=True)
    for age, name in enumerate(("c", "b", "a")):  # a is the oldest
        (folder / f"plog-{name}.log").write_text("x" * 200 + f"the end of {name}")
        os.utime(folder / f"plog-{name}.log", (1e9 - age, 1e9 - age))
    assert main(["collect", "--output", str(home / "a.tar.gz")]) == 0
    found = members(home / "a.tar.gz")
    lines = manifest(found)
    assert found["plog/debug/plog/plog-c.log"].endswith(b"the end of c")
    assert [lines[f"plog/debug/plog/plog-{name}.log"]["status"] for name in "cba"] == [
        "truncated", "truncated", "skipped"]
    assert [lines[f"plog/debug/plog/plog-{name}.log"]["bytes"] for name in "cba"] == [100, 50, 0]


def test_collect_adds_an_earlier_report_and_removes_secrets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "accept.json").write_text('{"acceptance": {"passed": true}}')
    for name, value in {"NPUSERVE_API_KEYS": "/data/secret-keys", "HCCL_AUTH_TOKEN": "secret-token",
                        "NPUSERVE_OTLP_ENDPOINT": "http://me:secret-word@collector:4317", "HOME_SECRET": "secret-home",
                        "ASCEND_RT_VISIBLE_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    path = home / "a.tar.gz"
    assert main(["collect", "--output", str(path), "--accept-report", str(home / "accept.json"),
                 "--max-num-seqs", "7"]) == 0
    found = members(path)
    assert json.loads(found["accept.json"]) == {"acceptance": {"passed": True}}
    settings, variables = json.loads(found["settings.json"]), json.loads(found["variables.json"])
    assert (settings["max_num_seqs"], settings["api_keys"], settings["tls_key"]) == (7, "removed", "")
    assert settings["otlp_endpoint"] == "http://removed@collector:4317"
    assert (variables["ASCEND_RT_VISIBLE_DEVICES"], variables["HCCL_AUTH_TOKEN"]) == ("3", "removed")
    assert not [name for name, data in found.items() if b"secret-" in data]


def test_collect_accept_runs_the_check_with_the_same_settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of all sources are passed on as variables; others of the environment stay."""
    asked: list[tuple[Any, ...]] = []

    def run(command: tuple[str, ...], seconds: float, max_bytes: int = 0, environ: Any = None) -> Part:
        if "check" in command:
            asked.append((command[-3:], seconds, environ))
        return Part(b'{"acceptance": {}}')

    monkeypatch.setattr(sources, "run", run)
    (home / "settings.toml").write_text("max_num_seqs = 5\ndevice = 'npu'\n")
    monkeypatch.setenv("NPUSERVE_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    assert main(["collect", "--output", str(home / "a.tar.gz"), "--accept", "--accept-seconds", "60", "--emulate",
                 "--no-prefix-cache", "--config", str(home / "settings.toml")]) == 0
    ((command, seconds, environ),) = asked
    assert (command, seconds) == (("check", "--accept", "--json"), 60)
    assert {name: value for name, value in environ.items() if name.startswith("NPUSERVE_")} == {
        "NPUSERVE_MAX_NUM_SEQS": "6", "NPUSERVE_DEVICE": "npu", "NPUSERVE_EMULATE": "True",
        "NPUSERVE_PREFIX_CACHE": "False"}
    assert environ["ASCEND_RT_VISIBLE_DEVICES"] == "3"
    assert members(home / "a.tar.gz")["accept.json"] == b'{"acceptance": {}}'


def test_collect_output_that_cannot_be_written_is_an_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "--output", str(home / "none" / "a.tar.gz")]) == 2
    assert "output: " in capsys.readouterr().err


def test_every_setting_with_a_path_of_a_secret_is_removed() -> None:
    config = ServerConfig(tls_cert="/c", tls_key="/k", tls_client_ca="/a", api_keys="/f", admin_certificates="ada",
                          served_name="shown")
    found = redaction.settings(msgspec.to_builtins(config))
    assert {name for name, value in found.items() if value == redaction.REMOVED} == redaction.SECRET_SETTINGS
    assert found["served_name"] == "shown"


@pytest.mark.parametrize(("line", "kept"), [
    ('{"time": "1", "message": "call", "prompt": "MARKER", "id": "a"}', '{"time": "1", "message": "call", "id": "a"}'),
    ('{"time": "1", "message": "bug", "text": "in MARKER", "traceback": "File x"}',
     '{"time": "1", "message": "bug", "traceback": "File x"}'),
    ('{"time": "1", "message": "engine said", "text": "a warning"}',
     '{"time": "1", "message": "engine said", "text": "a warning"}'),
    ('{"time": "1", "message": "x", '
     '"exception": "Traceback (most recent call last):\\n  File x\\nValueError: a\\n  MARKER"}',
     '{"time": "1", "message": "x", "exception": "Traceback (most recent call last):\\n  File x\\nValueError"}'),
    ('2026-11-20 INFO frontend-0: call id=a prompt="say \\"MARKER\\" now" tokens=3',
     "2026-11-20 INFO frontend-0: call id=a tokens=3"),
    ("2026-11-20 INFO frontend-0: call prompt=MARKER tokens=3", "2026-11-20 INFO frontend-0: call tokens=3"),
    ("2026-11-20 INFO supervisor: engine said text=[WARN]", "2026-11-20 INFO supervisor: engine said text=[WARN]"),
    ("[ERROR] RUNTIME(7): a line of CANN", "[ERROR] RUNTIME(7): a line of CANN"),
    ("a line of a library with MARKER", "(1 lines of unknown output are removed)"),
    # Separators that are no line feeds are not escaped in JSON.
    ('{"time": "1", "message": "call", "prompt": "a\u2028MARKER\x85MARKER"}',
     '{"time": "1", "message": "call"}'),
    ('2026-11-20 INFO frontend-0: call prompt="a\u2028MARKER" tokens=3',
     "2026-11-20 INFO frontend-0: call tokens=3"),
    # The rest of a line is lost.
    ('{"time": "1", "message": "call", "prompt": "a MARK', "(a line is removed)"),
    pytest.param('{"time": "1", "a": ' + "[" * 50_000, "(a line is removed)", id="deep"),
    ('2026-11-20 INFO frontend-0: call id=a prompt="a MARK', "2026-11-20 INFO frontend-0: call id=a"),
    ('{"time": "1", "message": "frontend-0 said", "text": "MARKER"}',
     '{"time": "1", "message": "frontend-0 said"}'),
    ('2026-11-20 INFO supervisor: frontend-0 said text="a MARKER"', "2026-11-20 INFO supervisor: frontend-0 said"),
    ('{"time": "1", "logger": "asyncio", "message": "Task failed\\nfuture: <Task exception=ValueError(MARKER)>"}',
     '{"time": "1", "logger": "asyncio", "message": "Task failed"}'),
    ('{"time": "1", "logger": "asyncio", "message": "Exception in callback f(MARKER)"}',
     '{"time": "1", "logger": "asyncio", "message": "Exception in callback f"}'),
    ('{"time": "1", "logger": "py.warnings", "message": "/a/b.py:3: UserWarning: MARKER\\n  f(x)"}',
     '{"time": "1", "logger": "py.warnings", "message": "/a/b.py:3: UserWarning"}'),
    # Lines to which something was added are no records.
    ('2026-11-20T06:54:41.1Z stderr F {"time": "1", "message": "call", "prompt": "MARKER"}',
     "(1 lines of unknown output are removed)"),
    ('Nov 20 06:54:41 host npuserve[7]: {"time": "1", "message": "call", "prompt": "MARKER"}',
     "(1 lines of unknown output are removed)"),
    (json.dumps({"log": '{"time": "1", "message": "call", "prompt": "MARKER"}\n', "stream": "stderr"}),
     "(1 lines of unknown output are removed)"),
])
def test_log_line_loses_prompts(line: str, kept: str) -> None:
    assert redaction.log_lines(line) == [kept]


TEXT_LOG = """\
2026-11-20 06:54:41.123 ERROR frontend-0: a task failed
Traceback (most recent call last):
  File "a.py", line 3, in f
    raise ValueError(text)
ValueError: MARKER
  and MARKER

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 5, in g
KeyError: 'MARKER'
2026-11-20 06:54:42.123 INFO frontend-0: call id=a"""


def test_text_log_loses_messages_of_exceptions() -> None:
    kept = redaction.log_lines(TEXT_LOG)
    assert not [line for line in kept if "MARKER" in line]
    assert [line for line in kept if line] == [
        "2026-11-20 06:54:41.123 ERROR frontend-0: a task failed", "Traceback (most recent call last):",
        '  File "a.py", line 3, in f', "    raise ValueError(text)", "ValueError",
        "During handling of the above exception, another exception occurred:", "Traceback (most recent call last):",
        '  File "a.py", line 5, in g', "KeyError", "2026-11-20 06:54:42.123 INFO frontend-0: call id=a"]


RAW_LOG = """\
{"time": "1", "message": "call"}
thread '<unnamed>' panicked at /rust/tokenizers/src/a.rs:3:7:
byte index 3 is not a char boundary; it is inside 'MARKER'
[ERROR] MARKER
{"time": "1", "message": "group"}
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 3, in f
  | ExceptionGroup: MARKER (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 5, in g
    | ValueError: MARKER
    | MARKER
    +------------------------------------
2026-11-20 06:54:41.123 ERROR engine: Task exception was never retrieved
future: <Task finished exception=ValueError('MARKER')>
Traceback (most recent call last):
  File "a.py", line 7, in h
ValueError: a schema
{"message": "MARKER"}
Fatal Python error: Segmentation fault"""


def test_raw_output_loses_quotes_groups_and_tasks() -> None:
    kept = redaction.log_lines(RAW_LOG)
    assert not [line for line in kept if "MARKER" in line]
    assert [line for line in kept if "removed" not in line] == [
        '{"time": "1", "message": "call"}', '{"time": "1", "message": "group"}',
        "Exception Group Traceback (most recent call last):", '  File "a.py", line 3, in f', "ExceptionGroup",
        "Traceback (most recent call last):", '  File "a.py", line 5, in g', "ValueError",
        "2026-11-20 06:54:41.123 ERROR engine: Task exception was never retrieved",
        "Traceback (most recent call last):", '  File "a.py", line 7, in h', "ValueError"]


def test_collect_takes_no_other_file_for_a_log_of_cann_or_a_report(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "device-0").mkdir()
    (home / "device-0" / "device-0_1.log").write_text("of CANN")
    (home / "server.log").write_text("prompt=MARKER")
    assert main(["collect", "--output", str(home / "a.tar.gz"), "--plog", str(home), "--accept-report",
                 str(home / "server.log")]) == 0
    found = members(home / "a.tar.gz")
    assert found["plog/device-0/device-0_1.log"] == b"of CANN"
    assert manifest(found)["accept.json"]["detail"] == "is no report of npuserve check --accept --json"
    assert not [name for name, data in found.items() if b"MARKER" in data]


def test_collect_without_the_named_log_writes_no_file_for_it(home: Path) -> None:
    assert main(["collect", "--output", str(home / "a.tar.gz"), "--log", str(home / "absent.log")]) == 0
    found = members(home / "a.tar.gz")
    assert "server.log" not in found
    assert manifest(found)["server.log"] == {
        "name": "server.log", "status": "missing", "bytes": 0, "detail": f"no file {home}/absent.log"}


@pytest.mark.parametrize("text", [
    '["acceptance", "prompt=MARKER"]', '"acceptance MARKER"', "1", "{}", "", pytest.param("[" * 50_000, id="deep")])
def test_accept_report_is_an_object_with_a_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    part = accept_report(tmp_path / "a.json")
    assert (part.data, part.status) == (b"", "failed")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["info", "info -m"], ids=["versions", "report"])
def test_collect_ended_by_sigterm_ends_its_command(home: Path, command: str) -> None:
    program(home / "bin", "npu-smi", f"#!/bin/sh\n[ \"$*\" = '{command}' ] || exit 0\n"
                                     f"echo $$ >{home}/started\nkill -TERM $PPID\nexec sleep 600\n")
    process = subprocess.run([sys.executable, "-m", "npuserve.cli", "collect", "--output", str(home / "a.tar.gz")])
    assert process.returncode == 128 + signal.SIGTERM
    until(lambda: not is_running(int((home / "started").read_text())), seconds=50)


def test_archive_in_place_of_another_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.touch(0o644)
    with Archive(path, 10):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_addresses_lose_user_password_and_query() -> None:
    given = {"NPUSERVE_OTLP_ENDPOINT": "https://me:p@ss@collector:4317/v1?token=secret",
             "HCCL_WHITELIST_FILE": "http://c:1/?key=secret", "NPUSERVE_KV_EVENTS_ENDPOINT": "tcp://*:5557"}
    assert redaction.variables(given) == {
        "NPUSERVE_OTLP_ENDPOINT": "https://removed@collector:4317/v1?removed",
        "HCCL_WHITELIST_FILE": "http://c:1/?removed", "NPUSERVE_KV_EVENTS_ENDPOINT": "tcp://*:5557"}


def test_archive_is_bounded(tmp_path: Path) -> None:
    with Archive(tmp_path / "a.tar.gz", 10) as archive:
        for name in "abc":
            archive.add(name, Part(b"12345678"))
    found = members(tmp_path / "a.tar.gz")
    assert {name: len(data) for name, data in found.items() if name != "manifest.json"} == {"a": 8, "b": 2}
    assert [line["status"] for line in manifest(found).values()] == ["complete", "truncated", "truncated"]


def test_command_with_endless_output_is_killed() -> None:
    part = sources.run(("yes",), 20, 1000)
    assert (part.status, len(part.data)) == ("truncated", 1000)
