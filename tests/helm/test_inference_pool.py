"""InferencePool and HTTPRoute: the pods as the pool of an endpoint picker."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.helm.chart import Object, config_file, find, merged, needs_helm, notes, pod, problems, render, workload
from tests.helm.combinations import COMBINATIONS
from tests.helm.test_chart import STACKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = needs_helm

ENGINE = "llm-d.ai/engine-type"
PEER = {"podSelector": {"matchLabels": {"app": "envoy"}}}


def pool(**values: Any) -> Object:
    return {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}, **values}}


@pytest.mark.parametrize("presets", STACKS, ids="+".join)
def test_pool_renders_with_every_preset(presets: tuple[str, ...]):
    values = merged(pool(httpRoute={"enabled": True, "parentRefs": [{"name": "inference"}]}), {
        "tls": {"secretName": ""}, "apiKeys": {"secretName": ""}, "helmTest": {"apiKeySecretName": ""},
        "gateway": {"enabled": True, "from": [PEER]}})
    objects = render(values, presets)
    assert not problems(objects, "1.29")
    assert find(objects, "InferencePool")["apiVersion"] == "inference.networking.k8s.io/v1"
    assert find(objects, "HTTPRoute")["apiVersion"] == "gateway.networking.k8s.io/v1"


def test_pool_is_absent_by_default():
    assert not [o for o in render() if o["kind"] in ("InferencePool", "HTTPRoute")]


def test_pool_holds_the_pods_at_their_grpc_port():
    objects = render({**pool(endpointPicker={"name": "picker", "port": 9005, "failureMode": "FailOpen"}),
                      "ports": {"grpc": 8001}})
    spec = find(objects, "InferencePool")["spec"]
    assert spec == {
        "selector": {"matchLabels": workload(objects)["spec"]["selector"]["matchLabels"]},
        "targetPorts": [{"number": 8001}], "appProtocol": "kubernetes.io/h2c",
        "endpointPickerRef": {"name": "picker", "port": {"number": 9005}, "failureMode": "FailOpen"}}
    assert tomllib.loads(config_file(objects))["port"] == 8001


def test_pool_leaves_the_chart_s_own_gateway_out():
    """The pool's selector matches no pod of smg."""
    objects = render({**pool(), "gateway": {"enabled": True, "kind": "smg"}})
    wanted = find(objects, "InferencePool")["spec"]["selector"]["matchLabels"].items()
    gateway = find(objects, "Deployment", "demo-npuserve-gateway")["spec"]["template"]["metadata"]["labels"]
    assert not wanted <= gateway.items()


@pytest.mark.parametrize(("labels", "engine"), [({}, "vllm"), ({ENGINE: "sglang", "a": "b"}, "sglang")])
def test_pods_have_the_engine_type_that_pickers_read(labels: Object, engine: str):
    made = workload(render({"podLabels": labels}))["spec"]
    found = made["template"]["metadata"]["labels"]
    assert found[ENGINE] == engine
    assert labels.items() <= found.items()
    assert ENGINE not in made["selector"]["matchLabels"], "a selector cannot change"


@pytest.mark.parametrize(("config", "ports"), [
    ({}, {}), ({"kv_events": "grpc"}, {}), ({"kv_events": "zmq"}, {"kv-events": 5557}),
    ({"kv_events": "zmq", "kv_events_endpoint": "tcp://[::]:6000", "kv_events_replay_endpoint": "tcp://*:6001"},
     {"kv-events": 6000, "kv-replay": 6001}),
    ({"kv_events": "zmq", "kv_events_endpoint": "tcp://router.llm:5557"}, {}),
    ({"kv_events": "zmq", "kv_events_endpoint": "ipc:///tmp/events"}, {})])
def test_kv_events_reach_named_peers_only(config: Object, ports: dict[str, int]):
    """The events contain prompts, and ZeroMQ asks for no key."""
    objects = render({"config": config, "networkPolicy": {"kvEventsFrom": [PEER] if ports else []}})
    (container,) = pod(objects)["containers"]
    given = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {name: given[name] for name in given.keys() - {"grpc", "metrics", "health"}} == ports
    rules = [rule for rule in find(objects, "NetworkPolicy")["spec"]["ingress"] if rule.get("from") == [PEER]]
    assert [{port["port"] for port in rule["ports"]} for rule in rules] == ([set(ports)] if ports else [])
    variables = [v for v in container["env"] if v["name"] == "POD_IP"]
    assert [v["valueFrom"]["fieldRef"]["fieldPath"] for v in variables] == (
        ["status.podIP"] if config.get("kv_events") == "zmq" else [])


@pytest.mark.parametrize(("kind", "endpoint", "ports"), [
    ("zmq", "tcp://router.llm:5557", [5557]), ("zmq", "tcp://[fd00::7]:6000", [6000]),
    ("zmq", "ipc:///tmp/events:5557", []),
    ("zmq", "tcp://*:5557", []), ("zmq", "", []), ("grpc", "tcp://router.llm:5557", [])])
def test_kv_events_may_leave_for_a_subscriber_that_the_server_connects_to(kind: str, endpoint: str, ports: list[int]):
    config = {"kv_events": kind} | ({"kv_events_endpoint": endpoint} if endpoint else {})
    peers = [PEER] if kind == "zmq" and endpoint in ("", "tcp://*:5557") else []
    plain, made = (
        find(render(values), "NetworkPolicy")["spec"]["egress"]
        for values in ({}, {"config": config, "networkPolicy": {"kvEventsFrom": peers}}))
    assert [rule for rule in made if rule not in plain] == [{"ports": [{"port": port}]} for port in ports]


def test_route_leads_named_methods_to_the_pool():
    _, values = COMBINATIONS["pool, route and gateway"]
    objects = render(values)
    spec = find(objects, "HTTPRoute")["spec"]
    (rule,) = spec["rules"]
    assert [match["path"] for match in rule["matches"]] == [
        {"type": "Exact", "value": f"/vllm.grpc.engine.VllmEngine/{name}"} for name in ("Generate", "GetModelInfo")]
    assert {match["method"] for match in rule["matches"]} == {"POST"}
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool",
                                    "name": find(objects, "InferencePool")["metadata"]["name"]}]
    assert rule["timeouts"] == {"request": "600s"}
    assert spec["parentRefs"] == [{"name": "inference", "namespace": "gateways"}]
    policy = find(objects, "NetworkPolicy")["spec"]["ingress"]
    assert policy[0]["from"] == values["gateway"]["from"], "the gateway's proxies alone reach the pool"


@pytest.mark.parametrize("route", [False, True])
def test_pool_notes_name_the_port_of_the_metrics(route: bool):
    values = {**pool(httpRoute={"enabled": route, "parentRefs": [{"name": "inference"}]}),
              "ports": {"metrics": 9191}, "networkPolicy": {"metricsFrom": [PEER]}}
    text = notes(values)
    assert "The metrics that it reads are on port 9191" in text
    assert "networkPolicy.metricsFrom" in text
    assert ("the HTTPRoute of the same name" in text) == route


def test_validation_finds_errors_in_a_pool_and_a_route():
    presets, values = COMBINATIONS["pool, route and gateway"]
    objects = render(values, presets)
    made, route = find(objects, "InferencePool"), find(objects, "HTTPRoute")
    assert not problems([made, route], "1.29")
    del made["spec"]["endpointPickerRef"]["port"]
    made["spec"]["endpointPickerRef"]["kind"] = "Service"
    made["spec"]["appProtocol"] = "grpc"
    route["spec"]["rules"][0]["matches"][0]["path"]["value"] = "vllm"
    route["spec"]["rules"][0]["timeout"] = "1s"
    found = " ".join(problems([made, route], "1.29"))
    for word in ("port", "grpc", "vllm", "timeout"):
        assert f"'{word}'" in found
