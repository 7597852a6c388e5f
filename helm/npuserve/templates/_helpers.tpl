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
app.kubernetes.io/name: {{ include "npuserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "npuserve.testLabels" -}}
app.kubernetes.io/name: {{ include "npuserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}

{{- define "npuserve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: npuserve
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "npuserve.serverLabels" -}}
{{ include "npuserve.selectorLabels" . }}
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
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default (printf "%s-%s" $.Chart.AppVersion $.Values.accelerator.kind) .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What follows from the values. */}}

{{- define "npuserve.resourceName" -}}
{{- $usual := dict "ascend" "huawei.com/Ascend910" "cuda" "nvidia.com/gpu" }}
{{- default (get $usual .Values.accelerator.kind) .Values.accelerator.resourceName }}
{{- end }}

{{- define "npuserve.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if ne .Values.accelerator.kind "cpu" }}
{{- $limits := default dict $resources.limits }}
{{- $_ := set $limits (include "npuserve.resourceName" .) .Values.accelerator.count }}
{{- $_ := set $resources "limits" (merge $limits .Values.accelerator.extraResources) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Beyond the drain: what the supervisor gives its front ends (7 s) and its engine (10 s) to end, and 3 s. */}}
{{- define "npuserve.leastGrace" -}}
{{- add .Values.termination.preStopSeconds .Values.termination.drainSeconds 20 }}
{{- end }}

{{- define "npuserve.grace" -}}
{{- default (include "npuserve.leastGrace" .) .Values.termination.gracePeriodSeconds | int64 }}
{{- end }}

{{/* The folder or hub name that the server is given; none: the built-in model. */}}
{{- define "npuserve.model" -}}
{{- with .Values.model }}
{{- if eq .source "hub" }}
{{- .hub.name }}
{{- else if eq .source "pvc" }}
{{- list "/models" .pvc.path | join "/" | trimSuffix "/" }}
{{- else if eq .source "init" }}
{{- "/models/current" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "npuserve.servedName" -}}
{{- with .Values.model }}
{{- default (eq .source "init" | ternary .hub.name "") .servedName }}
{{- end }}
{{- end }}

{{/* The server's settings as TOML. */}}
{{- define "npuserve.toml" -}}
{{- $settings := deepCopy .Values.config }}
{{- $_ := set $settings "host" .Values.host }}
{{- $_ := set $settings "port" .Values.ports.grpc }}
{{- $_ := set $settings "metrics_port" .Values.ports.metrics }}
{{- $_ := set $settings "health_port" .Values.ports.health }}
{{- $_ := set $settings "device" (get (dict "cpu" "cpu" "ascend" "npu" "cuda" "cuda") .Values.accelerator.kind) }}
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

{{/* Whether `helm test` has what the server asks of a client. */}}
{{- define "npuserve.testable" -}}
{{- $certificate := or (not .Values.tls.clientCaSecretName) .Values.helmTest.clientCertSecretName }}
{{- $key := or (not .Values.apiKeys.secretName) .Values.helmTest.apiKeySecretName }}
{{- if and $certificate $key }}yes{{ end }}
{{- end }}

{{/* Of a URL: its own, or its scheme's. */}}
{{- define "npuserve.urlPort" -}}
{{- default (hasPrefix "https:" . | ternary "443" "80") (regexFind ":[0-9]+(/|$)" . | trimAll ":/") }}
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
- name: TMPDIR
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/npuserve
- name: HF_HOME
  value: /var/cache/npuserve/huggingface
{{- with .Values.model.hub }}
{{- if .endpoint }}
- name: HF_ENDPOINT
  value: {{ .endpoint | quote }}
{{- end }}
{{- if .tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .tokenSecret.name }}
      key: {{ .tokenSecret.key }}
{{- end }}
{{- end }}
{{- end }}
