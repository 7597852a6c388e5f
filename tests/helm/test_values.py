"""Values that values.schema.json and _checks.tpl refuse, by field.

The schema is checked in this process by jsonschema. One Helm process checks many values at once, and with --full each
value by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, Loader, Object, merged, needs_helm, refused, template
from tests.helm.combinations import GROUPS

SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())

DEFAULTS: Object = yaml.load((CHART / "values.yaml").read_text(), Loader)

INVALID: list[tuple[str, Object]] = [
    ("replica", {"replica": 3}),
    ("accelerator.kind", {"accelerator": {"kind": "tpu"}}),
    ("accelerator.count", {"accelerator": {"kind": "cuda", "count": 0}}),
    ("accelerator.count", {"accelerator": {"kind": "cuda", "count": 1.5}}),
    ("accelerator.resourceName", {"accelerator": {"kind": "cuda", "resourceName": "gpu"}}),
    ("accelerator.extraResources.memory", {"accelerator": {"kind": "ascend", "extraResources": {"memory": 1}}}),
    ("accelerator.type", {"accelerator": {"type": "cpu"}}),
    ("image.tag", {"image": {"tag": "latest"}}),
    ("image.digest", {"image": {"digest": "sha256:12"}}),
    ("image.pullPolicy", {"image": {"pullPolicy": "Sometimes"}}),
    ("image.repository", {"image": {"repository": ""}}),
    ("model.source", {"model": {"source": "s3"}}),
    ("model.hub.name", {"model": {"source": "hub"}}),
    ("model.hub.name", {"model": {"source": "init"}}),
    ("model.hub.name", {"model": {"source": "hub", "hub": {"name": "a/b/c"}}}),
    ("model.hub.revision", {"model": {"source": "hub", "hub": {"name": "a/b", "revision": "main"}}}),
    ("model.hub.endpoint", {"model": {"hub": {"endpoint": "hf-mirror.com"}}}),
    ("model.pvc.claimName", {"model": {"source": "pvc"}}),
    ("model.pvc.path", {"model": {"source": "pvc", "pvc": {"claimName": "c", "path": "../etc"}}}),
    ("model.pvc.path", {"model": {"source": "pvc", "pvc": {"claimName": "c", "path": "/models"}}}),
    ("model.init.size", {"model": {"init": {"size": "much"}}}),
    ("config.max_num_seqs", {"config": {"max_num_seqs": 0}}),
    ("config.max_num_seqs", {"config": {"max_num_seqs": "many"}}),
    ("config.block_size", {"config": {"block_size": 24}}),
    ("config.dtype", {"config": {"dtype": "int4"}}),
    ("config.kv_cache_memory", {"config": {"kv_cache_memory": "4 apples"}}),
    ("config.kv_cache_memory", {"config": {"kv_cache_memory": "0.9"}}),
    ("config.decode_buckets", {"config": {"decode_buckets": "1,0"}}),
    ("config.tensor_parallel_size", {"config": {"tensor_parallel_size": 65}}),
    ("config.port", {"config": {"port": 1}}),
    ("config.drain_seconds", {"config": {"drain_seconds": 5}}),
    ("config.max_num_seq", {"config": {"max_num_seq": 5}}),
    ("host", {"host": "localhost"}),
    ("ports.grpc", {"ports": {"grpc": 80}}),
    ("ports.metrics", {"ports": {"metrics": 65536}}),
    ("ports.health", {"ports": {"health": 0}}),
    ("config.hang_seconds", {"config": {"hang_seconds": 0}}),
    ("helmTest.key", {"helmTest": {"key": "a b"}}),
    ("replicas", {"replicas": -1}),
    ("replicas", {"replicas": "two"}),
    ("resources.requests.cpu", {"resources": {"requests": {"cpu": "four"}}}),
    ("resources.request", {"resources": {"request": {"cpu": 1}}}),
    ("termination.drainSeconds", {"termination": {"drainSeconds": -1}}),
    ("termination.preStopSeconds", {"termination": {"preStopSeconds": "15s"}}),
    ("probes.startupSeconds", {"probes": {"startupSeconds": 0}}),
    ("probes.liveness.failureThreshold", {"probes": {"liveness": {"failureThreshold": 0}}}),
    ("probes.readiness.tcpSocket", {"probes": {"readiness": {"tcpSocket": {"port": 1}}}}),
    ("strategy.type", {"strategy": {"type": "BlueGreen"}}),
    ("strategy.maxSurge", {"strategy": {"maxSurge": "200%"}}),
    ("autoscaling.kind", {"autoscaling": {"kind": "vpa"}}),
    ("autoscaling.minReplicas", {"autoscaling": {"kind": "hpa", "minReplicas": 0}}),
    ("autoscaling.kvCacheUsage", {"autoscaling": {"kind": "hpa", "kvCacheUsage": 80}}),
    ("autoscaling.keda.prometheusAddress", {"autoscaling": {"kind": "keda"}}),
    ("autoscaling.keda.prometheusAddress", {"autoscaling": {"keda": {"prometheusAddress": "prometheus:9090"}}}),
    ("podDisruptionBudget.maxUnavailable", {"podDisruptionBudget": {"maxUnavailable": 0}}),
    ("service.type", {"service": {"type": "ExternalName"}}),
    ("service.port", {"service": {"port": 0}}),
    ("service.loadBalancerSourceRanges.0", {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["me"]}}),
    ("grpcRoute.parentRefs", {"grpcRoute": {"enabled": True}}),
    ("grpcRoute.services", {"grpcRoute": {"services": []}}),
    ("grpcRoute.hostnames.0", {"grpcRoute": {"hostnames": ["https://x"]}}),
    ("networkPolicy.grpcFrom.0", {"networkPolicy": {"grpcFrom": [{}]}}),
    ("networkPolicy.kvEventsFrom.0", {"networkPolicy": {"kvEventsFrom": [{}]}}),
    ("metrics.scrape", {"metrics": {"scrape": "both"}}),
    ("metrics.interval", {"metrics": {"interval": "15"}}),
    ("metrics.labels.release", {"metrics": {"labels": {"release": "a b"}}}),
    ("dashboards.enabled", {"dashboards": {"enabled": "yes"}}),
    ("cache.type", {"cache": {"type": "hostPath"}}),
    ("cache.size", {"cache": {"size": "0Gi"}}),
    ("cache.accessMode", {"cache": {"accessMode": "ReadWriteOncePod"}}),
    ("shm.size", {"shm": {"size": "-1Gi"}}),
    ("topologySpread.whenUnsatisfiable", {"topologySpread": {"whenUnsatisfiable": "Maybe"}}),
    ("affinity.nodeAffinty", {"affinity": {"nodeAffinty": {}}}),
    ("commonLabels.a b", {"commonLabels": {"a b": "x"}}),
    ("commonLabels.a", {"commonLabels": {"a": "x" * 64}}),
    ("extraEnv.0.name", {"extraEnv": [{"value": "x"}]}),
    ("extraEnv.0.name", {"extraEnv": [{"name": "A B", "value": "x"}]}),
    ("extraEnv.0.value", {"extraEnv": [{"name": "A", "value": 1}]}),
    ("fullnameOverride", {"fullnameOverride": "Big_Name"}),
    ("fullnameOverride", {"fullnameOverride": "a.service"}),
    ("nameOverride", {"nameOverride": "2nd"}),
    ("global.imageRegistry", {"global": {"imageRegistry": "https://registry"}}),
    ("openshift", {"openshift": "auto"}),
    ("config.state_folder", {"config": {"state_folder": "/state"}}),
    ("state.type", {"state": {"type": "hostPath"}}),
    ("state.size", {"state": {"size": "big"}}),
    ("model.init.accessMode", {"model": {"init": {"accessMode": "ReadOnlyMany"}}}),
    ("model.init.create", {"model": {"init": {"create": "yes"}}}),
    ("service.nodePort", {"service": {"type": "NodePort", "nodePort": 0}}),
    ("service.sessionAffinitySeconds", {"service": {"sessionAffinitySeconds": 86401}}),
    ("service.loadBalancerClass", {"service": {"loadBalancerClass": "a b"}}),
    ("metrics.scrapeTimeout", {"metrics": {"scrapeTimeout": "fast"}}),
    ("metrics.relabelings.0", {"metrics": {"relabelings": [{}]}}),
    ("metrics.metricRelabelings", {"metrics": {"metricRelabelings": {}}}),
    ("extraObjects.0", {"extraObjects": [{}]}),
    ("gateway.from", {"gateway": {"enabled": True}}),
    ("gateway.from.0", {"gateway": {"from": [{}]}}),
    ("gateway.kind", {"gateway": {"kind": "envoy"}}),
    ("gateway.smg.replicas", {"gateway": {"smg": {"replicas": 0}}}),
    ("gateway.smg.policy", {"gateway": {"smg": {"policy": "bucket"}}}),
    ("gateway.smg.healthCheckSeconds", {"gateway": {"smg": {"healthCheckSeconds": 0}}}),
    ("gateway.smg.image.tag", {"gateway": {"smg": {"image": {"tag": "latest"}}}}),
    ("gateway.smg.image.digest", {"gateway": {"smg": {"image": {"digest": "sha256:12"}}}}),
    ("gateway.smg.toolCallParser", {"gateway": {"smg": {"toolCallParser": "a b"}}}),
    ("gateway.smg.extraArgs.0", {"gateway": {"smg": {"extraArgs": [""]}}}),
    ("gateway.smg.extraEnv.0.name", {"gateway": {"smg": {"extraEnv": [{"value": "x"}]}}}),
    ("gateway.smg.ports.http", {"gateway": {"smg": {"ports": {"http": 80}}}}),
    ("gateway.smg.service.type", {"gateway": {"smg": {"service": {"type": "ExternalName"}}}}),
    ("gateway.smg.clientsFrom.0", {"gateway": {"smg": {"clientsFrom": [{}]}}}),
    ("gateway.smg.apiServer.ports", {"gateway": {"smg": {"apiServer": {"ports": []}}}}),
    ("gateway.smg.podDisruptionBudget.maxUnavailable", {
        "gateway": {"smg": {"podDisruptionBudget": {"maxUnavailable": 0}}}}),
    ("gateway.smg.resources.limits.memory", {"gateway": {"smg": {"resources": {"limits": {"memory": "much"}}}}}),
    ("gateway.smg.model", {"gateway": {"smg": {"model": "qwen"}}}),
    ("inferencePool.endpointPicker.name", {"inferencePool": {"enabled": True}}),
    ("inferencePool.endpointPicker.name", {"inferencePool": {"endpointPicker": {"name": "Big_Name"}}}),
    ("inferencePool.endpointPicker.port", {"inferencePool": {"endpointPicker": {"port": 0}}}),
    ("inferencePool.endpointPicker.failureMode", {"inferencePool": {"endpointPicker": {"failureMode": "Fail"}}}),
    ("inferencePool.httpRoute.parentRefs", {"inferencePool": {"httpRoute": {"enabled": True}}}),
    ("inferencePool.httpRoute.methods", {"inferencePool": {"httpRoute": {"methods": []}}}),
    ("inferencePool.httpRoute.methods.0", {"inferencePool": {"httpRoute": {"methods": ["/v1/chat"]}}}),
    ("inferencePool.httpRoute.timeout", {"inferencePool": {"httpRoute": {"timeout": "1 minute"}}}),
    ("topology.kind", {"topology": {"kind": "statefulset"}}),
    ("topology.hosts", {"topology": {"hosts": 1}}),
    ("topology.hosts", {"topology": {"hosts": 65}}),
    ("topology.masterPort", {"topology": {"masterPort": 80}}),
    ("topology.exclusiveKey", {"topology": {"exclusiveKey": "a b"}}),
    ("topology.annotations.a", {"topology": {"annotations": {"a": 1}}}),
    ("topology.hccl.bufferMegabytes", {"topology": {"hccl": {"bufferMegabytes": 0}}}),
    ("topology.hccl.socketInterface", {"topology": {"hccl": {"socketInterface": "eth0 eth1"}}}),
    ("topology.hccl.basePort", {"topology": {"hccl": {"basePort": 65521}}}),
    ("topology.size", {"topology": {"size": 2}}),
    ("production", {"production": "yes"}),
    ("config.min_priority", {"config": {"min_priority": -101}}),
    ("config.metrics_host", {"config": {"metrics_host": "127.0.0.1"}}),
]

GATEWAY: Object = {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]}
KEYED: Object = {"tls": {"secretName": "t"}, "apiKeys": {"secretName": "k"}}
POOL: Object = {"enabled": True, "endpointPicker": {"name": "picker"}}
EVENTS: Object = {"config": {"kv_events": "zmq"}, "networkPolicy": {"kvEventsFrom": GATEWAY["from"]}}
HOSTS: Object = GROUPS["topology"]
DIGEST = "sha256:" + "0" * 64


def smg(**values: Any) -> Object:
    return {"enabled": True, "kind": "smg", "smg": values}


CONTRADICTIONS: list[tuple[str, Object]] = [
    ("termination.gracePeriodSeconds: 60 would kill", {"termination": {"gracePeriodSeconds": 60}}),
    ("ports.metrics: 50051 is ports.grpc", {"ports": {"metrics": 50051}}),
    ("accelerator.kind is cpu", {"accelerator": {"hostDriver": True}}),
    ("accelerator.kind is cpu", {"accelerator": {"resourceName": "nvidia.com/gpu"}}),
    ("accelerator.hostDriver", {"accelerator": {"kind": "cuda", "hostDriver": True}}),
    ("resources.limits: nvidia.com/gpu", {
        "accelerator": {"kind": "cuda"}, "resources": {"limits": {"nvidia.com/gpu": 2}}}),
    ("strategy: with maxSurge 0", {"strategy": {"maxSurge": 0, "maxUnavailable": "0%"}}),
    ("autoscaling.minReplicas: 9", {"autoscaling": {"kind": "hpa", "minReplicas": 9}}),
    ("metrics.scrape: none", {"autoscaling": {"kind": "hpa"}, "metrics": {"scrape": "none"}}),
    ("model.init.accessMode: ReadWriteOnce", {"model": {
        "source": "init", "hub": {"name": "a/b"}, "init": {"create": True, "accessMode": "ReadWriteOnce"}}}),
    ("model.init.create", {"model": {"init": {"create": True}}}),
    ("model.init.create", {"model": {
        "source": "init", "hub": {"name": "a/b"}, "init": {"create": True, "claimName": "models"}}}),
    ("headless.enabled", {"state": {"type": "pvc"}, "headless": {"enabled": False}}),
    ("strategy.type: Recreate", {"state": {"type": "pvc"}, "strategy": {"type": "Recreate"}}),
    ("topologySpread.whenUnsatisfiable: DoNotSchedule", {
        "accelerator": {"kind": "cuda"}, "topologySpread": {"whenUnsatisfiable": "DoNotSchedule"}}),
    ("requiredDuringSchedulingIgnoredDuringExecution", {  # a preference excludes no node
        "accelerator": {"kind": "cuda"}, "topologySpread": {"whenUnsatisfiable": "DoNotSchedule"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}),
    ("metrics.scrapeTimeout: 20s is above metrics.interval, 15s", {"metrics": {"scrapeTimeout": "20s"}}),
    ("metrics.scrapeTimeout: 2m is above", {"metrics": {"scrapeTimeout": "2m", "interval": "90s"}}),
    ("service.loadBalancerClass", {"service": {"type": "NodePort", "loadBalancerClass": "a"}}),
    ("service.nodePort", {"service": {"nodePort": 30051}}),
    ("service.sessionAffinitySeconds: 300", {"service": {"sessionAffinitySeconds": 300}}),
    ("cache.accessMode: ReadWriteOnce", {"cache": {"type": "pvc", "accessMode": "ReadWriteOnce"}}),
    ("strategy.type Recreate", {"replicas": 1, "cache": {"type": "pvc", "accessMode": "ReadWriteOnce"}}),
    ("extraEnv: NPUSERVE_PORT", {"extraEnv": [{"name": "NPUSERVE_PORT", "value": "1"}]}),
    ("extraEnv: HF_HOME", {"extraEnv": [{"name": "HF_HOME", "value": "/x"}]}),
    ("podLabels: app.kubernetes.io/name is the chart's own", {"podLabels": {"app.kubernetes.io/name": "x"}}),
    ("podLabels: team", {"podLabels": {"team": "b"}, "commonLabels": {"team": "a"}}),
    ("commonLabels: helm.sh/chart", {"commonLabels": {"helm.sh/chart": "x"}}),
    ("metrics.labels: app.kubernetes.io/part-of", {"metrics": {"labels": {"app.kubernetes.io/part-of": "x"}}}),
    ("podAnnotations: checksum/config", {"podAnnotations": {"checksum/config": "x"}}),
    ("podAnnotations: prometheus.io/port", {
        "podAnnotations": {"prometheus.io/port": "1"}, "metrics": {"scrape": "annotations"}}),
    ("accelerator.extraResources: nvidia.com/gpu", {
        "accelerator": {"kind": "cuda", "extraResources": {"nvidia.com/gpu": 3}}}),
    ("service.loadBalancerSourceRanges", {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}),
    ("tls.clientCaSecretName", {"tls": {"clientCaSecretName": "ca"}}),
    ("ports.health: 50051 is ports.grpc", {"ports": {"health": 50051}}),
    ("ports.health: 9090 is ports.grpc or ports.metrics", {"ports": {"health": 9090}}),
    ("helmTest.clientCertSecretName", {"helmTest": {"clientCertSecretName": "own"}}),
    ("helmTest.apiKeySecretName", {"helmTest": {"apiKeySecretName": "key"}}),
    ("helmTest.caSecretName", {"helmTest": {"caSecretName": "ca"}}),
    ("apiKeys.secretName: production needs", {"production": True}),
    ("apiKeys.secretName: production needs", {"production": True, "tls": {"secretName": "t"}}),
    ("tls.secretName: production needs", {"production": True, "apiKeys": {"secretName": "k"}}),
    ("model.hub.revision: production needs", {
        "production": True, **KEYED, "model": {"source": "init", "hub": {"name": "a/b"}}}),
    ("model.hub.revision: production needs", {
        "production": True, **KEYED, "model": {"source": "hub", "hub": {"name": "a/b"}}}),
    ("model.hub.revision: production needs", {
        "production": True, "gateway": GATEWAY, "model": {"source": "init", "hub": {"name": "a/b"}}}),
    ("image.digest: production needs", {"production": True, **KEYED}),
    ("image.digest: production needs", {"production": True, "gateway": GATEWAY, "image": {"tag": "0.1.0-cpu"}}),
    ("networkPolicy.enabled: gateway.enabled needs it", {"gateway": GATEWAY, "networkPolicy": {"enabled": False}}),
    ("networkPolicy.grpcFrom: gateway.enabled admits", {
        "gateway": GATEWAY, "networkPolicy": {"grpcFrom": GATEWAY["from"]}}),
    ("networkPolicy.enabled: gateway.enabled needs it", {"gateway": smg(), "networkPolicy": {"enabled": False}}),
    ("tls.secretName: gateway.kind smg reaches", {"gateway": smg(), "tls": {"secretName": "t"}}),
    ("apiKeys.secretName: gateway.kind smg reaches", {"gateway": smg(), "apiKeys": {"secretName": "k"}}),
    ("gateway.smg.service.loadBalancerSourceRanges", {
        "gateway": smg(service={"loadBalancerSourceRanges": ["10.0.0.0/8"]})}),
    ("gateway.smg.ports.metrics: 30000 is gateway.smg.ports.http", {"gateway": smg(ports={"metrics": 30000})}),
    ("gateway.smg.extraArgs: --policy", {"gateway": smg(extraArgs=["--policy=random"])}),
    ("gateway.smg.extraArgs: --worker-urls", {"gateway": smg(extraArgs=["--worker-urls", "grpc://a:1"])}),
    ("gateway.smg.image.digest: production", {"production": True, "image": {"digest": DIGEST}, "gateway": smg()}),
    ("gateway.smg.clientsFrom: production needs", {
        "production": True, "image": {"digest": DIGEST}, "gateway": smg(image={"digest": DIGEST})}),
    ("gateway.smg.clientsFrom: production needs", {
        "production": True, "image": {"digest": DIGEST},
        "gateway": smg(image={"digest": DIGEST}, tls={"secretName": "t"})}),
    ("inferencePool.enabled: its gateway reaches", {"inferencePool": POOL, "tls": {"secretName": "t"}}),
    ("networkPolicy.kvEventsFrom: names the pods", {"config": {"kv_events": "zmq"}}),
    ("networkPolicy.kvEventsFrom: nothing is published", {**EVENTS, "config": {}}),
    ("networkPolicy.kvEventsFrom: nothing is published", {
        **EVENTS, "config": {"kv_events": "zmq", "kv_events_endpoint": "tcp://router:5557"}}),
    ("ports.metrics: 5557 is the port of KV events", {**EVENTS, "ports": {"metrics": 5557}}),
    ("config.kv_events_replay_endpoint: has the port", {
        **EVENTS, "config": {"kv_events": "zmq", "kv_events_replay_endpoint": "tcp://0.0.0.0:5557"}}),
    ("config.tensor_parallel_size: 1 must be a multiple of topology.hosts, 2, in [2, 64]", {"topology": HOSTS}),
    ("config.tensor_parallel_size: 3 must be a multiple of topology.hosts, 2, in [2, 64]", {
        "topology": HOSTS, "config": {"tensor_parallel_size": 3}}),
    ("config.tensor_parallel_size: 16 must be a multiple of topology.hosts, 32, in [32, 64]", {
        "topology": {**HOSTS, "hosts": 32}, "config": {"tensor_parallel_size": 16}}),
    ("config.tensor_parallel_size: 2 ranks in a pod, and accelerator.count is 1", {
        **GROUPS, "accelerator": {"kind": "cuda"}}),
    ("config.tensor_parallel_size: 4 ranks in a pod, and accelerator.count is 1", {
        "config": {"tensor_parallel_size": 4}, "accelerator": {"kind": "cuda"}}),
    ("state.type: pvc makes a StatefulSet", {**GROUPS, "state": {"type": "pvc"}}),
    ("strategy.type: Recreate is for a Deployment", {**GROUPS, "strategy": {"type": "Recreate"}}),
    ("topology.masterPort: 9090 is the port metrics", {**GROUPS, "topology": {**HOSTS, "masterPort": 9090}}),
    ("topology.masterPort: 5557 is the port kv-events", {
        "config": {**EVENTS["config"], **GROUPS["config"]}, "networkPolicy": EVENTS["networkPolicy"],
        "topology": {**HOSTS, "masterPort": 5557}}),
    ("topology.hccl: only accelerator.kind ascend", {
        **GROUPS, "topology": {**HOSTS, "hccl": {"basePort": 50000}}}),
    ("extraEnv: MASTER_PORT", {**GROUPS, "extraEnv": [{"name": "MASTER_PORT", "value": "1"}]}),
    ("inferencePool.httpRoute.enabled: it leads to", {
        "inferencePool": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}}),
]


CONTRADICTIONS_IDS = [f"{said} {number}" for number, (said, _) in enumerate(CONTRADICTIONS)]
INVALID_IDS = [f"{field} {json.dumps(values)}" for field, values in INVALID]


@pytest.mark.parametrize(("field", "values"), INVALID, ids=INVALID_IDS)
def test_schema_refuses_invalid_values_by_field(field: str, values: Object):
    assert field in refused_by_schema(values)


def refused_by_schema(values: Object) -> set[str]:
    """Return the dotted paths of the values that the schema's errors name."""
    import jsonschema  # slow where its checks of formats are installed, and few workers need it

    found: set[str] = set()
    for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(merged(DEFAULTS, values)):
        path = ".".join(map(str, error.absolute_path))
        names: set[str] = set()
        if error.validator == "additionalProperties":
            patterns = error.schema.get("patternProperties", {})
            names = {name for name in set(error.instance) - set(error.schema.get("properties", {}))
                     if not any(re.search(pattern, name) for pattern in patterns)}
        elif error.validator == "required":
            names = set(error.validator_value) - set(error.instance)
        found |= {f"{path}.{name}".lstrip(".") for name in names} or {path}
    return found


def batches() -> list[tuple[set[str], Object]]:
    """Merge INVALID into few values: (fields, values), where the schema refuses the values by each of the fields."""
    made: list[tuple[set[str], Object]] = []
    for field, values in INVALID:
        for index, (fields, others) in enumerate(made):
            both = merged(others, values)
            if both == merged(values, others) and refused_by_schema(both) >= fields | {field} != fields:
                made[index] = (fields | {field}, both)
                break
        else:
            made.append(({field}, values))
    return made


@needs_helm
def test_helm_refuses_merged_invalid_values_by_all_fields():
    """Helm reports every error of the schema, so that one run checks many fields."""
    found = batches()
    assert {field for fields, _ in found for field in fields} == {field for field, _ in INVALID}
    for fields, values in found:
        done = template(values)
        assert done.returncode != 0
        assert refused(done.stderr) >= fields, done.stderr


@needs_helm
@pytest.mark.full
@pytest.mark.parametrize(("field", "values"), INVALID, ids=INVALID_IDS)
def test_helm_refuses_invalid_values_by_field(field: str, values: Object):
    done = template(values)
    assert done.returncode != 0, f"{field} was accepted"
    assert field in refused(done.stderr), done.stderr


# Helm's messages for the same values: up to 3.17, and from 3.18 on (of 4.3.0).
OLD_WORDING = """Error: values don't meet the specifications of the schema(s) in the following chart(s):
npuserve:
- (root): Additional property replica is not allowed
- model: Must validate "then" as "if" was valid
- model.hub.name: String length must be greater than or equal to 1
- model: Must validate all the schemas (allOf)
- extraEnv.0: name is required
- config: Additional property port is not allowed
- config.block_size: config.block_size must be one of the following: 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024
- replicas: Invalid type. Expected: integer, given: string
"""
NEW_WORDING = """Error: values don't meet the specifications of the schema(s) in the following chart(s):
npuserve:
- at '': additional properties 'replica' not allowed
- at '/model': 'allOf' failed
  - at '/model/hub/name': minLength: got 0, want 1
- at '/extraEnv/0': missing property 'name'
- at '/config': validation failed
  - at '/config': additional properties 'port' not allowed
  - at '/config/block_size': value must be one of 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024
- at '/replicas': got string, want integer
"""


@pytest.mark.parametrize(("message", "parents"), [(OLD_WORDING, {"model"}), (NEW_WORDING, {"model", "config"})],
                         ids=["old", "new"])
def test_refused_reads_both_wordings(message: str, parents: set[str]):
    assert refused(message) == parents | {
        "replica", "replicas", "config.port", "config.block_size", "extraEnv.0.name", "model.hub.name"}


@needs_helm
@pytest.mark.parametrize(("said", "values"), CONTRADICTIONS, ids=CONTRADICTIONS_IDS)
def test_contradictions_are_refused(said: str, values: Object):
    done = template(values)
    assert done.returncode != 0, f"{values} were accepted"
    assert said in done.stderr, done.stderr


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield (path, part) of all parts of a schema that describe a map."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for name, part in schema.items():
            yield from objects(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from objects(part, f"{path}/{index}")


def test_the_schema_leaves_open_only_what_kubernetes_checks():
    free = [path for path, schema in objects(SCHEMA)
            if "additionalProperties" not in schema and not path.endswith(("/named/items", "/objects/items"))]
    affinities = (f"affinity/properties/{name}" for name in ("nodeAffinity", "podAffinity", "podAntiAffinity"))
    assert sorted(free) == sorted([
        *(f"/definitions/{name}" for name in ("environment/items/properties/valueFrom", *affinities)),
        *(f"/properties/{name}" for name in ("global", "podSecurityContext", "securityContext"))])
