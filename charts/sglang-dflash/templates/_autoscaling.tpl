{{/*
Running and waiting requests of all servers that the label matchers pick. Each scheduler rank may export the same
figure, so ranks of a pod count once (but each data-parallel rank has its own), and only the series without priority is
the total.
*/}}
{{- define "sglang-dflash.requestsQuery" -}}
{{- $ranks := "max by (namespace, pod, dp_rank)" -}}
sum({{ $ranks }} (sglang:num_running_reqs{ {{- . -}} ,priority=""})) + sum({{ $ranks }} (sglang:num_queue_reqs{ {{- . -}} ,priority=""}))
{{- end }}

{{/* Name under which prometheus-adapter serves it. */}}
{{- define "sglang-dflash.requestsMetric" -}}
sglang_dflash_requests
{{- end }}
