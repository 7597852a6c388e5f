"""Error of a constraint."""

from __future__ import annotations


class ConstraintError(ValueError):
    """The constraint is malformed, not supported, or exceeds a limit. The message names the keyword or the position.

    The client gets INVALID_ARGUMENT with this message.

    field: path of the client's field; "" for the constraint's own field.
    """

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field
