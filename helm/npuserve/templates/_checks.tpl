{{/* Contradictions between values, each a sentence that names them and what to do. What is wrong by itself,
values.schema.json and files/formats.yaml refuse. */}}

{{- define "npuserve.checks" -}}
{{- if and .Values.tls.clientCaSecretName (not .Values.tls.secretName) }}
{{- include "npuserve.refuse" "tls.clientCaSecretName: clients' certificates need TLS; set tls.secretName too" }}
{{- end }}
{{- if and .Values.helmTest.clientCertSecretName (not .Values.tls.clientCaSecretName) }}
{{- include "npuserve.refuse" "helmTest.clientCertSecretName: the server asks for no certificate; set tls.clientCaSecretName, or remove it" }}
{{- end }}
{{- if and .Values.helmTest.apiKeySecretName (not .Values.apiKeys.secretName) }}
{{- include "npuserve.refuse" "helmTest.apiKeySecretName: the server asks for no key; set apiKeys.secretName, or remove it" }}
{{- end }}
{{- if and .Values.helmTest.caSecretName (not .Values.tls.secretName) (not .Values.gateway.smg.tls.secretName) }}
{{- include "npuserve.refuse" "helmTest.caSecretName: nothing serves TLS; set tls.secretName or gateway.smg.tls.secretName, or remove it" }}
{{- end }}

{{- if .Values.gateway.enabled }}
{{- if and (not .Values.gateway.from) (eq .Values.gateway.kind "external") }}
{{- include "npuserve.refuse" "gateway.from: is empty, so the network policy would admit nobody; list the peers (NetworkPolicyPeer) that are the gateway's pods" }}
{{- end }}
{{- if not .Values.networkPolicy.enabled }}
{{- include "npuserve.refuse" "networkPolicy.enabled: gateway.enabled needs it, since others could call beside the gateway; set it to true" }}
{{- end }}
{{- if .Values.networkPolicy.grpcFrom }}
{{- include "npuserve.refuse" "networkPolicy.grpcFrom: gateway.enabled admits gateway.from alone; move the peers there" }}
{{- end }}
{{- end }}
{{- if include "npuserve.smg" . }}
{{- include "npuserve.gatewayChecks" . }}
{{- end }}
{{- with .Values.inferencePool }}
{{- if and .enabled $.Values.tls.secretName }}
{{- include "npuserve.refuse" "inferencePool.enabled: its gateway reaches the pods in plaintext (h2c), and tls.secretName is set; remove one of them" }}
{{- end }}
{{- if and .enabled (not .endpointPicker.name) }}
{{- include "npuserve.refuse" "inferencePool.endpointPicker.name: is empty; set the name of the endpoint picker's Service in this namespace" }}
{{- end }}
{{- if and .httpRoute.enabled (not .enabled) }}
{{- include "npuserve.refuse" "inferencePool.httpRoute.enabled: it leads to the pool of inferencePool.enabled; set that to true" }}
{{- end }}
{{- if and .httpRoute.enabled (not .httpRoute.parentRefs) }}
{{- include "npuserve.refuse" "inferencePool.httpRoute.parentRefs: is empty, and a route needs a Gateway, such as {name: inference}" }}
{{- end }}
{{- end }}
{{- include "npuserve.modelChecks" . }}
{{- if .Values.production }}
{{- if not .Values.gateway.enabled }}
{{- range $name, $secret := dict "tls" .Values.tls.secretName "apiKeys" .Values.apiKeys.secretName }}
{{- if not $secret }}
{{- include "npuserve.refuse" (printf "%s.secretName: production needs tls.secretName and apiKeys.secretName, or gateway.enabled" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.model }}
{{- if and (eq .source "init") (not .init.command) (not .hub.revision) }}
{{- include "npuserve.refuse" "model.hub.revision: production needs it, so that all replicas have the same model; set a commit of the hub" }}
{{- end }}
{{- end }}
{{- if not .Values.image.digest }}
{{- include "npuserve.refuse" "image.digest: production needs it, since a tag can be moved to another image; `docker buildx imagetools inspect IMAGE` prints it" }}
{{- end }}
{{- end }}
{{- range $name, $image := dict "image" .Values.image "gateway.smg.image" .Values.gateway.smg.image }}
{{- if and (eq (default "" $image.tag) "latest") (not $image.digest) }}
{{- include "npuserve.refuse" (printf "%s.tag: \"latest\" names another image tomorrow, so replicas could differ; set a version such as %s, or %s.digest" $name $.Chart.AppVersion $name) }}
{{- end }}
{{- end }}

{{- with .Values.termination }}
{{- $least := include "npuserve.leastGrace" $ | int64 }}
{{- if and .gracePeriodSeconds (lt (int64 .gracePeriodSeconds) $least) }}
{{- include "npuserve.refuse" (printf "termination.gracePeriodSeconds: %d would kill running streams; set at least preStopSeconds + drainSeconds + 20, which are %d, or null" (int64 .gracePeriodSeconds) $least) }}
{{- end }}
{{- end }}

{{- with .Values.ports }}
{{- if eq (int64 .grpc) (int64 .metrics) }}
{{- include "npuserve.refuse" (printf "ports.metrics: %d is ports.grpc already; set another port from 1024 to 65535" (int64 .metrics)) }}
{{- end }}
{{- if has (int64 .health) (list (int64 .grpc) (int64 .metrics)) }}
{{- include "npuserve.refuse" (printf "ports.health: %d is ports.grpc or ports.metrics already; set another port from 1024 to 65535" (int64 .health)) }}
{{- end }}
{{- end }}

{{- $published := include "npuserve.kvEventsPorts" . | fromYaml }}
{{- range $name, $port := $published }}
{{- range $other, $taken := $.Values.ports }}
{{- if eq (int64 $port) (int64 $taken) }}
{{- include "npuserve.refuse" (printf "ports.%s: %d is the port of KV events (%s) already; set another one" $other (int64 $port) $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq 1 (values $published | uniq | len | sub (len $published)) }}
{{- include "npuserve.refuse" "config.kv_events_replay_endpoint: has the port of config.kv_events_endpoint; set another one" }}
{{- end }}
{{- if and $published .Values.networkPolicy.enabled (not .Values.networkPolicy.kvEventsFrom) }}
{{- include "npuserve.refuse" "networkPolicy.kvEventsFrom: is empty, so nobody could read the KV events of config.kv_events zmq; list the peers that may. The events contain prompts and answers" }}
{{- end }}
{{- if and .Values.networkPolicy.kvEventsFrom (not $published) }}
{{- include "npuserve.refuse" "networkPolicy.kvEventsFrom: nothing is published; set config.kv_events zmq and a config.kv_events_endpoint of a wildcard, such as tcp://*:5557, or remove it" }}
{{- end }}

{{- with .Values.accelerator }}
{{- if and (eq .kind "cpu") (or .resourceName .extraResources .hostDriver .claimTemplate) }}
{{- include "npuserve.refuse" "accelerator.resourceName, extraResources, hostDriver and claimTemplate are of a device, and accelerator.kind is cpu; set it to ascend or cuda, or remove them" }}
{{- end }}
{{- if and .claimTemplate .extraResources }}
{{- include "npuserve.refuse" "accelerator.claimTemplate: the claim names the devices, so that accelerator.extraResources has no effect; remove it, or the claim" }}
{{- end }}
{{- if and .claimTemplate (not (semverCompare ">=1.34.0-0" $.Capabilities.KubeVersion.Version)) }}
{{- include "npuserve.refuse" "accelerator.claimTemplate: needs Kubernetes 1.34 or newer; use the device plugin's resource (accelerator.resourceName)" }}
{{- end }}
{{- if and .hostDriver (ne .kind "ascend") }}
{{- include "npuserve.refuse" (printf "accelerator.hostDriver: only accelerator.kind ascend has it, not %s; remove it" .kind) }}
{{- end }}
{{- $name := include "npuserve.resourceName" $ }}
{{- range $part := list "limits" "requests" }}
{{- if hasKey (default dict (get $.Values.resources $part)) (default "-" $name) }}
{{- include "npuserve.refuse" (printf "resources.%s: %s is requested by accelerator.count; set the number there" $part $name) }}
{{- end }}
{{- end }}
{{- if hasKey .extraResources (default "-" $name) }}
{{- include "npuserve.refuse" (printf "accelerator.extraResources: %s is requested by accelerator.count; set the number there" $name) }}
{{- end }}
{{- $ranks := include "npuserve.ranks" $ | int64 }}
{{- if and (ne .kind "cpu") (gt $ranks (int64 .count)) }}
{{- include "npuserve.refuse" (printf "config.tensor_parallel_size: %d ranks in a pod, and accelerator.count is %d; a rank needs a device, so make them equal" $ranks (int64 .count)) }}
{{- end }}
{{- if and (ne .kind "cpu") (lt $ranks (int64 .count)) }}
{{- include "npuserve.refuse" (printf "accelerator.count: %d devices, of which config.tensor_parallel_size leaves %d to compute in a pod; make them equal, or raise replicaCount" (int64 .count) $ranks) }}
{{- end }}
{{- $speculate := default "off" $.Values.config.speculate }}
{{- if and (ne .kind "cpu") (not (has $speculate (list "off" "auto" "suffix"))) }}
{{- $obstacle := "" }}
{{- if eq "cpu" (default "same" $.Values.config.prefill_device) }}
{{- $obstacle = "config.prefill_device cpu" }}
{{- else if eq "off" (default "auto" $.Values.config.capture) }}
{{- else if eq "false" (toString $.Values.config.capture_chunks) }}
{{- $obstacle = "config.capture_chunks false" }}
{{- else if and (eq .kind "ascend") (eq "int8" (default "auto" $.Values.config.kv_cache_dtype)) }}
{{- $obstacle = "config.kv_cache_dtype int8" }}
{{- end }}
{{- with $obstacle }}
{{- include "npuserve.refuse" (printf "config.speculate: %s drafts with a model, which a device cannot with %s; set auto or off, or remove that" $speculate .) }}
{{- end }}
{{- end }}
{{- if and (eq .kind "cpu") (ne 1 (int .count)) }}
{{- include "npuserve.refuse" (printf "accelerator.count: %d devices, and accelerator.kind cpu computes on none; set accelerator.kind cuda or ascend, or remove it" (int64 .count)) }}
{{- end }}
{{- end }}
{{- if include "npuserve.groups" . }}
{{- include "npuserve.groupChecks" . }}
{{- end }}

{{- with .Values.strategy }}
{{- if and (eq .type "RollingUpdate") (eq (toString .maxSurge) "0" "0%") (eq (toString .maxUnavailable) "0" "0%") }}
{{- include "npuserve.refuse" "strategy: with maxSurge 0 and maxUnavailable 0 no rollout could begin; set one of them to 1" }}
{{- end }}
{{- end }}

{{- with .Values.autoscaling }}
{{- if and (ne .kind "none") (gt (int64 .minReplicas) (int64 .maxReplicas)) }}
{{- include "npuserve.refuse" (printf "autoscaling.minReplicas: %d is above autoscaling.maxReplicas, %d; raise that or lower this" (int64 .minReplicas) (int64 .maxReplicas)) }}
{{- end }}
{{- if and (ne .kind "none") (eq $.Values.metrics.scrape "none") }}
{{- include "npuserve.refuse" (printf "metrics.scrape: none leaves autoscaling.kind %s nothing to scale by; set annotations or serviceMonitor" .kind) }}
{{- end }}
{{- end }}

{{- with .Values.autoscaling }}
{{- if and (eq .kind "keda") (not .keda.prometheusAddress) }}
{{- include "npuserve.refuse" "autoscaling.keda.prometheusAddress: is empty, and KEDA asks Prometheus for the load; set its address, such as http://prometheus-operated.monitoring:9090" }}
{{- end }}
{{- end }}

{{- with .Values.metrics }}
{{- if and .scrapeTimeout (gt (include "npuserve.milliseconds" .scrapeTimeout | int64) (include "npuserve.milliseconds" .interval | int64)) }}
{{- include "npuserve.refuse" (printf "metrics.scrapeTimeout: %s is above metrics.interval, %s; set at most that" .scrapeTimeout .interval) }}
{{- end }}
{{- end }}

{{- $claims := dict }}
{{- if and (eq .Values.cache.type "emptyDir") .Values.cache.claimName }}
{{- include "npuserve.refuse" "cache.claimName: is for cache.type pvc, and that is emptyDir; set cache.type pvc, or remove it" }}
{{- end }}
{{- if and (eq .Values.cache.type "pvc") (not .Values.cache.claimName) }}
{{- $_ := set $claims "cache" .Values.cache }}
{{- end }}
{{- if and (eq .Values.model.source "init") .Values.model.init.create }}
{{- $_ := set $claims "model.init" .Values.model.init }}
{{- end }}
{{- range $name, $claim := $claims }}
{{- if eq $claim.accessMode "ReadWriteOnce" }}
{{- if or (ne $.Values.autoscaling.kind "none") (gt (int64 $.Values.replicaCount) 1) }}
{{- include "npuserve.refuse" (printf "%s.accessMode: ReadWriteOnce serves one replica; set ReadWriteMany or replicaCount 1, or leave the claim out" $name) }}
{{- end }}
{{- if and (eq (include "npuserve.workload" $) "Deployment") (eq $.Values.strategy.type "RollingUpdate") (not (has (toString $.Values.strategy.maxSurge) (list "0" "0%"))) }}
{{- include "npuserve.refuse" (printf "%s.accessMode: with ReadWriteOnce a new pod can wait for the old one's volume for ever; set strategy.type Recreate" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.model.init.create .Values.model.init.claimName }}
{{- include "npuserve.refuse" "model.init.create: creates a claim, and model.init.claimName names one that exists; remove one of them" }}
{{- end }}

{{- if hasKey .Values "replicas" }}
{{- include "npuserve.refuse" "replicas: is replicaCount now; rename it" }}
{{- end }}
{{- if eq .Values.metrics.scrape "podMonitor" }}
{{- include "npuserve.refuse" "metrics.scrape: podMonitor is serviceMonitor now, which scrapes the same pods; set serviceMonitor" }}
{{- end }}
{{- if hasKey .Values.image "pullSecrets" }}
{{- include "npuserve.refuse" "image.pullSecrets: is imagePullSecrets now, a list of maps such as {name: registry}; rename it" }}
{{- end }}
{{- if hasKey .Values "state" }}
{{- include "npuserve.refuse" "state: removed: a stream ends with its server. Remove state; clients send such a request again." }}
{{- end }}

{{- if and (eq .Values.topologySpread.whenUnsatisfiable "DoNotSchedule") (ne .Values.accelerator.kind "cpu") (not .Values.nodeSelector) (not (dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" .Values.affinity)) }}
{{- include "npuserve.refuse" "topologySpread.whenUnsatisfiable: DoNotSchedule counts nodes without a device too, and allows one replica on each other node; set nodeSelector, or affinity.nodeAffinity with requiredDuringSchedulingIgnoredDuringExecution" }}
{{- end }}

{{- $ours := concat (include "npuserve.groups" . | empty | ternary list (list "MASTER_ADDR" "MASTER_PORT" "RANK" "WORLD_SIZE" "HCCL_BUFFSIZE" "HCCL_SOCKET_IFNAME" "HCCL_IF_BASE_PORT")) (list "HOME" "TMPDIR" "XDG_CACHE_HOME" "HF_HOME" "HF_ENDPOINT" "HF_TOKEN" "HF_HUB_OFFLINE") }}
{{- range .Values.extraEnv }}
{{- if or (hasPrefix "NPUSERVE_" .name) (has .name $ours) }}
{{- include "npuserve.refuse" (printf "extraEnv: %s is the chart's own; use config or the value that sets it" .name) }}
{{- end }}
{{- end }}

{{- include "npuserve.resourceChecks" . }}
{{- include "npuserve.userChecks" . }}
{{- include "npuserve.keyChecks" . }}
{{- include "npuserve.configChecks" . }}

{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) }}
{{- include "npuserve.refuse" "grpcRoute.parentRefs: is empty, and a route needs a Gateway, such as {name: public}" }}
{{- end }}
{{- with .Values.service }}
{{- range $name := list "loadBalancerSourceRanges" "loadBalancerClass" }}
{{- if and (ne $.Values.service.type "LoadBalancer") (get $.Values.service $name) }}
{{- include "npuserve.refuse" (printf "service.%s: is for service.type LoadBalancer, not %s; set that type, or remove it" $name $.Values.service.type) }}
{{- end }}
{{- end }}
{{- if and .externalTrafficPolicy (eq .type "ClusterIP") }}
{{- include "npuserve.refuse" "service.externalTrafficPolicy: a service of type ClusterIP has no external traffic; set service.type NodePort or LoadBalancer, or remove it" }}
{{- end }}
{{- if and .nodePort (eq .type "ClusterIP") }}
{{- include "npuserve.refuse" "service.nodePort: a service of type ClusterIP has none; set service.type NodePort or LoadBalancer, or remove it" }}
{{- end }}
{{- $affinity := int64 .sessionAffinitySeconds }}
{{- if and $affinity (ne $.Values.autoscaling.kind "none") }}
{{- include "npuserve.refuse" (printf "service.sessionAffinitySeconds: %d would keep clients at their pods, so that pods which autoscaling.kind %s adds get no load; set 0. docs/operations.md, Resuming streams, says how clients return to their server" $affinity $.Values.autoscaling.kind) }}
{{- end }}
{{- if and $affinity (le (float64 $affinity) (float64 (default 0 $.Values.config.max_connection_age_seconds))) }}
{{- include "npuserve.refuse" (printf "service.sessionAffinitySeconds: %d ends before a connection does; set 0, or more than config.max_connection_age_seconds, %v" $affinity $.Values.config.max_connection_age_seconds) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Sources of the model that contradict each other. The devices' presets set hub.name, so it may stand beside pvc. */}}
{{- define "npuserve.modelChecks" -}}
{{- with .Values.model }}
{{- $served := eq .source "builtin" | ternary "the small story teller in the image" (printf "%s of the hub" (default "another model" .hub.name)) }}
{{- range $name := list "name" "revision" }}
{{- if and (eq $.Values.model.source "builtin") (get $.Values.model.hub $name) }}
{{- include "npuserve.refuse" (printf "model.hub.%s: is set to %s, but model.source builtin serves %s; set model.source init, with which an init container downloads the model, or remove model.hub.%s" $name (get $.Values.model.hub $name) $served $name) }}
{{- end }}
{{- end }}
{{- if and (eq .source "pvc") .hub.revision }}
{{- include "npuserve.refuse" (printf "model.hub.revision: %s chooses nothing on a claim (model.source pvc); name the revision's folder in model.pvc.path, or set model.source init" .hub.revision) }}
{{- end }}
{{- if eq .source "hub" }}
{{- include "npuserve.refuse" "model.source: hub is init now, with which an init container downloads the model before the server starts; set init" }}
{{- end }}
{{- if and (ne .source "pvc") (or .pvc.claimName .pvc.path) }}
{{- include "npuserve.refuse" (printf "model.pvc: claimName or path is set, but model.source %s serves %s; set model.source pvc to serve the claim's folder, or remove them" .source $served) }}
{{- end }}
{{- if and (ne .source "image") .image.reference }}
{{- include "npuserve.refuse" (printf "model.image.reference: is set, but model.source %s serves %s; set model.source image to serve the image's files, or remove it" .source $served) }}
{{- end }}
{{- if and (eq .source "image") (not .image.reference) }}
{{- include "npuserve.refuse" "model.image.reference: is empty; model.source image needs an image that holds the model, such as registry.example.com/qwen3-8b@sha256:…" }}
{{- end }}
{{- if and (eq .source "image") (not (semverCompare ">=1.33.0-0" $.Capabilities.KubeVersion.Version)) }}
{{- include "npuserve.refuse" "model.source: image needs Kubernetes 1.33 or newer, which mounts images as volumes; set model.source init or pvc" }}
{{- end }}
{{- if and $.Values.production (eq .source "image") (not (contains "@sha256:" .image.reference)) }}
{{- include "npuserve.refuse" (printf "production needs model.image.reference with a digest (@sha256:…), since the tag of %s can be moved to another image" .image.reference) }}
{{- end }}
{{- range $name := list "command" "claimName" "create" }}
{{- if and (ne $.Values.model.source "init") (get $.Values.model.init $name) }}
{{- include "npuserve.refuse" (printf "model.init.%s: is for model.source init, and that is %s; set model.source init, or remove it" $name $.Values.model.source) }}
{{- end }}
{{- end }}
{{- if and (eq .source "pvc") (not .pvc.claimName) }}
{{- include "npuserve.refuse" "model.pvc.claimName: is empty; model.source pvc needs the name of the claim that holds the model" }}
{{- end }}
{{- if and (not .hub.name) (eq .source "init") (not .init.command) }}
{{- include "npuserve.refuse" "model.hub.name: is empty; model.source init needs a name on the hub, such as Qwen/Qwen3-0.6B" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Requests above their limits, and devices of a pod that computes on none. */}}
{{- define "npuserve.resourceChecks" -}}
{{- $all := dict "resources" (include "npuserve.resources" . | fromYaml) "model.init.resources" .Values.model.init.resources "gateway.smg.resources" .Values.gateway.smg.resources }}
{{- range $path, $resources := $all }}
{{- $limits := default dict $resources.limits }}
{{- range $name, $request := default dict $resources.requests }}
{{- if hasKey $limits $name }}
{{- $limit := get $limits $name }}
{{- if gt (include "npuserve.quantity" $request | float64) (include "npuserve.quantity" $limit | float64) }}
{{- include "npuserve.refuse" (printf "%s.requests.%s: %v is above %s.limits.%s, %v; set a request up to its limit" $path $name $request $path $name $limit) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $part := list "limits" "requests" }}
{{- range $name := keys (default dict (get $.Values.resources $part)) | sortAlpha }}
{{- if and (eq $.Values.accelerator.kind "cpu") (regexMatch "(?i)((^|[-./_])(gpu|npu|tpu)|ascend|nvidia)" $name) }}
{{- include "npuserve.refuse" (printf "resources.%s: %s is a device, and accelerator.kind cpu computes on none; set accelerator.kind cuda or ascend, whose accelerator.count requests it" $part $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A quantity of Kubernetes, such as 500m or 16Gi, as a number. */}}
{{- define "npuserve.quantity" -}}
{{- $unit := regexFind "[a-zA-Z]*$" (toString .) }}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 }}
{{- mulf (trimSuffix $unit (toString .) | float64) (get $units $unit | float64) }}
{{- end }}

{{/* A size of the server's settings as a number: K and KiB are 1024 bytes, KB is 1000. */}}
{{- define "npuserve.bytes" -}}
{{- $size := kindIs "string" . | ternary (toString .) (printf "%.0f" (float64 .)) }}
{{- include "npuserve.quantity" (regexMatch "[KMGT]$" $size | ternary (printf "%si" $size) (trimSuffix "B" $size | replace "K" "k" | replace "ki" "Ki")) }}
{{- end }}

{{/* Root as the user of containers that must not run as root: the kubelet would not start them. */}}
{{- define "npuserve.userChecks" -}}
{{- $contexts := dict "podSecurityContext" (include "npuserve.podSecurityContext" . | fromYaml) "securityContext" (default dict .Values.securityContext) }}
{{- $user := "" }}
{{- $isNonRoot := false }}
{{- range $name := list "podSecurityContext" "securityContext" }}
{{- $context := get $contexts $name }}
{{- if hasKey $context "runAsUser" }}
{{- $user = eq 0 (int64 $context.runAsUser) | ternary $name "" }}
{{- end }}
{{- if hasKey $context "runAsNonRoot" }}
{{- $isNonRoot = $context.runAsNonRoot }}
{{- end }}
{{- end }}
{{- if and $user $isNonRoot }}
{{- include "npuserve.refuse" (printf "%s.runAsUser: 0 is root, and with runAsNonRoot true the kubelet would not start the containers; set another user, such as 10001" $user) }}
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
    (list "podAnnotations" .Values.podAnnotations (append $annotations "npuserve/config"))
    (list "gateway.smg.podAnnotations" .Values.gateway.smg.podAnnotations $annotations) }}
{{- range $key := keys (index $check 1) | sortAlpha }}
{{- if has $key (index $check 2) }}
{{- include "npuserve.refuse" (printf "%s: %s is the chart's own, or one of commonLabels; remove it" (index $check 0) $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Settings that the server would refuse at its start. */}}
{{- define "npuserve.configChecks" -}}
{{- $config := .Values.config }}
{{- $derived := dict "host" "host" "port" "ports.grpc" "metrics_host" "networkPolicy.metricsFrom" "metrics_port" "ports.metrics" "health_port" "ports.health" "openai_port" "gateway.kind" "openai_api_keys" "gateway.smg.apiKeys.secretName" "model" "model.source" "served_name" "model.servedName" "device" "accelerator.kind" "drain_seconds" "termination.drainSeconds" "tls_cert" "tls.secretName" "tls_key" "tls.secretName" "tls_client_ca" "tls.clientCaSecretName" "api_keys" "apiKeys.secretName" }}
{{- if hasKey $config "state_folder" }}
{{- include "npuserve.refuse" "config.state_folder: removed: a stream ends with its server. Remove the setting; clients send such a request again" }}
{{- end }}
{{- range $name := keys $config | sortAlpha }}
{{- with get $derived $name }}
{{- include "npuserve.refuse" (printf "config.%s: the chart derives it from another value; remove it, and set %s instead" $name .) }}
{{- end }}
{{- end }}
{{- $kvEvents := default "off" $config.kv_events }}
{{- $low := default 0 $config.min_priority | int64 }}
{{- $high := hasKey $config "max_priority" | ternary $config.max_priority 100 | int64 }}
{{- if gt $low $high }}
{{- include "npuserve.refuse" (printf "config.min_priority: %d is above config.max_priority, %d; raise that or lower this" $low $high) }}
{{- end }}
{{- if eq 1 (default 0 $config.max_model_len | int64) }}
{{- include "npuserve.refuse" "config.max_model_len: 1 is not 0 (the model's) or at least 2: a prompt and an answer need a token each" }}
{{- end }}
{{- if and $config.emulate_relax (not $config.emulate) }}
{{- include "npuserve.refuse" "config.emulate_relax: nothing is emulated; set config.emulate true, or remove it" }}
{{- end }}
{{- if and $config.admin_certificates (not .Values.tls.clientCaSecretName) }}
{{- include "npuserve.refuse" "config.admin_certificates: clients have certificates only with tls.clientCaSecretName; set it, or remove this" }}
{{- end }}
{{- if and (ne $kvEvents "off") (hasKey $config "prefix_cache") (not $config.prefix_cache) }}
{{- include "npuserve.refuse" "config.kv_events: there are none without config.prefix_cache; set that to true, or this to \"off\"" }}
{{- end }}
{{- if and $config.kv_offload_memory (hasKey $config "prefix_cache") (not $config.prefix_cache) }}
{{- include "npuserve.refuse" "config.kv_offload_memory: there are no prefixes to keep without config.prefix_cache; set that to true, or remove this" }}
{{- end }}
{{- if and $config.kv_store_secret (not $config.kv_store) }}
{{- include "npuserve.refuse" "config.kv_store_secret: there is no store; set config.kv_store, or remove this" }}
{{- end }}
{{- if and $config.kv_store (not $config.kv_offload_memory) }}
{{- include "npuserve.refuse" "config.kv_store: needs config.kv_offload_memory, through which blocks are saved and loaded" }}
{{- end }}
{{- if and $config.kv_store (not $config.kv_store_secret) }}
{{- include "npuserve.refuse" "config.kv_store_secret: is missing; config.kv_store needs the path of a secret's file, which extraVolumes and extraVolumeMounts mount" }}
{{- end }}
{{- if and $config.kv_store (gt (int64 (default 1 $config.tensor_parallel_size)) 1) }}
{{- include "npuserve.refuse" "config.kv_store: is not possible with a config.tensor_parallel_size above 1" }}
{{- end }}
{{- if and $config.kv_events_replay_endpoint (ne $kvEvents "zmq") }}
{{- include "npuserve.refuse" "config.kv_events_replay_endpoint: replays need config.kv_events zmq; set that, or remove this" }}
{{- end }}
{{- $limit := dig "limits" "memory" "" .Values.resources }}
{{- range $name := eq .Values.accelerator.kind "cpu" | ternary (list "kv_cache_memory") (list "kv_offload_memory") }}
{{- $size := default 0 (get $config $name) }}
{{- if kindIs "float64" $size }}
{{- $size = int64 $size }}
{{- end }}
{{- if and $limit (gt (include "npuserve.bytes" $size | float64) (include "npuserve.quantity" $limit | float64)) }}
{{- include "npuserve.refuse" (printf "config.%s: %v is above resources.limits.memory, %v, which holds the rest of the server too; raise that or lower this" $name $size $limit) }}
{{- end }}
{{- end }}
{{- range $name := list "otlp_endpoint" "kv_events_endpoint" "kv_events_replay_endpoint" "kv_store" }}
{{- if gt (default "" (get $config $name) | regexFind (eq $name "kv_store" | ternary ".+" "^(tcp|https?)://.+") | regexFind ":[0-9]+/?$" | trimAll ":/" | int64) 65535 }}
{{- include "npuserve.refuse" (printf "config.%s: the port of %s is above 65535" $name (get $config $name)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Contradictions of a LeaderWorkerSet. */}}
{{- define "npuserve.groupChecks" -}}
{{- $parallel := int64 (default 1 .Values.config.tensor_parallel_size) }}
{{- $hosts := int64 .Values.topology.hosts }}
{{- if or (lt $parallel $hosts) (mod $parallel $hosts) }}
{{- include "npuserve.refuse" (printf "config.tensor_parallel_size: %d must be a multiple of topology.hosts, %d, in [%d, 64]" $parallel $hosts $hosts) }}
{{- end }}
{{- if ne .Values.strategy.type "RollingUpdate" }}
{{- include "npuserve.refuse" (printf "strategy.type: %s is for a Deployment, and topology.kind is leaderworkerset; set RollingUpdate" .Values.strategy.type) }}
{{- end }}
{{- with .Values.topology }}
{{- $taken := merge (dict) $.Values.ports (include "npuserve.kvEventsPorts" $ | fromYaml) }}
{{- range $name, $port := $taken }}
{{- if eq (int64 $port) (int64 $.Values.topology.masterPort) }}
{{- include "npuserve.refuse" (printf "topology.masterPort: %d is the port %s already; set another port from 1024 to 65535" (int64 $port) $name) }}
{{- end }}
{{- end }}
{{- if and (ne $.Values.accelerator.kind "ascend") (or .hccl.bufferMegabytes .hccl.socketInterface .hccl.basePort) }}
{{- include "npuserve.refuse" (printf "topology.hccl: only accelerator.kind ascend has it, not %s; remove it" $.Values.accelerator.kind) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "npuserve.gatewayChecks" -}}
{{- range $name, $secret := dict "tls" .Values.tls.secretName "apiKeys" .Values.apiKeys.secretName }}
{{- if $secret }}
{{- include "npuserve.refuse" (printf "%s.secretName: gateway.kind smg reaches the pods in plaintext and without a key; set gateway.smg.%s" $name $name) }}
{{- end }}
{{- end }}
{{- with .Values.gateway.smg }}
{{- if and .service.loadBalancerSourceRanges (ne .service.type "LoadBalancer") }}
{{- include "npuserve.refuse" (printf "gateway.smg.service.loadBalancerSourceRanges: is for gateway.smg.service.type LoadBalancer, not %s; set that type, or remove it" .service.type) }}
{{- end }}
{{- $ports := dict }}
{{- range $name, $port := .ports }}
{{- with get $ports (toString $port) }}
{{- include "npuserve.refuse" (printf "gateway.smg.ports.%s: %d is gateway.smg.ports.%s already; set another port from 1024 to 65535" $name (int64 $port) .) }}
{{- end }}
{{- $_ := set $ports (toString $port) $name }}
{{- end }}
{{- range .extraArgs }}
{{- $flag := regexFind "^--(host|port|policy|selector|service-discovery[-a-z]*|worker-urls|api-key|tls-[-a-z]*|prometheus-(host|port)|health-check-(port|interval-secs)|shutdown-grace-period-secs)(=|$)" . | trimSuffix "=" }}
{{- if $flag }}
{{- include "npuserve.refuse" (printf "gateway.smg.extraArgs: %s is the chart's own; use the value that sets it" $flag) }}
{{- end }}
{{- end }}
{{- if $.Values.production }}
{{- if not .image.digest }}
{{- include "npuserve.refuse" "gateway.smg.image.digest: production needs it, since a tag can be moved to another image; `docker buildx imagetools inspect IMAGE` prints it" }}
{{- end }}
{{- if and (not .clientsFrom) (or (not .tls.secretName) (not .apiKeys.secretName)) }}
{{- include "npuserve.refuse" "gateway.smg.clientsFrom: production needs it, or gateway.smg.tls.secretName and gateway.smg.apiKeys.secretName" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
