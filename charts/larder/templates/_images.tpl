{{/* Full reference of one image: (dict "root" $ "image" .Values.images.X). */}}
{{- define "larder.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- $name := printf "%s/%s" $registry .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* What pods of this chart may do: Pod Security `restricted`, and a read-only root besides. */}}
{{- define "larder.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.operator.runAsUser }}
runAsUser: {{ . | int64 }}
runAsGroup: {{ . | int64 }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "larder.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
