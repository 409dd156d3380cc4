{{/*
What the operator may do inside a namespace that it watches. Each verb is one that it uses; a test compares these rules
with cacheoperator.install_check, and that with the kinds that the operator makes. `helm test` asks the API server for
each of them.
*/}}
{{- define "larder.rules" -}}
- apiGroups: [larder.dev]
  resources: [kvcaches]
  verbs: [list, watch]
- apiGroups: [larder.dev]
  resources: [kvcaches/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments, daemonsets, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets, controllerrevisions]
  verbs: [list]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, create, patch, delete]
# No list and no watch: it reads back its own Secrets by name, and never anybody else's.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# Reading pods is also what the router's Role gives away, and nobody may give what he has not. Pods are made by dry run,
# to see whether they may share memory; one short-lived pod is made and ended with spec.verify Probe, where engines ask for
# an API key.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
# The Pod Security label of the namespace decides whether pods may share memory.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
{{- end -}}

{{/* So that of two operators on the same namespaces the later one stays off. */}}
{{- define "larder.leaseRule" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end -}}
