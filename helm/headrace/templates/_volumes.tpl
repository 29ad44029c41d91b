{{/* Volumes that are there: what the API server would not change is refused before anything is. */}}

{{/* A Kubernetes quantity as a number: 1Ki is 1024. */}}
{{- define "headrace.quantity" -}}
{{- $text := include "headrace.text" . -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- printf "%.3f" (mulf (trimSuffix $unit $text | float64) (get $units $unit)) -}}
{{- end -}}

{{/* The command by which a claim grows, if its storage class lets it. Takes (list $ claim size). */}}
{{- define "headrace.growth" -}}
{{- $patch := dict "spec" (dict "resources" (dict "requests" (dict "storage" (index . 2)))) | toJson -}}
{{- printf "`kubectl -n %s patch pvc %s --type=merge --patch='%s'`" (index . 0).Release.Namespace (index . 1) $patch -}}
{{- end -}}

{{/* What stands against the volumes that there are, as a JSON list of sentences. */}}
{{- define "headrace.volumeProblems" -}}
{{- $problems := list -}}
{{- $v := .Values -}}
{{- $ns := .Release.Namespace -}}

{{- /* A StatefulSet keeps the claims that it was made with. */ -}}
{{- $redis := printf "%s-redis" (include "headrace.base" .) -}}
{{- $live := dict -}}
{{- if not $v.redis.external.url -}}{{- $live = lookup "apps/v1" "StatefulSet" $ns $redis -}}{{- end -}}
{{- if $live -}}
{{- $spec := (first $live.spec.volumeClaimTemplates).spec -}}
{{- $was := $spec.resources.requests.storage -}}{{- $now := include "headrace.text" $v.redis.persistence.size -}}
{{- $before := include "headrace.quantity" $was | float64 -}}{{- $after := include "headrace.quantity" $now | float64 -}}
{{- if gt $after $before -}}
{{- $problems = append $problems (printf "redis.persistence.size: was %s and is %s now, and a StatefulSet keeps the claims that it was made with; grow the volume by %s, take the StatefulSet away and leave its pod by `kubectl -n %s delete statefulset %s --cascade=orphan`, and upgrade then, which makes it anew around both" $was $now (include "headrace.growth" (list . (printf "data-%s-0" $redis) $now)) $ns $redis) -}}
{{- else if lt $after $before -}}
{{- $problems = append $problems (printf "redis.persistence.size: was %s and is %s now, and no volume shrinks; set it back" $was $now) -}}
{{- end -}}
{{- $was = $spec.storageClassName | default "" -}}{{- $now = $v.redis.persistence.storageClassName | default "" -}}
{{- if ne $was $now -}}
{{- $problems = append $problems (printf "redis.persistence.storageClassName: was %q and is %q now, and a volume keeps its class; set it back, or install a run of its own under another release name" $was $now) -}}
{{- end -}}
{{- end -}}

{{- $claim := include "headrace.checkpointsClaim" . -}}
{{- $moved := "set it back, or copy the run's directory to a claim of your own and name that in checkpoints.existingClaim" -}}
{{- $live = dict -}}
{{- if not $v.checkpoints.existingClaim -}}{{- $live = lookup "v1" "PersistentVolumeClaim" $ns $claim -}}{{- end -}}
{{- if $live -}}
{{- $was := $live.spec.resources.requests.storage -}}{{- $now := include "headrace.text" $v.checkpoints.size -}}
{{- $before := include "headrace.quantity" $was | float64 -}}{{- $after := include "headrace.quantity" $now | float64 -}}
{{- if gt $after $before -}}
{{- /* Whether it may is a storage class's, which a user of one namespace cannot read. */ -}}
{{- $problems = append $problems (printf "checkpoints.size: the claim %s has %s, and only its storage class knows whether it grows to %s; grow it by %s, and upgrade then" $claim $was $now (include "headrace.growth" (list . $claim $now))) -}}
{{- else if lt $after $before -}}
{{- $problems = append $problems (printf "checkpoints.size: the claim %s has %s, and no volume shrinks to %s; set it to %s" $claim $was $now $was) -}}
{{- end -}}
{{- if ne (toJson $live.spec.accessModes) (toJson $v.checkpoints.accessModes) -}}
{{- $problems = append $problems (printf "checkpoints.accessModes: the claim %s has %s, which does not change to %s; %s" $claim (toJson $live.spec.accessModes) (toJson $v.checkpoints.accessModes) $moved) -}}
{{- end -}}
{{- with $v.checkpoints.storageClassName -}}
{{- if ne . ($live.spec.storageClassName | default "") -}}
{{- $problems = append $problems (printf "checkpoints.storageClassName: the claim %s is of %q, which does not change to %q; %s" $claim ($live.spec.storageClassName | default "") . $moved) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}
