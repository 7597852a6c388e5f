"""What front ends and the engine process say to each other over the local socket.

The socket is a Unix stream. Every message is its length in 4 bytes, little end first, then one msgpack array with its
type's tag first; there is no pickle. Times are seconds of time.monotonic(), which all processes of one machine share. A
front end names its requests by `key`, an integer that it uses for one request alone; it stays the same when the request
goes on in another engine.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service.errors import WireError

FinishReason = Literal["eos", "stop_token", "stop_string", "length", "deadline", "aborted"]


class Wire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a request's disjoint phases in the engine, and when its last step ended. See the proto's Timing."""

    queue: float
    prefill_chunks: list[float]
    decode: float
    device: float
    host: float
    last_step_end: float


class Past(msgspec.Struct, frozen=True, array_like=True):
    """What a request that goes on brings with it, beside its output_ids, so that its end tells of all its lives.

    num_reported: prompt tokens whose log-probabilities were reported. cached_tokens: those of its first admission,
    None before it. timing: its phases so far. accepted: it was in the queue of an engine that died, and is not refused
    by the next one's.
    """

    num_reported: int = 0
    cached_tokens: int | None = None
    timing: Timing | None = None
    accepted: bool = False


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One client ask, checked and tokenized: what the engine needs of it. The engine holds no text.

    request_id: the client's or the server's name for it, unique among the client's live requests. prompt_ids: at least
    one, each below the vocabulary.
    output_ids: tokens generated before, by an engine that died or until it was left. max_tokens, min_tokens: of the
    whole answer, output_ids included; prompt + max_tokens is at most the model's context. stop_token_ids and
    eos_token_ids end the answer (the latter empty under ignore_eos). priority: lower is earlier. arrival: when the
    front end got it. deadline: when it is of no use any more. client: whose it is, see auth.py. client_limit: requests
    that it may have at once, 0 for no limit. resume_token: "" if nobody may resume it. ask: what front ends need of it
    and the engine does not, see resume.py. owner: the only caller who may resume it, see auth.py; "": whoever has the
    token.
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
    ask: bytes = b""
    past: Past = Past()
    client_limit: int = 0
    owner: str = ""


class ModelInfo(msgspec.Struct, frozen=True):
    """What is served, as the engine knows it once the model is loaded."""

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


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is. free_kv_ratio: 1 is an empty cache, reusable prefixes counting as free."""

    running: int = 0
    waiting: int = 0
    free_kv_ratio: float = 1.0
    tokens_per_second: float = 0.0


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """How a request ended in the engine. cached_tokens: prompt tokens that the prefix cache held at first."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    timing: Timing


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one step made for one request. After `finish` or `error` nothing follows for this key.

    token_ids: new ones, usually one. logprobs: one per token, where asked for. prompt_logprobs: those of this step's
    chunk, in order. error: see errors.to_wire.
    """

    key: int
    token_ids: list[int] = []
    finish: Finish | None = None
    error: WireError | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Record(msgspec.Struct, array_like=True):
    """An answer so far, from which any engine can go on with it and any front end can tell it anew.

    request: as it was submitted first, with the deadline of who reads it. logprobs, prompt_logprobs: the reports, where
    asked for. finish: None while it goes on, and if it was left. ended: when it finished or was left; None while
    somebody reads it. cached_tokens, timing: see Past.
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
        """Take in what a step made, and how it ended."""
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        if output.finish:
            self.finish = output.finish
            del self.token_ids[self.finish.generated_tokens :], self.logprobs[self.finish.generated_tokens :]

    def rest(self, accepted: bool) -> Request:
        """The request for what is missing."""
        sampling = self.request.sampling
        past = Past(len(self.prompt_logprobs), self.cached_tokens, self.timing, accepted)
        if past.num_reported == len(self.request.prompt_ids) - 1:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, sampling=sampling, output_ids=list(self.token_ids), past=past)

    def whole(self, key: int) -> Output:
        """All of it, as if it were made in one step."""
        return Output(key, list(self.token_ids), self.finish, None, list(self.logprobs), list(self.prompt_logprobs))


# Front end to engine


class Hello(Wire, frozen=True):
    """The first on every connection; answered by Ready."""


class EndedRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record of a stream that finished or was left, as msgpack.

    token, owner: see Request.
    is_finished: has a finish.
    tokens: of the answer.
    ended: see Record.
    data: the record.
    """

    token: str
    owner: str
    is_finished: bool
    tokens: int
    ended: float
    data: bytes


class Restore(Wire, frozen=True):
    """The answer to Ready: what the front end knows of requests that came before this connection, in several messages.

    live: (key, record) of those that it waits for; they go on as if submitted, in order of their arrival.
    ended: those that may still be resumed.
    is_last: nothing follows.
    """

    live: list[tuple[int, Record]]
    ended: list[EndedRecord]
    is_last: bool = True


class Submit(Wire, frozen=True):
    """A new request; refused at once (an Output with an error) or queued (its key in Outputs.accepted)."""

    key: int
    request: Request


class Cancel(Wire, frozen=True):
    """Nobody waits for this request any more, or the front end has found its stop string.

    keep: None if the client is gone, and no Output follows. Otherwise the number of tokens of the answer that stand,
    and an Output with the Finish follows, of that many generated tokens and with reason stop_string. A request that
    ended in between is not known any more, and its own finish is already on its way. sent: when.
    """

    key: int
    keep: int | None = None
    sent: float = msgspec.field(default_factory=time.monotonic)


class Pause(Wire, frozen=True):
    """Its reader is slow: make no more of it until Unpause."""

    key: int


class Unpause(Wire, frozen=True):
    """Its reader has read on."""

    key: int


class Abort(Wire, frozen=True):
    """AdminService.Abort: end the one request of this id, whichever front end it came from. client: whose; "" for any.
    Answered by Reply: how many there are; if they are several, none is ended."""

    call: int
    request_id: str
    client: str = ""


class FlushPrefixCache(Wire, frozen=True):
    """Answered by Reply: the number of blocks."""

    call: int


class Resume(Wire, frozen=True):
    """Somebody wants to read a stream from token_offset on. Answered by Resumed, and Outputs follow under `key`; or by
    an Output with an error. Who read it so far gets TakenOver. owner: see Caller. deadline: of the new reader."""

    key: int
    token: str
    token_offset: int
    owner: str
    deadline: float | None


ToEngine = Hello | Restore | Submit | Cancel | Pause | Unpause | Resume | Abort | FlushPrefixCache

# Engine to front end; each carries the engine's epoch, and those of a dead epoch are dropped


class Ready(Wire, frozen=True):
    epoch: int
    model: ModelInfo


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request has its first row in the step that is launched next. cached_tokens: prompt tokens that the prefix cache
    held."""

    key: int
    cached_tokens: int


class Outputs(Wire, frozen=True):
    """All that a step made for one front end. Without content it is the heartbeat.

    started: comes in a message of its own, before the launch. accepted: keys of the requests that were queued since the
    last message; of a request that is refused, an Output with the error comes instead.
    """

    epoch: int
    load: Load
    outputs: list[Output]
    started: list[Started] = []
    accepted: list[int] = []


class Resumed(Wire, frozen=True):
    """What there is of a stream; without a finish, more follows."""

    epoch: int
    key: int
    record: Record


class Reply(Wire, frozen=True):
    epoch: int
    call: int
    value: int


ToFrontend = Ready | Outputs | Resumed | Reply


class Splitter:
    """Cuts what comes from the socket into messages; what is of an unfinished one waits for the rest."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, without their lengths."""
        self._data += data
        found, start = [], 0
        while len(self._data) >= (body := start + LENGTH_BYTES):
            end = body + int.from_bytes(self._data[start:body], "little")
            if end > len(self._data):
                break
            found.append(bytes(self._data[body:end]))
            start = end
        del self._data[:start]
        return found


def encode(message: ToEngine | ToFrontend) -> bytes:
    """As it goes over the socket."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


LENGTH_BYTES = 4
MAX_RESTORE_BYTES = 1 << 16
"""Of the records of one Restore, unless one record is larger: larger messages would stall both ends."""
_encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
