package bridge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// state is what Setup must record: its choice of subnet, and what Teardown has to restore.
type state struct {
	Version int          `json:"version"`
	Subnet  netip.Prefix `json:"subnet,omitzero"`

	// Forward is the value of net.ipv4.ip_forward before we set it to 1 in Space; "" if we did not.
	Forward string `json:"ip_forward_before,omitempty"`
	Space   string `json:"space,omitempty"` // identity of the namespace

	Forward6 string `json:"ipv6_forwarding_before,omitempty"` // the same for net.ipv6.conf.all.forwarding
}

// The settings that turn a host into a router.
const (
	forwardKey  = "ipv4/ip_forward"
	forward6Key = "ipv6/conf/all/forwarding"
)

// forwarding is a setting and its value before our change.
type forwarding struct {
	key    string
	before *string
}

func (s *state) forwarding(ipv6 bool) []forwarding {
	out := []forwarding{{forwardKey, &s.Forward}}
	if ipv6 {
		out = append(out, forwarding{forward6Key, &s.Forward6})
	}
	return out
}

const stateVersion = 1

func (n *Network) statePath() string {
	return filepath.Join(n.cfg.StateDir, "network-"+n.cfg.Name+".json")
}

func (n *Network) loadState() (state, error) {
	b, err := os.ReadFile(n.statePath())
	if errors.Is(err, fs.ErrNotExist) {
		return state{Version: stateVersion}, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("read state of network %s: %w", n.cfg.Name, err)
	}
	var s state
	if err := json.Unmarshal(b, &s); err != nil || s.Version != stateVersion {
		return state{}, errdefs.DataLossf("%s is not a network state file of version %d; move it away, then Cocoon chooses the subnet again", n.statePath(), stateVersion)
	}
	return s, nil
}

// saveState writes s unless the file already holds it.
func (n *Network) saveState(s state) error {
	if old, err := n.loadState(); err == nil && old == s {
		if _, err := os.Stat(n.statePath()); err == nil {
			return nil
		}
	}
	b, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("format state of network %s: %w", n.cfg.Name, err)
	}
	if err := os.MkdirAll(n.cfg.StateDir, 0o755); err != nil {
		return fmt.Errorf("write state of network %s: %w", n.cfg.Name, err)
	}
	return atomicfile.WriteFile(n.statePath(), append(b, '\n'), 0o644)
}

// usable returns the leases in the file. If the file is damaged it returns no leases and the reason as damage; Remember gets
// them back later from VM records.
func usable(leases []ipam.Lease, err error) (_ []ipam.Lease, damage, _ error) {
	if errdefs.Is(err, errdefs.DataLoss) {
		return nil, err, nil
	}
	return leases, nil, err
}

// setAside moves a damaged lease file out of the way.
func (n *Network) setAside(damage error) error {
	to, err := n.file.SetAside(time.Now())
	if err != nil {
		return err
	}
	n.damaged.Add(1)
	n.log.Warn("lease file damaged and moved aside, leases are rebuilt from taps and the records of vms", "network", n.cfg.Name, "path", to, "err", damage)
	return nil
}

// DamagedLeases returns how often, since the daemon started, Setup found the lease file damaged.
func (n *Network) DamagedLeases() uint64 { return n.damaged.Load() }

// Remember implements network.Network.
func (n *Network) Remember(_ context.Context, held []network.Held) error {
	lv, err := n.up()
	if err != nil {
		return err
	}
	found := 0
	for _, h := range held {
		ip, err := netip.ParseAddr(h.NIC.IP)
		if err != nil || h.NIC.Network != n.cfg.Name {
			continue
		}
		if lv.pool.Remember(ipam.Lease{MAC: h.NIC.MAC, IP: ip, VM: h.Name, ID: h.ID, Index: h.Index, Tap: h.NIC.Tap}, time.Now()) {
			found++
		}
	}
	if found == 0 {
		return nil
	}
	n.log.Warn("leases rebuilt from the records of vms", "network", n.cfg.Name, "count", found)
	return n.file.Sync(lv.pool)
}
