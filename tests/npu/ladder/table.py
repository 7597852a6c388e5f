"""Generator of docs/ascend-operators.md: calls of npuserve on Ascend, and what is verified about each.

    python -m tests.npu.ladder.table --check     compares the page with the sources
    python -m tests.npu.ladder.table --write     writes it

It needs torch_npu for the emulator. Run it in the repository's root.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from npuserve.kernels.triton import LOWERED
from tests.npu.ladder.calls import ROOT, Use, sources, uses
from tests.npu.ladder.record import Recorded, recorded
from tests.npu.ladder.release import EMULATED, VERSIONS, Release, operator, problems

PAGE = ROOT / "docs" / "ascend-operators.md"
INTRODUCTION = f"""# What npuserve calls on Ascend

Made by `python -m tests.npu.ladder.table --write` from the sources and from a run of every kernel's test cases on the
emulated device; a test compares.

- **fits torch_npu**: every call of it in our sources has been checked against what the published wheels of these
  versions have: that the operator or name is there, its arguments by place and keyword, their types where they are
  written out, how many values it returns, and that what is left out means the same as in {EMULATED}, on which our
  tests run (tests/npu/ladder).
- **emulated as**: the functions of CANN that ran for it, which npu/emulator has. **constraints**: documented demands of
  the device on these, checked and refused there; the number of them.
- **lowered**: the Triton kernel that does the same for these calls, compiled for Ascend 910B as far as it goes without
  CANN (kernels/triton, .ci/triton_ascend).

None of this was run on a device.
"""


def rules(emulated: dict[str, Any], aclnn: Iterable[str]) -> str:
    names = set(aclnn)
    count = sum(bool(names & set(rule["operators"])) for rule in emulated["rules"])
    return str(count) if count else ""


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def page(found: Sequence[Use], run: Recorded, releases: Sequence[Release]) -> str:
    """Return the page in Markdown."""
    emulated = next(release for release in releases if release.version == EMULATED)

    def fits(group: Sequence[Use]) -> str:
        return ", ".join(r.version for r in releases if not problems(group, r, emulated, found)) or "none"

    def served(path: str) -> list[str]:
        return [kernel for kernel, called in run.kernels.items() if any(operator(o) == path for o in called)]

    def aclnn(path: str) -> list[str]:
        return sorted({name for o, calls in run.operators.items() if operator(o) == path for name in calls.aclnn})

    def lowered(kernels: Sequence[str]) -> str:
        return code(sorted({LOWERED[k] for k in kernels if k in LOWERED}))

    fused: dict[str, list[Use]] = {}
    named: dict[str, list[Use]] = {}
    for use in found:
        if use.path.startswith("npu::"):
            fused.setdefault(operator(use.path), []).append(use)
        else:
            named.setdefault(use.path, []).append(use)
    operators = [[f"`{path}`", code(dict.fromkeys(use.where.partition(":")[0] for use in group)),
                  fits(group), code(aclnn(path)), rules(run.emulated, aclnn(path)), lowered(served(path))]
                 for path, group in sorted(fused.items())]
    plain = [[f"`{path}`", code(served(path)), code(aclnn(path)), rules(run.emulated, aclnn(path)),
              lowered(served(path))]
             for path in sorted({operator(o) for o in run.operators if o.startswith("aten::")}) if aclnn(path)]
    python = [[f"`{path}`", code(dict.fromkeys(use.where.partition(":")[0] for use in group)), fits(group)]
              for path, group in sorted(named.items())]
    total = len(run.emulated["operators"]), len(run.emulated["rules"])
    return "\n".join([
        INTRODUCTION,
        "## Operators of torch_npu\n",
        table(["operator", "called in", "fits torch_npu", "emulated as", "constraints", "lowered"], operators),
        "## Operators of plain torch that our kernels bring to the device\n",
        "Those that only view their argument are left out.\n",
        table(["operator", "in kernels", "emulated as", "constraints", "lowered"], plain),
        f"The emulator has {total[0]} functions of CANN and {total[1]} constraints in all.\n",
        "## Python names of torch_npu\n",
        table(["name", "used in", "fits torch_npu"], python)])


def fresh() -> str:
    """Return the current page. Raises RuntimeError if a kernel does not run on the emulated device."""
    run = recorded()
    if run.failed:
        raise RuntimeError("\n".join(f"{case}: {why}" for case, why in run.failed.items()))
    return page(uses(sources()), run, [Release.load(version) for version in VERSIONS])


def main(arguments: list[str]) -> int:
    if arguments not in (["--check"], ["--write"]):
        print(__doc__, file=sys.stderr)
        return 2
    new = fresh()
    if arguments == ["--write"]:
        PAGE.write_text(new)
    old = PAGE.read_text() if PAGE.exists() else ""
    sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(PAGE.name), "sources"))
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
