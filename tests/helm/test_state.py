"""State that survives a pod: session affinity, and claims of models."""

from __future__ import annotations

import re
import sys

import pytest

from tests.helm.chart import Object, config_file, find, needs_helm, pod, render, workload
from tests.helm.combinations import GROUPS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = needs_helm

@pytest.mark.parametrize("autoscaling", [
    {"kind": "hpa"}, {"kind": "keda", "keda": {"prometheusAddress": "http://prometheus:9090"}}])
@pytest.mark.parametrize("values", [{}, GROUPS], ids=["Deployment", "LeaderWorkerSet"])
def test_autoscaler_scales_the_workload(autoscaling: Object, values: Object):
    objects = render({"autoscaling": autoscaling, **values})
    made = workload(objects)
    scaler = find(objects, "HorizontalPodAutoscaler" if autoscaling["kind"] == "hpa" else "ScaledObject")["spec"]
    assert "replicas" not in made["spec"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": made["apiVersion"], "kind": made["kind"], "name": made["metadata"]["name"]}
    for trigger in scaler.get("triggers", []):
        names = re.search(r'pod=~"([^"]+)"', trigger["metadata"]["query"])
        assert names is not None
        for suffix, kinds in (("5d4b8c9f7d-x2x4q", {"Deployment"}), ("11", {"LeaderWorkerSet"})):
            assert bool(re.fullmatch(names.group(1), f"demo-npuserve-{suffix}")) == (made["kind"] in kinds)
        if made["kind"] == "LeaderWorkerSet":  # a worker has no metrics
            assert not re.fullmatch(names.group(1), "demo-npuserve-1-1")


@pytest.mark.parametrize(("service", "seconds"), [
    ({}, 0), ({"type": "NodePort"}, 0), ({"type": "LoadBalancer"}, 0), ({"sessionAffinitySeconds": 3600}, 3600),
    ({"type": "LoadBalancer", "sessionAffinitySeconds": 600}, 600)])
def test_session_affinity_of_the_service(service: Object, seconds: int):
    objects = render({"service": service})
    spec = find(objects, "Service", "demo-npuserve")["spec"]
    assert spec.get("sessionAffinity") == ("ClientIP" if seconds else None)
    if seconds:
        assert spec["sessionAffinityConfig"] == {"clientIP": {"timeoutSeconds": seconds}}
        assert seconds > tomllib.loads(config_file(objects))["max_connection_age_seconds"]
    assert "sessionAffinity" not in find(objects, "Service", "demo-npuserve-headless")["spec"]


def shares(service: Object, age_seconds: float, pods: int = 3) -> list[float]:
    """Return each pod's expected part of the fair share, an hour after a rollout and a time of `age_seconds`.

    The rollout replaces pods one at a time, without a surge, as the devices' presets do. Clients of a pod that ends
    connect to any other pod. Later connections are renewed each `age_seconds`, with the address's pod while its
    affinity lasts.
    """
    load = [1.0] * pods
    for replaced in range(pods):
        moved = load[replaced] / (pods - 1)
        load = [0.0 if pod == replaced else part + moved for pod, part in enumerate(load)]
    affinity_seconds = service.get("sessionAffinityConfig", {}).get("clientIP", {}).get("timeoutSeconds", 0)
    if age_seconds > affinity_seconds:  # the affinity ends between two connections, or there is none
        load = [sum(load) / pods] * pods
    return [round(part, 2) for part in load]


@pytest.mark.parametrize(("affinity_seconds", "expected"), [
    (None, [1.0, 1.0, 1.0]), (3600, [1.88, 1.12, 0.0])], ids=["default", "affinity"])
def test_rollout_leaves_each_pod_its_share_without_affinity(affinity_seconds: int | None, expected: list[float]):
    values: Object = {} if affinity_seconds is None else {"service": {"sessionAffinitySeconds": affinity_seconds}}
    objects = render(values)
    age_seconds = tomllib.loads(config_file(objects))["max_connection_age_seconds"]
    assert age_seconds > 0
    assert shares(find(objects, "Service", "demo-npuserve")["spec"], age_seconds) == expected


def test_model_claim_is_created_and_kept():
    objects = render({"model": {"init": {"create": True, "size": "200Gi", "storageClass": "nfs"}}}, ("cuda",))
    claim = find(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "storageClassName": "nfs",
                             "resources": {"requests": {"storage": "200Gi"}}}
    (volume,) = [volume for volume in pod(objects)["volumes"] if volume["name"] == "models"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_model_claim_and_cache_claim_are_two():
    values: Object = {"model": {"init": {"create": True}}, "cache": {"type": "pvc"}}
    names = {o["metadata"]["name"] for o in render(values, ("cuda",)) if o["kind"] == "PersistentVolumeClaim"}
    assert names == {"demo-npuserve-cache", "demo-npuserve-models"}
