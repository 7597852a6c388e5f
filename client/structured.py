"""Constraints of requests, and the objects in constrained answers.

A model class is a class with the methods `model_json_schema` and `model_validate_json`, such as a subclass of
pydantic.BaseModel. This module does not import pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from npuserve.common.answer import value_name
from npuserve.v1 import generate_pb2 as pb

CONSTRAINTS = tuple(field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["constraint"].fields)
"""Options that set the constraint. A request has at most one of them."""
T = TypeVar("T")
M_co = TypeVar("M_co", covariant=True)


class ModelClass(Protocol[M_co]):
    """Class of objects with a JSON Schema."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the class."""

    def model_validate_json(self, json_data: str) -> M_co:
        """Return the object of a JSON text. Raise ValueError for one that is not valid."""


class IncompleteAnswer(ValueError):
    """The answer does not satisfy a constraint: it was cut, or the request had none."""


@overload
def parsed(answer: pb.GenerateResponse | pb.Sample) -> Any: ...


@overload
def parsed(answer: pb.GenerateResponse | pb.Sample, schema: ModelClass[T]) -> T: ...


def parsed(answer: pb.GenerateResponse | pb.Sample, schema: ModelClass[Any] | None = None) -> Any:
    """Return the object in an answer that a JSON schema or `json_object` constrains.

    answer: answer of `generate`; with n above 1, one of its samples.
    schema: model class whose validated instance is returned; None: return dicts, lists and other plain values.

    Raises IncompleteAnswer for an answer that was cut or was not constrained, TypeError for an answer with samples, and
    ValueError (of pydantic: ValidationError) for an invalid text: a model class may check more than its schema says.
    """
    if isinstance(answer, pb.GenerateResponse) and answer.samples:
        raise TypeError("answer: has several samples; pass each of answer.samples")
    if not answer.finish.grammar_completed:
        reason = value_name(pb.FinishReason, answer.finish.reason, "FINISH_REASON_")
        raise IncompleteAnswer(f"the answer does not satisfy a constraint; it ended with {reason}")
    return json.loads(answer.text) if schema is None else schema.model_validate_json(answer.text)


def set_constraint(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Set a constraint of the request. Raise TypeError or ValueError for an unsuitable value."""
    if name == "choices":
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"must be a sequence of texts, got {type(value).__name__}")
        request.choices.choices[:] = value
        request.choices.SetInParent()
    elif name in ("json_schema", "structural_tag"):
        setattr(request, name, _json_text(name, value))
    else:
        setattr(request, name, value)


def _json_text(name: str, value: Any) -> Any:
    """Return the JSON text of a schema or a structural tag."""
    if name == "json_schema" and isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        other = "a text, a dict or a model class" if name == "json_schema" else "a text or a dict"
        raise TypeError(f"must be {other}, got {value!r:.80}")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
