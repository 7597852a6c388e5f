from __future__ import annotations

from npuserve.service.speculation.shared_answers import LEAD_TOKENS, MAX_GROUPS, MAX_TOKENS, SharedAnswers


def test_history_is_of_one_client_and_salt() -> None:
    answers = SharedAnswers()
    answers.add(("a", ""), [*range(20), 100, 101], 20)
    answers.add(("a", "salt"), [0, 200], 1)
    assert answers.history(("b", "")) is None
    first = answers.history(("a", ""))
    assert first is not None
    assert first.ids.tolist() == [*range(20 - LEAD_TOKENS, 20), 100, 101]
    salted = answers.history(("a", "salt"))
    assert salted is not None
    assert salted.ids.tolist() == [0, 200]


def test_memory_is_bounded() -> None:
    answers = SharedAnswers()
    for number in range(50):
        answers.add(("a", ""), [number] * 1000, 0)
        history = answers.history(("a", ""))
        assert history is not None
        assert len(history) <= MAX_TOKENS
        assert history.token(len(history) - 1) == number
    answers.add(("a", ""), [7] * 10 * MAX_TOKENS, 0)
    history = answers.history(("a", ""))
    assert history is not None
    assert len(history) <= MAX_TOKENS
    for number in range(2 * MAX_GROUPS):
        answers.add((str(number), ""), [1, 2], 0)
    assert len(answers) == MAX_GROUPS
    assert answers.history(("a", "")) is None
