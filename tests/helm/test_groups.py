"""Replicas that are groups of pods: the LeaderWorkerSet, and the objects that select its leaders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from npuserve.service import settings
from npuserve.service.ranks.world import DEFAULT_PORT, NAMES, World, read_world
from tests.helm.chart import (
    Object,
    config_file,
    find,
    merged,
    needs_helm,
    notes,
    problems,
    render,
    templates,
    workload,
)
from tests.helm.combinations import COMBINATIONS, GROUPS

pytestmark = needs_helm

INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
NPUS: Object = {"accelerator": {"kind": "ascend", "count": 8}, "config": {"tensor_parallel_size": 16}}


def groups(values: Object | None = None) -> tuple[list[Object], Object, Object]:
    """Return the objects, and the templates of leaders and workers."""
    objects = render(merged(GROUPS, values or {}))
    return objects, *templates(workload(objects))


def environment(template: Object) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def labels(template: Object, index: int) -> dict[str, str]:
    """Return the labels of a pod, as LeaderWorkerSet completes them."""
    return {**template["metadata"]["labels"], INDEX: str(index)}


def test_validation_includes_the_templates_of_pods():
    made = workload(groups()[0])
    assert problems([made], "1.29") == []
    made["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["livenesProbe"] = {}
    made["spec"]["startupPolicy"] = "LeaderStarted"
    assert len(problems([made], "1.29")) == 2


def test_set_restarts_groups_as_a_whole():
    objects, _, _ = groups()
    spec = workload(objects)["spec"]
    assert spec["replicas"] == 2
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_workers_start_before_the_leader_is_ready():
    """With LeaderReady the leader would wait for workers that are created once it is ready."""
    assert workload(groups()[0])["spec"]["startupPolicy"] == "LeaderCreated"


def test_headless_service_of_a_group_takes_no_name_of_the_chart():
    """LeaderWorkerSet names a shared service for the set, and one of a group for its leader."""
    objects, _, _ = groups()
    made = workload(objects)
    assert made["metadata"]["name"] in {o["metadata"]["name"] for o in objects if o["kind"] == "Service"}
    assert made["spec"]["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}


def test_workers_have_no_ports_probes_or_secrets():
    values = {"tls": {"secretName": "t", "clientCaSecretName": "c"}, "apiKeys": {"secretName": "k"}}
    _, leader, worker = groups(values)
    (serving,), (computing,) = leader["spec"]["containers"], worker["spec"]["containers"]
    only = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert only <= set(serving)
    assert set(computing) == set(serving) - only
    secret = {"tls", "client-ca", "api-keys"}
    for part, name in ((serving["volumeMounts"], computing["volumeMounts"]),
                       (leader["spec"]["volumes"], worker["spec"]["volumes"])):
        assert {each["name"] for each in part} - {each["name"] for each in name} == secret
    assert "prometheus.io/scrape" in leader["metadata"]["annotations"]
    assert "prometheus.io/scrape" not in worker["metadata"]["annotations"]


def test_pods_of_a_group_differ_in_nothing_that_ranks_compare():
    _, leader, worker = groups()
    assert environment(leader) == environment(worker)
    for name in ("image", "args", "resources", "securityContext", "lifecycle"):
        assert leader["spec"]["containers"][0][name] == worker["spec"]["containers"][0][name]
    for name in ("terminationGracePeriodSeconds", "securityContext", "automountServiceAccountToken"):
        assert leader["spec"][name] == worker["spec"][name]


@pytest.mark.parametrize(("values", "port"), [({}, DEFAULT_PORT), ({"topology": {"masterPort": 29600}}, 29600)])
def test_server_reads_the_group_from_the_pods_environment(values: Object, port: int, tmp_path: Path):
    objects, leader, worker = groups(values)
    file = tmp_path / "npuserve.toml"
    file.write_text(config_file(objects))
    config = settings.load(argparse.Namespace(config=str(file)), {})
    size = workload(objects)["spec"]["leaderWorkerTemplate"]["size"]
    for index, template in enumerate((leader, worker)):
        added = {"LWS_LEADER_ADDRESS": "demo-npuserve-0.demo-npuserve-0.llm", "LWS_GROUP_SIZE": str(size),
                 "LWS_WORKER_INDEX": str(index)}
        world = read_world(config, {**environment(template), **added})
        assert world == World(index, size, "demo-npuserve-0.demo-npuserve-0.llm", port, NAMES[1])
        assert world.ranks(config) == range(2 * index, 2 * index + 2)


@pytest.mark.parametrize(("cpu", "size", "threads"), [(2, 4, "1"), (8, 4, "4"), ("7500m", 4, "4"), (0.5, 4, "1")])
def test_ranks_of_a_pod_divide_its_cores(cpu: Any, size: int, threads: str):
    values = {"resources": {"requests": {"cpu": cpu}}, "config": {"tensor_parallel_size": size}}
    assert environment(groups(values)[1])["NPUSERVE_THREADS"] == threads


def test_only_leaders_are_called_and_scraped():
    values = merged(COMBINATIONS["groups, a pool and smg"][1], {"autoscaling": {"kind": "none"}})
    objects, leader, worker = groups(values)
    selectors = [o["spec"]["selector"] for o in objects if o["kind"] == "Service"]
    selectors += [o["spec"]["selector"]["matchLabels"] for o in objects if o["kind"] == "InferencePool"]
    arguments = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    selectors.append(dict(argument.split("=") for argument in arguments[arguments.index("--selector") + 1:][:4]))
    ours = [selector for selector in selectors if selector["app.kubernetes.io/component"] == "server"]
    assert len(ours) == 5
    for selector in ours:
        assert selector.items() <= labels(leader, 0).items()
        assert not selector.items() <= labels(worker, 1).items()
    for monitor in (o for o in objects if o["kind"] == "ServiceMonitor"):
        matching = [o for o in objects if o["kind"] == "Service"
                    and monitor["spec"]["selector"]["matchLabels"].items() <= o["metadata"]["labels"].items()]
        assert len(matching) == 1


def test_network_policy_admits_the_ranks_of_the_release_alone():
    objects, _, worker = groups({"networkPolicy": {"grpcFrom": [{"podSelector": {"matchLabels": {"app": "x"}}}]}})
    policy = find(objects, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels(worker, 1).items()
    for rules, peer in ((policy["ingress"], "from"), (policy["egress"], "to")):
        open_to = [rule[peer] for rule in rules if "ports" not in rule]
        assert open_to == [[{"podSelector": policy["podSelector"]}]]
    assert all({port["port"] for port in rule["ports"]} <= {"grpc", "metrics"}
               for rule in policy["ingress"] if "ports" in rule)
    alone = find(render(), "NetworkPolicy")["spec"]
    assert all("ports" in rule for rule in alone["ingress"] + alone["egress"])


@pytest.mark.parametrize(("most", "hosts", "pods"), [(1, 2, 1), (2, 2, 3), (2, 4, 5), ("50%", 2, "50%")])
def test_disruption_budget_counts_groups(most: Any, hosts: int, pods: Any):
    """An eviction is allowed while less than `pods` pods are unavailable, and each takes its whole group."""
    objects, _, worker = groups({"podDisruptionBudget": {"maxUnavailable": most}, "topology": {"hosts": hosts}})
    budget = find(objects, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == pods
    assert budget["selector"]["matchLabels"].items() <= labels(worker, 1).items()
    if isinstance(pods, int):
        assert sum(hosts * evicted < pods for evicted in range(10)) == most


def test_leaders_are_spread_and_workers_follow():
    objects, leader, worker = groups({"topology": {"exclusiveKey": "rack"}})
    for constraint in leader["spec"]["topologySpreadConstraints"]:
        assert constraint["labelSelector"]["matchLabels"][INDEX] == "0"
    assert "topologySpreadConstraints" not in worker["spec"]
    assert workload(objects)["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}


def test_hccl_gets_its_variables_and_the_devices_addresses():
    hccl = {"bufferMegabytes": 512, "socketInterface": "=eth0", "basePort": 50000}
    _, leader, worker = groups(merged(NPUS, {"topology": {"hccl": hccl}, "accelerator": {"hostDriver": True}}))
    for template in (leader, worker):
        wanted = {"HCCL_BUFFSIZE": "512", "HCCL_SOCKET_IFNAME": "=eth0", "HCCL_IF_BASE_PORT": "50000"}
        assert environment(template).items() >= wanted.items()
        assert "/etc/hccn.conf" in {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert template["spec"]["containers"][0]["resources"]["limits"]["huawei.com/Ascend910"] == 8
    _, leader, _ = groups(NPUS)
    assert not any(name.startswith("HCCL") for name in environment(leader))


def test_notes_wait_for_the_set():
    assert "wait --for=condition=Available --timeout=900s leaderworkerset/demo-npuserve" in notes(GROUPS)
