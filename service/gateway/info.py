"""Descriptions of the model, the server and its load in VllmEngine's messages."""

from __future__ import annotations

import json
import time
from importlib import metadata
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.service import clock
from npuserve.service.config import ServerConfig
from npuserve.service.ipc.messages import ModelInfo
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.text.model_folder import ModelFolder

SERVER_TYPE = "npuserve"
CONSTRAINT_START = "first_token"
"""Where a constraint begins. A gateway that knows it puts the thought of a model that thinks into the constraint."""


def model_info(folder: ModelFolder, info: ModelInfo) -> vllm.GetModelInfoResponse:
    """Return the description of the served model.

    Both paths are the path of the model's folder on this machine. A gateway that does not find the folder calls
    GetTokenizer. A name on the hub would let the gateway load another revision's tokenizer.
    """
    path = str(folder.path)
    config = folder.config
    defaults = json.dumps(folder.defaults, separators=(",", ":")) if folder.defaults else ""
    return vllm.GetModelInfoResponse(
        model_path=path, tokenizer_path=path if folder.tokenizer else "", served_model_name=folder.name,
        is_generation=info.task == "generate", max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len - (info.task == "generate"),
        vocab_size=info.vocabulary_size, model_type=_text(config.get("model_type")), architectures=[info.family],
        eos_token_ids=sorted(folder.eos_token_ids), pad_token_id=_id(config.get("pad_token_id")),
        bos_token_id=_id(config.get("bos_token_id")), default_sampling_params_json=defaults)


def server_info(
    config: ServerConfig, engine: EngineClient, started: float, last_request: float
) -> vllm.GetServerInfoResponse:
    """Return the description of the server.

    started: time.monotonic() seconds of the front end's start.
    last_request: Unix time of the front end's last Generate, in seconds; 0: none yet.
    """
    load = engine.load
    info = engine.model_info
    response = vllm.GetServerInfoResponse(
        active_requests=load.running + load.waiting, uptime_seconds=time.monotonic() - started, server_type=SERVER_TYPE,
        last_receive_timestamp=last_request, data_parallel_size=1, block_size=config.block_size,
        constrained_decoding_start=CONSTRAINT_START)
    if info is not None:
        response.kv_cache_dtype = info.kv_cache_dtype
        response.model_dtype = f"torch.{info.dtype}"
        response.max_num_seqs = info.max_num_seqs
    return response


def loads(engine: EngineClient, info: ModelInfo, dp_rank: int) -> vllm.GetLoadsResponse:
    """Return the load of a rank. This server has rank 0 alone, which an absent number means too.

    Blocks that hold only reusable prefixes count as free, also in `token_usage`: they cost a new request nothing.
    """
    load = engine.load
    usage = load.used_kv_ratio
    rank = vllm.SchedulerLoad(
        dp_rank=0, num_running_reqs=load.running, num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting, num_used_tokens=round(usage * info.kv_cache_tokens),
        max_total_num_tokens=info.kv_cache_tokens, token_usage=usage, gen_throughput=load.tokens_per_second,
        utilization=load.running / info.max_num_seqs, max_running_requests=info.max_num_seqs,
        num_waiting_uncached_tokens=engine.waiting_prompt_tokens)
    return vllm.GetLoadsResponse(
        timestamp=clock.now().isoformat(), version=metadata.version("npuserve"), dp_rank_count=1,
        loads=[rank] if dp_rank == 0 else [])


def _id(value: Any) -> int:
    """Return a token id of config.json; 0 if there is none."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and not isinstance(first, bool) and 0 <= first < 1 << 31 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
