{{/* Short enough for the names that StatefulSets and LeaderWorkerSets derive from it. */}}
{{- define "sglang-dflash.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 48 | trimSuffix "-" -}}
{{- end }}

{{/* Labels by which objects find pods. They never change: a Deployment's selector cannot. */}}
{{- define "sglang-dflash.selectorLabels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* The pods that answer requests: of a group of nodes only its leader. */}}
{{- define "sglang-dflash.serverSelectorLabels" -}}
{{ include "sglang-dflash.selectorLabels" . }}
app.kubernetes.io/component: server
{{- end }}

{{/* Metadata of an object: name, labels, annotations. Takes root and optionally suffix, labels, annotations. */}}
{{- define "sglang-dflash.metadata" -}}
{{- $root := .root -}}
{{- $own := merge (fromYaml (include "sglang-dflash.selectorLabels" $root)) (dict
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63)
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service) -}}
name: {{ printf "%s%s" (include "sglang-dflash.fullname" $root) (.suffix | default "") | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- merge $own (.labels | default dict) $root.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "sglang-dflash.serviceAccountName" -}}
{{- $made := .Values.serviceAccount.create | ternary (include "sglang-dflash.fullname" .) "default" -}}
{{- .Values.serviceAccount.name | default $made -}}
{{- end }}

{{- define "sglang-dflash.image" -}}
{{- $image := .Values.image -}}
{{- $tag := $image.tag | default (printf "%s%s" .Chart.AppVersion (eq .Values.device "cpu" | ternary "-cpu" "")) -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{/* The workload as other objects refer to it. */}}
{{- define "sglang-dflash.workload" -}}
{{- if gt (int .Values.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "sglang-dflash.fullname" . | quote }}
{{- end }}

{{/* "true" if the objects of an API group are wanted. Takes root, create (auto, always, never) and api. */}}
{{- define "sglang-dflash.wanted" -}}
{{- if or (eq .create "always") (and (eq .create "auto") (.root.Capabilities.APIVersions.Has .api)) }}true{{ end }}
{{- end }}

{{/* A volume for caches: a claim or an emptyDir. Takes root, name, cache. */}}
{{- define "sglang-dflash.cacheVolume" -}}
name: {{ .name }}
{{- if or .cache.persistent .cache.existingClaim }}
persistentVolumeClaim:
  claimName: {{ .cache.existingClaim | default (printf "%s-%s" (include "sglang-dflash.fullname" .root) .name) | quote }}
{{- else }}
emptyDir:
  sizeLimit: {{ .cache.size | quote }}
{{- end }}
{{- end }}

{{/* The claim for such a volume. */}}
{{- define "sglang-dflash.cacheClaim" -}}
{{- if and .cache.persistent (not .cache.existingClaim) }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- $keep := .cache.retain | ternary (dict "helm.sh/resource-policy" "keep") dict }}
  {{- include "sglang-dflash.metadata" (dict "root" .root "suffix" (printf "-%s" .name) "annotations" $keep) | nindent 2 }}
spec:
  accessModes:
    {{- toYaml .cache.accessModes | nindent 4 }}
  resources:
    requests:
      storage: {{ .cache.size | quote }}
  {{- with .cache.storageClassName }}
  storageClassName: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}
