"""Phases of a request's time since its arrival, which are disjoint. Each ends at `PhaseTimer.now`:

    arrival ──queue──► admitted ──chunk──►│──chunk──►│──decode──►│ preempted ──queue──► admitted ──chunk──► ...
                                       (each │ is the end of a step with a row of the request)

The phases of a continued request begin with those in Request.progress.
"""

from __future__ import annotations

from typing import NamedTuple

from npuserve.service.ipc.messages import Timing

MAX_WAITS = 64
"""Waits of a request that are kept."""


class Wait(NamedTuple):
    """A phase in which a request did not run: in the queue, or paused for its reader (`is_pause`)."""

    began: float
    end: float
    is_pause: bool


class PhaseTimer:
    """Timer of one request. All times are seconds of the clock of Request.arrival.

    arrival: of the request.
    earlier: phases in earlier engines; None for a new request.
    received: when the engine received the request.
    compiled: when the grammar of its constraint was compiled; 0.0 without one.
    waits: the first MAX_WAITS phases without a step. The first ends with the first step in this engine.
    """

    __slots__ = (
        "_decode", "_device", "_end", "_prefill_chunks", "_queue", "_undivided", "arrival", "compiled", "received",
        "waits")

    def __init__(self, arrival: float, earlier: Timing | None):
        timing = earlier or Timing(0.0, [], 0.0, 0.0, 0.0, arrival)
        self.arrival = arrival
        self.received = arrival
        self.compiled = 0.0
        self.waits: list[Wait] = []
        self._end = timing.last_step_end  # of the last phase
        self._queue = timing.queue
        self._prefill_chunks = list(timing.prefill_chunks)
        self._decode = timing.decode
        self._device = timing.device
        # Part of the computing time whose division between device and host is unknown.
        self._undivided = self.computing_seconds - timing.device - timing.host

    @property
    def computing_seconds(self) -> float:
        """Seconds of the steps so far that had rows of the request."""
        return sum(self._prefill_chunks) + self._decode

    @property
    def end(self) -> float:
        """End of the last phase."""
        return self._end

    @property
    def timing(self) -> Timing:
        """Phases up to the end of the last one; the time since then is not included.

        queue + sum(prefill_chunks) + decode == last_step_end - arrival, and
        device + host == sum(prefill_chunks) + decode, without the part of an earlier engine that it had not divided.
        """
        host = max(0.0, self.computing_seconds - self._device - self._undivided)
        return Timing(
            queue=self._queue,
            prefill_chunks=list(self._prefill_chunks),
            decode=self._decode,
            device=self._device,
            host=host,
            last_step_end=self._end,
        )

    def end_queue(self, now: float, is_pause: bool = False) -> None:
        """End a phase in which the request waited: in the queue, or for its reader (`is_pause`)."""
        if len(self.waits) < MAX_WAITS:
            self.waits.append(Wait(self._end, now, is_pause))
        self._queue += now - self._end
        self._end = now

    def end_step(self, is_prefill: bool, device_seconds: float, now: float) -> None:
        """End the phase of a step that had a row of the request.

        is_prefill: the row computed tokens that were known when the request was admitted.
        device_seconds: time that the device computed the step.
        """
        elapsed = now - self._end
        self._end = now
        self._device += min(device_seconds, elapsed)
        if is_prefill:
            self._prefill_chunks.append(elapsed)
        else:
            self._decode += elapsed
