"""Chat templates that never end or exhaust memory, in their own process."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jinja2
import pytest

from npuserve.service.config import ConfigError
from npuserve.service.errors import InvalidField, Unavailable
from npuserve.service.processes.sandbox import KEPT_VARIABLES, Sandbox
from npuserve.service.text import template_process
from npuserve.service.text.chat_template import ChatTemplate, read_templates
from npuserve.service.text.template_process import TemplateProcess, load_template_process
from tests.support.fake_engine import CHAT_TEMPLATE

TURN = {"role": "user", "content": "hi"}
ECHO = "{{ messages[0].content }}"
ENDLESS = {
    "a loop without output": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro f(n) %}{% for i in range(99999) %}{% set x = f(0) if n else 1 %}{% endfor %}"
                         "{% endmacro %}{% for i in range(99999) %}{{ f(1) }}{% endfor %}",
    "arithmetic": "{% set x = messages[0].content | length + 8 %}{{ (x ** (x ** 9)) % 7 }}",
    "a filter": "{{ (range(99999) | list * 300) | sort | unique | list | length }}",
}
HUGE = {
    "a text that doubles": "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
                           "{% endfor %}",
    "a padded text": "{{ messages[0].content | center(99999999999) | length }}",
    "a long list": "{{ ([0] * 99999999999) | length }}",
}


def made(folder: Path, template: str, seconds: float = 0.4) -> TemplateProcess:
    """Return the process of a template that serves the conversations "well" and, at the start, "Hello"."""
    return whole(folder, "{% if messages[0].content in ('well', 'Hello') %}well{% else %}" + template + "{% endif %}",
                 seconds)


def whole(folder: Path, template: str, seconds: float = 0.4) -> TemplateProcess:
    (folder / "chat_template.jinja").write_text(template)
    templates = read_templates(folder)
    assert templates
    return TemplateProcess(folder, templates, {}, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_render_of_an_endless_template_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With INVALID_ARGUMENT; the next conversation is served."""
    monkeypatch.setattr(template_process, "MAX_WALL_RATIO", 1000)  # on a loaded machine
    process = made(tmp_path, ENDLESS[name])
    with pytest.raises(InvalidField, match=r"^chat: the model's chat template must take at most 0.4 seconds"):
        process.render([TURN])
    assert process.render([{**TURN, "content": "well"}]) == "well"


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_render_of_a_template_with_huge_memory_is_refused(tmp_path: Path, name: str) -> None:
    process = made(tmp_path, HUGE[name], seconds=20)
    with pytest.raises(InvalidField, match=r"^chat: the model's chat template (fails on it: MemoryError|must take)"):
        process.render([TURN])
    assert process.render([{**TURN, "content": "well"}]) == "well"


@pytest.mark.slow
@pytest.mark.parametrize(("template", "message"), [
    ("{% if %}", "Expected an expression"),
    ("{% if 1 %}" * 500 + "{% endif %}" * 500, "RecursionError: "),
    ("{% if 1 %}" * 120 + "{% endif %}" * 120, "IndentationError: "),
    ("{{ 'a' * 10**9 * 8 }}", "(MemoryError|must take at most)"),
    ("{{ 7 ** (10 ** 8) }}", "must take at most 0.4 seconds of processor time"),
    (ENDLESS["a loop without output"], "must take at most 0.4 seconds of processor time"),
])
def test_start_of_a_template_that_cannot_be_compiled_names_its_file(
    tmp_path: Path, template: str, message: str
) -> None:
    process = whole(tmp_path, template)
    with pytest.raises(ConfigError, match=rf"^chat template of .*: chat_template\.jinja: .*{message}"):
        process.start()
    assert not process._idle


def test_start_of_a_named_template_that_cannot_be_compiled_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r": additional_chat_templates/tool_use\.jinja: Expected"):
        made(tmp_path, ECHO).start()


def test_load_template_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of the caller, which a template could end."""
    def compile_template(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(jinja2.Environment, "compile", compile_template)
    monkeypatch.setattr(jinja2.Environment, "parse", compile_template)
    source = CHAT_TEMPLATE + "{% if messages[0].role == 'developer' %}<think>{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    process = load_template_process(tmp_path, {})
    assert process
    assert (process.roles, process.format.has_reasoning) == ({"developer"}, True)
    assert process.render([TURN]) == "user:hi\na"


def test_start_without_a_further_process_is_unavailable_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = made(tmp_path, ECHO)
    with monkeypatch.context() as limited:
        limited.setattr(template_process, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read(1); exit(1)"))
        with pytest.raises(Unavailable, match="cannot start"):
            process.start()
    process.start()
    assert len(process._idle) == 1


def test_render_equals_chat_template(tmp_path: Path) -> None:
    """Including the field and the message of refusals."""
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE + "{{ tools | tojson }}{{ bos_token }}")
    named = {"bos_token": "<s>"}
    own = ChatTemplate((tmp_path / "chat_template.jinja").read_text(), named)
    process = load_template_process(tmp_path, named)
    assert process
    turns = [{"role": "user", "content": "ünïcode \n 😀 " * 1000}, {"role": "assistant", "content": None}]
    tool = {"name": "f", "b": 1, "a": 2}
    for arguments in ((turns,), (turns, {"extra": [1, 2.5, None, "x"]}), (turns, None, [tool])):
        assert process.render(*arguments) == own.render(*arguments)
    for arguments in (([],), (turns, {"messages": 1}), (turns, {"add_generation_prompt": 1})):
        with pytest.raises(InvalidField) as expected:
            own.render(*arguments)
        with pytest.raises(InvalidField) as found:
            process.render(*arguments)
        assert (found.value.field, found.value.message) == (expected.value.field, expected.value.message)
    assert load_template_process(tmp_path / "none", {}) is None


def test_render_of_deep_nesting_is_refused(tmp_path: Path) -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidField, match="chat: is nested too deeply"):
        made(tmp_path, ECHO).render([TURN], {"x": deep})


def test_render_without_a_further_process_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(sandbox: Sandbox, command: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    process = made(tmp_path, ECHO, seconds=20)
    with monkeypatch.context() as limited:
        limited.setattr(Sandbox, "__init__", start)
        with pytest.raises(Unavailable, match="cannot start: Too many open files"):
            process.start()
        with pytest.raises(Unavailable, match="cannot start: Too many open files"):
            process.render([TURN])
    assert process.render([TURN]) == "hi"


def test_render_in_a_process_that_ends_before_it_has_started_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has too little memory to import its modules."""
    process = made(tmp_path, ECHO, seconds=20)
    with monkeypatch.context() as limited:
        limited.setattr(template_process, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read(1); exit(1)"))
        with pytest.raises(Unavailable, match="cannot start"):
            process.render([TURN])
    assert process.render([TURN]) == "hi"


@pytest.mark.parametrize("is_started", [True, False])
def test_render_in_a_process_that_is_killed_is_unavailable(
    is_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(sandbox: Sandbox, message: bytes, seconds: float) -> bytes | None:
        os.kill(sandbox.pid, signal.SIGKILL)
        return call(sandbox, message, seconds)

    process = made(tmp_path, ECHO, seconds=20)
    call = Sandbox.call
    if is_started:
        process.start()
    with monkeypatch.context() as killing:
        killing.setattr(Sandbox, "call", killed)
        with pytest.raises(Unavailable, match="was killed"):
            process.render([TURN])
    assert process.render([TURN]) == "hi"


def test_render_in_a_process_that_is_stopped_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own timers do not run then."""
    process = made(tmp_path, ECHO, seconds=20)
    process.start()
    os.kill(process._idle[0].pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(template_process, "MAX_WALL_RATIO", 0.01)
        with pytest.raises(Unavailable, match="was killed"):
            process.render([TURN])
    assert process.render([TURN]) == "hi"


def test_roles_after_a_conversation_are_those_of_the_template(tmp_path: Path) -> None:
    """The conversation has started a process, whose description is not kept."""
    process = made(tmp_path, ECHO)
    assert process.render([TURN]) == "hi"
    assert process.roles == ChatTemplate(ECHO, {}).roles


@pytest.mark.slow
def test_render_from_two_threads_uses_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a process; processes are reused."""
    monkeypatch.setattr(template_process, "MAX_WALL_RATIO", 1000)  # on a loaded machine
    process = made(tmp_path, ENDLESS["a loop without output"], seconds=1.5)
    process.start()
    ended: list[str] = []

    def ask() -> None:
        with pytest.raises(InvalidField):
            process.render([TURN])
        ended.append("endless")

    thread = threading.Thread(target=ask)
    thread.start()
    assert process.render([{**TURN, "content": "well"}]) == "well"
    assert not ended
    thread.join(100)
    assert ended == ["endless"]
    assert len(process._idle) == 1


def test_template_process_environment_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NPUSERVE_API_KEYS", "/secret")
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    process = made(tmp_path, ECHO)
    assert process.render([TURN]) == "hi"
    variables = Path(f"/proc/{process._idle[0].pid}/environ").read_bytes().split(b"\0")
    assert b"TZ=Asia/Shanghai" in variables
    assert {variable.partition(b"=")[0].decode() for variable in variables if variable} <= KEPT_VARIABLES


def test_template_process_replaces_a_killed_process_and_ends_with_its_owner(tmp_path: Path) -> None:
    process = made(tmp_path, ECHO)
    assert process.render([TURN]) == "hi"
    first = process._idle[0]
    os.kill(first.pid, signal.SIGKILL)
    first._process.wait()
    assert process.render([TURN]) == "hi"
    second = process._idle[0]._process
    assert second.pid != first.pid
    del process
    deadline = time.monotonic() + 60
    while second.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_template_process_whose_front_end_ends_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(ECHO)
    process = subprocess.Popen(
        template_process.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    start = json.dumps({"folder": str(tmp_path), "files": "", "named_tokens": {}, "seconds": 1.0}).encode()
    assert process.communicate(struct.pack("<I", len(start)) + start)[1] == b""
    assert process.returncode == -signal.SIGPIPE
