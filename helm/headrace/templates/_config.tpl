{{/* The run's configuration as the pods get it, and what follows from it. */}}

{{/* `config` with what the chart fills in, as YAML. */}}
{{- define "headrace.config" -}}
{{- $c := deepCopy .Values.config -}}
{{- /* Helm reads the key `n` as YAML 1.1 does: as "false". */ -}}
{{- range $section := list "rollout" "val" -}}
{{- $at := index $c $section | default dict -}}
{{- if hasKey $at "false" -}}
{{- if not (hasKey $at "n") -}}{{- $_ := set $at "n" (index $at "false") -}}{{- end -}}
{{- $_ := unset $at "false" -}}
{{- end -}}
{{- end -}}
{{- $_ := set $c "name" ($c.name | default .Release.Name) -}}
{{- /* A start waits for the others as long as its pod's start-up probe lets it: a restart would only add back-off. */ -}}
{{- $_ := set $c "services" (mergeOverwrite (dict "start_timeout_s" 2600) ($c.services | default dict) (dict "host" "0.0.0.0")) -}}
{{- with .Values.redis.external.url -}}
{{- $_ := set $c "redis" (merge (dict "url" .) ($c.redis | default dict)) -}}
{{- end -}}
{{- $_ := set $c.model "path" (include "headrace.demoPath" $c.model.path) -}}
{{- range $key := list "train_files" "val_files" -}}
{{- $entries := list -}}
{{- range include "headrace.dataEntries" (index $c.data $key) | fromYamlArray -}}
{{- if kindIs "map" . -}}
{{- $entries = append $entries (merge (dict "path" (include "headrace.demoPath" .path)) .) -}}
{{- else -}}
{{- $entries = append $entries (include "headrace.demoPath" .) -}}
{{- end -}}
{{- end -}}
{{- if $entries -}}{{- $_ := set $c.data $key $entries -}}{{- end -}}
{{- end -}}
{{- range $section := list "ref" "critic" -}}
{{- $at := index $c $section | default dict -}}
{{- if $at.path -}}{{- $_ := set $at "path" (include "headrace.demoPath" $at.path) -}}{{- end -}}
{{- end -}}
{{- /* The example of values.yaml gives way to rewards of another kind. */ -}}
{{- if and ($c.reward | default dict).sources (eq (toJson $c.custom_reward_function) `{"path":"/etc/headrace/files/reward.py"}`) -}}
{{- $_ := unset $c "custom_reward_function" -}}
{{- end -}}
{{- if .Values.kubernetes.enabled -}}
{{- $base := include "headrace.base" . -}}
{{- $found := dict
  "enable" true
  "namespace" .Release.Namespace
  "rollouter_deployment" (printf "%s-rollouter" $base)
  "trainer_deployment" (printf "%s-trainer" $base)
  "scale_to_zero_on_completion" .Values.kubernetes.scaleToZeroOnCompletion -}}
{{- if eq .Values.trainer.workload "leaderWorkerSet" -}}{{- $_ := set $found "trainer_kind" "LeaderWorkerSet" -}}{{- end -}}
{{- with .Values.autoscaling -}}
{{- if .enabled -}}
{{- $_ := set $found "recommendation" (dict "min_rollouters" (int .minReplicas) "max_rollouters" (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $c "kubernetes" (mergeOverwrite $found ($c.kubernetes | default dict)) -}}
{{- end -}}
{{- toYaml $c -}}
{{- end -}}

{{/* Entries of data files as a list: one may stand alone. */}}
{{- define "headrace.dataEntries" -}}
{{- if kindIs "slice" . -}}{{- toYaml . -}}{{- else if . -}}{{- toYaml (list .) -}}{{- else -}}[]{{- end -}}
{{- end -}}

{{/* `demo:NAME[/train|/val]` as the path at which the init container puts it; any other path as it is. */}}
{{- define "headrace.demoPath" -}}
{{- if not (hasPrefix "demo:" .) -}}{{- . -}}
{{- else if hasSuffix "/train" . -}}/demo/current/train.jsonl
{{- else if hasSuffix "/val" . -}}/demo/current/val.jsonl
{{- else -}}/demo/current/model
{{- end -}}
{{- end -}}

{{/* The demo's task, or nothing. */}}
{{- define "headrace.demoTask" -}}
{{- if hasPrefix "demo:" .Values.config.model.path -}}
{{- trimPrefix "demo:" .Values.config.model.path -}}
{{- end -}}
{{- end -}}

{{/*
Where model and data come from, by values: a run keeps both, and the paths in its configuration do not tell. Data counts
where a file of the run lies on its volume. Both as JSON.
*/}}
{{- define "headrace.modelOrigin" -}}
{{- $m := .Values.model -}}
{{- if include "headrace.demoTask" . -}}
{{- dict "config.model.path" .Values.config.model.path | toJson -}}
{{- else -}}
{{- $from := dict "model.source" $m.source -}}
{{- range $key := get (dict "pvc" (list "claimName" "subPath") "hf" (list "repo" "revision") "hostPath" (list "path")) $m.source | default list -}}
{{- $_ := set $from (printf "model.%s.%s" $m.source $key) (index $m $m.source $key) -}}
{{- end -}}
{{- if ne $m.source "image" -}}{{- $_ := set $from "model.mountPath" $m.mountPath -}}{{- end -}}
{{- toJson $from -}}
{{- end -}}
{{- end -}}
{{- define "headrace.dataOrigin" -}}
{{- $d := .Values.data -}}
{{- $from := dict -}}
{{- if not (include "headrace.demoTask" .) -}}
{{- range $key := list "train_files" "val_files" -}}
{{- range include "headrace.dataEntries" (index $.Values.config.data $key) | fromYamlArray -}}
{{- $path := . -}}{{- if kindIs "map" . -}}{{- $path = .path -}}{{- end -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" $d.mountPath)) $path -}}
{{- $from = dict "data.claimName" $d.claimName "data.mountPath" $d.mountPath -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $from -}}
{{- end -}}

{{/*
Hash of what a pod reads once, at its start: a change of it rolls the pod. What changes in a run that goes on
(the gate, the number of rollouters, the advice on it) stays out. Rollouters are dear to start, so what only the trainer reads stays out
of theirs, too. Takes (dict "root" $ "component" "queue").
*/}}
{{- define "headrace.configHash" -}}
{{- if eq .component "redis" -}}
{{- include "headrace.valkeyConf" .root | sha256sum -}}
{{- else -}}
{{- $c := include "headrace.config" .root | fromYaml -}}
{{- $async := $c.async_training | default dict -}}
{{- /* Unset, it follows from the threshold, and it does not change in a run that is on. */ -}}
{{- if kindIs "invalid" $async.partial_rollout -}}
{{- $_ := set $async "partial_rollout" (gt (float64 ($async.staleness_threshold | default 0)) 0.0) -}}
{{- end -}}
{{- $_ := set $c "async_training" $async -}}
{{- /* Dictionaries are changed in place: this is `$c` without those keys. */ -}}
{{- $lifetimes := .root.Files.Get "lifetimes.yaml" | fromYaml -}}
{{- range concat $lifetimes.live $lifetimes.initial -}}
{{- $path := splitList "." . -}}
{{- $at := $c -}}
{{- range initial $path -}}{{- $at = index $at . | default dict -}}{{- end -}}
{{- $_ := unset $at (last $path) -}}
{{- end -}}
{{- if eq .component "rollouter" -}}
{{- range list "actor" "critic" "ref" "trainer" -}}{{- $_ := unset $c . -}}{{- end -}}
{{- end -}}
{{- $cluster := $c.kubernetes | default dict -}}
{{- if not $cluster.recommendation -}}{{- $_ := unset $cluster "recommendation" -}}{{- end -}}
{{- $_ := unset $c "kubernetes" -}}
{{- if and $cluster (eq .component "coordinator") -}}{{- $_ := set $c "kubernetes" $cluster -}}{{- end -}}
{{- printf "%s%s" (toJson $c) (toJson .root.Values.files) | sha256sum -}}
{{- end -}}
{{- end -}}

{{/* "true" where the trainer computes on GPUs. */}}
{{- define "headrace.onGpus" -}}
{{- if eq ((.Values.config.trainer | default dict).device | default "cpu") "cuda" -}}true{{- end -}}
{{- end -}}

{{/* "true" where trainer and engines are on the same GPUs, in turns. */}}
{{- define "headrace.sharesGpus" -}}
{{- if and (include "headrace.onGpus" .) (eq (.Values.config.mode | default "") "colocated_sync") -}}true{{- end -}}
{{- end -}}

{{- define "headrace.trainerNodes" -}}{{- (.Values.config.trainer | default dict).nnodes | default 1 | int -}}{{- end -}}
{{- define "headrace.ranksPerNode" -}}{{- (.Values.config.trainer | default dict).n_gpus_per_node | default 2 | int -}}{{- end -}}
{{- define "headrace.tensorParallel" -}}
{{- ((.Values.config.rollout | default dict).engine | default dict).tensor_parallel_size | default 1 | int -}}
{{- end -}}
{{- define "headrace.stopSeconds" -}}
{{- (.Values.config.services | default dict).stop_timeout_s | default 60 | ceil | int -}}
{{- end -}}
{{- define "headrace.rollouterGrace" -}}
{{- .Values.rollouter.terminationGracePeriodSeconds | default (add (include "headrace.stopSeconds" .) 30) -}}
{{- end -}}
{{- define "headrace.trainerGrace" -}}
{{- .Values.trainer.terminationGracePeriodSeconds | default (add (include "headrace.stopSeconds" .) 60) -}}
{{- end -}}

{{/*
"true" where the run is complete and the coordinator has scaled the trainer to none: the API notes who has set a field.
Whoever scales it up again owns the number from then on.
*/}}
{{- define "headrace.atRest" -}}
{{- $name := printf "%s-trainer" (include "headrace.base" .) -}}
{{- $live := list (lookup "apps/v1" "Deployment" .Release.Namespace $name) -}}
{{- if and (eq .Values.trainer.workload "leaderWorkerSet") (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}
{{- $live = append $live (lookup "leaderworkerset.x-k8s.io/v1" "LeaderWorkerSet" .Release.Namespace $name) -}}
{{- end -}}
{{- range $live -}}
{{- if and . (eq (dig "spec" "replicas" 1 . | int) 0) -}}
{{- range .metadata.managedFields -}}
{{- if and (eq .manager "headrace-coordinator") (hasKey (dig "fieldsV1" "f:spec" dict .) "f:replicas") -}}true{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The longest that a service with something to save may take. Redis outlives them all. */}}
{{- define "headrace.longestStop" -}}
{{- max (include "headrace.rollouterGrace" . | int) (include "headrace.trainerGrace" . | int) -}}
{{- end -}}
{{- define "headrace.redisGrace" -}}
{{- .Values.redis.terminationGracePeriodSeconds | default (add (include "headrace.longestStop" .) 60) | int -}}
{{- end -}}

{{/* What `spec.replicas` of the rollouters shall say; nothing where KEDA sets it from the start. */}}
{{- define "headrace.rollouterReplicas" -}}
{{- $v := .Values -}}
{{- if not (or (kindIs "invalid" $v.rollouter.replicas) (include "headrace.atRest" .)) -}}
{{- int $v.rollouter.replicas -}}
{{- else -}}
{{- /* What kubectl scale or KEDA has made of it stays: an upgrade repeats it. Left out, it would be reset to 1. */ -}}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace (printf "%s-rollouter" (include "headrace.base" .)) -}}
{{- if $live -}}
{{- int $live.spec.replicas -}}
{{- else if not $v.autoscaling.enabled -}}
{{- $start := ($v.config.rollout | default dict).replicas -}}
{{- if kindIs "invalid" $start -}}2{{- else -}}{{- int $start -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" where the queue service sees the run's directory. */}}
{{- define "headrace.queueSeesRun" -}}
{{- $c := .Values.checkpoints -}}
{{- if kindIs "invalid" $c.shareWithQueue -}}
{{- if has "ReadWriteMany" $c.accessModes -}}true{{- end -}}
{{- else if $c.shareWithQueue -}}true{{- end -}}
{{- end -}}

{{/* Everything that is acknowledged is on disk, and nothing is ever evicted: the ledger may not lose a sample. */}}
{{- define "headrace.valkeyConf" -}}
{{- $port := include "headrace.port" (list . "redis" "redis") -}}
{{- if .Values.tls.enabled -}}
port 0
tls-port {{ $port }}
tls-cert-file /etc/headrace/tls/tls.crt
tls-key-file /etc/headrace/tls/tls.key
tls-ca-cert-file /etc/headrace/tls/ca.crt
tls-auth-clients yes
{{- else -}}
port {{ $port }}
{{- end }}
dir /data
appendonly yes
appendfsync always
aof-load-truncated yes
save ""
maxmemory {{ include "headrace.text" ((.Values.config.redis | default dict).max_memory_bytes | default .Values.redis.maxmemory) }}
maxmemory-policy noeviction
daemonize no
logfile ""
{{- end -}}
