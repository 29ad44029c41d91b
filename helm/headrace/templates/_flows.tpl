{{/* flows.yaml as NetworkPolicies need it. */}}

{{/* The flows whose condition holds, as a YAML list. */}}
{{- define "headrace.flows" -}}
{{- $conditions := dict
  "bundledRedis" (not .Values.redis.external.url)
  "externalRedis" (not (not .Values.redis.external.url))
  "kubernetes" .Values.kubernetes.enabled
  "hub" (and (eq .Values.model.source "hf") (not (include "headrace.demoTask" .))) -}}
{{- $out := list -}}
{{- range (.Files.Get "flows.yaml" | fromYaml).flows -}}
{{- if or (not .when) (index $conditions (.when | default "")) -}}{{- $out = append $out . -}}{{- end -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{/* A peer as a list: a component of this release, or what the values say of the outside. */}}
{{- define "headrace.peers" -}}
{{- $np := .root.Values.networkPolicy -}}
{{- if eq .peer "prometheus" -}}
- namespaceSelector: {{- toYaml $np.monitoring.namespaceSelector | nindent 4 }}
  {{- with $np.monitoring.podSelector }}
  podSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if eq .peer "dns" -}}
- namespaceSelector: {{- toYaml $np.dns.namespaceSelector | nindent 4 }}
  podSelector: {{- toYaml $np.dns.podSelector | nindent 4 }}
{{- include "headrace.blocks" $np.dns.cidrs -}}
{{- else if eq .peer "kubernetes-api" -}}
{{- include "headrace.blocks" $np.kubernetesApi.cidrs -}}
{{- else if eq .peer "external-redis" -}}
{{- include "headrace.blocks" $np.externalRedis.cidrs -}}
{{- with $np.externalRedis.peers }}
{{ toYaml . }}
{{- end }}
{{- else if eq .peer "hub" -}}
{{- include "headrace.blocks" $np.hub.cidrs -}}
{{- else if eq .peer "queue-clients" -}}
{{- toYaml $np.queueClients -}}
{{- else -}}
- podSelector:
    matchLabels: {{- include "headrace.selector" (dict "root" .root "component" .peer) | nindent 6 }}
{{- end -}}
{{- end -}}

{{/* Ranges of addresses as peers. */}}
{{- define "headrace.blocks" -}}
{{- range . }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* The ports of a flow. */}}
{{- define "headrace.policyPorts" -}}
{{- $np := .root.Values.networkPolicy -}}
{{- $flow := .flow -}}
{{- if eq $flow.to "dns" -}}
{{- range $np.dns.ports | default (list 53) }}
- {protocol: UDP, port: {{ int . }}}
- {protocol: TCP, port: {{ int . }}}
{{- end }}
{{- else if eq $flow.to "kubernetes-api" -}}
{{- range $np.kubernetesApi.ports }}
- {protocol: TCP, port: {{ int . }}}
{{- end }}
{{- else if eq $flow.to "external-redis" -}}
{{- $named := regexFind "^rediss?://[^/?#]*" .root.Values.redis.external.url | regexFind ":[0-9]+$" | trimPrefix ":" }}
- {protocol: TCP, port: {{ $np.externalRedis.port | default $named | default 6379 | int }}}
{{- else if eq (toString $flow.port) "ephemeral" -}}
- {protocol: TCP, port: {{ int $np.ephemeralPorts.from }}, endPort: {{ int $np.ephemeralPorts.to }}}
{{- else if eq $flow.to "hub" -}}
- {protocol: TCP, port: {{ int $flow.port }}}
{{- else -}}
- {protocol: TCP, port: {{ include "headrace.port" (list .root $flow.to $flow.port) }}}
{{- end -}}
{{- end -}}
