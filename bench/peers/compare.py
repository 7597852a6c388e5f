"""Speed of npuserve and its peers, alternating on one machine in one run.

    python bench/peers/compare.py MODEL --peer vllm PYTHON --peer transformers PYTHON --peer openvino PYTHON FOLDER \
        --peer llama_cpp PYTHON FILE.gguf [--ceiling] [--measures decode-1x512,...] [--rounds 5] [--json FILE]
    python bench/peers/compare.py --read FILE [FILE ...]

PYTHON is the interpreter of the peer's own environment; a peer whose model is not MODEL names it. Each contestant is a
process of this folder that loads once and then waits. A round takes one sample of every measure from each contestant,
with the same prompts, and begins with another contestant each time. harness.py defines the measures and the validity of
a sample. Prompts are random ids, or with --texts the prompts of an MT-Bench file.

Prints a Markdown table. Speeds are medians over the rounds, in tokens per second of all rows together. Ratios compare
npuserve with the best peer of each measure, as median and range over the rounds. --json appends a line for each sample
to FILE; --read makes the table from such files, of one or several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import MEASURES, QUIET, Measure

SCRIPTS = Path(__file__).parent
OURS, CEILING = "npuserve", "ceiling"


def absolute(path: str | Path) -> str:
    """Return the absolute path without resolving links: an environment's interpreter is a link."""
    return os.path.abspath(path) if Path(path).exists() else str(path)


class Contestant:
    """Running process of a peer's script."""

    def __init__(self, script: str, python: str, model: str, options: list[str]) -> None:
        """Start the process. Raises RuntimeError, with the end of its output, if it does not start."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # This folder as working directory: a peer's optional import must not find a folder of this repository.
        self._process = subprocess.Popen(
            [absolute(python), absolute(SCRIPTS / f"{script}_peer.py"), absolute(model), "--serve", *options],
            cwd=SCRIPTS, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        self.script = script
        self.who = self._answer()

    def ask(self, measure: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Take one sample. Raises RuntimeError if the process died."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the missing reply is the error
            self._process.stdin.write(json.dumps({"measure": measure, "prompts": prompts}) + "\n")
        return self._answer()

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return dict(json.loads(line))
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-2000:]
        raise RuntimeError(f"{self.script} ended with {code}:\n{said}")


def text_ids(model: str, file: Path) -> list[int]:
    """Return the ids of all first turns of a MT-Bench file, concatenated."""
    from tokenizers import Tokenizer

    turns = "\n\n".join(json.loads(line)["turns"][0] for line in file.read_text().splitlines())
    return list(Tokenizer.from_file(f"{model}/tokenizer.json").encode(turns, add_special_tokens=False).ids)


def prompts_of(measure: Measure, vocabulary: int, text: list[int]) -> list[list[int]]:
    """Return rows of the text from random places, repeated if it is short; or random ids."""
    if not text:
        return measure.random_prompts(vocabulary)
    long = text * (measure.context // len(text) + 2)
    begins = [random.randrange(len(text)) for _ in range(measure.rows)]
    return [long[begin : begin + measure.context] for begin in begins]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Yield every sample, with its run, round, measure and contestant."""
    options = ["--threads", str(args.threads), "--tokens", str(args.tokens)]
    vocabulary: int = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    text = text_ids(args.model, args.texts) if args.texts else []
    wanted = [[OURS, sys.executable], *([[CEILING, sys.executable]] if args.ceiling else []), *args.peer]
    samples: list[dict[str, Any]] = []
    contestants: list[Contestant] = []
    run = time.strftime("%Y-%m-%dT%H:%M:%S")
    try:
        for script, python, *own in wanted:
            contestants.append(Contestant(script, python, own[0] if own else args.model, options))
            print(json.dumps(contestants[-1].who), file=sys.stderr)
        for number in range(args.rounds):
            for name in args.measures.split(","):
                prompts = prompts_of(Measure.parse(name), vocabulary, text)
                for contestant in contestants[number % len(contestants) :] + contestants[: number % len(contestants)]:
                    sample = {"run": run, "round": number, "model": Path(args.model).name, "measure": name,
                              **contestant.who, **contestant.ask(name, prompts)}
                    samples.append(sample)
                    if args.json:
                        with args.json.open("a") as out:
                            print(json.dumps(sample), file=out)
                    print(f"round {number} {name} {sample['name']}: {sample['value']} (others {sample['others']})",
                          file=sys.stderr)
    finally:
        for contestant in contestants:
            contestant.close()
    return samples


def table(samples: Iterable[dict[str, Any]]) -> str:
    """Return the table in Markdown; † marks a figure with a sample in which other processes were busy."""
    values: dict[str, dict[str, dict[tuple[str, int], float]]] = {}
    busy: set[tuple[str, str]] = set()
    versions = {}
    for sample in samples:
        measure, name = f"{sample['model']} {sample['measure']}", sample["name"]
        values.setdefault(measure, {}).setdefault(name, {})[sample["run"], sample["round"]] = sample["value"]
        versions[name] = sample["version"]
        if sample["others"] > QUIET:
            busy.add((measure, name))
    peers = [name for name in versions if name not in (OURS, CEILING)]

    def ratio(measure: str, other: str) -> str:
        ours, theirs = values[measure].get(OURS, {}), values[measure].get(other, {})
        if not (ratios := [ours[key] / theirs[key] for key in ours.keys() & theirs.keys()]):
            return ""
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"

    def cell(measure: str, name: str) -> str:
        if name not in values[measure]:
            return ""
        value = statistics.median(values[measure][name].values())
        return f"{value:.1f}{'†' if (measure, name) in busy else ''}"

    head = ["measure", OURS, *(f"{name} {versions[name]}" for name in peers), "best peer", "ours / best peer"]
    if CEILING in versions:
        head += ["ceiling", "ours / ceiling"]
    lines = [head, ["---"] * len(head)]
    for measure, found in values.items():
        best = max((name for name in peers if name in found),
                   key=lambda name: statistics.median(found[name].values()), default="")
        row = [measure, cell(measure, OURS), *(cell(measure, name) for name in peers), best, ratio(measure, best)]
        if CEILING in versions:
            row += [cell(measure, CEILING), ratio(measure, CEILING)]
        lines.append(row)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + (f"\n\n† others took more than {QUIET} cores during one of its samples or more" if busy else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--peer", nargs="+", action="append", default=[], metavar=("NAME PYTHON", "MODEL"))
    parser.add_argument("--ceiling", action="store_true", help="measure the machine's limits in each round")
    parser.add_argument("--measures", default=",".join(MEASURES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decode steps that are timed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+")
    args = parser.parse_args()
    names = sorted(path.name.removesuffix("_peer.py") for path in SCRIPTS.glob("*_peer.py"))
    for peer in args.peer:
        if peer[0] not in names or len(peer) not in (2, 3):
            parser.error(f"--peer: {' '.join(peer)!r} is not NAME PYTHON [MODEL], NAME being one of {', '.join(names)}")
    for name in args.measures.split(","):
        try:
            Measure.parse(name)
        except ValueError as error:
            parser.error(f"--measures: {error}")
    if bool(args.model) == bool(args.read):
        parser.error("either MODEL or --read")
    if args.read:
        print(table(json.loads(line) for file in args.read for line in file.read_text().splitlines()))
    else:
        try:
            print(table(compare(args)))
        except RuntimeError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
