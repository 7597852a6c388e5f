"""Steps of a group of ranks: rank 0 broadcasts each step, and the others launch the same.

The other ranks decide nothing. Each computes the same ids from the same sums, so no ids travel between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from npuserve.npu.step import Step, StepResult

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from npuserve.npu.execution.runner import Runner
    from npuserve.npu.parallel import Group

MAX_IN_FLIGHT = 2
"""Steps that a runner may have in flight."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Launch a step. timed: time its kernels."""

    step: Step
    timed: bool = False


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Sample the step that was launched last. masks: request -> words, as `Runner.sample` takes them."""

    masks: dict[int, bytes]


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Do nothing. Rank 0 sends it to notice the loss of a rank while no step runs."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


_decode = msgspec.msgpack.Decoder(Launch | Sample | Idle | Stop).decode
_encode = msgspec.msgpack.Encoder().encode


class LeadRunner:
    """Runner of rank 0, with the methods of `service.engine.pipeline.Runner`.

    runner: runner of this rank's shard.
    """

    def __init__(self, runner: Runner, group: Group):
        self._runner = runner
        self._group = group

    def launch(self, step: Step) -> Any:
        timed = self._runner.is_timed(step)
        self._group.broadcast(_encode(Launch(step, timed)))
        return self._runner.launch(step, timed)

    def sample(self, handle: Any, masks: Mapping[int, npt.NDArray[np.int32]]) -> None:
        self._group.broadcast(_encode(Sample({request: mask.tobytes() for request, mask in masks.items()})))
        self._runner.sample(handle, masks)

    def ready(self, handle: Any) -> bool:
        return self._runner.ready(handle)

    def collect(self, handle: Any) -> StepResult:
        return self._runner.collect(handle)


def check_followers(group: Group) -> None:
    """Raise RuntimeError if a rank is lost."""
    group.broadcast(_encode(Idle()))


def stop_followers(group: Group) -> None:
    """End the processes that `follow`."""
    group.broadcast(_encode(Stop()))


def follow(runner: Runner, group: Group) -> None:
    """Launch the steps of rank 0 until it stops. Raises RuntimeError if rank 0 is lost."""
    import numpy as np

    in_flight: deque[Any] = deque()
    while True:
        message = _decode(group.broadcast())
        if isinstance(message, Launch):
            if len(in_flight) == MAX_IN_FLIGHT:
                runner.collect(in_flight.popleft())
            in_flight.append(runner.launch(message.step, message.timed))
        elif isinstance(message, Sample):
            runner.sample(in_flight[-1], {
                request: np.frombuffer(mask, np.int32).copy() for request, mask in message.masks.items()})
        elif isinstance(message, Stop):
            return
