// Package manager holds the rights of cocoon-manager, for programs that install it. It installs nothing.
package manager

import (
	_ "embed"
	"regexp"
)

// Rights are the ClusterRole cocoon-manager: the permissions for everything that the manager does in a cluster, and no others.
//
//go:embed clusterrole.yaml
var Rights []byte

// WebhookRights are the Role cocoon-manager-webhook in the namespace cocoon-system, for the certificate of the webhooks.
//
//go:embed webhook-role.yaml
var WebhookRights []byte

// Webhooks are the configurations with which the API server calls the Service cocoon-manager.
//
//go:embed webhook.yaml
var Webhooks []byte

var service = regexp.MustCompile(`service: \{name: cocoon-manager, namespace: cocoon-system, path: (\S+), port: 443\}`)

// WebhooksAt are the configurations with which the API server calls a manager at a URL, one that runs outside the cluster.
func WebhooksAt(base string) []byte { return service.ReplaceAll(Webhooks, []byte(`url: "`+base+`$1"`)) }
