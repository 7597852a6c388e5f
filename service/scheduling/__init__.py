"""Decisions of the engine about requests: which are admitted, which run, which blocks they hold, when they end.

Plain Python without I/O, torch and clocks, but for the time of drafts. Imports of `service`: top level, `ipc`,
`speculation`, and the matchers of `structured_output`.

The life of a request (states: sequence.py):

1. `add` refuses the request (rules: admission.py) or puts it into the queue (fair_queue.py). A sample of a call with n
   above 1 first waits until another sample has computed the prompt, unless it is the first (sample_groups.py).
2. `schedule` admits it when it is the next in the queue, fewer than max_num_seqs requests run, and blocks for all its
   known tokens are free. If slots or blocks are lacking, running requests of clients that have more of them, or were
   served more, yield to it (preemption.py). A prefix in the cache is shared and counts as computed. If it continues in
   host memory, the request first waits for its blocks, and others are admitted meanwhile (host_tier.py). `Step.new`
   announces the request to the runner.
3. Each `schedule` gives it a row with its uncomputed tokens, as many as the token budget allows. There are no phases:
   one uncomputed token is a decode row, several are a prefill chunk. The row with the last known token samples the
   next one, and, with drafts behind it, several (drafting.py).
4. `apply` appends the sampled tokens, adds full blocks to the prefix cache, and decides whether the request has ended.
   `append_forced` appends the forced tokens that follow (structured_output/answer_matcher.py). A constrained request
   whose next mask is not there yet (`Sequence.is_preparing`) gets no row until it is.
5. If blocks run out, or another client's request waits, the request may be preempted: its blocks are freed, its tokens
   stay, and it returns to step 2, first in the queue of its client, to compute them again. Its prefix may still be in
   the cache then.
6. It is paused while its reader is slow. A paused request gets no rows and does not count as running. It keeps its
   blocks until others need them.
7. It ends once: by its own token in `apply`, by `cancel`, or dropped because of its deadline or of a full queue. Its
   blocks are free at once. `Step.ended` of the next step makes the runner forget it. Results of steps in flight for it
   are discarded.

Fairness and preemption (fair_queue.py, preemption.py). Clients take turns in the queue by the tokens computed for
them, and a client that runs nothing does not wait for the end of the others' requests: one of them yields. A preempted
request takes the next free place. Yields that cause much recomputation need an equally larger lead in tokens. A
running request that needs one more block preempts a paused one, else the youngest request of the client that holds
most, which may be itself. The requests of one client keep their order: the youngest is preempted first and the oldest
is admitted first. An admission preempts paused requests, so that no request waits for a slow reader. A victim with
steps in flight gets no further row, and is preempted once they are applied. An UNPAUSED request runs again if fewer
than max_num_seqs requests run; otherwise it is preempted.

Deadlines (deadlines.py, `Scheduler.expire`). A request ends a margin before its deadline, with the tokens that it has;
the margin follows the measured gap between tokens (latency_estimator.py). A request without tokens ends when its prompt
cannot be computed in time, as far as steps were measured, and is not admitted then.
"""
