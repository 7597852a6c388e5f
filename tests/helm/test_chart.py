"""Rendered objects: valid for every supported version of Kubernetes, with consistent numbers."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import npuserve
from npuserve.cli import generate
from npuserve.service import settings
from npuserve.service.config import ServerConfig
from npuserve.service.rpc.health import LIVENESS, READINESS
from npuserve.service.supervisor import supervisor
from tests.helm.chart import (
    CHART,
    PRESETS,
    PRODUCTION,
    ROOT,
    Object,
    completed,
    config_file,
    find,
    helm,
    merged,
    needs_helm,
    notes,
    pod,
    problems,
    render,
    template,
    templates,
    validator,
    workload,
)
from tests.helm.combinations import COMBINATIONS, GROUPS, NEWER

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = needs_helm

VERSIONS = ["1.25", "1.29", "1.33"]
STACKS = [(), *((preset,) for preset in PRESETS), *((preset, "prod") for preset in PRESETS if preset != "prod")]


def toml(objects: list[Object]) -> dict[str, Any]:
    """Return the server's settings."""
    return tomllib.loads(config_file(objects))


def environment(container: Object) -> Object:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


@pytest.fixture(scope="module")
def versions() -> list[str]:
    kube = validator()
    return [*VERSIONS, kube.utils.major_minor(kube.latest_version())]


NUMBERS: Object = {
    "tls": {"secretName": "123"}, "apiKeys": {"secretName": "1e3", "key": "123"},
    "serviceAccount": {"create": False, "name": "123"}, "priorityClassName": "true", "runtimeClassName": "123",
    "schedulerName": "1.5", "imagePullSecrets": [{"name": "123"}],
    "cache": {"type": "pvc", "claimName": "123"}, "model": {"source": "pvc", "pvc": {"claimName": "0x1"}},
    "headless": {"enabled": True}, "metrics": {"scrape": "serviceMonitor"}}
"""Names that YAML reads as numbers or booleans without quotes."""


@pytest.mark.parametrize("values", [NUMBERS, {"gateway": {"enabled": True, "kind": "smg"}}], ids=["names", "gateway"])
def test_names_like_numbers_are_strings(values: Object, tmp_path: Path):
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    done = helm("template", "1e3", str(CHART), "--namespace", "1234", "--kube-version", "1.29.0", "-f",
                str(tmp_path / "values.yaml"))
    assert done.returncode == 0, done.stderr
    made = list(filter(None, yaml.safe_load_all(done.stdout)))
    assert problems(made, "1.29") == []
    assert {o["metadata"]["labels"]["app.kubernetes.io/instance"] for o in made} == {"1e3"}
    assert all(o["metadata"]["namespace"] == "1234" for o in made)
    assert "app.kubernetes.io/instance=1000" not in done.stdout


@pytest.mark.parametrize("presets", STACKS, ids="+".join)
def test_lint_accepts_the_chart(presets: tuple[str, ...], tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(completed(presets)))
    files = [*(CHART / f"values-{preset}.yaml" for preset in presets), own]
    done = helm("lint", "--strict", str(CHART), *itertools.chain(*(("-f", str(file)) for file in files)))
    assert done.returncode == 0, done.stdout + done.stderr


def spread(places: int, index: int) -> list[int]:
    """Return two places far apart, of which each comes in turn with the index."""
    return [index % places, (index + places // 2) % places]


@pytest.mark.parametrize(("index", "presets", "values"), [
    (index, *case) for index, case in enumerate([*((stack, {}) for stack in STACKS), *COMBINATIONS.values()])],
    ids=[*map("+".join, STACKS), *COMBINATIONS])
def test_combination_is_valid_for_kubernetes_and_the_server(
    index: int, presets: tuple[str, ...], values: Object, versions: list[str], tmp_path: Path,
    pytestconfig: pytest.Config,
):
    """On two of the versions in turn, and with --full on all. The presets: test_presets_are_valid_for_every_kubernetes.
    """
    for version in versions if pytestconfig.getoption("--full") else [versions[i] for i in spread(4, index)]:
        objects = render(values, presets, kubernetes=f"{version}.0")
        assert not problems(objects, version)
        names = [(o["kind"], o["metadata"]["name"]) for o in objects]
        assert len(names) == len(set(names))
    file = tmp_path / "npuserve.toml"
    file.write_text(config_file(objects))
    loaded = settings.load(argparse.Namespace(config=str(file)), {})
    for name, value in toml(objects).items():
        is_size = name in ("kv_cache_memory", "kv_offload_memory") and isinstance(value, str)
        assert getattr(loaded, name) == (settings.parse_size(value) if is_size else value)
    for name, value in values.get("config", {}).items():
        assert toml(objects)[name] == value
    assert loaded.served_name == values.get("model", {}).get("servedName", loaded.served_name)


@pytest.mark.slow
@pytest.mark.parametrize("presets", STACKS, ids="+".join)
def test_presets_are_valid_for_every_kubernetes(presets: tuple[str, ...]):
    kube = validator()
    newest = int(kube.latest_version().split(".")[1])
    assert newest >= 37
    for minor in range(25, newest + 1):
        assert not problems(render(presets=presets, kubernetes=f"1.{minor}.0"), f"1.{minor}")


@pytest.mark.parametrize("name", NEWER)
def test_combination_that_needs_a_newer_kubernetes_is_valid_there_and_refused_before(name: str):
    version, presets, values = NEWER[name]
    objects = render(values, presets, kubernetes=f"{version}.0")
    assert not problems(objects, version)
    major, minor = version.split(".")
    done = template(values, presets, kubernetes=f"{major}.{int(minor) - 1}.0")
    assert done.returncode != 0
    assert f"needs Kubernetes {version} or newer" in done.stderr


def test_image_volume_holds_the_model_that_is_served():
    _, presets, values = NEWER["image volume"]
    objects = render(values, presets, kubernetes="1.33.0")
    (volume,) = [volume for volume in pod(objects)["volumes"] if volume["name"] == "models"]
    assert volume["image"] == {"reference": "registry.example.com/qwen3-8b:1", "pullPolicy": "IfNotPresent"}
    assert toml(objects)["model"] == "/models/qwen3"


def test_claimed_devices_replace_the_resource_of_the_device_plugin():
    _, presets, values = NEWER["claimed devices"]
    spec = pod(render(values, presets, kubernetes="1.34.0"))
    assert spec["resourceClaims"] == [{"name": "devices", "resourceClaimTemplateName": "gpu"}]
    for container in (*spec["initContainers"][:1], *spec["containers"]):
        assert container["resources"]["claims"] == [{"name": "devices"}]
        assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


def test_validation_finds_errors(versions: list[str]):
    objects = render({"metrics": {"scrape": "serviceMonitor"}})
    deployment, monitor = find(objects, "Deployment"), find(objects, "ServiceMonitor")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    monitor["spec"]["endpoints"][0]["intervall"] = "1s"
    unknown = {"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "x"}}
    found = problems([deployment, monitor, unknown], versions[0])
    for text, word in zip(found, ("livenessProb", "intervall", "Unknown"), strict=True):
        assert word in text


def test_every_value_is_set_by_some_combination():
    """A value that no combination sets is an untested branch of the templates."""
    def leaves(values: Object, path: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in values.items():
            found |= leaves(value, f"{path}{name}.") if isinstance(value, dict) and value else {f"{path}{name}"}
        return found

    files = {name: yaml.safe_load(file.read_text()) for name, file in (
        ("", CHART / "values.yaml"), *((preset, CHART / f"values-{preset}.yaml") for preset in PRESETS))}
    made = [leaves(merged(*(files[preset] for preset in presets), values))
            for presets, values in [*COMBINATIONS.values(), *(newer[1:] for newer in NEWER.values())]]
    unset = {path for path in leaves(files[""]) if not any(name == path or name.startswith(f"{path}.")
                                                           for name in set().union(*made))}
    assert unset == set()


@pytest.mark.parametrize("values", [{}, {"termination": {"drainSeconds": 0, "preStopSeconds": 0}},
                                    {"termination": {"drainSeconds": 1000, "preStopSeconds": 30}}])
def test_the_grace_period_holds_the_pre_stop_and_the_drain(values: Object):
    objects = render(values)
    spec, drain = pod(objects), toml(objects)["drain_seconds"]
    hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    needed = int(hook[1]) + drain + supervisor.FRONTEND_STOP_SECONDS + supervisor.ENGINE_STOP_SECONDS
    assert needed < spec["terminationGracePeriodSeconds"] <= needed + 10
    deadline = find(objects, "Deployment")["spec"]["progressDeadlineSeconds"]
    startup = spec["containers"][0]["startupProbe"]
    assert deadline > startup["periodSeconds"] * startup["failureThreshold"] + spec["terminationGracePeriodSeconds"]


def test_probes_ask_the_health_services():
    objects = render({"probes": {"startupSeconds": 62}})
    (container,) = pod(objects)["containers"]
    port = toml(objects)["health_port"]
    asked = {name: container[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")}
    assert asked == {"startup": {"port": port, "service": ""},
                     "readiness": {"port": port, "service": "npuserve.readiness"},
                     "liveness": {"port": port, "service": LIVENESS}}
    assert {"", "npuserve.readiness"} <= set(READINESS)
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 65
    assert [p["containerPort"] for p in container["ports"]] == [
        toml(objects)["port"], toml(objects)["metrics_port"], port]


def test_pod_has_a_restricted_security_context():
    for presets in STACKS:
        spec = pod(render({}, presets))
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                                    "capabilities": {"drop": ["ALL"]}}
            mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
            written = [value for name, value in environment(container).items()
                       if name not in ("NPUSERVE_CONFIG", "MODEL_DIR", "MODEL_TARGET") and str(value).startswith("/")]
            assert {"/tmp", "/var/cache/npuserve"} <= mounts.keys()
            for path in written:
                assert any(not read_only and f"{path}/".startswith(f"{mount}/") for mount, read_only in mounts.items())


def test_a_new_configuration_makes_new_pods():
    def template_of(values: Object) -> Object:
        pods: Object = find(render(values), "Deployment")["spec"]["template"]
        return pods

    assert template_of({}) == template_of({"replicaCount": 3})
    assert template_of({}) != template_of({"config": {"max_queue": 8}})


@pytest.mark.parametrize("values", [{}, GROUPS], ids=["Deployment", "LWS"])
def test_pods_carry_their_configuration(values: Object):
    """An object beside the pods would change or vanish under the pods of the revision before an upgrade that fails."""
    objects = render(values)
    for each in templates(workload(objects)):
        mounts = {mount["mountPath"]: mount["name"] for mount in each["spec"]["containers"][0]["volumeMounts"]}
        folder, name = environment(each["spec"]["containers"][0])["NPUSERVE_CONFIG"].rsplit("/", 1)
        (volume,) = [volume for volume in each["spec"]["volumes"] if volume["name"] == mounts[folder]]
        (item,) = volume["downwardAPI"]["items"]
        key = re.fullmatch(r"metadata\.annotations\['(.*)'\]", item["fieldRef"]["fieldPath"])
        assert item["path"] == name
        assert key is not None
        assert "port = 50051\n" in each["metadata"]["annotations"][key.group(1)]
    assert [o["metadata"]["name"] for o in objects if o["kind"] == "ConfigMap"] == []


@pytest.mark.parametrize(("presets", "device", "resource"), [
    ((), "cpu", {}), (("ascend",), "npu", {"huawei.com/Ascend910": 1}), (("cuda",), "cuda", {"nvidia.com/gpu": 1})])
def test_accelerators(presets: tuple[str, ...], device: str, resource: Object):
    objects = render({}, presets)
    (container,) = pod(objects)["containers"]
    assert toml(objects)["device"] == device
    limits = container["resources"]["limits"]
    assert {name: count for name, count in limits.items() if "/" in name} == resource
    kind = presets[0] if presets else "cpu"
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container["image"] == f"npuserve:{version}-{kind}"
    assert version == npuserve.__version__
    assert ("NPUSERVE_THREADS" in environment(container)) == (kind == "cpu")


@pytest.mark.parametrize(("model", "said", "offline"), [
    ({}, {}, False),
    ({"source": "pvc", "pvc": {"claimName": "c", "path": "d/e"}}, {"model": "/models/d/e"}, True),
    ({"source": "pvc", "pvc": {"claimName": "c"}}, {"model": "/models"}, True),
    ({"source": "init", "hub": {"name": "a/b"}}, {"model": "/models/a--b/main", "served_name": "a/b"}, True),
    ({"source": "init", "hub": {"name": "a/b", "revision": "refs/pr/1"}, "servedName": "c"},
     {"model": "/models/a--b/refs--pr--1", "served_name": "c"}, True),
])
def test_models(model: Object, said: Object, offline: bool):
    objects = render({"model": model})
    told = toml(objects)
    assert {name: told[name] for name in ("model", "served_name") if name in told} == said
    spec = pod(objects)
    assert ("HF_HUB_OFFLINE" in environment(spec["containers"][0])) == offline
    assert ("models" in {volume["name"] for volume in spec["volumes"]}) == offline
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    spec = pod(render({"model": merged(model, {"hub": {"tokenSecret": {"name": "hub"}}})}))
    downloads = spec.get("initContainers", [])
    assert [container["name"] for container in (*spec["containers"], *spec.get("initContainers", []))
            if environment(container).get("HF_TOKEN") == secret] == [each["name"] for each in downloads]
    out = [port["port"] for rule in find(objects, "NetworkPolicy")["spec"]["egress"] for port in rule["ports"]]
    assert (443 in out) == (model.get("source") == "init")


def test_autoscalers_use_existing_metrics():
    documented = set(re.findall(r"`(npuserve_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    hpa = find(render({"autoscaling": {"kind": "hpa"}}), "HorizontalPodAutoscaler")
    assert {m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in hpa["spec"]["metrics"]} == {
        "npuserve_requests_waiting": "4", "npuserve_kv_cache_usage_ratio": "800m",
        "npuserve_predicted_ttft_seconds": f"{1000 * ServerConfig().target_ttft_seconds:.0f}m"}
    values = {"autoscaling": {"kind": "hpa", "predictedTtftRatio": 1.5}, "config": {"target_ttft_seconds": 3}}
    *_, ttft = find(render(values), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert ttft["pods"]["target"]["averageValue"] == "4500m"
    objects = render({}, ("cpu", "prod"))
    assert "replicas" not in find(objects, "Deployment")["spec"]
    queries = [t["metadata"]["query"] for t in find(objects, "ScaledObject")["spec"]["triggers"]]
    asked = {name for query in queries for name in re.findall(r"npuserve_\w+", query)}
    assert asked == {"npuserve_requests_waiting", "npuserve_kv_cache_usage_ratio", "npuserve_predicted_ttft_seconds",
                     "npuserve_target_seconds"}
    assert asked <= documented
    name = find(objects, "Deployment")["metadata"]["name"]
    for query in queries:
        pods = re.search(r'pod=~"([^"]+)"', query)
        assert pods is not None
        assert re.fullmatch(pods.group(1), f"{name}-5d4b8c9f7d-x2x4q")
        assert not re.fullmatch(pods.group(1), f"{name}-test")


def test_monitors_select_one_service():
    """Prometheus must not scrape a pod twice through two services."""
    objects = render({"metrics": {"scrape": "serviceMonitor"}})
    wanted = find(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    matching = [o for o in objects if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
    assert [service["metadata"]["name"] for service in matching] == ["demo-npuserve-metrics"]
    for service in (o for o in objects if o["kind"] == "Service"):
        labels = workload(objects)["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_dashboards_and_rules_are_rendered_unchanged():
    objects = render({"dashboards": {"enabled": True}, "rules": {"enabled": True}})
    names = [o["metadata"]["name"] for o in objects if o["kind"] == "ConfigMap"]
    assert names == [f"demo-npuserve-{name}" for name in ("kernels", "operators", "runbooks")]
    shown = {key: text for o in objects if o["kind"] == "ConfigMap" and "grafana_dashboard" in o["metadata"]["labels"]
             for key, text in o["data"].items()}
    assert all(name.startswith("npuserve-") for name in shown)  # one folder holds the files of all charts
    assert shown == {file.name: file.read_text().strip() for file in (CHART / "dashboards").glob("*.json")}
    groups = [group for file in sorted((CHART / "rules").glob("*.yaml"))
              for group in yaml.safe_load(file.read_text())["groups"]]
    rendered = find(objects, "PrometheusRule")["spec"]["groups"]
    for rule in (rule for group in rendered for rule in group["rules"] if "alert" in rule):
        del rule["annotations"]["runbook_url"]
    assert rendered == groups


def test_one_release_installs_rules_and_dashboards():
    """They cover all releases, so no preset enables them, and the notes say how."""
    for presets in STACKS:
        objects = render({}, presets)
        assert not [o for o in objects if o["kind"] == "PrometheusRule"]
        assert not [o for o in objects if "grafana_dashboard" in o["metadata"]["labels"]]
        assert "--set rules.enabled=true" in notes(completed(presets), presets)
    both = {"rules": {"enabled": True}, "dashboards": {"enabled": True}}
    assert "rules.enabled" not in notes(both)


def test_route_excludes_administration():
    _, values = COMBINATIONS["monitor and route"]
    (rule,) = find(render(values), "GRPCRoute")["spec"]["rules"]
    assert {match["method"]["service"] for match in rule["matches"]} == {
        "npuserve.v1.InferenceService", "grpc.health.v1.Health"}


TLS = {"tls": {"secretName": "cert"}}
MUTUAL = {"tls": {"secretName": "cert", "clientCaSecretName": "ca"}}
KEYS = {"apiKeys": {"secretName": "keys", "key": "k"}}


@pytest.mark.parametrize(("values", "given"), [
    ({}, {}),
    (TLS, {"tls_cert": "cert", "tls_key": "cert"}),
    (MUTUAL, {"tls_cert": "cert", "tls_key": "cert", "tls_client_ca": "ca"}),
    (KEYS, {"api_keys": "keys"}),
])
def test_secrets_are_mounted_at_the_servers_paths(values: Object, given: dict[str, str]):
    """Mounted without subPath, so that running pods get changes."""
    objects = render(values)
    settings, spec = toml(objects), pod(objects)
    mounts = {m["mountPath"]: m for m in spec["containers"][0]["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    names = {name: settings[name] for name in ("tls_cert", "tls_key", "tls_client_ca", "api_keys") if name in settings}
    assert set(names) == set(given)
    for name, path in names.items():
        mount = mounts[str(Path(path).parent)]
        assert secrets[mount["name"]] == given[name]
        assert mount["readOnly"]
        assert "subPath" not in mount
    assert set(secrets.values()) == set(given.values())
    assert {port["appProtocol"] for o in objects if o["kind"] == "Service" for port in o["spec"]["ports"]} == {
        "https" if "tls" in values else "kubernetes.io/h2c"}


@pytest.mark.parametrize(("values", "options"), [
    ({}, set()),
    (TLS, {"--tls-ca"}),
    ({**TLS, "helmTest": {"caSecretName": "root"}}, {"--tls-ca"}),
    (MUTUAL, None),
    (KEYS, None),
    ({**MUTUAL, "helmTest": {"clientCertSecretName": "own"}}, {"--tls-ca", "--tls-cert", "--tls-key"}),
    ({**TLS, **KEYS, "helmTest": {"apiKeySecretName": "one"}}, {"--tls-ca", "--api-key-file"}),
])
def test_helm_test_has_the_credentials_that_the_server_requires(values: Object, options: set[str] | None):
    """options: None if there is no test, since a certificate or key is missing."""
    made = [o for o in render(values) if o["kind"] == "Pod"]
    if options is None:
        assert made == []
        return
    (container,) = made[0]["spec"]["containers"]
    files = dict(word.split("=", 1) for word in container["args"] if word.startswith(("--tls", "--api-key")))
    assert set(files) == options
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in made[0]["spec"]["volumes"] if "secret" in v}
    assert {mounts[str(Path(path).parent)] for path in files.values()} == set(secrets)
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert parser.parse_args(container["args"][1:]).target == "demo-npuserve.llm.svc:50051"


def test_production_renders_with_tls_and_keys_or_behind_a_gateway():
    """values-prod.yaml alone, and with the values that it requires."""
    for presets in (("cpu", "prod"), ("ascend", "prod")):
        done = template({}, presets, complete=False)
        assert done.returncode != 0
        assert "apiKeys.secretName: production needs tls.secretName and apiKeys.secretName" in done.stderr
        settings = toml(render({}, presets))
        assert {"tls_cert", "tls_key", "api_keys"} <= settings.keys()


def test_network_policy_admits_the_gateway_alone():
    peers = [{"podSelector": {"matchLabels": {"app": "gateway"}}}]
    values = {"gateway": {"enabled": True, "from": peers}, "image": PRODUCTION["image"]}
    objects = render(values, ("cpu", "prod"), complete=False)
    rules = {rule["ports"][0]["port"]: rule for rule in find(objects, "NetworkPolicy")["spec"]["ingress"]}
    assert rules["grpc"]["from"] == peers
    assert rules["metrics"]["from"]
    assert rules.keys() == {"grpc", "metrics"}
    assert not [o for o in objects if o["kind"] == "Pod"]
    assert "tls_cert" not in toml(objects)
