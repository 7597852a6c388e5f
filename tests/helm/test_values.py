"""Values that values.schema.json, files/formats.yaml and _checks.tpl refuse, by field.

The schema is checked in this process by jsonschema, and the formats by their patterns. One Helm process checks many
values at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, Loader, Object, merged, needs_helm, refused, template
from tests.helm.combinations import GROUPS

SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())

DEFAULTS: Object = yaml.load((CHART / "values.yaml").read_text(), Loader)

FORMATS: list[Object] = yaml.load((CHART / "files/formats.yaml").read_text(), Loader)["formats"]

INVALID: list[tuple[str, Object]] = [
    ("replica", {"replica": 3}),
    ("accelerator.kind", {"accelerator": {"kind": "tpu"}}),
    ("accelerator.count", {"accelerator": {"kind": "cuda", "count": 0}}),
    ("accelerator.count", {"accelerator": {"kind": "cuda", "count": 1.5}}),
    ("accelerator.type", {"accelerator": {"type": "cpu"}}),
    ("image.pullPolicy", {"image": {"pullPolicy": "Sometimes"}}),
    ("config.max_num_seqs", {"config": {"max_num_seqs": 0}}),
    ("config.max_num_seqs", {"config": {"max_num_seqs": "many"}}),
    ("config.block_size", {"config": {"block_size": 24}}),
    ("config.dtype", {"config": {"dtype": "int4"}}),
    ("config.tensor_parallel_size", {"config": {"tensor_parallel_size": 65}}),
    ("config.max_num_seq", {"config": {"max_num_seq": 5}}),
    ("ports.grpc", {"ports": {"grpc": 80}}),
    ("ports.metrics", {"ports": {"metrics": 65536}}),
    ("ports.health", {"ports": {"health": 0}}),
    ("config.hang_seconds", {"config": {"hang_seconds": 0}}),
    ("replicaCount", {"replicaCount": -1}),
    ("replicaCount", {"replicaCount": "two"}),
    ("service.externalTrafficPolicy", {"service": {"externalTrafficPolicy": "local"}}),
    ("resources.request", {"resources": {"request": {"cpu": 1}}}),
    ("termination.drainSeconds", {"termination": {"drainSeconds": -1}}),
    ("termination.preStopSeconds", {"termination": {"preStopSeconds": "15s"}}),
    ("probes.startupSeconds", {"probes": {"startupSeconds": 0}}),
    ("probes.liveness.failureThreshold", {"probes": {"liveness": {"failureThreshold": 0}}}),
    ("probes.readiness.tcpSocket", {"probes": {"readiness": {"tcpSocket": {"port": 1}}}}),
    ("strategy.type", {"strategy": {"type": "BlueGreen"}}),
    ("autoscaling.kind", {"autoscaling": {"kind": "vpa"}}),
    ("autoscaling.minReplicas", {"autoscaling": {"kind": "hpa", "minReplicas": 0}}),
    ("autoscaling.kvCacheUsage", {"autoscaling": {"kind": "hpa", "kvCacheUsage": 80}}),
    ("podDisruptionBudget.maxUnavailable", {"podDisruptionBudget": {"maxUnavailable": 0}}),
    ("service.type", {"service": {"type": "ExternalName"}}),
    ("service.port", {"service": {"port": 0}}),
    ("grpcRoute.services", {"grpcRoute": {"services": []}}),
    ("networkPolicy.grpcFrom.0", {"networkPolicy": {"grpcFrom": [{}]}}),
    ("networkPolicy.kvEventsFrom.0", {"networkPolicy": {"kvEventsFrom": [{}]}}),
    ("dashboards.enabled", {"dashboards": {"enabled": "yes"}}),
    ("cache.type", {"cache": {"type": "hostPath"}}),
    ("cache.accessMode", {"cache": {"accessMode": "ReadWriteOncePod"}}),
    ("topologySpread.whenUnsatisfiable", {"topologySpread": {"whenUnsatisfiable": "Maybe"}}),
    ("affinity.nodeAffinty", {"affinity": {"nodeAffinty": {}}}),
    ("commonLabels.a", {"commonLabels": {"a": "x" * 64}}),
    ("extraEnv.0.name", {"extraEnv": [{"value": "x"}]}),
    ("extraEnv.0.value", {"extraEnv": [{"name": "A", "value": 1}]}),
    ("openshift", {"openshift": "auto"}),
    ("model.init.accessMode", {"model": {"init": {"accessMode": "ReadOnlyMany"}}}),
    ("model.init.create", {"model": {"init": {"create": "yes"}}}),
    ("service.nodePort", {"service": {"type": "NodePort", "nodePort": 0}}),
    ("service.sessionAffinitySeconds", {"service": {"sessionAffinitySeconds": 86401}}),
    ("metrics.relabelings.0", {"metrics": {"relabelings": [{}]}}),
    ("metrics.metricRelabelings", {"metrics": {"metricRelabelings": {}}}),
    ("extraObjects.0", {"extraObjects": [{}]}),
    ("gateway.from.0", {"gateway": {"from": [{}]}}),
    ("gateway.kind", {"gateway": {"kind": "envoy"}}),
    ("gateway.smg.replicas", {"gateway": {"smg": {"replicas": 0}}}),
    ("gateway.smg.policy", {"gateway": {"smg": {"policy": "bucket"}}}),
    ("gateway.smg.healthCheckSeconds", {"gateway": {"smg": {"healthCheckSeconds": 0}}}),
    ("gateway.smg.extraArgs.0", {"gateway": {"smg": {"extraArgs": [""]}}}),
    ("gateway.smg.extraEnv.0.name", {"gateway": {"smg": {"extraEnv": [{"value": "x"}]}}}),
    ("gateway.smg.ports.http", {"gateway": {"smg": {"ports": {"http": 80}}}}),
    ("gateway.smg.service.type", {"gateway": {"smg": {"service": {"type": "ExternalName"}}}}),
    ("gateway.smg.clientsFrom.0", {"gateway": {"smg": {"clientsFrom": [{}]}}}),
    ("gateway.smg.apiServer.ports", {"gateway": {"smg": {"apiServer": {"ports": []}}}}),
    ("gateway.smg.podDisruptionBudget.maxUnavailable", {
        "gateway": {"smg": {"podDisruptionBudget": {"maxUnavailable": 0}}}}),
    ("gateway.smg.model", {"gateway": {"smg": {"model": "qwen"}}}),
    ("inferencePool.endpointPicker.port", {"inferencePool": {"endpointPicker": {"port": 0}}}),
    ("inferencePool.endpointPicker.failureMode", {"inferencePool": {"endpointPicker": {"failureMode": "Fail"}}}),
    ("inferencePool.httpRoute.methods", {"inferencePool": {"httpRoute": {"methods": []}}}),
    ("topology.kind", {"topology": {"kind": "statefulset"}}),
    ("topology.hosts", {"topology": {"hosts": 1}}),
    ("topology.hosts", {"topology": {"hosts": 65}}),
    ("topology.masterPort", {"topology": {"masterPort": 80}}),
    ("topology.annotations.a", {"topology": {"annotations": {"a": 1}}}),
    ("topology.hccl.bufferMegabytes", {"topology": {"hccl": {"bufferMegabytes": 0}}}),
    ("topology.hccl.basePort", {"topology": {"hccl": {"basePort": 65521}}}),
    ("topology.size", {"topology": {"size": 2}}),
    ("production", {"production": "yes"}),
    ("config.min_priority", {"config": {"min_priority": -101}}),
]
"""Values that the schema refuses."""

MALFORMED: list[tuple[str, Object]] = [
    ("model.source", {"model": {"source": "s3"}}),
    ("metrics.scrape", {"metrics": {"scrape": "both"}}),
    ("config.speculate", {"config": {"speculate": "sufix"}}),
    ("accelerator.resourceName", {"accelerator": {"kind": "cuda", "resourceName": "gpu"}}),
    ("accelerator.extraResources.memory", {"accelerator": {"kind": "ascend", "extraResources": {"memory": 1}}}),
    ("image.digest", {"image": {"digest": "sha256:12"}}),
    ("image.repository", {"image": {"repository": ""}}),
    ("model.hub.name", {"model": {"source": "init", "hub": {"name": "a/b/c"}}}),
    ("model.hub.endpoint", {"model": {"hub": {"endpoint": "hf-mirror.com"}}}),
    ("model.image.reference", {"model": {"image": {"reference": "https://registry/x"}}}),
    ("model.pvc.path", {"model": {"source": "pvc", "pvc": {"claimName": "c", "path": "../etc"}}}),
    ("model.pvc.path", {"model": {"source": "pvc", "pvc": {"claimName": "c", "path": "/models"}}}),
    ("model.init.size", {"model": {"init": {"size": "much"}}}),
    ("config.kv_cache_memory", {"config": {"kv_cache_memory": "4 apples"}}),
    ("config.kv_cache_memory", {"config": {"kv_cache_memory": "0.9"}}),
    ("config.decode_buckets", {"config": {"decode_buckets": "1,0"}}),
    ("host", {"host": "localhost"}),
    ("helmTest.key", {"helmTest": {"key": "a b"}}),
    ("resources.requests.cpu", {"resources": {"requests": {"cpu": "four"}}}),
    ("strategy.maxSurge", {"strategy": {"maxSurge": "200%"}}),
    ("autoscaling.keda.prometheusAddress", {"autoscaling": {"keda": {"prometheusAddress": "prometheus:9090"}}}),
    ("service.loadBalancerSourceRanges.0", {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["me"]}}),
    ("grpcRoute.hostnames.0", {"grpcRoute": {"hostnames": ["https://x"]}}),
    ("metrics.interval", {"metrics": {"interval": "15"}}),
    ("metrics.labels.release", {"metrics": {"labels": {"release": "a b"}}}),
    ("cache.size", {"cache": {"size": "0Gi"}}),
    ("shm.size", {"shm": {"size": "-1Gi"}}),
    ("commonLabels.a b", {"commonLabels": {"a b": "x"}}),
    ("extraEnv.0.name", {"extraEnv": [{"name": "A B", "value": "x"}]}),
    ("fullnameOverride", {"fullnameOverride": "Big_Name"}),
    ("fullnameOverride", {"fullnameOverride": "a.service"}),
    ("nameOverride", {"nameOverride": "2nd"}),
    ("global.imageRegistry", {"global": {"imageRegistry": "https://registry"}}),
    ("service.loadBalancerClass", {"service": {"loadBalancerClass": "a b"}}),
    ("metrics.scrapeTimeout", {"metrics": {"scrapeTimeout": "fast"}}),
    ("gateway.smg.image.digest", {"gateway": {"smg": {"image": {"digest": "sha256:12"}}}}),
    ("gateway.smg.toolCallParser", {"gateway": {"smg": {"toolCallParser": "a b"}}}),
    ("gateway.smg.resources.limits.memory", {"gateway": {"smg": {"resources": {"limits": {"memory": "much"}}}}}),
    ("inferencePool.endpointPicker.name", {"inferencePool": {"endpointPicker": {"name": "Big_Name"}}}),
    ("inferencePool.httpRoute.methods.0", {"inferencePool": {"httpRoute": {"methods": ["/v1/chat"]}}}),
    ("inferencePool.httpRoute.timeout", {"inferencePool": {"httpRoute": {"timeout": "1 minute"}}}),
    ("topology.exclusiveKey", {"topology": {"exclusiveKey": "a b"}}),
    ("topology.hccl.socketInterface", {"topology": {"hccl": {"socketInterface": "eth0 eth1"}}}),
    ("tls.secretName", {"tls": {"secretName": "LLM_TLS"}}),
    ("imagePullSecrets.0.name", {"imagePullSecrets": [{"name": ""}]}),
    ("image.tag", {"image": {"tag": "a b"}}),
    ("podLabels.a", {"podLabels": {"a": "-"}}),
    ("model.hub.revision", {"model": {"hub": {"revision": "a b"}}}),
    ("model.init.env.0.name", {"model": {"init": {"env": [{"name": "1"}]}}}),
    ("model.init.resources.limits.cpu", {"model": {"init": {"resources": {"limits": {"cpu": "1 core"}}}}}),
    ("config.max_message_size", {"config": {"max_message_size": "1 MB"}}),
    ("config.kv_store", {"config": {"kv_store": "http://master:50051"}}),
    ("config.kv_events_endpoint", {"config": {"kv_events_endpoint": "router:5557"}}),
    ("config.kv_events_replay_endpoint", {"config": {"kv_events_replay_endpoint": "tcp://router"}}),
    ("config.otlp_endpoint", {"config": {"otlp_endpoint": "collector:4317"}}),
    ("podDisruptionBudget.maxUnavailable", {"podDisruptionBudget": {"maxUnavailable": "0%"}}),
    ("rules.runbookBaseUrl", {"rules": {"runbookBaseUrl": "docs/operations.md"}}),
    ("rules.grafanaUrl", {"rules": {"grafanaUrl": "https://grafana.example.com/"}}),
    ("grpcRoute.services.0", {"grpcRoute": {"services": ["/Generate"]}}),
]
"""Texts that files/formats.yaml refuses."""

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
    ("model.init.create: is for model.source init", {"model": {"init": {"create": True}}}),
    ("model.init.command: is for model.source init", {"model": {"init": {"command": ["fetch"]}}}),
    ("model.init.claimName: is for model.source init", {"model": {"init": {"claimName": "models"}}}),
    ("model.hub.name: is set to a/b, but model.source builtin", {"model": {"hub": {"name": "a/b"}}}),
    ("model.hub.revision: is set to v1, but model.source builtin", {"model": {"hub": {"revision": "v1"}}}),
    ("model.source: hub is init now", {"model": {"source": "hub", "hub": {"name": "a/b"}}}),
    ("metrics.scrape: podMonitor is serviceMonitor now", {"metrics": {"scrape": "podMonitor"}}),
    ("model.hub.revision: v1 chooses nothing on a claim", {
        "model": {"source": "pvc", "pvc": {"claimName": "models"}, "hub": {"revision": "v1"}}}),
    ("model.hub.name: is empty; model.source init", {"model": {"source": "init"}}),
    ("model.pvc.claimName: is empty", {"model": {"source": "pvc"}}),
    ("model.pvc: claimName or path is set, but model.source builtin", {"model": {"pvc": {"claimName": "models"}}}),
    ("model.pvc: claimName or path is set, but model.source init serves a/b of the hub", {
        "model": {"source": "init", "hub": {"name": "a/b"}, "pvc": {"path": "qwen"}}}),
    ('image.tag: "latest"', {"image": {"tag": "latest"}}),
    ('gateway.smg.image.tag: "latest"', {"gateway": {"smg": {"image": {"tag": "latest"}}}}),
    ("autoscaling.keda.prometheusAddress: is empty", {"autoscaling": {"kind": "keda"}}),
    ("grpcRoute.parentRefs: is empty", {"grpcRoute": {"enabled": True}}),
    ("gateway.from: is empty", {"gateway": {"enabled": True}}),
    ("inferencePool.endpointPicker.name: is empty", {"inferencePool": {"enabled": True}}),
    ("inferencePool.httpRoute.parentRefs: is empty", {"inferencePool": {**POOL, "httpRoute": {"enabled": True}}}),
    ("config.kv_cache_memory: 4294967297 is above resources.limits.memory, 4Gi", {
        "config": {"kv_cache_memory": 4294967297}}),
    ("resources.requests.memory: 4097Mi is above resources.limits.memory, 4Gi", {
        "resources": {"requests": {"memory": "4097Mi"}}}),
    ("resources.requests.cpu: 2 is above resources.limits.cpu, 1500m", {"resources": {"limits": {"cpu": "1500m"}}}),
    ("resources.requests.ephemeral-storage: 50Gi is above resources.limits.ephemeral-storage, 20G", {
        "model": {"source": "init", "hub": {"name": "a/b"}}, "resources": {"limits": {"ephemeral-storage": "20G"}}}),
    ("model.init.resources.requests.memory: 3Gi is above", {
        "model": {"init": {"resources": {"requests": {"memory": "3Gi"}}}}}),
    ("gateway.smg.resources.requests.memory: 4Gi is above", {
        "gateway": {"smg": {"resources": {"requests": {"memory": "4Gi"}}}}}),
    ("resources.limits: nvidia.com/gpu is a device", {"resources": {"limits": {"nvidia.com/gpu": 1}}}),
    ("resources.requests: huawei.com/Ascend910 is a device", {"resources": {"requests": {"huawei.com/Ascend910": 1}}}),
    ("podSecurityContext.runAsUser: 0 is root", {"podSecurityContext": {"runAsUser": 0}}),
    ("securityContext.runAsUser: 0 is root", {"securityContext": {"runAsUser": 0}}),
    ("securityContext.runAsUser: 0 is root", {
        "podSecurityContext": {"runAsNonRoot": False}, "securityContext": {"runAsUser": 0, "runAsNonRoot": True}}),
    ("model.init.create: creates a claim, and", {"model": {
        "source": "init", "hub": {"name": "a/b"}, "init": {"create": True, "claimName": "models"}}}),
    ("replicas: is replicaCount now; rename it", {"replicas": 3}),
    ("image.pullSecrets: is imagePullSecrets now, a list of maps such as {name: registry}", {
        "image": {"pullSecrets": ["registry"]}}),
    ("service.externalTrafficPolicy: a service of type ClusterIP has no external traffic", {
        "service": {"externalTrafficPolicy": "Local"}}),
    ("model.image.reference: is empty", {"model": {"source": "image"}}),
    ("model.image.reference: is set, but model.source builtin", {"model": {"image": {"reference": "r/m:1"}}}),
    ("model.source: image needs Kubernetes 1.33", {"model": {"source": "image", "image": {"reference": "r/m:1"}}}),
    ("accelerator.claimTemplate: needs Kubernetes 1.34", {
        "accelerator": {"kind": "cuda", "claimTemplate": "gpu"}}),
    ("accelerator.claimTemplate: the claim names the devices", {
        "accelerator": {"kind": "cuda", "claimTemplate": "gpu", "extraResources": {"a.com/b": 1}}}),
    ("state: removed: a stream ends with its server. Remove state;", {"state": {"type": "pvc"}}),
    ("config.state_folder: removed: a stream ends with its server.", {"config": {"state_folder": "/s"}}),
    ("topologySpread.whenUnsatisfiable: DoNotSchedule", {
        "accelerator": {"kind": "cuda"}, "topologySpread": {"whenUnsatisfiable": "DoNotSchedule"}}),
    ("requiredDuringSchedulingIgnoredDuringExecution", {  # a preference excludes no node
        "accelerator": {"kind": "cuda"}, "topologySpread": {"whenUnsatisfiable": "DoNotSchedule"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}),
    ("metrics.scrapeTimeout: 20s is above metrics.interval, 15s", {"metrics": {"scrapeTimeout": "20s"}}),
    ("metrics.scrapeTimeout: 2m is above", {"metrics": {"scrapeTimeout": "2m", "interval": "90s"}}),
    ("service.loadBalancerClass", {"service": {"type": "NodePort", "loadBalancerClass": "a"}}),
    ("service.nodePort", {"service": {"nodePort": 30051}}),
    ("service.sessionAffinitySeconds: 300 ends before", {"service": {"sessionAffinitySeconds": 300}}),
    ("service.sessionAffinitySeconds: 3600 would keep", {
        "service": {"sessionAffinitySeconds": 3600}, "autoscaling": {"kind": "hpa"}}),
    ("cache.accessMode: ReadWriteOnce", {"cache": {"type": "pvc", "accessMode": "ReadWriteOnce"}}),
    ("strategy.type Recreate", {"replicaCount": 1, "cache": {"type": "pvc", "accessMode": "ReadWriteOnce"}}),
    ("extraEnv: NPUSERVE_PORT", {"extraEnv": [{"name": "NPUSERVE_PORT", "value": "1"}]}),
    ("extraEnv: HF_HOME", {"extraEnv": [{"name": "HF_HOME", "value": "/x"}]}),
    ("podLabels: app.kubernetes.io/name is the chart's own", {"podLabels": {"app.kubernetes.io/name": "x"}}),
    ("podLabels: team", {"podLabels": {"team": "b"}, "commonLabels": {"team": "a"}}),
    ("commonLabels: helm.sh/chart", {"commonLabels": {"helm.sh/chart": "x"}}),
    ("metrics.labels: app.kubernetes.io/part-of", {"metrics": {"labels": {"app.kubernetes.io/part-of": "x"}}}),
    ("podAnnotations: npuserve/config", {"podAnnotations": {"npuserve/config": "x"}}),
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
    ("networkPolicy.kvEventsFrom: is empty", {"config": {"kv_events": "zmq"}}),
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


ALL_INVALID = [*INVALID, *MALFORMED]
CONTRADICTIONS_IDS = [f"{said} {number}" for number, (said, _) in enumerate(CONTRADICTIONS)]


def test_invalid_values_are_refused_by_field():
    assert not [(field, values) for field, values in ALL_INVALID
                if field not in refused_by_schema(values) | malformed(values)]


def texts(node: Any, path: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the values at a path of files/formats.yaml."""
    if not path:
        yield name, node
        return
    part, _, rest = path.partition(".")
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if part in ("*", str(key)):
            yield from texts(value, rest, f"{name}.{key}".lstrip("."))


def malformed(values: Object) -> set[str]:
    """Return the dotted paths of the texts that files/formats.yaml refuses."""
    everything = merged(DEFAULTS, values)
    names: set[str] = set()
    for form in FORMATS:
        checked = [pair for path in form.get("values", []) for pair in texts(everything, path)]
        checked += [(f"{name}.{key}", key) for path in form.get("keys", []) for name, each in texts(everything, path)
                    for key in each]
        names |= {name for name, text in checked if isinstance(text, str) and not re.search(form["pattern"], text)}
    return names


def test_every_format_refuses_a_text_and_every_path_exists():
    """A path that the schema does not have would check nothing."""
    def exists(schema: Object, parts: list[str]) -> bool:
        schema = SCHEMA["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
        if not parts:
            return True
        if parts[0] == "*":
            return exists(schema["items"] if schema["type"] == "array" else schema["additionalProperties"], parts[1:])
        return parts[0] in schema.get("properties", {}) and exists(schema["properties"][parts[0]], parts[1:])

    paths = [path for form in FORMATS for path in (*form.get("values", []), *form.get("keys", []))]
    assert [path for path in paths if not exists(SCHEMA, path.split("."))] == []
    for form in FORMATS:
        known = form.get("values", []) + [f"{path}.*" for path in form.get("keys", [])]
        assert any(re.fullmatch(path.replace(".", "[.]").replace("*", ".*"), field)
                   for path in known for field, _ in MALFORMED), form["wanted"]
    assert malformed({}) == set()


def test_schema_has_only_keywords_whose_messages_name_what_is_wanted():
    """Helm reports a pattern as the expression, and the others as "Must validate …" without a value or a reason."""
    assert not set(keywords(SCHEMA)) & {
        "pattern", "patternProperties", "if", "then", "else", "not", "anyOf", "oneOf", "allOf", "const"}


def keywords(schema: Any) -> Iterator[str]:
    """Yield the names of all maps in a schema, which are its keywords and the values' names."""
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict):
        yield from schema
    for part in parts:
        yield from keywords(part)


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


def batches(
    cases: list[tuple[str, Object]], refusals: Callable[[Object], set[str]]
) -> list[tuple[set[str], Object]]:
    """Merge invalid values into few: (fields, values), where `refusals` names each of the fields for the values."""
    made: list[tuple[set[str], Object]] = []
    for field, values in cases:
        for index, (fields, others) in enumerate(made):
            both = merged(others, values)
            if both == merged(values, others) and refusals(both) >= fields | {field} != fields:
                made[index] = (fields | {field}, both)
                break
        else:
            made.append(({field}, values))
    return made


@needs_helm
def test_helm_refuses_merged_invalid_values_by_all_fields():
    """Helm reports every error of the schema, or else of the formats, so that one run checks many fields."""
    for cases, refusals in ((INVALID, refused_by_schema), (MALFORMED, malformed)):
        merges = batches(cases, refusals)
        assert {field for fields, _ in merges for field in fields} == {field for field, _ in cases}
        for fields, values in merges:
            done = template(values)
            assert done.returncode != 0
            assert refused(done.stderr) >= fields, done.stderr


# Helm's messages for the same values: up to 3.17, and from 3.18 on (of 4.3.0).
OLD_WORDING = """Error: values don't meet the specifications of the schema(s) in the following chart(s):
npuserve:
- (root): Additional property replica is not allowed
- model.servedName: String length must be less than or equal to 256
- extraEnv.0: name is required
- config: Additional property port is not allowed
- config.block_size: config.block_size must be one of the following: 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024
- replicas: Invalid type. Expected: integer, given: string
"""
NEW_WORDING = """Error: values don't meet the specifications of the schema(s) in the following chart(s):
npuserve:
- at '': additional properties 'replica' not allowed
- at '/model/servedName': maxLength: got 257, want 256
- at '/extraEnv/0': missing property 'name'
- at '/config': validation failed
  - at '/config': additional properties 'port' not allowed
  - at '/config/block_size': value must be one of 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024
- at '/replicas': got string, want integer
"""

OWN_WORDING = 'Error: execution error at (npuserve/templates/checks.yaml:1:4): ' + "; also ".join(
    f'{path}: "x" is not a text' for path in (
        "replica", "replicas", "config.port", "config.block_size", "extraEnv.0.name", "model.servedName"))


@pytest.mark.parametrize(("message", "parents"), [
    (OLD_WORDING, set()), (NEW_WORDING, {"config"}), (OWN_WORDING, set())], ids=["old", "new", "own"])
def test_refused_reads_both_wordings(message: str, parents: set[str]):
    assert refused(message) == parents | {
        "replica", "replicas", "config.port", "config.block_size", "extraEnv.0.name", "model.servedName"}


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
