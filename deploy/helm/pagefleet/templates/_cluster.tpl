{{/* The spec of a RayCluster, and the rayClusterConfig of a RayService. */}}
{{- define "pagefleet.cluster" -}}
rayVersion: {{ .Values.rayVersion | quote }}
authOptions:
  mode: token
  {{- with .Values.auth.existingSecret }}
  secretName: {{ . }}
  {{- end }}
{{- if .Values.gcsFaultTolerance.redisAddress }}
gcsFaultToleranceOptions:
  redisAddress: {{ .Values.gcsFaultTolerance.redisAddress }}
  {{- with .Values.gcsFaultTolerance.existingSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ . }}
        key: password
  {{- end }}
{{- end }}
{{- if .Values.autoscaler.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  upscalingMode: Default
  idleTimeoutSeconds: {{ .Values.autoscaler.idleTimeoutSeconds }}
  resources:
    requests: {cpu: 200m, memory: 512Mi}
    limits: {memory: 512Mi}
  securityContext:
    {{- include "pagefleet.containerSecurity" . | nindent 4 }}
{{- end }}
headGroupSpec:
  {{- include "pagefleet.head" . | nindent 2 }}
workerGroupSpecs:
  - {{- include "pagefleet.workers" . | nindent 4 }}
{{- end }}

{{- define "pagefleet.head" -}}
serviceType: ClusterIP
rayStartParams:
  num-cpus: "0"
  num-gpus: "0"
  dashboard-host: "0.0.0.0"
  object-store-memory: "268435456"
template:
  metadata:
    labels:
      {{- include "pagefleet.selector" . | nindent 6 }}
      app.kubernetes.io/component: head
  spec:
    terminationGracePeriodSeconds: 60
    {{- include "pagefleet.pullSecrets" . | nindent 4 }}
    {{- include "pagefleet.placement" .Values.head | nindent 4 }}
    securityContext:
      {{- include "pagefleet.podSecurity" . | nindent 6 }}
    volumes:
      {{- include "pagefleet.volumes" . | nindent 6 }}
    containers:
      - name: ray-head
        image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        securityContext:
          {{- include "pagefleet.containerSecurity" . | nindent 10 }}
        env:
          {{- include "pagefleet.env" . | nindent 10 }}
        ports:
          - name: gcs-server
            containerPort: 6379
          - name: dashboard
            containerPort: 8265
          {{- include "pagefleet.ports" . | nindent 10 }}
        volumeMounts:
          {{- include "pagefleet.mounts" . | nindent 10 }}
        resources:
          {{- toYaml .Values.head.resources | nindent 10 }}
        startupProbe:
          httpGet:
            path: /api/gcs_healthz
            port: dashboard
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 60
        readinessProbe:
          httpGet:
            path: /api/gcs_healthz
            port: dashboard
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 6
        livenessProbe:
          httpGet:
            path: /api/gcs_healthz
            port: dashboard
          periodSeconds: 10
          timeoutSeconds: 10
          failureThreshold: 12
{{- end }}

{{- define "pagefleet.workers" -}}
{{- $resources := deepCopy .Values.workers.resources -}}
{{- if .Values.workers.gpus -}}
{{- range $which := list "requests" "limits" -}}
{{- $_ := set $resources $which (merge (dict "nvidia.com/gpu" ($.Values.workers.gpus | toString)) (get $resources $which | default dict)) -}}
{{- end -}}
{{- end -}}
groupName: replicas
replicas: {{ .Values.workers.replicas }}
minReplicas: {{ .Values.workers.minReplicas }}
maxReplicas: {{ .Values.workers.maxReplicas }}
rayStartParams:
  object-store-memory: "268435456"
  resources: "'{\"gateway\": 1}'"
template:
  metadata:
    labels:
      {{- include "pagefleet.selector" . | nindent 6 }}
      app.kubernetes.io/component: replica
  spec:
    automountServiceAccountToken: false
    terminationGracePeriodSeconds: {{ add (include "pagefleet.grace" . | int) 60 }}
    {{- include "pagefleet.pullSecrets" . | nindent 4 }}
    {{- include "pagefleet.placement" .Values.workers | nindent 4 }}
    {{- if .Values.workers.spreadOverNodes }}
    topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels:
            {{- include "pagefleet.selector" . | nindent 12 }}
            app.kubernetes.io/component: replica
    {{- end }}
    securityContext:
      {{- include "pagefleet.podSecurity" . | nindent 6 }}
    volumes:
      {{- include "pagefleet.volumes" . | nindent 6 }}
    containers:
      - name: ray-worker
        image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        securityContext:
          {{- include "pagefleet.containerSecurity" . | nindent 10 }}
        env:
          {{- include "pagefleet.env" . | nindent 10 }}
        ports:
          {{- include "pagefleet.ports" . | nindent 10 }}
        volumeMounts:
          {{- include "pagefleet.mounts" . | nindent 10 }}
        resources:
          {{- toYaml $resources | nindent 10 }}
        startupProbe:
          httpGet:
            path: /api/local_raylet_healthz
            port: 52365
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 60
        readinessProbe:
          {{- include "pagefleet.readiness" . | nindent 10 }}
        livenessProbe:
          exec:
            command: [pagefleet, probe, --raylet, "127.0.0.1:52365"]
          periodSeconds: 20
          timeoutSeconds: 15
          failureThreshold: 6
        lifecycle:
          preStop:
            exec:
              command: [pagefleet, probe, --until-idle, {{ include "pagefleet.grace" . | quote }}]
{{- end }}
