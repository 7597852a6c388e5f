"""Constraints of requests: what the engine gets, and the message of each bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npuserve.service.errors import InvalidField, NoTokenizer
from npuserve.service.requests import validation
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.text.model_folder import ModelFolder, open_folder
from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import INFO, make_folder
from tests.support.front_end import ask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = make_folder(tmp_path_factory.mktemp("model"))
    return open_folder(path, str(path), "counting")


def constraint(message: pb.GenerateRequest, folder: ModelFolder) -> Constraint | None:
    return validation.check(message, folder, INFO, "id-1", 12.5).request.constraint


def choosing(*choices: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", choices=pb.Choices(choices=choices))


SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["\\u00fc", "\\ud83d\\ude00", 1e3, null]}}}'
TAG = '{"type": "structural_tag", "format": {"type": "any_text"}}'
DEEP = '{"items": ' * 255 + "{}" + "}" * 255


@pytest.mark.parametrize(("message", "expected"), [
    (ask(), None),
    (ask(json_object=False), None),
    (ask(json_object=True), Constraint("json_object", "")),
    (ask(json_schema=SCHEMA), Constraint("json_schema", SCHEMA)),
    (ask(json_schema="true"), Constraint("json_schema", "true")),
    (ask(json_schema=DEEP), Constraint("json_schema", DEEP)),
    (ask(json_schema='{"a": "' + "x" * 65527 + '"}'), Constraint("json_schema", '{"a": "' + "x" * 65527 + '"}')),
    (ask(regex="a*"), Constraint("regex", "a*")),
    (ask(regex=" "), Constraint("regex", " ")),
    (ask(grammar='root ::= "ü"'), Constraint("grammar", 'root ::= "ü"')),
    (ask(structural_tag=TAG), Constraint("structural_tag", TAG)),
    (choosing("yes", "no", "ü\n\""), Constraint("choices", '["yes", "no", "ü\\n\\""]')),
    (choosing(*map(str, range(1024))), Constraint("choices", json.dumps([str(i) for i in range(1024)]))),
    (choosing("😀" * 1024), Constraint("choices", json.dumps(["😀" * 1024], ensure_ascii=False))),
])
def test_check_constraint_passes_it_to_the_engine(
    message: pb.GenerateRequest, expected: Constraint | None, folder: ModelFolder
) -> None:
    assert constraint(message, folder) == expected


NOT_JSON = "must be the text of a JSON object or a boolean"
INVALID = {
    "large schema": (
        ask(json_schema='{"a": "' + "ü" * 32764 + '"}'), "json_schema: must be at most 65536 bytes, got 65537"),
    "large regex": (ask(regex="a" * 65537), "regex: must be at most 65536 bytes, got 65537"),
    "large grammar": (ask(grammar="é" * 40_000), "grammar: must be at most 65536 bytes, got 80000"),
    "large tag": (ask(structural_tag="[" * 65537), "structural_tag: must be at most 65536 bytes, got 65537"),
    "large choices": (choosing(*["x" * 1000] * 70), "choices: must be at most 65536 bytes, got 70210"),
    "empty schema": (ask(json_schema=""), f"json_schema: {NOT_JSON}: Expecting value: line 1 column 1 (char 0)"),
    "schema that is cut": (
        ask(json_schema='{"type":'), f"json_schema: {NOT_JSON}: Expecting value: line 1 column 9 (char 8)"),
    "schema of JavaScript": (ask(json_schema='{"minimum": NaN}'), f"json_schema: {NOT_JSON}: NaN is no JSON"),
    "schema that is a list": (ask(json_schema="[{}]"), f"json_schema: {NOT_JSON}, got list"),
    "schema that is a number": (ask(json_schema="1"), f"json_schema: {NOT_JSON}, got int"),
    "schema that is null": (ask(json_schema="null"), f"json_schema: {NOT_JSON}, got NoneType"),
    "surrogate in a schema": (
        ask(json_schema='{"const": "\\ud800"}'), "json_schema: must be valid Unicode, got the lone surrogate U+D800"),
    "deep schema": (ask(json_schema=f'{{"items": {DEEP}}}'), "json_schema: must be nested at most 256 deep"),
    "deep list in a schema": (
        ask(json_schema='{"enum": ' + "[" * 256 + "]" * 256 + "}"), "json_schema: must be nested at most 256 deep"),
    "empty regex": (ask(regex=""), "regex: must not be empty"),
    "empty grammar": (ask(grammar=""), "grammar: must not be empty"),
    "empty tag": (
        ask(structural_tag=""),
        "structural_tag: must be the text of a JSON object: Expecting value: line 1 column 1 (char 0)"),
    "tag that is a boolean": (
        ask(structural_tag="true"), "structural_tag: must be the text of a JSON object, got bool"),
    "surrogate in a tag": (
        ask(structural_tag='{"\\udfff": 1}'), "structural_tag: must be valid Unicode, got the lone surrogate U+DFFF"),
    "deep tag": (
        ask(structural_tag='{"a": ' * 257 + "1" + "}" * 257), "structural_tag: must be nested at most 256 deep"),
    "no choices": (choosing(), "choices.choices: must be 1 to 1024 strings, got 0"),
    "many choices": (choosing(*map(str, range(1025))), "choices.choices: must be 1 to 1024 strings, got 1025"),
    "empty choice": (choosing("a", ""), "choices.choices[1]: must be 1 to 1024 characters, got 0"),
    "long choice": (choosing("a" * 1025), "choices.choices[0]: must be 1 to 1024 characters, got 1025"),
    "equal choices": (
        choosing("a", "b", "a", "a"),
        "choices.choices[2]: must differ from the others; string 0 is 'a' too; "
        "choices.choices[3]: must differ from the others; string 0 is 'a' too"),
    "allowed ids too": (
        ask(json_object=True, allowed_token_ids=[1]),
        "sampling.allowed_token_ids: must be empty if json_object is set"),
    "with another bad field": (
        ask(regex="", top_p=2), "sampling.top_p: must be in (0, 1], got 2; regex: must not be empty"),
}


@pytest.mark.parametrize("name", INVALID)
def test_check_constraint_that_is_bad_is_refused(name: str, folder: ModelFolder) -> None:
    message, text = INVALID[name]
    with pytest.raises(InvalidField) as refused:
        constraint(message, folder)
    assert refused.value.message == text


@pytest.mark.parametrize("nesting", ["[", '{"a":'])
def test_check_constraint_nested_without_end_is_refused(nesting: str, folder: ModelFolder) -> None:
    """The parser's own limit of recursion is not a crash."""
    count = 65_000 // len(nesting)
    closing = "]" if nesting == "[" else "}"
    for text in (nesting * count, nesting * (count // 2) + "1" + closing * (count // 2)):
        with pytest.raises(InvalidField, match=r"^json_schema: must be "):
            constraint(ask(json_schema=text), folder)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar", "structural_tag", "json_object"])
def test_check_constraint_without_a_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "m", tokenizer=False)
    ids_only = open_folder(path, str(path), "counting")
    with pytest.raises(NoTokenizer) as refused:
        constraint(ask([1], **{kind: True if kind == "json_object" else "{}"}), ids_only)
    reason = "the served model has no tokenizer, and a constraint needs the text of tokens"
    assert refused.value.message == f"{kind}: {reason}"
    assert constraint(ask([1], json_object=False), ids_only) is None
