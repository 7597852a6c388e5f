"""Measured seconds of decode steps by their number of tokens, and of the model's head by its number of drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WEIGHT = 0.25
"""Weight of the latest step in the average of its number of tokens, if it was faster."""
_SLOWER_WEIGHT = 0.05
"""Weight of a step that was slower: other processes take time from single steps. So averages are those of steps that
little disturbs, and compare with each other, however few steps they are of."""
_COMMON_SHARE = 0.2
"""Share of the relative change of an average by which all others change: contexts grow, and the machine's speed
changes, for all steps."""
_MAX_CHANGE = 1.5
"""Most by which one step changes an average: single steps take very long."""
_FIRST_SLOPE, _FIRST_SHARE = 0.03, 0.3
"""Seconds of a token beyond the largest measured step, before they are measured: a share of that step's seconds, or of
its seconds a token if that is less."""
_CURVE_TOKENS = 128
"""Least number of tokens of an estimated curve."""
_FIRST_SAMPLES = 4
"""Steps of a number of tokens of which the fastest counts: the first ones take longer, since caches are cold. Fewer
ones count only where nothing else is known."""
_MAX_DISTURBANCE = 3.0
"""Seconds of a step, relative to what others suggest, beyond which it counts at once: no other process explains it."""
_MIN_SECONDS = 1e-9
"""Least seconds of a head: a clock may show none."""
_KEPT_SAMPLES = 8
"""Steps of an average that `forget_few` keeps."""
_MIN_SAMPLES = 3
"""Steps after which an average is used as the time of overlapped steps."""

Seconds = npt.NDArray[np.float64]


def _rounded(tokens: int) -> int:
    """Return a number of tokens rounded up to one that has an average: there are 4 from a power of two to the next."""
    unit = 1 << max(0, (tokens - 1).bit_length() - 3)
    return -(-tokens // unit) * unit


class _Average:
    """Average of the seconds of a number of tokens, of steps that little disturbs."""

    __slots__ = ("samples", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.samples = 1

    @property
    def is_known(self) -> bool:
        return self.samples >= _FIRST_SAMPLES

    def change(self, seconds: float) -> float:
        """Add a step. Return the factor by which all other averages change."""
        self.samples += 1
        if self.samples <= _FIRST_SAMPLES:
            self.seconds = min(self.seconds, seconds)
            return 1.0
        ratio = min(max(seconds / self.seconds, 1 / _MAX_CHANGE), _MAX_CHANGE)
        change = (ratio - 1.0) * (_WEIGHT if ratio < 1.0 else _SLOWER_WEIGHT)
        self.seconds *= 1.0 + change
        return 1.0 + change * _COMMON_SHARE


class StepCosts:
    """Averages of seconds: of steps of which two are in flight, and of steps that wait for the one before.

    mixed_token_seconds: average seconds of a token in a step that computes prompts; 0 until measured.
    """

    def __init__(self) -> None:
        self.mixed_token_seconds = 0.0
        self._overlapped: dict[int, _Average] = {}
        self._waiting: dict[int, _Average] = {}
        self._curve: Seconds | None = None

    def record(self, tokens: int, seconds: float, *, is_overlapped: bool) -> float:
        """Record a step of decode rows and drafts, and nothing else. Return the average, once it is known, else
        `seconds`."""
        averages = self._overlapped if is_overlapped else self._waiting
        average = averages.get(_rounded(tokens))
        if average is not None and average.is_known:
            self._change(average, seconds)
            return average.seconds
        if average is not None:
            average.change(seconds)
        else:
            averages[_rounded(tokens)] = _Average(seconds)
        self._curve = None
        return seconds

    def _change(self, average: _Average, seconds: float) -> None:
        self._curve = None
        common = average.change(seconds)
        for other in (*self._overlapped.values(), *self._waiting.values()):
            if other is not average:
                other.seconds *= common

    def record_mixed(self, tokens: int, seconds: float) -> None:
        """Record a step that computes prompts."""
        of_token = seconds / tokens
        if self.mixed_token_seconds:
            of_token = self.mixed_token_seconds + _WEIGHT * (of_token - self.mixed_token_seconds)
        self.mixed_token_seconds = of_token

    def forget_few(self) -> None:
        """Forget averages of few steps that wait. They may all have been disturbed or cold, and are then so dear that
        no step measures them again."""
        self._waiting = {tokens: average for tokens, average in self._waiting.items()
                         if average.samples >= _KEPT_SAMPLES}
        self._curve = None

    def overlapped_seconds(self, rows: int) -> float | None:
        """Return the seconds of an overlapped step; None until some of as many rows were measured."""
        average = self._overlapped.get(_rounded(rows))
        return average.seconds if average is not None and average.samples >= _MIN_SAMPLES else None

    def seconds_of(self, tokens: int) -> float:
        """Return the estimated seconds of a step of `tokens` tokens that waits for the step before."""
        return float(self.waiting_seconds(tokens, tokens)[0])

    def waiting_seconds(self, first: int, last: int) -> Seconds:
        """Return the estimated seconds of steps of `first` to `last` tokens that wait for the step before.

        At least one step must be measured.
        """
        if self._curve is None or len(self._curve) < last:
            self._curve = self._estimate(max(last, _CURVE_TOKENS))
        return self._curve[first - 1 : last]

    def waiting_seconds_of(self, tokens: Seconds) -> Seconds:
        """Return the estimated seconds of steps that wait. tokens: expected numbers of tokens, ascending."""
        last = int(np.ceil(tokens[-1]))
        return np.interp(tokens, np.arange(1, last + 1), self.waiting_seconds(1, last))

    def _estimate(self, last: int) -> Seconds:
        """Return the estimated seconds of steps of 1 to `last` tokens.

        Steps that wait take no less than overlapped ones, which stand for missing ones. Averages that are not known
        count where they are less than what others suggest, or much more.
        """
        overlapped = {tokens: average.seconds for tokens, average in self._overlapped.items()}
        known = {tokens: overlapped[tokens] for tokens, average in self._overlapped.items() if average.is_known}
        points = dict(known or overlapped)
        few = {tokens: seconds for tokens, seconds in overlapped.items() if tokens not in points}
        for tokens, average in self._waiting.items():
            seconds = max(average.seconds, overlapped.get(tokens, 0.0))
            if average.is_known or not points:
                points[tokens] = seconds
                few.pop(tokens, None)
            else:
                few[tokens] = seconds
        estimates = _curve(points, last)
        counted = {tokens: seconds for tokens, seconds in few.items() if tokens <= last
                   and not estimates[tokens - 1] <= seconds < _MAX_DISTURBANCE * estimates[tokens - 1]}
        return _curve(points | counted, last) if counted else estimates


def _curve(points: dict[int, float], last: int) -> Seconds:
    """Return the seconds of steps of 1 to `last` tokens, from those of some numbers of tokens."""
    tokens = sorted(points)
    seconds = [points[count] for count in tokens]
    numbers = np.arange(1, last + 1)
    estimates: Seconds = np.interp(numbers, tokens, seconds)
    slope = min(_FIRST_SLOPE, _FIRST_SHARE / tokens[-1]) * seconds[-1]
    if len(tokens) > 1:
        slope = max(slope, (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]))
    estimates += slope * np.maximum(numbers - tokens[-1], 0)
    return np.maximum.accumulate(estimates)


class HeadCosts:
    """Average seconds that a model's head takes in a step, by the number of tokens that it drafts after each row.

    Those of prompts are added: all their tokens take the same time.
    """

    def __init__(self) -> None:
        self._averages: dict[int, _Average] = {}
        self._prompt_token_seconds: float | None = None

    def record(self, depth: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        """Record a step in which the head drafted `depth` tokens after each row; 0 for its keys and values alone.

        num_prompt_tokens: tokens of prompts in the step; 0 for decode rows alone.
        """
        seconds = max(seconds, _MIN_SECONDS)
        if num_prompt_tokens:
            of_token = max(0.0, seconds - self.seconds_of(depth)) / num_prompt_tokens
            average = of_token if self._prompt_token_seconds is None else self._prompt_token_seconds
            self._prompt_token_seconds = average + _WEIGHT * (of_token - average)
            return
        average_of_depth = self._averages.get(depth)
        if average_of_depth is None:
            self._averages[depth] = _Average(seconds)
            return
        common = average_of_depth.change(seconds)
        for other in self._averages.values():
            if other is not average_of_depth:
                other.seconds *= common

    def seconds_of(self, depth: int, num_prompt_tokens: int = 0) -> float:
        """Return the estimated seconds for `depth` drafts after each row, and for so many tokens of prompts."""
        return self.seconds_by_depth(depth)[depth] + num_prompt_tokens * (self._prompt_token_seconds or 0.0)

    def seconds_by_depth(self, most: int) -> list[float]:
        """Return the estimated seconds for 0 to `most` drafts; 0 before any was measured.

        A depth that was not measured is on the line between its neighbours, or beyond the last two.
        """
        is_any_known = any(average.is_known for depth, average in self._averages.items() if depth)
        points = {0: 0.0} | {depth: average.seconds for depth, average in self._averages.items()
                             if average.is_known or not depth or not is_any_known}
        depths = sorted(points)
        seconds = [points[depth] for depth in depths]
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (depths[-1] - depths[-2])) if len(depths) > 1 else 0.0
        inside: list[float] = np.interp(range(most + 1), depths, seconds).tolist()
        return [known + slope * max(0, depth - depths[-1]) for depth, known in enumerate(inside)]
