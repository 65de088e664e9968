{{/* Fill the values from the profile, then refuse what contradicts itself, each with a sentence. Every template that
     reads what a profile may set begins with this; doing it twice changes nothing. */}}
{{- define "kvbaton.checks" -}}
{{- include "kvbaton.profile" . }}
{{- include "kvbaton.checkModel" . }}
{{- include "kvbaton.checkApis" . }}
{{- range $role := list "gateway" "prefill" "decode" }}
{{- $block := get $.Values $role }}
{{- $grace := int $block.terminationGracePeriodSeconds }}
{{- $first := ternary "leaveSeconds" "preStopSeconds" (eq $role "gateway") }}
{{- $least := add (int (get $block $first)) (int $block.drainSeconds) | int }}
{{- if and $grace (le $grace $least) }}{{ fail (printf "%s.terminationGracePeriodSeconds is %d: it must be more than %s + drainSeconds = %d, or running requests are killed" $role $grace $first $least) }}{{ end }}
{{- $rollout := $block.rollout }}
{{- if ne $role "gateway" }}{{ $rollout = include "kvbaton.rollout" $block | fromYaml }}{{ end }}
{{- if and (has (toString $rollout.maxSurge) (list "0" "0%")) (has (toString $rollout.maxUnavailable) (list "0" "0%")) }}{{ fail (printf "%s.rollout: maxSurge and maxUnavailable are both 0, so that no rollout could ever go on" $role) }}{{ end }}
{{- range $name := include "kvbaton.reservedSettings" $ | splitList " " }}
{{- if hasKey $block.settings $name }}{{ fail (printf "%s.settings.%s: the chart sets this one itself, from a value of its own" $role $name) }}{{ end }}
{{- end }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- include "kvbaton.checkPool" (dict "root" $ "role" $role "pool" (get $.Values $role)) }}
{{- end }}
{{- include "kvbaton.checkScalers" . }}
{{- include "kvbaton.checkFabric" . }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}{{ fail "httpRoute.parentRefs is empty: an HTTPRoute is served by the Gateways that it names" }}{{ end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) }}{{ fail "inferencePool.endpointPicker.name is empty: an InferencePool needs the Service of an endpoint picker" }}{{ end }}
{{- end }}

{{- define "kvbaton.reservedSettings" -}}
model served-model-name listen admin-listen fabric fabric-listen advertise secret secret-file device dtype kv-cache-gib leave-s drain-s role workers worker-selector worker-namespace api-credentials public-metrics
{{- end }}

{{- define "kvbaton.profile" -}}
{{- if .Values.profile }}
{{- $profile := .Files.Get (printf "values-%s.yaml" .Values.profile) | fromYaml }}
{{- $_ := merge .Values $profile }}
{{- end }}
{{- end }}

{{- define "kvbaton.checkModel" -}}
{{- $uri := .Values.model.uri -}}
{{- if not $uri }}{{ fail "model.uri is empty: set builtin://, pvc://CLAIM/PATH, oci://IMAGE or hf://ORG/NAME, or --set profile=cpu-demo for the built-in model on CPUs" }}{{ end }}
{{- if not (regexMatch "^(builtin://|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[^@ ]*)?|oci://[^/ ]+/[^ ]+|hf://[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(@[A-Za-z0-9._/-]+)?)$" $uri) }}{{ fail (printf "model.uri is %q: expected builtin://, pvc://CLAIM[/PATH], oci://REGISTRY/IMAGE[//PATH] or hf://ORG/NAME[@REVISION]" $uri) }}{{ end }}
{{- if contains ".." $uri }}{{ fail (printf "model.uri is %q: a path must not go up" $uri) }}{{ end }}
{{- if and (hasPrefix "oci://" $uri) (not (semverCompare ">=1.31-0" .Capabilities.KubeVersion.Version)) }}{{ fail (printf "model.uri is %q: image volumes need Kubernetes 1.31 or newer, this is %s" $uri .Capabilities.KubeVersion.Version) }}{{ end }}
{{- if and .Values.model.tokenSecret (not (hasPrefix "hf://" $uri)) }}{{ fail "model.tokenSecret is set and model.uri does not begin with hf://: nothing would use the token" }}{{ end }}
{{- end }}

{{- define "kvbaton.checkPool" -}}
{{- $role := .role -}}{{- $pool := .pool -}}{{- $gpu := .pool.gpu -}}
{{- if and (gt (int $gpu.count) 0) (not $gpu.resource) }}{{ fail (printf "%s.gpu.count is %d and %s.gpu.resource is empty: name the resource as your device plugin does, nvidia.com/gpu for example" $role (int $gpu.count) $role) }}{{ end }}
{{- if and $gpu.resource (not (gt (int $gpu.count) 0)) }}{{ fail (printf "%s.gpu.resource is %s and %s.gpu.count is 0: say how many a replica gets" $role $gpu.resource $role) }}{{ end }}
{{- if and $gpu.resource $gpu.dra.deviceClassName }}{{ fail (printf "%s.gpu has both resource and dra.deviceClassName: a GPU comes from the device plugin or from a resource claim" $role) }}{{ end }}
{{- if and $gpu.dra.deviceClassName (not (semverCompare ">=1.34-0" .root.Capabilities.KubeVersion.Version)) }}{{ fail (printf "%s.gpu.dra needs Kubernetes 1.34 or newer, this is %s" $role .root.Capabilities.KubeVersion.Version) }}{{ end }}
{{- if and (include "kvbaton.hasGpu" $pool) (eq $pool.device "cpu") }}{{ fail (printf "%s.device is cpu and the pod asks for a GPU" $role) }}{{ end }}
{{- if and (not (include "kvbaton.hasGpu" $pool)) (hasPrefix "cuda" $pool.device) }}{{ fail (printf "%s.device is %s and the pod asks for no GPU: set %s.gpu" $role $pool.device $role) }}{{ end }}
{{- if and $gpu.shared (not $pool.kvCacheGiB) (not (hasKey $pool.settings "num-blocks")) }}{{ fail (printf "%s.gpu.shared: pods that share a GPU have no isolation, so set %s.kvCacheGiB to this pod's part of its memory" $role $role) }}{{ end }}
{{- range $kind, $wanted := $pool.resources }}
{{- if and $gpu.resource (hasKey ($wanted | default dict) $gpu.resource) }}{{ fail (printf "%s.resources.%s names %s: say it once, as %s.gpu" $role $kind $gpu.resource $role) }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvbaton.checkScalers" -}}
{{- $planned := 0 }}
{{- range $role := list "prefill" "decode" }}
{{- $scaler := get (get $.Values $role) "scaler" }}
{{- if and (eq $scaler "planner") (not $.Values.planner.enabled) }}{{ fail (printf "%s.scaler is planner and planner.enabled is false: nobody would set the number of replicas" $role) }}{{ end }}
{{- if eq (include "kvbaton.scaler" (dict "root" $ "pool" (get $.Values $role))) "planner" }}{{ $planned = add1 $planned }}{{ end }}
{{- end }}
{{- if .Values.planner.enabled }}
{{- if not .Values.planner.image.repository }}{{ fail (printf "planner.enabled: kvbaton %s has no planner command yet. Set planner.image.repository to a controller of your own, or prefill.scaler and decode.scaler to external" .Chart.AppVersion) }}{{ end }}
{{- if ne (int $planned) 2 }}{{ fail "planner.enabled and one of prefill.scaler, decode.scaler is not planner: a pool has one owner, and the planner sizes both" }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvbaton.checkFabric" -}}
{{- $fabric := .Values.fabric }}
{{- $range := splitList "-" $fabric.portRange }}
{{- if ge (int (index $range 0)) (int (index $range 1)) }}{{ fail (printf "fabric.portRange is %s: expected FIRST-LAST" $fabric.portRange) }}{{ end }}
{{- if and .Values.networkPolicy.enabled (eq (int $fabric.port) 0) }}{{ fail "fabric.port is 0 and networkPolicy.enabled: a policy cannot name a port that is picked at start" }}{{ end }}
{{- if hasKey $fabric.env "UCX_TCP_PORT_RANGE" }}{{ fail "fabric.env.UCX_TCP_PORT_RANGE: set fabric.portRange, which the NetworkPolicies follow" }}{{ end }}
{{- if and .Values.openshift.scc.create (not $fabric.resources) }}{{ fail "openshift.scc.create and fabric.resources is empty: only workers with RDMA devices need IPC_LOCK" }}{{ end }}
{{- range $role := list "prefill" "decode" }}
{{- range $kind, $wanted := (get $.Values $role).resources }}
{{- range $name, $_ := $fabric.resources }}
{{- if hasKey ($wanted | default dict) $name }}{{ fail (printf "%s.resources.%s names %s: say it once, as fabric.resources" $role $kind $name) }}{{ end }}
{{- end }}
{{- end }}
{{- if and $fabric.port (eq (int (get $.Values $role).port) (int $fabric.port)) }}{{ fail (printf "%s.port and fabric.port are both %d" $role (int $fabric.port)) }}{{ end }}
{{- end }}
{{- if eq (int .Values.gateway.port) (int .Values.gateway.adminPort) }}{{ fail (printf "gateway.port and gateway.adminPort are both %d: the admin API belongs on no public port" (int .Values.gateway.port)) }}{{ end }}
{{- end }}

{{/* What was switched on needs an API that the cluster has. */}}
{{- define "kvbaton.checkApis" -}}
{{- $needs := list
  (list "route.enabled" .Values.route.enabled "route.openshift.io/v1")
  (list "httpRoute.enabled" .Values.httpRoute.enabled "gateway.networking.k8s.io/v1")
  (list "inferencePool.enabled" .Values.inferencePool.enabled "inference.networking.k8s.io/v1")
  (list "openshift.scc.create" .Values.openshift.scc.create "security.openshift.io/v1")
  (list "monitoring.serviceMonitor.enabled" .Values.monitoring.serviceMonitor.enabled "monitoring.coreos.com/v1")
  (list "monitoring.prometheusRule.enabled" .Values.monitoring.prometheusRule.enabled "monitoring.coreos.com/v1") }}
{{- range $need := $needs }}
{{- if and (index $need 1) (not ($.Capabilities.APIVersions.Has (index $need 2))) }}{{ fail (printf "%s needs the API %s, which this cluster does not have (with helm template: --api-versions %s)" (index $need 0) (index $need 2) (index $need 2)) }}{{ end }}
{{- end }}
{{- end }}
