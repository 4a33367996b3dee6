package containers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// nics keeps the interfaces of containers, one file for each: DIR/ID.json. An interface that was attached and is in no file yet is found
// by the network, by its id.
type nics struct{ dir string }

type nicFile struct {
	Name string `json:"name"` // of the workload
	NIC  vm.NIC `json:"nic"`
}

func (n nics) path(id vm.ID) string { return filepath.Join(n.dir, string(id)+".json") }

func (n nics) put(id vm.ID, f nicFile) error {
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		return err
	}
	return atomicfile.WriteFile(n.path(id), data, 0o600)
}

// get returns the interface of a container; ok is false if it has none, or its record is damaged: the network has the address by the
// name, and makes the interface anew.
func (n nics) get(id vm.ID) (f nicFile, ok bool) {
	data, err := os.ReadFile(n.path(id))
	return f, err == nil && json.Unmarshal(data, &f) == nil
}

func (n nics) address(id vm.ID) string {
	f, _ := n.get(id)
	return f.NIC.IP
}

func (n nics) drop(id vm.ID) error {
	if err := os.Remove(n.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// sweep removes what a daemon has left that was killed while it wrote. Nobody writes yet.
func (n nics) sweep() error { return atomicfile.Sweep(n.path("*")) }

// Begin tells the network which interfaces containers have, and removes those that a crash left. It comes before the first use of the
// driver, and after the network was set up.
func (d *Driver) Begin(ctx context.Context) error {
	if d.deps.Network == nil {
		return nil
	}
	if err := d.nics.sweep(); err != nil {
		return err
	}
	var held []network.Held
	var keep []string
	known := map[vm.ID]bool{}
	for _, name := range d.deps.Known() {
		id := ID(name)
		known[id] = true
		f, ok := d.nics.get(id)
		if !ok {
			continue
		}
		held = append(held, network.Held{ID: id, Name: f.Name, NIC: f.NIC})
		if _, err := d.deps.Runtime.Inspect(ctx, string(id)); err == nil {
			keep = append(keep, f.NIC.Tap)
		}
	}
	if err := d.deps.Network.Remember(ctx, held); err != nil {
		return fmt.Errorf("remember the addresses of containers: %w", err)
	}
	// Interfaces of VMs are those of ids that are unknown here, and stay.
	if _, _, err := d.deps.Network.Sweep(ctx, keep, func(id vm.ID) bool { return known[id] }); err != nil {
		return fmt.Errorf("remove interfaces of containers: %w", err)
	}
	return nil
}

// connect gives a container its network.
func (d *Driver) connect(ctx context.Context, w *capsulev1.Workload, id vm.ID, s *container.Spec) error {
	const local = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	switch workload.Network(w) {
	case capsulev1.NetworkMode_NETWORK_MODE_HOST:
		s.Network.Host = true
		s.Files = d.deps.HostFiles()
		return nil
	case capsulev1.NetworkMode_NETWORK_MODE_NONE:
		s.Files.Hosts = local + "127.0.1.1\t" + s.Hostname + "\n"
		return nil
	case capsulev1.NetworkMode_NETWORK_MODE_BRIDGE, capsulev1.NetworkMode_NETWORK_MODE_UNSPECIFIED:
	}
	path, err := d.deps.Namespaces.Make(id)
	if err != nil {
		return err
	}
	var spec vm.NICSpec
	for _, p := range w.GetContainer().GetPorts() {
		spec.Ports = append(spec.Ports, vm.PortMapping{Protocol: vm.Protocol(workload.Protocol(p)), HostPort: uint16(p.GetHostPort()), GuestPort: uint16(p.GetContainerPort())})
	}
	nic, err := d.deps.Network.AttachNamespace(ctx, id, w.GetName(), 0, spec, path)
	if err != nil {
		return err
	}
	if err := d.nics.put(id, nicFile{Name: w.GetName(), NIC: nic}); err != nil {
		return fmt.Errorf("store the interface of the container: %w", err)
	}
	s.Network.NetNS = path
	var lines []string
	if domains := d.deps.Searches(); len(domains) > 0 {
		lines = append(lines, "search "+strings.Join(domains, " "))
	}
	s.Files.ResolvConf = vm.ResolvConf([]vm.NIC{nic}, lines)
	s.Files.Hosts = local + nic.IP + "\t" + s.Hostname + "\n"
	return nil
}

// disconnect removes the interface and the namespace of a container. Its address stays reserved.
func (d *Driver) disconnect(ctx context.Context, id vm.ID) error {
	if f, ok := d.nics.get(id); ok && d.deps.Network != nil {
		if err := d.deps.Network.Detach(ctx, f.NIC); err != nil {
			return fmt.Errorf("remove its interface: %w", err)
		}
	}
	return d.deps.Namespaces.Remove(id)
}

// release gives the address of a container back.
func (d *Driver) release(ctx context.Context, id vm.ID) error {
	if f, ok := d.nics.get(id); ok && d.deps.Network != nil {
		if err := d.deps.Network.Release(ctx, f.NIC); err != nil {
			return fmt.Errorf("release its address: %w", err)
		}
	}
	return d.nics.drop(id)
}
