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

{{/* The groups of a rule file for this release alone, with its thresholds (monitoring/alerts.py). Takes root and path. */}}
{{- define "sglang-dflash.ruleGroups" -}}
{{- $values := .root.Values.monitoring.rules -}}
{{- $target := printf "namespace=%q,service=%q" .root.Release.Namespace (include "sglang-dflash.fullname" .root) -}}
{{- $groups := list -}}
{{- range (.root.Files.Get .path | fromYaml).groups -}}
  {{- $rules := list -}}
  {{- range .rules -}}
    {{- $rule := set . "expr" (replace "release!=\"\"" $target .expr) -}}
    {{- with get $values.alerts (.alert | default "") -}}
      {{- $rule = mergeOverwrite $rule (dict "for" (get . "for") "labels" (dict "severity" .severity)) -}}
      {{- if hasKey . "threshold" -}}
        {{- $rule = set $rule "expr" (regexReplaceAll "\\S+$" $rule.expr (toString .threshold)) -}}
      {{- end -}}
      {{- $url := replace "docs/runbook.md" $values.runbookUrl $rule.annotations.runbook_url -}}
      {{- $rule = set $rule "annotations" (set $rule.annotations "runbook_url" $url) -}}
      {{- if not .enabled }}{{ $rule = dict }}{{ end -}}
    {{- end -}}
    {{- if $rule }}{{ $rules = append $rules $rule }}{{ end -}}
  {{- end -}}
  {{- $groups = append $groups (set . "rules" $rules) -}}
{{- end -}}
{{ toYaml (dict "groups" $groups) }}
{{- end }}
