package install

import (
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const installer = 0xb005ab1e

// fakeDisk is a disk of a machine. Its file has its first and last bytes only where something is.
type fakeDisk struct {
	size      int64 // bytes
	sector    int
	removable bool
	readOnly  bool
	holder    string // that uses a partition of it
	signature uint32
	write     map[int64]string
}

// machine makes the folders of a kernel with these disks.
func machine(t *testing.T, disks map[string]fakeDisk) (sysBlock, dev string) {
	t.Helper()
	sysBlock, dev = t.TempDir(), t.TempDir()
	put := func(path, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	number := map[bool]string{true: "1", false: "0"}
	for name, d := range disks {
		dir := filepath.Join(sysBlock, name)
		put(filepath.Join(dir, "size"), strconv.FormatInt(d.size/512, 10))
		put(filepath.Join(dir, "removable"), number[d.removable])
		put(filepath.Join(dir, "ro"), number[d.readOnly])
		put(filepath.Join(dir, "queue/logical_block_size"), strconv.Itoa(max(d.sector, 512)))
		put(filepath.Join(dir, "device/model"), "  A   disk ")
		put(filepath.Join(dir, "serial"), "S-"+name)
		if d.holder != "" {
			put(filepath.Join(dir, name+"1", "holders", d.holder), "")
		}
		f, err := os.Create(filepath.Join(dev, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(d.size); err != nil {
			t.Fatal(err)
		}
		if d.signature != 0 {
			b := make([]byte, 512)
			binary.LittleEndian.PutUint32(b[0x1b8:], d.signature)
			b[510], b[511] = 0x55, 0xaa
			if _, err := f.WriteAt(b, 0); err != nil {
				t.Fatal(err)
			}
		}
		for at, text := range d.write {
			if at < 0 {
				at += d.size
			}
			if _, err := f.WriteAt([]byte(text), at); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return sysBlock, dev
}

func TestCandidates(t *testing.T) {
	const size = disk.MinimumSize
	sysBlock, dev := machine(t, map[string]fakeDisk{
		"sda":     {size: size, write: map[int64]string{512: "EFI PART"}},
		"sdb":     {size: size},
		"sdc":     {size: size - 512},
		"sdd":     {size: size, removable: true},
		"sde":     {size: size, readOnly: true},
		"sdf":     {size: size, sector: 4096},
		"sdg":     {size: size, holder: "dm-0"},
		"sdh":     {size: size, signature: installer},
		"sdi":     {size: size, write: map[int64]string{-512: "EFI PART"}},
		"sdj":     {size: size, write: map[int64]string{700_000: "x"}},
		"sdk":     {size: size, signature: disk.Signature},
		"sdl":     {},
		"nvme0n1": {size: 2 * size},
		"loop0":   {size: size},
		"dm-1":    {size: size},
		"zram0":   {size: size},
	})
	all, others, err := candidates(sysBlock, dev, "sdh")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range all {
		got = append(got, d.name+": "+d.Holds)
		if d.Model != "A disk" || d.Serial != "S-"+d.name || d.Size < size || d.Path != filepath.Join(dev, d.name) {
			t.Errorf("%+v", d)
		}
	}
	want := []string{
		"nvme0n1: ", "sdb: ", "sda: a GPT partition table", "sdi: a GPT partition table", "sdj: data of an unknown kind", "sdk: an installed Cocoon OS",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if !slices.Equal(others, []string{filepath.Join(dev, "sdk")}) {
		t.Errorf("installed systems: %q", others)
	}
}

// rig is an installer whose work only remembers what it was asked.
type rig struct {
	*Installer
	dev   string
	asked []string
	fail  error
	wait  chan struct{} // closed when the work may end
	began chan struct{}
}

func newRig(t *testing.T, disks map[string]fakeDisk) *rig {
	t.Helper()
	disks["usb"] = fakeDisk{size: 1 << 30, signature: installer}
	sysBlock, dev := machine(t, disks)
	seal, err := identity.NewSeal()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{dev: dev, Installer: New(Config{Root: disk.Root{Signature: installer, Number: 2}, SysBlock: sysBlock, Dev: dev, Log: slog.New(slog.DiscardHandler)}, seal)}
	r.work = func(_ context.Context, d Disk, _ Request, s identity.Seal, _ Progress) error {
		r.asked = append(r.asked, d.name+" "+s.OperatorName)
		if r.wait != nil {
			close(r.began)
			<-r.wait
		}
		return r.fail
	}
	return r
}

func (r *rig) ask(t *testing.T, q Request) error {
	t.Helper()
	if q.Operator == nil {
		q.Operator, q.Name, q.Seal = make([]byte, ed25519.PublicKeySize), "ann", true
	}
	if q.Target != "" {
		q.Target = filepath.Join(r.dev, q.Target)
	}
	_, err := r.Install(t.Context(), q, func(string, uint32, string) {})
	return err
}

// A stranger on the network overwrites no data: that needs the code, which is on the console only, and the word of who wants it.
func TestDataNeedsTheCode(t *testing.T) {
	const size = disk.MinimumSize
	r := newRig(t, map[string]fakeDisk{"sda": {size: size, write: map[int64]string{0: "data"}}})
	lower := strings.ToLower(strings.ReplaceAll(r.Code(), "-", " "))
	for name, tt := range map[string]struct {
		q       Request
		refused errdefs.Class
	}{
		"nothing said":           {Request{}, errdefs.FailedPrecondition},
		"no code":                {Request{Reinstall: true}, errdefs.FailedPrecondition},
		"a wrong code":           {Request{Reinstall: true, Code: "AAAAA-AAAAA"}, errdefs.InvalidArgument},
		"half of the code":       {Request{Reinstall: true, Code: r.Code()[:5]}, errdefs.InvalidArgument},
		"no word":                {Request{Code: r.Code()}, errdefs.FailedPrecondition},
		"another disk":           {Request{Target: "usb", Reinstall: true, Code: r.Code()}, errdefs.InvalidArgument},
		"no key of an operator":  {Request{Operator: []byte("short"), Seal: true, Reinstall: true, Code: r.Code()}, errdefs.InvalidArgument},
		"a key with a bad name":  {Request{Operator: make([]byte, 32), Name: "a\nb", Reinstall: true, Code: r.Code()}, errdefs.InvalidArgument},
		"a path out of the list": {Request{Target: "../sda", Reinstall: true, Code: r.Code()}, errdefs.InvalidArgument},
	} {
		if err := r.ask(t, tt.q); !errdefs.Is(err, tt.refused) || len(r.asked) != 0 {
			t.Errorf("%s: %v, %q", name, err, r.asked)
		}
	}
	if err := r.ask(t, Request{Target: "sda", Reinstall: true, Code: lower}); err != nil || !slices.Equal(r.asked, []string{"sda ann"}) {
		t.Errorf("with the code: %v, %q", err, r.asked)
	}

	open := newRig(t, map[string]fakeDisk{"sda": {size: size, write: map[int64]string{0: "data"}}})
	open.cfg.Open = true
	if err := open.ask(t, Request{}); err != nil || len(open.asked) != 1 {
		t.Errorf("the person at the console allowed it: %v", err)
	}
	if other := newRig(t, map[string]fakeDisk{}); len(other.code) != codeLength || other.code == r.code {
		t.Errorf("the code is %q after %q", other.code, r.code)
	}
}

// There is one installation. One that failed can be tried again, and the answer of one that did not arrive is given again, to who asked.
func TestOneInstallation(t *testing.T) {
	const size = disk.MinimumSize
	r := newRig(t, map[string]fakeDisk{"sda": {size: size}, "sdb": {size: size}})
	if err := r.ask(t, Request{}); !errdefs.IsInvalid(err) {
		t.Errorf("one of two disks was chosen: %v", err)
	}
	r.fail = errdefs.DataLossf("the disk is broken")
	if err := r.ask(t, Request{Target: "sda"}); !errdefs.Is(err, errdefs.DataLoss) || r.Installed() {
		t.Error(err)
	}
	r.fail, r.wait, r.began = nil, make(chan struct{}), make(chan struct{})
	first := make(chan error)
	go func() { first <- r.ask(t, Request{Target: "sdb"}) }()
	<-r.began
	if err := r.ask(t, Request{Target: "sda"}); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("two at once: %v", err)
	}
	close(r.wait)
	if err := <-first; err != nil || !r.Installed() {
		t.Fatal(err)
	}
	done := len(r.asked)
	if err := r.ask(t, Request{Target: "sdb"}); err != nil {
		t.Errorf("the answer is not given again: %v", err)
	}
	for _, other := range []Request{{Target: "sda"}, {Target: "sdb", Operator: make([]byte, 32), Name: "eve"}} {
		if err := r.ask(t, other); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%+v: %v", other, err)
		}
	}
	if len(r.asked) != done {
		t.Errorf("something was written: %q", r.asked)
	}
}

// A machine with two installed systems would not start.
func TestSecondSystem(t *testing.T) {
	const size = disk.MinimumSize
	r := newRig(t, map[string]fakeDisk{"sda": {size: size}, "sdb": {size: 8 << 30, signature: disk.Signature}})
	if err := r.ask(t, Request{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "sdb has a Cocoon OS") || len(r.asked) != 0 {
		t.Errorf("%v, %q", err, r.asked)
	}
	none := newRig(t, map[string]fakeDisk{"sdb": {size: 8 << 30}})
	if _, err := none.Disks(); !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
}
