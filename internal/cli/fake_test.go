package cli_test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/cli"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// node is a node of one VM called web whose guest runs shell-like words.
type node struct {
	nodeapi.Engine // panics for what is not written here
	launched       vm.Spec
	cloned         vm.CloneSpec
	killed         []string // containers
	stopped        []time.Duration
	events         func(ctx context.Context, fn func(vm.Event) error) error
	exec           func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error)
	console        io.ReadWriteCloser
	kept           []bool // what Display and Screenshot were asked
	record         vm.Record
	pulls          puller
	store          store
	catalog        catalog
	volumes        nodeapi.Volumes
	filler         nodeapi.VolumeFiller
	env            map[string]string
}

// puller has every image, under the requested name.
type puller struct {
	image.Puller // panics for what is not written here
	asked        []image.PullRequest
}

func (p *puller) Pull(_ context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	p.asked = append(p.asked, r)
	if r.Policy == image.PullNever || strings.Contains(r.Name, "missing") {
		return image.Image{}, errdefs.NotFoundf("%s is not there", r.Name)
	}
	progress(image.Progress{Phase: "downloading", Done: 1, Total: 2})
	return image.Image{ID: "sha256:1234", Name: strings.TrimPrefix(r.Name, "https://")}, nil
}

func (*puller) Explain(_ context.Context, name string) (image.Explanation, error) {
	return image.Explanation{Name: name, Kind: "mapped", Key: "k", Rule: "name k", Present: true, Steps: []string{"first\x1b[2J", "second"}}, nil
}

func (n *node) List(context.Context) ([]vm.Record, error) {
	if n.record.ID == "" {
		return nil, nil
	}
	return []vm.Record{n.record}, nil
}

func (n *node) Inspect(_ context.Context, ref string) (vm.Record, error) {
	if ref != n.record.Spec.Name && ref != string(n.record.ID) {
		return vm.Record{}, vm.VMs.Missing(vm.Owner{}, ref)
	}
	return n.record, nil
}

func (n *node) Launch(_ context.Context, s vm.Spec) (vm.Record, error) {
	if s.Name == n.record.Spec.Name {
		return vm.Record{}, vm.VMs.Taken(s.Name)
	}
	n.launched = s
	r := vm.Record{ID: "abcdefghijklmnop", Spec: s, State: vm.StateRunning, ImageType: vm.ImageOCI, Revision: 5}
	if r.Driver = s.Driver; s.Driver == "cloud-hypervisor" { // which it lacks
		r.Driver = "qemu"
	}
	if s.Image == "disk" {
		r.ImageType = vm.ImageDisk
	}
	return r, nil
}

func (n *node) Create(ctx context.Context, s vm.Spec) (vm.Record, error) { return n.Launch(ctx, s) }

func (n *node) Remove(_ context.Context, ref string, force bool) error {
	if !force {
		return errdefs.Preconditionf("VM %s is running; stop it first or use --force", ref)
	}
	return nil
}

func (n *node) Stop(_ context.Context, ref string, grace time.Duration) (vm.Record, error) {
	n.stopped = append(n.stopped, grace)
	return vm.Record{Spec: vm.Spec{Name: ref}}, nil
}

func (n *node) Watch(ctx context.Context, _ int64, fn func(vm.Event) error) error {
	return n.events(ctx, fn)
}

func (n *node) Exec(ctx context.Context, _ string, e guest.Exec, s guest.Streams) (int, error) {
	return n.exec(ctx, e, s)
}

func (n *node) KillContainer(_ context.Context, ref, container string, run int, grace time.Duration) error {
	if container == "none" {
		return errdefs.NotFoundf("vm %s has no container %q", ref, container)
	}
	n.killed = append(n.killed, fmt.Sprint(ref, " ", container, " ", run, " ", grace))
	return nil
}

func (n *node) ReleaseContainer(_ context.Context, ref, container string) error {
	n.killed = append(n.killed, ref+" releases "+container)
	return nil
}

func (n *node) AddContainer(_ context.Context, ref string, c vm.Container) (vm.Record, error) {
	n.killed = append(n.killed, fmt.Sprint(ref, " gets ", c.Name, " ", c.Image, " ", c.Process.Args))
	return vm.Record{}, c.ValidateEphemeral()
}

func (n *node) StartContainer(_ context.Context, ref, container string) (vm.Record, error) {
	n.killed = append(n.killed, ref+" starts "+container)
	return vm.Record{}, nil
}

func (n *node) RemoveContainer(_ context.Context, ref, container string) error {
	n.killed = append(n.killed, ref+" loses "+container)
	return nil
}

func (n *node) ResizeContainers(_ context.Context, ref string, want map[string]vm.Resources) (vm.Record, error) {
	n.killed = append(n.killed, fmt.Sprint(ref, " resizes ", want))
	return vm.Record{}, nil
}

func (n *node) AttachVolume(_ context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error) {
	n.killed = append(n.killed, fmt.Sprint(ref, " gets ", use, " at ", path))
	return n.record, nil
}

func (n *node) DetachVolume(_ context.Context, ref, volume string) (vm.Record, error) {
	n.killed = append(n.killed, ref+" loses "+volume)
	if volume == "used" {
		return vm.Record{}, errdefs.Preconditionf("the volume is in use")
	}
	return n.record, nil
}

func (n *node) DumpMemory(_ context.Context, ref, volume, file string) error {
	n.killed = append(n.killed, ref+" writes its memory to "+file+" of "+volume)
	return nil
}

func (n *node) Console(context.Context, string) (io.ReadWriteCloser, error) { return n.console, nil }

func (n *node) Display(_ context.Context, ref string, keep bool) (io.ReadWriteCloser, error) {
	if n.console == nil {
		return nil, errdefs.Unsupportedf("vm %s has no graphics; use its console", ref)
	}
	n.kept = append(n.kept, keep)
	return n.console, nil
}

func (n *node) Screenshot(_ context.Context, ref string, wake bool) ([]byte, error) {
	if ref != "web" {
		return nil, errdefs.Unsupportedf("vm %s has no graphics; use its console", ref)
	}
	n.kept = append(n.kept, wake)
	return []byte("\x89PNG"), nil
}

type store struct {
	nodeapi.Images
	imported []byte // what the last import read
	limits   image.GCLimits
}

func (*store) Get(_ context.Context, ref string) (image.Image, error) {
	return image.Image{Name: ref}, nil
}
func (*store) List(context.Context) ([]image.Image, error) { return nil, nil }
func (s *store) Import(_ context.Context, name string, r io.Reader, _ func(int64)) (image.Image, error) {
	b, err := io.ReadAll(r)
	s.imported = b
	return image.Image{ID: "sha256:0123456789abcdef", Name: name, Type: vm.ImageOCI, Size: int64(len(b))}, err
}

func (s *store) Collect(_ context.Context, l image.GCLimits) (image.Collected, error) {
	s.limits = l
	return image.Collected{Images: []image.Image{{ID: "sha256:0123456789abcdef", Name: "old:1", Type: vm.ImageDisk, Size: 1 << 20}}, Freed: 1 << 20}, nil
}

func (s *store) Export(_ context.Context, ref string, w io.Writer) error {
	if ref != "web" {
		return errdefs.NotFoundf("image not found: %q", ref)
	}
	_, err := io.WriteString(w, "the disk")
	return err
}

// images is a store whose images the catalog pushes.
type images struct {
	*store
	*catalog
}

type machine struct{}

func (machine) Info(context.Context) (nodewire.NodeInfo, error) {
	drivers := []nodewire.Driver{{Name: "cloud-hypervisor", Error: "Cloud Hypervisor is not installed"}, {Name: "firecracker", Version: "1.16.1", Accel: "kvm"}, {Name: "qemu", Default: true, Version: "7.2.22", Accel: "tcg", Why: "there is no KVM", Abilities: []string{"disk-images", "emulation", "pause", "save", "plug-disks", "plug-nics", "grow-disks", "resize", "links"}}}
	return nodewire.NodeInfo{Version: "v1", Hostname: "host", Drivers: drivers, NetworkDetails: []nodewire.Network{
		{Name: "default", Kind: "bridge", Default: true, Up: true, Bridge: "cocoon0", Subnet: "10.88.0.0/24", Gateway: "10.88.0.1", Leased: 4, Free: 249},
		{Name: "lab", Kind: "cni", Error: "no plugin"},
	}}, nil
}
func (machine) Doctor(context.Context) ([]nodewire.Check, error) { return nil, nil }
func (machine) TeardownNetworks(context.Context) error           { return errdefs.Preconditionf("VM web runs") }

func (machine) Strays(context.Context) ([]vm.Stray, error) {
	return []vm.Stray{{ID: "lostlostlost", Name: "db", State: vm.StateRunning, Taps: []string{"tap1"}, PIDs: []int{7, 8}, Reason: "the journal does not know it"}}, nil
}

func (machine) AdoptStray(_ context.Context, ref, name string) (vm.Record, error) {
	return vm.Record{ID: vm.ID(ref), Spec: vm.Spec{Name: cmp.Or(name, "db")}}, nil
}

func (machine) KeptFirmware(context.Context) ([]vm.KeptFirmware, error) {
	return []vm.KeptFirmware{{Owner: vm.Owner{Namespace: "prod"}, VM: "db", Key: "uid", Since: time.Unix(0, 0)}}, nil
}

func (machine) DropFirmware(_ context.Context, k vm.KeptFirmware) error {
	return errdefs.NotFoundf("no state of firmware is kept for VM %s with key %q", k.Owner.Qualify(k.VM), k.Key)
}

func (machine) Police(context.Context, network.Policies) error { return nil }

func (machine) RemoveStray(_ context.Context, ref string) error {
	return errdefs.NotFoundf("no unknown VM is kept aside as %q", ref)
}

// serve returns a function that runs one command line against n.
func serve(t *testing.T, n *node) func(stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	dir := t.TempDir()
	srv, err := nodeapi.New(nodeapi.Config{Socket: filepath.Join(dir, "s")}, nodeapi.Deps{
		Engine: n, Images: images{&n.store, &n.catalog}, Puller: &n.pulls, Snapshots: &n.catalog, Volumes: n.volumes, Filler: n.filler, Host: machine{}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	<-srv.Ready()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	})
	return func(stdin string, args ...string) (int, string, string) {
		var out, errOut bytes.Buffer
		code := cli.Run(t.Context(), args, cli.Options{
			Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errOut, Version: "test",
			Getenv: func(k string) string {
				if v, ok := n.env[k]; ok {
					return v
				}
				return map[string]string{"COCOON_SOCKET": filepath.Join(dir, "s"), "HOME": "/here"}[k]
			},
			Doctor: func(_ context.Context, _ string, fix bool) ([]nodewire.Check, error) {
				return []nodewire.Check{{Name: "tun", Status: "fail", Remedy: "sudo modprobe tun", Fixed: fix}}, nil
			},
		})
		return code, out.String(), errOut.String()
	}
}
