"""bench/gpu/gpu.py without a GPU: all parts on a toy shape, and detection of errors."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from npuserve.cli.bench.workload import TimedRequest, read_trace
from npuserve.kernels import native
from npuserve.kernels.experts import route_experts
from npuserve.kernels.linear import linear_argmax
from npuserve.kernels.registry import KERNELS, Implementation
from npuserve.kernels.swiglu import swiglu
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.backends.machine import machine_of
from npuserve.npu.model.loader import load_weights
from tests.support.benches import BENCH, bench

PARTS = ["numbers", "machine", "tokens", "steps", "peer", "kernels", "served", "goodput"]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return bench("gpu.gpu")


@pytest.fixture(scope="module")
def part() -> Iterator[Callable[[str], ModuleType]]:
    """Function that returns a module of bench/gpu/gpu_parts by name."""
    sys.path.append(str(BENCH / "gpu"))
    yield lambda name: importlib.import_module(f"gpu_parts.{name}")
    sys.path.remove(str(BENCH / "gpu"))


def run(out: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Run the program; return exit code, report and output."""
    done = subprocess.run([sys.executable, str(BENCH / "gpu" / "gpu.py"), "--out", str(out), "--quick", *arguments],
                          capture_output=True, text=True, env=os.environ | environment)
    report = out / "cuda.json"
    return done.returncode, json.loads(report.read_text()) if report.is_file() else {}, done.stdout + done.stderr


def tables(report: dict[str, Any], part: str) -> set[str]:
    return {row["table"] for row in report["rows"] if row["part"] == part}


@built
@pytest.mark.full
@pytest.mark.timeout(300)
def test_all_parts_on_a_toy_shape(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:{second}.0000000,{prompt},{answer}\n" for second, prompt, answer in (
            (46, 374, 44), (50, 396, 109), (51, 879, 55), (52, 91, 16))))
    code, report, said = run(tmp_path, "--device", "cpu", "--shards", "2", "--seed", "5", "--parts", ",".join(PARTS),
                             "--trace", str(trace))
    assert (code, report["wrong"]) == (0, []), said
    assert list(report["seconds"]) == PARTS
    assert {row["part"] for row in report["rows"]} == set(PARTS)
    assert report["notes"] == []
    numbers = [row for row in report["rows"] if row["part"] == "numbers"]
    assert {row["kernel"] for row in numbers} == {name for name, k in KERNELS.items() if "cpu" in k.implementations}
    assert all(row["ok"] and row["largest relative error"] < 0.02 for row in numbers)
    assert len({(row["table"], row["kernel"], row["dtype"]) for row in numbers}) == len(numbers)  # no repeats
    kinds = {row["numbers"] for row in report["rows"] if row["part"] == "steps"}
    assert kinds == {"bf16", "W8A8", "W8A8 and head"}
    assert all(row["served / engine"] > 0 for row in report["rows"] if row["part"] == "served")
    assert [(row["load"], row["requests"]) for row in report["rows"] if row["part"] == "goodput"] == [
        ("the first request, 16 + 4 tokens", 1), ("1 stream, 16 + 4 tokens", 4), ("2 streams, 16 + 8 tokens", 4),
        ("trace at 50 times its rate", 4)]
    page = (tmp_path / "cuda.md").read_text()
    assert "Seed 5, shape toy." in page
    assert all(f"#### {table}" in page for part in PARTS for table in tables(report, part))


@built
@pytest.mark.full
def test_steps_of_a_hybrid_continue_kept_states(tmp_path: Path) -> None:
    """Runs from the same prompts give the same tokens, however often they are repeated."""
    code, report, said = run(tmp_path, "--device", "cpu", "--parts", "machine,steps", "--shape", "toy-hybrid")
    assert (code, report["wrong"]) == (0, []), said
    rows = [row for row in report["rows"] if row["part"] == "steps"]
    assert [row["same tokens"] for row in rows if "same tokens" in row] == [True] * 4
    assert all(row["GB of states"] > 0 for row in rows if "GB of states" in row)
    single = [row for row in rows if "rows with the same tokens" in row]
    assert {row["rows with the same tokens"] for row in single} == {"1 of 1", "2 of 2"}


@built
@pytest.mark.full
def test_mixture_is_measured_beside_the_bytes_of_its_chosen_experts(tmp_path: Path) -> None:
    """In two forms, by name. The floor of one row has the weights of 2 of 8 experts."""
    code, report, said = run(tmp_path, "--device", "cpu", "--parts", "numbers,machine,steps", "--shape", "toy-experts",
                             "--kinds", "bf16,4 bits")
    assert (code, report["wrong"]) == (0, []), said
    assert report["notes"] == []
    large = {row["kernel"] for row in report["rows"] if row["table"] == "Numbers, toy-experts"}
    assert large >= {"route_experts", "experts_swiglu", "experts_sum", "gated_delta_rule", "linear"}
    steps = [row for row in report["rows"] if row["part"] == "steps"]
    assert {row["numbers"] for row in steps} == {"bf16", "4 bits"}
    weights = {(row["numbers"], row["batch"]): 1e9 * row["GB of weights"] for row in steps if "GB of weights" in row}
    more = 2 * (3.5 - 2) * 3 * 64 * 32 * 2  # of two layers: two tokens are expected to choose 3.5 experts
    assert 0.7 * more < weights["bf16", 2] - weights["bf16", 1] <= more  # the CPU's weights may be compact
    assert 4 * weights["4 bits", 1] < 3 * weights["bf16", 1]
    drafted = [row for row in steps if "drafts" in row]
    assert [(row["numbers"], row["batch"], row["drafts"]) for row in drafted] == [
        (kind, batch, drafts) for kind in ("bf16", "4 bits") for batch in (1, 2) for drafts in (1, 3)]
    assert all(row["ms a step"] > row["ms of the head"] > 0 for row in drafted)


@built
def test_head_for_drafts_is_in_no_decode_step(part: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Its bytes are not in the floor."""
    backend = CpuBackend()
    args = argparse.Namespace(shape="toy-experts", seed=5)
    loaded = part("steps").load(part("worker").Context(args, backend, machine_of(backend), tmp_path, 0.0), "bf16")
    assert not loaded.runner.predicts
    config, weights = loaded.with_head
    assert len(config.mtp) == 1
    assert weights.mtp is not None


def test_kinds_are_those_of_the_steps(script: ModuleType, part: Callable[[str], ModuleType]) -> None:
    assert tuple(part("steps").KINDS) == script.KINDS


@pytest.mark.full
@built
def test_parts_before_the_server_need_no_grpc(tmp_path: Path) -> None:
    """A machine with only torch, triton and transformers."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\n"
        "found = m.PathFinder.find_spec\n"
        "absent = {'grpc', 'msgspec', 'prometheus_client', 'zmq', 'rich', 'google'}\n"
        "m.PathFinder.find_spec = lambda name, *a: None if name.partition('.')[0] in absent else found(name, *a)\n")
    code, report, said = run(tmp_path / "out", "--device", "cpu", "--parts", "machine,tokens,steps,served",
                             PYTHONPATH=str(tmp_path))
    assert (code, report["wrong"]) == (0, []), said
    found = {row["what"]: row["found"] for row in report["rows"] if row["part"] == "machine" and "found" in row}
    assert found["transformers"] != "none"
    (tokens,) = [row for row in report["rows"] if row["part"] == "tokens"]
    assert tokens["equal answers"] == tokens["prompts"] > 0
    (served,) = [row for row in report["rows"] if row["part"] == "served"]
    assert served["said"].startswith("not run: grpc, ")


@needs_triton
@pytest.mark.full
@pytest.mark.timeout(900)
def test_emulated(tmp_path: Path) -> None:
    # The interpreter takes minutes on a busy machine.
    budgets = ("--budget", "tokens=500", "--budget", "candidates=300", "--seconds", "850")
    code, report, said = run(
        tmp_path, "--emulate", "--seed", "676005688", "--parts", "machine,tokens,attention,candidates", *budgets)
    assert (code, report["wrong"]) == (0, []), said
    (tokens,) = [row for row in report["rows"] if row["part"] == "tokens"]
    assert tokens["captured decodes"] > 0
    prompts = [row for row in report["rows"] if row["table"] == "Attention of prompts"]
    assert {row["option"] for row in prompts if row.get("ok")} > {"paged_attention", "paged_attention, int8"}
    assert [row for row in prompts if row["option"] == "cuDNN"]
    assert all("said" in row for row in prompts if row["option"] == "cuDNN")
    assert tables(report, "candidates") == {"Configurations beside the golden function"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_an_error(tmp_path: Path) -> None:
    code, report, said = run(tmp_path)
    assert code == 2
    assert not report
    assert said.startswith("torch sees no NVIDIA GPU")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("arguments", "wrong"), [
    (["--parts", "machine,lunch"], "--parts: 'lunch' is not one of numbers,"),
    (["--budget", "steps=long"], "--budget: 'steps=long' is not PART=SECONDS"),
    (["--kinds", "bf16,fp4"], "--kinds: 'fp4' is not one of bf16, FP8,"),
])
def test_invalid_argument_is_named(
    script: ModuleType, arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.arguments(arguments)
    assert wrong in capsys.readouterr().err


def test_wheels_come_from_their_folder_alone(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no wheels"):
        script.install(tmp_path, tmp_path / "site")


# Checkpoints and loads of servers


def test_random_checkpoint_has_all_tensors_in_several_files(part: Callable[[str], ModuleType], tmp_path: Path) -> None:
    shapes, backend = part("shapes"), CpuBackend(native=False, settings=DeviceSettings(threads=1))

    def tensors(name: str, seed: int) -> dict[str, Tensor]:
        folder = shapes.random_folder("toy", tmp_path / name, backend, seed, file_bytes=40_000)
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {file: load_file(folder / file) for file in sorted(set(index.values()))}
        assert {name: file for file, own in found.items() for name in own} == index
        return {name: tensor for own in found.values() for name, tensor in own.items()}

    made, again, other = tensors("made", 3), tensors("again", 3), tensors("other", 4)
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 2
    load_weights(tmp_path / "made", shapes.config_of("toy"), torch.bfloat16, backend, lambda *_: None)
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in made.items())
    assert made["lm_head.weight"].float().std() == pytest.approx(64**-0.5, rel=0.05)


def test_checkpoint_goes_where_there_is_space(
    part: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes, free = part("shapes"), {tmp_path: 34e9, Path(tempfile.gettempdir()): 34e9}
    monkeypatch.setattr(shapes, "MEMORY", tmp_path)
    monkeypatch.setattr(shapes.shutil, "disk_usage", lambda place: argparse.Namespace(free=free[place]))
    assert shapes.place_of("qwen3-14b") == tmp_path
    free[tmp_path] = 20e9
    assert shapes.place_of("qwen3-14b") == Path(tempfile.gettempdir())
    assert shapes.place_of("qwen3-0.6b") == tmp_path
    free[Path(tempfile.gettempdir())] = 1e9
    assert shapes.place_of("qwen3-14b") is None


def test_goodput_rates_beyond_the_budget_are_left_out(
    part: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests of 100 + 100 tokens, ten a second, at 4,000 tokens/s: the rate can be doubled."""
    goodput = part("goodput")
    trace = tmp_path / "trace.jsonl"
    goodput.write(trace, [TimedRequest(at / 10, 100, 100) for at in range(1600)])
    called: list[tuple[str, ...]] = []
    sent: list[list[TimedRequest]] = []

    def bench_serve(address: str, deadline: float, *arguments: str) -> dict[str, Any]:
        called.append(arguments)
        if arguments[0] == "--trace":
            sent.append(read_trace(Path(arguments[1]), 0))
        spread = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
        return {"requests": {"ok": 1, "failed": {}}, "peak_running": 1, "seconds": 1.0, "requests_per_second": 1.0,
                "goodput_per_second": 1.0, "output_tokens_per_second": 2000.0, "total_tokens_per_second": 4000.0,
                "latency_ms": {"ttft": spread, "tpot": None, "itl": None, "lag": spread}}

    monkeypatch.setattr(goodput, "bench_serve", bench_serve)
    backend = CpuBackend(native=False)
    args = argparse.Namespace(shape="qwen3-14b", trace=trace, seed=5)
    context = part("worker").Context(args, backend, machine_of(backend), tmp_path, time.monotonic() + 35)
    rows = {row["load"]: row for row in goodput.loads(context, "localhost:1")}
    assert [rate for rate in (1, 2, 3, 4) if rows[f"trace at {rate} times its rate"].get("ok")] == [1, 2]
    assert rows["trace at 4 times its rate"]["said"] == "left out: it would take about 50 s"
    assert [(len(each), round(each[-1].arrival, 3)) for each in sent] == [(201, 20), (401, 20)]
    seeds = [arguments[arguments.index("--seed") + 1] for arguments in called]
    assert len(set(seeds)) == len(seeds) == 5


# Numbers


def right(gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up[:, : gate_up.shape[1] // 2]).copy_(swiglu.golden(gate_up))


def off(gate_up: Tensor) -> Tensor:
    return right(gate_up) * 1.05


def unwritten(gate_up: Tensor) -> Tensor:
    """Return all but the last number of the last row."""
    made = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    made[:-1] = swiglu.golden(gate_up)[:-1]
    made[-1, :-1] = swiglu.golden(gate_up)[-1, :-1]
    return made


@pytest.mark.parametrize(("made", "ok"), [(right, True), (off, False), (unwritten, False)])
def test_a_wrong_kernel_is_found(
    part: Callable[[str], ModuleType], made: Callable[[Tensor], Tensor], ok: bool, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    backend = CpuBackend(native=False)
    backend.kernels = "made"
    monkeypatch.setitem(swiglu.implementations, "made", Implementation(made))
    args = argparse.Namespace(shape="toy", quick=True, seed=3)
    context = part("worker").Context(args, backend, machine_of(backend), tmp_path)
    rows = [row for name, unit in part("numbers").units(context) for row in unit()]
    assert [(row["kernel"], row["dtype"]) for row in rows] == [
        ("swiglu", "bfloat16"), ("swiglu", "bfloat16"), ("swiglu", "float32")]
    assert [row["ok"] for row in rows] == [ok] * 3
    report = part("supervisor").Report(tmp_path, {"seed": 3, "shape": "toy"}, [{"part": "", **row} for row in rows])
    assert len(report.wrong) == (0 if ok else 3)


@pytest.mark.parametrize("is_best", [True, False])
def test_another_argmax_is_judged_by_its_value(
    part: Callable[[str], ModuleType], is_best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (lambda ids: ids) if is_best else (lambda ids: 1 - ids.clamp(max=1))
    monkeypatch.setitem(
        linear_argmax.implementations, "made", Implementation(lambda *args: other(linear_argmax.golden(*args))))
    oracle = part("numbers").Chosen(linear_argmax, linear_argmax.cases[1], torch.float32, seed=3)
    assert oracle.chooses
    assert oracle.as_good("made", torch.device("cpu")) is is_best


@pytest.mark.parametrize(("change", "good"), [("none", True), ("tie", True), ("low", False), ("twice", False)])
def test_other_experts_are_judged_by_their_logits(
    part: Callable[[str], ModuleType], change: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with equal logits may be exchanged, others not; two pairs may not have one place."""
    def routed(x: Tensor, weight: Tensor, *sizes: Any) -> Any:
        if change == "low":
            x = -x
        if change == "tie":
            weight = weight + 1e-7 * torch.arange(len(weight)).flip(0).unsqueeze(1)
        routing = route_experts.golden(x, weight, *sizes)
        if change == "twice":
            routing.places[0, 0] = routing.places[1, 0]
        return routing

    monkeypatch.setitem(route_experts.implementations, "made", Implementation(routed))
    oracle = part("numbers").Chosen(route_experts, route_experts.cases[2], torch.float32, seed=3)
    assert oracle.chooses
    assert oracle.as_good("made", torch.device("cpu")) is good


# The supervisor


WORKER = """
import json, sys, time
order = json.loads(sys.argv[-1])
def tell(**facts): print(json.dumps(facts), flush=True)
tell(event="start")
for part in order["parts"]:
    tell(event="part", part=part)
    for unit in ("one", "two", "three"):
        if f"{part}/{unit}" in order["done"]:
            continue
        tell(event="begin", part=part, unit=unit)
        if unit == "two" and part == "machine":
            sys.exit(4)
        if unit == "two" and part == "tokens":
            time.sleep(60)
        tell(event="row", part=part, table=part, unit=unit)
    tell(event="end", part=part)
"""


@pytest.mark.slow
def test_remaining_units_run_after_a_process_ends_or_hangs(
    part: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = part("supervisor")
    monkeypatch.setattr(supervisor, "GRACE", 0.2)
    args = argparse.Namespace(parts=["machine", "tokens", "peer"], budgets={"machine": 9, "tokens": 1, "peer": 9},
                              seconds=100.0, out=tmp_path, seed=1, shape="toy", shards=1)
    assert supervisor.run(args, [sys.executable, "-c", WORKER], dict(os.environ)) == 1
    report = json.loads((tmp_path / "cuda.json").read_text())
    assert [(row["part"], row["unit"]) for row in report["rows"]] == [
        ("machine", "one"), ("machine", "three"), ("tokens", "one"), ("tokens", "three"), ("peer", "one"),
        ("peer", "two"), ("peer", "three")]
    assert [(note["part"], note["unit"]) for note in report["notes"]] == [("machine", "two"), ("tokens", "two")]
    assert "exit code 4" in report["notes"][0]["said"]
    assert "did not end" in report["notes"][1]["said"]
    assert len(report["wrong"]) == 2


def test_a_process_that_never_starts_is_given_up(part: Callable[[str], ModuleType], tmp_path: Path) -> None:
    args = argparse.Namespace(parts=["machine", "peer"], budgets={"machine": 9, "peer": 9}, seconds=100.0, out=tmp_path,
                              seed=1, shape="toy", shards=1)
    assert part("supervisor").run(args, [sys.executable, "-c", "raise SystemExit(1)"], dict(os.environ)) == 1
    report = json.loads((tmp_path / "cuda.json").read_text())
    assert [note["part"] for note in report["notes"]] == ["machine", "peer"]


# The trace


def event(name: str, category: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur}


def trace(profile: ModuleType, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a trace: two steps of two 10 us kernels, 1 us apart, 4 us between the steps; two overlap."""
    kernels = [event("a", "kernel", 100, 10), event("b", "kernel", 111, 10), event("a", "kernel", 125, 10),
               event("b", "kernel", 136, 10), event("copy", "gpu_memcpy", 130, 5)]
    return [{"ph": "M", "name": "process_name"}, event(profile.MARK, "user_annotation", 90, 60),
            event(profile.MARK, "gpu_user_annotation", 100, 40), event("a", "kernel", 50, 10), *kernels, *more]


def test_trace_gives_idle_time_of_the_device(part: Callable[[str], ModuleType]) -> None:
    profile = part("profile")
    found = profile.read(trace(profile, event("cudaGraphLaunch", "cuda_runtime", 95, 2),
                               event("cudaEventSynchronize", "cuda_runtime", 99, 2),
                               event("cudaDeviceSynchronize", "cuda_runtime", 160, 2)))
    assert found.span == pytest.approx(46e-6)
    assert found.idle == pytest.approx(6 / 46)
    assert found.idle_between(2) == pytest.approx(4 / 46)
    assert [(name, count) for name, count, _ in found.table()] == [("a", 2), ("b", 2), ("copy", 1)]
    assert found.table()[0][2] == pytest.approx(20e-6)
    assert found.forbidden == []


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cudaMalloc", "cudaMemcpy_v3020"])
def test_waits_and_allocations_are_found(part: Callable[[str], ModuleType], name: str) -> None:
    profile = part("profile")
    found = profile.read(trace(profile, event(name, "cuda_runtime", 120, 2)))
    assert found.forbidden == [f"{name.partition('_v')[0]} 1 times"]


def test_trace_without_device_work_is_an_error(part: Callable[[str], ModuleType]) -> None:
    profile = part("profile")
    with pytest.raises(ValueError, match="no range"):
        profile.read([])
    with pytest.raises(ValueError, match="no kernel of the device"):
        profile.read([event(profile.MARK, "user_annotation", 0, 9)])


# The peer


def test_peer_generates_the_tokens_of_transformers(part: Callable[[str], ModuleType]) -> None:
    """Decode steps in static memory give the tokens of transformers' generate."""
    backend = CpuBackend(native=False)
    context = part("worker").Context(argparse.Namespace(shape="toy"), backend, machine_of(backend), Path())
    torch.manual_seed(4)
    peer = part("peer")
    model = peer._model(context).float()
    made = peer.Decoder(model, 2, 9, 40, False)
    prompt, first, steps = made.prompt, made._ids.tolist(), []
    for _ in range(6):
        steps.append(made._ids.tolist())
        with torch.inference_mode():
            made._decode()
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 9:]
    assert [list(row) for row in zip(*([x for (x,) in step] for step in steps), strict=True)] == expected.tolist()
    made.seconds(3)  # from the end of the prompt again
    assert made._position.item() == 9 + 5 + 3
    assert first == steps[0]
