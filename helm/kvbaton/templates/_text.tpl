{{/* A value as a flag or a variable wants it: whole numbers without an exponent, lists with commas. */}}
{{- define "kvbaton.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end -}}
{{- else if kindIs "slice" . -}}
{{- $parts := list }}{{ range . }}{{ $parts = append $parts (include "kvbaton.text" .) }}{{ end }}{{ join "," $parts -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* Flags from a map of setting to value, sorted by name. */}}
{{- define "kvbaton.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $name | quote }}
{{- else }}
- {{ printf "--%s=%s" $name (include "kvbaton.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Environment from a map of name to text, number, boolean, or a map with valueFrom. */}}
{{- define "kvbaton.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  {{- if kindIs "map" $value }}
  {{- toYaml $value | nindent 2 }}
  {{- else }}
  value: {{ include "kvbaton.text" $value | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Bytes of a Kubernetes quantity. */}}
{{- define "kvbaton.bytes" -}}
{{- $text := include "kvbaton.text" . -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?([KMGT]i|[kMGT])?$" $text) }}{{ fail (printf "cannot read the quantity %q: write it like 512Mi or 4Gi" $text) }}{{ end -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $factor := get (dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) $unit -}}
{{ mulf (float64 (trimSuffix $unit $text)) (float64 $factor) | floor | printf "%.0f" }}
{{- end }}

{{/* The resources of a container: what was asked for, /dev/shm added to memory, devices to requests and limits. */}}
{{- define "kvbaton.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $shm := include "kvbaton.bytes" .shm | float64 -}}
{{- range $kind := list "requests" "limits" }}
{{- $wanted := get $resources $kind | default dict }}
{{- if hasKey $wanted "memory" }}
{{- $bytes := include "kvbaton.bytes" $wanted.memory | float64 }}
{{- $_ := set $wanted "memory" (printf "%.0fMi" (divf (addf $bytes $shm) 1048576.0 | ceil)) }}
{{- end }}
{{- $wanted = merge (deepCopy $.devices) $wanted }}
{{- if $wanted }}{{ $_ := set $resources $kind $wanted }}{{ end }}
{{- end }}
{{- with .claims }}{{ $_ := set $resources "claims" . }}{{ end }}
{{- toYaml $resources }}
{{- end }}
