"""Translation of a constraint to a grammar of the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from npuserve.service.grammar.translation import structural_tag
from npuserve.service.grammar.translation.ebnf import to_lark
from npuserve.service.grammar.translation.errors import ConstraintError
from npuserve.service.grammar.translation.lark import PREAMBLE, GrammarBuilder, quote, regex
from npuserve.service.ipc.messages import Constraint

MAX_TEXT_BYTES = 1 << 20
"""Size of a constraint."""
MAX_CHOICES = 10_000


def translate(
    constraint: Constraint, special: Mapping[str, int], end_ids: Collection[int] = (), *, formats_apply: bool = True
) -> str:
    """Return the grammar of a constraint. Raise ConstraintError.

    special: text to id of the special tokens.
    end_ids: tokens that end an answer.
    formats_apply: whether `format` in a JSON schema restricts a value; otherwise it is an annotation.
    """
    kind, text = constraint.kind, constraint.text
    if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise ConstraintError(f"{kind}: must be at most {MAX_TEXT_BYTES} bytes")
    builder = GrammarBuilder(special, end_ids, formats_apply=formats_apply)
    if kind == "json_schema":
        return builder.text(builder.json_schema_text(text))
    if kind == "json_object":
        return builder.text(builder.json_schema({"type": "object"}))
    if kind == "regex":
        return builder.text(regex(text, "regex"))
    if kind == "choices":
        return builder.text(builder.terminal(" | ".join(map(quote, _choices(text)))))
    if kind == "grammar":
        return PREAMBLE + to_lark(text)
    if kind == "structural_tag":
        return builder.text(structural_tag.translate(text, builder))
    raise ConstraintError(f"constraint: unknown kind {kind!r}")


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"choices: malformed JSON: {error}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ConstraintError("choices: must be an array of at least one string")
    if len(choices) > MAX_CHOICES:
        raise ConstraintError(f"choices: must be at most {MAX_CHOICES}")
    return choices
