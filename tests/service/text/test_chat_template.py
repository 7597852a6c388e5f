from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.errors import InvalidField
from npuserve.service.text import chat_template
from npuserve.service.text.chat_template import REFUSED_ARGS, ChatTemplate, from_json, from_struct, load_chat_template
from npuserve.service.text.tokenizer import load_tokenizer
from tests.support.real_models import model_folder
from tests.support.tokenizers import save, train

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


def oracle(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def check_equal(folder: Path) -> None:
    """The same text as transformers' for all conversations, arguments and tools; and the same refusals."""
    loaded, theirs = load_tokenizer(folder), oracle(folder)
    assert loaded is not None
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


def test_chatml_equals_transformers(tmp_path: Path) -> None:
    check_equal(made_folder(tmp_path, CHATML))


def test_named_templates_equal_transformers(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T " + CHATML}]
    check_equal(made_folder(tmp_path, named))


def test_template_files_equal_transformers(tmp_path: Path) -> None:
    folder = made_folder(tmp_path, "the configuration's, which the files outdo")
    (folder / "chat_template.jinja").write_text(CHATML)
    check_equal(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T " + CHATML)
    check_equal(folder)


@pytest.mark.model
@pytest.mark.parametrize("name", ["../tokenizers/qwen3", "minimind2-small"])
def test_real_templates_equal_transformers(name: str) -> None:
    check_equal(model_folder(name))


def test_what_it_makes() -> None:
    """By hand, so that the oracle is not alone."""
    template = ChatTemplate(CHATML, {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<i>"})
    text = template.render([{"role": "user", "content": "Hi"}], {"enable_thinking": False})
    assert text == "<|im_start|>user\nHi</s>\n\n1 <s><i> None none\n<|im_start|>assistant\n<think></think>"


def test_chat_template_json(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([{"role": "user", "content": "Hi"}]) == "Hi!"


USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("key", sorted(REFUSED_ARGS | {"image_token"}))
def test_refused_arguments(key: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {"image_token": "<image>"})
    with pytest.raises(InvalidField, match=rf"^chat\.template_args\.{key}: is not for the client to set"):
        template.render(USER, {key: "x"})


@pytest.mark.parametrize(("template", "says"), [
    ("{{ raise_exception('roles must alternate') }}", "the model's chat template refuses it: roles must alternate"),
    ("{{ messages[3].content }}", "refuses it: .*has no element 3"),
    ("{{ messages.append(1) }}", "refuses it: access to attribute 'append'"),
    ("{{ ''.__class__.__mro__ }}", "refuses it: access to attribute '__class__'"),
    ("{{ missing | tojson }}", "fails on it: TypeError: "),
    ("{{ 1 // 0 }}", "fails on it: ZeroDivisionError"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on it: OverflowError: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on it: RecursionError"),
])
def test_failing_templates(template: str, says: str) -> None:
    with pytest.raises(InvalidField, match=f"^chat: .*{says}"):
        ChatTemplate(template).render(USER)


def test_no_messages_and_a_bad_add_generation_prompt() -> None:
    template = ChatTemplate("x")
    with pytest.raises(InvalidField, match=r"^chat\.messages: must have at least one"):
        template.render([])
    with pytest.raises(InvalidField, match=r"^chat\.template_args\.add_generation_prompt: must be true or false"):
        template.render(USER, {"add_generation_prompt": 1})


def test_size_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = ChatTemplate("{% for i in range(100000) %}{{ messages[0].content * 9 }}{% endfor %}")
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidField, match=r"^chat: must make a prompt of at most 1000 characters"):
        loop.render(USER)
    assert len(ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "x" * 1000}])) == 1000
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.0)
    with pytest.raises(InvalidField, match=r"^chat: the chat template must take at most 0 seconds"):
        loop.render(USER)


@pytest.mark.parametrize(("templates", "says"), [
    ("{% if %}", "chat template: "), ("{% nope %}", "unknown tag 'nope'"),
    ({"rag": "x"}, "none of .*rag.* is named default"),
])
def test_broken_templates_are_refused_at_once(templates: str | dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ChatTemplate(templates)


def test_the_generation_tag_has_its_own_scope_and_no_other_effect() -> None:
    template = ChatTemplate("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}")
    assert template.render(USER) == "21"


def test_strftime_now() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}").render(USER)
    assert text.isdigit()
    assert len(text) == 4


def test_threads_do_not_mix_their_conversations() -> None:
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


plain = st.recursive(
    st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.sampled_from([None, True, False, 0.5, -1e-9, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), plain, max_size=3))
def test_from_struct_gives_the_json_back(value: dict[str, Any]) -> None:
    back = from_struct(json_format.ParseDict(value, struct_pb2.Struct()), "chat.template_args")
    assert back == value
    assert json.dumps(back, sort_keys=True) == json.dumps(value, sort_keys=True)  # 1 is not 1.0


@pytest.mark.parametrize("tool", [*TOOLS, CALL])
def test_from_json_keeps_the_order(tool: dict[str, Any]) -> None:
    for value in (tool, dict(reversed(tool.items()))):
        assert json.dumps(from_json(json.dumps(value), "chat.tools[0]")) == json.dumps(value)


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "null", "{", '{"a": NaN}', "{'a': 1}", "[" * 100_000])
def test_from_json_refuses_what_is_no_object(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^chat\.tools\[3\]: must be the text of a JSON object"):
        from_json(text, "chat.tools[3]")


def test_from_struct_numbers() -> None:
    struct = struct_pb2.Struct()
    struct.update({"one": 1.0, "half": 0.5, "big": 1e300, "negative": -3.0})
    plain = from_struct(struct, "x")
    assert repr(plain) == "{'big': 1e+300, 'half': 0.5, 'negative': -3, 'one': 1}"
    struct.fields["unset"].SetInParent()
    assert from_struct(struct, "x")["unset"] is None
    struct.fields["list"].list_value.values.add().number_value = float("nan")
    with pytest.raises(InvalidField, match=r"^chat\.template_args\.list\[0\]: must be a finite number, got nan"):
        from_struct(struct, "chat.template_args")


@pytest.mark.parametrize(("template", "roles"), [
    (CHATML, {"skip", "system", "user", "assistant", "tool"}),
    ("{% for m in messages %}{{ m.role }}{% endfor %}", set()),
    ("{% if messages[0]['role'] == \"developer\" %}{% endif %}", {"developer"}),
    ("{% set role = messages[0].role %}{% if role != 'observation' and 'x' == 'y' %}{% endif %}", {"observation"}),
    ("{% if m.role in ('ipython', 'tool') or m.content == 'no' %}{% endif %}", {"ipython", "tool"}),
])
def test_roles_are_those_that_the_template_compares(template: str, roles: set[str]) -> None:
    assert ChatTemplate(template).roles == roles
    assert ChatTemplate({"default": "", "tool_use": template}).roles == roles


@pytest.mark.parametrize("text", [r'{"a": "\ud800"}', r'{"\uDBFF": 1}', r'{"a": [{"b": "x\udc00\ud800"}]}'])
def test_from_json_with_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^f: must be valid Unicode, got the lone surrogate U\+D[89A-F]"):
        from_json(text, "f")


def test_from_json_with_a_surrogate_pair_is_one_character() -> None:
    assert from_json(r'{"\ud83d\ude00": "\\ud800"}', "f") == {"😀": r"\ud800"}
