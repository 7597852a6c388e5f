"""Plausible mistakes in values, each with the message that Helm answers with.

A message names the value, what it may be, and what to do. Those of the schema are Helm's own: in one wording up to
3.17, and in another later.
"""

from __future__ import annotations

import re

import pytest

from tests.helm.chart import CHART, helm, needs_helm

pytestmark = needs_helm

PROD = ("-f", "cuda", "-f", "prod")
SECURED = "tls.secretName=t,apiKeys.secretName=k,model.hub.revision=v1"
KEDA = "autoscaling.kind=keda,autoscaling.keda.prometheusAddress=http://p:9090"


def misspelt(parent: str, name: str) -> tuple[str, str]:
    """Return both wordings for a name that the schema does not have."""
    return (f"{parent or '(root)'}: Additional property {name} is not allowed",
            f"at '{parent and '/'}{parent}': additional properties '{name}' not allowed")


def mistyped(path: str, wanted: str, given: str) -> tuple[str, str]:
    """Return both wordings for a value of another type. given: the type in both wordings, or "old/new"."""
    old, _, new = given.partition("/")
    return (f"{path}: Invalid type. Expected: {wanted}, given: {old}",
            f"at '/{path.replace('.', '/')}': got {new or old}, want {wanted}")


def unlisted(path: str, *values: str | int) -> tuple[str, str]:
    """Return both wordings for a value that is none of these."""
    old = ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
    new = ", ".join(f"'{value}'" if isinstance(value, str) else str(value) for value in values)
    return (f"{path} must be one of the following: {old}",
            f"at '/{path.replace('.', '/')}': value must be one of {new}")


def beyond(path: str, bound: str, wanted: float, given: float) -> tuple[str, str]:
    """Return both wordings for a number past a bound, "least" or "most"."""
    old, new = {"least": ("greater", "minimum"), "most": ("less", "maximum")}[bound]
    return (f"{path}: Must be {old} than or equal to {wanted}",
            f"at '/{path.replace('.', '/')}': {new}: got {given}, want {wanted}")


MISTAKES: list[tuple[tuple[str, ...], str | tuple[str, str]]] = [
    # Names and types.
    (("--set", "replicas=3"), "replicas: is replicaCount now; rename it"),
    (("--set", "image.pullSecrets={registry}"), (
        "image.pullSecrets: is imagePullSecrets now, a list of maps such as {name: registry}; rename it")),
    (("--set", "ingress.enabled=true"), misspelt("", "ingress")),
    (("--set", "tls.enabled=true"), misspelt("tls", "enabled")),
    (("--set", "config.max_model_length=4096"), misspelt("config", "max_model_length")),
    (("--set", "replicaCount=two"), mistyped("replicaCount", "integer", "string")),
    (("--set", "image.tag=1"), mistyped("image.tag", "string", "integer/number")),
    (("--set", "cache.size=20"), mistyped("cache.size", "string", "integer/number")),
    (("--set-string", "dashboards.enabled=yes"), mistyped("dashboards.enabled", "boolean", "string")),
    (("--set", "tolerations.key=gpu"), mistyped("tolerations", "array", "object")),
    (("--set", "networkPolicy.grpcFrom[0]=10.0.0.0/8"), mistyped("networkPolicy.grpcFrom.0", "object", "string")),
    # A YAML file has `capture: on`, which is a boolean.
    (("--set", "config.capture=true"), mistyped("config.capture", "string", "boolean")),
    # Values out of their range.
    (("--set", "accelerator.kind=gpu"), unlisted("accelerator.kind", "cpu", "ascend", "cuda")),
    (("--set", "config.log_level=warn"), unlisted("config.log_level", "debug", "info", "warning", "error")),
    (("-f", "cuda", "--set", "accelerator.count=0"), beyond("accelerator.count", "least", 1, 0)),
    (("--set", "autoscaling.kvCacheUsage=80"), beyond("autoscaling.kvCacheUsage", "most", 1, 80)),
    # Texts of another form.
    (("--set", "cache.size=20 GB"), (
        'cache.size: "20 GB" is not a size, a whole number followed by Ki, Mi, Gi, Ti or Pi (or k, M, G, T, P), '
        "such as 20Gi")),
    (("--set", "resources.limits.memory=16GB"), (
        'resources.limits.memory: "16GB" is not a quantity, a number followed by nothing, m, Ki, Mi, Gi or Ti '
        "(or k, M, G, T), such as 2, 500m or 16Gi")),
    (("--set", "config.kv_cache_memory=16 GB"), (
        'config.kv_cache_memory: "16 GB" is not a size in bytes or with a unit, such as 4GiB')),
    (("--set", "image.digest=0123abcd"), (
        'image.digest: "0123abcd" is not a digest, sha256 with a colon and 64 hexadecimal digits; '
        "`docker buildx imagetools inspect IMAGE` prints it")),
    (("--set", "image.repository=https://registry.example.com/npuserve"), (
        "image.repository: \"https://registry.example.com/npuserve\" is not an image's name in lower case without its"
        " tag and without a scheme, such as registry.example.com/npuserve")),
    (("--set", "image.repository=npuserve:0.1.0"), 'image.repository: "npuserve:0.1.0" is not an image\'s name'),
    (("--set", "global.imageRegistry=https://registry.example.com"), (
        'global.imageRegistry: "https://registry.example.com" is not a registry without a scheme or a slash at its '
        "end, such as registry.example.com:5000/mirror")),
    (("--set", "model.hub.name=https://huggingface.co/Qwen/Qwen3-0.6B"), (
        'model.hub.name: "https://huggingface.co/Qwen/Qwen3-0.6B" is not a name on the hub, such as Qwen/Qwen3-0.6B; '
        "for a mirror's address set model.hub.endpoint")),
    (("--set", "model.hub.endpoint=hf-mirror.com"), (
        "model.hub.endpoint: \"hf-mirror.com\" is not a mirror's address with its scheme, such as "
        "https://hf-mirror.com")),
    (("--set", "fullnameOverride=My_LLM"), (
        'fullnameOverride: "My_LLM" is not a name of a service, a lower-case letter followed by lower-case letters,'
        " digits and hyphens, such as llm")),
    (("--set", "host=localhost"), (
        'host: "localhost" is not an address of the pod without a port; 0.0.0.0 is every one, and "::" where pods have '
        "IPv6 only")),
    (("--set", "metrics.interval=15 seconds"), (
        'metrics.interval: "15 seconds" is not a duration, a whole number followed by ms, s or m, such as 15s')),
    (("--set", "strategy.maxSurge=half"), (
        'strategy.maxSurge: "half" is not a number of replicas (without quotes) or a percentage from 0 to 100, such'
        " as 25")),
    # The model's source.
    (("-f", "cpu", "--set", "model.hub.name=Qwen/Qwen3-0.6B"), (
        "model.hub.name: is set to Qwen/Qwen3-0.6B, but model.source builtin serves the small story teller in the "
        "image; set model.source init, with which an init container downloads the model, or remove model.hub.name")),
    (("-f", "cuda", "--set", "model.pvc.claimName=models"), (
        "model.pvc: claimName or path is set, but model.source init serves Qwen/Qwen3-0.6B of the hub; set "
        "model.source pvc to serve the claim's folder, or remove them")),
    (("--set", "model.source=init"), (
        "model.hub.name: is empty; model.source init needs a name on the hub, such as Qwen/Qwen3-0.6B")),
    (("--set", "model.source=hub,model.hub.name=a/b"), (
        "model.source: hub is init now, with which an init container downloads the model before the server starts; "
        "set init")),
    (("--set", "model.source=pvc"), (
        "model.pvc.claimName: is empty; model.source pvc needs the name of the claim that holds the model")),
    (("--set", "config.model=Qwen/Qwen3-0.6B"), (
        "config.model: the chart derives it from another value; remove it, and set model.source instead")),
    (("--set", "config.port=8000"), (
        "config.port: the chart derives it from another value; remove it, and set ports.grpc instead")),
    # Resources, users and the image.
    (("--set", "resources.requests.memory=8Gi"), (
        "resources.requests.memory: 8Gi is above resources.limits.memory, 4Gi; set a request up to its limit")),
    (("--set", r"resources.limits.nvidia\.com/gpu=1"), (
        "resources.limits: nvidia.com/gpu is a device, and accelerator.kind cpu computes on none; set "
        "accelerator.kind cuda or ascend, whose accelerator.count requests it")),
    (("--set", "podSecurityContext.runAsUser=0"), (
        "podSecurityContext.runAsUser: 0 is root, and with runAsNonRoot true the kubelet would not start the "
        "containers; set another user, such as 10001")),
    (("--set", "image.tag=latest"), (
        'image.tag: "latest" names another image tomorrow, so replicas could differ; set a version such as 0.1.0, or '
        "image.digest")),
    (("--set", "extraEnv[0].name=NPUSERVE_PORT"), (
        "extraEnv: NPUSERVE_PORT is the chart's own; use config or the value that sets it")),
    # Replicas, rollouts and services.
    ((*PROD, "--set", f"{SECURED},image.digest=sha256:{'0' * 64},service.sessionAffinitySeconds=3600"), (
        "service.sessionAffinitySeconds: 3600 would keep clients at their pods, so that pods which autoscaling.kind"
        " keda adds get no load; set 0. docs/operations.md, Resuming streams, says how clients return to their "
        "server")),
    (("--set", "autoscaling.kind=keda"), (
        "autoscaling.keda.prometheusAddress: is empty, and KEDA asks Prometheus for the load; set its address, such as "
        "http://prometheus-operated.monitoring:9090")),
    (("--set", f"{KEDA},autoscaling.minReplicas=10"), (
        "autoscaling.minReplicas: 10 is above autoscaling.maxReplicas, 8; raise that or lower this")),
    (("--set", "strategy.maxSurge=0"), (
        "strategy: with maxSurge 0 and maxUnavailable 0 no rollout could begin; set one of them to 1")),
    (("--set", "termination.gracePeriodSeconds=30"), (
        "termination.gracePeriodSeconds: 30 would kill running streams; set at least preStopSeconds + drainSeconds "
        "+ 20, which are 155, or null")),
    (("--set", "cache.type=pvc,cache.accessMode=ReadWriteOnce"), (
        "cache.accessMode: ReadWriteOnce serves one replica; set ReadWriteMany or replicaCount 1, or leave the claim "
        "out")),
    (("--set", "service.nodePort=30051"), (
        "service.nodePort: a service of type ClusterIP has none; set service.type NodePort or LoadBalancer, or "
        "remove it")),
    (("--set", "ports.metrics=50051"), (
        "ports.metrics: 50051 is ports.grpc already; set another port from 1024 to 65535")),
    # Security.
    (PROD, "apiKeys.secretName: production needs tls.secretName and apiKeys.secretName, or gateway.enabled"),
    ((*PROD, "--set", SECURED), (
        "image.digest: production needs it, since a tag can be moved to another image; "
        "`docker buildx imagetools inspect IMAGE` prints it")),
    (("--set", "tls.clientCaSecretName=ca"), (
        "tls.clientCaSecretName: clients' certificates need TLS; set tls.secretName too")),
    (("--set", "gateway.enabled=true"), (
        "gateway.from: is empty, so the network policy would admit nobody; list the peers (NetworkPolicyPeer) that "
        "are the gateway's pods")),
    # Names and forms of other charts, and slips.
    (("--set", "autoscaling.enabled=true"), misspelt("autoscaling", "enabled")),
    (("--set", "autoscaling.targetCPUUtilizationPercentage=80"), misspelt(
        "autoscaling", "targetCPUUtilizationPercentage")),
    (("--set", "service.ports.grpc=50051"), misspelt("service", "ports")),
    (("--set", "service.targetPort=50051"), misspelt("service", "targetPort")),
    (("--set", "service.type=Ingress"), unlisted("service.type", "ClusterIP", "NodePort", "LoadBalancer")),
    (("--set", "service.port=http"), mistyped("service.port", "integer", "string")),
    (("--set", "service.port=70000"), beyond("service.port", "most", 65535, 70000)),
    (("--set", "ports.grpc=80"), beyond("ports.grpc", "least", 1024, 80)),
    (("--set", "resources.requests.cpu=two"), (
        "resources.requests.cpu: \"two\" is not a quantity, a number followed by nothing, m, Ki, Mi, Gi or "
        "Ti (or k, M, G, T), such as 2, 500m or 16Gi")),
    (("--set", "resources.limits.memory=16 Gi"), (
        "resources.limits.memory: \"16 Gi\" is not a quantity, a number followed by nothing, m, Ki, Mi, Gi "
        "or Ti (or k, M, G, T), such as 2, 500m or 16Gi")),
    (("--set", "resources.cpu=2"), misspelt("resources", "cpu")),
    (("--set", "nodeSelector=gpu"), mistyped("nodeSelector", "object", "string")),
    (("--set", "podAnnotations.a=1"), mistyped("podAnnotations.a", "string", "integer/number")),
    (("--set", "podLabels.a=true"), mistyped("podLabels.a", "string", "boolean")),
    (("--set", "commonLabels.team=LLM Team"), (
        "commonLabels.team: \"LLM Team\" is not a label's value, of at most 63 letters, digits, hyphens, "
        "dots and underscores, such as llm")),
    (("--set", "extraEnv.HF_TOKEN=abc"), mistyped("extraEnv", "array", "object")),
    (("--set", "imagePullSecrets=registry"), mistyped("imagePullSecrets", "array", "string")),
    (("--set", "imagePullSecrets[0]=registry"), mistyped("imagePullSecrets.0", "object", "string")),
    (("--set", "image.pullPolicy=always"), unlisted("image.pullPolicy", "IfNotPresent", "Always", "Never")),
    (("--set", "image.repository=Npuserve"), (
        "image.repository: \"Npuserve\" is not an image's name in lower case without its tag and without a "
        "scheme, such as registry.example.com/npuserve")),
    (("--set", "image.registry=docker.io"), misspelt("image", "registry")),
    (("--set", "model=Qwen/Qwen3-0.6B"), mistyped("model", "object", "string")),
    (("--set", "model.name=Qwen/Qwen3-0.6B"), misspelt("model", "name")),
    (("--set", "model.path=/models"), misspelt("model", "path")),
    (("--set", "model.source=s3"), (
        'model.source: "s3" is not builtin, init, pvc or image')),
    (("--set", "model.source=init,model.hub.name=Qwen3-0.6B/x/y"), (
        "model.hub.name: \"Qwen3-0.6B/x/y\" is not a name on the hub, such as Qwen/Qwen3-0.6B; for a "
        "mirror's address set model.hub.endpoint")),
    (("--set", "model.source=pvc,model.pvc.claimName=Models_1"), (
        "model.pvc.claimName: \"Models_1\" is not a name of an object, of at most 253 lower-case letters, "
        "digits, dots and hyphens, such as llm-tls")),
    (("--set", "model.source=pvc,model.pvc.claimName=m,model.pvc.path=/abs"), (
        "model.pvc.path: \"/abs\" is not a folder on the claim, relative to its root and without .., such as "
        "qwen/0.6b")),
    (("--set", "model.source=pvc,model.pvc.claimName=m,model.pvc.path=../x"), (
        "model.pvc.path: \"../x\" is not a folder on the claim, relative to its root and without .., such as "
        "qwen/0.6b")),
    (("--set", "model.source=image"), (
        "model.image.reference: is empty; model.source image needs an image that holds the model, such as "
        "registry.example.com/qwen3-8b@sha256:…")),
    (("--set", "model.source=image,model.image.reference=https://registry/x"), (
        "model.image.reference: \"https://registry/x\" is not an image in lower case and without a scheme, such as "
        "registry.example.com/qwen3-8b@sha256 with a colon and 64 hexadecimal digits")),
    (("--set", "model.hub.token=hf_abc"), misspelt("model.hub", "token")),
    (("--set", "model.init.command=fetch"), mistyped("model.init.command", "array", "string")),
    (("--set", "model.init.size=50GB"), (
        "model.init.size: \"50GB\" is not a size, a whole number followed by Ki, Mi, Gi, Ti or Pi (or k, M, "
        "G, T, P), such as 20Gi")),
    (("--set", "model.init.create=true"), (
        "model.init.create: is for model.source init, and that is builtin; set model.source init, or remove "
        "it")),
    (("--set", "model.source=init,model.hub.name=a/b,model.init.create=true,model.init.accessMode=RWX"), unlisted(
        "model.init.accessMode", "ReadWriteMany", "ReadWriteOnce")),
    (("--set", "config.max_num_seqs=0"), beyond("config.max_num_seqs", "least", 1, 0)),
    (("--set", "config.max_num_seqs=many"), mistyped("config.max_num_seqs", "integer", "string")),
    (("--set", "config.dtype=fp16"), unlisted("config.dtype", "auto", "bfloat16", "float16", "float32")),
    (("--set", "config.kv_cache_dtype=fp4"), unlisted("config.kv_cache_dtype", "auto", "int8", "fp8")),
    (("--set", "config.gpu_memory_utilization=0.9"), misspelt("config", "gpu_memory_utilization")),
    (("--set", "config.log_prompts=yes"), mistyped("config.log_prompts", "boolean", "string")),
    (("--set", "config.drain_seconds=10"), (
        "config.drain_seconds: the chart derives it from another value; remove it, and set "
        "termination.drainSeconds instead")),
    (("--set", "config.tls_cert=/x"), (
        "config.tls_cert: the chart derives it from another value; remove it, and set tls.secretName instead")),
    (("--set", "config.target_ttft_seconds=-1"), beyond("config.target_ttft_seconds", "least", 0.001, -1)),
    (("--set", "config.block_size=17"), unlisted("config.block_size", 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    (("--set", "config.max_queue=-1"), beyond("config.max_queue", "least", 0, -1)),
    (("--set", "config.speculate=sufix"), (
        'config.speculate: "sufix" is not off, auto, suffix, mtp or the path of a smaller model\'s folder, such as '
        "/models/qwen3-0.6b")),
    (("--set", "config.speculate="), 'config.speculate: "" is not off, auto, suffix, mtp or'),
    (("--set", "config.speculate=true"), mistyped("config.speculate", "string", "boolean")),
    (("-f", "cuda", "--set", "config.speculate=mtp,config.prefill_device=cpu"), (
        "config.speculate: mtp drafts with a model, which a device cannot with config.prefill_device cpu; set auto or "
        "off, or remove that")),
    (("-f", "cuda", "--set", "config.speculate=mtp,config.capture_chunks=false"), (
        "config.speculate: mtp drafts with a model, which a device cannot with config.capture_chunks false; set auto "
        "or off, or remove that")),
    (("-f", "ascend", "--set", "config.speculate=/models/small,config.kv_cache_dtype=int8"), (
        "config.speculate: /models/small drafts with a model, which a device cannot with config.kv_cache_dtype int8; "
        "set auto or off, or remove that")),
    (("--set", "config.kv_cache_memory=16GiB"), (
        "config.kv_cache_memory: 16GiB is above resources.limits.memory, 4Gi, which holds the rest of the server too; "
        "raise that or lower this")),
    (("--set", "config.kv_cache_memory=4295MB"), "config.kv_cache_memory: 4295MB is above resources.limits.memory"),
    (("--set", "config.kv_cache_memory=4294967297"), "config.kv_cache_memory: 4294967297 is above resources.limits"),
    (("-f", "cuda", "--set", "config.kv_offload_memory=64G"), (
        "config.kv_offload_memory: 64G is above resources.limits.memory, 8Gi, which holds the rest of the server too")),
    (("--set", "config.prefix_cache=off"), mistyped("config.prefix_cache", "boolean", "string")),
    (("--set", "accelerator=cuda"), mistyped("accelerator", "object", "string")),
    (("--set", "accelerator.kind=cuda,accelerator.resourceName=gpu"), (
        "accelerator.resourceName: \"gpu\" is not a device's resource name with its domain, such as "
        "nvidia.com/gpu; `kubectl describe node` lists them")),
    (("--set", "accelerator.kind=cuda,accelerator.count=two"), mistyped("accelerator.count", "integer", "string")),
    (("--set", "autoscaling.kind=vpa"), unlisted("autoscaling.kind", "none", "hpa", "keda")),
    (("--set", "autoscaling.kind=hpa,autoscaling.minReplicas=0"), beyond("autoscaling.minReplicas", "least", 1, 0)),
    (("--set", "autoscaling.kind=hpa,metrics.scrape=none"), (
        "metrics.scrape: none leaves autoscaling.kind hpa nothing to scale by; set annotations or "
        "serviceMonitor")),
    (("--set", "autoscaling.kind=keda,autoscaling.keda.prometheusAddress=prometheus:9090"), (
        "autoscaling.keda.prometheusAddress: \"prometheus:9090\" is not Prometheus' address with its scheme, "
        "such as http://prometheus-operated.monitoring:9090")),
    (("--set", "autoscaling.keda.prometheusUrl=http://p"), misspelt("autoscaling.keda", "prometheusUrl")),
    (("--set", "metrics.scrape=prometheus"), (
        'metrics.scrape: "prometheus" is not annotations, serviceMonitor or none')),
    (("--set", "metrics.enabled=true"), misspelt("metrics", "enabled")),
    (("--set", "metrics.interval=15"), mistyped("metrics.interval", "string", "integer/number")),
    (("--set", "metrics.scrapeTimeout=30s,metrics.scrape=serviceMonitor"), (
        "metrics.scrapeTimeout: 30s is above metrics.interval, 15s; set at most that")),
    (("--set", "rules.runbookBaseUrl=/runbooks"), (
        "rules.runbookBaseUrl: \"/runbooks\" is not the web address of docs/operations.md without a "
        "fragment, such as https://git.example.com/docs/operations.md")),
    (("--set", "rules.grafanaUrl=grafana.example.com"), (
        "rules.grafanaUrl: \"grafana.example.com\" is not Grafana's web address without a slash at its end, "
        "such as https://grafana.example.com")),
    (("--set", "rules.labels=prometheus"), mistyped("rules.labels", "object", "string")),
    (("--set", "tls.secretName=My_Secret"), (
        "tls.secretName: \"My_Secret\" is not a name of an object, of at most 253 lower-case letters, "
        "digits, dots and hyphens, such as llm-tls")),
    (("--set", "tls.secret=llm-tls"), misspelt("tls", "secret")),
    (("--set", "apiKeys.keys[0]=abc"), misspelt("apiKeys", "keys")),
    (("--set", "apiKeys.secretName=keys,apiKeys.key=a/b"), (
        "apiKeys.key: \"a/b\" is not a key of a secret, of letters, digits, hyphens, dots and underscores, "
        "such as api-keys")),
    (("--set", "helmTest.apiKeySecretName=k"), (
        "helmTest.apiKeySecretName: the server asks for no key; set apiKeys.secretName, or remove it")),
    (("--set", "helmTest.caSecretName=c"), (
        "helmTest.caSecretName: nothing serves TLS; set tls.secretName or gateway.smg.tls.secretName, or "
        "remove it")),
    (("--set", "cache.type=hostPath"), unlisted("cache.type", "emptyDir", "pvc")),
    (("--set", "shm.size=1GB"), (
        "shm.size: \"1GB\" is not a size, a whole number followed by Ki, Mi, Gi, Ti or Pi (or k, M, G, T, "
        "P), such as 20Gi")),
    (("--set", "shm.enabled=true"), misspelt("shm", "enabled")),
    (("--set", "persistence.enabled=true"), misspelt("", "persistence")),
    (("--set", "serviceAccount.name=Svc_A"), (
        "serviceAccount.name: \"Svc_A\" is not a name of an object, of at most 253 lower-case letters, "
        "digits, dots and hyphens, such as llm-tls")),
    (("--set", "securityContext.runAsUser=0"), (
        "securityContext.runAsUser: 0 is root, and with runAsNonRoot true the kubelet would not start the "
        "containers; set another user, such as 10001")),
    (("--set", "topologySpread.whenUnsatisfiable=Never"), unlisted(
        "topologySpread.whenUnsatisfiable", "ScheduleAnyway", "DoNotSchedule", "none")),
    (("--set", "accelerator.kind=cuda,topologySpread.whenUnsatisfiable=DoNotSchedule"), (
        "topologySpread.whenUnsatisfiable: DoNotSchedule counts nodes without a device too, and allows one "
        "replica on each other node; set nodeSelector, or affinity.nodeAffinity with "
        "requiredDuringSchedulingIgnoredDuringExecution")),
    (("--set", "topology.kind=statefulset"), unlisted("topology.kind", "deployment", "leaderworkerset")),
    (("--set", "topology.kind=leaderworkerset"), (
        "config.tensor_parallel_size: 1 must be a multiple of topology.hosts, 2, in [2, 64]")),
    (("--set", "topology.kind=leaderworkerset,topology.hosts=1"), beyond("topology.hosts", "least", 2, 1)),
    (("--set", "topology.kind=leaderworkerset,topology.hosts=2,config.tensor_parallel_size=3"), (
        "config.tensor_parallel_size: 3 must be a multiple of topology.hosts, 2, in [2, 64]")),
    (("--set", "probes.startupSeconds=0"), beyond("probes.startupSeconds", "least", 5, 0)),
    (("--set", "probes.readiness.periodSeconds=0"), beyond("probes.readiness.periodSeconds", "least", 1, 0)),
    (("--set", "probes.liveness.path=/healthz"), misspelt("probes.liveness", "path")),
    (("--set", "termination.drainSeconds=-5"), beyond("termination.drainSeconds", "least", 0, -5)),
    (("--set", "terminationGracePeriodSeconds=30"), misspelt("", "terminationGracePeriodSeconds")),
    (("--set", "strategy.type=Rolling"), unlisted("strategy.type", "RollingUpdate", "Recreate")),
    (("--set", "strategy.maxUnavailable=150%"), (
        "strategy.maxUnavailable: \"150 percent\" is not a number of replicas (without quotes) or a "
        "percentage from 0 to 100, such as 25 percent")),
    (("--set", "strategy.rollingUpdate.maxSurge=1"), misspelt("strategy", "rollingUpdate")),
    (("--set", "podDisruptionBudget.minAvailable=1"), misspelt("podDisruptionBudget", "minAvailable")),
    (("--set", "podDisruptionBudget.maxUnavailable=0"), beyond("podDisruptionBudget.maxUnavailable", "least", 1, 0)),
    (("--set", "service.loadBalancerSourceRanges[0]=10.0.0.0"), (
        "service.loadBalancerSourceRanges.0: \"10.0.0.0\" is not a range of addresses with the length of its "
        "prefix, such as 10.0.0.0/8")),
    (("--set", "service.externalTrafficPolicy=Local"), (
        "service.externalTrafficPolicy: a service of type ClusterIP has no external traffic; set "
        "service.type NodePort or LoadBalancer, or remove it")),
    (("--set", "service.type=LoadBalancer,service.externalTrafficPolicy=local"), unlisted(
        "service.externalTrafficPolicy", "", "Cluster", "Local")),
    (("--set", "service.sessionAffinitySeconds=60"), (
        "service.sessionAffinitySeconds: 60 ends before a connection does; set 0, or more than "
        "config.max_connection_age_seconds, 300")),
    (("--set", "service.loadBalancerIP=1.2.3.4"), misspelt("service", "loadBalancerIP")),
    (("--set", "grpcRoute.enabled=true"), (
        "grpcRoute.parentRefs: is empty, and a route needs a Gateway, such as {name: public}")),
    (("--set", "grpcRoute.parentRefs[0]=public"), mistyped("grpcRoute.parentRefs.0", "object", "string")),
    (("--set", "grpcRoute.hostnames[0]=https://llm.example.com"), (
        "grpcRoute.hostnames.0: \"https://llm.example.com\" is not a host's name in lower case without a "
        "scheme or port, such as llm.example.com or *.example.com")),
    (("--set", "gateway.kind=envoy"), unlisted("gateway.kind", "external", "smg")),
    (("--set", "gateway.enabled=true,gateway.kind=smg,tls.secretName=t"), (
        "tls.secretName: gateway.kind smg reaches the pods in plaintext and without a key; set "
        "gateway.smg.tls")),
    (("--set", "gateway.enabled=true,gateway.kind=smg,apiKeys.secretName=k"), (
        "apiKeys.secretName: gateway.kind smg reaches the pods in plaintext and without a key; set "
        "gateway.smg.apiKeys")),
    (("--set", "gateway.smg.policy=fastest"), unlisted(
        "gateway.smg.policy", "cache_aware", "consistent_hashing", "least_load", "manual", "passthrough",
        "power_of_two", "prefix_hash", "random", "round_robin")),
    (("--set", "gateway.smg.replicas=0"), beyond("gateway.smg.replicas", "least", 1, 0)),
    (("--set", "inferencePool.enabled=true"), (
        "inferencePool.endpointPicker.name: is empty; set the name of the endpoint picker's Service in this "
        "namespace")),
    (("--set", "networkPolicy.enabled=no"), mistyped("networkPolicy.enabled", "boolean", "string")),
    (("--set", "global.imageRegistry=registry/"), (
        "global.imageRegistry: \"registry/\" is not a registry without a scheme or a slash at its end, such as "
        "registry.example.com:5000/mirror")),
    (("--set", "nameOverride=My_LLM"), (
        "nameOverride: \"My_LLM\" is not a name of a service, a lower-case letter followed by lower-case "
        "letters, digits and hyphens, such as llm")),
    (("--set", "openshift=yes"), mistyped("openshift", "boolean", "string")),
    (("--set", "priorityClassName=High"), (
        "priorityClassName: \"High\" is not a name of an object, of at most 253 lower-case letters, digits, "
        "dots and hyphens, such as llm-tls")),
    (("--set", "extraObjects=x"), mistyped("extraObjects", "array", "string")),
    (("--set", "extraVolumes[0]=x"), mistyped("extraVolumes.0", "object", "string")),
    (("--set", "dashboards.labels=x"), mistyped("dashboards.labels", "object", "string")),
    (("--set", "tmp.size=1G B"), (
        "tmp.size: \"1G B\" is not a size, a whole number followed by Ki, Mi, Gi, Ti or Pi (or k, M, G, T, "
        "P), such as 20Gi")),
    (("--set", "accelerator.count=2"), (
        "accelerator.count: 2 devices, and accelerator.kind cpu computes on none; set accelerator.kind cuda or ascend, "
        "or "
        "remove it")),
    (("-f", "cuda", "--set", "accelerator.count=2"), (
        "accelerator.count: 2 devices, of which config.tensor_parallel_size leaves 1 to compute in a pod; make them "
        "equal, "
        "or raise replicaCount")),
    (("--set", "cache.claimName=c"), (
        "cache.claimName: is for cache.type pvc, and that is emptyDir; set cache.type pvc, or remove it")),
    (("--set", "host=0.0.0.0:50051"), 'host: "0.0.0.0:50051" is not an address of the pod without a port'),
    (("--set", "metrics.scrape=podMonitor"), (
        "metrics.scrape: podMonitor is serviceMonitor now, which scrapes the same pods; set serviceMonitor")),
]
"""Arguments of `helm template`, where a preset stands for its file, and the message or the schema's two wordings."""

NONSENSE = re.compile(r"Must validate|allOf|anyOf|oneOf|\(not\)|pattern|executing|HELM_ERR|%!")


def test_mistakes_are_many():
    assert len(MISTAKES) >= 175


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_mistake_is_answered_by_what_to_do(arguments: tuple[str, ...], said: str | tuple[str, str]):
    files = [str(CHART / f"values-{word}.yaml") if before == "-f" else word
             for before, word in zip(("", *arguments), arguments, strict=False)]
    done = helm("template", "demo", str(CHART), "--kube-version", "1.29.0", *files)
    assert done.returncode != 0, "accepted"
    assert not NONSENSE.search(done.stderr), done.stderr
    assert any(text in done.stderr for text in ([said] if isinstance(said, str) else said)), done.stderr
