{{/*
Where rollouters go on GPUs, unless their values say otherwise. Nothing may take the GPUs that the trainer waits for, and
a rollouter is small enough to go anywhere: so none is placed before the trainer is. All nodes have one value of
kubernetes.io/os: a pod of the trainer on any of them is enough. The pods of a LeaderWorkerSet are told apart by their
index, so that rollouters wait for each; a Deployment's are not. Then they fill nodes, the trainer's first, and leave
whole ones to who needs them.
*/}}
{{- define "headrace.rollouterPlacement" -}}
{{- if include "headrace.onGpus" . -}}
{{- $nodes := include "headrace.trainerNodes" . | int -}}
{{- $trainer := include "headrace.selector" (dict "root" . "component" "trainer") | fromYaml -}}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      {{- if and (eq .Values.trainer.workload "leaderWorkerSet") (gt $nodes 1) }}
      {{- range $index := until $nodes }}
      - topologyKey: kubernetes.io/os
        labelSelector:
          matchLabels: {{- merge (dict "leaderworkerset.sigs.k8s.io/worker-index" (toString $index)) $trainer | toYaml | nindent 12 }}
      {{- end }}
      {{- else }}
      - topologyKey: kubernetes.io/os
        labelSelector:
          matchLabels: {{- toYaml $trainer | nindent 12 }}
      {{- end }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- omit $trainer "app.kubernetes.io/component" | toYaml | nindent 14 }}
            matchExpressions:
              - {key: app.kubernetes.io/component, operator: In, values: [rollouter, trainer]}
# It counts no pods. Without any the scheduler has its own, which spread rollouters over nodes, and outweigh the above.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {headrace/spread: none}}
{{- end -}}
{{- end -}}
