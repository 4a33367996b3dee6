package up

import (
	"fmt"
	"net"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// settleAddress finds the address that the daemon of the i-th node has chosen, stores it, and adds it to the node's
// certificate. The kubelet API reloads a renewed certificate.
func (in *instance) settleAddress(i int) error {
	addr, err := addressOf(bridgeName(in.node(in.settings, i)))
	if err != nil || in.settings.Nodes[i].Address == addr {
		return err
	}
	in.settings.Nodes[i].Address = addr
	if err := in.settings.save(in.layout); err != nil {
		return err
	}
	return in.pki.ensure(in.settings)
}

// addressOf returns this host's IPv4 address on a bridge.
func addressOf(bridge string) (string, error) {
	link, err := net.InterfaceByName(bridge)
	if err != nil {
		return "", errdefs.Preconditionf("the bridge %s does not exist: %w", bridge, err)
	}
	all, err := link.Addrs()
	if err != nil {
		return "", fmt.Errorf("addresses of bridge %s: %w", bridge, err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
			return n.IP.String(), nil
		}
	}
	return "", errdefs.Preconditionf("the bridge %s has no address", bridge)
}
