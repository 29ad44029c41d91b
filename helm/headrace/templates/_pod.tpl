{{/* What the pods have in common. Most take (dict "root" $ "component" "queue"). */}}

{{/* The keys of a pod's spec that values set as they are. */}}
{{- define "headrace.scheduling" -}}
{{- $c := index .root.Values .component -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy ($c.affinity | default dict) -}}
{{- $placed := dict -}}
{{- if and (eq .component "rollouter") (not (hasKey $affinity "podAffinity")) -}}
{{- $placed = include "headrace.rollouterPlacement" .root | fromYaml -}}
{{- end -}}
{{- with merge $affinity ($placed.affinity | default dict) }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.topologySpreadConstraints | default $placed.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.priorityClassName }}
priorityClassName: {{ . | toYaml }}
{{- end }}
{{- with $c.runtimeClassName }}
runtimeClassName: {{ . | toYaml }}
{{- end }}
{{- with $c.schedulerName }}
schedulerName: {{ . | toYaml }}
{{- end }}
{{- end -}}

{{- define "headrace.podMetadata" -}}
{{- $c := index .root.Values .component -}}
labels: {{- merge (include "headrace.selector" . | fromYaml) ($c.podLabels | default dict) | toYaml | nindent 2 }}
annotations: {{- merge (dict
  "kubectl.kubernetes.io/default-container" .component
  "headrace/config-hash" (include "headrace.configHash" .)) ($c.podAnnotations | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{/*
Annotations of a component's workload, or nothing. Volcano takes each workload for a group of one pod, unless a Deployment's
ReplicaSet, which has the Deployment's annotations, says how many have to start together.
*/}}
{{- define "headrace.workloadAnnotations" -}}
{{- $c := index .root.Values .component -}}
{{- $own := deepCopy ($c.annotations | default dict) -}}
{{- if and (eq .component "trainer") (eq $c.schedulerName "volcano") -}}
{{- $own = merge $own (dict "scheduling.volcano.sh/group-min-member" (include "headrace.trainerNodes" .root)) -}}
{{- end -}}
{{- with $own -}}
annotations: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* How long a start may take before the workload counts as stuck: a quarter of an hour more than its probe waits. */}}
{{- define "headrace.progressDeadline" -}}
{{- $probe := (index .root.Values .component).startupProbe | default dict -}}
{{- max 3600 (add 900 (mul ($probe.periodSeconds | default 10) ($probe.failureThreshold | default 3))) -}}
{{- end -}}

{{/* A component's start-up probe, which asks what "asks" says. */}}
{{- define "headrace.startupProbe" -}}
{{- merge (deepCopy .asks) ((index .root.Values .component).startupProbe | default dict) | toYaml -}}
{{- end -}}

{{/* Of every container. `lock` adds what RDMA needs. */}}
{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .lock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Environment of a component's main container: what all have, "more" of its own, and what its values add or change. */}}
{{- define "headrace.env" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $base := include "headrace.base" $root -}}
{{- $scheme := ternary "rediss" "redis" $v.tls.enabled -}}
{{- $url := $v.redis.external.url | default (printf "%s://%s-redis:%s/0" $scheme $base (include "headrace.port" (list $root "redis" "redis"))) -}}
{{- $env := dict
  "HEADRACE_REDIS_URL" $url
  "HEADRACE_REDIS_PASSWORD_FILE" "/etc/headrace/secrets/redis-password"
  "HEADRACE_TOKEN_FILE" "/etc/headrace/secrets/token"
  "PYTHONUNBUFFERED" "1"
  "TOKENIZERS_PARALLELISM" "false"
  "OMP_NUM_THREADS" "1"
  "HOME" "/scratch"
  "USER" "headrace"
  "XDG_CACHE_HOME" "/scratch/.cache"
  "HF_HOME" "/scratch/huggingface" -}}
{{- if and $v.redis.external.url (not $v.redis.external.existingSecret) -}}
{{- $_ := unset $env "HEADRACE_REDIS_PASSWORD_FILE" -}}
{{- end -}}
{{- if $v.tls.enabled -}}
{{- range $name, $file := dict "CERT" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" -}}
{{- $_ := set $env (printf "HEADRACE_TLS_%s" $name) (printf "/etc/headrace/tls/%s" $file) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .more -}}{{- $_ := set $env $name $value -}}{{- end -}}
{{- range $name, $value := (index $v .component).extraEnv -}}{{- $_ := set $env $name $value -}}{{- end -}}
{{- include "headrace.envList" $env -}}
{{- end -}}

{{/*
Credentials are files: a variable would be there to read for all that a service starts, a reward function's processes for one.
*/}}
{{- define "headrace.secretsVolume" -}}
{{- $v := .Values -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "headrace.authSecret" . | toYaml }}
          items:
            - {key: token, path: token}
            {{- if not $v.redis.external.url }}
            - {key: redis-password, path: redis-password}
            {{- end }}
      {{- if and $v.redis.external.url $v.redis.external.existingSecret }}
      - secret:
          name: {{ $v.redis.external.existingSecret | toYaml }}
          items:
            - {key: {{ $v.redis.external.passwordKey | toYaml }}, path: redis-password}
      {{- end }}
{{- end -}}

{{- define "headrace.secretsMount" -}}
- {name: secrets, mountPath: /etc/headrace/secrets, readOnly: true}
{{- end -}}

{{/* A value as text. Helm reads every number as a float, and would write large ones as 1e+10. */}}
{{- define "headrace.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{- printf "%.0f" . -}}{{- else -}}{{- toString . -}}{{- end -}}
{{- end -}}

{{/* A map of names to values, or to maps with valueFrom, as Kubernetes' list, sorted by name. */}}
{{- define "headrace.envList" -}}
{{- range $name, $value := . }}
- name: {{ $name | toYaml }}
  {{- if kindIs "map" $value }}
  {{- toYaml $value | nindent 2 }}
  {{- else }}
  value: {{ include "headrace.text" $value | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A variable that comes from the pod's own fields. */}}
{{- define "headrace.fieldRef" -}}
{{- dict "valueFrom" (dict "fieldRef" (dict "fieldPath" .)) | toJson -}}
{{- end -}}

{{/* What a component has beside scratch and configuration, of: files, model, data, runs, shm. As JSON. */}}
{{- define "headrace.parts" -}}
{{- $parts := get (dict "rollouter" (list "files" "model" "shm") "trainer" (list "files" "model" "shm" "runs") "queue" (list "files" "model" "data")) .component | default list -}}
{{- if and (eq .component "queue") (include "headrace.queueSeesRun" .root) -}}{{- $parts = append $parts "runs" -}}{{- end -}}
{{- toJson $parts -}}
{{- end -}}

{{/* Volumes of a component: scratch and configuration, and whatever `with` names of its parts. */}}
{{- define "headrace.volumes" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $c := index $v .component -}}
{{- $base := include "headrace.base" $root -}}
{{- $demo := include "headrace.demoTask" $root -}}
- name: scratch
  emptyDir: {sizeLimit: {{ $c.scratchSize }}}
- name: tmp
  emptyDir: {sizeLimit: {{ $c.scratchSize }}}
- name: config
  configMap: {name: {{ $base }}-config}
{{ include "headrace.secretsVolume" $root }}
{{- if and (has "files" .with) $v.files }}
- name: files
  configMap: {name: {{ $base }}-files}
{{- end }}
{{- if has "shm" .with }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $c.shmSize }}}
{{- end }}
{{- if has "model" .with }}
{{- if $demo }}
- name: demo
  emptyDir: {sizeLimit: 1Gi}
{{- else if eq $v.model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ $v.model.pvc.claimName | toYaml }}, readOnly: true}
{{- else if eq $v.model.source "hostPath" }}
- name: model
  hostPath: {path: {{ $v.model.hostPath.path | quote }}, type: Directory}
{{- else if eq $v.model.source "hf" }}
- name: model
  emptyDir: {sizeLimit: {{ $v.model.hf.sizeLimit }}}
{{- end }}
{{- end }}
{{- if and (has "data" .with) $v.data.claimName (not $demo) }}
- name: data
  persistentVolumeClaim: {claimName: {{ $v.data.claimName | toYaml }}, readOnly: true}
{{- end }}
{{- if has "runs" .with }}
- name: runs
  persistentVolumeClaim: {claimName: {{ include "headrace.checkpointsClaim" $root | toYaml }}}
{{- end }}
{{- if $v.tls.enabled }}
- name: tls
  secret:
    secretName: {{ $v.tls.existingSecret | toYaml }}
    defaultMode: 0440
{{- end }}
{{- with $c.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where a component's main container has them. */}}
{{- define "headrace.mounts" -}}
{{- $v := .root.Values -}}
{{- $c := index $v .component -}}
{{- $demo := include "headrace.demoTask" .root -}}
- {name: scratch, mountPath: /scratch}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/headrace/config, readOnly: true}
{{ include "headrace.secretsMount" . }}
{{- if and (has "files" .with) $v.files }}
- {name: files, mountPath: /etc/headrace/files, readOnly: true}
{{- end }}
{{- if has "shm" .with }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if has "model" .with }}
{{- if $demo }}
- {name: demo, mountPath: /demo, readOnly: true}
{{- else if ne $v.model.source "image" }}
- name: model
  mountPath: {{ $v.model.mountPath | quote }}
  readOnly: true
  {{- if and (eq $v.model.source "pvc") $v.model.pvc.subPath }}
  subPath: {{ $v.model.pvc.subPath | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- if and (has "data" .with) $v.data.claimName (not $demo) }}
- {name: data, mountPath: {{ $v.data.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if has "runs" .with }}
- {name: runs, mountPath: /runs}
{{- end }}
{{- if $v.tls.enabled }}
- {name: tls, mountPath: /etc/headrace/tls, readOnly: true}
{{- end }}
{{- with $c.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Init container that makes the model, where it has to be made: the demo, or a download. The demo's words are in the
rollouter's image alone. */}}
{{- define "headrace.modelInit" -}}
{{- $v := .root.Values -}}
{{- $c := index $v .component -}}
{{- $demo := include "headrace.demoTask" .root -}}
{{- if or $demo (eq $v.model.source "hf") -}}
- name: model
  image: {{ include "headrace.ourImage" (dict "root" .root "component" (ternary "rollouter" .component (ne $demo ""))) }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  {{- if $demo }}
  command:
    - python3
    - -P
    - -m
    - headrace.demo
    - --task={{ $demo }}
    - --seed={{ $v.config.seed | default 0 | int }}
    - --cache-dir=/demo
    - --link=/demo/current
  {{- else }}
  command:
    - python3
    - -P
    - -c
    - |
      import sys
      from huggingface_hub import snapshot_download
      snapshot_download(sys.argv[1], revision=sys.argv[2], local_dir=sys.argv[3])
    - {{ $v.model.hf.repo | quote }}
    - {{ $v.model.hf.revision | quote }}
    - {{ $v.model.mountPath | quote }}
  {{- end }}
  {{- $env := dict "HOME" "/scratch" "XDG_CACHE_HOME" "/scratch/.cache" "HF_HOME" "/scratch/huggingface" "OMP_NUM_THREADS" "1" "USER" "headrace" }}
  {{- if not $demo }}
  {{- with $v.model.hf.existingSecret }}
  {{- $_ := set $env "HF_TOKEN" (dict "valueFrom" (dict "secretKeyRef" (dict "name" . "key" $v.model.hf.tokenKey))) }}
  {{- end }}
  {{- /* A proxy, a mirror, a certificate's authority are the component's. This is the one that goes to the hub. */}}
  {{- range $name, $value := $c.extraEnv }}{{- $_ := set $env $name $value }}{{- end }}
  {{- $_ := set $env "HF_HUB_OFFLINE" "0" }}
  {{- end }}
  env: {{- include "headrace.envList" $env | trim | nindent 4 }}
  {{- if not $demo }}
  {{- with $c.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  # A pod asks for the larger of this and its containers'.
  {{- if $demo }}
  resources:
    requests: {cpu: 200m, memory: 2Gi}
    limits: {memory: 4Gi}
  {{- else }}
  resources: {{- toYaml $v.model.hf.resources | nindent 4 }}
  {{- end }}
  securityContext: {{- include "headrace.containerSecurity" (dict) | nindent 4 }}
  volumeMounts:
    - {name: scratch, mountPath: /scratch}
    - {name: tmp, mountPath: /tmp}
    {{- if $demo }}
    - {name: demo, mountPath: /demo}
    {{- else }}
    - {name: model, mountPath: {{ $v.model.mountPath | quote }}}
    {{- with $c.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Resources of a component, with so many GPUs. Takes (dict "root" $ "component" c "gpus" n). */}}
{{- define "headrace.resources" -}}
{{- $v := .root.Values -}}
{{- $r := index $v .component "resources" | default dict | deepCopy -}}
{{- if include "headrace.onGpus" .root -}}
{{- $devices := dict $v.gpuResource (int .gpus) -}}
{{- if $v.rdma.enabled -}}{{- $devices = merge $devices $v.rdma.resources -}}{{- end -}}
{{- range $name, $count := $devices -}}
{{- $_ := set $r "limits" (merge (dict $name (int $count)) ($r.limits | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $r -}}
{{- end -}}
