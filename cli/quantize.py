"""`npuserve quantize MODEL OUT`: write a quantized checkpoint of a floating-point model, for this server and others.

OUT has the format of compressed-tensors (`int-quantized` or `pack-quantized`), or of ModelSlim. It is renamed into
place when it is complete: a command that ends earlier leaves no files.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.npu.large_import import import_torch
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError
from npuserve.service.processes.process_control import is_hangup_ignored
from npuserve.service.text.model_path import expand, resolve

if TYPE_CHECKING:
    from npuserve.npu.quantize.checkpoint import QuantizationResult
    from npuserve.npu.quantize.rounding import Rounding

log = logging.getLogger(__name__)

SAMPLES = 16
SAMPLE_TOKENS = 512
MAX_CHARACTERS_PER_TOKEN = 8
"""Maximum length of the text that is read for each token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help='folder in Hugging Face format or hub name; "" for the built-in model')
    add("out", metavar="OUT", help="folder to create")
    add("--scheme", choices=["w8a8", "w4a16", "w4a8"], default="w8a8",
        help="w8a8: int8 weights and activations; w4a16: weights of 4 bits; w4a8: these with int8 activations, for "
             "CPUs (default: %(default)s)")
    add("--group-size", type=int, choices=[32, 64, 128], metavar="N",
        help="columns that share a scale in 4 bits: 32, 64 or 128. A layer whose inputs N does not divide has smaller "
             "groups (default: 128)")
    add("--format", choices=["compressed-tensors", "modelslim"], default="compressed-tensors",
        help="format of OUT; modelslim, which vllm-ascend reads, for w8a8 only (default: %(default)s)")
    add("--calibration", metavar="FILE", default="",
        help="calibration text for smoothing the layers: a text file, or .jsonl with a \"text\" per line; none rounds "
             "the weights without smoothing (default: a text that is part of Python)")
    add("--samples", type=number(int, 1, 65536), metavar="N",
        help=f"number of calibration samples (default: {SAMPLES})")
    add("--sample-tokens", type=number(int, 16, 65536), metavar="N",
        help=f"tokens of each sample (default: {SAMPLE_TOKENS}, or the model's context if shorter)")
    add("--smoothing", type=_smoothing, metavar="S",
        help="smoothing strength in [0, 1], or auto (default: auto, the strength with the least error of each layer)")
    add("--ignore", nargs="+", default=[], metavar="NAME",
        help='linear layers to leave unquantized: names in the checkpoint, or "re:" and a regular expression')
    add("--overwrite", action="store_true", help="replace an existing OUT")
    add("--threads", type=number(int, 0, 1024), default=0, metavar="N",
        help="number of threads; 0 for the number of cores (default: %(default)s)")


def _smoothing(text: str) -> float | None:
    return None if text == "auto" else number(float, 0, 1)(text)


def run(args: argparse.Namespace) -> int:
    """Return 0 when OUT is complete. Raise ConfigError for an unusable model, an unusable text or an unwritable OUT."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    folder = resolve(args.model)
    out = expand("out", args.out)
    try:
        _check_out(folder, out, args.overwrite)
    except OSError as error:
        raise ConfigError(f"out: {out} cannot be used: {error.strerror}") from error
    if args.calibration == "none":
        for option in ("samples", "sample_tokens", "smoothing"):
            if getattr(args, option) is not None:
                raise ConfigError(f"{option}: nothing is smoothed with --calibration none")
    if args.scheme == "w8a8" and args.group_size is not None:
        raise ConfigError(f"group_size: {args.scheme} has no groups; possible with --scheme w4a16 and w4a8")
    if args.scheme != "w8a8" and args.format != "compressed-tensors":
        raise ConfigError(f"format: {args.format} is written for w8a8 only; possible for {args.scheme} is "
                          "compressed-tensors")

    import_torch()
    from npuserve.npu.backends.base import DeviceSettings
    from npuserve.npu.backends.cpu import CpuBackend
    from npuserve.npu.model.config import ModelConfig, ModelError
    from npuserve.npu.quantize.checkpoint import quantize_checkpoint

    began = time.monotonic()
    CpuBackend(settings=DeviceSettings(threads=args.threads))  # sets the threads of this process
    with _ending_by_signals(), _reporting(out.name) as progress:
        try:
            sequences: list[list[int]] = []
            config = ModelConfig.from_folder(folder, float8=False)
            if args.calibration != "none" and not config.schemes:
                length = args.sample_tokens or min(SAMPLE_TOKENS, config.context_length)
                if length > config.context_length:
                    raise ConfigError(f"sample_tokens: {length} is more than the model's {config.context_length}")
                sequences = calibration_ids(folder, args.calibration, args.samples or SAMPLES, length)
            written = quantize_checkpoint(
                folder, out, sequences, rounding=_rounding(args), ignore=args.ignore, strength=args.smoothing,
                progress=progress)
        except ModelError as error:
            raise ConfigError(f"model: {error}") from error
        except OSError as error:
            why = "no space is left on its disk" if error.errno == errno.ENOSPC else str(error)
            raise ConfigError(f"out: {out} cannot be written: {why}") from error
    print(_summary(out, written, time.monotonic() - began))
    return 0


def _rounding(args: argparse.Namespace) -> Rounding:
    from npuserve.npu.quantize.rounding import Int4Int8Rounding, Int4Rounding, Int8Rounding

    if args.scheme != "w8a8":
        return (Int4Int8Rounding if args.scheme == "w4a8" else Int4Rounding)(args.group_size or 128)
    return Int8Rounding(modelslim=args.format == "modelslim")


def default_texts() -> list[str]:
    """Return every other topic of Python's built-in help. bench/quality/quality.py evaluates on the other ones."""
    return topics()[::2]


def topics() -> list[str]:
    """Return the texts of Python's built-in help on the language, sorted by topic."""
    from pydoc_data.topics import topics as texts

    return [texts[name] for name in sorted(texts)]


def calibration_ids(folder: Path, file: str, samples: int, length: int) -> list[list[int]]:
    """Return at most `samples` sequences of at most `length` token ids, taken evenly from the text.

    Each begins with the beginning-of-text token if the tokenizer adds it. Raise ConfigError for a file without text.

    file: path of the text; "" for the default text.
    """
    from npuserve.service.text.tokenizer_loader import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError(f"model: {folder} has no tokenizer for a calibration text; use --calibration none")
    left = samples * length * MAX_CHARACTERS_PER_TOKEN
    texts = []
    for text in texts_of(expand("calibration", file)) if file else default_texts():
        texts.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    text = "\n\n".join(texts)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not text.strip() or not ids:
        raise ConfigError(f"calibration: {file} has no text")
    bos = tokenizer.id_of(tokenizer.named_tokens.get("bos_token", ""))
    begin = [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []
    step = max(1, length - len(begin))
    pieces = [ids[offset : offset + step] for offset in range(0, max(1, len(ids) - step + 1), step)]
    used = min(samples, len(pieces))
    return [begin + pieces[index * len(pieces) // used] for index in range(used)]


def texts_of(path: Path) -> Iterator[str]:
    """Yield the `text` of each line of a .jsonl file, or successive parts of a text file.

    Raise ConfigError for an unreadable or malformed file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                while piece := "".join(islice(file, 1000)):
                    yield piece
                return
            for count, line in enumerate(file, 1):
                if line.strip():
                    yield _text(line, f"calibration: {path}, line {count}")
    except UnicodeDecodeError:
        raise ConfigError(f"calibration: {path} is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"calibration: {path} cannot be read: {error.strerror}") from error


def _text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: is not JSON") from None
    if not isinstance(record, dict) or not isinstance(text := record.get("text"), str):
        raise ConfigError(f'{where}: must be an object with a string "text"')
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{where}: has half a surrogate pair, which is no character")
    return text


def _check_out(folder: Path, out: Path, overwrite: bool) -> None:
    source = folder.resolve()
    target = out.resolve()
    if target == source or source in target.parents:
        raise ConfigError(f"out: {out} is within the model's folder {folder}")
    if target in source.parents:
        raise ConfigError(f"out: {out} holds the model's folder {folder}")
    if not out.name or not target.parent.is_dir():
        raise ConfigError(f"out: there is no folder {target.parent}")
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise ConfigError(f"out: {out} exists; --overwrite replaces it")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"out: {out} is no folder; --overwrite replaces only folders")


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """End the command on Ctrl-C, SIGTERM, and SIGHUP unless nohup ignores it, after unfinished files are removed."""
    received: list[int] = []

    def leave(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal may send it twice
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, *(() if is_hangup_ignored() else (signal.SIGHUP,)))
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except BaseException as error:
        # Native code can replace the KeyboardInterrupt by another exception.
        if received:
            raise SystemExit(128 + received[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _reporting(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show the number of finished layers on stderr: a bar on a terminal, otherwise a line every 5 s."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"quantizing to {name}, layer", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 5.0:
            last = time.monotonic()
            log.info("quantizing to %s: %d of %d layers", name, done, total)

    yield line


def _summary(out: Path, written: QuantizationResult, seconds: float) -> str:
    lines = [f"{out}: {written.quantized} of {written.linears} linear layers in {written.scheme}, "
             f"{written.nbytes / 1e6:,.1f} MB of {written.source_bytes / 1e6:,.1f}, in {seconds:.0f} s"]
    norms = {norm for strengths in written.strengths for norm in strengths}
    for norm in sorted(norms):
        strengths_of_norm = [strengths[norm] for strengths in written.strengths if norm in strengths]
        lines.append(f"  smoothed after {norm}: strength {min(strengths_of_norm):g} to {max(strengths_of_norm):g}, "
                     f"median {statistics.median(strengths_of_norm):g}")
    return "\n".join(lines)
