{{/* What every container of ours has. `capabilities`: added ones; `writableRoot`: for GPU runtimes that need it. */}}
{{- define "kvbaton.securityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: {{ not .writableRoot }}
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add: {{ toJson . }}
  {{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* An arbitrary UID has no home: everything that is written by habit goes to a declared emptyDir. */}}
{{- define "kvbaton.homeEnv" -}}
- {name: HOME, value: /home/kvbaton}
- {name: USER, value: kvbaton}
- {name: TMPDIR, value: /tmp}
- {name: XDG_CACHE_HOME, value: /home/kvbaton/.cache}
- {name: HF_HOME, value: /home/kvbaton/.cache/huggingface}
- {name: TRITON_CACHE_DIR, value: /home/kvbaton/.cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /home/kvbaton/.cache/inductor}
- {name: CUPY_CACHE_DIR, value: /home/kvbaton/.cache/cupy}
- {name: KVBATON__CACHE_DIR, value: /models}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{- define "kvbaton.homeVolumes" -}}
- {name: home, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- name: secret
  secret:
    secretName: {{ include "kvbaton.secretName" . | quote }}
    items: [{key: {{ .Values.auth.secretKey | quote }}, path: secret}]
{{- end }}

{{- define "kvbaton.homeMounts" -}}
- {name: home, mountPath: /home/kvbaton}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models, readOnly: true}
- {name: secret, mountPath: /etc/kvbaton, readOnly: true}
{{- end }}

{{/* Startup and readiness ask /ready or /health as given, liveness always /health: a worker that loads is alive. */}}
{{- define "kvbaton.probes" -}}
startupProbe:
  httpGet: {path: {{ .startupPath }}, port: {{ .port }}}
  {{- toYaml .probes.startup | nindent 2 }}
  timeoutSeconds: 3
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}}
  {{- toYaml .probes.readiness | nindent 2 }}
  timeoutSeconds: 3
livenessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  {{- toYaml .probes.liveness | nindent 2 }}
  timeoutSeconds: 5
{{- end }}

{{- define "kvbaton.grace" -}}
{{- $least := add (.leaveSeconds | default .preStopSeconds | default 0) .drainSeconds | int -}}
{{- .terminationGracePeriodSeconds | int | default (add $least 15 | int) -}}
{{- end }}

{{/* Where and beside what a pod may run; `selector` are the labels of its own kind. */}}
{{- define "kvbaton.placement" -}}
{{- $block := .block -}}
{{- with $block.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $block.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $block.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $block.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $block.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- if $block.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: {{ $block.topologySpread.maxSkew }}
    topologyKey: {{ $block.topologySpread.topologyKey | quote }}
    whenUnsatisfiable: {{ $block.topologySpread.whenUnsatisfiable }}
    labelSelector: {matchLabels: {{ toJson .selector }}}
{{- end }}
{{- end }}

{{/* A bundle of what an in-cluster client reads, with a token that the kubelet renews. */}}
{{- define "kvbaton.apiVolume" -}}
- name: api
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
