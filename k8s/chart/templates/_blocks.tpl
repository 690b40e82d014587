{{- /* Written by k8s/generate_chart.py. */}}
{{- /* The data of a ConfigMap: what is said by overlay and components, then `.Values.settings`. Data are texts. */}}
{{- define "blockyard.settings" }}
{{- $said := include (print "blockyard.settings." .name) .root | fromYaml }}
{{- range $name, $value := mergeOverwrite $said (get .root.Values.settings .name | default dict) }}
{{ $name }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{- define "blockyard.settings.gateway" }}
{{- if .Values.components.apiKeys }}
BLOCKYARD_API_KEYS_FILE: /etc/blockyard/keys/keys.yaml
{{- end }}
BLOCKYARD_DRAIN_SECONDS: '90'
{{- if .Values.components.monitoring }}
BLOCKYARD_GATEWAY_METRICS_PORT: '50054'
{{- end }}
{{- if .Values.components.internalTls }}
BLOCKYARD_INTERNAL_AUTHORITY: /etc/blockyard/identity/ca.crt
BLOCKYARD_INTERNAL_CERTIFICATE: /etc/blockyard/identity/tls.crt
BLOCKYARD_INTERNAL_KEY: /etc/blockyard/identity/tls.key
{{- end }}
BLOCKYARD_LOG_FORMAT: json
{{- if .Values.components.queueScaling }}
BLOCKYARD_STARTS_ON_DEMAND: 'true'
{{- end }}
{{- if .Values.components.tls }}
BLOCKYARD_TLS_CERTIFICATE: /etc/blockyard/tls/tls.crt
BLOCKYARD_TLS_KEY: /etc/blockyard/tls/tls.key
{{- end }}
{{- if .Values.components.tracing }}
BLOCKYARD_TRACE_ENDPOINT: http://opentelemetry-collector.observability:4317
{{- end }}
{{- if .Values.components.inferencePool }}
BLOCKYARD_VLLM_METRIC_NAMES: 'true'
{{- end }}
{{- end }}

{{- define "blockyard.settings.model" }}
{{- if ne .Values.model nil }}
BLOCKYARD_MODEL: {{ toJson .Values.model }}
{{- else if .Values.components.modelFromHub }}
BLOCKYARD_MODEL: Qwen/Qwen3-0.6B
{{- else if .Values.components.modelVolume }}
BLOCKYARD_MODEL: /mnt/models/model
{{- else }}
BLOCKYARD_MODEL: /models/demo
{{- end }}
{{- if ne .Values.revision nil }}
BLOCKYARD_REVISION: {{ toJson .Values.revision }}
{{- else if .Values.components.modelFromHub }}
BLOCKYARD_REVISION: main
{{- end }}
{{- end }}

{{- define "blockyard.settings.scheduler" }}
{{- if eq .Values.overlay "cpu" }}
BLOCKYARD_DEVICE: cpu
{{- else }}
BLOCKYARD_DEVICE: cuda
{{- end }}
{{- if .Values.components.internalTls }}
BLOCKYARD_INTERNAL_AUTHORITY: /etc/blockyard/identity/ca.crt
BLOCKYARD_INTERNAL_CERTIFICATE: /etc/blockyard/identity/tls.crt
BLOCKYARD_INTERNAL_KEY: /etc/blockyard/identity/tls.key
{{- end }}
BLOCKYARD_LOG_FORMAT: json
{{- if .Values.components.monitoring }}
BLOCKYARD_SCHEDULER_METRICS_PORT: '50062'
{{- end }}
{{- if ne .Values.overlay "cpu" }}
BLOCKYARD_SWAP_SPACE_GIB: '8'
{{- end }}
{{- if eq .Values.overlay "gpu-nvlink" "gpu-tp" "leader-worker-set" }}
{{- if eq .Values.overlay "gpu-nvlink" }}
BLOCKYARD_TENSOR_PARALLEL_SIZE: '4'
{{- else }}
BLOCKYARD_TENSOR_PARALLEL_SIZE: '2'
{{- end }}
{{- end }}
{{- if .Values.components.tracing }}
BLOCKYARD_TRACE_ENDPOINT: http://opentelemetry-collector.observability:4317
{{- end }}
{{- end }}

{{- define "blockyard.settings.worker" }}
{{- if eq .Values.overlay "gpu-tp" "leader-worker-set" }}
BLOCKYARD_ALLOW_INSECURE_GROUP: 'true'
{{- end }}
{{- if .Values.components.internalTls }}
BLOCKYARD_INTERNAL_AUTHORITY: /etc/blockyard/identity/ca.crt
BLOCKYARD_INTERNAL_CERTIFICATE: /etc/blockyard/identity/tls.crt
BLOCKYARD_INTERNAL_KEY: /etc/blockyard/identity/tls.key
{{- end }}
BLOCKYARD_LOG_FORMAT: json
{{- if .Values.components.tracing }}
BLOCKYARD_TRACE_ENDPOINT: http://opentelemetry-collector.observability:4317
{{- end }}
{{- if eq .Values.overlay "gpu-tp" "leader-worker-set" }}
BLOCKYARD_WORKER_GROUP: blockyard-worker
{{- end }}
{{- if eq .Values.overlay "gpu-nvlink" }}
BLOCKYARD_WORKER_GROUP_HOST: 127.0.0.1
{{- end }}
{{- if .Values.components.monitoring }}
BLOCKYARD_WORKER_METRICS_PORT: '50072'
{{- end }}
{{- end }}

{{- define "blockyard.gateway.resources" }}
limits:
  memory: 1Gi
requests:
  cpu: 500m
  memory: 512Mi
{{- end }}

{{- define "blockyard.scheduler.resources" }}
limits:
  memory: 2Gi
requests:
  cpu: '1'
  memory: 512Mi
{{- end }}

{{- define "blockyard.worker" }}
metadata:
  annotations:
    {{- if .Values.components.modelFromHub }}
    checksum/settings: {{ print (include "blockyard.settings" (dict "root" . "name" "model")) (include "blockyard.settings" (dict "root" . "name" "worker")) | sha256sum | quote }}
    {{- else }}
    checksum/settings: {{ print (include "blockyard.settings" (dict "root" . "name" "worker")) | sha256sum | quote }}
    {{- end }}
  labels:
    app.kubernetes.io/component: worker
    app.kubernetes.io/instance: {{ .Release.Name | quote }}
    app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
    app.kubernetes.io/name: blockyard-worker
    app.kubernetes.io/part-of: blockyard
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
spec:
  {{- if eq .Values.overlay "gpu-tp" "leader-worker-set" }}
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - podAffinityTerm:
            labelSelector:
              matchLabels:
                app.kubernetes.io/name: blockyard-worker
            topologyKey: kubernetes.io/hostname
          weight: 100
  {{- end }}
  automountServiceAccountToken: false
  containers:
    - name: worker
      args:
        - python
        - -m
        - worker_service
        {{- if eq .Values.overlay "gpu-nvlink" }}
        - --num-workers=4
        - --worker-address=0.0.0.0:50080
        - --worker-health-port=50090
        {{- end }}
        {{- if ne .Values.overlay "gpu-nvlink" }}
        - --worker-address=0.0.0.0:50070
        - --worker-health-port=50071
        {{- end }}
      {{- if or (ne .Values.overlay "gpu") (and (eq .Values.overlay "gpu") .Values.components.modelFromHub) }}
      env:
        {{- if eq .Values.overlay "cpu" }}
        - name: BLOCKYARD_NUM_THREADS
          valueFrom:
            resourceFieldRef:
              containerName: worker
              divisor: '1'
              resource: requests.cpu
        {{- end }}
        {{- if eq .Values.overlay "gpu-nvlink" "leader-worker-set" }}
        - name: BLOCKYARD_WORKER_GROUP
          valueFrom:
            fieldRef:
              {{- if eq .Values.overlay "leader-worker-set" }}
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
              {{- else }}
              fieldPath: metadata.name
              {{- end }}
        {{- end }}
        {{- if eq .Values.overlay "gpu-tp" "leader-worker-set" }}
        - name: BLOCKYARD_WORKER_INDEX
          valueFrom:
            fieldRef:
              {{- if eq .Values.overlay "leader-worker-set" }}
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
              {{- else }}
              fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
              {{- end }}
        {{- end }}
        {{- if .Values.components.modelFromHub }}
        - name: HF_HOME
          value: /hub
        - name: HF_HUB_OFFLINE
          value: '1'
        {{- end }}
        {{- if .Values.components.gpuRdma }}
        - name: NCCL_IB_HCA
          value: mlx5
        - name: NCCL_IB_GID_INDEX
          value: '3'
        - name: NCCL_NET_GDR_LEVEL
          value: PIX
        {{- end }}
      {{- end }}
      envFrom:
        - configMapRef:
            name: blockyard-worker
      {{- if eq .Values.overlay "cpu" }}
      image: "{{ .Values.images.worker.name | default "blockyard-worker" }}:{{ .Values.images.worker.tag | default "dev" }}"
      {{- else }}
      image: "{{ .Values.images.worker.name | default "blockyard-worker" }}:{{ .Values.images.worker.tag | default "dev-cuda" }}"
      {{- end }}
      livenessProbe:
        failureThreshold: 6
        grpc:
          {{- if eq .Values.overlay "gpu-nvlink" }}
          port: 50090
          {{- else }}
          port: 50071
          {{- end }}
          service: liveness
        periodSeconds: 10
        timeoutSeconds: 5
      ports:
        {{- if .Values.components.monitoring }}
        - name: http-metrics
          containerPort: 50072
        {{- end }}
        - name: grpc-worker
          {{- if eq .Values.overlay "gpu-nvlink" }}
          containerPort: 50080
          {{- else }}
          containerPort: 50070
          {{- end }}
        - name: grpc-health
          {{- if eq .Values.overlay "gpu-nvlink" }}
          containerPort: 50090
          {{- else }}
          containerPort: 50071
          {{- end }}
      readinessProbe:
        failureThreshold: 3
        grpc:
          {{- if eq .Values.overlay "gpu-nvlink" }}
          port: 50090
          {{- else }}
          port: 50071
          {{- end }}
          service: loaded
        periodSeconds: 5
        timeoutSeconds: 5
      resources:
        {{- mergeOverwrite (include "blockyard.worker.resources" . | fromYaml) (.Values.worker.resources | default dict) | toYaml | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop:
            - ALL
        readOnlyRootFilesystem: true
      startupProbe:
        failureThreshold: 60
        grpc:
          {{- if eq .Values.overlay "gpu-nvlink" }}
          port: 50090
          {{- else }}
          port: 50071
          {{- end }}
          service: liveness
        periodSeconds: 2
        timeoutSeconds: 5
      volumeMounts:
        {{- if .Values.components.modelVolume }}
        - name: models
          mountPath: /mnt/models
          readOnly: true
        {{- end }}
        {{- if .Values.components.modelFromHub }}
        - name: hub
          mountPath: /hub
          readOnly: true
        {{- end }}
        {{- if .Values.components.internalTls }}
        - name: identity
          mountPath: /etc/blockyard/identity
          readOnly: true
        {{- end }}
        {{- if eq .Values.overlay "gpu-nvlink" "gpu-tp" "leader-worker-set" }}
        - name: shared-memory
          mountPath: /dev/shm
        {{- end }}
        - name: tmp
          mountPath: /tmp
  enableServiceLinks: false
  {{- if ne .Values.imagePullSecrets nil }}
  imagePullSecrets: {{ toJson .Values.imagePullSecrets }}
  {{- end }}
  {{- if .Values.components.modelFromHub }}
  initContainers:
    - name: fetch-model
      args:
        - |
          import os
          from blockyard.model_files import resolve_model

          resolve_model(os.environ["BLOCKYARD_MODEL"], os.environ["BLOCKYARD_REVISION"], "weights")
      command:
        - python
        - -c
      env:
        - name: HF_HOME
          value: /hub
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              {{- if ne .Values.secrets.hub nil }}
              name: {{ toJson .Values.secrets.hub }}
              {{- else }}
              name: blockyard-hub
              {{- end }}
              key: token
              optional: true
      envFrom:
        - configMapRef:
            name: blockyard-model
      image: "{{ .Values.images.control.name | default "blockyard-control" }}:{{ .Values.images.control.tag | default "dev" }}"
      resources:
        limits:
          memory: 4Gi
        requests:
          cpu: 500m
          memory: 1Gi
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop:
            - ALL
        readOnlyRootFilesystem: true
      volumeMounts:
        - name: hub
          mountPath: /hub
        - name: tmp
          mountPath: /tmp
  {{- end }}
  {{- if ne .Values.worker.nodeSelector nil }}
  nodeSelector: {{ toJson .Values.worker.nodeSelector }}
  {{- end }}
  securityContext:
    {{- if .Values.components.modelFromHub }}
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
    runAsGroup: 65532
    runAsNonRoot: true
    runAsUser: 65532
    seccompProfile:
      type: RuntimeDefault
  terminationGracePeriodSeconds: 15
  {{- if ne .Values.worker.tolerations nil }}
  tolerations: {{ toJson .Values.worker.tolerations }}
  {{- else if ne .Values.overlay "cpu" }}
  tolerations:
    - effect: NoSchedule
      key: nvidia.com/gpu
      operator: Exists
  {{- end }}
  {{- if eq .Values.overlay "cpu" "gpu" "gpu-nvlink" }}
  topologySpreadConstraints:
    - labelSelector:
        matchLabels:
          app.kubernetes.io/name: blockyard-worker
      maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
  {{- end }}
  volumes:
    {{- if .Values.components.modelVolume }}
    - name: models
      persistentVolumeClaim:
        claimName: blockyard-models
        readOnly: true
    {{- end }}
    {{- if .Values.components.modelFromHub }}
    - name: hub
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes:
              - ReadWriteOnce
            resources:
              requests:
                {{- if ne .Values.storage.hub.size nil }}
                storage: {{ toJson .Values.storage.hub.size }}
                {{- else }}
                storage: 50Gi
                {{- end }}
            {{- if ne .Values.storage.hub.className nil }}
            storageClassName: {{ toJson .Values.storage.hub.className }}
            {{- end }}
    {{- end }}
    {{- if .Values.components.internalTls }}
    - name: identity
      secret:
        {{- if ne .Values.secrets.workerIdentity nil }}
        secretName: {{ toJson .Values.secrets.workerIdentity }}
        {{- else }}
        secretName: blockyard-worker-identity
        {{- end }}
    {{- end }}
    {{- if eq .Values.overlay "gpu-nvlink" "gpu-tp" "leader-worker-set" }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        {{- if eq .Values.overlay "gpu-nvlink" }}
        sizeLimit: 8Gi
        {{- else }}
        sizeLimit: 1Gi
        {{- end }}
    {{- end }}
    - name: tmp
      emptyDir:
        {{- if eq .Values.overlay "cpu" }}
        sizeLimit: 2Gi
        {{- else }}
        sizeLimit: 8Gi
        {{- end }}
{{- end }}

{{- define "blockyard.worker.resources" }}
limits:
  {{- if eq .Values.overlay "cpu" }}
  memory: 8Gi
  {{- else if eq .Values.overlay "gpu-nvlink" }}
  memory: 104Gi
  {{- else }}
  memory: 24Gi
  {{- end }}
  {{- if ne .Values.overlay "cpu" }}
  {{- if eq .Values.overlay "gpu-nvlink" }}
  nvidia.com/gpu: '4'
  {{- else }}
  nvidia.com/gpu: '1'
  {{- end }}
  {{- end }}
  {{- if .Values.components.gpuRdma }}
  rdma/ib: '1'
  {{- end }}
requests:
  {{- if eq .Values.overlay "gpu-nvlink" }}
  cpu: '16'
  {{- else }}
  cpu: '4'
  {{- end }}
  {{- if eq .Values.overlay "cpu" }}
  memory: 8Gi
  {{- else if eq .Values.overlay "gpu-nvlink" }}
  memory: 104Gi
  {{- else }}
  memory: 24Gi
  {{- end }}
{{- end }}
