"""Makes the schemas of custom kinds beside this file from published CustomResourceDefinitions:

    python tests/helm/crds/make.py SOURCE CRD.yaml ...      SOURCE: the project and its version, kept in the file

Descriptions and extensions are left out. Objects allow only the properties that they name, since an API server prunes
others. Templates of pods and claims, 1.2 MB of LeaderWorkerSet, are objects of any content: chart.py validates pod
templates by Kubernetes' own schemas. The schemas of InferencePool and HTTPRoute are written by hand, and have only the
fields that the chart uses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = {"type", "properties", "items", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength",
        "minItems", "maxItems", "additionalProperties"}
TEMPLATES = {"leaderTemplate", "workerTemplate", "volumeClaimTemplates"}
"""Fields of Kubernetes' own types: PodTemplateSpec, PersistentVolumeClaim."""


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in schema.items() if name in KEPT}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if "properties" in made:
        made["properties"] = {
            name: {"type": value["type"]} if name in TEMPLATES else strict(value)
            for name, value in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for inner in ("items", "additionalProperties"):
        if isinstance(made.get(inner), dict):
            made[inner] = strict(made[inner])
    return made


def main(source: str, files: list[str]) -> None:
    for file in files:
        definition = yaml.safe_load(Path(file).read_text())["spec"]
        for version in definition["versions"]:
            if version["served"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                kind = f"{definition['group']}_{version['name']}_{definition['names']['kind']}"
                text = json.dumps({"source": source, **schema}, separators=(",", ":"), sort_keys=True)
                (Path(__file__).parent / f"{kind}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
