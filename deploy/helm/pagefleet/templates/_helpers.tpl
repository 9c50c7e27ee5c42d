{{/* Labels of every pod, which the NetworkPolicy and the monitors select. */}}
{{- define "pagefleet.selector" -}}
app.kubernetes.io/part-of: pagefleet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pagefleet.metadata" -}}
name: {{ .Release.Name }}
labels:
  {{- include "pagefleet.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The longest that a stream may go on at something that has to go, with some slack. */}}
{{- define "pagefleet.grace" -}}
{{- add (ceil .Values.args.max_stream_s) (ceil .Values.args.drain_s) 120 -}}
{{- end }}

{{- define "pagefleet.serveConfig" -}}
{{- $args := deepCopy .Values.args -}}
{{- $_ := set $args "host" "0.0.0.0" -}}
{{- $_ := set $args "http_port" (int .Values.service.httpPort) -}}
{{- $_ := set $args "grpc_port" (int .Values.service.grpcPort) -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $args "api_key_file" "/etc/pagefleet/keys/keys.json" -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $args "tls_cert" "/etc/pagefleet/tls/tls.crt" -}}
{{- $_ := set $args "tls_key" "/etc/pagefleet/tls/tls.key" -}}
{{- if .Values.tls.clientCa -}}
{{- $_ := set $args "tls_client_ca" "/etc/pagefleet/tls/ca.crt" -}}
{{- end -}}
{{- end -}}
proxy_location: Disabled
applications:
  - name: pagefleet
    import_path: pagefleet.cluster.serve_app:app
    route_prefix: /
    deployments:
      - name: Gateway
        ray_actor_options:
          num_cpus: 0
          resources: {gateway: 0.001}
    args:
      {{- toYaml $args | nindent 6 }}
{{- end }}

{{- define "pagefleet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "pagefleet.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{- define "pagefleet.env" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: OMP_WAIT_POLICY
  value: passive
- name: PAGEFLEET_HEARTBEATS
  value: /tmp/pagefleet-heartbeats
{{- if .Values.models.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.models.hubTokenSecret }}
      key: token
{{- end }}
{{- end }}

{{- define "pagefleet.ports" -}}
- name: metrics
  containerPort: 8080
- name: serve
  containerPort: {{ .Values.service.httpPort }}
- name: serve-grpc
  containerPort: {{ .Values.service.grpcPort }}
{{- end }}

{{- define "pagefleet.mounts" -}}
- name: heartbeats
  mountPath: /tmp/pagefleet-heartbeats
{{- if .Values.apiKeys.existingSecret }}
- name: api-keys
  mountPath: /etc/pagefleet/keys
  readOnly: true
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/pagefleet/tls
  readOnly: true
{{- end }}
{{- if .Values.models.existingClaim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{- define "pagefleet.volumes" -}}
- name: heartbeats
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- if .Values.apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .Values.apiKeys.existingSecret }}
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ .Values.tls.existingSecret }}
{{- end }}
{{- if .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.models.existingClaim }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "pagefleet.placement" -}}
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

{{- define "pagefleet.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Whether the gateway here takes requests. The kubelet has no client certificate. */}}
{{- define "pagefleet.readiness" -}}
{{- if and .Values.tls.existingSecret .Values.tls.clientCa }}
exec:
  command: [pagefleet, probe, --ready]
{{- else }}
httpGet:
  path: /ready
  port: serve
  {{- if .Values.tls.existingSecret }}
  scheme: HTTPS
  {{- end }}
{{- end }}
periodSeconds: 5
timeoutSeconds: 5
failureThreshold: 3
{{- end }}
