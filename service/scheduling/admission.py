"""Rules by which a new request may enter the queue. `Scheduler.add` applies them in this order.

1. A request that could never fit the KV cache or max_model_len is invalid. Front ends refuse such new requests. A
   stream that is resumed may be of an earlier server with larger limits.
2. A client has at most `client_limit` live requests, if it has a limit. Each sample of a call is a request. The first
   one is refused unless all of them are within the limit.
3. A request whose first token would miss its deadline, as far as anything was measured (latency_estimator.py), is
   refused before anything is queued or computed for it.
4. If the queue is full, a request of a client with fewer requests displaces the newest request of the client with the
   most. Otherwise the new request is refused. Both errors carry a time to retry.

A request that an earlier engine had accepted is always accepted.
"""

from __future__ import annotations

from npuserve.service.errors import InvalidField
from npuserve.service.ipc.messages import Request


def check_size(request: Request, num_slots: int, max_model_len: int | None) -> None:
    """Raise InvalidField if a request never fits.

    num_slots: tokens that the KV cache holds.
    max_model_len: maximum tokens of a prompt and its answer; None for no such limit.
    """
    if not request.prompt_ids:
        raise InvalidField("prompt", "must have at least 1 token")
    if request.pooling is not None:
        _check_pooled_size(len(request.prompt_ids), num_slots, max_model_len)
        return
    if len(request.output_ids) >= request.max_tokens:
        raise InvalidField(
            "stopping.max_tokens", f"must be more than the {len(request.output_ids)} tokens generated before, "
            f"got {request.max_tokens}")
    num_prompt_tokens = len(request.prompt_ids)
    if num_prompt_tokens > num_slots:
        raise InvalidField(
            "prompt", f"must be at most {num_slots} tokens, what the KV cache holds, got {num_prompt_tokens}")
    # The last token is sampled, never computed, so it needs no slot.
    if num_prompt_tokens + request.max_tokens > num_slots + 1:
        raise InvalidField(
            "stopping.max_tokens", f"must be at most {num_slots + 1 - num_prompt_tokens} after a prompt of "
            f"{num_prompt_tokens} tokens, since the KV cache holds {num_slots}; got {request.max_tokens}")
    if max_model_len is None:
        return
    if num_prompt_tokens >= max_model_len:
        raise InvalidField(
            "prompt", f"must be at most {max_model_len - 1} tokens, as max_model_len is {max_model_len}, "
            f"got {num_prompt_tokens}")
    if num_prompt_tokens + request.max_tokens > max_model_len:
        raise InvalidField(
            "stopping.max_tokens", f"must be in [1, {max_model_len - num_prompt_tokens}], as max_model_len is "
            f"{max_model_len} and the prompt has {num_prompt_tokens} tokens, got {request.max_tokens}")


def _check_pooled_size(num_prompt_tokens: int, num_slots: int, max_model_len: int | None) -> None:
    """Raise InvalidField if the prompt of a request that generates no token never fits."""
    limit = num_slots if max_model_len is None else min(num_slots, max_model_len)
    if num_prompt_tokens > limit:
        raise InvalidField("prompt", f"must be at most {limit} tokens, got {num_prompt_tokens}")
