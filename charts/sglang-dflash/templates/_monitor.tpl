{{/* How to scrape a server. `service` is what the scaling queries select by, `release` what the dashboards do. */}}
{{- define "sglang-dflash.scrape" -}}
port: http
path: /metrics
interval: {{ .Values.monitoring.monitor.interval }}
scrapeTimeout: {{ .Values.monitoring.monitor.scrapeTimeout }}
relabelings:
  - action: replace
    targetLabel: service
    replacement: {{ include "sglang-dflash.fullname" . | quote }}
  - action: replace
    targetLabel: release
    replacement: {{ .Release.Name | quote }}
{{- end }}

{{- define "sglang-dflash.monitorWanted" -}}
{{- $monitor := .root.Values.monitoring.monitor -}}
{{- $api := printf "monitoring.coreos.com/v1/%s" .kind -}}
{{- if eq $monitor.kind .kind }}{{ include "sglang-dflash.wanted" (dict "root" .root "create" $monitor.create "api" $api) }}{{ end }}
{{- end }}
