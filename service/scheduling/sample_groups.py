"""Samples of one call with n above 1: one of them computes the prompt, the others wait for it and share its blocks.

    leader       in the queue or running; its prompt is not computed yet
    followers    FOLLOWING, until the leader has computed its whole prompt; then in the queue

A follower that is admitted finds the full blocks of the prompt in the prefix cache (block_manager.py). It computes the
rest of the prompt, at most one block, and samples its own tokens. Followers are outside the queue, so no request waits
behind them.

If the leader is paused or ends before its prompt is computed, its oldest follower becomes the leader. A preempted
leader stays the leader: it is admitted before all requests of its client that never ran. After a restart of the engine
the first sample that is restored is the leader. A sample in quarantine waits for no other.

Samples must share blocks also if the request bypasses the prefix cache or the server has none. Their blocks then have
a scope of their own, which ends with the last sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.fair_queue import FairQueue
from npuserve.service.scheduling.sequence import Sequence, State

Call = tuple[str, str, float]
"""Identity of a call, the same for all its samples: client, request_id and arrival."""


class SampleGroup:
    """Live samples of one call.

    scope: scope of their blocks; 0 if they share the prefix cache of their salt.
    leader: the sample that computes the prompt; None once it is computed, and while no sample waits for it.
    followers: by sequence id, the oldest first. Empty without a leader.
    live: number of samples.
    """

    __slots__ = ("call", "followers", "is_computed", "leader", "live", "scope")

    def __init__(self, call: Call, scope: int):
        self.call = call
        self.scope = scope
        self.leader: Sequence | None = None
        self.followers: dict[int, Sequence] = {}
        self.is_computed = False
        self.live = 0


class SampleGroups:
    """Owner of the FOLLOWING sequences. It puts them into the queue.

    leaders: groups whose prompt is not computed, by sequence id of the leader.
    """

    def __init__(self, queue: FairQueue, blocks: BlockManager):
        self.leaders: dict[int, SampleGroup] = {}
        self._queue = queue
        self._blocks = blocks
        self._scopes = itertools.count(1)
        self._groups: dict[Call, SampleGroup] = {}
        self._group_of: dict[int, SampleGroup] = {}  # by sequence id, of all live samples
        self._followers: dict[int, Sequence] = {}  # of all groups

    def __len__(self) -> int:
        """Return the number of followers."""
        return len(self._followers)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the followers, the oldest first."""
        return iter(self._followers.values())

    def scope(self, request: Request) -> int:
        """Return the scope for the blocks of a request that is to be added. The first sample of a call begins it."""
        if request.samples == 1:
            return 0
        call = _call(request)
        if call not in self._groups:
            is_private = request.bypass_prefix_cache or not self._blocks.prefix_cache
            self._groups[call] = SampleGroup(call, next(self._scopes) if is_private else 0)
        return self._groups[call].scope

    def sharing(self, request: Request) -> tuple[int, int]:
        """Return how many followers wait in the group of a request, and how many tokens of its prompt it will share.

        (0, 0) for a call with one sample, and if the request will be the leader.
        """
        group = self._groups.get(_call(request))
        if group is None or (group.leader is None and not group.is_computed):
            return 0, 0
        return len(group.followers), self._shared(request)

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to its group. Its blocks have the scope of `scope`."""
        if sequence.request.samples > 1:
            group = self._group_of[sequence.id] = self._groups[_call(sequence.request)]
            group.live += 1

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence that waits for nothing else, or let it wait for the leader of its group."""
        group = self._group_of.get(sequence.id)
        if group is not None:
            shared = self._shared(sequence.request)
            if group.is_computed:
                sequence.num_shared_tokens = shared
            elif group.leader is None:
                self.leaders[sequence.id] = group
                group.leader = sequence
            elif shared:
                sequence.follow(shared)
                group.followers[sequence.id] = self._followers[sequence.id] = sequence
                return
        self._queue.push(sequence)

    def prompt_computed(self, leader: Sequence) -> None:
        """Queue the followers of a leader whose prompt is computed and registered."""
        group = self.leaders.pop(leader.id)
        group.leader = None
        group.is_computed = True
        for follower in list(group.followers.values()):
            self.enter_queue(follower, is_computed=True)

    def enter_queue(self, follower: Sequence, is_computed: bool = False) -> None:
        """Queue a follower. is_computed: its group's leader has computed the prompt."""
        self.remove(follower)
        follower.enter_queue(is_computed)
        self._queue.push(follower)

    def remove(self, follower: Sequence) -> None:
        """Remove a follower, which stays a sample of its group."""
        del self._followers[follower.id]
        del self._group_of[follower.id].followers[follower.id]

    def replace_leader(self, sequence: Sequence) -> None:
        """Make the oldest follower of a sequence the leader of its group. Nothing unless the sequence is a leader."""
        group = self.leaders.pop(sequence.id, None)
        if group is not None:
            group.leader = next(iter(group.followers.values()), None)
            if group.leader is not None:
                self.leaders[group.leader.id] = group
                self.enter_queue(group.leader)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended and holds no blocks."""
        group = self._group_of.pop(sequence.id, None)
        if group is not None:
            self.replace_leader(sequence)
            group.live -= 1
            if not group.live:
                del self._groups[group.call]
                self._blocks.forget(group.scope)

    def _shared(self, request: Request) -> int:
        """Return the number of prompt tokens in blocks that samples share. Each sample computes at least one token."""
        size = self._blocks.block_size
        return (len(request.prompt_ids) - 1) // size * size

    def faults(self) -> Iterator[str]:
        """Yield inconsistencies, for integrity checks."""
        groups = list(self._groups.values())
        if sum(group.live for group in groups) != len(self._group_of) or not all(group.live for group in groups):
            yield f"{len(self._group_of)} samples are live, but the groups count {[group.live for group in groups]}"
        leaders = {group.leader.id: group for group in groups if group.leader is not None}
        if leaders != self.leaders:
            yield f"the leaders are {sorted(self.leaders)}, but the groups have {sorted(leaders)}"
        if {id for group in groups for id in group.followers} != self._followers.keys():
            yield f"the followers {sorted(self._followers)} are not those of the groups"
        for group in groups:
            leader = group.leader
            if leader is None and group.followers:
                yield f"the sequences {sorted(group.followers)} follow no leader"
            if leader is not None and not (leader.is_queued or leader.state in (State.LOADING, State.RUNNING)):
                yield f"sequence {leader.id} leads other samples, but is {leader.state.value}"
        if not self._blocks.scopes <= {group.scope for group in groups}:
            yield f"blocks have the scopes {sorted(self._blocks.scopes)}, which no group has"


def _call(request: Request) -> Call:
    return request.client, request.request_id, request.arrival
