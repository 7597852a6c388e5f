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
{{- if and .Values.helmTest.caSecretName (not .Values.tls.secretName) (not .Values.gateway.smg.tls.secretName) }}
{{- fail "helmTest.caSecretName: is for tls.secretName or gateway.smg.tls.secretName" }}
{{- end }}

{{- if .Values.gateway.enabled }}
{{- if and (not .Values.gateway.from) (eq .Values.gateway.kind "external") }}
{{- fail "gateway.from: names the gateway's pods, which the network policy admits" }}
{{- end }}
{{- if not .Values.networkPolicy.enabled }}
{{- fail "networkPolicy.enabled: gateway.enabled needs it, since others could call beside the gateway" }}
{{- end }}
{{- if .Values.networkPolicy.grpcFrom }}
{{- fail "networkPolicy.grpcFrom: gateway.enabled admits gateway.from alone" }}
{{- end }}
{{- end }}
{{- if include "npuserve.smg" . }}
{{- include "npuserve.gatewayChecks" . }}
{{- end }}
{{- with .Values.inferencePool }}
{{- if and .enabled $.Values.tls.secretName }}
{{- fail "inferencePool.enabled: its gateway reaches the pods in plaintext (h2c), and tls.secretName is set" }}
{{- end }}
{{- if and .httpRoute.enabled (not .enabled) }}
{{- fail "inferencePool.httpRoute.enabled: it leads to the pool of inferencePool.enabled" }}
{{- end }}
{{- end }}
{{- if .Values.production }}
{{- if not .Values.gateway.enabled }}
{{- range $name, $secret := dict "tls" .Values.tls.secretName "apiKeys" .Values.apiKeys.secretName }}
{{- if not $secret }}
{{- fail (printf "%s.secretName: production needs tls.secretName and apiKeys.secretName, or gateway.enabled" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.model }}
{{- if eq .source "hub" }}
{{- fail "model.hub.revision: production needs it, and model.source hub cannot pin one; use init" }}
{{- end }}
{{- if and (eq .source "init") (not .init.command) (not .hub.revision) }}
{{- fail "model.hub.revision: production needs it, so that all replicas have the same model" }}
{{- end }}
{{- end }}
{{- if not .Values.image.digest }}
{{- fail "image.digest: production needs it, since a tag can be moved to another image" }}
{{- end }}
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

{{- $published := include "npuserve.kvEventsPorts" . | fromYaml }}
{{- range $name, $port := $published }}
{{- range $other, $taken := $.Values.ports }}
{{- if eq (int64 $port) (int64 $taken) }}
{{- fail (printf "ports.%s: %d is the port of KV events (%s) already" $other (int64 $port) $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq 1 (values $published | uniq | len | sub (len $published)) }}
{{- fail "config.kv_events_replay_endpoint: has the port of config.kv_events_endpoint" }}
{{- end }}
{{- if and $published .Values.networkPolicy.enabled (not .Values.networkPolicy.kvEventsFrom) }}
{{- fail "networkPolicy.kvEventsFrom: names the pods that may read KV events over ZeroMQ, which contain prompts and answers" }}
{{- end }}
{{- if and .Values.networkPolicy.kvEventsFrom (not $published) }}
{{- fail "networkPolicy.kvEventsFrom: nothing is published; it is for config.kv_events: zmq with an endpoint of a wildcard" }}
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
{{- if hasKey .extraResources (default "-" $name) }}
{{- fail (printf "accelerator.extraResources: %s is asked for by accelerator.count" $name) }}
{{- end }}
{{- $ranks := include "npuserve.ranks" $ | int64 }}
{{- if and (ne .kind "cpu") (gt $ranks (int64 .count)) }}
{{- fail (printf "config.tensor_parallel_size: %d ranks in a pod, and accelerator.count is %d" $ranks (int64 .count)) }}
{{- end }}
{{- end }}
{{- if include "npuserve.groups" . }}
{{- include "npuserve.groupChecks" . }}
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

{{- with .Values.metrics }}
{{- if and .scrapeTimeout (gt (include "npuserve.milliseconds" .scrapeTimeout | int64) (include "npuserve.milliseconds" .interval | int64)) }}
{{- fail (printf "metrics.scrapeTimeout: %s is above metrics.interval, %s" .scrapeTimeout .interval) }}
{{- end }}
{{- end }}

{{- $claims := dict }}
{{- if and (eq .Values.cache.type "pvc") (not .Values.cache.claimName) }}
{{- $_ := set $claims "cache" .Values.cache }}
{{- end }}
{{- if and (eq .Values.model.source "init") .Values.model.init.create }}
{{- $_ := set $claims "model.init" .Values.model.init }}
{{- end }}
{{- range $name, $claim := $claims }}
{{- if eq $claim.accessMode "ReadWriteOnce" }}
{{- if or (ne $.Values.autoscaling.kind "none") (gt (int64 $.Values.replicas) 1) }}
{{- fail (printf "%s.accessMode: ReadWriteOnce serves one replica; set ReadWriteMany or replicas 1, or leave the claim out" $name) }}
{{- end }}
{{- if and (eq (include "npuserve.workload" $) "Deployment") (eq $.Values.strategy.type "RollingUpdate") (not (has (toString $.Values.strategy.maxSurge) (list "0" "0%"))) }}
{{- fail (printf "%s.accessMode: with ReadWriteOnce a new pod can wait for the old one's volume for ever; set strategy.type Recreate" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.model.init.create (or .Values.model.init.claimName (ne .Values.model.source "init")) }}
{{- fail "model.init.create: creates a claim for model.source init, and claimName names one that exists" }}
{{- end }}

{{- if eq .Values.state.type "pvc" }}
{{- if not .Values.headless.enabled }}
{{- fail "headless.enabled: a StatefulSet (state.type pvc) takes its pods' names from the headless service" }}
{{- end }}
{{- if ne .Values.strategy.type "RollingUpdate" }}
{{- fail (printf "strategy.type: %s is for a Deployment, and state.type pvc makes a StatefulSet" .Values.strategy.type) }}
{{- end }}
{{- end }}

{{- if and (eq .Values.topologySpread.whenUnsatisfiable "DoNotSchedule") (ne .Values.accelerator.kind "cpu") (not .Values.nodeSelector) (not (dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" .Values.affinity)) }}
{{- fail "topologySpread.whenUnsatisfiable: DoNotSchedule counts nodes without a device too, and allows one replica on each other node; set nodeSelector, or affinity.nodeAffinity with requiredDuringSchedulingIgnoredDuringExecution" }}
{{- end }}

{{- $ours := concat (include "npuserve.groups" . | empty | ternary list (list "MASTER_ADDR" "MASTER_PORT" "RANK" "WORLD_SIZE" "HCCL_BUFFSIZE" "HCCL_SOCKET_IFNAME" "HCCL_IF_BASE_PORT")) (list "HOME" "TMPDIR" "XDG_CACHE_HOME" "HF_HOME" "HF_ENDPOINT" "HF_TOKEN" "HF_HUB_OFFLINE") }}
{{- range .Values.extraEnv }}
{{- if or (hasPrefix "NPUSERVE_" .name) (has .name $ours) }}
{{- fail (printf "extraEnv: %s is the chart's own; use config or the value that sets it" .name) }}
{{- end }}
{{- end }}

{{- include "npuserve.keyChecks" . }}
{{- include "npuserve.configChecks" . }}

{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) }}
{{- fail "grpcRoute.parentRefs: a route needs a Gateway" }}
{{- end }}
{{- with .Values.service }}
{{- range $name := list "loadBalancerSourceRanges" "loadBalancerClass" }}
{{- if and (ne $.Values.service.type "LoadBalancer") (get $.Values.service $name) }}
{{- fail (printf "service.%s: service.type is %s" $name $.Values.service.type) }}
{{- end }}
{{- end }}
{{- if and .nodePort (eq .type "ClusterIP") }}
{{- fail "service.nodePort: service.type is ClusterIP" }}
{{- end }}
{{- $affinity := include "npuserve.affinitySeconds" $ | int64 }}
{{- if and $affinity (le (float64 $affinity) (float64 (default 0 $.Values.config.max_connection_age_seconds))) }}
{{- fail (printf "service.sessionAffinitySeconds: %d ends before a connection does; it must exceed config.max_connection_age_seconds" $affinity) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels and annotations that the chart sets too: YAML refuses a key that is given twice. */}}
{{- define "npuserve.keyChecks" -}}
{{- $own := printf "%s\n%s" (include "npuserve.selectorLabels" .) (include "npuserve.chartLabels" .) | fromYaml | keys }}
{{- $labels := concat $own (keys .Values.commonLabels) }}
{{- $annotations := list "kubectl.kubernetes.io/default-container" }}
{{- if eq .Values.metrics.scrape "annotations" }}
{{- $annotations = concat $annotations (list "prometheus.io/scrape" "prometheus.io/port" "prometheus.io/path") }}
{{- end }}
{{- range $check := list
    (list "commonLabels" .Values.commonLabels (concat $own (list "npuserve/metrics" "llm-d.ai/engine-type")))
    (list "podLabels" .Values.podLabels $labels)
    (list "metrics.labels" .Values.metrics.labels $labels)
    (list "rules.labels" .Values.rules.labels $labels)
    (list "dashboards.labels" .Values.dashboards.labels $labels)
    (list "podAnnotations" .Values.podAnnotations (append $annotations "checksum/config"))
    (list "gateway.smg.podAnnotations" .Values.gateway.smg.podAnnotations $annotations) }}
{{- range $key := keys (index $check 1) | sortAlpha }}
{{- if has $key (index $check 2) }}
{{- fail (printf "%s: %s is the chart's own, or one of commonLabels" (index $check 0) $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Settings that the server would refuse at its start. */}}
{{- define "npuserve.configChecks" -}}
{{- $config := .Values.config }}
{{- $kvEvents := default "off" $config.kv_events }}
{{- $low := default 0 $config.min_priority | int64 }}
{{- $high := hasKey $config "max_priority" | ternary $config.max_priority 100 | int64 }}
{{- if gt $low $high }}
{{- fail (printf "config.min_priority: %d is above config.max_priority, %d" $low $high) }}
{{- end }}
{{- if eq 1 (default 0 $config.max_model_len | int64) }}
{{- fail "config.max_model_len: 1 is not 0 or at least 2: a prompt and an answer need a token each" }}
{{- end }}
{{- if and $config.emulate_relax (not $config.emulate) }}
{{- fail "config.emulate_relax: nothing is emulated; config.emulate does" }}
{{- end }}
{{- if and $config.admin_certificates (not .Values.tls.clientCaSecretName) }}
{{- fail "config.admin_certificates: clients have certificates only with tls.clientCaSecretName" }}
{{- end }}
{{- if and (ne $kvEvents "off") (hasKey $config "prefix_cache") (not $config.prefix_cache) }}
{{- fail "config.kv_events: there are none without config.prefix_cache" }}
{{- end }}
{{- if and $config.kv_events_replay_endpoint (ne $kvEvents "zmq") }}
{{- fail "config.kv_events_replay_endpoint: replays need config.kv_events zmq" }}
{{- end }}
{{- range $name := list "otlp_endpoint" "kv_events_endpoint" "kv_events_replay_endpoint" }}
{{- if gt (default "" (get $config $name) | regexFind "^(tcp|https?)://.+" | regexFind ":[0-9]+/?$" | trimAll ":/" | int64) 65535 }}
{{- fail (printf "config.%s: the port is above 65535, got %s" $name (get $config $name)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Contradictions of a LeaderWorkerSet. */}}
{{- define "npuserve.groupChecks" -}}
{{- $parallel := int64 (default 1 .Values.config.tensor_parallel_size) }}
{{- $hosts := int64 .Values.topology.hosts }}
{{- if or (lt $parallel $hosts) (mod $parallel $hosts) }}
{{- fail (printf "config.tensor_parallel_size: %d must be a multiple of topology.hosts, %d, in [%d, 64]" $parallel $hosts $hosts) }}
{{- end }}
{{- if eq .Values.state.type "pvc" }}
{{- fail "state.type: pvc makes a StatefulSet, and topology.kind is leaderworkerset; set emptyDir or none" }}
{{- end }}
{{- if ne .Values.strategy.type "RollingUpdate" }}
{{- fail (printf "strategy.type: %s is for a Deployment, and topology.kind is leaderworkerset" .Values.strategy.type) }}
{{- end }}
{{- with .Values.topology }}
{{- $taken := merge (dict) $.Values.ports (include "npuserve.kvEventsPorts" $ | fromYaml) }}
{{- range $name, $port := $taken }}
{{- if eq (int64 $port) (int64 $.Values.topology.masterPort) }}
{{- fail (printf "topology.masterPort: %d is the port %s already" (int64 $port) $name) }}
{{- end }}
{{- end }}
{{- if and (ne $.Values.accelerator.kind "ascend") (or .hccl.bufferMegabytes .hccl.socketInterface .hccl.basePort) }}
{{- fail (printf "topology.hccl: only accelerator.kind ascend has it, not %s" $.Values.accelerator.kind) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "npuserve.gatewayChecks" -}}
{{- range $name, $secret := dict "tls" .Values.tls.secretName "apiKeys" .Values.apiKeys.secretName }}
{{- if $secret }}
{{- fail (printf "%s.secretName: gateway.kind smg reaches the pods in plaintext and without a key; set gateway.smg.%s" $name $name) }}
{{- end }}
{{- end }}
{{- with .Values.gateway.smg }}
{{- if and .service.loadBalancerSourceRanges (ne .service.type "LoadBalancer") }}
{{- fail (printf "gateway.smg.service.loadBalancerSourceRanges: gateway.smg.service.type is %s" .service.type) }}
{{- end }}
{{- $ports := dict }}
{{- range $name, $port := .ports }}
{{- with get $ports (toString $port) }}
{{- fail (printf "gateway.smg.ports.%s: %d is gateway.smg.ports.%s already" $name (int64 $port) .) }}
{{- end }}
{{- $_ := set $ports (toString $port) $name }}
{{- end }}
{{- range .extraArgs }}
{{- $flag := regexFind "^--(host|port|policy|selector|service-discovery[-a-z]*|worker-urls|api-key|tls-[-a-z]*|prometheus-(host|port)|health-check-(port|interval-secs)|shutdown-grace-period-secs)(=|$)" . | trimSuffix "=" }}
{{- if $flag }}
{{- fail (printf "gateway.smg.extraArgs: %s is the chart's own; use the value that sets it" $flag) }}
{{- end }}
{{- end }}
{{- if $.Values.production }}
{{- if not .image.digest }}
{{- fail "gateway.smg.image.digest: production needs it, since a tag can be moved to another image" }}
{{- end }}
{{- if and (not .clientsFrom) (or (not .tls.secretName) (not .apiKeys.secretName)) }}
{{- fail "gateway.smg.clientsFrom: production needs it, or gateway.smg.tls.secretName and gateway.smg.apiKeys.secretName" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
