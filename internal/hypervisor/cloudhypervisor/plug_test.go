package cloudhypervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// fakeProgram is a process that has a root of its own, and whose API the test answers: it has the devices of a guest, which lets go of those that are removed
// when it is asked for them.
type fakeProgram struct {
	t      *testing.T
	dir    string
	proc   *proc.Process
	events *os.File

	mu    sync.Mutex
	vm    devices
	bound bool                                // the guest lets nothing go
	fault func(method string) (answer string) // what it answers instead of what it should; "-": nothing, after it has done it
	calls []string                            // all but vm.info
}

const testUser = 1879050000

func newFakeProgram(t *testing.T) *fakeProgram {
	t.Helper()
	need.Root(t)
	f := &fakeProgram{t: t, dir: t.TempDir(), vm: devices{State: stateRunning, Tree: map[string]struct{}{}}}
	in, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	_ = in.Fd() // makes it blocking, as a shell needs it
	t.Cleanup(func() { hold.Close() })
	private, err := jail.NewPrivate(testUser)
	if err != nil {
		t.Fatal(err)
	}
	defer private.Close()
	f.proc, err = proc.Start(proc.Spec{
		Path: "/bin/sh", Args: []string{"sh", "-c", "read x"}, In: in, Isolated: true, User: &proc.User{UID: testUser, GID: testUser},
		Root: &proc.Root{Devices: []string{"/dev/null"}, Files: []proc.RootFile{{At: rootPrivate, File: private, Scratch: true}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(f.proc.Kill(context.Background()), f.proc.Close()) })
	if f.events, err = os.OpenFile(filepath.Join(f.dir, eventLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.events.Close() })
	l, err := net.Listen("unix", filepath.Join(f.dir, apiSocket))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f.answer(c)
		}
	}()
	return f
}

// instance is one of a daemon that has just started.
func (f *fakeProgram) instance() *instance {
	f.t.Helper()
	d, err := New(Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		f.t.Fatal(err)
	}
	h := handle{Handle: jail.Handle{ID: testID, PID: f.proc.PID(), Dir: f.dir, UID: testUser}, Program: "53.0", Disks: []jail.Drive{{Serial: "cow"}}, Queues: 2, DiskRate: vm.DiskRate{Ops: 50}}
	i := newInstance(d, h, nil, f.proc)
	f.set(func() {
		if f.vm.State != stateCreated {
			i.beginning.HasBegun()
		}
	})
	return i
}

func (f *fakeProgram) answer(c net.Conn) {
	defer c.Close()
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	body, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	method := strings.TrimPrefix(r.URL.Path, "/api/v1/")
	text, fault := "", ""
	if f.fault != nil {
		fault = f.fault(method)
	}
	if fault == "" || fault == "-" {
		text = f.do(method, body)
	}
	switch {
	case fault == "" && text == "":
		_, _ = io.WriteString(c, "HTTP/1.1 500 \r\nContent-Length: 19\r\n\r\n[\"UnknownDeviceId\"]")
	case fault == "":
		fmt.Fprintf(c, "HTTP/1.1 200 \r\nContent-Length: %d\r\n\r\n%s", len(text), text)
	case fault != "-":
		_, _ = io.WriteString(c, fault)
	}
}

func (f *fakeProgram) do(method string, body []byte) string {
	switch method {
	case "vm.info":
		text, _ := json.Marshal(f.vm)
		if !f.bound {
			for id := range maps.Clone(f.vm.Tree) {
				if f.vm.leaves(id) {
					delete(f.vm.Tree, id)
					f.happens("vm", "device-removed", id)
				}
			}
		}
		return string(text)
	case "vm.boot":
		if f.vm.State != stateCreated {
			return ""
		}
		f.vm.State = stateRunning
	case "vm.resume":
		f.vm.State = stateRunning
	case "vm.add-disk":
		var d diskConfig
		_ = json.Unmarshal(body, &d)
		f.vm.Config.Disks = append(f.vm.Config.Disks, d)
		f.vm.Tree[d.ID] = struct{}{}
		f.happens("virtio-device", "activated", d.ID)
	case "vm.remove-device":
		var d removedDevice
		_ = json.Unmarshal(body, &d)
		if !f.vm.configured(d.ID) { // it asks its guest once
			return ""
		}
		f.vm.Config.Disks = slices.DeleteFunc(f.vm.Config.Disks, func(c diskConfig) bool { return c.ID == d.ID })
		f.vm.Config.NICs = slices.DeleteFunc(f.vm.Config.NICs, func(c netConfig) bool { return c.ID == d.ID })
	}
	f.calls = append(f.calls, method+" "+string(body))
	return "{}"
}

func (f *fakeProgram) happens(source, what, id string) {
	_, err := fmt.Fprintf(f.events, "{\n  \"timestamp\": {},\n  \"source\": %q,\n  \"event\": %q,\n  \"properties\": {\n    \"id\": %q\n  }\n}\n\n", source, what, id)
	if err != nil {
		f.t.Error(err)
	}
}

// set changes how it answers.
func (f *fakeProgram) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// asked checks what the process was asked for since the last look.
func (f *fakeProgram) asked(want ...string) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Equal(f.calls, want) {
		f.t.Errorf("it was asked for %q, want %q", f.calls, want)
	}
	f.calls = nil
}

// finds checks which plugged disks are in the root of the process.
func (f *fakeProgram) finds(want ...string) {
	f.t.Helper()
	var got []string
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root%s", f.proc.PID(), rootPlugged))
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) || !slices.Equal(got, want) {
		f.t.Errorf("its root has the disks %q, %v; want %q", got, err, want)
	}
}

// seventh is a volume with the port 7.
func seventh(t *testing.T) vm.Disk {
	t.Helper()
	d := vm.Disk{Path: filepath.Join(t.TempDir(), "disk"), Format: vm.DiskRaw, Serial: "vol-7", Role: vm.RoleVolume, Port: 7}
	if err := os.WriteFile(d.Path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	return d
}

const (
	addSeven    = `vm.add-disk {"id":"plug7-vol-7","path":"/plugged/7","readonly":false,"serial":"vol-7","image_type":"Raw","num_queues":2,"queue_size":256,"rate_limiter_config":{"ops":{"size":50,"refill_time":1000}}}`
	removeSeven = `vm.remove-device {"id":"plug7-vol-7"}`
)

func TestPlugDisk(t *testing.T) {
	f := newFakeProgram(t)
	i, d := f.instance(), seventh(t)
	for range 2 {
		if err := i.PlugDisk(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	f.asked(addSeven)
	f.finds("7")
	for what, other := range map[string]vm.Disk{"port": {Serial: "other", Port: 7}, "serial": {Serial: "vol-7", Port: 8}} {
		other.Path, other.Format = d.Path, d.Format
		if err := i.PlugDisk(t.Context(), other); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("another disk with this %s: %v", what, err)
		}
	}
	if err := i.UnplugDisk(t.Context(), "cow"); !errdefs.IsInvalid(err) {
		t.Errorf("unplug what was there at the boot: %v", err)
	}
	for range 2 {
		if err := f.instance().UnplugDisk(t.Context(), d.Serial); err != nil {
			t.Fatal(err)
		}
	}
	f.asked(removeSeven)
	f.finds()
	missing := d
	missing.Path += "-missing"
	if err := i.PlugDisk(t.Context(), missing); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a file that is missing: %v", err)
	}
	f.set(func() {
		for n := range maxDisks - 1 {
			f.vm.Config.Disks = append(f.vm.Config.Disks, diskConfig{ID: plugged{n + 100, fmt.Sprint("x", n)}.id()})
		}
	})
	if err := i.PlugDisk(t.Context(), d); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("one too many: %v", err)
	}
	i.h.Queues = 0
	if err := i.PlugDisk(t.Context(), d); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a guest that an earlier release has started: %v", err)
	}
	f.asked()
	f.finds()
}

// TestPlugDiskFails: what a failed attempt leaves goes with the next one, whichever daemon makes it.
func TestPlugDiskFails(t *testing.T) {
	f := newFakeProgram(t)
	d := seventh(t)
	faulty := func(answer string) {
		f.set(func() {
			f.fault = func(method string) string {
				if method == "vm.info" {
					return ""
				}
				return answer
			}
		})
	}
	faulty("HTTP/1.1 500 \r\nContent-Length: 8\r\n\r\n[\"full\"]")
	if err := f.instance().PlugDisk(t.Context(), d); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("a refusal: %v", err)
	}
	f.finds()
	faulty(" ") // it has not done it, and nobody knows
	if err := f.instance().PlugDisk(t.Context(), d); !errdefs.IsUnavailable(err) {
		t.Errorf("no answer: %v", err)
	}
	f.asked()
	f.finds("7")
	if err := f.instance().UnplugDisk(t.Context(), d.Serial); err != nil {
		t.Fatal(err)
	}
	f.asked()
	f.finds()
	faulty("-") // it has done it, and nobody knows
	if err := f.instance().PlugDisk(t.Context(), d); !errdefs.IsUnavailable(err) {
		t.Errorf("no answer: %v", err)
	}
	faulty("")
	if err := f.instance().PlugDisk(t.Context(), d); err != nil {
		t.Error(err)
	}
	f.asked(addSeven)
	f.finds("7")
	faulty("-")
	if err := f.instance().UnplugDisk(t.Context(), d.Serial); !errdefs.IsUnavailable(err) {
		t.Errorf("no answer: %v", err)
	}
	f.finds("7")
	if err := f.instance().UnplugDisk(t.Context(), d.Serial); err != nil {
		t.Error(err)
	}
	f.asked(removeSeven)
	f.finds()
}

// TestUnplugWaits: the disk stays in the root until the guest lets it go, and the program is asked once.
func TestUnplugWaits(t *testing.T) {
	f := newFakeProgram(t)
	d := seventh(t)
	plug := func() {
		t.Helper()
		if err := f.instance().PlugDisk(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		f.asked(addSeven)
	}
	plug()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.set(func() {
		f.bound = true
		f.fault = func(method string) string {
			if method == "vm.info" && len(f.calls) > 0 {
				cancel()
			}
			return ""
		}
	})
	if err := f.instance().UnplugDisk(ctx, d.Serial); !errdefs.IsUnavailable(err) || !errors.Is(err, context.Canceled) {
		t.Errorf("it does not let go: %v", err)
	}
	f.asked(removeSeven)
	f.finds("7")
	f.set(func() { f.fault = nil })
	for what, other := range map[string]vm.Disk{"port": {Serial: "other", Port: 7}, "serial": {Serial: "vol-7", Port: 8}} {
		other.Path, other.Format = d.Path, d.Format
		if err := f.instance().PlugDisk(t.Context(), other); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("another disk with this %s: %v", what, err)
		}
	}

	// A guest that resets lets all go, and nothing says so but the reset.
	f.set(func() {
		f.fault = func(method string) string {
			if len(f.vm.Tree) == 0 {
				return ""
			}
			text, _ := json.Marshal(f.vm)
			clear(f.vm.Tree)
			f.happens("vm", "rebooted", "")
			return fmt.Sprintf("HTTP/1.1 200 \r\nContent-Length: %d\r\n\r\n%s", len(text), text)
		}
	})
	if err := f.instance().UnplugDisk(t.Context(), d.Serial); err != nil {
		t.Error(err)
	}
	f.asked()
	f.finds()

	// One that is leaving, and is to stay.
	f.set(func() { f.fault = nil })
	plug()
	f.set(func() {
		f.do("vm.remove-device", []byte(`{"id":"plug7-vol-7"}`))
		f.calls, f.bound = nil, false
	})
	plug()
	f.finds("7")
	if err := f.proc.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.instance().UnplugDisk(t.Context(), d.Serial); !errdefs.IsNotFound(err) {
		t.Errorf("after the end: %v", err)
	}
}

// TestPlugNICRefused is what needs no tap.
func TestPlugNICRefused(t *testing.T) {
	f := newFakeProgram(t)
	f.set(func() { f.vm.Config.NICs = []netConfig{netOf(0, "02:00:00:00:00:0a"), netOf(2, "02:00:00:00:00:0b")} })
	i := f.instance()
	for what, of := range map[string]struct {
		nic   vm.NIC
		class errdefs.Class
	}{
		"without a place":   {vm.NIC{MAC: "02:00:00:00:00:01"}, errdefs.InvalidArgument},
		"multicast":         {vm.NIC{MAC: "03:00:00:00:00:01", Place: 1}, errdefs.InvalidArgument},
		"without a carrier": {vm.NIC{MAC: "02:00:00:00:00:01", Place: 1, LinkDown: true}, errdefs.Unsupported},
		"another":           {vm.NIC{MAC: "02:00:00:00:00:01", Place: 2}, errdefs.Conflict},
		"the same":          {vm.NIC{MAC: "02:00:00:00:00:0B", Place: 2}, 0},
	} {
		if err := i.PlugNIC(t.Context(), of.nic); err != nil && !errdefs.Is(err, of.class) || err == nil && of.class != 0 {
			t.Errorf("%s: %v", what, err)
		}
	}
	f.set(func() {
		f.vm.Config.NICs = append(f.vm.Config.NICs, netOf(3, "02:00:00:00:00:0c"))
		f.vm.Tree["net4"], f.vm.Tree["net3"] = struct{}{}, struct{}{} // one is leaving
		f.bound = true
	})
	if err := i.PlugNIC(t.Context(), vm.NIC{MAC: "02:00:00:00:00:01", Place: 1}); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("one too many: %v", err)
	}
	if err := i.UnplugNIC(t.Context(), 0); !errdefs.IsInvalid(err) {
		t.Errorf("the first: %v", err)
	}
	f.set(func() { f.bound = false })
	if err := i.UnplugNIC(t.Context(), 3); err != nil {
		t.Error(err)
	}
	f.asked(`vm.remove-device {"id":"net3"}`)
	for place, want := range map[int]errdefs.Class{0: 0, 2: 0, 3: errdefs.NotFound} {
		if err := i.OpenLink(t.Context(), place); err != nil && !errdefs.Is(err, want) || err == nil && want != 0 {
			t.Errorf("link of %d: %v", place, err)
		}
	}
}

func TestPluggedOf(t *testing.T) {
	for id, want := range map[string]plugged{"plug7-vol-a": {7, "vol-a"}, "plug255-x": {255, "x"}, "plug1--": {1, "-"}} {
		if got, ok := pluggedOf(id); !ok || got != want {
			t.Errorf("%s: %+v, %t", id, got, ok)
		}
	}
	for _, id := range []string{"", "plug", "plug-", "plug7", "plug07-a", "plug+7-a", "7-a", "disk7-a", "_virtio-pci-plug7-a", "plug99999999999999999999-a"} {
		if got, ok := pluggedOf(id); ok {
			t.Errorf("%s: %+v", id, got)
		}
	}
}

// TestLinksToTheNode: what is in the root of a process may lead to files of the node, if the process has made it. cocoond does not follow.
func TestLinksToTheNode(t *testing.T) {
	f := newFakeProgram(t)
	i := f.instance()
	node := t.TempDir()
	if err := os.WriteFile(filepath.Join(node, "7"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	private, err := f.proc.Folder(rootPrivate)
	if err != nil {
		t.Fatal(err)
	}
	defer private.Close()
	for name, to := range map[string]string{"folder": node, "file": filepath.Join(node, "7")} {
		if err := unix.Symlinkat(to, int(private.Fd()), name); err != nil {
			t.Fatal(err)
		}
	}
	folder := filepath.Join(rootPrivate, "folder")
	if names, err := namesIn(f.proc, folder); err == nil {
		t.Errorf("a link to a folder: its names are %q", names)
	}
	if names, err := namesIn(f.proc, rootPrivate); err != nil || len(names) != 2 {
		t.Errorf("a folder: its names are %q, %v", names, err)
	}
	for _, path := range []string{filepath.Join(folder, "7"), filepath.Join(rootPrivate, "file")} {
		if err := i.CanGrow(path, "vol-7", 1); !errdefs.IsUnavailable(err) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
