{{/* The server's pod. `.worker`: of a group, one that only computes. It has no ports, so no probes, and no secrets. */}}
{{- define "npuserve.pod" -}}
serviceAccountName: {{ include "npuserve.serviceAccount" . | quote }}
automountServiceAccountToken: false
# NPUSERVE_PORT=tcp://… and the like are not settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "npuserve.grace" . }}
securityContext:
  {{- include "npuserve.podSecurityContext" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .Values.extraInitContainers .Values.accept.enabled (eq .Values.model.source "init") }}
initContainers:
  {{- with .Values.extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if .Values.accept.enabled }}
  {{- include "npuserve.accept" . | nindent 2 }}
  {{- end }}
  {{- if eq .Values.model.source "init" }}
  {{- include "npuserve.fetch" . | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  - name: npuserve
    image: {{ include "npuserve.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [serve]
    env:
      - name: NPUSERVE_CONFIG
        value: /etc/npuserve/npuserve.toml
      {{- if and (eq .Values.accelerator.kind "cpu") (not .Values.config.threads) (dig "requests" "cpu" "" .Values.resources) }}
      - name: NPUSERVE_THREADS
        {{- $ranks := include "npuserve.ranks" . | int }}
        {{- if gt $ranks 1 }}
        value: {{ div (include "npuserve.cores" .) $ranks | max 1 | quote }}
        {{- else }}
        valueFrom:
          resourceFieldRef:
            containerName: npuserve
            resource: requests.cpu
        {{- end }}
      {{- end }}
      {{- include "npuserve.groupVariables" . | nindent 6 }}
      {{- include "npuserve.homes" . | nindent 6 }}
      {{- if ne .Values.model.source "builtin" }}
      - name: HF_HUB_OFFLINE
        value: "1"
      {{- end }}
      {{- include "npuserve.deviceVariables" . | nindent 6 }}
      {{- if eq "zmq" (toString .Values.config.kv_events) }}
      # The topic of KV events names the pod by its address.
      - name: POD_IP
        valueFrom:
          fieldRef:
            fieldPath: status.podIP
      {{- end }}
      {{- with .Values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .Values.extraEnvFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if not .worker }}
    ports:
      - name: grpc
        containerPort: {{ int64 .Values.ports.grpc }}
      - name: metrics
        containerPort: {{ int64 .Values.ports.metrics }}
      - name: health
        containerPort: {{ int64 .Values.ports.health }}
      {{- range $name, $port := include "npuserve.kvEventsPorts" . | fromYaml }}
      - name: {{ $name }}
        containerPort: {{ int64 $port }}
      {{- end }}
    {{- with .Values.probes }}
    startupProbe:
      {{- $tries := div (add .startupSeconds 4) 5 }}
      {{- include "npuserve.probe" (dict "root" $ "service" "" "times" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" $tries)) | nindent 6 }}
    readinessProbe:
      {{- include "npuserve.probe" (dict "root" $ "service" "npuserve.readiness" "times" .readiness) | nindent 6 }}
    livenessProbe:
      {{- include "npuserve.probe" (dict "root" $ "service" "npuserve.liveness" "times" .liveness) | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- if .Values.termination.preStopSeconds }}
    lifecycle:
      preStop:
        exec:
          command: [sleep, {{ int64 .Values.termination.preStopSeconds | quote }}]
    {{- end }}
    resources:
      {{- include "npuserve.resources" . | nindent 6 }}
    securityContext:
      {{- toYaml .Values.securityContext | nindent 6 }}
    volumeMounts:
      {{- include "npuserve.mounts" . | nindent 6 }}
  {{- with .Values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- include "npuserve.volumes" . | nindent 2 }}
{{- with .Values.accelerator.claimTemplate }}
resourceClaims:
  - name: devices
    resourceClaimTemplateName: {{ quote . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (ne .Values.topologySpread.whenUnsatisfiable "none") (not .worker) }}
topologySpreadConstraints:
  {{- include "npuserve.spread" (dict "root" . "labels" "npuserve.servingLabels" "whenUnsatisfiable" .Values.topologySpread.whenUnsatisfiable) | trim | nindent 2 }}
{{- end }}
{{- range $name := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with get $.Values $name }}
{{ $name }}: {{ quote . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Cores that the container requests, rounded up. */}}
{{- define "npuserve.cores" -}}
{{- $cpu := toString .Values.resources.requests.cpu }}
{{- hasSuffix "m" $cpu | ternary (div (trimSuffix "m" $cpu | int | add 999) 1000) (ceil $cpu) | int }}
{{- end }}

{{/* Variables of a pod of a group. LeaderWorkerSet adds LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX. */}}
{{- define "npuserve.groupVariables" -}}
{{- if include "npuserve.groups" . }}
{{- $variables := dict "MASTER_PORT" (int64 .Values.topology.masterPort) }}
{{- with .Values.topology.hccl }}
{{- range $name, $value := dict "HCCL_BUFFSIZE" .bufferMegabytes "HCCL_SOCKET_IFNAME" .socketInterface "HCCL_IF_BASE_PORT" .basePort }}
{{- if $value }}
{{- $_ := set $variables $name (kindIs "string" $value | ternary $value (int64 $value)) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := $variables }}
- name: {{ $name }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables of the device's software. */}}
{{- define "npuserve.deviceVariables" -}}
{{- if eq .Values.accelerator.kind "ascend" }}
- name: ASCEND_CACHE_PATH
  value: /var/cache/npuserve/ascend
- name: ASCEND_PROCESS_LOG_PATH
  value: /var/cache/npuserve/ascend-log
{{- end }}
{{- if ne .Values.accelerator.kind "cpu" }}
- name: TRITON_CACHE_DIR
  value: /var/cache/npuserve/triton
{{- end }}
{{- end }}

{{/* The init container that runs the acceptance check. The end of its report becomes the pod's termination message. */}}
{{- define "npuserve.accept" -}}
- name: accept
  image: {{ include "npuserve.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [check, --device, {{ include "npuserve.device" . }}, --accept, --sizes, quick]
  env:
    {{- include "npuserve.homes" . | nindent 4 }}
    {{- include "npuserve.deviceVariables" . | nindent 4 }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  resources:
    {{- include "npuserve.resources" . | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "npuserve.mounts" (set (omit . "worker") "worker" true) | nindent 4 }}
{{- end }}

{{/* The init container that puts the model's files into $MODEL_DIR. */}}
{{- define "npuserve.fetch" -}}
- name: model
  image: {{ default (include "npuserve.image" .) .Values.model.init.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - sh
    - -c
    - |
      {{- .Files.Get "files/fetch.sh" | trim | nindent 6 }}
    - fetch.sh
    {{- with .Values.model }}
    {{- if .init.command }}
    {{- toYaml .init.command | nindent 4 }}
    {{- else }}
    - hf
    - download
    - {{ .hub.name | quote }}
    {{- if .hub.revision }}
    - {{ printf "--revision=%s" .hub.revision }}
    {{- end }}
    - --local-dir=$(MODEL_DIR)
    # The files that the server reads.
    {{- range list "*.json" "*.safetensors" "*.jinja" "merges.txt" "vocab.txt" "*.model" "*.tiktoken" }}
    - {{ printf "--include=%s" . | quote }}
    {{- end }}
    - --exclude=*/*.[!j]*
    - --exclude=*/*token*
    - --exclude=*/*/*
    {{- end }}
    {{- end }}
  env:
    - name: POD_UID
      valueFrom:
        fieldRef:
          fieldPath: metadata.uid
    - name: MODEL_DIR
      value: /models/.fetch-$(POD_UID)
    - name: MODEL_TARGET
      value: {{ include "npuserve.model" . }}
    # hf would ask PyPI for a newer version of itself.
    - name: HF_HUB_DISABLE_UPDATE_CHECK
      value: "1"
    {{- include "npuserve.noDevice" . | trim | nindent 4 }}
    {{- include "npuserve.homes" . | nindent 4 }}
    {{- with include "npuserve.hubVariables" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .Values.model.init.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.model.init.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: cache
      mountPath: /var/cache/npuserve
    - name: tmp
      mountPath: /tmp
{{- end }}

{{- define "npuserve.mounts" -}}
- name: config
  mountPath: /etc/npuserve
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/npuserve
- name: shm
  mountPath: /dev/shm
{{- if has .Values.model.source (list "pvc" "init" "image") }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if not .worker }}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /etc/npuserve-tls
  readOnly: true
{{- end }}
{{- if .Values.tls.clientCaSecretName }}
- name: client-ca
  mountPath: /etc/npuserve-client-ca
  readOnly: true
{{- end }}
{{- if .Values.apiKeys.secretName }}
- name: api-keys
  mountPath: /etc/npuserve-api-keys
  readOnly: true
{{- end }}
{{- end }}
{{- if .Values.accelerator.hostDriver }}
{{- range $name, $path := fromYaml (include "npuserve.driver" .) }}
- name: driver-{{ $name }}
  mountPath: {{ $path }}
  readOnly: true
{{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "npuserve.volumes" -}}
- name: config
  downwardAPI:
    items:
      - path: npuserve.toml
        fieldRef:
          fieldPath: metadata.annotations['npuserve/config']
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.size }}
- name: cache
  {{- if eq .Values.cache.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-cache" (include "npuserve.fullname" .)) .Values.cache.claimName | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.size }}
  {{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.size }}
{{- with .Values.model }}
{{- $claim := get (dict "pvc" .pvc.claimName "init" (include "npuserve.modelClaim" $)) .source }}
{{- if $claim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $claim | quote }}
    {{- if eq .source "pvc" }}
    readOnly: true
    {{- end }}
{{- else if eq .source "image" }}
- name: models
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ $.Values.image.pullPolicy }}
{{- else if eq .source "init" }}
- name: models
  emptyDir:
    sizeLimit: {{ .init.size }}
{{- end }}
{{- end }}
{{- range $name, $secret := dict "tls" .Values.tls.secretName "client-ca" .Values.tls.clientCaSecretName "api-keys" .Values.apiKeys.secretName }}
{{- if and $secret (not $.worker) }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret | quote }}
    defaultMode: 288  # 0440
{{- end }}
{{- end }}
{{- if .Values.accelerator.hostDriver }}
{{- range $name, $path := fromYaml (include "npuserve.driver" .) }}
- name: driver-{{ $name }}
  hostPath:
    path: {{ $path }}
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where the Ascend driver has its files on a node. */}}
{{- define "npuserve.driver" -}}
lib: /usr/local/Ascend/driver/lib64
version: /usr/local/Ascend/driver/version.info
dcmi: /usr/local/dcmi
smi: /usr/local/bin/npu-smi
install: /etc/ascend_install.info
{{- if include "npuserve.groups" . }}
# Addresses of the devices' RoCE ports.
hccn: /etc/hccn.conf
{{- end }}
{{- end }}
