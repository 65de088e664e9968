{{/* Where the model comes from: a map with kind (builtin, pvc, oci, hf), path, name, and what each kind needs. */}}
{{- define "kvbaton.model" -}}
{{- $uri := .Values.model.uri -}}
{{- $kind := regexFind "^[a-z]+" $uri -}}
{{- $rest := regexReplaceAll "^[a-z]+://" $uri "" | trimSuffix "/" -}}
{{- $model := dict "kind" $kind -}}
{{- if eq $kind "builtin" }}
{{- $_ := set $model "path" "/models/models/SmolLM2-135M-Instruct" }}
{{- else if eq $kind "pvc" }}
{{- $claim := regexFind "^[^/]+" $rest }}
{{- $_ := set $model "claim" $claim }}
{{- $_ := set $model "path" (printf "/models%s" (trimPrefix $claim $rest)) }}
{{- $_ := set $model "name" (base (ternary $rest $claim (contains "/" $rest))) }}
{{- else if eq $kind "oci" }}
{{- $parts := splitn "//" 2 $rest }}
{{- $_ := set $model "image" $parts._0 }}
{{- $_ := set $model "path" (printf "/models%s" (ternary "" (printf "/%s" $parts._1) (empty $parts._1))) }}
{{- $_ := set $model "name" (base ($parts._1 | default (regexReplaceAll "[:@][^/]*$" $parts._0 ""))) }}
{{- else if eq $kind "hf" }}
{{- $parts := splitn "@" 2 $rest }}
{{- $_ := set $model "repository" $parts._0 }}
{{- $_ := set $model "revision" ($parts._1 | default "main") }}
{{- $_ := set $model "path" (printf "/models/%s" (base $parts._0)) }}
{{- end }}
{{- $_ := set $model "name" (.Values.model.servedName | default $model.name | default (base $model.path)) }}
{{- toYaml $model }}
{{- end }}

{{- define "kvbaton.modelFetched" -}}
{{- if has (include "kvbaton.model" . | fromYaml).kind (list "builtin" "hf") }}true{{ end }}
{{- end }}

{{/* The container that puts the model into the pod's emptyDir before the others start. */}}
{{- define "kvbaton.modelInit" -}}
{{- $model := include "kvbaton.model" . | fromYaml -}}
{{- if include "kvbaton.modelFetched" . }}
- name: model
  image: {{ include "kvbaton.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq $model.kind "builtin" }}
  command: [kvbaton]
  args: [model, import]
  {{- else }}
  command: [hf]
  args: [download, {{ $model.repository | quote }}, --revision, {{ $model.revision | quote }}, --local-dir, {{ $model.path | quote }}]
  {{- end }}
  env:
    {{- include "kvbaton.homeEnv" . | nindent 4 }}
    {{- if .Values.model.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .Values.model.tokenSecret | quote }}, key: HF_TOKEN}}
    {{- end }}
    {{- include "kvbaton.env" .Values.model.env | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 512Mi}
    limits: {memory: 2Gi}
  securityContext: {{- include "kvbaton.securityContext" (dict) | nindent 4 }}
  volumeMounts:
    - {name: home, mountPath: /home/kvbaton}
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}

{{- define "kvbaton.modelVolume" -}}
{{- $model := include "kvbaton.model" . | fromYaml -}}
- name: models
  {{- if eq $model.kind "pvc" }}
  persistentVolumeClaim: {claimName: {{ $model.claim | quote }}, readOnly: true}
  {{- else if eq $model.kind "oci" }}
  image: {reference: {{ $model.image | quote }}, pullPolicy: {{ .Values.image.pullPolicy }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.cacheSize | quote }}}
  {{- end }}
{{- end }}
