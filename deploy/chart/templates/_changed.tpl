{{- /* cocoon.changed makes an object of deploy/ be as values.yaml says. It prints nothing. */ -}}
{{- define "cocoon.changed" }}
{{- $ := index . 0 }}{{ $folder := index . 1 }}{{ $values := index . 2 }}{{ $object := index . 3 }}
{{- if hasKey $object "Error" }}{{ fail (printf "%s: %s" $folder $object.Error) }}{{ end }}
{{- $labels := dict "app.kubernetes.io/managed-by" $.Release.Service "app.kubernetes.io/instance" $.Release.Name "helm.sh/chart" (printf "%s-%s" $.Chart.Name $.Chart.Version) }}
{{- $_ := set $object.metadata "labels" (merge (default dict $object.metadata.labels) $labels) }}
{{- if eq $object.kind "CustomResourceDefinition" }}
{{- $_ := set $object.metadata "annotations" (merge (default dict $object.metadata.annotations) (dict "helm.sh/resource-policy" "keep")) }}
{{- else if eq $object.kind "Deployment" }}
{{- $_ := set $object.spec "replicas" $values.replicas }}
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
{{- if and (eq $env.name "EPOCH_URL") $.Values.epoch.url }}{{ $_ := set $env "value" $.Values.epoch.url }}{{ end }}
{{- if eq $env.name "EPOCH_TOKEN" }}{{ $_ := set $env.valueFrom.secretKeyRef "name" $.Values.epoch.tokenSecret }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
