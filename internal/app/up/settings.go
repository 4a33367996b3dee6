package up

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// leftoverLimit is how long processes of an earlier supervisor may take to end.
const leftoverLimit = 20 * time.Second

const (
	defaultNodeName = "cocoon-node-0"
	defaultAPIPort  = 6443
	defaultNodePort = 10250
	serviceCIDR     = "10.96.0.0/16"
	serviceIP       = "10.96.0.1" // first address of serviceCIDR: the "kubernetes" Service
	nodeIP          = "127.0.0.1"
)

// Settings are the choices of an instance that must outlive a restart. They are kept in DIR/up.json.
type Settings struct {
	NodeName string `json:"nodeName"`
	APIPort  int    `json:"apiPort"`
	NodePort int    `json:"nodePort"` // the kubelet API of the virtual node
}

// layout is where an instance keeps its files.
type layout struct{ dir string }

func (l layout) join(parts ...string) string {
	return filepath.Join(append([]string{l.dir}, parts...)...)
}
func (l layout) settings() string   { return l.join("up.json") }
func (l layout) lock() string       { return l.join("up.lock") }
func (l layout) kubeconfig() string { return l.join("kubeconfig") }
func (l layout) socket() string     { return l.join("run", "cocoond.sock") }
func (l layout) log(name string) string {
	return l.join("log", name+".log")
}
func (l layout) config(name string) string { return l.join("etc", name) }
func (l layout) mappings() string          { return l.join("etc", "images.d") } // image name mappings, the user's to fill

var nodeNameRE = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// check refuses options that no instance can have.
func (o Options) check() error {
	if o.NodeName != "" && (len(o.NodeName) > 63 || !nodeNameRE.MatchString(o.NodeName)) {
		return errdefs.Invalidf("node name %q is not a DNS name of at most 63 characters", o.NodeName)
	}
	for what, port := range map[string]int{"API server": o.APIPort, "virtual node": o.NodePort} {
		if port < 0 || port > 65535 {
			return errdefs.Invalidf("port %d of the %s is not between 1 and 65535", port, what)
		}
	}
	return nil
}

// settle merges what was asked with what an earlier start decided, picks free ports for the rest and keeps the result.
// The ports are the caller's until it closes p. Preconditions: o.check() found nothing.
func settle(l layout, o Options, p *ports) (Settings, error) {
	var s Settings
	switch data, err := os.ReadFile(l.settings()); {
	case err == nil:
		if err := json.Unmarshal(data, &s); err != nil {
			return s, errdefs.DataLossf("%s is damaged (%w); remove it to choose ports anew", l.settings(), err)
		}
		if err := (Options{NodeName: s.NodeName, APIPort: s.APIPort, NodePort: s.NodePort}).check(); err != nil {
			return s, errdefs.DataLossf("%s is damaged (%w); remove it to choose anew", l.settings(), err)
		}
	case !errors.Is(err, os.ErrNotExist):
		return s, fmt.Errorf("read settings: %w", err)
	}
	if o.NodeName != "" {
		s.NodeName = o.NodeName
	}
	if s.NodeName == "" {
		s.NodeName = defaultNodeName
	}
	var err error
	if s.APIPort, err = p.choose("API server", "--api-port", o.APIPort, s.APIPort, defaultAPIPort); err != nil {
		return s, err
	}
	if s.NodePort, err = p.choose("virtual node", "--node-port", o.NodePort, s.NodePort, defaultNodePort); err != nil {
		return s, err
	}
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return s, fmt.Errorf("encode settings: %w", err)
	}
	return s, atomicfile.WriteFile(l.settings(), append(data, '\n'), 0o600)
}

// ports are the TCP ports of one instance. A server binds its port seconds after it was chosen; until then, and as long
// as the supervisor lives, an abstract unix socket of the port's name tells other supervisors that it is taken. The
// kernel gives it back when the process ends, however it ends.
type ports struct{ held []net.Listener }

func (p *ports) Close() {
	for _, l := range p.held {
		l.Close()
	}
}

// choose returns the port that was asked for or kept from before, which must be free, else the usual one if it is free,
// else any free one: two instances on one machine do not get into each other's way.
func (p *ports) choose(what, flag string, asked, kept, usual int) (int, error) {
	fixed := asked
	if fixed == 0 {
		fixed = kept
	}
	if fixed != 0 {
		if !p.wait(fixed, asked == 0) {
			return 0, errdefs.Exhaustedf("port %d of the %s is taken by another program; choose another with %s", fixed, what, flag)
		}
		return fixed, nil
	}
	for port := usual; port < usual+1000 && port <= 65535; port++ {
		if p.take(port) {
			return port, nil
		}
	}
	return 0, errdefs.Exhaustedf("no port from %d on is free for the %s; choose one with %s", usual, what, flag)
}

// wait takes a port, and if patient gives the processes of a supervisor that was just killed the time to end.
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
