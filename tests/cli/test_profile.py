"""`npuserve profile` against a fake AdminService."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from npuserve.cli import profile
from npuserve.cli.main import main
from npuserve.v1 import admin_service_pb2 as pb
from npuserve.v1 import admin_service_pb2_grpc

Capture = pytest.CaptureFixture[str]
KERNELS = [pb.ProfiledKernel(kernel="linear", calls=48, seconds=0.006, floor_bytes=3e6),
           pb.ProfiledKernel(kernel="paged_attention", calls=12, seconds=0.003, floor_bytes=1e6),
           pb.ProfiledKernel(kernel="keep_ids", calls=4, seconds=4e-6)]


class Administration(admin_service_pb2_grpc.AdminServiceServicer):
    """Servicer that records its requests. refusal: (code, details) of StartProfile; None to start."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.keys: list[str | bytes] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.made = pb.StopProfileResponse(
            name="mine", path="traces/mine.trace.json", bytes=2_500_000, steps=4, layers=3, has_times=True,
            ending="PROFILE_ENDING_STEPS", recorder="cpu: kernel timers of the runner", kernels=KERNELS)
        self.made.duration.FromNanoseconds(1_500_000_000)
        self.made.step_time.FromNanoseconds(12_000_000)

    def StartProfile(self, request: pb.StartProfileRequest, context: grpc.ServicerContext) -> pb.StartProfileResponse:
        self.requests.append(request)
        self.keys += [value for key, value in context.invocation_metadata() if key == "authorization"]
        if self.refusal:
            context.abort(*self.refusal)
        return pb.StartProfileResponse(name=request.name or "profile-1")

    def StopProfile(self, request: pb.StopProfileRequest, context: grpc.ServicerContext) -> pb.StopProfileResponse:
        self.requests.append(request)
        return self.made


@pytest.fixture
def servicer() -> Administration:
    return Administration()


@pytest.fixture
def target(servicer: Administration) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_profile_prints_the_file_and_the_table(
    target: str, servicer: Administration, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert main(["profile", "--target", target, "--steps", "4", "--seconds", "2.5", "--name", "mine",
                 "--api-key-file", str(tmp_path / "key")]) == 0
    start = pb.StartProfileRequest(name="mine", steps=4)
    start.max_duration.FromNanoseconds(2_500_000_000)
    assert servicer.requests == [start, pb.StopProfileRequest(wait=True)]
    assert servicer.keys == ["Bearer secret"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("trace: traces/mine.trace.json on the server, 2.50 MB")
    assert printed[1] == "4 steps in 1.50 s, ended by steps; 3 layers; cpu: kernel timers of the runner"
    assert printed[3].split()[0] == "kernel"
    rows = {line.split()[0]: line.split()[1:] for line in printed[4:7]}
    assert rows == {
        "linear": ["12", "4", "125", "µs", "50.0%", "75.0%", "0.5"],
        "paged_attention": ["3", "1", "250", "µs", "25.0%", "25.0%", "0.3"],
        "keep_ids": ["1", "0.333", "1", "µs", "0.0%", "–", "–"]}
    assert printed[-1] == "a step takes 3 ms on the device, 75% of it in kernels; it moves at least 1.00 MB: 0.3 GB/s"


def test_profile_ending_of_a_newer_server_is_its_number(
    target: str, servicer: Administration, capsys: Capture
) -> None:
    servicer.made.MergeFromString(b"\x28\x63")  # field 5, ending: 99
    assert main(["profile", "--target", target]) == 0
    assert "4 steps in 1.50 s, ended by 99;" in capsys.readouterr().out


def test_profile_without_times_says_so(target: str, servicer: Administration, capsys: Capture) -> None:
    servicer.made.has_times = False
    for kernel in servicer.made.kernels:
        kernel.seconds = 0
    assert main(["profile", "--target", target]) == 0
    printed = capsys.readouterr().out
    assert "an emulated device: the order and the number of the calls are real, times are not recorded" in printed
    assert "µs" not in printed


def test_profile_without_steps_fails_with_advice(target: str, servicer: Administration, capsys: Capture) -> None:
    servicer.made = pb.StopProfileResponse(name="mine")
    assert main(["profile", "--target", target]) == 1
    assert "no step ran" in capsys.readouterr().out


def test_profile_refusal_is_one_sentence(target: str, servicer: Administration, capsys: Capture) -> None:
    servicer.refusal = grpc.StatusCode.FAILED_PRECONDITION, "profiles are off"
    assert main(["profile", "--target", target]) == 1
    assert capsys.readouterr() == ("", f"npuserve: {target}: profiles are off (FAILED_PRECONDITION)\n")


def test_profile_json_is_one_object(target: str, capsys: Capture) -> None:
    assert main(["profile", "--target", target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["steps"], found["kernels"][0]["kernel"]) == ("traces/mine.trace.json", 4, "linear")


def test_profile_interrupted_ends_the_profile(
    target: str, servicer: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(admin_service_pb2_grpc.AdminServiceStub):
        def __init__(self, channel: grpc.Channel):
            super().__init__(channel)
            stop = self.StopProfile

            def interrupted(request: pb.StopProfileRequest, **options: object) -> pb.StopProfileResponse:
                if request.wait:
                    raise KeyboardInterrupt
                return stop(request, **options)  # type: ignore[arg-type]

            self.StopProfile = interrupted  # type: ignore[method-assign, assignment]

    monkeypatch.setattr(profile.admin_service_pb2_grpc, "AdminServiceStub", Interrupted)
    assert main(["profile", "--target", target]) == 130
    assert servicer.requests[1:] == [pb.StopProfileRequest()]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--steps", "0"], "--steps"), (["--steps", "1001"], "--steps"), (["--seconds", "601"], "--seconds")])
def test_profile_bounds_are_checked(arguments: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
