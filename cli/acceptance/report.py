"""Findings of the acceptance check, and their text for people."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from npuserve.service.config import ConfigError


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one test or measurement.

    part: part of the check, as in docs/ascend.md; model if the model could not be loaded.
    name: name within the part.
    said: the result in words.
    passed: None if the result is not judged.
    figures: the result in numbers, for --json.
    advice: what to do after a failure, as the end of a sentence.
    """

    part: str
    name: str
    said: str
    passed: bool | None
    figures: dict[str, Any] = field(default_factory=dict)
    advice: str = ""


def guarded(part: str, where: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings. An exception of the device or its software becomes the last one.

    where: variant, dtype or step, for the name of that finding.
    """
    try:
        yield from findings
    except ConfigError:
        raise
    except Exception as error:
        yield failure(part, error, where)


def failure(part: str, error: Exception, where: str = "") -> Finding:
    """Return the finding for an exception of the device or its software. where: as in `guarded`."""
    from npuserve.npu.backends import fault
    from npuserve.npu.backends.faults import Fault

    kind = fault(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    advice = {
        None: "follow the message; if it does not help, it is a bug of npuserve: send this report",
        Fault.RETRYABLE: "the device ran out of a resource: end the other programs on it, or reduce decode_buckets and "
                         "kv_cache_memory, and check again",
        Fault.ENGINE: "the device refused or aborted the work: check again, and if it fails at the same point, send "
                      "this report, for an NPU with the log of CANN",
        Fault.NODE: "the device, its driver or its links are faulty: see npu-smi info or nvidia-smi, and repair them "
                    "first",
    }[kind]
    figures = {"fault": kind and kind.value, "traceback": "".join(traceback.format_exception(error))}
    name = f"{where}: error" if where else "error"
    return Finding(part, name, f"{type(error).__name__}: {first}", False, figures, advice)


def as_json(finding: Finding) -> dict[str, Any]:
    """Return the finding for the JSON report. JSON has no infinity and no NaN: they are the strings inf and nan."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return asdict(finding) | {"figures": {key: plain(value) for key, value in finding.figures.items()}}


def line(finding: Finding) -> str:
    """Return the finding as one line of the report."""
    verdict = {True: "ok", False: "FAILED", None: "-"}[finding.passed]
    return f"{finding.part:9}{finding.name:48} {verdict:8}{finding.said}"


def ending(findings: Sequence[Finding], *, complete: bool) -> str:
    """Return the end of the report: one line for each failed finding with its advice, and the counts.

    complete: False if the check was interrupted.
    """
    failed = [f for f in findings if f.passed is False]
    lines = [f"FAILED {f.part}, {f.name}: {f.said}; {f.advice}." for f in failed]
    judged = sum(f.passed is not None for f in findings)
    rest = "" if complete else "; the check was interrupted, other findings are missing"
    return "\n".join([*lines, f"{judged - len(failed)} of {judged} judged findings passed{rest}"])
