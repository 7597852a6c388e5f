"""Compatibility data of torch_npu versions, compared with the published wheels, which are read and not installed.

    python -m tests.npu.compatibility check    the data in versions/ equal the wheels', and all our calls fit them
    python -m tests.npu.compatibility write    writes the data, after a name of torch_npu is used for the first time

Wheels that are not in the folder $NPUSERVE_WHEELS (default: npuserve/wheels in the user's cache) are downloaded to it
by pip, about 42 MB each. Run it in the repository's root.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

from tests.npu.compatibility.calls import Use, sources, uses
from tests.npu.compatibility.release import EMULATED, FOLDER, VERSIONS, Release, problems
from tests.npu.compatibility.wheel import Wheel

TAG = "cp311-cp311-manylinux_2_28_x86_64"


def wheels() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NPUSERVE_WHEELS") or Path(cache) / "npuserve" / "wheels")


def wheel_file(version: str) -> Path:
    return wheels() / f"torch_npu-{version}-{TAG}.whl"


def fetch(version: str) -> Wheel:
    """Download a wheel unless it is present. Raises CalledProcessError if pip cannot."""
    if not wheel_file(version).exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                        "--implementation=cp", "--python-version=3.11", "--abi=cp311",
                        "--platform=manylinux_2_28_x86_64", "-d", str(wheels()), f"torch_npu=={version}"], check=True)
    return Wheel(wheel_file(version))


def main(arguments: list[str]) -> int:
    if arguments not in (["check"], ["write"]):
        print(__doc__, file=sys.stderr)
        return 2
    used: list[Use] = uses(sources())
    wrong: list[str] = []
    fresh = {version: Release.of(fetch(version), (use.path for use in used)) for version in VERSIONS}
    for version, release in fresh.items():
        file = FOLDER / f"{version}.json"
        if arguments == ["write"]:
            FOLDER.mkdir(exist_ok=True)
            file.write_text(release.text())
        old = file.read_text() if file.exists() else ""
        wrong += [line.rstrip() for line in difflib.unified_diff(
            old.splitlines(), release.text().splitlines(), f"versions/{file.name}", release.wheel, lineterm="", n=0)]
        wrong += problems(used, release, fresh[EMULATED])
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(used)} uses of {len({use.path for use in used})} names of torch_npu against {', '.join(VERSIONS)}: "
          f"{'not as they should be' if wrong else 'all fit, and the data are those of the wheels'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
