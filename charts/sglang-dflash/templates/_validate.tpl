{{/* Options of the engine that are the chart's own, with the way out. */}}
{{- define "sglang-dflash.reservedOptions" -}}
host: leave it out, since the pod serves on every address
port: leave it out; service.port is what clients see
config: use engineConfig
pair: use device=cpu and model.tinyPair
enable-metrics: leave it out, since metrics are always on
drain-timeout-seconds: use drainTimeoutSeconds
nnodes: use nodes
node-rank: use nodes
dist-init-addr: use nodes
ssl-certfile: leave it out, since probes and the Service speak HTTP; use ingress.tlsSecret or a gateway
ssl-keyfile: leave it out, since probes and the Service speak HTTP; use ingress.tlsSecret or a gateway
api-key: put the key into a Secret and name it in apiKey.existingSecret
api-key-file: use apiKey.existingSecret
admin-api-key: put the key into a Secret and name it in adminApiKey.existingSecret
admin-api-key-file: use adminApiKey.existingSecret
{{- end }}

{{/* Options that the engine refuses beside a ratio below 1, with the value at which they are off. */}}
{{- define "sglang-dflash.unboundedOptions" -}}
enable-hierarchical-cache: false
enable-unified-memory: false
enable-hisparse: false
enable-lmcache: false
enable-flexkv: false
enable-unified-cache-external-linker: false
radix-cache-backend: null
enable-kv-cache-sharding: false
enable-page-major-kv-layout: false
disaggregation-mode: "null"
enable-pd-role-switch: false
disaggregation-decode-enable-offload-kvcache: false
dcp-size: 1
kv-canary: none
{{- end }}

{{/* Every rule that goes across values. Each message names the values and the way out. */}}
{{- define "sglang-dflash.validate" -}}
{{- $errors := list -}}
{{- $v := .Values -}}
{{- $options := fromYaml (include "sglang-dflash.engineOptions" .) -}}
{{- $reserved := fromYaml (include "sglang-dflash.reservedOptions" .) -}}
{{- $cpu := eq $v.device "cpu" -}}

{{- /* Options given by hand */ -}}
{{- range $name, $_ := $v.engineConfig -}}
  {{- with get $reserved (include "sglang-dflash.engineOptionName" $name) -}}
    {{- $errors = append $errors (printf "engineConfig sets %s, which the chart does itself: %s" $name .) -}}
  {{- end -}}
{{- end -}}
{{- $arguments := dict -}}
{{- range $v.extraArgs -}}
  {{- if hasPrefix "--" . -}}
    {{- $name := include "sglang-dflash.engineOptionName" (splitList "=" . | first) -}}
    {{- $_ := set $arguments $name true -}}
    {{- if hasKey $reserved $name -}}
      {{- $errors = append $errors (printf "extraArgs sets --%s, which the chart does itself: %s" $name (get $reserved $name)) -}}
    {{- else if hasKey $options $name -}}
      {{- $errors = append $errors (printf "extraArgs sets --%s, which engine.yaml has too: use its value, or engineConfig" $name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $v.extraEnv -}}
  {{- if and .value (has .name (list "SGLANG_API_KEY" "SGLANG_ADMIN_API_KEY" "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN")) -}}
    {{- $errors = append $errors (printf "extraEnv sets %s to a literal value that everyone can read: use apiKey, adminApiKey or huggingFaceToken with existingSecret" .name) -}}
  {{- end -}}
{{- end -}}

{{- /* Speculation and its draft pool */ -}}
{{- $ratio := get $options "speculative-draft-kv-ratio" -}}
{{- $window := get $options "speculative-draft-window-size" -}}
{{- $block := get $options "speculative-dflash-block-size" -}}
{{- if not (hasKey $options "speculative-draft-kv-ratio") -}}
  {{- if lt (float64 $v.speculative.draftKvRatio) 1.0 -}}
    {{- $errors = append $errors (printf "speculative.draftKvRatio is %v, but model.draft is empty: set speculative.draftKvRatio=1, or name a draft" $v.speculative.draftKvRatio) -}}
  {{- end -}}
{{- else if or (le (float64 $ratio) 0.0) (gt (float64 $ratio) 1.0) -}}
  {{- $errors = append $errors (printf "speculative.draftKvRatio is %v: it must be greater than 0 and at most 1" $ratio) -}}
{{- else if lt (float64 $ratio) 1.0 -}}
  {{- $below := printf "speculative.draftKvRatio is %v" $ratio -}}
  {{- $leave := "or set speculative.draftKvRatio=1" -}}
  {{- $algorithm := get $options "speculative-algorithm" | default (ternary "DFLASH" "none" $cpu) -}}
  {{- if ne $algorithm "DFLASH" -}}
    {{- $errors = append $errors (printf "%s, which needs the algorithm DFLASH, not %s: take speculative-algorithm out of engineConfig, %s" $below $algorithm $leave) -}}
  {{- end -}}
  {{- if and $cpu (eq $v.model.tinyPair "swa") -}}
    {{- $errors = append $errors (printf "%s, but the target of model.tinyPair=swa has sliding-window layers of its own: set model.tinyPair=qwen3 or gdn, %s" $below $leave) -}}
  {{- end -}}
  {{- if not $window -}}
    {{- $errors = append $errors (printf "%s, but there is no speculative.draftWindowSize: set it to the sliding_window of the draft's config.json, %s" $below $leave) -}}
  {{- end -}}
  {{- range $name, $off := fromYaml (include "sglang-dflash.unboundedOptions" $) -}}
    {{- $value := get $options $name -}}
    {{- if or (hasKey $arguments $name) (and (not (empty $value)) (ne (toString $value) (toString $off))) -}}
      {{- $errors = append $errors (printf "%s, which does not go with %s: drop that option, %s" $below $name $leave) -}}
    {{- end -}}
  {{- end -}}
  {{- $chunk := get $options "chunked-prefill-size" -}}
  {{- if and (hasKey $options "chunked-prefill-size") (le (int $chunk) 0) -}}
    {{- $errors = append $errors (printf "%s, which does not go with chunked-prefill-size %v: give a positive number of tokens, %s" $below $chunk $leave) -}}
  {{- end -}}
  {{- $dtype := get $options "speculative-draft-kv-cache-dtype" | default (get $options "kv-cache-dtype") -}}
  {{- if has $dtype (list "mxfp8" "nvfp4" "fp4_mx_block16") -}}
    {{- $errors = append $errors (printf "%s, which does not go with a draft KV cache of %s: set engineConfig.speculative-draft-kv-cache-dtype to another one, %s" $below $dtype $leave) -}}
  {{- end -}}
  {{- $requests := get $options "max-running-requests" -}}
  {{- $total := int (get $options "max-total-tokens") -}}
  {{- if not $requests -}}
    {{- $errors = append $errors (printf "%s, but maxRunningRequests is not set, and the engine's 48 need more than most draft pools hold: set maxRunningRequests (8 goes with ratio 0.25 on one H200), %s" $below $leave) -}}
  {{- else if and $total $window -}}
    {{- $cap := fromYaml (include "sglang-dflash.requestCap" $) -}}
    {{- $tokens := floor (mulf $total $ratio) | int -}}
    {{- if lt $tokens (int $cap.tokens) -}}
      {{- $fit := div (sub $tokens (int $cap.fixed)) (int $cap.perRequest) -}}
      {{- $most := printf "maxRunningRequests=%d" (int $fit) -}}
      {{- $least := divf (ceil (divf (mulf $cap.tokens 1000.0) $total)) 1000.0 -}}
      {{- $ways := list -}}
      {{- if le $least 1.0 }}{{ $ways = append $ways (printf "set speculative.draftKvRatio=%v" $least) }}{{ end -}}
      {{- if gt (int $fit) 0 }}{{ $ways = append $ways (printf "set %s" $most) }}{{ end -}}
      {{- $ways = append $ways "raise engineConfig.max-total-tokens" -}}
      {{- $errors = append $errors (printf "%s of max-total-tokens %d, a draft pool of %d tokens, but maxRunningRequests %v can hold %d: %s" $below $total $tokens $requests (int $cap.tokens) (join ", or " $ways)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and $window $block (lt (int $window) (int $block)) -}}
  {{- $errors = append $errors (printf "speculative.draftWindowSize is %v, less than speculative.blockSize %v: raise the window, or lower the block" $window $block) -}}
{{- end -}}

{{- /* Devices and nodes */ -}}
{{- if $cpu -}}
  {{- if and $window (gt (int $window) 64) -}}
    {{- $errors = append $errors (printf "device is cpu and speculative.draftWindowSize %v, but the drafts of the tiny pairs see 64 tokens: set speculative.draftWindowSize=64 (examples/cpu.yaml has all that goes with device cpu)" $window) -}}
  {{- end -}}
  {{- if or (gt (int $v.nodes) 1) (gt (int (get $options "tp-size")) 1) -}}
    {{- $errors = append $errors "device is cpu, which runs on one node in one rank: set nodes=1 and tensorParallelSize=1, or device=cuda" -}}
  {{- end -}}
{{- else -}}
  {{- $ranks := mul (int (get $options "tp-size")) (int (get $options "pp-size" | default 1)) -}}
  {{- if not (get $options "enable-dp-attention") -}}
    {{- $ranks = mul $ranks (int (get $options "dp-size" | default 1)) -}}
  {{- end -}}
  {{- $gpus := mul (int $v.gpu.count) (int $v.nodes) -}}
  {{- if ne $ranks $gpus -}}
    {{- $errors = append $errors (printf "the engine takes %d GPUs (tensorParallelSize %v, times pp-size and dp-size in engineConfig), but gpu.count %d on nodes %d are %d: set them so that they agree" $ranks (get $options "tp-size") (int $v.gpu.count) (int $v.nodes) $gpus) -}}
  {{- end -}}
{{- end -}}

{{- /* Pods and what they share */ -}}
{{- $replicas := int (ternary $v.autoscaling.maxReplicas $v.replicas $v.autoscaling.enabled) -}}
{{- range $name, $cache := dict "modelCache" $v.modelCache "jitCache" $v.jitCache -}}
  {{- if and $cache.persistent (not $cache.existingClaim) (gt (mul $replicas (int $v.nodes)) 1) (not (has "ReadWriteMany" $cache.accessModes)) -}}
    {{- $errors = append $errors (printf "%s.accessModes is %s, which one node can mount, but there are up to %d pods: set it to [ReadWriteMany] with a storage class that has it, or %s.persistent=false" $name (join ", " $cache.accessModes) (mul $replicas (int $v.nodes)) $name) -}}
  {{- end -}}
{{- end -}}
{{- $least := int (add $v.preStopSleepSeconds $v.drainTimeoutSeconds 20) -}}
{{- if lt (int (include "sglang-dflash.gracePeriodSeconds" .)) $least -}}
  {{- $errors = append $errors (printf "terminationGracePeriodSeconds is %v, less than the %d that preStopSleepSeconds %v, drainTimeoutSeconds %v and 20 s to leave need: raise it, or leave it out" $v.terminationGracePeriodSeconds $least $v.preStopSleepSeconds $v.drainTimeoutSeconds) -}}
{{- end -}}
{{- if and (has (toString $v.rollout.maxSurge) (list "0" "0%")) (has (toString $v.rollout.maxUnavailable) (list "0" "0%")) -}}
  {{- $errors = append $errors "rollout.maxSurge and rollout.maxUnavailable are both 0, so an update could never start: set one of them to 1" -}}
{{- end -}}

{{- /* Around the workload */ -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
  {{- $errors = append $errors "httpRoute.enabled, but httpRoute.parentRefs is empty: name the gateway to attach to" -}}
{{- end -}}
{{- if $v.autoscaling.enabled -}}
  {{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
    {{- $errors = append $errors (printf "autoscaling.minReplicas is %v, more than autoscaling.maxReplicas %v: swap or change them" $v.autoscaling.minReplicas $v.autoscaling.maxReplicas) -}}
  {{- end -}}
  {{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.keda.serverAddress) -}}
    {{- $errors = append $errors "autoscaling.kind is keda, but autoscaling.keda.serverAddress is empty: give the address of Prometheus, such as http://prometheus.monitoring:9090" -}}
  {{- end -}}
{{- end -}}
{{- with $v.monitoring.monitor -}}
  {{- if gt (trimSuffix "s" .scrapeTimeout | int) (trimSuffix "s" .interval | int) -}}
    {{- $errors = append $errors (printf "monitoring.monitor.scrapeTimeout is %s, longer than monitoring.monitor.interval %s: lower it" .scrapeTimeout .interval) -}}
  {{- end -}}
{{- end -}}

{{- with $errors -}}
  {{- fail (printf "\n%s" (join "\n" .)) -}}
{{- end -}}
{{- end }}
