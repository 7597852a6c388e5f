"""Messages between front ends and the engine process on the local socket.

The socket is a Unix stream. Each message is its length in 4 bytes, little-endian, then one msgpack array that begins
with the type's tag. There is no pickle. Times are time.monotonic() seconds, which all processes of a machine share. A
front end identifies its requests by `key`, an integer that it never reuses. The key stays the same when a restarted
engine continues the request.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from npuserve.npu.model.pooling import Task
from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service.errors import WireError
from npuserve.service.ipc.explanations import ExplainReply, ExplainRequest
from npuserve.service.ipc.framing import LENGTH_BYTES, Wire
from npuserve.service.ipc.kv_events import ToEngineKv, ToSubscriber
from npuserve.service.ipc.profile_messages import ProfileReply, ToEngineProfile
from npuserve.service.structured_output.constraint import Constraint

FinishReason = Literal["eos", "stop_token", "stop_string", "length", "deadline", "aborted", "pooled"]


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a request's disjoint phases in the engine, and the end of its last step. See the proto's Timing."""

    queue: float
    prefill_chunks: list[float]
    decode: float
    device: float
    host: float
    last_step_end: float


class PriorProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a request under earlier engines, besides its output_ids. The final report covers all of them.

    num_reported: prompt tokens whose log-probabilities were reported.
    cached_tokens: prompt tokens found in the prefix cache at the first admission; None before it.
    timing: phases so far.
    accepted: whether an earlier engine had queued it. The next engine then queues it without an admission check.
    """

    num_reported: int = 0
    cached_tokens: int | None = None
    timing: Timing | None = None
    accepted: bool = False


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of a request that generates no token: the values made of the last hidden state of its prompt.

    dimensions: of an embedding, the first ones; 0 for a reranker's score.
    is_normalized: divide the embedding by its L2 norm.
    """

    dimensions: int = 0
    is_normalized: bool = False


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Validated and tokenized request, as the engine needs it. The engine holds no text.

    request_id: name from the client or the server, unique among the client's live calls of a service.
    prompt_ids: token ids below the vocabulary size; at least one.
    max_tokens, min_tokens: limits of the whole answer, including output_ids. prompt + max_tokens fits the model's
        context. 0 with `pooling`.
    arrival: when its call reached the front end, before its message was read.
    stop_token_ids, eos_token_ids: tokens that end the answer; the latter are empty under ignore_eos.
    priority: lower runs earlier.
    output_ids: tokens generated before, by an earlier engine or before a pause.
    deadline: when the answer becomes useless; None for never.
    client: owner for fairness and limits, see access/caller.py.
    resume_token: "" if the stream cannot be resumed.
    options: data for front ends that resume the stream; opaque to the engine.
    progress: progress under earlier engines.
    client_limit: maximum concurrent requests of the client; 0 for no limit.
    owner: only caller that may resume it; "" for any caller with the token.
    service: service that the request_id belongs to; "" for InferenceService. Ids of different services do not collide.
    index, samples: number of this sample, from 0, and the number of samples of the call. The samples of a call have the
        same request_id, client, arrival and prompt. Each document of a Rank call is a request with the number of the
        document as its index, 1 as `samples`, and a prompt of its own.
    constraint: on the answer's text; None for none.
    pooling: None for a request that generates tokens.
    speculate: whether steps may compute drafts of the answer.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    arrival: float
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    bypass_prefix_cache: bool = False
    cache_salt: str = ""
    output_ids: list[int] = []
    deadline: float | None = None
    client: str = ""
    resume_token: str = ""
    options: bytes = b""
    progress: PriorProgress = PriorProgress()
    client_limit: int = 0
    owner: str = ""
    service: str = ""
    index: int = 0
    samples: int = 1
    constraint: Constraint | None = None
    pooling: PoolingParams | None = None
    speculate: bool = True


class ModelInfo(msgspec.Struct, frozen=True):
    """Properties of the served model, known once it is loaded.

    embedding_dimension: 0 unless the task is to embed.
    """

    family: str
    vocabulary_size: int
    max_model_len: int
    dtype: str
    quantization: str
    kv_cache_dtype: str
    backend: str
    max_num_seqs: int
    max_queue: int
    kv_cache_tokens: int
    parameters: int
    deterministic: bool
    task: Task = "generate"
    embedding_dimension: int = 0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Load of the engine. free_kv_ratio is 1 for an empty cache; reusable prefixes count as free."""

    running: int = 0
    waiting: int = 0
    free_kv_ratio: float = 1.0
    tokens_per_second: float = 0.0
    paused: int = 0

    @property
    def used_kv_ratio(self) -> float:
        """Share of the cache that requests use, in [0, 1]."""
        return min(max(0.0, 1.0 - self.free_kv_ratio), 1.0)


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """End of a request in the engine.

    cached_tokens: prompt tokens found in the prefix cache at the first admission.
    grammar_completed: the answer satisfies its constraint; False without a constraint.
    drafted_tokens, accepted_drafts: drafts that this engine's steps computed for the request, and the accepted ones.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    timing: Timing
    grammar_completed: bool = False
    drafted_tokens: int = 0
    accepted_drafts: int = 0


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Output of one step for one request. Nothing follows `finish` or `error` for this key.

    token_ids: new tokens, usually one.
    error: see errors.to_wire.
    logprobs: one per token, if requested.
    prompt_logprobs: log-probabilities of this step's chunk, in order, if requested.
    values: of a request with `pooling`, an embedding or one score: float32, little-endian. Empty before its finish.
    """

    key: int
    token_ids: list[int] = []
    finish: Finish | None = None
    error: WireError | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    values: bytes = b""


class Record(msgspec.Struct, array_like=True):
    """Answer so far, from which any engine can continue it and any front end can send it again.

    request: first submitted request, with the deadline of the current reader.
    logprobs, prompt_logprobs: reports so far, if requested.
    finish: None while it runs, and if its reader left before the end.
    ended: when it finished or lost its reader; None while it has a reader.
    cached_tokens, timing: see PriorProgress.
    """

    request: Request
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish: Finish | None = None
    ended: float | None = None
    cached_tokens: int | None = None
    timing: Timing | None = None

    def add(self, output: Output) -> None:
        """Append an output, and apply its finish."""
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        if output.finish:
            self.finish = output.finish
            del self.token_ids[self.finish.generated_tokens :], self.logprobs[self.finish.generated_tokens :]

    def continuation(self, accepted: bool) -> Request:
        """Return a request for the remaining tokens."""
        sampling = self.request.sampling
        progress = PriorProgress(len(self.prompt_logprobs), self.cached_tokens, self.timing, accepted)
        if progress.num_reported == len(self.request.prompt_ids) - 1:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, sampling=sampling, output_ids=list(self.token_ids), progress=progress)

    def as_output(self, key: int) -> Output:
        """Return the record as the output of one step."""
        return Output(key, list(self.token_ids), self.finish, None, list(self.logprobs), list(self.prompt_logprobs))


# Front end to engine


class Hello(Wire, frozen=True):
    """First message on a connection. The reply is Ready."""


class EndedRecord(msgspec.Struct, frozen=True, array_like=True):
    """Encoded record of a stream that finished or lost its reader.

    token, owner: see Request.
    is_finished: whether it has a finish.
    tokens: number of tokens of the answer.
    ended: see Record.
    data: the Record as msgpack.
    """

    token: str
    owner: str
    is_finished: bool
    tokens: int
    ended: float
    data: bytes


class Restore(Wire, frozen=True):
    """Reply to Ready: the requests from before this connection, split into several messages.

    live: (key, record) of accepted requests with a reader. They continue as if submitted, in order of arrival.
    ended: records of streams that may be resumed.
    is_last: whether this is the last message.
    """

    live: list[tuple[int, Record]]
    ended: list[EndedRecord]
    is_last: bool = True


class Submit(Wire, frozen=True):
    """New request. The engine refuses it (an Output with an error) or queues it (its key in Outputs.accepted)."""

    key: int
    request: Request


class Cancel(Wire, frozen=True):
    """Cancel a request: its client has disconnected, or the front end found a stop string.

    keep: None if the client has disconnected; no Output follows. Otherwise the number of tokens of the answer to keep.
        An Output with a Finish follows, with that number of generated tokens and the reason stop_string.
    sent: when the message was sent.

    A cancel of a request that has ended meanwhile is ignored; the request's own finish was sent already.
    """

    key: int
    keep: int | None = None
    sent: float = msgspec.field(default_factory=time.monotonic)


class Pause(Wire, frozen=True):
    """The reader is slow: generate nothing for this request until Unpause."""

    key: int


class Unpause(Wire, frozen=True):
    """The reader has caught up."""

    key: int


class Abort(Wire, frozen=True):
    """Abort the call of this id with all its samples, from whichever front end.

    client: client of the call; "" for any.
    service: service of the call, see Request; None for any.

    The Reply is the number of calls with this id. If there are several, none is aborted.
    """

    call: int
    request_id: str
    client: str = ""
    service: str | None = None


class FlushPrefixCache(Wire, frozen=True):
    """Free the cached prefixes. The Reply is the number of freed blocks."""

    call: int


class Resume(Wire, frozen=True):
    """Read a stream from token_offset on. The previous reader gets TakenOver.

    owner: see Caller.
    deadline: deadline of the new reader.

    The reply is Resumed, followed by Outputs under `key`, or an Output with an error.
    """

    key: int
    token: str
    token_offset: int
    owner: str
    deadline: float | None


ToEngine = (Hello | Restore | Submit | Cancel | Pause | Unpause | Resume | Abort | FlushPrefixCache | ExplainRequest
            | ToEngineKv | ToEngineProfile)

# Engine to front end. Each carries the engine's epoch; messages of an earlier epoch are dropped.


class Ready(Wire, frozen=True):
    epoch: int
    model: ModelInfo


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The first row of a request is in the next step.

    cached_tokens: prompt tokens found in the prefix cache.
    """

    key: int
    cached_tokens: int


class Outputs(Wire, frozen=True):
    """Outputs of one step for one front end. Without content it is a heartbeat.

    started: sent in a separate message before the launch.
    accepted: keys of requests queued since the last message. A refused request gets an Output with an error instead.
    """

    epoch: int
    load: Load
    outputs: list[Output]
    started: list[Started] = msgspec.field(default_factory=list)
    accepted: list[int] = msgspec.field(default_factory=list)


class Resumed(Wire, frozen=True):
    """Record of a resumed stream. Without a finish, Outputs follow."""

    epoch: int
    key: int
    record: Record


class Reply(Wire, frozen=True):
    epoch: int
    call: int
    value: int


ToFrontend = Ready | Outputs | Resumed | Reply | ExplainReply | ProfileReply | ToSubscriber


def encode(message: ToEngine | ToFrontend) -> bytes:
    """Encode a message with its length prefix."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


MAX_RESTORE_BYTES = 1 << 16
"""Maximum size of the records in one Restore, unless one record is larger. Larger messages would stall both ends."""
_encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
