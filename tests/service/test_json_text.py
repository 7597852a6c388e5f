"""JSON texts in fields of requests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from npuserve.service.errors import InvalidField
from npuserve.service.json_text import MAX_JSON_DEPTH, parse_json
from tests.service.text.test_chat_template import CALL, TOOLS


@pytest.mark.parametrize("tool", [*TOOLS, CALL])
def test_parse_json_keeps_the_order_of_keys(tool: dict[str, Any]) -> None:
    for value in (tool, dict(reversed(tool.items()))):
        assert json.dumps(parse_json(json.dumps(value), "chat.tools[0]")) == json.dumps(value)


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "null", "{", '{"a": NaN}', "{'a': 1}", '{"a": 1e999}',
                                  '{"a": [-1e400]}', "[" * 100_000])
def test_parse_json_of_other_values_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^chat\.tools\[3\]: must be the text of a JSON object"):
        parse_json(text, "chat.tools[3]")


@pytest.mark.parametrize("text", [r'{"a": "\ud800"}', r'{"\uDBFF": 1}', r'{"a": [{"b": "x\udc00\ud800"}]}'])
def test_parse_json_with_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^f: must be valid Unicode, got the lone surrogate U\+D[89A-F]"):
        parse_json(text, "f")


def test_parse_json_with_a_surrogate_pair_is_one_character() -> None:
    assert parse_json(r'{"\ud83d\ude00": "\\ud800"}', "f") == {"😀": r"\ud800"}


@pytest.mark.parametrize("depth", [256, 700])
def test_parse_json_nested_too_deeply_is_refused(depth: int) -> None:
    """A text that Python's decoder accepts may be nested too deeply for the functions that walk its values."""
    text = '{"a": ' * depth + "1" + "}" * depth
    if depth <= MAX_JSON_DEPTH:
        assert json.dumps(parse_json(text, "chat.tools[3]")) == text
        return
    with pytest.raises(InvalidField, match=re.escape("chat.tools[3]: must be nested at most 256 deep")):
        parse_json(text, "chat.tools[3]")
