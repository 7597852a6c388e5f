"""Validation of requests that generate no token: EmbedRequest and RankRequest to the engine's `Request`.

A reranker's chat template renders messages of the roles query and document, and the instruction as system message, as
sentence-transformers passes them. `QWEN3` is the format of Qwen3-Reranker, for a folder whose template does not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from npuserve.npu.model.pooling import Pooling, Task
from npuserve.service.errors import InvalidField, NoTokenizer, Violations, quoted
from npuserve.service.ipc.messages import ModelInfo, PoolingParams, Request
from npuserve.service.requests.fields import check_number, check_token_ids
from npuserve.service.requests.message_limits import MAX_DOCUMENTS
from npuserve.service.requests.prompt import (
    MAX_EXCESS_PIECE_TOKENS,
    MAX_PIECE_CHARACTERS,
    check_length,
    check_made_ids,
    encode,
)
from npuserve.service.requests.validation import Policy, check_model, check_request_id, check_scheduling, check_task
from npuserve.service.text.model_folder import ModelFolder, Range
from npuserve.service.text.plain_text import Prompt, Template
from npuserve.v1 import pooling_pb2

if TYPE_CHECKING:
    from npuserve.service.text.template_process import TemplateProcess
    from npuserve.service.text.tokenizer import Tokenizer

MAX_CUTS = 8
"""Attempts to cut a document. One is enough unless the end of a cut text has other tokens than the whole text."""
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction in the model card of Qwen3-Reranker."""
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_PROBES = "query probe 7319", "document probe 2846"
"""Texts that a template contains only if it renders them."""


def check_embed(
    message: pooling_pb2.EmbedRequest, folder: ModelFolder, info: ModelInfo, name: str, arrival: float, policy: Policy
) -> Request:
    """Check an EmbedRequest and tokenize its input. Arguments and errors as of `validation.check`, and WrongTask."""
    pooling = _begin(message, folder, "embed")
    bad = Violations()
    check_request_id(message, name, policy, bad)
    priority = check_scheduling(message.scheduling, policy, bad)
    dimensions = message.dimensions if message.HasField("dimensions") else info.embedding_dimension
    check_number("dimensions", dimensions, Range(1, info.embedding_dimension), bad)
    ids: list[int] = []
    with bad.collect():
        ids = _input_ids(message, folder, pooling, info)
    bad.check()
    is_normalized = message.normalize if message.HasField("normalize") else pooling.is_normalized
    return Request(
        name, ids, 0, arrival, priority=priority, bypass_prefix_cache=message.scheduling.bypass_prefix_cache,
        cache_salt=message.scheduling.cache_salt, pooling=PoolingParams(dimensions, is_normalized))


def check_rank(
    message: pooling_pb2.RankRequest, folder: ModelFolder, info: ModelInfo, name: str, arrival: float, policy: Policy
) -> list[Request]:
    """Check a RankRequest, and return the request of each document. Arguments and errors as of `check_embed`."""
    pooling = _begin(message, folder, "rank")
    tokenizer = folder.tokenizer
    if tokenizer is None:
        raise NoTokenizer("query: the served model has no tokenizer")
    bad = Violations()
    check_request_id(message, name, policy, bad)
    priority = check_scheduling(message.scheduling, policy, bad)
    if not message.query:
        bad.add("query", "must not be empty")
    if not 1 <= (count := len(message.documents)) <= MAX_DOCUMENTS:
        bad.add("documents", f"must be 1 to {MAX_DOCUMENTS} documents, got {count}")
    bad.check()
    limit = _max_tokens(pooling, info)
    with bad.collect():
        check_length(message.query, "query", tokenizer, limit)
    bad.check()
    instruction = message.instruction if message.HasField("instruction") else pooling.default_prompt
    prompts = _RankPrompts(
        tokenizer, rank_template(tokenizer.chat), message.query, instruction, limit, policy.plain_content)
    documents: list[list[int]] = []
    for index, document in enumerate(message.documents):
        with bad.collect():
            documents.append(prompts.ids(f"documents[{index}]", document, message.truncate))
            check_made_ids(f"documents[{index}]", documents[-1], info)
    bad.check()
    return [Request(
        name, ids, 0, arrival, priority=priority, bypass_prefix_cache=message.scheduling.bypass_prefix_cache,
        cache_salt=message.scheduling.cache_salt, index=index, pooling=PoolingParams())
        for index, ids in enumerate(documents)]


class Qwen3RankTemplate:
    """Format of Qwen3-Reranker, with the interface of a chat template."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text. messages: see `pair_messages`."""
        texts = {message["role"]: message["content"] for message in messages}
        instruction = texts.get("system", DEFAULT_INSTRUCTION)
        return (
            f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n"
            f"<Query>: {texts['query']}\n<Document>: {texts['document']}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n")


QWEN3 = Qwen3RankTemplate()


def pair_messages(query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
    """Return the messages of a query and a document. instruction: None for the template's own."""
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    return [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]


@functools.lru_cache(maxsize=1)  # a front end serves one model
def rank_template(chat: TemplateProcess | None) -> Template:
    """Return the model's chat template if it renders a query and a document, else the format of Qwen3-Reranker.

    Raises Unavailable if the process of the template cannot start.
    """
    if chat is None:
        return QWEN3
    try:
        text = chat.render(pair_messages(*_PROBES, None), {}, [])
    except InvalidField:  # the template refuses the roles
        return QWEN3
    return chat if all(probe in text for probe in _PROBES) else QWEN3


class _RankPrompts:
    """Prompts of one Rank call.

    limit: maximum tokens of a prompt.
    is_plain: the text of special tokens in the client's strings is plain text.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, query: str, instruction: str | None, limit: int, is_plain: bool
    ):
        self._tokenizer = tokenizer
        self._template = template
        self._query = query
        self._instruction = instruction
        self._limit = limit
        self._is_plain = is_plain

    def ids(self, field: str, document: str, truncate: bool) -> list[int]:
        """Return the prompt's ids for a document, which is cut if `truncate`. Raises InvalidField, naming `field`."""
        if truncate:
            document = _shortened(document, self._tokenizer, self._limit)
        else:
            check_length(document, field, self._tokenizer, self._limit)
        ids = self._encode(field, document)
        for _ in range(MAX_CUTS):
            excess = len(ids) - self._limit
            if excess <= 0:
                return ids
            if not truncate:
                break
            kept = self._tokenizer.encode(document, add_special_tokens=False)[:-excess]
            if not kept:
                break
            document = self._tokenizer.decode(kept).rstrip("\N{REPLACEMENT CHARACTER}")
            ids = self._encode(field, document)
        raise InvalidField(field, (
            f"{len(ids)} tokens with the query and the instruction are too many; must be at most {self._limit} tokens"))

    def _encode(self, field: str, document: str) -> list[int]:
        messages = pair_messages(self._query, document, self._instruction)
        if self._is_plain:
            prompt = self._tokenizer.plain_text.render(self._template, messages, {}, [])
        else:
            prompt = Prompt(self._template.render(messages, {}, []))
        return encode(prompt, field, self._tokenizer, False)


def _begin(
    message: pooling_pb2.EmbedRequest | pooling_pb2.RankRequest, folder: ModelFolder, task: Task
) -> Pooling:
    """Return how the model pools, after checks of the model's name and of its task."""
    check_model(message, folder)
    check_task(folder, task)
    assert folder.pooling
    return folder.pooling


def _max_tokens(pooling: Pooling, info: ModelInfo) -> int:
    """Return the maximum number of tokens of an input."""
    return min(info.max_model_len, pooling.max_tokens or info.max_model_len)


def _input_ids(
    message: pooling_pb2.EmbedRequest, folder: ModelFolder, pooling: Pooling, info: ModelInfo
) -> list[int]:
    """Return the ids of an input: at least one, and at most as many as the model takes."""
    limit = _max_tokens(pooling, info)
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidField("input", "one of text and token_ids is needed")
    if kind == "token_ids":
        if message.HasField("prompt_name"):
            raise InvalidField("prompt_name", "is for text; put the tokens of a prompt before token_ids")
        ids = list(message.token_ids.ids[:limit] if message.truncate else message.token_ids.ids)
        if len(ids) <= limit:
            bad = Violations()
            check_token_ids("token_ids.ids", ids, info.vocabulary_size, bad)
            bad.check()
    else:
        ids = _text_ids(message, folder.tokenizer, pooling, limit) if message.text else []
    if not ids:
        raise InvalidField(kind, "must be at least one token, got an empty input")
    if len(ids) > limit:
        raise InvalidField(kind, f"{len(ids)} tokens are too many; must be at most {limit} tokens")
    check_made_ids(kind, ids, info)
    return ids


def _text_ids(
    message: pooling_pb2.EmbedRequest, tokenizer: Tokenizer | None, pooling: Pooling, limit: int
) -> list[int]:
    """Return the ids of a text with its prompt and the special tokens, at most `limit` if the request says so."""
    if tokenizer is None:
        raise NoTokenizer("text: the served model has no tokenizer; send token_ids")
    text = _prompt(message, pooling) + message.text
    if message.truncate:
        text = _shortened(text, tokenizer, limit)
    else:
        check_length(text, "text", tokenizer, limit)
    ids = encode(Prompt(text), "text", tokenizer, True)
    if not message.truncate or len(ids) <= limit:
        return ids
    head, tail = tokenizer.special_ids_around
    kept = limit - len(head) - len(tail)
    if kept < 1:
        raise InvalidField("text", f"must be at most {limit} tokens, which leaves no place beside special tokens")
    return [*head, *ids[len(head) : len(head) + kept], *tail]


def _prompt(message: pooling_pb2.EmbedRequest, pooling: Pooling) -> str:
    """Return the text that precedes the input."""
    if not message.HasField("prompt_name"):
        return pooling.default_prompt or ""
    if message.prompt_name and message.prompt_name not in pooling.prompts:
        names = ", ".join(sorted(pooling.prompts)) or "none"
        raise InvalidField("prompt_name", f"must be a prompt of the model ({names}), got {quoted(message.prompt_name)}")
    return pooling.prompts.get(message.prompt_name, "")


def _shortened(text: str, tokenizer: Tokenizer, limit: int) -> str:
    """Return the beginning of a text with at least its first `limit` tokens, and not many more.

    A text that is short enough to be tokenized as a whole stays.
    """
    if len(text) <= max(limit, MAX_PIECE_CHARACTERS):
        return text
    count = 0
    for start in range(0, len(text), MAX_PIECE_CHARACTERS):
        end = start + MAX_PIECE_CHARACTERS
        count += len(tokenizer.encode(text[start:end], add_special_tokens=False)) - MAX_EXCESS_PIECE_TOKENS
        if count > limit:
            return text[:end]
    return text
