"""`npuserve explain`: say where the time of a request of a running server went."""

from __future__ import annotations

import argparse
import json

import grpc
from google.protobuf.json_format import MessageToDict

from npuserve.cli import connection
from npuserve.client import ClientError
from npuserve.client.channel import auth_metadata, open_channel
from npuserve.client.rpc_errors import from_rpc
from npuserve.common.answer import value_name
from npuserve.v1 import admin_service_pb2 as pb
from npuserve.v1 import admin_service_pb2_grpc

CALL_SECONDS = 30.0
MEANINGS = {
    "preparation": "message, chat template and tokenizer, before the engine",
    "grammar": "compilation of its constraint",
    "queue": "waiting for its first step",
    "preemption": "others had its place or its KV blocks",
    "slow_reader": "paused, since the client did not read",
    "prefill": "computing its own prompt",
    "neighbour_prefill": "added to its tokens by prompts of other requests",
    "masks": "added to its tokens by the masks of constraints",
    "host": "added to its tokens by a host that was late",
    "slow_steps": "added to its tokens by steps slower than usual",
    "decode": "computing its tokens, as usual",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say where the time of a request went: queue, preemption, prompts of other requests, masks, slow steps and "
        "kernels. The caller needs the admin right. The server knows its live requests and the latest that ended.")
    parser.add_argument("request_id", metavar="REQUEST_ID", help="id of the request, as in the answer and the log")
    parser.add_argument("--client", default="", help="client of the request, as in the log (default: any)")
    connection.add_target_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    connection.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the request is known, 1 if not."""
    try:
        tls, key = connection.read_credentials(args)
        with open_channel(args.target, tls) as channel:
            response = admin_service_pb2_grpc.AdminServiceStub(channel).ExplainRequest(
                pb.ExplainRequestRequest(request_id=args.request_id, client=args.client), timeout=CALL_SECONDS,
                metadata=auth_metadata(key))
    except connection.ConnectionFailed as error:
        return connection.print_error(error, args)
    except grpc.RpcError as error:
        failed: ClientError = from_rpc(error)
        return connection.print_error(failed, args)
    if args.json:
        print(json.dumps(MessageToDict(
            response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)))
    else:
        print("\n\n".join(map(text, response.requests)))
    return 0


def text(request: pb.RequestExplanation) -> str:
    """Return an explanation as lines: the request, its delays, and kernels beside their usual time."""
    total = request.duration.ToTimedelta().total_seconds()
    state = "until now" if request.live else "until its end"
    lines = [
        f"request {request.request_id}, sample {request.index}, of {request.client or 'an unnamed client'}: "
        f"{total:.3f} s {state}",
        f"{request.prompt_tokens} prompt tokens ({request.cached_tokens} cached), {request.generated_tokens} generated "
        f"tokens, {request.steps} steps"]
    if not request.complete:
        lines.append("its first steps are no longer known; their time is missing below")
    for delay in request.delays:
        cause = value_name(pb.DelayCause, delay.cause, "DELAY_CAUSE_").lower()
        seconds = delay.duration.ToTimedelta().total_seconds()
        share = seconds / total if total else 0.0
        detail = f"; {delay.detail}" if delay.detail else ""
        lines.append(f"  {seconds:9.3f} s  {share:4.0%}  {cause:<17}  {MEANINGS.get(cause, '')}{detail}")
    for kernel in request.kernels[:8]:
        usual = f", usually {1e6 * kernel.usual_seconds:.1f} µs" if kernel.usual_seconds else ""
        lines.append(f"  kernel {kernel.kernel}: {kernel.calls} calls timed, {1e6 * kernel.mean_seconds:.1f} µs{usual}")
    return "\n".join(lines)
