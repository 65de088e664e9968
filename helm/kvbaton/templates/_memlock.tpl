{{/* Fails the pod with a sentence where the node's limit on locked memory would make the fabric fail. */}}
{{- define "kvbaton.memlockInit" -}}
- name: memlock
  image: {{ include "kvbaton.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -ec]
  args:
    - |
      limit=$(ulimit -l)
      echo "locked memory: $limit KiB"
      [ "$limit" = unlimited ] || [ "$limit" -ge {{ int64 .root.Values.fabric.memlock.minimumKiB }} ] || {
        echo "RDMA registers memory, which needs at least {{ int64 .root.Values.fabric.memlock.minimumKiB }} KiB of it: raise" \
             "default_ulimits of the container runtime, or set openshift.scc.create" >&2
        exit 1
      }
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  securityContext: {{- include "kvbaton.securityContext" (dict "capabilities" .capabilities) | nindent 4 }}
{{- end }}
