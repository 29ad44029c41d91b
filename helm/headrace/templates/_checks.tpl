{{/* "true" for a variable, (list name value), that says by its name that it is a secret, or is a URL with a password. No
secret is what only switches something, or is the path of a file. */}}
{{- define "headrace.looksSecret" -}}
{{- $name := index . 0 -}}{{- $value := index . 1 -}}
{{- if regexMatch "://[^/@[:space:]]*:[^/@[:space:]]+@" $value -}}true
{{- else if and (regexMatch "(?i)(TOKEN|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|SECRET|KEY|CREDENTIALS?|AUTH)$" $name) (not (regexMatch "(?i)^(|0|1|true|false|(/[-._a-z0-9]+){2,})$" $value)) -}}true
{{- end -}}
{{- end -}}

{{/* What cannot work, each with the change that mends it; all of it is reported at once. */}}
{{- define "headrace.checks" -}}
{{- $v := .Values -}}
{{- $c := $v.config -}}
{{- $problems := list -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) -}}
{{- $problems = append $problems (printf "release name %s: names of Services begin with a letter and hold letters, digits and '-' only; choose another release name" .Release.Name) -}}
{{- end -}}

{{- /* The run */ -}}
{{- $async := $c.async_training | default dict -}}
{{- $means := get (dict "colocated_sync" (dict "trigger_parameter_sync_step" 1 "staleness_threshold" 0 "partial_rollout" false) "one_step_off" (dict "trigger_parameter_sync_step" 1 "staleness_threshold" 1 "partial_rollout" false)) ($c.mode | default "") | default dict -}}
{{- range $key, $value := $means -}}
{{- $found := get $async $key -}}
{{- if and (hasKey $async $key) (not (kindIs "invalid" $found)) (ne (include "headrace.text" $found) (toString $value)) -}}
{{- $problems = append $problems (printf "config.async_training.%s: mode %s means %v, found %v; leave the key out of your values, or leave out config.mode" $key $c.mode $value $found) -}}
{{- end -}}
{{- end -}}
{{- if and (eq ($c.mode | default "") "colocated_sync") (not (include "headrace.onGpus" .)) -}}
{{- $problems = append $problems "config.mode: colocated_sync without GPUs is for one machine's cores; leave it out, or set config.trainer.device to cuda" -}}
{{- end -}}
{{- if include "headrace.sharesGpus" . -}}
{{- /* What the configuration's own models refuse as well, but only once the pods are up. */ -}}
{{- if eq (($c.sync | default dict).transport | default "gloo") "nccl" -}}
{{- $problems = append $problems "config.sync.transport: colocated_sync puts a trainer's rank and an engine on one GPU, where NCCL takes no two ranks; set it to gloo" -}}
{{- end -}}
{{- $ranks := mul (include "headrace.trainerNodes" . | int) (include "headrace.ranksPerNode" . | int) | int -}}
{{- $used := mul (include "headrace.rollouterReplicas" . | default $v.autoscaling.minReplicas | int) (include "headrace.tensorParallel" . | int) | int -}}
{{- $engines := max 1 (div (sub (add $used $ranks) 1) $ranks) | int -}}
{{- $share := (($c.rollout | default dict).engine | default dict).gpu_memory_utilization | default 0.9 | float64 -}}
{{- if gt (mulf $share $engines) 0.85001 -}}
{{- $problems = append $problems (printf "config.rollout.engine.gpu_memory_utilization: colocated_sync shares every GPU between the trainer and %d x %v for engines, which leaves the trainer no tenth of it; lower it, e.g. to %v" $engines $share (divf 0.4 $engines)) -}}
{{- end -}}
{{- end -}}
{{- if ($c.redis | default dict).url -}}
{{- $problems = append $problems "config.redis.url: give redis.external.url and redis.external.existingSecret instead, so that no password lies in a ConfigMap" -}}
{{- end -}}
{{- if regexMatch "://[^/@[:space:]]*:[^/@[:space:]]+@" (omit $c "redis" | toJson) -}}
{{- $problems = append $problems "config: holds a URL with a password, which everybody who may read a ConfigMap would see; name a variable that comes from a Secret (extraEnv)" -}}
{{- end -}}
{{- range $section := list "trainer" "rollout" -}}
{{- if (index $c $section | default dict).cpus -}}
{{- $problems = append $problems (printf "config.%s.cpus binds to cores of one machine; leave it out and set %s.resources" $section (ternary "trainer" "rollouter" (eq $section "trainer"))) -}}
{{- end -}}
{{- end -}}
{{- $tp := include "headrace.tensorParallel" . | int -}}
{{- $nodes := include "headrace.trainerNodes" . | int -}}
{{- if include "headrace.onGpus" . -}}
{{- range $key, $gpus := dict "trainer.n_gpus_per_node" (include "headrace.ranksPerNode" . | int) "rollout.engine.tensor_parallel_size" $tp -}}
{{- if gt $gpus (int $v.gpusPerNode) -}}
{{- $problems = append $problems (printf "config.%s: %d GPUs do not fit into one node of gpusPerNode %d; lower it, or correct gpusPerNode" $key $gpus (int $v.gpusPerNode)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Model and data */ -}}
{{- $task := include "headrace.demoTask" . -}}
{{- $demos := list -}}
{{- $train := include "headrace.dataEntries" $c.data.train_files | fromYamlArray -}}
{{- $val := include "headrace.dataEntries" $c.data.val_files | fromYamlArray -}}
{{- range concat (list $c.model.path) $train $val -}}
{{- $path := . -}}{{- if kindIs "map" . -}}{{- $path = .path -}}{{- end -}}
{{- if hasPrefix "demo:" $path -}}{{- $demos = append $demos (trimPrefix "demo:" $path | splitList "/" | first) -}}{{- end -}}
{{- end -}}
{{- $demos = uniq $demos -}}
{{- if and $demos (not $task) -}}
{{- $problems = append $problems "config.data: files of a demo go with the demo's model; set config.model.path to demo:<the same name>, or name files" -}}
{{- end -}}
{{- if gt (len $demos) 1 -}}
{{- $problems = append $problems (printf "config: names several demos (%s); take all of one" (join ", " $demos)) -}}
{{- end -}}
{{- if and $task (include "headrace.onGpus" .) -}}
{{- $problems = append $problems "config.trainer.device: the demo is made for CPUs; set it to cpu" -}}
{{- end -}}
{{- if not $task -}}
{{- if and (ne $v.model.source "image") (ne $c.model.path $v.model.mountPath) (not (hasPrefix (printf "%s/" (trimSuffix "/" $v.model.mountPath)) $c.model.path)) -}}
{{- $problems = append $problems (printf "config.model.path: %s is not below model.mountPath %s, where model.source %s puts the model; set one to the other" $c.model.path $v.model.mountPath $v.model.source) -}}
{{- end -}}
{{- if and (eq $v.model.source "pvc") (not $v.model.pvc.claimName) -}}
{{- $problems = append $problems "model.pvc.claimName: name the volume claim that holds the model" -}}
{{- end -}}
{{- if and (eq $v.model.source "hf") (not $v.model.hf.repo) -}}
{{- $problems = append $problems "model.hf.repo: name the repository, e.g. Qwen/Qwen3-8B" -}}
{{- end -}}
{{- if and (eq $v.model.source "hf") (ne $c.model.path $v.model.mountPath) -}}
{{- $problems = append $problems "config.model.path: with model.source hf it is model.mountPath" -}}
{{- end -}}
{{- if and (eq $v.model.source "hostPath") (not $v.model.hostPath.path) -}}
{{- $problems = append $problems "model.hostPath.path: name the folder of the nodes that holds the model" -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $v.files -}}
{{- if or (not (regexMatch "^[-._a-zA-Z0-9]+$" $name)) (regexMatch "^\\.\\.?$|^\\.\\." $name) -}}
{{- $problems = append $problems (printf "files: %s is no file name; use letters, digits, '-', '_' and '.', not two of these at its beginning" $name) -}}
{{- end -}}
{{- end -}}
{{- if gt (len (toJson $v.files)) 1000000 -}}
{{- $problems = append $problems "files: more than a ConfigMap can hold (1 MiB); put large ones on the volume of the data, or into your images" -}}
{{- end -}}
{{- $is := include "headrace.config" . | fromYaml -}}
{{- $named := dict
  "config.custom_reward_function.path" ($is.custom_reward_function | default dict).path
  "config.environment.path" ($is.environment | default dict).path
  "config.data.chat_template" $is.data.chat_template -}}
{{- range $name, $source := ($is.reward | default dict).sources -}}
{{- $_ := set $named (printf "config.reward.sources.%s.path" $name) $source.path -}}
{{- end -}}
{{- range $key, $path := $named -}}
{{- $name := trimPrefix "/etc/headrace/files/" ($path | default "") -}}
{{- if and (hasPrefix "/etc/headrace/files/" ($path | default "")) (not (hasKey $v.files $name)) -}}
{{- $problems = append $problems (printf "%s: files has no %s; add it" $key $name) -}}
{{- end -}}
{{- end -}}
{{- /* Mounts: one inside another that is read-only cannot be made, and two cannot have one path. */ -}}
{{- $places := dict -}}
{{- if and (not $task) (ne $v.model.source "image") -}}{{- $_ := set $places "model.mountPath" $v.model.mountPath -}}{{- end -}}
{{- if and (not $task) $v.data.claimName -}}{{- $_ := set $places "data.mountPath" $v.data.mountPath -}}{{- end -}}
{{- range $key, $path := $places -}}
{{- $at := printf "%s/" (trimSuffix "/" $path) -}}
{{- range $taken := list "/scratch/" "/tmp/" "/runs/" "/dev/shm/" "/etc/headrace/" -}}
{{- if or (hasPrefix $at $taken) (hasPrefix "/etc/headrace/" $at) -}}
{{- $problems = append $problems (printf "%s: %s would hide %s, which is the chart's; choose a folder of its own" $key $path (trimSuffix "/" $taken)) -}}
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (len $places) 2 -}}
{{- $one := printf "%s/" (trimSuffix "/" $v.model.mountPath) -}}{{- $two := printf "%s/" (trimSuffix "/" $v.data.mountPath) -}}
{{- if or (hasPrefix $one $two) (hasPrefix $two $one) -}}
{{- $problems = append $problems (printf "data.mountPath: %s and model.mountPath %s lie in one another, and both are read-only; put them side by side" $v.data.mountPath $v.model.mountPath) -}}
{{- end -}}
{{- end -}}
{{- if and (gt $nodes 1) (not $v.checkpoints.existingClaim) (not (has "ReadWriteMany" $v.checkpoints.accessModes)) -}}
{{- $problems = append $problems (printf "checkpoints.accessModes: the ranks of %d nodes write to one volume; use [ReadWriteMany] with a storage class that offers it, or checkpoints.existingClaim" $nodes) -}}
{{- end -}}

{{- /* Every namespace of a cluster has that ConfigMap: without it nothing can be said of claims. */ -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" -}}
{{- $claims := dict "checkpoints.existingClaim" $v.checkpoints.existingClaim -}}
{{- if not $task -}}
{{- $_ := set $claims "data.claimName" $v.data.claimName -}}
{{- if eq $v.model.source "pvc" -}}{{- $_ := set $claims "model.pvc.claimName" $v.model.pvc.claimName -}}{{- end -}}
{{- end -}}
{{- range $key, $claim := $claims -}}
{{- if and $claim (not (contains $claim (toJson $v.extraObjects))) -}}
{{- if not (lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $claim) -}}
{{- $problems = append $problems (printf "%s: there is no volume claim %s in namespace %s, and pods would wait for it; make and fill it first (docs/kubernetes.md), or name another" $key $claim $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Pods */ -}}
{{- if and $v.autoscaling.enabled (not (kindIs "invalid" $v.rollouter.replicas)) -}}
{{- $problems = append $problems "rollouter.replicas: the autoscaler sets it; leave it out (null), or autoscaling.enabled" -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- $problems = append $problems "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (not $v.autoscaling.query) (not $v.kubernetes.enabled) -}}
{{- $problems = append $problems "autoscaling: the recommendation comes from the cluster-aware coordinator; set kubernetes.enabled, or a query of your own" -}}
{{- end -}}
{{- if and $v.autoscaling.enabled $v.kubernetes.scaleToZeroOnCompletion -}}
{{- $problems = append $problems "kubernetes.scaleToZeroOnCompletion: the autoscaler would bring the rollouters back; leave one of the two out" -}}
{{- end -}}
{{- $stop := include "headrace.stopSeconds" . | int -}}
{{- range $component := list "rollouter" "trainer" -}}
{{- $grace := index $v $component "terminationGracePeriodSeconds" -}}
{{- if and $grace (le (int $grace) $stop) -}}
{{- $problems = append $problems (printf "%s.terminationGracePeriodSeconds: %d would kill it before its %d s to stop in order (config.services.stop_timeout_s) are over; set more than %d" $component (int $grace) $stop $stop) -}}
{{- end -}}
{{- end -}}
{{- $longest := include "headrace.longestStop" . | int -}}
{{- if and (not $v.redis.external.url) (lt (include "headrace.redisGrace" . | int) (add $longest 30 | int)) -}}
{{- $problems = append $problems (printf "redis.terminationGracePeriodSeconds: %d would end it before those that save, which have up to %d s (rollouter.terminationGracePeriodSeconds, trainer.terminationGracePeriodSeconds), or in the middle of its own end; set at least %d, or leave it out" (int $v.redis.terminationGracePeriodSeconds) $longest (add $longest 30)) -}}
{{- end -}}
{{- range $component := list "rollouter" "trainer" "queue" "coordinator" "redis" -}}
{{- $extra := index $v $component "extraEnv" -}}
{{- range $name, $value := $extra -}}
{{- if and (not (kindIs "map" $value)) (include "headrace.looksSecret" (list $name (include "headrace.text" $value))) -}}
{{- $problems = append $problems (printf "%s.extraEnv.%s: a secret does not belong into values; write {valueFrom: {secretKeyRef: {name: ..., key: ...}}}" $component $name) -}}
{{- end -}}
{{- end -}}
{{- /* Whatever the chart sets is set by a value of its own. */ -}}
{{- range $name, $value := pick ($extra | default dict) "POD_NAME" "POD_IP" "HEADRACE_REDIS_URL" "HEADRACE_REDIS_URL_FILE" "HEADRACE_REDIS_PASSWORD" "HEADRACE_REDIS_PASSWORD_FILE" "HEADRACE_TOKEN" "HEADRACE_TOKEN_FILE" "HEADRACE_COORDINATOR" "HEADRACE_RUN_DIR" "HEADRACE_TLS_CERT" "HEADRACE_TLS_KEY" "HEADRACE_TLS_CA" -}}
{{- $problems = append $problems (printf "%s.extraEnv.%s: the chart sets it, from redis.external, auth, tls, config.name and the release; leave it out" $component $name) -}}
{{- end -}}
{{- if ne $component "redis" -}}
{{- $of := dict "root" $ "component" $component "with" (include "headrace.parts" (dict "root" $ "component" $component) | fromJsonArray) -}}
{{- range $list, $what := dict "extraVolumes" (list "headrace.volumes" "name") "extraVolumeMounts" (list "headrace.mounts" "mountPath") -}}
{{- $there := list -}}
{{- range include (first $what) $of | fromYamlArray -}}{{- $there = append $there (index . (last $what) | trimSuffix "/") -}}{{- end -}}
{{- range index $v $component $list -}}
{{- $mine := index . (last $what) | trimSuffix "/" -}}
{{- $count := 0 -}}
{{- range $there -}}{{- if eq . $mine -}}{{- $count = add1 $count -}}{{- end -}}{{- end -}}
{{- if gt (int $count) 1 -}}
{{- $problems = append $problems (printf "%s.%s: the pod has %s already; choose another %s" $component $list $mine (last $what)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pdb := index $v $component "pdb" | default dict -}}
{{- if and (hasKey $pdb "minAvailable") (hasKey $pdb "maxUnavailable") (not (kindIs "invalid" $pdb.minAvailable)) (not (kindIs "invalid" $pdb.maxUnavailable)) -}}
{{- $problems = append $problems (printf "%s.pdb: give minAvailable or maxUnavailable, not both (set the other to null)" $component) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $v.trainer.workload "leaderWorkerSet") $v.trainer.leaderWorkerSet.exclusiveTopology -}}
{{- $problems = append $problems "trainer.leaderWorkerSet.exclusiveTopology: a Deployment has no such thing; set trainer.workload to leaderWorkerSet, or leave it out and set trainer.affinity" -}}
{{- end -}}
{{- if gt (int $v.networkPolicy.ephemeralPorts.from) (int $v.networkPolicy.ephemeralPorts.to) -}}
{{- $problems = append $problems "networkPolicy.ephemeralPorts: from is above to" -}}
{{- end -}}
{{- if and ($c.kubernetes | default dict).enable (not $v.kubernetes.enabled) -}}
{{- $problems = append $problems "config.kubernetes.enable: set kubernetes.enabled instead, which gives the coordinator its rights and its token, too" -}}
{{- end -}}
{{- range $key, $_ := pick ($c.kubernetes | default dict) "namespace" "rollouter_deployment" "trainer_deployment" "trainer_kind" "scale_to_zero_on_completion" -}}
{{- $problems = append $problems (printf "config.kubernetes.%s: the chart sets it (kubernetes.scaleToZeroOnCompletion and trainer.workload are values); leave it out" $key) -}}
{{- end -}}
{{- if and $v.rdma.enabled (not (include "headrace.onGpus" .)) -}}
{{- $problems = append $problems "rdma.enabled: there is nothing to speed up on CPUs; leave it out, or set config.trainer.device to cuda" -}}
{{- end -}}

{{- /* Credentials */ -}}
{{- if and $v.tls.enabled (not $v.tls.existingSecret) -}}
{{- $problems = append $problems "tls.existingSecret: name the Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and (not $v.redis.external.url) (not $v.redis.image.tag) (not $v.redis.image.digest) -}}
{{- $problems = append $problems "redis.image.tag: name a version, or a digest: the ledger's server is not to change by itself" -}}
{{- end -}}
{{- if and $v.podSecurityContext.runAsNonRoot (eq (toString $v.podSecurityContext.runAsUser) "0") -}}
{{- $problems = append $problems "podSecurityContext.runAsUser: 0 is root, which runAsNonRoot refuses; choose another, e.g. 2000" -}}
{{- end -}}
{{- with $v.redis.external.url -}}
{{- if not (regexMatch "^rediss?://([^@/?#]*@)?(\\[[0-9a-fA-F:.]+\\]|[^][:/?#@\\s]+)(:[0-9]+)?([/?][^\\s#]*)?$" .) -}}
{{- $problems = append $problems "redis.external.url: write redis://host:6379/0, or rediss:// for TLS" -}}
{{- else if regexMatch "^rediss?://[^/]*:[^/]*@|[?&](ssl_)?password=" . -}}
{{- $problems = append $problems "redis.external.url: leave the password out and name the Secret that holds it in redis.external.existingSecret" -}}
{{- end -}}
{{- end -}}

{{- /* An upgrade of a run that goes on */ -}}
{{- $problems = concat $problems (include "headrace.volumeProblems" . | fromJsonArray) -}}
{{- $stored := lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-config" (include "headrace.base" .)) -}}
{{- $noted := dig "metadata" "annotations" dict $stored -}}
{{- /* Helm makes the new workload before it deletes the old one: both would train, and write one volume. Only who may
have made a LeaderWorkerSet is sure to be allowed to look for it, and a lookup that is refused is an error. */ -}}
{{- $trainer := printf "%s-trainer" (include "headrace.base" .) -}}
{{- $other := dict -}}
{{- if eq $v.trainer.workload "leaderWorkerSet" -}}
{{- $other = lookup "apps/v1" "Deployment" .Release.Namespace $trainer -}}
{{- else if and (eq (get $noted "headrace/trainer") "leaderWorkerSet") (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}
{{- $other = lookup "leaderworkerset.x-k8s.io/v1" "LeaderWorkerSet" .Release.Namespace $trainer -}}
{{- end -}}
{{- if and $other (dig "spec" "replicas" 1 $other | int) -}}
{{- $named := printf "%s/%s" (lower $other.kind) $trainer -}}
{{- $problems = append $problems (printf "trainer.workload: %s is on, and would train beside its successor; end it first (kubectl -n %s scale %s --replicas=0), wait until its pods have ended, and upgrade then: the run goes on from its checkpoint" $named .Release.Namespace $named) -}}
{{- end -}}
{{- if $stored -}}
{{- $was := index $stored.data "config.yaml" | fromYaml -}}
{{- range $key := (.Files.Get "lifetimes.yaml" | fromYaml).run -}}
{{- $before := $was -}}{{- $now := $is -}}
{{- range splitList "." $key -}}
{{- $before = index ($before | default dict) . -}}{{- $now = index ($now | default dict) . -}}
{{- end -}}
{{- if ne (toJson $before) (toJson $now) -}}
{{- $problems = append $problems (printf "config.%s: was %s when the run was begun and is %s now, which its samples and checkpoints do not fit; set it back, or install a run of its own under another release name" $key (toJson $before) (toJson $now)) -}}
{{- end -}}
{{- end -}}
{{- range $what, $now := dict "model" (include "headrace.modelOrigin" . | fromJson) "data" (dict "data.claimName" $v.data.claimName "data.mountPath" $v.data.mountPath) -}}
{{- $before := get $noted (printf "headrace/%s" $what) | default "{}" | fromJson -}}
{{- range $key, $value := $before -}}
{{- /* Keys of another source are not there: the source is told. */ -}}
{{- if and (hasKey $now $key) (ne $value (get $now $key)) -}}
{{- $problems = append $problems (printf "%s: was %s when the run was begun and is %s now, which its samples and checkpoints do not fit; set it back, or install a run of its own under another release name" $key (toJson $value) (toJson (get $now $key))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if $problems -}}
{{- fail (printf "\n\nheadrace: these values cannot work:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}
