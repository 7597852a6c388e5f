"""Values for the chart that together set every option, beside options with which it could conflict."""

from __future__ import annotations

from tests.helm.chart import Object

_MONITORING = {"metrics": {"scrape": "serviceMonitor", "interval": "30s", "labels": {"release": "prometheus"}}}
_ROUTE = {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}],
                        "hostnames": ["llm.example.com", "*.example.com"]}}
_KEDA = {"autoscaling": {"kind": "keda", "keda": {"prometheusAddress": "http://prometheus.monitoring:9090"}}}
_PEER = [{"podSelector": {"matchLabels": {"app": "router"}}}]
_POOL = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}
_SMG: Object = {"gateway": {"enabled": True, "kind": "smg"}}
_PLAINTEXT: Object = {
    "tls": {"secretName": ""}, "apiKeys": {"secretName": ""}, "helmTest": {"apiKeySecretName": ""}}
GROUPS: Object = {
    "topology": {"kind": "leaderworkerset", "hosts": 2}, "config": {"tensor_parallel_size": 4}}

COMBINATIONS: dict[str, tuple[tuple[str, ...], Object]] = {
    "one replica, no cache, no spread": ((), {
        "replicaCount": 1, "topologySpread": {"whenUnsatisfiable": "none"}, "podDisruptionBudget": {"enabled": False},
        "headless": {"enabled": False}, "networkPolicy": {"enabled": False}, "serviceAccount": {"create": False},
        "metrics": {"scrape": "none"}, "nameOverride": "llm"}),
    "all settings": ((), {"config": {
        "emulate": True, "emulate_relax": "fp32", "dtype": "float32", "lm_head_dtype": "int8", "max_model_len": 512,
        "task": "auto",
        "frontends": 2, "max_connections": 100, "max_message_size": 67108864, "max_connection_age_seconds": 0,
        "max_num_seqs": 8, "max_num_batched_tokens": 256, "decode_buckets": "1,2,4", "capture": "auto",
        "cpu_binding": "off", "max_queue": 16,
        "max_preparing": 32, "max_refusals_per_second": 50, "priority_aging_seconds": 2.5,
        "min_priority": -10, "max_priority": 10,
        "plain_content": False, "share_prefix_cache": "all", "kv_events": "off",
        "kv_events_endpoint": "tcp://*:5557", "kv_events_replay_endpoint": "", "kv_events_buffer": 500,
        "hang_seconds": 90, "load_seconds": 900,
        "double_buffering": False, "prefill_device": "cpu", "block_size": 16,
        "kv_cache_dtype": "int8", "state_dtype": "float32", "kv_cache_memory": 2147483648, "prefix_cache": False,
        "kv_offload_memory": 0, "kv_store": "", "kv_store_secret": "", "kv_store_memory": 0,
        "kv_store_timeout_seconds": 0.5,
        "threads": 3, "cpu_gemm": "fma", "cpu_weights": "plain",
        "tensor_parallel_size": 1, "kernel_sampling": 64, "profile_dir": "/var/traces",
        "log_format": "json", "log_level": "debug", "log_prompts": True, "debuggable": True,
        "metrics_vllm_aliases": True, "target_ttft_seconds": 1, "target_itl_seconds": 0.05,
        "otlp_endpoint": "http://collector.tracing:4317"}}),
    "ascend, drafts of the model's head": (("ascend",), {
        "config": {"speculate": "mtp", "kv_cache_memory": "20GiB"}}),
    "cuda, drafts of a smaller model": (("cuda",), {
        "config": {"speculate": "/models/small", "capture": "off", "capture_chunks": False,
                   "kv_offload_memory": "8G"}}),
    "a size in words, an own name": ((), {
        "config": {"kv_cache_memory": "4GiB"}, "model": {"servedName": "stories \"β\" <1>"}, "fullnameOverride": "st"}),
    "hub with token and mirror": ((), {"model": {"source": "init", "hub": {
        "name": "Qwen/Qwen3-0.6B", "endpoint": "https://hf-mirror.com", "tokenSecret": {"name": "hub"}}}}),
    "pvc, folder": (("cpu",), {"model": {"source": "pvc", "pvc": {"claimName": "models", "path": "qwen/0.6b"}}}),
    "pvc, root": (("cuda",), {"model": {"source": "pvc", "pvc": {"claimName": "models"}}}),
    "init with revision": (("ascend",), {"model": {"hub": {"revision": "c1899de289a04d12100db370d81485cdf75e47ca"}}}),
    "init of one's own, kept": (("ascend",), {"model": {"source": "init", "init": {
        "image": "registry.example.com/modelscope:1.30.0", "claimName": "models",
        "command": ["modelscope", "download", "--model", "Qwen/Qwen3-0.6B", "--local_dir", "$(MODEL_DIR)"],
        "env": [{"name": "MODELSCOPE_CACHE", "value": "/var/cache/npuserve/ms"}]}}}),
    "init, claim created": (("cuda",), {"model": {"init": {
        "create": True, "size": "200Gi", "storageClass": "cephfs", "accessMode": "ReadWriteMany"}}}),
    "init, claim of one replica": (("cuda",), {
        "replicaCount": 1, "model": {"init": {"create": True, "accessMode": "ReadWriteOnce"}}}),
    "no affinity": ((), {"service": {"sessionAffinitySeconds": 0}}),
    "OpenShift": (("ascend",), {"openshift": True, "global": {"imageRegistry": "registry.example.com:5000/llm"}}),
    "DoNotSchedule on labelled nodes": (("ascend",), {
        "nodeSelector": {"accelerator": "huawei-Ascend910"},
        "topologySpread": {"whenUnsatisfiable": "DoNotSchedule", "keys": ["kubernetes.io/hostname"]}}),
    "ascend of another plugin": (("ascend",), {"accelerator": {"resourceName": "huawei.com/ascend-1980"}}),
    "ascend shared by HAMi": (("ascend",), {
        "accelerator": {"resourceName": "huawei.com/Ascend910B2",
                        "extraResources": {"huawei.com/Ascend910B2-memory": 16384}},
        "schedulerName": "hami-scheduler"}),
    "ascend with the node's driver": (("ascend",), {"accelerator": {"hostDriver": True}, "runtimeClassName": "runc"}),
    "cuda, eight devices": (("cuda",), {
        "accelerator": {"count": 8}, "config": {"tensor_parallel_size": 8}, "runtimeClassName": "nvidia"}),
    "hpa": ((), {"autoscaling": {"kind": "hpa", "minReplicas": 1, "maxReplicas": 4, "kvCacheUsage": 0.75,
                                  "predictedTtftRatio": 0.8}}),
    "keda with authentication": (("cuda",), {
        "autoscaling": {"kind": "keda", "scaleDownSeconds": 600, "keda": {
            "prometheusAddress": "https://thanos.monitoring:9091", "authentication": "thanos",
            "selector": 'job="npuserve"', "pollingSeconds": 30}}}),
    "service monitor, rules, dashboards": ((), {
        **_MONITORING, "rules": {
            "enabled": True, "labels": {"release": "prometheus"},
            "runbookBaseUrl": "https://git.example.com/npuserve/docs/operations.md",
            "grafanaUrl": "https://grafana.example.com"},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}}}),
    "monitor and route": (("ascend",), {"accept": {"enabled": True}, "metrics": {
        "scrape": "serviceMonitor", "scrapeTimeout": "10s",
        "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}],
        "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": "npuserve_.*_created", "action": "drop"}]},
        **_ROUTE}),
    "load balancer": ((), {"service": {
        "type": "LoadBalancer", "port": 443, "nodePort": 30443, "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/8"],
        "annotations": {"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"}}}),
    "network policy with peers": (("cpu", "prod"), {"networkPolicy": {
        "grpcFrom": _PEER, "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 9000}]}]}}),
    "production behind a gateway": (("cpu", "prod"), {
        "gateway": {"enabled": True, "from": [{"namespaceSelector": {"matchLabels": {"name": "gateways"}}}]},
        **_PLAINTEXT}),
    "smg": (("cpu",), _SMG),
    "smg on OpenShift, with little else": (("ascend",), {
        "gateway": {"enabled": True, "kind": "smg", "smg": {"serviceAccount": {"create": False}}}, "openshift": True,
        "podDisruptionBudget": {"enabled": False}, "topologySpread": {"whenUnsatisfiable": "none"},
        "termination": {"preStopSeconds": 0, "drainSeconds": 0}, "metrics": {"scrape": "none"}}),
    "smg in production, every value": (("cuda", "prod"), {**_PLAINTEXT, "gateway": {
        "enabled": True, "kind": "smg", "from": _PEER, "smg": {
            "image": {"repository": "registry.example.com/llm/gateway", "tag": "1.13.0", "pullPolicy": "Always",
                      "digest": "sha256:" + "1" * 64},
            "replicas": 3, "policy": "least_load", "healthCheckSeconds": 2, "toolCallParser": "qwen",
            "reasoningParser": "qwen3", "extraArgs": ["--request-timeout-secs", "600"],
            "extraEnv": [{"name": "RUST_BACKTRACE", "value": "1"}],
            "ports": {"http": 8443, "metrics": 8444, "health": 8445},
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"example.com/internal": "true"},
                        "loadBalancerSourceRanges": ["10.0.0.0/8"]},
            "clientsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "tls": {"secretName": "gateway-tls"}, "apiKeys": {"secretName": "gateway-key", "key": "k"},
            "apiServer": {"to": [{"ipBlock": {"cidr": "10.96.0.1/32"}}], "ports": [443]},
            "egress": [{"ports": [{"port": 4317}]}],
            "resources": {"requests": {"cpu": 2, "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
            "podDisruptionBudget": {"maxUnavailable": "50%"},
            "serviceAccount": {"name": "gateway", "annotations": {"note": "lists pods"}},
            "podAnnotations": {"note": "true"}, "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["cpu"]}]}]}}}}},
        "priorityClassName": "serving"}),
    "smg and monitors": ((), {**_SMG, "metrics": {"scrape": "serviceMonitor"}}),
    "KV events for smg": ((), {**_SMG, "config": {"kv_events": "grpc", "kv_events_buffer": 1000}}),
    "KV events for an endpoint picker": (("cuda",), {
        **_POOL, "config": {"kv_events": "zmq", "kv_events_endpoint": "tcp://*:5557",
                            "kv_events_replay_endpoint": "tcp://*:5558"},
        "networkPolicy": {"kvEventsFrom": _PEER}}),
    "pool of an endpoint picker": (("ascend",), _POOL),
    "pool, route and gateway": (("cuda", "prod"), {**_PLAINTEXT, "inferencePool": {
        "enabled": True, "endpointPicker": {"name": "picker", "port": 9005, "failureMode": "FailOpen"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "inference", "namespace": "gateways"}],
                      "hostnames": ["llm.example.com"], "timeout": "600s",
                      "methods": ["vllm.grpc.engine.VllmEngine/Generate", "vllm.grpc.engine.VllmEngine/GetModelInfo"]}},
        "gateway": {"enabled": True, "from": _PEER}, "ports": {"grpc": 8001}}),
    "pool and smg": ((), {**_POOL, **_SMG, "podLabels": {"llm-d.ai/engine-type": "npuserve"}}),
    "administrators by certificate": ((), {
        "tls": {"secretName": "llm-tls", "clientCaSecretName": "llm-ca"}, "config": {"admin_certificates": "ops, ci"}}),
    "cache on a claim, shared": ((), {"cache": {"type": "pvc", "size": "100Gi", "storageClass": "cephfs"}}),
    "cache on a claim, one replica": ((), {
        "replicaCount": 1, "strategy": {"type": "Recreate"}, "cache": {"type": "pvc", "accessMode": "ReadWriteOnce"}}),
    "cache on a claim of one's own": ((), {"cache": {"type": "pvc", "claimName": "caches"}}),
    "mutual TLS": (("cpu",), {
        "tls": {"secretName": "cert", "clientCaSecretName": "clients"},
        "helmTest": {"caSecretName": "root", "clientCertSecretName": "own"}}),
    "TLS and keys": (("cuda",), {
        "tls": {"secretName": "cert"}, "apiKeys": {"secretName": "keys", "key": "file"},
        "helmTest": {"apiKeySecretName": "one", "key": "k"}}),
    "keys alone, with no test": ((), {"apiKeys": {"secretName": "keys"}, "service": {"type": "LoadBalancer"}}),
    "short drain, no pre-stop": ((), {"termination": {"drainSeconds": 5, "preStopSeconds": 0}}),
    "long grace, other ports, IPv6": ((), {
        "termination": {"gracePeriodSeconds": 3600}, "host": "::",
        "ports": {"grpc": 8001, "metrics": 8002, "health": 8003}}),
    "all that a pod may have more": (("ascend",), {
        "commonLabels": {"team": "llm"}, "podLabels": {"tier": "gold"}, "podAnnotations": {"note": "true"},
        "image": {"repository": "registry.example.com:5000/llm/npuserve", "digest": "sha256:" + "0" * 64,
                  "pullPolicy": "Always"}, "imagePullSecrets": [{"name": "registry"}],
        "serviceAccount": {"name": "llm", "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/llm"}},
        "nodeSelector": {"accelerator": "huawei-Ascend910"}, "priorityClassName": "serving",
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["npu"]}]}]}}},
        "extraEnv": [{"name": "HCCL_CONNECT_TIMEOUT", "value": "1200"},
                     {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "extraEnvFrom": [{"configMapRef": {"name": "site"}}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "extraInitContainers": [{"name": "check", "image": "busybox:1.37.0", "command": ["true"]}],
        "extraContainers": [{"name": "sidecar", "image": "busybox:1.37.0", "command": ["sleep", "infinity"]}],
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-site"},
             "data": {"region": "eu"}},
            'kind: ConfigMap\napiVersion: v1\nmetadata:\n  name: {{ include "npuserve.fullname" . }}-more\n'
            "data:\n  region: eu\n"]}),
    "sizes, times, contexts": ((), {
        "tmp": {"size": "2Gi"}, "shm": {"size": "512Mi"}, "cache": {"size": "1Ti"}, "image": {"tag": "0.1.0-1"},
        "model": {"source": "init", "hub": {"name": "a/b", "tokenSecret": {"name": "hub", "key": "t"}},
                  "init": {"size": "9Gi", "resources": {"requests": {"cpu": 1, "memory": "1Gi"},
                                                        "limits": {"cpu": 1, "memory": "1Gi"}}}},
        "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        "probes": {"startupSeconds": 61,
                   "readiness": {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 1},
                   "liveness": {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 3}},
        "strategy": {"type": "RollingUpdate", "maxSurge": "25%", "maxUnavailable": "10%"},
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "autoscaling": {"kind": "hpa", "waitingRequests": 8},
        "podSecurityContext": {"runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 2000, "fsGroup": 2000,
                               "fsGroupChangePolicy": "Always", "seccompProfile": {"type": "RuntimeDefault"}},
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]}},
        "dashboards": {"enabled": True, "labels": {"grafana_dashboard": "yes"}},
        "grpcRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "services": ["grpc.health.v1.Health"]}}),
    "groups of two hosts": ((), GROUPS),
    "groups of NPUs, every value": (("ascend", "prod"), {
        **_ROUTE, **_MONITORING, **_KEDA, "accelerator": {"count": 8, "hostDriver": True},
        "config": {"tensor_parallel_size": 32}, "schedulerName": "volcano", "topology": {
            "kind": "leaderworkerset", "hosts": 4, "masterPort": 29600, "exclusiveKey": "example.com/rack",
            "annotations": {"volcano.sh/queue-name": "llm"},
            "hccl": {"bufferMegabytes": 512, "socketInterface": "=eth0", "basePort": 50000}},
        "podDisruptionBudget": {"maxUnavailable": "30%"}}),
    "groups, a pool and smg": (("cpu",), {
        **GROUPS, **_POOL, **_SMG, "metrics": {"scrape": "serviceMonitor"},
        "autoscaling": {"kind": "hpa"}}),
    "everything at once": (("ascend", "prod"), {**_ROUTE, **_MONITORING, **_KEDA, "global": {"region": "eu"},
                                                "cache": {"type": "pvc"}}),
}
"""Name -> (presets, values on top of the presets)."""

NEWER: dict[str, tuple[str, tuple[str, ...], Object]] = {
    "image volume": ("1.33", (), {"model": {
        "source": "image", "image": {"reference": "registry.example.com/qwen3-8b:1", "path": "qwen3"}}}),
    "claimed devices": ("1.34", ("cuda",), {
        "accelerator": {"claimTemplate": "gpu"}, "accept": {"enabled": True},
        "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}}),
}
"""Combinations of values that need a version of Kubernetes: version, presets, values."""
