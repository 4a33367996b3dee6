package network

import "fmt"

// The conflist with which other container runtimes of the node, and cocoond in mode cni, put interfaces on our bridge.
const (
	ConflistName = "cocoon-dhcp"
	ConflistFile = "30-" + ConflistName + ".conflist"
)

// Conflist returns a CNI configuration list that puts interfaces on bridge. It has no IPAM, because our DHCP answers there. The
// interfaces cannot reach each other on the bridge itself, and each can use only its own MAC.
func Conflist(bridge string) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": %q,
  "plugins": [
    {
      "type": "bridge",
      "bridge": %q,
      "isGateway": false,
      "ipMasq": false,
      "portIsolation": true,
      "macspoofchk": true,
      "capabilities": {"mac": true},
      "ipam": {}
    }
  ]
}
`, ConflistName, bridge)
}
