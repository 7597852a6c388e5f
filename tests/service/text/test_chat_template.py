from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from npuserve.service.errors import InvalidField
from npuserve.service.text import chat_template
from npuserve.service.text.chat_template import REFUSED_ARGS, ChatTemplate, load_chat_template
from tests.support.real_models import model_folder
from tests.support.tokenizers import load, save, train, transformers_tokenizer

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\\n" }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{ raise_exception('unknown role: ' + message.role) }}
    {% endif %}
    {{- '<|im_start|>' + message.role + ('(' + message.name + ')' if message.name is defined else '') + '\\n' }}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson(indent=2) }}}
    {%- endfor %}
    {{- eos_token + '\\n' }}
{% endfor %}
{%- set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}
{{- ns.count }} {{ bos_token }}{{ image_token }} {{ documents }} {{ extra | default('none') }}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <b>", "days": 3}}}
TEXT_CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "It's <b>the</b> weather & more: 你好", "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 7, "x": 0.5}},
            "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <|im_end|> & <b>'\"\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好", "name": "lily"}],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, TEXT_CALL], "reasoning_content": "\nask the tool\n"},
        {"role": "tool", "content": '{"sun": true}', "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "name": None},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSun."},
        {"role": "user", "content": "And now?"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "r"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "thinking": "t", "tool_calls": [CALL]},
     {"role": "tool", "content": "x"}],
]
ARGS: list[dict[str, Any]] = [
    {}, {"enable_thinking": False}, {"enable_thinking": True, "add_generation_prompt": False},
    {"extra": [1, 2.5, None]}, {"documents": [{"title": "t", "text": "x"}]},
]


def check_equal(folder: Path) -> None:
    """Compare texts and refusals with transformers, for all conversations, arguments and tools."""
    loaded, theirs = load(folder), transformers_tokenizer(folder)
    assert loaded.chat is not None
    rendered = 0
    for messages in CHATS:
        for arguments in ARGS:
            for tools in (None, TOOLS):
                all_arguments = {"add_generation_prompt": True, **arguments}
                try:
                    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, **all_arguments)
                except Exception:
                    with pytest.raises(InvalidField, match=r"^chat: "):
                        loaded.chat.render(messages, arguments, tools)
                    continue
                rendered += 1
                text = loaded.chat.render(messages, arguments, tools)
                assert text == expected
                ids = theirs.apply_chat_template(messages, tools=tools, return_dict=False, **all_arguments)
                assert loaded.encode(text, add_special_tokens=False) == ids
    assert rendered > len(CHATS)


def made_folder(tmp_path: Path, template: Any = None) -> Path:
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>",
        "image_token": "<image>",
    }
    return save(tmp_path, train(), {**config, "chat_template": template} if template else config)


def test_render_of_chatml_equals_transformers(tmp_path: Path) -> None:
    check_equal(made_folder(tmp_path, CHATML))


def test_render_of_named_templates_equals_transformers(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T " + CHATML}]
    check_equal(made_folder(tmp_path, named))


def test_render_of_template_files_equals_transformers(tmp_path: Path) -> None:
    folder = made_folder(tmp_path, "of tokenizer_config.json, which template files override")
    (folder / "chat_template.jinja").write_text(CHATML)
    check_equal(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T " + CHATML)
    check_equal(folder)


@pytest.mark.model
@pytest.mark.parametrize("name", ["../tokenizers/qwen3", "minimind2-small"])
def test_render_of_real_templates_equals_transformers(name: str) -> None:
    check_equal(model_folder(name))


def test_render_returns_the_text_written_by_hand() -> None:
    """Independent of transformers."""
    template = ChatTemplate(CHATML, {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<i>"})
    text = template.render([{"role": "user", "content": "Hi"}], {"enable_thinking": False})
    assert text == "<|im_start|>user\nHi</s>\n\n1 <s><i> None none\n<|im_start|>assistant\n<think></think>"


def test_load_chat_template_reads_chat_template_json(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([{"role": "user", "content": "Hi"}]) == "Hi!"


USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("key", sorted(REFUSED_ARGS | {"image_token"}))
def test_render_with_a_refused_argument_names_it(key: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {"image_token": "<image>"})
    with pytest.raises(InvalidField, match=rf"^chat\.template_args\.{key}: is not for the client to set"):
        template.render(USER, {key: "x"})


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('roles must alternate') }}", "the model's chat template refuses it: roles must alternate"),
    ("{{ messages[3].content }}", "refuses it: .*has no element 3"),
    ("{{ messages.append(1) }}", "refuses it: access to attribute 'append'"),
    ("{{ ''.__class__.__mro__ }}", "refuses it: access to attribute '__class__'"),
    ("{{ missing | tojson }}", "fails on it: TypeError: "),
    ("{{ 1 // 0 }}", "fails on it: ZeroDivisionError"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on it: OverflowError: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on it: RecursionError"),
])
def test_render_of_a_failing_template_is_refused(template: str, message: str) -> None:
    with pytest.raises(InvalidField, match=f"^chat: .*{message}"):
        ChatTemplate(template).render(USER)


def test_render_without_messages_or_with_a_bad_add_generation_prompt_is_refused() -> None:
    template = ChatTemplate("x")
    with pytest.raises(InvalidField, match=r"^chat\.messages: must have at least one"):
        template.render([])
    with pytest.raises(InvalidField, match=r"^chat\.template_args\.add_generation_prompt: must be true or false"):
        template.render(USER, {"add_generation_prompt": 1})


def test_render_bounds_size(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = ChatTemplate("{% for i in range(100000) %}{{ messages[0].content * 9 }}{% endfor %}")
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidField, match=r"^chat: must make a prompt of at most 1000 characters"):
        loop.render(USER)
    assert len(ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "x" * 1000}])) == 1000


@pytest.mark.parametrize(("templates", "message"), [
    ("{% if %}", "chat template: "), ("{% nope %}", "unknown tag 'nope'"),
    ({"rag": "x"}, "none of .*rag.* is named default"),
])
def test_chat_template_with_a_syntax_error_is_refused(templates: str | dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(templates)


def test_generation_tag_only_opens_a_scope() -> None:
    template = ChatTemplate("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}")
    assert template.render(USER) == "21"


def test_strftime_now_returns_the_year() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}").render(USER)
    assert text.isdigit()
    assert len(text) == 4


def test_render_from_several_threads_keeps_conversations_apart() -> None:
    template = ChatTemplate(CHATML, {"eos_token": ""})
    failures = []

    def render(name: str) -> None:
        for _ in range(50):
            if template.render([{"role": "user", "content": name}]).count(name) != 1:
                failures.append(name)

    threads = [threading.Thread(target=render, args=(f"name{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(("template", "roles"), [
    (CHATML, {"skip", "system", "user", "assistant", "tool"}),
    ("{% for m in messages %}{{ m.role }}{% endfor %}", set()),
    ("{% if messages[0]['role'] == \"developer\" %}{% endif %}", {"developer"}),
    ("{% set role = messages[0].role %}{% if role != 'observation' and 'x' == 'y' %}{% endif %}", {"observation"}),
    ("{% if m.role in ('ipython', 'tool') or m.content == 'no' %}{% endif %}", {"ipython", "tool"}),
])
def test_roles_are_the_strings_that_a_template_compares_with(template: str, roles: set[str]) -> None:
    assert ChatTemplate(template).roles == roles
    assert ChatTemplate({"default": "", "tool_use": template}).roles == roles
