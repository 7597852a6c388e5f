{{/* Contradictions between values, each a sentence that names them. What is wrong by itself, values.schema.json refuses. */}}

{{- define "npuserve.checks" -}}
{{- if and .Values.tls.clientCaSecretName (not .Values.tls.secretName) }}
{{- fail "tls.clientCaSecretName: clients can only be authenticated with tls.secretName" }}
{{- end }}
{{- if and .Values.helmTest.clientCertSecretName (not .Values.tls.clientCaSecretName) }}
{{- fail "helmTest.clientCertSecretName: is for tls.clientCaSecretName" }}
{{- end }}
{{- if and .Values.helmTest.apiKeySecretName (not .Values.apiKeys.secretName) }}
{{- fail "helmTest.apiKeySecretName: is for apiKeys.secretName" }}
{{- end }}
{{- if and .Values.helmTest.caSecretName (not .Values.tls.secretName) }}
{{- fail "helmTest.caSecretName: is for tls.secretName" }}
{{- end }}

{{- with .Values.termination }}
{{- $least := include "npuserve.leastGrace" $ | int64 }}
{{- if and .gracePeriodSeconds (lt (int64 .gracePeriodSeconds) $least) }}
{{- fail (printf "termination.gracePeriodSeconds: %d would kill running streams: preStopSeconds + drainSeconds + 20 are %d" (int64 .gracePeriodSeconds) $least) }}
{{- end }}
{{- end }}

{{- with .Values.ports }}
{{- if eq (int64 .grpc) (int64 .metrics) }}
{{- fail (printf "ports.metrics: %d is ports.grpc already" (int64 .metrics)) }}
{{- end }}
{{- if has (int64 .health) (list (int64 .grpc) (int64 .metrics)) }}
{{- fail (printf "ports.health: %d is ports.grpc or ports.metrics already" (int64 .health)) }}
{{- end }}
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
