"""Fields of protobuf messages, by name."""

from __future__ import annotations

from google.protobuf.message import Message


def set_field(message: Message, name: str, value: object) -> None:
    """Set a field, or fill it if it is a map or repeated."""
    if isinstance(value, dict):
        getattr(message, name).update(value)
    elif isinstance(value, (list, tuple)):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)
