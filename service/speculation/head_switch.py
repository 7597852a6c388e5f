"""Decision whether steps compute the model's head for drafts.

The head is computed for all tokens of a step, for its keys and values, also where nothing is drafted. Where its drafts
do not pay, it is stopped. A later trial shows whether they do by then: the head drafts one token after each row, until
MIN_TRIAL_DRAFTS of them are compared with the tokens that follow. A trial makes no rows wait; they may wait for drafts
from text meanwhile. If the drafts are worth it, rows wait from the end of the trial on.
"""

from __future__ import annotations

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.step_costs import HeadCosts

MIN_TRIAL_DRAFTS = 4
"""Drafts that are compared in a trial."""
MAX_TRIAL_STEPS = 128
"""Steps after which a trial without a result ends."""
MIN_STOPPED_STEPS, MAX_STOPPED_STEPS = 256, 2048
"""Steps without the head before its next trial: at first, and at most. They double with each trial that fails."""
MAX_IDLE_STEPS = 16
"""Overlapped steps after which a head whose drafts no step computes is stopped."""
MIN_RATIO = 1.03
"""Least expected speed with drafts, relative to that without, for which steps begin to wait for the step before."""
RATIO_WEIGHT = 0.05
"""Weight of the latest step in the speed with the head relative to that without."""


class HeadSwitch:
    """State of a head that can be stopped. It begins with a trial.

    costs: measured seconds of the head.
    is_on: the next steps compute the head.
    """

    def __init__(self, rates: AcceptanceRates) -> None:
        """rates: acceptance of the head's drafts, of all requests."""
        self.costs = HeadCosts()
        self.is_on = True
        self._rates = rates
        self._trial_begin: int | None = rates.num_recorded  # when the trial began; None for no trial
        self._ratio = 1.0  # expected speed with the head, relative to that without
        self._trial_steps = 0  # steps since the trial began
        self._idle = 0  # overlapped steps with the head since rows last waited, or since the trial ended
        self._stopped = 0  # steps since the head was stopped
        self._pause = MIN_STOPPED_STEPS // 2  # steps before the next trial

    @property
    def is_on_trial(self) -> bool:
        return self._trial_begin is not None

    def count_step(self, *, waits: bool) -> None:
        """Count a step. Stop a head whose drafts are not computed. waits: the rows wait for the step before."""
        if not self.is_on:
            self._stopped += 1
        elif self.is_on_trial:
            self._trial_steps += 1
            if self._trial_steps >= MAX_TRIAL_STEPS:
                self.stop()
        elif waits:
            self._idle = 0
        else:
            self._idle += 1
            if self._idle >= MAX_IDLE_STEPS:
                self.stop()

    def stop(self) -> None:
        if self.is_on:
            self._pause = min(2 * self._pause, MAX_STOPPED_STEPS) if self.is_on_trial else MIN_STOPPED_STEPS
            self.is_on = False
            self._trial_begin = None
            self._stopped = 0

    def trial_cost(self) -> float | None:
        """Return the expected seconds of the head in its next trial; None if it is too early, or if the head is on."""
        if self.is_on or self._stopped < self._pause:
            return None
        return MIN_TRIAL_DRAFTS * self.costs.seconds_by_depth(1)[1]

    def begin_trial(self) -> None:
        """Compute a stopped head again. Its next drafts count more than earlier ones."""
        self.is_on = True
        self._trial_steps = 0
        self._rates.forget()
        self._trial_begin = self._rates.num_recorded

    def judge(self, ratio: float) -> bool:
        """Stop the head if it does not pay. Return whether a trial ended, and its drafts are worth waiting for.

        ratio: expected speed with it, relative to that without.
        """
        if self._trial_begin is None:
            self._ratio += RATIO_WEIGHT * (ratio - self._ratio)
            if self._ratio < 1.0:
                self.stop()
            return False
        if self._rates.num_recorded - self._trial_begin < MIN_TRIAL_DRAFTS:
            return False
        if ratio < MIN_RATIO:
            self.stop()
            return False
        self._trial_begin = None
        self._idle = 0
        self._ratio = ratio
        return True
