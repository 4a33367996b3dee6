package up

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// leftoverLimit is the timeout for processes of an earlier supervisor to end.
const leftoverLimit = 20 * time.Second

// ports are the TCP ports of one instance. A server binds its port seconds after it was chosen. From the choice until
// the supervisor ends, an abstract unix socket named after the port tells other supervisors that the port is taken. The
// kernel releases it when the process ends for any reason.
type ports struct{ held []net.Listener }

func (p *ports) Close() {
	for _, l := range p.held {
		l.Close()
	}
}

// choose returns the port that was requested or kept from an earlier start, which must be free. Otherwise it returns
// the usual one if free, else any free one, so that two instances on one machine do not conflict.
func (p *ports) choose(what, flag string, asked, kept, usual int) (int, error) {
	if fixed := cmp.Or(asked, kept); fixed != 0 {
		if !p.wait(fixed, asked == 0) {
			return 0, errdefs.Exhaustedf("port %d of the %s is in use by another program; choose another port with %s", fixed, what, flag)
		}
		return fixed, nil
	}
	for port := usual; port < usual+1000 && port <= 65535; port++ {
		if p.take(port) {
			return port, nil
		}
	}
	return 0, errdefs.Exhaustedf("found no free port from %d for the %s; choose one with %s", usual, what, flag)
}

// chooseInner is choose for a port that nobody outside the instance depends on. It moves if another program has the one of an earlier
// start.
func (p *ports) chooseInner(what, flag string, asked, kept, usual int) (int, error) {
	if asked == 0 && kept != 0 && p.take(kept) {
		return kept, nil
	}
	return p.choose(what, flag, asked, 0, usual)
}

// wait takes a port. If patient, it gives the processes of a supervisor that was just killed time to end.
func (p *ports) wait(port int, patient bool) bool {
	deadline := time.Now().Add(leftoverLimit)
	for !p.take(port) {
		if !patient || time.Now().After(deadline) {
			return false
		}
		<-time.After(100 * time.Millisecond)
	}
	return true
}

func (p *ports) take(port int) bool {
	claim, err := net.Listen("unix", "@cocoon-up-port-"+strconv.Itoa(port))
	if err != nil {
		return false
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, strconv.Itoa(port)))
	if err != nil {
		claim.Close()
		return false
	}
	ln.Close()
	p.held = append(p.held, claim)
	return true
}

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
