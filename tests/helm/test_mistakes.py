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
    (("--set", "accelerator.kind=gpu"), (
        'accelerator.kind must be one of the following: "cpu", "ascend", "cuda"',
        "at '/accelerator/kind': value must be one of 'cpu', 'ascend', 'cuda'")),
    (("--set", "config.log_level=warn"), (
        'config.log_level must be one of the following: "debug", "info", "warning", "error"',
        "at '/config/log_level': value must be one of 'debug', 'info', 'warning', 'error'")),
    (("-f", "cuda", "--set", "accelerator.count=0"), (
        "accelerator.count: Must be greater than or equal to 1", "at '/accelerator/count': minimum: got 0, want 1")),
    (("--set", "autoscaling.kvCacheUsage=80"), (
        "autoscaling.kvCacheUsage: Must be less than or equal to 1",
        "at '/autoscaling/kvCacheUsage': maximum: got 80, want 1")),
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
        'global.imageRegistry: "https://registry.example.com" is not a registry without a scheme, such as '
        "registry.example.com:5000/mirror")),
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
        'host: "localhost" is not an address of the pod; 0.0.0.0 is every one, and "::" where pods have IPv6 only')),
    (("--set", "metrics.interval=15 seconds"), (
        'metrics.interval: "15 seconds" is not a duration, a whole number followed by ms, s or m, such as 15s')),
    (("--set", "strategy.maxSurge=half"), (
        'strategy.maxSurge: "half" is not a number of replicas (without quotes) or a percentage from 0 to 100, such'
        " as 25")),
    # The model's source.
    (("-f", "cpu", "--set", "model.hub.name=Qwen/Qwen3-0.6B"), (
        "model.hub.name: is set to Qwen/Qwen3-0.6B, but model.source builtin serves the small story teller in the "
        "image; set model.source init (an init container downloads the model) or hub (the server does), or remove "
        "model.hub.name")),
    (("-f", "cuda", "--set", "model.pvc.claimName=models"), (
        "model.pvc: claimName or path is set, but model.source init serves Qwen/Qwen3-0.6B of the hub; set "
        "model.source pvc to serve the claim's folder, or remove them")),
    (("--set", "model.source=hub"), (
        "model.hub.name: is empty; model.source hub needs a name on the hub, such as Qwen/Qwen3-0.6B")),
    (("--set", "model.source=hub,model.hub.name=a/b,model.hub.revision=v1"), (
        "model.hub.revision: model.source hub cannot pin v1; set model.source init, which downloads that revision")),
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
]
"""Arguments of `helm template`, where a preset stands for its file, and the message or the schema's two wordings."""

NONSENSE = re.compile(r"Must validate|allOf|anyOf|oneOf|\(not\)|pattern|executing|HELM_ERR|%!")


def test_mistakes_are_many():
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_mistake_is_answered_by_what_to_do(arguments: tuple[str, ...], said: str | tuple[str, str]):
    files = [str(CHART / f"values-{word}.yaml") if before == "-f" else word
             for before, word in zip(("", *arguments), arguments, strict=False)]
    done = helm("template", "demo", str(CHART), "--kube-version", "1.29.0", *files)
    assert done.returncode != 0, "accepted"
    assert not NONSENSE.search(done.stderr), done.stderr
    assert any(text in done.stderr for text in ([said] if isinstance(said, str) else said)), done.stderr
