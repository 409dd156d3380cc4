{{/* Names are fixed: one operator per namespace, and objects outside namespaces belong to one release. */}}
{{- define "larder.name" -}}larder-operator{{- end -}}

{{/* Selectors: never change. The operator's NetworkPolicies let in pods by the first of them. */}}
{{- define "larder.selectorLabels" -}}
app.kubernetes.io/name: {{ include "larder.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "larder.labels" -}}
{{ include "larder.selectorLabels" . }}
app.kubernetes.io/part-of: larder
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of the test's pods: not the operator's, or its Service and NetworkPolicy would take them in. */}}
{{- define "larder.testLabels" -}}
app.kubernetes.io/name: larder-test
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
app.kubernetes.io/part-of: larder
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
