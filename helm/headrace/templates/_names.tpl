{{/* Names and labels. Every object is called `<base>-<what>`; `base` is the release's name. */}}

{{/* At most 40 characters, so that `<base>-coordinator` and what Kubernetes appends still fit into 63. */}}
{{- define "headrace.base" -}}
{{- if le (len .Release.Name) 40 -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" (trunc 31 .Release.Name | trimSuffix "-") (sha256sum .Release.Name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* Labels by which a component's pods are found; they never change. Takes (dict "root" $ "component" "queue"). */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name | toYaml }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Takes (dict "root" $ "image" map "variant" "-cpu"). */}}
{{- define "headrace.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.image.registry -}}{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s%s" $repository (.image.tag | default .tag) .variant -}}
{{- end -}}
{{- end -}}

{{/* Image of one of our components: takes (dict "root" $ "component" "queue"). */}}
{{- define "headrace.ourImage" -}}
{{- $v := .root.Values -}}
{{- include "headrace.image" (dict "root" .root "image" (index $v .component "image") "tag" ($v.image.tag | default .root.Chart.AppVersion) "variant" $v.image.variant) -}}
{{- end -}}

{{/* A port of flows.yaml, by component and name. Takes (list $ "queue" "http"). */}}
{{- define "headrace.port" -}}
{{- $flows := (index . 0).Files.Get "flows.yaml" | fromYaml -}}
{{- index $flows.ports (index . 1) (index . 2) | int -}}
{{- end -}}

{{- define "headrace.authSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-auth" (include "headrace.base" .)) -}}
{{- end -}}

{{- define "headrace.checkpointsClaim" -}}
{{- .Values.checkpoints.existingClaim | default (printf "%s-checkpoints" (include "headrace.base" .)) -}}
{{- end -}}

{{- define "headrace.coordinatorAddress" -}}
{{- printf "%s-coordinator:%s" (include "headrace.base" .) (include "headrace.port" (list . "coordinator" "grpc")) -}}
{{- end -}}

{{- define "headrace.runDir" -}}
{{- printf "/runs/%s" (.Values.config.name | default .Release.Name) -}}
{{- end -}}

{{/* A pod of the trainer, as kubectl exec takes it. */}}
{{- define "headrace.trainerPod" -}}
{{- $name := printf "%s-trainer" (include "headrace.base" .) -}}
{{- ternary (printf "pod/%s-0" $name) (printf "deployment/%s" $name) (eq .Values.trainer.workload "leaderWorkerSet") -}}
{{- end -}}
