{{- /* cocoon.changed makes an object of deploy/ be as values.yaml says. It prints nothing. */ -}}
{{- define "cocoon.changed" }}
{{- $ := index . 0 }}{{ $folder := index . 1 }}{{ $values := index . 2 }}{{ $object := index . 3 }}
{{- if hasKey $object "Error" }}{{ fail (printf "%s: %s" $folder $object.Error) }}{{ end }}
{{- $labels := dict "app.kubernetes.io/managed-by" $.Release.Service "app.kubernetes.io/instance" $.Release.Name "helm.sh/chart" (printf "%s-%s" $.Chart.Name $.Chart.Version) }}
{{- $_ := set $object.metadata "labels" (merge (default dict $object.metadata.labels) $labels) }}
{{- if eq $object.kind "CustomResourceDefinition" }}
{{- $_ := set $object.metadata "annotations" (merge (default dict $object.metadata.annotations) (dict "helm.sh/resource-policy" "keep")) }}
{{- else if has $object.kind (list "Deployment" "StatefulSet") }}
{{- if hasKey $values "replicas" }}{{ $_ := set $object.spec "replicas" $values.replicas }}{{ end }}
{{- $pod := $object.spec.template.spec }}
{{- with $values.nodeSelector }}{{ $_ := set $pod "nodeSelector" . }}{{ end }}
{{- with $values.tolerations }}{{ $_ := set $pod "tolerations" . }}{{ end }}
{{- with $.Values.image.pullSecrets }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end }}
{{- range $container := $pod.containers }}
{{- $name := $container.image | splitList "/" | last | splitList ":" | first }}
{{- $_ := set $container "image" (printf "%s/%s:%s" $.Values.image.registry $name (default $.Chart.AppVersion $.Values.image.tag)) }}
{{- $_ := set $container "imagePullPolicy" $.Values.image.pullPolicy }}
{{- with $values.resources }}{{ $_ := set $container "resources" . }}{{ end }}
{{- range $env := $container.env }}
{{- if eq $env.name "EPOCH_URL" }}
{{- if $.Values.epoch.url }}{{ $_ := set $env "value" $.Values.epoch.url }}
{{- else if and $.Values.epoch.enabled $.Values.epoch.tlsSecret }}{{ $_ := set $env "value" (replace "http:" "https:" $env.value) }}{{ end }}
{{- end }}
{{- if and (eq $env.name "KUBEVIRT_ADDR") $.Values.kubevirt.enabled }}{{ $_ := unset $env "valueFrom" }}{{ $_ := set $env "value" ":8444" }}{{ end }}
{{- if eq $env.name "EPOCH_TOKEN" }}{{ $_ := set $env.valueFrom.secretKeyRef "name" $.Values.epoch.tokenSecret }}{{ end }}
{{- end }}
{{- end }}
{{- if eq $folder "manager" }}
{{- with $.Values.epoch.caSecret }}
{{- include "cocoon.mounted" (list $pod "registry-ca" "/etc/cocoon/registry" (dict "secret" (dict "secretName" . "items" (list (dict "key" "ca.crt" "path" "ca.crt")))) (dict "EPOCH_CA_CERT" "/etc/cocoon/registry/ca.crt")) }}
{{- end }}
{{- with $values.clients }}{{ if .configMap }}
{{- include "cocoon.mounted" (list $pod "client-ca" "/etc/cocoon/clients" (dict "configMap" (dict "name" .configMap)) (dict "CLIENT_CA_FILE" (printf "/etc/cocoon/clients/%s" .key) "CLIENT_ALLOWED_NAMES" (join "," .allowedNames))) }}
{{- end }}{{ end }}
{{- end }}
{{- if eq $folder "epoch" }}
{{- range $volume := $pod.volumes }}{{ if eq $volume.name "tokens" }}{{ $_ := set $volume.secret "secretName" $values.tokenSecret }}{{ end }}{{ end }}
{{- with $values.tlsSecret }}
{{- include "cocoon.mounted" (list $pod "tls" "/etc/epoch-tls" (dict "secret" (dict "secretName" . "defaultMode" 0440)) (dict "EPOCH_TLS_CERT" "/etc/epoch-tls/tls.crt" "EPOCH_TLS_KEY" "/etc/epoch-tls/tls.key")) }}
{{- range $container := $pod.containers }}{{ range $probe := list $container.startupProbe $container.livenessProbe $container.readinessProbe }}{{ $_ := set $probe.httpGet "scheme" "HTTPS" }}{{ end }}{{ end }}
{{- end }}
{{- range $name, $value := $values.env }}{{ range $container := $pod.containers }}{{ $_ := set $container "env" (append $container.env (dict "name" $name "value" (ternary $value (toJson $value) (kindIs "string" $value)))) }}{{ end }}{{ end }}
{{- if $values.storage.volume }}
{{- $_ := unset $object.spec "volumeClaimTemplates" }}
{{- $_ := set $pod "volumes" (append $pod.volumes (merge (dict "name" "data") $values.storage.volume)) }}
{{- else }}
{{- $claim := index $object.spec.volumeClaimTemplates 0 }}
{{- $_ := set $claim.spec.resources.requests "storage" $values.storage.size }}
{{- with $values.storage.storageClass }}{{ $_ := set $claim.spec "storageClassName" . }}{{ end }}
{{- end }}
{{- end }}
{{- else if eq $object.kind "NetworkPolicy" }}
{{- range $rule := $object.spec.ingress }}
{{- if and $values.from (not $rule.from) }}{{ $_ := set $rule "from" $values.from }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* cocoon.mounted gives the containers of a pod a volume, and variables that name its files. It prints nothing. */ -}}
{{- define "cocoon.mounted" }}
{{- $pod := index . 0 }}{{ $name := index . 1 }}{{ $path := index . 2 }}{{ $source := index . 3 }}{{ $variables := index . 4 }}
{{- $_ := set $pod "volumes" (append (default list $pod.volumes) (merge (dict "name" $name) $source)) }}
{{- range $container := $pod.containers }}
{{- $_ := set $container "volumeMounts" (append (default list $container.volumeMounts) (dict "name" $name "mountPath" $path "readOnly" true)) }}
{{- range $variable, $value := $variables }}
{{- if $value }}{{ $_ := set $container "env" (append (default list $container.env) (dict "name" $variable "value" $value)) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
