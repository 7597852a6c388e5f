{{/* Names and labels. */}}

{{- define "npuserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "npuserve.fullname" -}}
{{- $name := include "npuserve.name" . }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "npuserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "npuserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end }}

{{/* Labels of the pods that serve gRPC and metrics: all of the server, or the leaders of its groups. */}}
{{- define "npuserve.servingLabels" -}}
{{ include "npuserve.selectorLabels" . }}
{{- if include "npuserve.groups" . }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "npuserve.testLabels" -}}
app.kubernetes.io/name: {{ include "npuserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end }}

{{- define "npuserve.gatewaySelectorLabels" -}}
app.kubernetes.io/name: {{ include "npuserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* Labels of the chart's objects, without those of the values. */}}
{{- define "npuserve.chartLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: npuserve
{{- end }}

{{- define "npuserve.labels" -}}
{{ include "npuserve.chartLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "npuserve.serverLabels" -}}
{{ include "npuserve.selectorLabels" . }}
{{ include "npuserve.labels" . }}
{{- end }}

{{- define "npuserve.gatewayLabels" -}}
{{ include "npuserve.gatewaySelectorLabels" . }}
{{ include "npuserve.labels" . }}
{{- end }}

{{- define "npuserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "npuserve.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "npuserve.image" -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion .Values.accelerator.kind) .Values.image.tag }}
{{- include "npuserve.imageName" (dict "root" . "image" .Values.image "tag" $tag) }}
{{- end }}

{{/* Name of an image with its registry, and with its digest or the given tag. */}}
{{- define "npuserve.imageName" -}}
{{- with .root.Values.global.imageRegistry }}
{{- printf "%s/" . }}
{{- end }}
{{- .image.repository }}
{{- .image.digest | empty | ternary (printf ":%s" .tag) (printf "@%s" .image.digest) }}
{{- end }}

{{/* Kind of the object that owns the server's pods. */}}
{{- define "npuserve.workload" -}}
{{- include "npuserve.groups" . | empty | ternary "Deployment" "LeaderWorkerSet" }}
{{- end }}

{{/* The workload as the target of an autoscaler. */}}
{{- define "npuserve.scaleTarget" -}}
apiVersion: {{ include "npuserve.groups" . | empty | ternary "apps/v1" "leaderworkerset.x-k8s.io/v1" }}
kind: {{ include "npuserve.workload" . }}
name: {{ include "npuserve.fullname" . | quote }}
{{- end }}

{{/* Whether a replica is a group of pods. */}}
{{- define "npuserve.groups" -}}
{{- if eq .Values.topology.kind "leaderworkerset" }}yes{{ end }}
{{- end }}

{{/* Number of ranks in a pod. */}}
{{- define "npuserve.ranks" -}}
{{- $hosts := include "npuserve.groups" . | empty | ternary 1 .Values.topology.hosts }}
{{- div (default 1 .Values.config.tensor_parallel_size) $hosts }}
{{- end }}

{{/* What follows from the values. */}}

{{- define "npuserve.resourceName" -}}
{{- $usual := dict "ascend" "huawei.com/Ascend910" "cuda" "nvidia.com/gpu" }}
{{- default (get $usual .Values.accelerator.kind) .Values.accelerator.resourceName }}
{{- end }}

{{- define "npuserve.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.accelerator.claimTemplate }}
{{- $_ := set $resources "claims" (list (dict "name" "devices")) }}
{{- else if ne .Values.accelerator.kind "cpu" }}
{{- $limits := default dict $resources.limits }}
{{- $_ := set $limits (include "npuserve.resourceName" .) .Values.accelerator.count }}
{{- $_ := set $resources "limits" (merge $limits .Values.accelerator.extraResources) }}
{{- end }}
{{- $requests := default dict $resources.requests }}
{{- $disk := include "npuserve.modelVolume" . }}
{{- if and $disk (not (hasKey $requests "ephemeral-storage")) }}
{{- $_ := set $resources "requests" (merge (dict "ephemeral-storage" $disk) $requests) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Size of the volume on the node's disk to which a pod downloads its model. Empty: it downloads none, or to a claim. */}}
{{- define "npuserve.modelVolume" -}}
{{- if and (eq .Values.model.source "init") (not (include "npuserve.modelClaim" .)) }}
{{- .Values.model.init.size }}
{{- end }}
{{- end }}

{{/* Beyond the drain: what the supervisor gives its front ends (7 s) and its engine (10 s) to end, and 3 s. */}}
{{- define "npuserve.leastGrace" -}}
{{- add .Values.termination.preStopSeconds .Values.termination.drainSeconds 20 }}
{{- end }}

{{- define "npuserve.grace" -}}
{{- default (include "npuserve.leastGrace" .) .Values.termination.gracePeriodSeconds | int64 }}
{{- end }}

{{/* The folder that the server is given; none: the built-in model. */}}
{{- define "npuserve.model" -}}
{{- with .Values.model }}
{{- if eq .source "image" }}
{{- list "/models" .image.path | join "/" | trimSuffix "/" }}
{{- else if eq .source "pvc" }}
{{- list "/models" .pvc.path | join "/" | trimSuffix "/" }}
{{- else if eq .source "init" }}
{{- printf "/models/%s" (include "npuserve.fetched" $) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Folder of model.source init on its volume: one for each model and revision, and for each command of the operator. */}}
{{- define "npuserve.fetched" -}}
{{- with .Values.model }}
{{- $name := default "model" .hub.name | replace "/" "--" }}
{{- $revision := default "main" .hub.revision | replace "/" "--" }}
{{- $command := "" }}
{{- if .init.command }}
{{- $command = list .init.image .init.command .init.env | toJson | sha256sum | trunc 8 | printf "-%s" }}
{{- end }}
{{- printf "%s/%s%s" $name $revision $command }}
{{- end }}
{{- end }}

{{/* A duration such as 90s in milliseconds. */}}
{{- define "npuserve.milliseconds" -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000) (regexFind "[a-z]+$" .)) }}
{{- end }}

{{/* Name of the claim of model.source init; empty: a volume of the pod. */}}
{{- define "npuserve.modelClaim" -}}
{{- with .Values.model.init }}
{{- default (.create | ternary (printf "%s-models" (include "npuserve.fullname" $)) "") .claimName }}
{{- end }}
{{- end }}

{{- define "npuserve.servedName" -}}
{{- with .Values.model }}
{{- default (eq .source "init" | ternary .hub.name "") .servedName }}
{{- end }}
{{- end }}

{{- define "npuserve.device" -}}
{{- get (dict "cpu" "cpu" "ascend" "npu" "cuda" "cuda") .Values.accelerator.kind }}
{{- end }}

{{/* The server's settings as TOML. */}}
{{- define "npuserve.toml" -}}
{{- $settings := deepCopy .Values.config }}
{{- $_ := set $settings "host" .Values.host }}
{{- $_ := set $settings "port" .Values.ports.grpc }}
{{- $_ := set $settings "metrics_port" .Values.ports.metrics }}
{{- $_ := set $settings "health_port" .Values.ports.health }}
{{- $_ := set $settings "device" (include "npuserve.device" .) }}
{{- $_ := set $settings "drain_seconds" .Values.termination.drainSeconds }}
{{- with include "npuserve.model" . }}
{{- $_ := set $settings "model" . }}
{{- end }}
{{- with include "npuserve.servedName" . }}
{{- $_ := set $settings "served_name" . }}
{{- end }}
{{- with .Values.tls }}
{{- if .secretName }}
{{- $_ := set $settings "tls_cert" "/etc/npuserve-tls/tls.crt" }}
{{- $_ := set $settings "tls_key" "/etc/npuserve-tls/tls.key" }}
{{- end }}
{{- if .clientCaSecretName }}
{{- $_ := set $settings "tls_client_ca" "/etc/npuserve-client-ca/ca.crt" }}
{{- end }}
{{- end }}
{{- if .Values.apiKeys.secretName }}
{{- $_ := set $settings "api_keys" (printf "/etc/npuserve-api-keys/%s" .Values.apiKeys.key) }}
{{- end }}
{{- range $name, $value := $settings }}
{{ $name }} = {{ include "npuserve.tomlValue" $value }}
{{- end }}
{{- end }}

{{/* Helm reads every number as a float, and the server's whole numbers are no floats. */}}
{{- define "npuserve.tomlValue" -}}
{{- if kindIs "string" . }}
{{- toJson . }}
{{- else if kindIs "bool" . }}
{{- . }}
{{- else if eq (floor .) (float64 .) }}
{{- int64 . }}
{{- else }}
{{- . }}
{{- end }}
{{- end }}

{{- define "npuserve.probe" -}}
grpc:
  port: {{ int64 .root.Values.ports.health }}
  service: {{ .service | quote }}
{{ toYaml .times }}
{{- end }}

{{/* Whether the chart runs the gateway smg. */}}
{{- define "npuserve.smg" -}}
{{- with .Values.gateway }}
{{- if and .enabled (eq .kind "smg") }}yes{{ end }}
{{- end }}
{{- end }}

{{/* Whether `helm test` has what the server asks of a client. */}}
{{- define "npuserve.testable" -}}
{{- $certificate := or (not .Values.tls.clientCaSecretName) .Values.helmTest.clientCertSecretName }}
{{- $key := or (not .Values.apiKeys.secretName) .Values.helmTest.apiKeySecretName }}
{{- if and $certificate $key (not .Values.gateway.enabled) }}yes{{ end }}
{{- end }}

{{/* Of a URL: its own, or its scheme's. */}}
{{- define "npuserve.urlPort" -}}
{{- default (hasPrefix "https:" . | ternary "443" "80") (regexFind ":[0-9]+(/|$)" . | trimAll ":/") }}
{{- end }}

{{/* Ports on which the server publishes KV events over ZeroMQ, by name, as YAML. An endpoint with a host is connected to. */}}
{{- define "npuserve.kvEventsPorts" -}}
{{- $config := .Values.config }}
{{- if eq "zmq" (toString $config.kv_events) }}
{{- range $name, $endpoint := dict "kv-events" (default "tcp://*:5557" $config.kv_events_endpoint) "kv-replay" (default "" $config.kv_events_replay_endpoint) }}
{{- $port := regexFind "^tcp://([*]|0[.]0[.]0[.]0|\\[::\\]):[0-9]+$" $endpoint | regexFind "[0-9]+$" }}
{{- if $port }}
{{ $name }}: {{ $port }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Port of the subscriber to which the server connects to publish KV events over ZeroMQ. Empty: it connects to none. */}}
{{- define "npuserve.kvEventsPeerPort" -}}
{{- $endpoint := default "" .Values.config.kv_events_endpoint }}
{{- $listens := hasKey (include "npuserve.kvEventsPorts" . | fromYaml) "kv-events" }}
{{- if and (eq "zmq" (toString .Values.config.kv_events)) (hasPrefix "tcp://" $endpoint) (not $listens) }}
{{- regexFind "[0-9]+$" $endpoint }}
{{- end }}
{{- end }}

{{/* Ports of DNS. OpenShift's DNS pods listen on 5353, and a policy sees the port of the pod. */}}
{{- define "npuserve.dnsPorts" -}}
{{- range .Values.openshift | ternary (list 53 5353) (list 53) }}
- port: {{ . }}
  protocol: UDP
- port: {{ . }}
  protocol: TCP
{{- end }}
{{- end }}

{{/* Constraints that distribute pods. labels: name of the template with the labels of the pods. */}}
{{- define "npuserve.spread" -}}
{{- range .root.Values.topologySpread.keys }}
- topologyKey: {{ . | quote }}
  maxSkew: 1
  whenUnsatisfiable: {{ $.whenUnsatisfiable }}
  {{- if semverCompare ">=1.26.0-0" $.root.Capabilities.KubeVersion.Version }}
  # Nodes that the pod cannot run on do not count.
  nodeAffinityPolicy: Honor
  nodeTaintsPolicy: Honor
  {{- end }}
  labelSelector:
    matchLabels:
      {{- include $.labels $.root | nindent 6 }}
{{- end }}
{{- end }}

{{/* Of HPA and KEDA: up at once, down one replica at a time. */}}
{{- define "npuserve.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Percent
      value: 100
      periodSeconds: 60
    - type: Pods
      value: 2
      periodSeconds: 60
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: {{ int64 .Values.autoscaling.scaleDownSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end }}

{{/* Environment of every container that runs our image: the root is read-only, so what is written has its place. */}}
{{- define "npuserve.homes" -}}
- name: HOME
  value: /tmp
# A user of OpenShift's choice has no name in /etc/passwd.
- name: USER
  value: npuserve
- name: TMPDIR
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/npuserve
- name: HF_HOME
  value: /var/cache/npuserve/huggingface
{{- end }}

{{/* Variables of a container that downloads from the hub. */}}
{{- define "npuserve.hubVariables" -}}
{{- with .Values.model.hub }}
{{- if .endpoint }}
- name: HF_ENDPOINT
  value: {{ .endpoint | quote }}
{{- end }}
{{- if .tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .tokenSecret.name | quote }}
      key: {{ .tokenSecret.key | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables of containers that compute nothing: the CUDA image would show them all GPUs of the node. */}}
{{- define "npuserve.noDevice" -}}
{{- if eq .Values.accelerator.kind "cuda" }}
- name: NVIDIA_VISIBLE_DEVICES
  value: void
{{- end }}
{{- end }}

{{- define "npuserve.podSecurityContext" -}}
{{- .Values.openshift | ternary (omit .Values.podSecurityContext "runAsUser" "runAsGroup" "fsGroup") .Values.podSecurityContext | toYaml }}
{{- end }}

{{/* The server's pods as a template: metadata and spec. A root with `worker` gives the pods that only compute. */}}
{{- define "npuserve.podTemplate" -}}
metadata:
  labels:
    {{- include "npuserve.serverLabels" . | nindent 4 }}
    # By this label an endpoint picker knows the names of the metrics.
    {{- merge (dict) .Values.podLabels (dict "llm-d.ai/engine-type" "vllm") | toYaml | nindent 4 }}
  annotations:
    # The server's settings file, which the volume config shows to the container. It is part of the template, so that an
    # upgrade that fails does not change it for the pods of the revision before, and a rollback brings it back.
    npuserve/config: |
      {{- include "npuserve.toml" . | trim | nindent 6 }}
    kubectl.kubernetes.io/default-container: npuserve
    {{- if and (eq .Values.metrics.scrape "annotations") (not .worker) }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ int64 .Values.ports.metrics | quote }}
    prometheus.io/path: /metrics
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "npuserve.pod" . | nindent 2 }}
{{- end }}
