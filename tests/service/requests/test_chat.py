"""JSON values of a chat: tools, tool calls and template arguments."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.errors import InvalidField
from npuserve.service.requests.chat import from_struct
from npuserve.service.requests.fields import MAX_JSON_DEPTH, parse_json
from tests.service.text.test_chat_template import CALL, TOOLS

json_values = st.recursive(
    st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.sampled_from([None, True, False, 0.5, -1e-9, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=3))
def test_from_struct_returns_the_original_json(value: dict[str, Any]) -> None:
    back = from_struct(json_format.ParseDict(value, struct_pb2.Struct()), "chat.template_args")
    assert back == value
    assert json.dumps(back, sort_keys=True) == json.dumps(value, sort_keys=True)  # "1", not "1.0"


@pytest.mark.parametrize("tool", [*TOOLS, CALL])
def test_parse_json_keeps_the_order_of_keys(tool: dict[str, Any]) -> None:
    for value in (tool, dict(reversed(tool.items()))):
        assert json.dumps(parse_json(json.dumps(value), "chat.tools[0]")) == json.dumps(value)


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "null", "{", '{"a": NaN}', "{'a': 1}", '{"a": 1e999}',
                                  '{"a": [-1e400]}', "[" * 100_000])
def test_parse_json_of_other_values_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^chat\.tools\[3\]: must be the text of a JSON object"):
        parse_json(text, "chat.tools[3]")


def test_from_struct_converts_whole_numbers_to_ints() -> None:
    struct = struct_pb2.Struct()
    struct.update({"one": 1.0, "half": 0.5, "big": 1e300, "negative": -3.0})
    plain = from_struct(struct, "x")
    assert repr(plain) == "{'big': 1e+300, 'half': 0.5, 'negative': -3, 'one': 1}"
    struct.fields["unset"].SetInParent()
    assert from_struct(struct, "x")["unset"] is None
    struct.fields["list"].list_value.values.add().number_value = float("nan")
    with pytest.raises(InvalidField, match=r"^chat\.template_args\.list\[0\]: must be a finite number, got nan"):
        from_struct(struct, "chat.template_args")


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
