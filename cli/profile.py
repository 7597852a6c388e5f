"""`npuserve profile`: record the kernels of a running server's next steps as a trace, and print their table."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from npuserve.cli import connection
from npuserve.client import ClientError
from npuserve.client.channel import auth_metadata, open_channel
from npuserve.client.rpc_errors import from_rpc
from npuserve.common.answer import value_name
from npuserve.npu.profile import DEFAULT_SECONDS, DEFAULT_STEPS, MAX_PROFILE_SECONDS, MAX_PROFILE_STEPS
from npuserve.service.arguments import number
from npuserve.v1 import admin_service_pb2 as pb
from npuserve.v1 import admin_service_pb2_grpc

WRITE_SECONDS = 300.0
"""Time for the engine to write a trace, after the end of the profile."""
HEAD = ("kernel", "calls/step", "calls/layer", "mean", "of the step", "of the floor", "GB/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record the kernels of a server's next steps. The server needs --profile-dir, and the caller the admin right. "
        "The profile ends after --steps or --seconds, also if this command is interrupted.")
    connection.add_target_argument(parser)
    parser.add_argument("--steps", type=number(int, 1, MAX_PROFILE_STEPS), default=DEFAULT_STEPS, metavar="N",
                        help="steps to record (default: %(default)s)")
    parser.add_argument("--seconds", type=number(float, 0.001, MAX_PROFILE_SECONDS), default=DEFAULT_SECONDS,
                        metavar="SECONDS", help="maximum time to record (default: %(default)s)")
    parser.add_argument("--name", metavar="NAME", help="name of the trace's file (default: profile-N)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    connection.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if a trace was written, 1 if not."""
    try:
        profile = record(args)
    except connection.ConnectionFailed as error:
        return connection.print_error(error, args)
    except grpc.RpcError as error:
        failed: ClientError = from_rpc(error)
        return connection.print_error(failed, args)
    if args.json:
        print(json.dumps(MessageToDict(
            profile, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)))
    else:
        print(text(profile))
    return 0 if profile.path else 1


def record(args: argparse.Namespace) -> pb.StopProfileResponse:
    """Start a profile, wait for its end, and return its result. Ctrl-C ends it.

    Raise ConnectionFailed for unusable files, and grpc.RpcError.
    """
    tls, key = connection.read_credentials(args)
    start = pb.StartProfileRequest(name=args.name, steps=args.steps)
    start.max_duration.FromNanoseconds(int(args.seconds * 1e9))
    with open_channel(args.target, tls) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        options: dict[str, Any] = {"metadata": auth_metadata(key)}
        stub.StartProfile(start, timeout=WRITE_SECONDS, **options)
        try:
            profile: pb.StopProfileResponse = stub.StopProfile(
                pb.StopProfileRequest(wait=True), timeout=args.seconds + WRITE_SECONDS, **options)
        except KeyboardInterrupt:
            with contextlib.suppress(grpc.RpcError):
                stub.StopProfile(pb.StopProfileRequest(), timeout=WRITE_SECONDS, **options)
            raise
    return profile


def text(profile: pb.StopProfileResponse) -> str:
    """Return the result as lines of text."""
    seconds = profile.duration.ToNanoseconds() / 1e9
    if not profile.steps:
        return f"no step ran in {seconds:.1f} s, so there is no trace: send requests while the profile runs"
    ending = value_name(pb.ProfileEnding, profile.ending, "PROFILE_ENDING_").lower()
    lines = [f"trace: {profile.path} on the server, {profile.bytes / 1e6:.2f} MB; open it in https://ui.perfetto.dev",
             f"{profile.steps} steps in {seconds:.2f} s, ended by {ending}; {profile.layers} layers; "
             f"{profile.recorder}", ""]
    lines += _columns([HEAD, *(_row(profile, kernel) for kernel in profile.kernels)])
    step = profile.step_time.ToNanoseconds() / 1e9
    floor = sum(kernel.floor_bytes for kernel in profile.kernels)
    if profile.has_times and step:
        kernels = sum(kernel.seconds for kernel in profile.kernels)
        lines += ["", f"a step takes {_time(step / profile.steps)} on the device, "
                      f"{kernels / step:.0%} of it in kernels; it moves "
                      f"at least {floor / profile.steps / 1e6:.2f} MB: {floor / step / 1e9:.1f} GB/s"]
    elif not profile.has_times:
        lines += ["", "an emulated device: the order and the number of the calls are real, times are not recorded"]
    return "\n".join(lines)


def _row(profile: pb.StopProfileResponse, kernel: pb.ProfiledKernel) -> Sequence[str]:
    step = profile.step_time.ToNanoseconds() / 1e9
    floor = sum(each.floor_bytes for each in profile.kernels)
    per_step = kernel.calls / profile.steps
    timed = profile.has_times and kernel.seconds > 0
    return (
        kernel.kernel, f"{per_step:.4g}", f"{per_step / profile.layers:.3g}",
        _time(kernel.seconds / kernel.calls) if timed else "–",
        f"{kernel.seconds / step:.1%}" if timed and step else "–",
        f"{kernel.floor_bytes / floor:.1%}" if kernel.floor_bytes else "–",
        f"{kernel.floor_bytes / kernel.seconds / 1e9:.1f}" if timed and kernel.floor_bytes else "–")


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if index == 0 else cell.rjust(width)
                      for index, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
