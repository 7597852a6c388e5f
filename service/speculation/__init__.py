"""Speculative decoding: drafts from the text itself or of the model's head, verified without changing a bit of the
answer.

A decode step reads all weights for one token of each request, and a few more tokens cost little. So a row may compute
drafts: tokens that probably follow. It samples after each of them (`Row.samples`):

    row         [ t | d1  d2  d3 ]      t: last token of the request; d1 to d3: drafts
    samples       s1  s2  s3  s4        s1 == d1, s2 == d2, s3 != d3: the step yields s1, s2 and s3

A sample is a function of the tokens before it, of (seed, position) and of nothing else. So the sample after a right
draft is the one that a step of its own would yield, at any temperature, and "accept a draft that equals the sample of
its position" is exact. The sample after the last accepted draft is valid too; what follows it is discarded.

Withdrawn tokens. Drafts are in no request's `token_ids` and are not counted as computed when they are planned.
`Sequence.apply` appends the accepted tokens one by one, with all checks of a single token (end, matcher, max_tokens),
and only then counts their positions as computed. So the prefix cache and the KV events get accepted tokens only. Slots
of rejected drafts are overwritten by the next row. Budget and fairness charge all tokens of a row.

Drafts from text (drafter.py, token_history.py). The longest earlier occurrence of the end of the text is
searched in prompt and answer, then in ended answers of the same client and cache salt (shared_answers.py, bounded).
What followed there is the draft. The match continues as long as its predictions are right.

Drafts of the model's head (predicted_drafts.py, npu/execution/predictor.py). A model may have a head for multi-token
prediction (MTP): one layer with a KV cache of its own, in the blocks of the request. It runs at the end of a step,
after the sampling, for all tokens of the step, and drafts up to `depth` tokens after the last valid sample of each row
(`Row.predicts`). The step's result has these drafts, and the next row verifies them as any others. So the head changes
nothing but what is drafted. Of a request with both kinds, the likelier drafts are computed (request_drafter.py).

    step n      decoder ─► samples ─► accepted drafts ─► head ─► drafts of step n + 1
    step n + 1  [ last sample | drafts ] ─► decoder ─► ...

A step is therefore verification and drafting in one queue of work, and a device that captures both, each in one
dispatch, needs nothing of the host in between: the number of accepted drafts is computed on the device
(`Predictor.draft`, `Predictor.draft_all`). Not built: two such steps in flight. For these, the ids, positions and slots
of step n + 1 would follow from that number on the device too. The host would plan the largest positions, for which it
has the blocks, and learn one step late how many are valid. Attention whose lengths are read from the host, as on
Ascend, cannot do so.

With `auto` the head drafts while rows wait, as deep as recent steps have computed drafts, since each draft reads the LM
head. Soon at first, later in one of MAX_PROBE_STEPS steps, it drafts `depth` tokens, and the next step computes them
all to measure their acceptance and seconds: on some machines 32 tokens take as long as 17. Its seconds are measured by
depth (`StepResult.head_seconds`), and are no part of the table of step costs.

A head that drafts nothing takes time too, for its KV cache. So with `auto` it is stopped where the best choice of
drafts with it is no faster than the best one without, its own seconds counted (head_switch.py). It is stopped for all
requests at once, since it takes the time of reading its weights, however few rows need it. A trial shows later whether
it pays, also beside prompts. It begins when the balance, below, has what a trial costs. The keys and values of the
tokens in between are missing then. The head reads those behind them alone (scheduling/head_contexts.py), so it returns
to requests in progress, and to cached prefixes that were computed without it.

Two steps in flight. Drafts need the last token on the host, so a step with drafts is planned when no other step is in
flight. Either all rows wait for the step before, or none does and there are no drafts (`Speculator.waits`). The rows
overlap as without speculation

- in quarantine;
- if no running request can have drafts, since all ask for none;
- with `auto`, as long as drafts are expected to bring less than the overlap.

Penalties. A sample after drafts counts these as tokens of the answer. Once the row is sampled, the device counts the
accepted tokens (`Sampler`), so no result of the host is needed.

Fixed state (recurrent layers). A row with drafts reads the state in one slot and writes another, which it borrows. If a
draft is rejected, the row is undone: the next row computes the accepted tokens again, from the state before them. So
no state is advanced twice, and a request needs one more slot, not one a draft. Computing a few tokens again costs less
than keeping a state for each draft (bench/RESULTS.md). A row with drafts ends at a block boundary at most, so that
checkpoints are taken there as without drafts.

Beside prompts. In a step with chunks of prompts every token costs the same, so a draft pays if its probability times
what a token takes in a decode step exceeds that cost. Drafts take at most an eighth of the budget there. If no step
computes decode rows alone, an accepted draft saves no more than it costs, and there are none.

How many drafts (speculator.py). A drafter counts in each mode which of its predictions were right, also of those that
no step computed: the tokens are the same. So `auto` knows what drafts would have brought without trying them
(acceptance.py). With the measured seconds of steps by their number of tokens (step_costs.py) it takes the number of
drafts, over all rows, with the most tokens a second. Other processes slow single steps down and the first steps of a
kind are slow, so the seconds are those of steps that little disturbs, and a number of tokens counts once several steps
of it are measured. A balance bounds the loss if predictions or measurements mislead:
steps with drafts are planned, and the head is computed, only while both have cost less than one percent of the time.
The head computes all tokens of a prompt before the answer can gain by it. So as much gain is kept as recent prompts
have cost.

Plain values: nothing here imports the scheduler. `scheduling/drafting.py` joins both.
"""
