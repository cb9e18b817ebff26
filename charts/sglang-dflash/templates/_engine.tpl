{{/* Second names of the engine's options that the chart or its rules know, as a map to the first. */}}
{{- define "sglang-dflash.engineAliases" -}}
model: model-path
speculative-draft-model: speculative-draft-model-path
tensor-parallel-size: tp-size
pipeline-parallel-size: pp-size
data-parallel-size: dp-size
attention-data-parallel-size: attn-dp-size
decode-context-parallel-size: dcp-size
enable-hicache: enable-hierarchical-cache
nccl-init-addr: dist-init-addr
{{- end }}

{{/* An option's first name: dashes, no alias. Takes a name as a person writes it, with or without leading dashes. */}}
{{- define "sglang-dflash.engineOptionName" -}}
{{- $name := . | trimPrefix "--" | replace "_" "-" -}}
{{- get (fromYaml (include "sglang-dflash.engineAliases" .)) $name | default $name -}}
{{- end }}

{{/*
`engine.yaml`: what the values say, then `engineConfig`. float64, since `--set` makes a text of a share; of null it makes
0, which is left out with all that is empty.
*/}}
{{- define "sglang-dflash.engineOptions" -}}
{{- $v := .Values -}}
{{- $options := dict
  "host" "0.0.0.0"
  "port" 30000
  "max-running-requests" $v.maxRunningRequests
  "context-length" $v.contextLength
  "tp-size" $v.tensorParallelSize
  "swa-full-tokens-ratio" (float64 $v.swaFullTokensRatio)
  "served-model-name" $v.model.name
  "enable-metrics" true
  "drain-timeout-seconds" $v.drainTimeoutSeconds
-}}
{{- if eq $v.device "cpu" -}}
  {{- $_ := set $options "pair" $v.model.tinyPair -}}
{{- else -}}
  {{- $_ := merge $options (dict
    "model-path" $v.model.target
    "revision" $v.model.revisions.target
    "trust-remote-code" $v.model.trustRemoteCode
    "mem-fraction-static" (float64 $v.memFractionStatic)) -}}
{{- end -}}
{{- if and $v.model.draft (ne $v.device "cpu") -}}
  {{- $_ := merge $options (dict
    "speculative-algorithm" "DFLASH"
    "speculative-draft-model-path" $v.model.draft
    "speculative-draft-model-revision" $v.model.revisions.draft) -}}
{{- end -}}
{{- if or $v.model.draft (eq $v.device "cpu") -}}
  {{- $_ := merge $options (dict
    "speculative-dflash-block-size" $v.speculative.blockSize
    "speculative-draft-window-size" $v.speculative.draftWindowSize
    "speculative-draft-kv-ratio" (float64 $v.speculative.draftKvRatio)) -}}
{{- end -}}
{{- if $v.apiKey.existingSecret -}}
  {{- $_ := set $options "api-key-file" "/etc/sglang-dflash/keys/api-key" -}}
{{- end -}}
{{- if $v.adminApiKey.existingSecret -}}
  {{- $_ := set $options "admin-api-key-file" "/etc/sglang-dflash/keys/admin-api-key" -}}
{{- end -}}
{{- range $name, $value := $options -}}
  {{- if or (empty $value) (eq (toString $value) "false") -}}
    {{- $_ := unset $options $name -}}
  {{- end -}}
{{- end -}}
{{- range $name, $value := $v.engineConfig -}}
  {{- $option := include "sglang-dflash.engineOptionName" $name -}}
  {{- if kindIs "invalid" $value }}{{ $_ := unset $options $option }}{{ else }}{{ $_ := set $options $option $value }}{{ end -}}
{{- end -}}
{{- toYaml $options -}}
{{- end }}

{{/*
Tokens that the running requests can hold in the draft's pool, by the engine's own formula (compute_swa_request_cap):
`tokens`, and its parts `perRequest` and `fixed`. Never more than the engine's own figure: what is not known here (the
default chunk size, which follows GPU memory; the page size of some backends; state checkpoints) counts at its least.
*/}}
{{- define "sglang-dflash.requestCap" -}}
{{- $options := fromYaml (include "sglang-dflash.engineOptions" .) -}}
{{- $interval := 128 -}}
{{- range .Values.extraEnv -}}
  {{- if eq .name "SGLANG_SWA_EVICTION_INTERVAL" }}{{ $interval = int .value }}{{ end -}}
{{- end -}}
{{- $block := int (get $options "speculative-dflash-block-size" | default (get $options "speculative-num-draft-tokens") | default 1) -}}
{{- $page := int (get $options "page-size" | default 1) -}}
{{- $window := int (get $options "speculative-draft-window-size") -}}
{{- $window = mul (div (add $window $page -1) $page) $page -}}
{{- $chunk := int (get $options "chunked-prefill-size" | default (hasKey $options "pair" | ternary 1024 2048)) -}}
{{- $overlap := not (get $options "disable-overlap-schedule") -}}
{{- $perRequest := add $window (mul $interval $block) $page ($overlap | ternary (mul 2 $block) 0) -}}
{{- $fixed := add (mul ($overlap | ternary 2 1) $chunk) $page -}}
{{- /* With data-parallel attention each rank has pools of its own, and its share of the requests. */ -}}
{{- $ranks := ternary (int (get $options "attn-dp-size" | default (get $options "dp-size") | default 1)) 1 (eq (toString (get $options "enable-dp-attention")) "true") -}}
{{- $requests := max 1 (div (int (get $options "max-running-requests")) $ranks) -}}
{{- $tokens := add (mul $perRequest $requests) $fixed -}}
{{- dict "perRequest" $perRequest "fixed" $fixed "tokens" $tokens | toYaml -}}
{{- end }}
