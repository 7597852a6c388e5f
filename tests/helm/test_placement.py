"""Placement of pods: nodes, devices and users."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helm.chart import Object, find, merged, needs_helm, pod, render, workload

pytestmark = needs_helm

LABELS = {"accelerator": "huawei-Ascend910"}


class Node(NamedTuple):
    name: str
    zone: str
    devices: int
    labels: dict[str, str]

    def domain(self, key: str) -> str:
        return {"kubernetes.io/hostname": self.name, "topology.kubernetes.io/zone": self.zone}[key]


def schedule(nodes: list[Node], spec: Object, replicas: int) -> list[str]:
    """Place replicas as kube-scheduler does, by devices, nodeSelector and strict topologySpreadConstraints.

    Returns the nodes' names. It stops at the first pod that stays pending.
    """
    limits = spec["containers"][0]["resources"]["limits"]
    (wanted,) = [count for name, count in limits.items() if "/" in name]
    selector = spec.get("nodeSelector", {}).items()
    strict = [c for c in spec.get("topologySpreadConstraints", []) if c["whenUnsatisfiable"] == "DoNotSchedule"]
    placed: list[Node] = []

    def skew(node: Node, constraint: dict[str, Any]) -> int:
        key, honor = constraint["topologyKey"], constraint.get("nodeAffinityPolicy", "Honor") == "Honor"
        counted = [n for n in nodes if not honor or selector <= n.labels.items()]
        counts = {n.domain(key): 0 for n in counted}
        for n in placed:
            counts[n.domain(key)] += 1
        return counts[node.domain(key)] + 1 - min(counts.values())

    for _ in range(replicas):
        fitting = [n for n in nodes if selector <= n.labels.items()
                   and n.devices - wanted * placed.count(n) >= wanted
                   and all(skew(n, constraint) <= constraint["maxSkew"] for constraint in strict)]
        if not fitting:
            break
        placed.append(min(fitting, key=placed.count))
    return [node.name for node in placed]


NODES = [Node("npu-1", "a", 8, LABELS), Node("npu-2", "b", 8, LABELS),
         Node("cpu-1", "a", 0, {}), Node("cpu-2", "c", 0, {})]


@pytest.mark.parametrize("preset", ["ascend", "cuda"])
def test_spread_prod_uses_all_devices_of_a_host(preset: str):
    spec = pod(render({}, (preset, "prod")))
    assert len(schedule(NODES[:1] + NODES[2:], spec, 8)) == 8
    assert len(schedule(NODES, spec, 16)) == 16


def test_spread_strict_counts_selected_nodes_only():
    values: Object = {"nodeSelector": LABELS, "topologySpread": {
        "whenUnsatisfiable": "DoNotSchedule", "keys": ["kubernetes.io/hostname"]}}
    spec = pod(render(values, ("ascend",)))
    assert sorted(schedule(NODES, spec, 4)) == ["npu-1", "npu-1", "npu-2", "npu-2"]
    without = merged(spec, {"topologySpreadConstraints": [
        {**c, "nodeAffinityPolicy": "Ignore"} for c in spec["topologySpreadConstraints"]]})
    assert len(schedule(NODES, without, 4)) == 2


@pytest.mark.parametrize(("kubernetes", "policy"), [("1.25.0", None), ("1.26.0", "Honor")])
def test_spread_policies_follow_the_cluster_version(kubernetes: str, policy: str | None):
    constraints = pod(render(kubernetes=kubernetes))["topologySpreadConstraints"]
    assert [c["topologyKey"] for c in constraints] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert {c.get(name) for c in constraints for name in ("nodeAffinityPolicy", "nodeTaintsPolicy")} == {policy}


def test_helm_test_pod_stays_and_runs_where_the_server_runs():
    node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["npu"]}]}]}}
    anti = {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}]}
    values: Object = {"nodeSelector": LABELS, "affinity": {"nodeAffinity": node_affinity, "podAntiAffinity": anti}}
    objects = render(values, ("ascend",))
    made = find(objects, "Pod")
    assert made["metadata"]["annotations"] == {
        "helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation"}
    spec = pod(objects)
    for name in ("nodeSelector", "tolerations"):
        assert made["spec"][name] == spec[name]
    assert made["spec"]["affinity"] == {"nodeAffinity": node_affinity}
    assert spec["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}


@pytest.mark.parametrize(("preset", "devices"), [("cuda", "void"), ("cpu", None), ("ascend", None)])
def test_devices_are_hidden_from_init_and_test_containers(preset: str, devices: str | None):
    objects = render({"model": {"source": "init", "hub": {"name": "a/b"}}}, (preset,))

    def visible(container: Object) -> Any:
        return next((v["value"] for v in container["env"] if v["name"] == "NVIDIA_VISIBLE_DEVICES"), None)

    (server,), (init,) = pod(objects)["containers"], pod(objects)["initContainers"]
    (test,) = find(objects, "Pod")["spec"]["containers"]
    assert visible(server) is None
    assert [visible(init), visible(test)] == [devices, devices]


@pytest.mark.parametrize("openshift", [False, True])
def test_openshift_leaves_the_user_to_the_cluster(openshift: bool):
    objects = render({"openshift": openshift}, ("ascend",))
    specs = [pod(objects), find(objects, "Pod")["spec"]]
    for spec in specs:
        assert {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys() == (
            set() if openshift else {"runAsUser", "runAsGroup", "fsGroup"})
        assert spec["securityContext"]["runAsNonRoot"] is True
    ports = {(port["port"], port.get("protocol")) for rule in find(objects, "NetworkPolicy")["spec"]["egress"]
             for port in rule["ports"]}
    assert ({(5353, "UDP"), (5353, "TCP")} <= ports) == openshift
    assert {(53, "UDP"), (53, "TCP")} <= ports


def test_image_registry_precedes_the_servers_image_everywhere():
    values: Object = {"global": {"imageRegistry": "registry.example.com:5000/llm"}, "image": {"tag": "1"}}
    objects = render(values, ("ascend",))
    spec = pod(objects)
    containers = [*spec["containers"], *spec["initContainers"], *find(objects, "Pod")["spec"]["containers"]]
    assert {container["image"] for container in containers} == {"registry.example.com:5000/llm/npuserve:1"}
    digest = "sha256:" + "0" * 64
    (server,) = pod(render(merged(values, {"image": {"digest": digest}})))["containers"]
    assert server["image"] == f"registry.example.com:5000/llm/npuserve@{digest}"


def test_extra_objects_are_rendered_as_templates():
    objects = render({"extraObjects": [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-a"}},
        'kind: Secret\nmetadata:\n  name: {{ include "npuserve.fullname" . }}-b\n']})
    assert [o["metadata"]["name"] for o in objects if o["kind"] == "Secret"] == ["demo-a", "demo-npuserve-b"]


def test_load_balancer_class_and_node_port():
    values: Object = {"service": {"type": "LoadBalancer", "nodePort": 30051, "loadBalancerClass": "example.com/nlb"}}
    spec = find(render(values), "Service", "demo-npuserve")["spec"]
    assert spec["loadBalancerClass"] == "example.com/nlb"
    assert [port["nodePort"] for port in spec["ports"]] == [30051]
    assert workload(render())["kind"] == "Deployment"


@pytest.mark.skipif(not shutil.which("promtool"), reason="no program promtool on PATH (Debian's package prometheus)")
def test_monitor_drops_pending_pods(tmp_path: Path):
    """A pod has an address while its init container downloads the model, and no metrics page: it is not down."""
    (endpoint,) = find(render({"metrics": {"scrape": "serviceMonitor"}}), "ServiceMonitor")["spec"]["endpoints"]
    rules = [{"source_labels": rule["sourceLabels"], "regex": rule["regex"], "action": rule["action"]}
             for rule in endpoint["relabelings"]]
    pods = [{"targets": [f"{phase.lower()}:9090"], "labels": {"__meta_kubernetes_pod_phase": phase}}
            for phase in ("Pending", "Running")]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    (tmp_path / "prometheus.json").write_text(json.dumps({"scrape_configs": [{
        "job_name": "pods", "relabel_configs": rules, "file_sd_configs": [{"files": [str(tmp_path / "pods.json")]}]}]}))
    done = subprocess.run(["promtool", "check", "service-discovery", "--timeout=2s", str(tmp_path / "prometheus.json"),
                           "pods"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = [target["labels"]["instance"] for target in json.loads(done.stdout) if target.get("labels")]
    assert kept == ["running:9090"]


def test_monitor_relabels_and_has_a_timeout():
    rules = {"relabelings": [{"targetLabel": "cluster", "replacement": "eu"}],
             "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": ".*_created", "action": "drop"}]}
    objects = render({"metrics": {"scrape": "serviceMonitor", "scrapeTimeout": "5s", **rules}})
    (endpoint,) = find(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scrapeTimeout"] == "5s"
    assert endpoint["relabelings"][1:] == rules["relabelings"]
    assert endpoint["metricRelabelings"] == rules["metricRelabelings"]
