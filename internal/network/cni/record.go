package cni

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

const recordVersion = 1

// record is one attachment. It exists from before the first plugin runs until after the last one has undone its work.
type record struct {
	Version int              `json:"version"`
	ID      vm.ID            `json:"vm_id"`
	VM      string           `json:"vm"`
	Index   int              `json:"nic"`
	MAC     string           `json:"mac,omitempty"`   // the requested MAC
	Ports   []vm.PortMapping `json:"ports,omitempty"` // of the host
	Pod     vm.PodName       `json:"pod,omitzero"`    // whose interface it is

	Bandwidth vm.Bandwidth `json:"bandwidth,omitzero"`
	Added     bool         `json:"added"`             // ADD succeeded, and NIC holds its result
	Bridge    string       `json:"bridge,omitempty"`  // the bridge whose Addresses gave the address; "" if the plugins did
	NIC       vm.NIC       `json:"nic_info,omitzero"` // as Attach returned it
}

// tapName returns the tap name of an interface, for all networks: 15 characters, the maximum for a link name.
func tapName(instance string, id vm.ID, index int) string {
	sum := sha256.Sum256([]byte("cni\x00" + instance + "\x00" + string(id) + "\x00" + strconv.Itoa(index)))
	return "cx" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:13]
}

func (n *Network) tap(r record) string { return tapName(n.cfg.Instance, r.ID, r.Index) }

func (n *Network) space(r record) host.Space {
	return host.Space{Path: filepath.Join(n.cfg.NetNSDir, "cocoon-"+string(r.ID))}
}

func (r record) link() string { return "eth" + strconv.Itoa(r.Index) }

func (n *Network) recordPath(tap string) string {
	return filepath.Join(n.cfg.StateDir, filepath.Base(tap)+".json")
}

// load returns the record of a tap, nil if there is none.
func (n *Network) load(tap string) (*record, error) {
	b, err := os.ReadFile(n.recordPath(tap))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read attachment: %w", err)
	}
	var r record
	if err := json.Unmarshal(b, &r); err != nil || r.Version != recordVersion || r.ID == "" || n.tap(r) != tap {
		return nil, errdefs.DataLossf("%s is not an attachment record of version %d; move it away", n.recordPath(tap), recordVersion)
	}
	return &r, nil
}

func (n *Network) save(r record) error {
	r.Version = recordVersion
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("format attachment: %w", err)
	}
	if err := atomicfile.WriteFile(n.recordPath(n.tap(r)), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	return nil
}

func (n *Network) forget(r record) error {
	if err := os.Remove(n.recordPath(n.tap(r))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove attachment: %w", err)
	}
	return nil
}

// records lists all attachments.
func (n *Network) records() ([]record, error) {
	paths, err := filepath.Glob(filepath.Join(n.cfg.StateDir, "cx*.json"))
	if err != nil {
		return nil, fmt.Errorf("list attachments: %w", err)
	}
	var out []record
	for _, p := range paths {
		r, err := n.load(strings.TrimSuffix(filepath.Base(p), ".json"))
		if err != nil {
			return nil, err
		}
		if r != nil {
			out = append(out, *r)
		}
	}
	return out, nil
}
