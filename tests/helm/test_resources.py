"""Resources of the pods: their class of service, quotas, and the sizes of the presets."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from npuserve.cli import check
from npuserve.npu.cann import processors
from tests.helm.chart import Object, find, merged, needs_helm, pod, render, workload
from tests.helm.combinations import COMBINATIONS

pytestmark = needs_helm

UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
EQUAL: Object = {"resources": {"requests": {"cpu": 8, "memory": "16Gi"}, "limits": {"cpu": 8, "memory": "16Gi"}}}
DOWNLOAD: Object = {"model": {"source": "init", "hub": {"name": "a/b"}}}


def quantity(value: Any) -> float:
    text = str(value)
    number = text.rstrip("kKmMGTi")
    return float(number) * UNITS.get(text[len(number):], 1)


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def quality_of_service(spec: Object) -> str:
    """Return the class that Kubernetes gives a pod by the processors and memory of all its containers."""
    resources = [container["resources"] for container in containers(spec)]
    limits = [{name: quantity(each.get("limits", {}).get(name, 0)) for name in ("cpu", "memory")} for each in resources]
    requests = [{name: quantity(each.get("requests", {}).get(name, limit[name])) for name in ("cpu", "memory")}
                for each, limit in zip(resources, limits, strict=True)]
    return "Guaranteed" if requests == limits and all(all(each.values()) for each in limits) else "Burstable"


@pytest.mark.parametrize("presets", [("cpu",), ("ascend",), ("cuda",)])
def test_pod_with_equal_requests_and_limits_is_guaranteed(presets: tuple[str, ...]):
    """Only such a pod gets whole cores from the static CPU manager."""
    values = merged(EQUAL, DOWNLOAD)
    assert quality_of_service(pod(render(values, presets))) == "Guaranteed"
    assert quality_of_service(pod(render(DOWNLOAD, presets))) == (
        "Guaranteed" if presets == ("ascend",) else "Burstable")


def test_every_container_has_limits_for_a_quota():
    """A quota on limits rejects a pod with a container that has none."""
    _, combination = COMBINATIONS["smg"]
    values = merged(combination, EQUAL, DOWNLOAD, {"gateway": {"smg": {"resources": {"limits": {"cpu": 2}}}}})
    objects = render(values)
    gateway = find(objects, "Deployment", "demo-npuserve-gateway")["spec"]["template"]["spec"]
    tests = [each["spec"] for settings in (values, merged(EQUAL, DOWNLOAD))
             for each in render(settings) if each["kind"] == "Pod"]
    assert len(tests) == 2
    for spec in (pod(objects), gateway, *tests):
        assert all({"cpu", "memory"} <= container["resources"]["limits"].keys() for container in containers(spec))


def test_ascend_preset_has_exclusive_processors_enough_to_bind_threads():
    """From this many on the engine binds its threads (npu/cann/processors.py)."""
    resources = pod(render({}, ("ascend",)))["containers"][0]["resources"]
    assert isinstance(resources["limits"]["cpu"], int)
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"] >= processors.MIN_PROCESSORS


@pytest.mark.parametrize("preset", ["ascend", "cuda"])
def test_device_preset_asks_for_what_its_model_needs(preset: str):
    """One replica of Qwen3-0.6B, whose files have 1.5 GB."""
    objects = render({}, (preset,))
    server = pod(objects)["containers"][0]["resources"]
    assert workload(objects)["spec"]["replicas"] == 1
    assert server["requests"]["cpu"] <= 8
    assert quantity(server["requests"]["memory"]) <= 16 << 30
    assert quantity(server["requests"]["memory"]) == quantity(server["limits"]["memory"])
    assert 1.5e9 < quantity(server["requests"]["ephemeral-storage"]) <= 10 << 30


@pytest.mark.parametrize(("model", "size"), [
    ({"source": "init", "hub": {"name": "a/b"}}, "50Gi"),
    ({"source": "init", "hub": {"name": "a/b"}, "init": {"size": "7Gi"}}, "7Gi"),
    ({"source": "init", "hub": {"name": "a/b"}, "init": {"claimName": "models"}}, None),
    ({"source": "pvc", "pvc": {"claimName": "models"}}, None),
    ({}, None),
])
def test_pod_requests_the_disk_to_which_it_downloads_its_model(model: Object, size: str | None):
    (server,) = pod(render({"model": model}))["containers"]
    assert server["resources"]["requests"].get("ephemeral-storage") == size
    own = {"resources": {"requests": {"ephemeral-storage": "3Gi"}}}
    (server,) = pod(render(merged({"model": model}, own)))["containers"]
    assert server["resources"]["requests"]["ephemeral-storage"] == "3Gi"
    assert server["resources"]["requests"]["cpu"] == 2


@pytest.mark.parametrize("values", [
    {"podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False}},
    {"podSecurityContext": {"runAsUser": 0}, "securityContext": {"runAsUser": 1000}},
    {"podSecurityContext": {"runAsUser": 0}, "openshift": True},
    {"resources": {"requests": {"memory": "4096Mi", "cpu": "1500m"}, "limits": {"cpu": 1.5, "memory": "4Gi"}}},
    {"resources": {"requests": {"cpu": 1}, "limits": {"cpu": "1000m", "memory": 4294967296}}},
    {"resources": {"limits": {"rdma/hca": 1, "example.com/input-buffers": 1}}},
])
def test_resources_and_users_that_kubernetes_accepts_are_rendered(values: Object):
    render(values)


@pytest.mark.parametrize(("preset", "device"), [("cpu", "cpu"), ("ascend", "npu"), ("cuda", "cuda")])
def test_accept_checks_the_device_before_the_server_and_the_download(preset: str, device: str) -> None:
    assert "accept" not in str(workload(render({}, (preset,))))
    pod = workload(render({"accept": {"enabled": True}}, (preset,)))["spec"]["template"]["spec"]
    accept, *others = pod["initContainers"]
    (server,) = pod["containers"]
    assert accept["args"] == ["check", "--device", device, "--accept", "--sizes", "quick"]
    assert (accept["name"], accept["image"], accept["resources"]) == ("accept", server["image"], server["resources"])
    assert accept["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert [container["name"] for container in others] in ([], ["model"])
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    assert parser.parse_args(accept["args"][1:]).sizes == "quick"


def test_accept_mounts_no_secrets() -> None:
    values = {"accept": {"enabled": True}, "tls": {"secretName": "tls"}, "apiKeys": {"secretName": "keys"},
              "helmTest": {"apiKeySecretName": "test"}}
    pod = workload(render(values))["spec"]["template"]["spec"]
    mounts = {container["name"]: {mount["name"] for mount in container["volumeMounts"]}
              for container in (*pod["initContainers"], *pod["containers"])}
    assert mounts["npuserve"] - mounts["accept"] == {"tls", "api-keys"}
