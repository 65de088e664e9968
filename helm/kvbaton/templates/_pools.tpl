{{- define "kvbaton.scaler" -}}
{{ .pool.scaler | default (ternary "planner" "chart" .root.Values.planner.enabled) }}
{{- end }}

{{- define "kvbaton.hasGpu" -}}
{{- if or (gt (int .gpu.count) 0) .gpu.dra.deviceClassName }}true{{ end }}
{{- end }}

{{/* Both rollout numbers as a map: GPU pools give a device back before they take the next one. */}}
{{- define "kvbaton.rollout" -}}
{{- $gpu := include "kvbaton.hasGpu" . -}}
{{- $surge := toString .rollout.maxSurge | default (ternary "0" "1" (not (empty $gpu))) -}}
{{- $unavailable := toString .rollout.maxUnavailable | default (ternary "1" "0" (not (empty $gpu))) -}}
maxSurge: {{ ternary $surge (int $surge) (contains "%" $surge) }}
maxUnavailable: {{ ternary $unavailable (int $unavailable) (contains "%" $unavailable) }}
{{- end }}

{{/* Devices of a worker pod's main container: GPUs by the plugin's name, fabric devices. */}}
{{- define "kvbaton.devices" -}}
{{- $devices := deepCopy .root.Values.fabric.resources -}}
{{- if gt (int .pool.gpu.count) 0 }}{{ $_ := set $devices .pool.gpu.resource .pool.gpu.count }}{{ end -}}
{{- toYaml $devices }}
{{- end }}

{{/* Settings that the chart decides; a pool's `settings` may add others but none of these. */}}
{{- define "kvbaton.workerSettings" -}}
{{- $values := .root.Values -}}
{{- $model := include "kvbaton.model" .root | fromYaml -}}
model: {{ $model.path | quote }}
served-model-name: {{ $model.name | quote }}
listen: {{ printf "%s:%d" $values.listenHost (int .pool.port) | quote }}
fabric-listen: {{ printf "%s:%d" $values.listenHost (ternary (int $values.fabric.port) 0 (eq .role "decode")) | quote }}
advertise: {{ $values.fabric.advertise | quote }}
secret-file: /etc/kvbaton/secret
device: {{ .pool.device | default (ternary "cuda" "cpu" (not (empty (include "kvbaton.hasGpu" .pool)))) | quote }}
drain-s: {{ .pool.drainSeconds }}
{{- end }}

{{- define "kvbaton.memlockCheck" -}}
{{- $check := toString .Values.fabric.memlock.check -}}
{{- if or (eq $check "true") (and (eq $check "auto") .Values.fabric.resources) }}true{{ end }}
{{- end }}
