{{/* Contradictions between values, each a sentence that names them. What is wrong by itself, values.schema.json refuses. */}}

{{/* Settings that this version of the server refuses, as service/config.py does; a test compares the two. The mounts and
settings for them are in place. Who takes a name off this list has probes to see to: those of Kubernetes speak no TLS. */}}
{{- define "npuserve.reserved" -}}
tls_cert tls_key tls_client_ca api_keys
{{- end }}

{{- define "npuserve.checks" -}}
{{- $reserved := include "npuserve.reserved" . | splitList " " }}
{{- if and .Values.tls.secretName (has "tls_cert" $reserved) }}
{{- fail "tls.secretName: the server has no TLS in this version; let a mesh or a gateway encrypt" }}
{{- end }}
{{- if and .Values.tls.clientCaSecretName (has "tls_client_ca" $reserved) }}
{{- fail "tls.clientCaSecretName: the server has no TLS in this version; let a mesh or a gateway authenticate" }}
{{- end }}
{{- if and .Values.apiKeys.secretName (has "api_keys" $reserved) }}
{{- fail "apiKeys.secretName: the server knows no API keys in this version; let a mesh or a gateway check them" }}
{{- end }}
{{- if and .Values.tls.clientCaSecretName (not .Values.tls.secretName) }}
{{- fail "tls.clientCaSecretName: clients can only be authenticated with tls.secretName" }}
{{- end }}

{{- with .Values.termination }}
{{- $least := include "npuserve.leastGrace" $ | int64 }}
{{- if and .gracePeriodSeconds (lt (int64 .gracePeriodSeconds) $least) }}
{{- fail (printf "termination.gracePeriodSeconds: %d would kill running streams: preStopSeconds + drainSeconds + 20 are %d" (int64 .gracePeriodSeconds) $least) }}
{{- end }}
{{- end }}

{{- if eq (int64 .Values.ports.grpc) (int64 .Values.ports.metrics) }}
{{- fail (printf "ports.metrics: %d is ports.grpc already" (int64 .Values.ports.metrics)) }}
{{- end }}

{{- with .Values.accelerator }}
{{- if and (eq .kind "cpu") (or .resourceName .extraResources .hostDriver) }}
{{- fail "accelerator.resourceName, extraResources and hostDriver are of a device, and accelerator.kind is cpu" }}
{{- end }}
{{- if and .hostDriver (ne .kind "ascend") }}
{{- fail (printf "accelerator.hostDriver: only accelerator.kind ascend has it, not %s" .kind) }}
{{- end }}
{{- $name := include "npuserve.resourceName" $ }}
{{- range $part := list "limits" "requests" }}
{{- if hasKey (default dict (get $.Values.resources $part)) (default "-" $name) }}
{{- fail (printf "resources.%s: %s is asked for by accelerator.count" $part $name) }}
{{- end }}
{{- end }}
{{- $parallel := int64 (default 1 $.Values.config.tensor_parallel_size) }}
{{- if and (ne .kind "cpu") (gt $parallel (int64 .count)) }}
{{- fail (printf "config.tensor_parallel_size: %d devices, and accelerator.count is %d" $parallel (int64 .count)) }}
{{- end }}
{{- end }}

{{- with .Values.strategy }}
{{- if and (eq .type "RollingUpdate") (eq (toString .maxSurge) "0" "0%") (eq (toString .maxUnavailable) "0" "0%") }}
{{- fail "strategy: with maxSurge 0 and maxUnavailable 0 no rollout could begin" }}
{{- end }}
{{- end }}

{{- with .Values.autoscaling }}
{{- if and (ne .kind "none") (gt (int64 .minReplicas) (int64 .maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas: %d is above maxReplicas, %d" (int64 .minReplicas) (int64 .maxReplicas)) }}
{{- end }}
{{- if and (ne .kind "none") (eq $.Values.metrics.scrape "none") }}
{{- fail (printf "metrics.scrape: none leaves autoscaling.kind %s nothing to scale by" .kind) }}
{{- end }}
{{- end }}

{{- if and (eq .Values.cache.type "pvc") (not .Values.cache.claimName) (eq .Values.cache.accessMode "ReadWriteOnce") }}
{{- if or (ne .Values.autoscaling.kind "none") (gt (int64 .Values.replicas) 1) }}
{{- fail "cache.accessMode: ReadWriteOnce serves one replica; take ReadWriteMany, cache.type emptyDir, or replicas 1" }}
{{- end }}
{{- if and (eq .Values.strategy.type "RollingUpdate") (not (has (toString .Values.strategy.maxSurge) (list "0" "0%"))) }}
{{- fail "cache.accessMode: with ReadWriteOnce a new pod could wait for the old one's volume for ever; set strategy.type Recreate" }}
{{- end }}
{{- end }}

{{- $ours := list "HOME" "TMPDIR" "XDG_CACHE_HOME" "HF_HOME" "HF_ENDPOINT" "HF_TOKEN" "HF_HUB_OFFLINE" "MODEL_DIR" }}
{{- range .Values.extraEnv }}
{{- if or (hasPrefix "NPUSERVE_" .name) (has .name $ours) }}
{{- fail (printf "extraEnv: %s is the chart's own; use config or the value that sets it" .name) }}
{{- end }}
{{- end }}

{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) }}
{{- fail "grpcRoute.parentRefs: a route needs a Gateway" }}
{{- end }}
{{- if and (ne .Values.service.type "LoadBalancer") .Values.service.loadBalancerSourceRanges }}
{{- fail (printf "service.loadBalancerSourceRanges: service.type is %s" .Values.service.type) }}
{{- end }}
{{- end }}
