package enginetest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// Network is a network of the world.
type Network struct {
	w    *World
	name string
}

var (
	_ network.Network  = Network{}
	_ image.Store      = Images{}
	_ image.FileOpener = Images{}
)

// Network returns the network "net".
func (w *World) Network() Network { return Network{w, "net"} }

// Lab returns the network "lab".
func (w *World) Lab() Network { return Network{w, "lab"} }

// has reports whether a tap is of this network.
func (n Network) has(tap string) bool { return strings.HasSuffix(tap, ".lab") == (n.name == "lab") }

// Name implements network.Network.
func (n Network) Name() string { return n.name }

// Setup implements network.Network.
func (n Network) Setup(context.Context) error { return nil }

// Run implements network.Network.
func (n Network) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// Teardown implements network.Network.
func (n Network) Teardown(context.Context) error { return nil }

// Remember implements network.Network.
func (n Network) Remember(_ context.Context, held []network.Held) error {
	for _, h := range held {
		if _, ok := n.lease(h.NIC.Tap); ok || !n.has(h.NIC.Tap) || !strings.HasPrefix(h.NIC.IP, fmt.Sprintf("%d.", cmp.Or(n.w.Net, 10))) {
			continue
		}
		text, err := json.Marshal(h.NIC)
		if err == nil {
			err = os.WriteFile(n.w.path("leases", h.NIC.IP), text, 0o600)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Attach implements network.Network.
func (n Network) Attach(_ context.Context, id vm.ID, name string, index int, _ vm.NICSpec) (vm.NIC, error) {
	h := fnv.New32a()
	fmt.Fprint(h, name, index)
	suffix := ""
	if n.name == "lab" {
		suffix = ".lab"
		fmt.Fprint(h, suffix)
	}
	sum := h.Sum32()
	nic := vm.NIC{
		Network: n.name, Tap: fmt.Sprintf("t%s-%d%s", id, index, suffix), MAC: fmt.Sprintf("02:00:00:%02x:%02x:%02x", n.w.Net, byte(sum>>8), byte(sum)),
		IP: fmt.Sprintf("%d.%d.%d.%d", cmp.Or(n.w.Net, 10), byte(sum>>16), byte(sum>>8), byte(sum)), Prefix: 8,
	}
	if known, ok := n.lease(nic.Tap); ok {
		nic = known
	}
	if n.w.NoIP {
		nic.IP, nic.Prefix = "", 0
		return nic, os.WriteFile(n.w.path("taps", nic.Tap), nil, 0o600)
	}
	text, err := json.Marshal(nic)
	if err != nil {
		return vm.NIC{}, err
	}
	err = n.w.around("network.Attach", func() error {
		return errors.Join(
			os.WriteFile(n.w.path("tmp", nic.Tap), text, 0o600), // a daemon may be killed in the middle
			os.Rename(n.w.path("tmp", nic.Tap), n.w.path("leases", nic.IP)),
			os.WriteFile(n.w.path("taps", nic.Tap), nil, 0o600))
	})
	if err != nil { // on error nothing stays
		return vm.NIC{}, errors.Join(err, remove(n.w.path("taps", nic.Tap)), remove(n.w.path("leases", nic.IP)))
	}
	return nic, nil
}

// lease is the earlier answer for the same NIC of the same VM.
func (n Network) lease(tap string) (nic vm.NIC, ok bool) {
	entries, _ := os.ReadDir(filepath.Join(n.w.Dir, "leases"))
	for _, e := range entries {
		text, err := os.ReadFile(n.w.path("leases", e.Name()))
		if err == nil && json.Unmarshal(text, &nic) == nil && nic.Tap == tap {
			return nic, true
		}
	}
	return vm.NIC{}, false
}

// Detach implements network.Network.
func (n Network) Detach(_ context.Context, nic vm.NIC) error {
	return n.w.around("network.Detach", func() error { return remove(n.w.path("taps", nic.Tap)) })
}

// Release implements network.Network.
func (n Network) Release(_ context.Context, nic vm.NIC) error {
	return n.w.around("network.Release", func() error { return remove(n.w.path("leases", nic.IP)) })
}

// Sweep implements network.Network. Like CNI it also releases the addresses of NICs that nobody keeps.
func (n Network) Sweep(_ context.Context, keep []string, known func(vm.ID) bool) (gone []string, strays []network.Stray, err error) {
	entries, err := os.ReadDir(filepath.Join(n.w.Dir, "taps"))
	for _, e := range entries {
		switch id := owner(e.Name()); {
		case slices.Contains(keep, e.Name()) || !n.has(e.Name()):
		case !known(id):
			nic, _ := n.lease(e.Name())
			nic.Network, nic.Tap = n.name, e.Name()
			strays = append(strays, network.Stray{ID: id, NIC: nic})
		default:
			gone = append(gone, e.Name())
			err = errors.Join(err, remove(n.w.path("taps", e.Name())))
		}
	}
	leases, lerr := os.ReadDir(filepath.Join(n.w.Dir, "leases"))
	err = errors.Join(err, lerr)
	for _, e := range leases {
		var nic vm.NIC
		text, lerr := os.ReadFile(n.w.path("leases", e.Name()))
		if err = errors.Join(err, lerr); json.Unmarshal(text, &nic) == nil && n.has(nic.Tap) && !slices.Contains(keep, nic.Tap) && known(owner(nic.Tap)) {
			err = errors.Join(err, remove(n.w.path("leases", e.Name())))
		}
	}
	return gone, strays, err
}

// owner is the VM that a tap was made for.
func owner(tap string) vm.ID {
	id, _, _ := strings.Cut(strings.TrimPrefix(tap, "t"), "-")
	return vm.ID(id)
}

// silent is the serial of a disk whose guest has no agent.
const silent = "silent"

// Images is the world's image store: "demo" is an OCI image that runs /init, "bare" one without entrypoint, "disk" a
// disk image without agent, "cloud" one with.
type Images struct{ w *World }

// Images returns the store.
func (w *World) Images() Images { return Images{w} }

// Get implements image.Store.
func (s Images) Get(_ context.Context, ref string) (image.Image, error) {
	if err := s.w.Fault("images.Get"); err != nil {
		return image.Image{}, err
	}
	switch ref = strings.TrimPrefix(ref, "sha256:"); ref {
	case "demo":
		return image.Image{ID: "sha256:demo", Name: ref, Type: vm.ImageOCI, Config: vm.Process{Entrypoint: []string{"/init"}}}, nil
	case "layered":
		return image.Image{ID: "sha256:layered", Name: ref, Type: vm.ImageOCI, Config: vm.Process{Entrypoint: []string{"/init"}}}, nil
	case "bare":
		return image.Image{ID: "sha256:bare", Name: ref, Type: vm.ImageOCI}, nil
	case "disk", "cloud":
		return image.Image{ID: "sha256:" + ref, Name: ref, Type: vm.ImageDisk}, nil
	}
	return image.Image{}, errdefs.NotFoundf("image not found: %q", ref)
}

// Prepare implements image.Store.
func (s Images) Prepare(_ context.Context, img image.Image, l image.Layout) (image.Rootfs, error) {
	cow := filepath.Join(l.Dir, "cow")
	err := s.w.around("images.Prepare", func() error {
		if _, err := os.Stat(cow); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return os.WriteFile(cow, nil, 0o600)
	})
	serial := image.SerialCOW
	if img.Name == "disk" {
		serial = silent
	}
	return image.Rootfs{Disks: []vm.Disk{{Path: cow, Format: vm.DiskRaw, Serial: serial, Role: vm.RoleCOW}}}, err
}

// Base implements image.Store: only the image "layered" has a disk that VMs share.
func (s Images) Base(_ context.Context, img image.Image) ([]vm.Disk, error) {
	if img.Name != "layered" {
		return nil, nil
	}
	layer := s.w.path("images", "layer")
	if err := errors.Join(os.MkdirAll(filepath.Dir(layer), 0o700), os.WriteFile(layer, nil, 0o600)); err != nil {
		return nil, err
	}
	return []vm.Disk{{Path: layer, Format: vm.DiskRaw, ReadOnly: true, Serial: image.SerialLayer(0), Role: vm.RoleLayer}}, nil
}

// KernelFiles are the files of the image "layered".
var KernelFiles = map[string]string{"/boot/vmlinuz": "a kernel", "/boot/initrd": "an initrd"}

// OpenFile implements image.FileOpener: only the image "layered" has files. The file /huge is larger than any kernel.
func (s Images) OpenFile(_ context.Context, img image.Image, path string) (*image.File, error) {
	text, ok := KernelFiles[path]
	if err := s.w.Fault("images.OpenFile"); err != nil {
		return nil, err
	}
	if path == "/huge" {
		return &image.File{Reader: strings.NewReader(""), Closer: io.NopCloser(nil), Size: vm.MaxKernelFile + 1}, nil
	}
	if !ok || img.Name != "layered" {
		return nil, errdefs.NotFoundf("there is no file %s in image %s", path, img.Name)
	}
	return &image.File{Reader: strings.NewReader(text), Closer: io.NopCloser(nil), Size: int64(len(text))}, nil
}

// DiskSize reports that the disk in the image "cloud" has 20 GiB.
func (s Images) DiskSize(_ context.Context, img image.Image) (int64, error) {
	if img.Name == "cloud" {
		return 20 << 30, nil
	}
	return 0, nil
}

// Import implements image.Store.
func (s Images) Import(context.Context, string, io.Reader, func(int64)) (image.Image, error) {
	return image.Image{}, errdefs.Unsupportedf("this store has what it has")
}

// List implements image.Store.
func (s Images) List(context.Context) ([]image.Image, error) { return nil, nil }

// Remove implements image.Store.
func (s Images) Remove(context.Context, string, func(string) bool) error { return nil }

// Seeds is the world's image.Seeder: a seed holds the host name, the addresses and the files of volumes. A volume with a label has a disk of its own. The user data "bad" is refused.
type Seeds struct{ w *World }

var _ image.Seeder = Seeds{}

// Seeds returns the seeder.
func (w *World) Seeds() Seeds { return Seeds{w} }

// Seed implements image.Seeder.
func (s Seeds) Seed(_ context.Context, _ vm.ID, spec vm.Spec, nics []vm.NIC, dir string) ([]vm.Disk, error) {
	if spec.CloudInit != nil && spec.CloudInit.UserData == "bad" {
		return nil, errdefs.Invalidf("the user data is bad")
	}
	text := spec.Hostname
	for _, n := range nics {
		text += " " + n.IP
	}
	disk := func(name string) vm.Disk {
		return vm.Disk{Path: filepath.Join(dir, name), Format: vm.DiskRaw, ReadOnly: true, Serial: name, Role: vm.RoleCidat}
	}
	disks, texts := []vm.Disk{disk("seed")}, []string{""}
	for _, v := range spec.Volumes {
		of := &text
		if v.Label != "" {
			disks, texts = append(disks, disk("files-"+v.Name)), append(texts, "")
			of = &texts[len(texts)-1]
		}
		for _, f := range v.Files {
			*of += " " + f.Path + "=" + string(f.Data)
		}
	}
	texts[0] = text
	err := s.w.around("seeds.Seed", func() (err error) {
		for i, d := range disks {
			err = errors.Join(err, os.WriteFile(d.Path, []byte(texts[i]), 0o600))
		}
		return err
	})
	return disks, err
}

// Export implements image.Store: no test needs it.
func (i Images) Export(context.Context, string, io.Writer) error {
	return errdefs.Unsupportedf("not exported")
}

// Collect implements image.Store: nothing here takes space.
func (i Images) Collect(context.Context, image.GCLimits, func(string) bool) (image.Collected, error) {
	return image.Collected{}, nil
}
