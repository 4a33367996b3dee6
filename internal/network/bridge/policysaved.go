package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

// savedPolicies is a file with the policies of all virtual nodes of a daemon, if there are several. After a restart of the daemon
// the first node sets its policies before the others, and the whole table is replaced; the file says what the others had set.
// The file counts only while the table of that time exists. So after a restart of the host, guests are closed until their own
// node has set their policies, because the addresses in the file may have other owners by then.
type savedPolicies struct {
	path  string
	nodes map[string]network.Policies // what the file had when the daemon started; nil once a node has set its policies
}

const savedVersion = 1

type savedFile struct {
	Version int                         `json:"version"`
	Nodes   map[string]network.Policies `json:"nodes"`
}

// load reads the file. After an error it counts as empty. Errors: DataLoss if the file is damaged.
func (s *savedPolicies) load() error {
	b, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the policies of the virtual nodes: %w", err)
	}
	var f savedFile
	if err := json.Unmarshal(b, &f); err != nil || f.Version != savedVersion {
		return errdefs.DataLossf("%s is not a file with policies of version %d", s.path, savedVersion)
	}
	s.nodes = f.Nodes
	maps.DeleteFunc(s.nodes, func(_ string, p network.Policies) bool { return p.Validate() != nil })
	return nil
}

// with returns the policies in now and, of nodes that now lacks, those in the file. A node without a guest in leases is left out,
// because nothing depends on it.
func (s *savedPolicies) with(now map[string]network.Policies, leases []ipam.Lease) map[string]network.Policies {
	attached := map[vm.ID]bool{}
	for _, l := range leases {
		attached[l.ID] = true
	}
	out := maps.Clone(now)
	for name, p := range s.nodes {
		if _, set := now[name]; !set && slices.ContainsFunc(p.Guests, func(g network.Guest) bool { return attached[g.ID] }) {
			out[name] = p
		}
	}
	return out
}

// save writes the file, or removes it if there is only one node. It also removes a file that it cannot replace: after a restart
// guests are then closed until their own node has set their policies.
func (s *savedPolicies) save(nodes map[string]network.Policies) error {
	if len(nodes) < 2 {
		return s.remove()
	}
	b, err := json.Marshal(savedFile{savedVersion, nodes})
	if err == nil {
		err = atomicfile.WriteFile(s.path, append(b, '\n'), 0o600)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("save the policies of the virtual nodes: %w", err), s.remove())
	}
	return nil
}

func (s *savedPolicies) remove() error {
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the saved policies of the virtual nodes: %w", err)
	}
	return nil
}
