"""A model on an emulated NPU compared with the same model on the CPU, through `npuserve serve` and gRPC.

    python bench/quality/emulated.py [MODEL ...] [--wide VOCABULARY] [--requests 12] [--answer 150] [--blocks 9] \
        [--parts tokens,forced,int8] [--ways overlapped,alone] [--timeout 900] [--json FILE]

MODEL: folders (default: the built-in model). --wide: a model of two layers with Qwen3-14B's exact widths, random
weights and a vocabulary of that size (151936 is Qwen3's), made in a temporary folder.

`tokens`: greedy answers in float32 to prompts that arrive one after the other. They must equal the answers of the CPU's
server. The emulator is set to accept float32 and heads of any size. The CPU has enough blocks for all requests; the
emulated device computes 48 tokens per step, has few blocks, and finds prefixes. It runs with two steps in flight
(`overlapped`), and with one (`alone`): `--ways`.

`forced`: every position of plain stories (random ids without a tokenizer) and of the CPU's answers is predicted in
bfloat16 on the emulated device and in float32 on the CPU. Reported are the share of positions with equal argmax, and
the largest difference of a logit. The same figures of the CPU in bfloat16 are the yardstick where a model is unsure.

`int8`: the same for the model in W8A8, made by `npuserve quantize --calibration none`, with the device's int8 levels on
the CPU, too. It is also compared with the CPU in the same dtype, bfloat16 and float32. There only the order of sums
differs, and the rounding of numbers between two int8 values. The CPU's kernels and its golden functions differ in the
same way and are the yardstick.

The emulated device proves calls and numbers, not speed. Needs torch_npu and a compiler, see docs/ascend.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from npuserve.cli.acceptance.tokens import prompts_of
from npuserve.client.channel import OPTIONS
from npuserve.kernels.ascend import BLOCK, stored_head_dim
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc

if TYPE_CHECKING:
    from npuserve.cli.acceptance.tokens import Agreement
    from npuserve.npu.backends.base import Backend
    from npuserve.npu.execution.decoder import Model

BUDGET, SEATS = 48, 8
"""Tokens per step and concurrent requests of the emulated server."""

WAYS: dict[str, tuple[str, ...]] = {"overlapped": (), "alone": ("--no-double-buffering",)}
RELAX = "fp32,small_heads"
QWEN3_14B = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
             "intermediate_size": 17408}
LEAST_INT8 = 0.99
"""Required share of equal argmax in W8A8, both in float32. If the CPU's kernels and golden functions have a lower
share, it is their share minus three standard deviations for that number of positions."""


def wide(folder: Path, vocabulary: int, layers: int = 2) -> Path:
    """Write a Qwen3 with Qwen3-14B's widths in bfloat16; its random weights have a trained model's magnitude."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = QWEN3_14B["hidden_size"], QWEN3_14B["intermediate_size"]
    head = QWEN3_14B["head_dim"]
    q, kv = QWEN3_14B["num_attention_heads"] * head, QWEN3_14B["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, size: float) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16)
        for part in made.split(4096):
            part.copy_(torch.randn(part.shape, generator=generator) * size)
        return made

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden, 1.0), "model.norm.weight": norm(hidden),
               "lm_head.weight": matrix(vocabulary, hidden, 3 * hidden**-0.5)}
    for layer in range(layers):
        shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
                  "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
                  "mlp.down_proj": (hidden, inner)}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": head,
                 "self_attn.k_norm": head}
        own = {name: matrix(*shape, shape[1] ** -0.5) for name, shape in shapes.items()}
        own |= {name: norm(size) for name, size in norms.items()}
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        **QWEN3_14B, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers, "vocab_size": vocabulary,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16"}))
    return folder


def prompts(vocabulary: int, count: int, answer: int) -> list[list[int]]:
    """Return random ids. All answers cross the end of a block; every other prompt begins with the same block."""
    chance = random.Random(0)

    def ids(n: int) -> list[int]:
        return [chance.randrange(3, vocabulary) for _ in range(n)]

    shared = ids(BLOCK)
    return [shared * (n % 2) + ids(BLOCK - chance.randrange(2, max(3, min(answer, BLOCK) // 2))) for n in range(count)]


class Served:
    """Client of a running server. address: host:port. page: URL of its metrics."""

    def __init__(self, address: str, page: str):
        self._page = page
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    def answer(self, prompt: Sequence[int], tokens: int, timeout: float) -> list[int]:
        """Return the greedy ids of a streamed answer."""
        ask = generate_pb2.GenerateRequest()
        ask.token_ids.ids.extend(prompt)
        ask.sampling.temperature = 0.0
        ask.stopping.max_tokens, ask.stopping.ignore_eos, ask.output.return_token_ids = tokens, True, True
        return [token for part in self._stub.StreamGenerate(ask, timeout=timeout) for token in part.token_ids]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        with urllib.request.urlopen(self._page) as page:
            samples = re.findall(rf"^npuserve_{name}(\{{.*\}})? (\S+)$", page.read().decode(), re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for label, value in samples if all(part in label for part in wanted))

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, seconds: float = 600) -> Iterator[Served]:
    """Run `npuserve serve`. Raises RuntimeError, with the log, if it does not start or ends with an error."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place, "log")
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "npuserve.cli", "serve", str(folder), "--port", "0", "--metrics-port",
                 "0", *arguments], stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + seconds
            while "ready in" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            address = re.search(r"listening on ([\w.:]+)", log.read_text())
            page = re.search(r"http://\S+/metrics", log.read_text())
            assert address
            assert page
            served = Served(address[1], page[0])
            yield served
            served.close()
        finally:
            process.terminate()
            code = process.wait()
        if code:
            raise RuntimeError(f"the server ended with code {code}: {log.read_text()}")


def answers(served: Served, prompts_sent: Sequence[Sequence[int]], tokens: int, timeout: float) -> list[list[int]]:
    """Return the answers to prompts that arrive 20 ms apart."""

    def ask(number: int) -> list[int]:
        time.sleep(0.02 * number)
        return served.answer(prompts_sent[number], tokens, timeout)

    with ThreadPoolExecutor(len(prompts_sent)) as threads:
        return list(threads.map(ask, range(len(prompts_sent))))


@dataclass(frozen=True)
class Tokens:
    """Comparison of a server's tokens with the CPU's. equal: of `tokens`. The other fields count events of the run."""

    equal: int
    tokens: int
    preemptions: int
    prefix_hits: int
    mixed_steps: int
    captured: int
    decodes: int


def on_the_cpu(folder: Path, prompts_sent: Sequence[Sequence[int]], tokens: int, timeout: float) -> list[list[int]]:
    with serving(folder, "--device", "cpu", "--dtype", "float32", *_context_flags(prompts_sent, tokens)) as served:
        return answers(served, prompts_sent, tokens, timeout)


def on_the_npu(
    folder: Path, prompts_sent: Sequence[Sequence[int]], tokens: int, timeout: float, expected: list[list[int]],
    blocks: int, *flags: str,
) -> Tokens:
    """Answer on the emulated NPU, whose KV cache has `blocks` blocks, and compare with `expected`."""
    config = ModelConfig.from_folder(folder)
    attention = config.attention
    block = 2 * config.num_layers * attention.num_kv_heads * stored_head_dim(attention.head_dim) * BLOCK * 4
    with serving(
        folder, "--device", "npu", "--emulate", "--emulate-relax", RELAX, "--dtype", "float32", "--kv-cache-memory",
        str(blocks * block), "--max-num-seqs", str(SEATS), "--max-num-batched-tokens", str(BUDGET), "--decode-buckets",
        "1,2,4,8", "--kernel-sampling", "0", *_context_flags(prompts_sent, tokens), *flags,
    ) as served:
        made = answers(served, prompts_sent, tokens, timeout)
        modes = ("captured", "decoder", "eager")
        decodes = {mode: int(served.metric("decode_tokens_total", mode=mode)) for mode in modes}
        return Tokens(
            sum(a == b for own, golden in zip(made, expected, strict=True) for a, b in zip(own, golden, strict=True)),
            sum(map(len, expected)), int(served.metric("preemptions_total")),
            int(served.metric("prefix_cache_hits_total")), int(served.metric("step_seconds_count", phase="mixed")),
            decodes["captured"] + decodes["decoder"], sum(decodes.values()))


def _context_flags(prompts_sent: Sequence[Sequence[int]], tokens: int) -> tuple[str, ...]:
    return "--max-model-len", str(max(map(len, prompts_sent)) + tokens)


def forced(folder: Path, file: Path) -> dict[str, Any]:
    """Return shares of equal argmax and logit differences for the sequences in `file`: [[prompt, answer], ...]."""
    import gc

    from torch import Tensor

    from npuserve.cli.acceptance.model import min_equal_share
    from npuserve.cli.acceptance.reference import forced_logits, load, load_reference
    from npuserve.cli.acceptance.tokens import agreement
    from npuserve.npu.backends import select
    from npuserve.npu.backends.base import DeviceSettings
    from npuserve.npu.backends.cpu import CpuBackend

    prompts_sent, made = zip(*json.loads(file.read_text()), strict=True)
    sequences = [prompt + answer for prompt, answer in zip(prompts_sent, made, strict=True)]
    length = max(map(len, sequences))
    config = ModelConfig.from_folder(folder)
    heads = () if config.attention.head_dim % 32 == 0 else ("small_heads",)
    relaxed = (*heads, *(("fp32",) if config.quantization else ()))
    backend = select("npu", relaxed)

    def logits(model: Model, device: Backend) -> list[Tensor]:
        gc.collect()
        return list(forced_logits(model, device, sequences, 256))

    def on_the_cpu(dtype: str, of: Backend = backend) -> list[Tensor]:
        return logits(*load_reference(folder, of, dtype, length, 0))

    def on_the_npu(dtype: str) -> list[Tensor]:
        loaded = load(folder, backend, dtype, max_model_len=length, max_num_seqs=2, max_num_batched_tokens=256)
        return logits(loaded.model, backend)

    def compared(reference: list[Tensor], others: list[Tensor]) -> Agreement:
        return agreement(reference, others, prompts_sent, made)

    golden, near, own = on_the_cpu("float32"), on_the_cpu("bfloat16"), on_the_npu("bfloat16")
    yardstick, found = compared(golden, near), compared(golden, own)
    figures = {"passed": found.share >= min_equal_share(found.positions, yardstick.share), "positions": found.positions,
               "relaxed": list(relaxed),
               "equal_argmax": round(found.share, 5), "of_the_cpu": round(yardstick.share, 5),
               "largest_logit_difference": round(found.difference, 4),
               "difference_of_the_cpu": round(yardstick.difference, 4),
               "largest_logit": round(max(float(x.abs().max()) for x in golden), 2)}
    if config.quantization:
        cpu = CpuBackend(settings=DeviceSettings(int8_levels=backend.capabilities.int8_levels))
        alike, quantized = compared(golden, on_the_npu("float32")), compared(golden, on_the_cpu("float32", cpu))
        deviation = (quantized.share * (1 - quantized.share) / quantized.positions) ** 0.5
        figures |= {"passed": figures["passed"] and alike.share >= min(LEAST_INT8, quantized.share - 3 * deviation),
                    "equal_argmax_beside_bfloat16": round(compared(near, own).share, 5),
                    "equal_argmax_in_float32": round(alike.share, 5),
                    "of_the_cpu_in_float32": round(quantized.share, 5),
                    "largest_logit_difference_in_float32": round(alike.difference, 4),
                    "difference_of_the_cpu_in_float32": round(quantized.difference, 4)}
    return figures


def measure(name: str, folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = ModelConfig.from_folder(folder)
    prompts_sent = prompts(config.vocab_size, args.requests, args.answer)
    texts = prompts_of(folder, config.vocab_size, min(3 * BLOCK, config.context_length) - args.answer)
    if "tokens" in args.parts:
        expected = on_the_cpu(folder, prompts_sent, args.answer, args.timeout)
        for way in args.ways:
            found = on_the_npu(folder, prompts_sent, args.answer, args.timeout, expected, args.blocks, *WAYS[way])
            yield {"model": name, "part": "tokens", "way": way, "passed": found.equal == found.tokens, **vars(found)}
    for part in ("forced", "int8"):
        if part not in args.parts:
            continue
        with tempfile.TemporaryDirectory() as place:
            model, file = folder, Path(place, "sequences.json")
            if part == "int8":
                model = Path(place, "w8a8")
                subprocess.run([sys.executable, "-m", "npuserve.cli", "quantize", str(folder), str(model),
                                "--calibration", "none"], check=True, stdout=subprocess.DEVNULL)
            told = on_the_cpu(model, texts, args.answer, args.timeout)
            file.write_text(json.dumps(list(zip(texts, told, strict=True))))
            done = subprocess.run([sys.executable, __file__, str(model), "--forced", str(file)], check=True,
                                  stdout=subprocess.PIPE, text=True)
        yield {"model": name, "part": part, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--wide", type=int, metavar="VOCABULARY")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--answer", type=int, default=150)
    parser.add_argument("--blocks", type=int, default=9, help="blocks of the emulated device's KV cache")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["tokens", "forced", "int8"])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*WAYS])
    parser.add_argument("--timeout", type=float, default=900, help="maximum seconds of an answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each result to FILE")
    parser.add_argument("--forced", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.forced:
        print(json.dumps(forced(args.models[0], args.forced)))
        return 0
    with tempfile.TemporaryDirectory() as place:
        models = [(folder.name, folder) for folder in args.models]
        if args.wide:
            models.append((f"2 layers of Qwen3-14B, vocabulary {args.wide}", wide(Path(place), args.wide)))
            os.environ.setdefault("EMULATED_NPU_GIB", "64")
        failed = 0
        for name, folder in models or [("built-in", FOLDER)]:
            for found in measure(name, folder, args):
                failed += not found["passed"]
                line = json.dumps(found)
                print(line, flush=True)
                if args.json:
                    with args.json.open("a") as out:
                        out.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
