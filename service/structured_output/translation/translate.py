"""Translation of a constraint to a grammar of the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from npuserve.service.structured_output.translation import structural_tag
from npuserve.service.structured_output.translation.ebnf import to_lark
from npuserve.service.structured_output.translation.lark import PREAMBLE, GrammarBuilder, quote, regex


def translate(kind: str, text: str, special: Mapping[str, int], end_ids: Collection[int] = ()) -> str:
    """Return the grammar of a constraint whose size and choices were checked (validation.py).

    Raises ConstraintError.

    kind, text: see Constraint.
    special: text to id of the special tokens.
    end_ids: tokens that end an answer.
    """
    builder = GrammarBuilder(special, end_ids)
    if kind == "json_schema":
        return builder.text(builder.json_schema_text(text))
    if kind == "json_object":
        return builder.text(builder.json_schema({"type": "object"}))
    if kind == "regex":
        return builder.text(regex(text, "regex"))
    if kind == "choices":
        return builder.text(builder.terminal(" | ".join(map(quote, json.loads(text)))))
    if kind == "grammar":
        return PREAMBLE + to_lark(text)
    return builder.text(structural_tag.translate(text, builder))
