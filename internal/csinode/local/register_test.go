package local_test

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/csinode/csitest"
	"cocoonstack.io/cocoon/internal/csinode/local"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// until waits for a condition that nothing announces. A busy machine with the race detector takes long for some.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.After(2 * time.Minute)
	for tick := time.NewTicker(2 * time.Millisecond); !cond(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("this has not happened: " + what)
		}
	}
}

func TestRegistration(t *testing.T) {
	w, d := start(t, csitest.Options{NodeID: "n-7", Topology: map[string]string{"zone": "a"}, MaxVolumes: 12})
	want := []csinode.Driver{{Name: "csi.test", NodeID: "n-7", Topology: map[string]string{"zone": "a"}, MaxVolumes: 12}}
	if diff := diff.Of(want, w.Drivers()); diff != "" {
		t.Errorf("drivers (-want +got):\n%s", diff)
	}
	until(t, "the driver is told", func() bool { return len(d.Told()) == 1 && d.Told()[0] == "" })
	r := request("pod", "v")
	p := w.publish(r)

	changed := w.Changed()
	d.Unregister()
	w.drivers()
	select {
	case <-changed:
	default:
		t.Error("the change was not announced")
	}
	wantClass(t, w.Unpublish(t.Context(), r.Key), errdefs.Unavailable, "csi.test", "start it")
	if diff := diff.Of([]csinode.Published{p}, w.List()); diff != "" {
		t.Errorf("publications without their driver (-want +got):\n%s", diff)
	}
	d.Register(w.plugins)
	w.drivers("csi.test")
	w.unpublish(r.Key)
	w.clean(d)
}

func TestRegistrationInAFolder(t *testing.T) {
	w := folders(t)
	w.open()
	d := csitest.Start(t, csitest.Options{})
	hidden := w.plugins + "/.hidden"
	deep := w.plugins + "/deep/er"
	for _, dir := range []string{hidden, deep, w.plugins + "/sub"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, dir := range map[string]string{"csi.hidden": hidden, "csi.deep": deep} {
		csitest.Start(t, csitest.Options{Name: name}).Register(dir)
	}
	d.Register(w.plugins + "/sub")
	w.drivers("csi.test")
}

func TestASocketIsReplaced(t *testing.T) {
	w := folders(t)
	w.open()
	old := csitest.Start(t, csitest.Options{NodeID: "old"})
	path := old.Register(w.plugins)
	w.drivers("csi.test")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	csitest.Start(t, csitest.Options{NodeID: "new"}).Register(w.plugins)
	until(t, "the new driver serves", func() bool {
		list := w.Drivers()
		return len(list) == 1 && list[0].NodeID == "new"
	})
}

func TestTheNewestVersionServesAName(t *testing.T) {
	w := folders(t)
	for _, dir := range []string{"a", "b", "c"} {
		if err := os.Mkdir(w.plugins+"/"+dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	w.open()
	serves := func(id string) {
		t.Helper()
		until(t, "driver "+id+" serves", func() bool {
			list := w.Drivers()
			return len(list) == 1 && list[0].NodeID == id
		})
	}
	first := csitest.Start(t, csitest.Options{NodeID: "1.1", Versions: []string{"0.3.0", "1.1.0"}})
	first.Register(w.plugins + "/a")
	serves("1.1")
	later := csitest.Start(t, csitest.Options{NodeID: "1.10", Versions: []string{"1.10.0"}})
	later.Register(w.plugins + "/b")
	serves("1.10")
	old := csitest.Start(t, csitest.Options{NodeID: "1.2", Versions: []string{"1.2.0"}})
	old.Register(w.plugins + "/c")
	until(t, "the lower version is refused", func() bool {
		told := old.Told()
		return len(told) > 0 && strings.Contains(told[0], "higher version")
	})
	serves("1.10")
	later.Unregister()
	until(t, "a lower version serves again", func() bool {
		list := w.Drivers()
		return len(list) == 1 && list[0].NodeID != "1.10"
	})
	until(t, "the lower version is accepted", func() bool { told := old.Told(); return told[len(told)-1] == "" })
	serves("1.2")
}

func TestASlowDriverRegisters(t *testing.T) {
	w := folders(t)
	d := csitest.Start(t, csitest.Options{})
	var mu sync.Mutex
	asked := 0
	d.On("NodeGetInfo", &csitest.Fault{Err: status.Error(codes.Unavailable, "starting"), Entry: func() {
		mu.Lock()
		defer mu.Unlock()
		if asked++; asked == 3 {
			d.On("NodeGetInfo", nil)
		}
	}})
	d.Register(w.plugins)
	w.open()
	w.drivers("csi.test")
	until(t, "the driver is told", func() bool { return len(d.Told()) > 0 })
	if told := d.Told(); told[0] != "" {
		t.Errorf("a driver that took some time was told %q", told)
	}
}

func TestADriverThatFailsIsToldAndTriedAgain(t *testing.T) {
	w := folders(t)
	d := csitest.Start(t, csitest.Options{})
	d.On("NodeGetInfo", &csitest.Fault{Err: status.Error(codes.Internal, "no metadata")})
	d.Register(w.plugins)
	w.open()
	until(t, "the driver is told", func() bool { return len(d.Told()) > 0 })
	if told := d.Told(); !strings.Contains(told[0], "no metadata") {
		t.Errorf("told %q", told)
	}
	d.On("NodeGetInfo", nil)
	w.drivers("csi.test")
}

func TestHostileRegistrations(t *testing.T) {
	huge := strings.Repeat("x", 2<<20)
	for name, c := range map[string]struct {
		o    csitest.Options
		told string
	}{
		"name with a path":      {csitest.Options{Name: "csi.bad", Versions: nil}, ""},
		"relative endpoint":     {csitest.Options{Endpoint: "csi.sock"}, "endpoint"},
		"endpoint is a file":    {csitest.Options{Endpoint: "/etc/passwd"}, "not a unix socket"},
		"endpoint is an URL":    {csitest.Options{Endpoint: "http://169.254.169.254/"}, "endpoint"},
		"endpoint is not there": {csitest.Options{Endpoint: "/nowhere/csi.sock"}, "/nowhere"},
		"no version 1":          {csitest.Options{Versions: []string{"0.3.0", "2.0.0", "1", "one"}}, "no version 1.x"},
		"no versions":           {csitest.Options{Versions: []string{}}, "no version 1.x"},
		"huge name of the node": {csitest.Options{NodeID: huge[:300]}, "name of this node"},
		"huge answer":           {csitest.Options{NodeID: huge}, "larger than max"},
		"huge topology":         {csitest.Options{Topology: map[string]string{"zone": huge[:100]}}, "topology"},
	} {
		t.Run(name, func(t *testing.T) {
			w := folders(t)
			d := csitest.Start(t, c.o)
			if c.told == "" {
				d.On("GetInfo", &csitest.Fault{Lie: &registration.PluginInfo{Type: registration.CSIPlugin, Name: "../x", SupportedVersions: []string{"1.0.0"}}})
				c.told = "not the name of a CSI driver"
			}
			d.Register(w.plugins)
			w.open()
			until(t, "the driver is told", func() bool { return len(d.Told()) > 0 })
			if told := d.Told(); !strings.Contains(told[0], c.told) || len(told[0]) > 8<<10 {
				t.Errorf("told %.1000q, want %q", told, c.told)
			}
			if list := w.Drivers(); len(list) > 0 {
				t.Errorf("registered: %+v", list)
			}
			if _, err := os.Stat(w.dir + "/x"); err == nil {
				t.Error("a folder of the driver's choice was made")
			}
		})
	}
}

func TestOtherPluginsAreIgnored(t *testing.T) {
	w := folders(t)
	other := csitest.Start(t, csitest.Options{Name: "a.device", Type: registration.DevicePlugin})
	asked := make(chan struct{})
	other.On("GetInfo", &csitest.Fault{Entry: sync.OnceFunc(func() { close(asked) })})
	other.Register(w.plugins)
	if err := os.WriteFile(w.plugins+"/file.sock", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.open()
	<-asked
	csitest.Start(t, csitest.Options{}).Register(w.plugins)
	w.drivers("csi.test")
	if told := other.Told(); told != nil {
		t.Errorf("told %q", told)
	}
}

func TestAFloodOfCapabilities(t *testing.T) {
	w := folders(t)
	d := csitest.Start(t, csitest.Options{Able: make([]csi.NodeServiceCapability_RPC_Type, 300_000)})
	d.Register(w.plugins)
	w.open()
	until(t, "the driver is told", func() bool { return len(d.Told()) > 0 })
	if told := d.Told(); !strings.Contains(told[0], "larger than max") {
		t.Errorf("told %.1000q", told)
	}
}

func TestHighest(t *testing.T) {
	for text, want := range map[string]string{
		"1.0.0": "1.0.0", "v1.2.3": "1.2.3", "1.4": "1.4.0", "1.0.0 1.12.0 1.3.0": "1.12.0", "1.2.0-rc1": "1.2.0", "0.3.0": "", "2.0.0": "", "1": "", "1.x": "",
		"11.0.0": "", "1.0.0.0": "", "1.9999999.0": "", "": "",
	} {
		got := ""
		if v, ok := local.Highest(strings.Fields(text)); ok {
			got = v.String()
		}
		if got != want {
			t.Errorf("highest of %q is %q, want %q", text, got, want)
		}
	}
}

func TestRunEndsWhileADriverHangs(t *testing.T) {
	w := folders(t)
	d := csitest.Start(t, csitest.Options{})
	asked := make(chan struct{})
	d.On("GetInfo", &csitest.Fault{Until: make(chan struct{}), Entry: sync.OnceFunc(func() { close(asked) })})
	d.Register(w.plugins)
	w.open()
	<-asked
	w.stop()
}

func TestNewRefuses(t *testing.T) {
	w := folders(t)
	w.open()
	_, err := local.New(context.Background(), local.Config{Plugins: w.plugins, Dir: w.dir})
	wantClass(t, err, errdefs.FailedPrecondition, w.dir)
	if err := os.Symlink(w.dir, w.dir+"-link"); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"", "relative", w.dir + "/../x", w.dir + "-link", w.dir + "-link/below"} {
		_, err := local.New(context.Background(), local.Config{Plugins: w.plugins, Dir: dir})
		wantClass(t, err, errdefs.InvalidArgument)
	}
}
