"""Generator of the table of values in helm/npuserve/README.md, and of the descriptions in values.schema.json, which
editors show. Both come from the comments in values.yaml.

    python helm/readme.py [--check]      --check: write nothing, fail if a file is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parent / "npuserve"
README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
WIDTH = 120

HEAD = """# npuserve

This chart runs [npuserve](../../README.md), a gRPC service for Qwen3-class language models, on Kubernetes 1.25 or
newer. It needs Helm 3.6 or newer. [operations.md](../../docs/operations.md) explains how to choose the values.

    helm install llm helm/npuserve -f helm/npuserve/values-ascend.yaml -f helm/npuserve/values-prod.yaml \\
        --set image.repository=registry.example.com/npuserve --set image.digest=sha256:… \\
        --set model.hub.revision=COMMIT --set tls.secretName=llm-tls --set apiKeys.secretName=llm-keys \\
        --set helmTest.apiKeySecretName=llm-test-key
    helm test llm --logs

`values-cpu.yaml`, `values-ascend.yaml` and `values-cuda.yaml` are presets for a kind of accelerator; `values-prod.yaml`
is added to one of them. Build the image as [docker/README.md](../../docker/README.md) says.

## Values

`python helm/readme.py` writes this table from the comments in [values.yaml](values.yaml).

| value | default | description |
|---|---|---|
"""


# Maps shown as one value.
WHOLE = re.compile(r"(pod)?[sS]ecurityContext|resources\.\w+|dashboards\.labels|probes\.(readiness|liveness)")


class Value(NamedTuple):
    """Row of the table: dotted path, default as JSON ("" for a map of further values), and the comment above it."""

    path: str
    default: str
    comment: str


def documented(text: str) -> list[Value]:
    """Return the rows of a values.yaml in its order: all values, and the maps that have a comment."""
    rows: list[Value] = []
    parents: list[tuple[int, str, Any]] = [(-1, "", yaml.safe_load(text))]
    comment: list[str] = []
    whole = 1000  # indent of the map being shown as one value
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent > whole:
            continue
        key = re.match(r" *([\w.]+):", line)
        if line.lstrip().startswith("#"):
            comment.append(line.strip("# "))
            continue
        if key:
            while parents[-1][0] >= indent:
                parents.pop()
            path = parents[-1][1] + key.group(1)
            default = parents[-1][2][key.group(1)]
            is_map = isinstance(default, dict) and bool(default) and not WHOLE.fullmatch(path)
            whole = indent if WHOLE.fullmatch(path) else 1000
            if is_map:
                parents.append((indent, f"{path}.", default))
            if comment or not is_map:
                shown = "" if is_map else json.dumps(default, ensure_ascii=False)
                rows.append(Value(path, shown, " ".join(comment)))
        comment = []
    return rows


def readme() -> str:
    """Return the text of README.md."""
    rows = []
    for path, default, comment in documented((CHART / "values.yaml").read_text(encoding="utf-8")):
        shown = f"`{default}`" if default else ""
        rows.append(f"| `{path}` | {shown} | {comment} |\n")
    return HEAD + "".join(rows)


def schema() -> str:
    """Return the text of values.schema.json, with the comment on each value as its description."""
    root: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for path, _, comment in documented((CHART / "values.yaml").read_text(encoding="utf-8")):
        node: Any = root
        for name in path.split("."):
            node = node.get("properties", {}).get(name, {})
        if node:
            node.pop("description", None)
            items = list(node.items())
            node.clear()
            node.update({"description": comment} if comment else {}, **dict(items))
    return json_text(root, 0, 0) + "\n"


def json_text(value: Any, indent: int, offset: int) -> str:
    """Return JSON with each object or list on one line where it fits.

    indent: of the line that it begins on. offset: characters before it on that line, with the comma behind it.
    """
    line = json.dumps(value, ensure_ascii=False)
    if offset + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        keys = {name: f"{inner}{json.dumps(name)}: " for name in value}
        parts = [key + json_text(value[name], indent + 2, len(key) + 1) for name, key in keys.items()]
        return "{\n" + ",\n".join(parts) + f"\n{' ' * indent}}}"
    parts = [inner + json_text(part, indent + 2, indent + 3) for part in value]
    return "[\n" + ",\n".join(parts) + f"\n{' ' * indent}]"


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    texts = {README: readme(), SCHEMA: schema()}
    stale = {file: text for file, text in texts.items() if file.read_text(encoding="utf-8") != text}
    if check and stale:
        names = ", ".join(file.name for file in stale)
        print(f"out of date: {names}; run python helm/readme.py", file=sys.stderr)
        return 1
    for file, text in stale.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
