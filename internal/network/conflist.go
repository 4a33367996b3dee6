package network

import "fmt"

// The conflist that other container runtimes of the node, and cocoond in mode cni, put interfaces on our bridge with.
const (
	ConflistName = "cocoon-dhcp"
	ConflistFile = "30-" + ConflistName + ".conflist"
)

// Conflist returns a CNI configuration list that puts interfaces on bridge: no IPAM, since DHCP answers there, no way
// from one to the other on the bridge itself, and no MAC but its own.
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
