// Package manager holds the rights of cocoon-manager, for whom installs it. It installs nothing.
package manager

import (
	_ "embed"
	"regexp"
)

// Rights are the ClusterRole cocoon-manager: everything the manager does in a cluster, and nothing else.
//
//go:embed clusterrole.yaml
var Rights []byte

// WebhookRights are the Role cocoon-manager-webhook of the namespace cocoon-system: the certificate of the webhooks.
//
//go:embed webhook-role.yaml
var WebhookRights []byte

// Webhooks are the configurations by which the API server asks the Service cocoon-manager.
//
//go:embed webhook.yaml
var Webhooks []byte

var service = regexp.MustCompile(`service: \{name: cocoon-manager, namespace: cocoon-system, path: (\S+), port: 443\}`)

// WebhooksAt are the configurations by which the API server asks a manager at a URL: one that runs beside it, not in the cluster.
func WebhooksAt(base string) []byte { return service.ReplaceAll(Webhooks, []byte(`url: "`+base+`$1"`)) }
