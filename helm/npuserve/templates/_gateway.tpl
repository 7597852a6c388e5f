{{/* The gateway smg. */}}

{{- define "npuserve.gatewayName" -}}
{{- printf "%s-gateway" (include "npuserve.fullname" .) }}
{{- end }}

{{- define "npuserve.gatewayServiceAccount" -}}
{{- with .Values.gateway.smg.serviceAccount }}
{{- default (.create | ternary (include "npuserve.gatewayName" $) "default") .name }}
{{- end }}
{{- end }}

{{/* Arguments of the image. */}}
{{- define "npuserve.gatewayArguments" -}}
- launch
- --host={{ .Values.host }}
- --prometheus-host={{ .Values.host }}
{{- with .Values.gateway.smg }}
- --port={{ int64 .ports.http }}
- --prometheus-port={{ int64 .ports.metrics }}
- --health-check-port={{ int64 .ports.health }}
- --policy={{ .policy }}
- --health-check-interval-secs={{ int64 .healthCheckSeconds }}
{{- end }}
- --service-discovery
- --service-discovery-namespace={{ .Release.Namespace }}
- --service-discovery-port={{ int64 .Values.ports.grpc }}
- --selector
{{- range $name, $value := include "npuserve.servingLabels" . | fromYaml }}
- {{ $name }}={{ $value }}
{{- end }}
# smg keeps 5 s of it for the removal of workers.
- --shutdown-grace-period-secs={{ add .Values.termination.drainSeconds 5 }}
- --log-json
{{- with .Values.gateway.smg }}
{{- with .toolCallParser }}
- --tool-call-parser={{ . }}
{{- end }}
{{- with .reasoningParser }}
- --reasoning-parser={{ . }}
{{- end }}
{{- if .tls.secretName }}
- --tls-cert-path=/etc/gateway-tls/tls.crt
- --tls-key-path=/etc/gateway-tls/tls.key
{{- end }}
{{- if .apiKeys.secretName }}
# Kubernetes puts the variable's value here.
- --api-key=$(SMG_API_KEY)
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "npuserve.gatewayPod" -}}
serviceAccountName: {{ include "npuserve.gatewayServiceAccount" . | quote }}
# It lists and watches the pods of the servers.
automountServiceAccountToken: true
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "npuserve.grace" . }}
securityContext:
  {{- include "npuserve.podSecurityContext" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gateway.smg }}
containers:
  - name: smg
    image: {{ include "npuserve.imageName" (dict "root" $ "image" .image "tag" (default $.Chart.AppVersion .image.tag)) | quote }}
    imagePullPolicy: {{ .image.pullPolicy }}
    args:
      {{- include "npuserve.gatewayArguments" $ | nindent 6 }}
    env:
      - name: HOME
        value: /tmp
      # smg looks for the servers' model folder on the hub before it asks a server for the tokenizer. It would wait for
      # minutes where the network policy drops that request; this address refuses it at once.
      - name: HF_ENDPOINT
        value: http://127.0.0.1:1
      {{- if .apiKeys.secretName }}
      - name: SMG_API_KEY
        valueFrom:
          secretKeyRef:
            name: {{ .apiKeys.secretName | quote }}
            key: {{ .apiKeys.key | quote }}
      {{- end }}
      {{- with .extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: http
        containerPort: {{ int64 .ports.http }}
      - name: metrics
        containerPort: {{ int64 .ports.metrics }}
      - name: health
        containerPort: {{ int64 .ports.health }}
    startupProbe:
      httpGet:
        path: /liveness
        port: health
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 30
    readinessProbe:
      # Fails while no pod of the servers is ready, and while smg drains.
      httpGet:
        path: /readiness
        port: health
      periodSeconds: 5
      timeoutSeconds: 3
      failureThreshold: 2
    livenessProbe:
      httpGet:
        path: /liveness
        port: health
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    {{- if $.Values.termination.preStopSeconds }}
    lifecycle:
      preStop:
        exec:
          command: [sleep, {{ int64 $.Values.termination.preStopSeconds | quote }}]
    {{- end }}
    resources:
      {{- toYaml .resources | nindent 6 }}
    securityContext:
      {{- toYaml $.Values.securityContext | nindent 6 }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      {{- if .tls.secretName }}
      - name: tls
        mountPath: /etc/gateway-tls
        readOnly: true
      {{- end }}
volumes:
  - name: tmp
    emptyDir:
      sizeLimit: {{ $.Values.tmp.size }}
  {{- with .tls.secretName }}
  - name: tls
    secret:
      secretName: {{ . | quote }}
      defaultMode: 288  # 0440
  {{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if ne .Values.topologySpread.whenUnsatisfiable "none" }}
topologySpreadConstraints:
  {{- include "npuserve.spread" (dict "root" . "labels" "npuserve.gatewaySelectorLabels" "whenUnsatisfiable" "ScheduleAnyway") | trim | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}
