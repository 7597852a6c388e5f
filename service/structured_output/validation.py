"""Check of a request's constraint: its size, the syntax of JSON, and lists of choices.

The engine checks the meaning of a schema, a regular expression, a grammar or a structural tag, before it accepts the
request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from npuserve.service.config import MAX_CONSTRAINT_BYTES
from npuserve.service.errors import InvalidField, NoTokenizer, Violations, quoted
from npuserve.service.json_text import parse_json
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.text.model_folder import ModelFolder
from npuserve.v1 import generate_pb2 as pb

MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024


def check_constraint(message: pb.GenerateRequest, folder: ModelFolder, bad: Violations) -> Constraint | None:
    """Return the constraint, None for none; report a bad one. Raise NoTokenizer for one without a tokenizer."""
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    if folder.tokenizer is None:
        raise NoTokenizer(f"{kind}: the served model has no tokenizer, and a constraint needs the text of tokens")
    if message.sampling.allowed_token_ids:
        bad.add("sampling.allowed_token_ids", f"must be empty if {kind} is set")
    with bad.collect():
        return Constraint(kind, _checked_text(kind, message))
    return None


def _checked_text(kind: str, message: pb.GenerateRequest) -> str:
    """Return Constraint.text. Raise InvalidField for a bad constraint."""
    if kind == "json_object":
        return ""
    if kind == "choices":
        _check_size(kind, message.choices.ByteSize())
        return json.dumps(_checked_choices(message.choices.choices), ensure_ascii=False)
    text: str = getattr(message, kind)
    _check_size(kind, len(text.encode()))
    if kind == "json_schema":
        parse_json(text, kind, (dict, bool), "a JSON object or a boolean")
    elif kind == "structural_tag":
        parse_json(text, kind)
    elif not text:
        raise InvalidField(kind, "must not be empty")
    return text


def _check_size(field: str, size: int) -> None:
    if size > MAX_CONSTRAINT_BYTES:
        raise InvalidField(field, f"must be at most {MAX_CONSTRAINT_BYTES} bytes, got {size}")


def _checked_choices(choices: Sequence[str]) -> list[str]:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidField("choices.choices", f"must be 1 to {MAX_CHOICES} strings, got {len(choices)}")
    bad = Violations()
    first: dict[str, int] = {}
    for index, choice in enumerate(choices):
        path = f"choices.choices[{index}]"
        if not 1 <= len(choice) <= MAX_CHOICE_CHARACTERS:
            bad.add(path, f"must be 1 to {MAX_CHOICE_CHARACTERS} characters, got {len(choice)}")
        elif (same := first.setdefault(choice, index)) != index:
            bad.add(path, f"must differ from the others; string {same} is {quoted(choice)} too")
    bad.check()
    return list(choices)
