"""JSON values of a chat: tools, tool calls and template arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.errors import InvalidField
from npuserve.service.requests.chat import from_struct

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
