{{/* Environment that the chart sets, by name. */}}
{{- define "sglang-dflash.environment" -}}
# Every cache has its place on a volume: the root file system is read-only and any user id must do.
HOME: /cache
XDG_CACHE_HOME: /cache/xdg
TRITON_CACHE_DIR: /cache/triton
TORCHINDUCTOR_CACHE_DIR: /cache/inductor
FLASHINFER_WORKSPACE_BASE: /cache
SGLANG_CACHE_DIR: /cache/sglang
SGLANG_DG_CACHE_DIR: /cache/deep_gemm
CUDA_CACHE_PATH: /cache/cuda
NUMBA_CACHE_DIR: /cache/numba
OUTLINES_CACHE_DIR: /cache/outlines
HF_HOME: /models
TMPDIR: /tmp
# A health check that generates fails while a long prefill or a compilation runs; /health then only says that the
# process answers, and the engine's own watchdog ends it when it hangs.
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION: "false"
{{- if eq .Values.device "cpu" }}
SGLANG_PLATFORM: cpu_reference
{{- end }}
{{- end }}

{{- define "sglang-dflash.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
periodSeconds: {{ int .timing.periodSeconds }}
timeoutSeconds: {{ int .timing.timeoutSeconds }}
failureThreshold: {{ int .timing.failureThreshold }}
{{- end }}

{{/* Time until a stopping pod is killed. 20 s after the drain deadline the server gives up by itself. */}}
{{- define "sglang-dflash.gracePeriodSeconds" -}}
{{- .Values.terminationGracePeriodSeconds | default (add .Values.preStopSleepSeconds .Values.drainTimeoutSeconds 30) | int -}}
{{- end }}

{{/* Where pods may run and what they may do. */}}
{{- define "sglang-dflash.podCommon" -}}
serviceAccountName: {{ include "sglang-dflash.serviceAccountName" . | quote }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
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
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* A pod of the engine. Takes root and component: `server` answers requests, `worker` helps a server on another node. */}}
{{- define "sglang-dflash.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $server := eq .component "server" -}}
{{- $options := include "sglang-dflash.engineOptions" $root -}}
{{- $labels := merge (fromYaml (include "sglang-dflash.selectorLabels" $root)) (dict "app.kubernetes.io/component" .component) -}}
metadata:
  labels:
    {{- merge (dict) $labels $v.podLabels $v.commonLabels | toYaml | nindent 4 }}
  annotations:
    # A change of the engine's options rolls the pods; nothing else in the ConfigMap does.
    {{- merge (dict "checksum/engine" (sha256sum $options)) $v.podAnnotations $v.commonAnnotations | toYaml | nindent 4 }}
spec:
  {{- include "sglang-dflash.podCommon" $root | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "sglang-dflash.gracePeriodSeconds" $root }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $v.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $selector := dict "labelSelector" (dict "matchLabels" (fromYaml (include "sglang-dflash.serverSelectorLabels" $root))) }}
    {{- range . }}
    - {{ merge (dict) . $selector | toYaml | indent 6 | trim }}
    {{- end }}
  {{- end }}
  {{- with $v.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "sglang-dflash.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      {{- with $v.command }}
      command:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      args:
        - --config
        - /etc/sglang-dflash/config/engine.yaml
        {{- if gt (int $v.nodes) 1 }}
        # Set by LeaderWorkerSet in each pod of a group.
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --dist-init-addr=$(LWS_LEADER_ADDRESS):20000
        {{- end }}
        {{- with $v.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- $taken := dict }}
        {{- range $v.extraEnv }}{{ $_ := set $taken .name true }}{{ end }}
        {{- range $name, $value := fromYaml (include "sglang-dflash.environment" $root) }}
        {{- if not (hasKey $taken $name) }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
        {{- end }}
        {{- if $v.huggingFaceToken.existingSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ $v.huggingFaceToken.existingSecret | quote }}
              key: {{ $v.huggingFaceToken.secretKey | quote }}
        {{- end }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $v.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: http
          containerPort: 30000
          protocol: TCP
      {{- if $server }}
      startupProbe:
        {{- $attempts := div (add $v.startupTimeoutSeconds 9) 10 }}
        {{- include "sglang-dflash.probe" (dict "path" "/ready" "timing" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" $attempts)) | nindent 8 }}
      livenessProbe:
        {{- include "sglang-dflash.probe" (dict "path" "/health" "timing" $v.livenessProbe) | nindent 8 }}
      readinessProbe:
        {{- include "sglang-dflash.probe" (dict "path" "/ready" "timing" $v.readinessProbe) | nindent 8 }}
      {{- if $v.preStopSleepSeconds }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ int $v.preStopSleepSeconds | quote }}]
      {{- end }}
      {{- end }}
      # The engine says why it refuses to start on its last lines.
      terminationMessagePolicy: FallbackToLogsOnError
      {{- $gpus := dict }}
      {{- if ne $v.device "cpu" }}
      {{- $gpus = dict "limits" (dict $v.gpu.resource (int $v.gpu.count)) }}
      {{- end }}
      {{- with mergeOverwrite (deepCopy $v.resources) $gpus }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $v.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/sglang-dflash/config
          readOnly: true
        {{- if or $v.apiKey.existingSecret $v.adminApiKey.existingSecret }}
        - name: keys
          mountPath: /etc/sglang-dflash/keys
          readOnly: true
        {{- end }}
        - name: models
          mountPath: /models
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "sglang-dflash.fullname" $root | quote }}
    {{- if or $v.apiKey.existingSecret $v.adminApiKey.existingSecret }}
    - name: keys
      projected:
        # Readable for the group: the user id may be any, and fsGroup is the pod's.
        defaultMode: 0440
        sources:
          {{- range $file, $key := dict "api-key" $v.apiKey "admin-api-key" $v.adminApiKey }}
          {{- if $key.existingSecret }}
          - secret:
              name: {{ $key.existingSecret | quote }}
              items:
                - key: {{ $key.secretKey | quote }}
                  path: {{ $file }}
          {{- end }}
          {{- end }}
    {{- end }}
    - {{ include "sglang-dflash.cacheVolume" (dict "root" $root "name" "models" "cache" $v.modelCache) | indent 6 | trim }}
    - {{ include "sglang-dflash.cacheVolume" (dict "root" $root "name" "cache" "cache" $v.jitCache) | indent 6 | trim }}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $v.shmSize | quote }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
