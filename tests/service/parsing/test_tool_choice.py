"""Tools and tool choice of requests: the prompt, the constraint, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npuserve.service.errors import InvalidField, NoChatTemplate, UnknownAnswerFormat
from npuserve.service.parsing.parameter_types import FunctionTypes
from npuserve.service.requests import validation
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.text.answer_format import PLAIN, AnswerFormat, template_format
from npuserve.service.text.model_folder import ModelFolder, open_folder
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2
from tests.support.fake_engine import INFO, make_folder

TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor -%}
assistant: {{ opened }}{%- if false %}<think></think><tool_call>{"name": "f", "arguments": {}}</tool_call>{% endif %}"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
         {"type": "function", "function": {"name": "time", "description": "now"}}]
LARGE = INFO.__class__(**{name: getattr(INFO, name) for name in INFO.__struct_fields__} | {"max_model_len": 4096})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Folder whose template knows tool calls and reasoning."""
    return templated(tmp_path_factory.mktemp("model"), TEMPLATE)


def templated(path: Path, template: str) -> ModelFolder:
    made = make_folder(path, chat=True)
    config = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return open_folder(made, str(made), "counting")


def asked(
    tools: list[Any] = TOOLS, mode: int | None = None, name: str | None = None, opened: str = "", parse: bool = False,
    **fields: Any,
) -> pb.GenerateRequest:
    made = pb.GenerateRequest(**fields)
    made.chat.messages.add(role="user", content="a")
    made.chat.tools.extend(tool if isinstance(tool, str) else json.dumps(tool) for tool in tools)
    made.chat.template_args["opened"] = opened
    if mode is not None:
        made.chat.tool_choice.mode = mode  # type: ignore[assignment]
    if name is not None:
        made.chat.tool_choice.name = name
    made.output.parse_output = parse
    return made


def check(message: pb.GenerateRequest, folder: ModelFolder) -> CheckedRequest:
    return validation.check(message, folder, LARGE, "id-1", 1.0)


def prompt(message: pb.GenerateRequest, folder: ModelFolder) -> str:
    assert folder.tokenizer
    return folder.tokenizer.decode(check(message, folder).request.prompt_ids)


REQUIRED, NONE = prompt_pb2.TOOL_CHOICE_MODE_REQUIRED, prompt_pb2.TOOL_CHOICE_MODE_NONE
AUTO, UNSPECIFIED = prompt_pb2.TOOL_CHOICE_MODE_AUTO, prompt_pb2.TOOL_CHOICE_MODE_UNSPECIFIED


def test_tools_are_in_the_prompt_except_with_none(folder: ModelFolder) -> None:
    for message in (asked(), asked(mode=AUTO), asked(mode=UNSPECIFIED), asked(mode=REQUIRED), asked(name="time")):
        assert prompt(message, folder).count('"name":') == 2
    assert prompt(asked(mode=NONE), folder) == prompt(asked(tools=[]), folder)


def test_only_required_and_a_name_make_a_constraint(folder: ModelFolder) -> None:
    for message in (asked(), asked(mode=AUTO), asked(mode=UNSPECIFIED), asked(mode=NONE), asked(tools=[], mode=AUTO)):
        assert check(message, folder).request.constraint is None


def call_tag(index: int, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "x-field": f"chat.tools[{index}].function.parameters"}
    return {"type": "tag", "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ', "content": content,
            "end": "}\n</tool_call>"}


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY = {"type": "tags_with_separator", "tags": [call_tag(0, "weather", SCHEMA), call_tag(1, "time", NO_ARGUMENTS)],
       "separator": "\n", "at_least_one": True, "stop_after_first": False}


@pytest.mark.parametrize(("opened", "begin"), [("", "<think>"), ("<think>\n", ""), ("<think>\n\n</think>\n\n", None)])
def test_required_makes_a_structural_tag(folder: ModelFolder, opened: str, begin: str | None) -> None:
    found = check(asked(mode=REQUIRED, opened=opened), folder).request.constraint
    assert found
    assert (found.kind, found.field) == ("structural_tag", "chat.tools")
    expected: dict[str, Any] = ANY
    if begin is not None:
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</think>"}
        first = {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "\n\n"}]}
        expected = {"type": "sequence", "elements": [{"type": "optional", "content": first} if begin else first, ANY]}
    assert json.loads(found.text) == {"type": "structural_tag", "format": expected}


def test_a_name_makes_a_tag_of_one_call(folder: ModelFolder) -> None:
    found = check(asked(name="weather", opened="<think></think>"), folder).request.constraint
    assert found
    tag = json.loads(found.text)["format"]
    assert (tag["tags"], tag["stop_after_first"]) == ([call_tag(0, "weather", SCHEMA)], True)


def test_schema_without_a_type_is_that_of_an_object(folder: ModelFolder) -> None:
    tool = {"function": {"name": 'a "b"', "parameters": {"properties": {"x": {}}}}}
    found = check(asked([tool], mode=REQUIRED, opened="<think></think>"), folder).request.constraint
    assert found
    (tag,) = json.loads(found.text)["format"]["tags"]
    assert tag["begin"] == '<tool_call>\n{"name": "a \\"b\\"", "arguments": '
    assert tag["content"]["json_schema"] == {"type": "object", "properties": {"x": {}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


INVALID = {
    "required without tools": (asked([], mode=REQUIRED), "chat.tool_choice.mode: needs chat.tools"),
    "name without tools": (asked([], name="f"), "chat.tool_choice.name: needs chat.tools"),
    "name of no tool": (asked(name="Time"), "chat.tool_choice.name: must be the name of a tool ('time', 'weather'), "
                                            "got 'Time'"),
    "unknown mode": (asked(mode=9), "chat.tool_choice.mode: must be one of TOOL_CHOICE_MODE_UNSPECIFIED, "),
    "tool without a function": (asked([{"name": "f"}]), "chat.tools[0].function.name: must be a text"),
    "tool without a name": (asked([TOOLS[0], tool(parameters={})]), "chat.tools[1].function.name: must be a text"),
    "tool with an empty name": (asked([tool(name="")]), "chat.tools[0].function.name: must be a text"),
    "tools of one name": (asked([tool(name="f"), tool(name="f")]), "chat.tools[1].function.name: must differ from"),
    "parameters that are a list": (
        asked([tool(name="f", parameters=[])]), "chat.tools[0].function.parameters: must be a JSON schema"),
    "parameters of another type": (
        asked([tool(name="f", parameters={"type": "array"})]), "chat.tools[0].function.parameters.type: must be \"obj"),
    "required with a constraint": (
        asked(mode=REQUIRED, regex="a"), "chat.tool_choice: must not be required or a name together with regex"),
    "large schemas": (asked([tool(name="f", parameters={"description": "x" * 70_000})], mode=REQUIRED),
                      "chat.tools: must make a constraint of at most 65536 bytes, got 70"),
    "parse_output of a text": (
        pb.GenerateRequest(text="a", output=pb.OutputParams(parse_output=True)), "output.parse_output: needs a chat"),
}


@pytest.mark.parametrize("case", INVALID)
def test_check_of_bad_tools_names_the_field(folder: ModelFolder, case: str) -> None:
    message, expected = INVALID[case]
    info = LARGE
    if case == "large schemas":
        info = info.__class__(
            **{name: getattr(info, name) for name in info.__struct_fields__} | {"max_model_len": 1 << 20})
    with pytest.raises(InvalidField) as refused:
        validation.check(message, folder, info, "id-1", 1.0)
    assert expected in refused.value.message


def test_format_that_the_server_does_not_know_is_a_failed_precondition(tmp_path: Path) -> None:
    plain = open_folder(make_folder(tmp_path / "a", chat=True), "a", "counting")
    with pytest.raises(UnknownAnswerFormat, match=r"^chat\.tool_choice: the served model"):
        check(asked(mode=REQUIRED), plain)
    with pytest.raises(UnknownAnswerFormat, match=r"^output\.parse_output: the served model"):
        check(asked(parse=True), plain)
    assert check(asked(mode=AUTO), plain).answer_format == PLAIN
    assert UnknownAnswerFormat.code == NoChatTemplate.code
    without = open_folder(make_folder(tmp_path / "b", chat=False), "b", "counting")
    with pytest.raises(NoChatTemplate):
        check(asked(mode=REQUIRED, parse=True), without)


def test_parse_output_takes_the_format_of_the_template(folder: ModelFolder) -> None:
    assert check(asked(), folder).answer_format == PLAIN
    checked = check(asked(parse=True), folder)
    assert checked.answer_format == AnswerFormat(True, True)
    assert len(checked.call_id) == 16
    assert check(asked(parse=True), folder).call_id != checked.call_id
    assert check(asked(parse=True, mode=NONE), folder).answer_format == AnswerFormat(True, False)


THOUGHT = '{"format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}}'


@pytest.mark.parametrize(("opened", "fields", "has_reasoning"), [
    ("<think>\n", {"json_object": True}, False), ("<think>\n", {"regex": "a+"}, False),
    ("<think>\n", {"regex": "[ab]+</think>a"}, True), ("", {"regex": "a+"}, True), ("<think>\n", {}, True),
    ("<think>\n", {"structural_tag": THOUGHT}, True),
    ("<think>\n", {"structural_tag": THOUGHT.replace("/", "|")}, False),
    ("<think>\n", {"structural_tag": THOUGHT.replace("/", "\\/")}, True),  # as PHP writes it
    ("<think>\n", {"structural_tag": THOUGHT.replace("<", "\\u003c").replace(">", "\\u003e")}, True),  # as Go does
])
def test_constraint_after_an_open_tag_leaves_no_reasoning(
    folder: ModelFolder, opened: str, fields: dict[str, Any], has_reasoning: bool
) -> None:
    checked = check(asked(parse=True, opened=opened, **fields), folder)
    assert checked.answer_format == AnswerFormat(has_reasoning, True)


@pytest.mark.parametrize(("template", "rendered"), [
    ("{{ call.function.arguments | tojson }}", '{"a": 1}'),
    ("{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}",
     '{"a":1}'),
    ("{{ call.function.arguments }}", '{"a":1}'),
    ("{{ call['function']['arguments'] | tojson }}", '{"a": 1}'),
])
def test_arguments_of_a_call_are_an_object_where_the_template_writes_json(
    tmp_path: Path, template: str, rendered: str
) -> None:
    calls = "{% for call in message.tool_calls or [] %}" + template + "{% endfor %}"
    source = "{% for message in messages %}" + calls + "{% endfor %}"
    made = pb.GenerateRequest()
    for arguments in ('{"a":1}', "cut", {"b": 2}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        made.chat.messages.add(role="assistant", tool_calls=[json.dumps(call)])
    cut, object_ = ('"cut"', '{"b": 2}') if "if" not in template and "tojson" in template else ("cut", '{"b": 2}')
    if "tojson" not in template:
        object_ = "{'b': 2}"
    assert prompt(made, templated(tmp_path, source)) == rendered + cut + object_


@pytest.mark.slow
@pytest.mark.parametrize(("template", "rendered"), [
    ("{% for name, value in call.function.arguments|items %}{{ name }}={{ value }} {% endfor %}", "a=1 b=x "),
    ("{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }} {% endfor %}", "a=1 b=x "),
    ("{% set f = call.function %}{% if f.arguments is mapping %}{%- for name in f.arguments -%}"
     "{{ name }}={{ f.arguments[name] }} {% endfor %}{% endif %}", "a=1 b=x "),
    ("{% for name, value in call['function']['arguments'].items() %}{{ name }}={{ value }} {% endfor %}", "a=1 b=x "),
    ("{{ call.function | tojson }}", '{"name": "f", "arguments": {"a": 1, "b": "x"}}'),
    ("{{ messages[0]['tool_calls'] | tojson }}",
     '[{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}]'),
    ("{% set tool_call = call.function %}{{ tool_call|tojson }}", '{"name": "f", "arguments": {"a": 1, "b": "x"}}'),
])
def test_arguments_of_a_call_are_an_object_where_the_template_reads_them(
    tmp_path: Path, template: str, rendered: str
) -> None:
    source = "{% for call in messages[0].tool_calls %}" + template + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}
    made = pb.GenerateRequest()
    made.chat.messages.add(role="assistant", tool_calls=[json.dumps(call)])
    assert prompt(made, templated(tmp_path, source)) == rendered


@pytest.mark.parametrize("function", [{"arguments": ""}, {"arguments": None}, {}])
@pytest.mark.parametrize("template", [
    "{{ call.function.arguments }}", "{{ call.function.arguments | tojson }}",
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}",
])
def test_call_without_arguments_has_an_empty_object(tmp_path: Path, template: str, function: dict[str, Any]) -> None:
    made = pb.GenerateRequest()
    made.chat.messages.add(role="assistant", tool_calls=[json.dumps({"function": {"name": "f", **function}})])
    source = "{% for call in messages[0].tool_calls %}" + template + "{% endfor %}"
    assert prompt(made, templated(tmp_path, source)) == "{}"


@pytest.mark.parametrize(("source", "expected"), [
    ("{{ messages }}", PLAIN),
    ("{{ tool | tojson }}{{ tool.function | tojson }}{{ call.function.arguments }}", PLAIN),
    ("<tool_call>{{ call.arguments | tojson }}", AnswerFormat(False, False, True)),
    ("<think>", AnswerFormat(True, False)),
    ("{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}", AnswerFormat(True, False)),
    ("{{- '<tool_call>\\n{\"name\": \"' + name + '\", \"arguments\": ' }}", AnswerFormat(False, True)),
    ('"<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <json>}"', AnswerFormat(False, True)),
    ("<tool_call>\n<function={{ name }}>{{ arguments }}</function>", PLAIN),
    ("<function={{ name }}><parameter={{ key }}>", PLAIN),
    ("{{- '<tool_call>\n<function=' + call.name + '>\n' }}{%- for key, value in call.arguments|items %}"
     "{{- '<parameter=' + key + '>\n' }}{% endfor %}", AnswerFormat(False, True, True, True)),
    ('<tool_call><function=f><parameter=a> {"name": "f", "arguments": {}}', AnswerFormat(False, True, False, True)),
])
def test_template_format_follows_the_source(source: str, expected: AnswerFormat) -> None:
    assert template_format(source) == expected


TAGGED = TEMPLATE.replace('{"name": "f", "arguments": {}}', "<function=f><parameter=a></parameter></function>")


def test_tagged_arguments_have_their_own_constraint_and_types(tmp_path: Path) -> None:
    folder = templated(tmp_path, TAGGED)
    checked = check(asked(mode=REQUIRED, parse=True, opened="<think></think>"), folder)
    assert checked.answer_format == AnswerFormat(True, True, False, True)
    assert checked.call_types == {
        "weather": FunctionTypes({"city": ("string",)}), "time": FunctionTypes({})}
    assert checked.request.constraint
    content = {"type": "json_schema", "json_schema": SCHEMA, "x-field": "chat.tools[0].function.parameters",
               "style": "qwen_xml"}
    first, second = json.loads(checked.request.constraint.text)["format"]["tags"]
    assert first == {"type": "tag", "begin": "<tool_call>\n<function=weather>\n", "content": content,
                     "end": "</function>\n</tool_call>"}
    assert second["content"]["json_schema"] == NO_ARGUMENTS
    assert check(asked(parse=True, mode=AUTO), folder).request.constraint is None
    assert not check(asked(parse=True, mode=NONE), folder).answer_format.has_tool_calls
    assert not check(asked(), folder).call_types


def test_name_that_cannot_be_a_tag_is_refused_for_a_required_call(tmp_path: Path) -> None:
    tools = [tool(name="f"), tool(name="a>b")]
    assert check(asked(tools), templated(tmp_path, TAGGED))
    with pytest.raises(InvalidField) as refused:
        check(asked(tools, mode=REQUIRED), templated(tmp_path, TAGGED))
    assert "chat.tools[1].function.name: must have no <, > or line feed" in refused.value.message
