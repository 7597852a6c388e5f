"""Chain of an error and its causes."""

from __future__ import annotations

from collections.abc import Iterator


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once. An error that is raised again can cause itself."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or each.__context__
