{{/* A DNS label of at most 40 characters, so that every suffix of ours fits into 63. */}}
{{- define "kvbaton.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- regexReplaceAll "[^a-z0-9-]+" (.Values.fullnameOverride | default $full | lower) "-" | trimAll "-" | trunc 40 | trimAll "-" -}}
{{- end }}

{{/* A label value: 63 characters, and nothing that an image tag may have and a label may not. */}}
{{- define "kvbaton.labelValue" -}}
{{- regexReplaceAll "[^A-Za-z0-9_.-]+" . "-" | trunc 63 | trimAll "-_." -}}
{{- end }}

{{- define "kvbaton.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ include "kvbaton.labelValue" .Release.Name | quote }}
{{- end }}

{{- define "kvbaton.labels" -}}
{{ include "kvbaton.selector" . }}
app.kubernetes.io/version: {{ include "kvbaton.labelValue" .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "kvbaton.labelValue" (printf "%s-%s" .Chart.Name .Chart.Version) | quote }}
{{- end }}

{{/* The labels of a pod: the user's, then ours, which selectors and the gateway's discovery stand on. */}}
{{- define "kvbaton.podLabels" -}}
{{- $ours := include "kvbaton.labels" .root | fromYaml -}}
{{- toYaml (merge (dict "kvbaton.io/role" .role) $ours (deepCopy .labels)) }}
{{- end }}

{{- define "kvbaton.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository ($image.tag | default .Chart.AppVersion | toString) }}
{{- end -}}
{{- end }}

{{- define "kvbaton.secretName" -}}
{{ .Values.auth.existingSecret | default (printf "%s-secret" (include "kvbaton.fullname" .)) }}
{{- end }}

{{- define "kvbaton.sccName" -}}
{{ .Values.openshift.scc.name | default (printf "%s-%s-memlock" .Release.Namespace (include "kvbaton.fullname" .)) }}
{{- end }}
