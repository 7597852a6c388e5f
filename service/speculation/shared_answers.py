"""Ended answers, in which later requests of the same client find drafts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from npuserve.service.speculation.token_history import TokenHistory

MAX_TOKENS = 16384
"""Most tokens of a group's history before it is replaced: a search takes about 10 us."""
MAX_GROUPS = 64
"""Most groups. The history of one takes at most 128 KiB."""
LEAD_TOKENS = 8
"""Last prompt tokens that are kept with an answer, so that its beginning is found."""

Group = tuple[str, str]
"""Client and cache salt of requests that may share drafts."""


class SharedAnswers:
    """Latest answers of each group; those of the least recently used group are forgotten."""

    def __init__(self) -> None:
        self._histories: OrderedDict[Group, TokenHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def history(self, group: Group) -> TokenHistory | None:
        """Return the answers of a group; None if there are none."""
        return self._histories.get(group)

    def add(self, group: Group, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Add the answer of a request. token_ids: prompt and answer."""
        added = token_ids[max(0, num_prompt_tokens - LEAD_TOKENS) :][-MAX_TOKENS // 2 :]
        history = self._histories.pop(group, None)
        if history is None or len(history) + len(added) > MAX_TOKENS:
            kept = history.ids[-MAX_TOKENS // 2 :].tolist() if history is not None else ()
            history = TokenHistory(kept)  # drafters may still read the one before
        history.extend(added)
        self._histories[group] = history
        if len(self._histories) > MAX_GROUPS:
            self._histories.popitem(last=False)
