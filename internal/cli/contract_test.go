package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// The types of this file are written from the documents, as programs of others have them. They share nothing with ours.

type documentedVM struct {
	ID         string `json:"id"`
	Hypervisor string `json:"hypervisor"`
	State      string `json:"state"`
	Config     struct {
		Name        string `json:"name"`
		CPU         int    `json:"cpu"`
		Memory      int64  `json:"memory"`
		Storage     int64  `json:"storage"`
		Image       string `json:"image"`
		ImageDigest string `json:"image_digest"`
		ImageType   string `json:"image_type"`
		Network     string `json:"network"`
		NoDirectIO  bool   `json:"no_direct_io"`
		Windows     bool   `json:"windows"`
	} `json:"config"`
	PID            int `json:"pid"`
	NetworkConfigs []struct {
		Tap     string `json:"tap"`
		MAC     string `json:"mac"`
		Network *struct {
			IP      string `json:"ip"`
			Gateway string `json:"gateway"`
			Prefix  int    `json:"prefix"`
		} `json:"network"`
	} `json:"network_configs"`
	StorageConfigs []struct {
		Path   string `json:"path"`
		RO     bool   `json:"ro"`
		Serial string `json:"serial"`
		Role   string `json:"role"`
	} `json:"storage_configs"`
	FirstBooted bool                `json:"first_booted"`
	SnapshotIDs map[string]struct{} `json:"snapshot_ids"`
	CreatedAt   time.Time           `json:"created_at"`
	UpdatedAt   time.Time           `json:"updated_at"`
	StartedAt   *time.Time          `json:"started_at"`
	StoppedAt   *time.Time          `json:"stopped_at"`
}

type documentedEvent struct {
	Event string       `json:"event"`
	VM    documentedVM `json:"vm"`
}

type documentedSnapshot struct {
	ID           string              `json:"id"`
	Name         string              `json:"name"`
	Description  string              `json:"description"`
	CPU          int                 `json:"cpu"`
	Memory       int64               `json:"memory"`
	Storage      int64               `json:"storage"`
	Image        string              `json:"image"`
	ImageDigest  string              `json:"image_digest"`
	ImageType    string              `json:"image_type"`
	ImageBlobIDs map[string]struct{} `json:"image_blob_ids"`
	Network      string              `json:"network"`
	Windows      bool                `json:"windows"`
	Hypervisor   string              `json:"hypervisor"`
	NICs         int                 `json:"nics"`
	CreatedAt    time.Time           `json:"created_at"`
}

// decode reads what cocoon prints for args.
func decode[T any](t *testing.T, cocoon func(string, ...string) (int, string, string), args ...string) (got T) {
	t.Helper()
	code, out, errOut := cocoon("", args...)
	if err := json.NewDecoder(bytes.NewReader([]byte(out))).Decode(&got); code != 0 || err != nil {
		t.Fatalf("%q: %d %q: %v in %s", args, code, errOut, err, out)
	}
	return got
}

func TestOutputIsAsDocumented(t *testing.T) {
	n := &node{record: vm.Record{
		ID: "abcdefghijklmnop", State: vm.StateRunning, Driver: "qemu", ImageType: vm.ImageOCI, Spec: vm.Spec{Name: "web", Image: "demo", CPUs: 2, Memory: 1 << 30},
		NICs: []vm.NIC{
			{Network: "default", MAC: "02:00:00:00:00:01", IP: "10.0.0.2", Prefix: 24, Gateway: "10.0.0.1", DHCP: true},
			{Network: "static", MAC: "02:00:00:00:00:02", IP: "10.0.1.2", Prefix: 24, Gateway: "10.0.1.1"},
		},
		Disks:       []vm.Disk{{Path: "/d", ReadOnly: true, Serial: "s", Role: vm.RoleLayer}},
		SnapshotIDs: []string{"one", "two"},
	}}
	n.events = func(_ context.Context, fn func(vm.Event) error) error {
		return fn(vm.Event{Type: vm.EventDeleted, Record: n.record})
	}
	cocoon := serve(t, n)
	list := decode[[]documentedVM](t, cocoon, "vm", "list", "-o", "json")
	event := decode[documentedEvent](t, cocoon, "vm", "status", "--event", "--format", "json")
	if len(list) != 1 || event.Event != "DELETED" {
		t.Fatalf("%+v %+v", list, event)
	}
	for _, v := range []documentedVM{decode[documentedVM](t, cocoon, "vm", "inspect", "web"), list[0], event.VM} {
		nics := v.NetworkConfigs
		if v.ID != "abcdefghijklmnop" || v.State != "running" || v.Config.Memory != 1<<30 || len(v.SnapshotIDs) != 2 || v.StorageConfigs[0].Role != "layer" {
			t.Errorf("got %+v", v)
		}
		// An address here makes vk-cocoon ask for commands in the guest to set it.
		if len(nics) != 2 || nics[0].Network != nil || nics[1].Network == nil || nics[1].Network.IP != "10.0.1.2" {
			t.Errorf("interfaces %+v", nics)
		}
	}
	s := decode[documentedSnapshot](t, cocoon, "snapshot", "inspect", "warm")
	all := decode[[]documentedSnapshot](t, cocoon, "snapshot", "list", "-o", "json")
	if _, ok := s.ImageBlobIDs["sha256:2"]; !ok || len(all) != 1 || s.CPU != 2 || !slices.Equal([]string{s.Name, s.Hypervisor, all[0].Hypervisor}, []string{"warm", "cloud-hypervisor", "cloud-hypervisor"}) {
		t.Errorf("got %+v and %+v", s, all)
	}
	n.record.SnapshotIDs = nil
	if v := decode[documentedVM](t, cocoon, "vm", "inspect", "web"); v.SnapshotIDs == nil {
		t.Error("snapshot_ids is null for a VM without snapshots")
	}
}

// Each line is one that the documented command line takes. What has no effect is said on standard error alone.
func TestDocumentedFlags(t *testing.T) {
	n := &node{record: vm.Record{ID: "abcdefghijklmnop", State: vm.StateRunning, ImageType: vm.ImageDisk, Spec: vm.Spec{Name: "web", CPUs: 2, Memory: 1 << 30}}}
	n.catalog.node = n
	cocoon := serve(t, n)
	for _, c := range []struct {
		line     string
		warnings []string
	}{
		{"vm run --name a --fc --windows --no-wait disk", nil},
		{"vm run --name a1 --windows --virtio --no-wait disk", nil},
		{"vm run --name b --no-direct-io --dns 1.1.1.1 --no-wait demo", []string{"--dns", "--no-direct-io"}},
		{"vm run --name c --data-disk size=1G,name=x --data-disk size=2G --user root --password cocoon --no-wait disk", []string{"--data-disk"}},
		{"vm run --name c1 --user ubuntu --password cocoon --no-wait demo", []string{"--user"}},
		{"vm create --name c2 --user ubuntu demo", []string{"--user"}},
		{"vm run --name c4 --firmware uefi --no-wait demo", []string{"--firmware"}},
		{"vm run --name c5 --firmware uefi --no-wait disk", nil},
		{"vm run --name c6 --tpm ephemeral --no-wait demo", []string{"--tpm"}},
		{"vm run --name c7 --firmware uefi --tpm persistent --secure-boot --keep-uefi --no-wait disk", nil},
		{"vm run --name c6 --graphics --no-wait demo", []string{"--graphics"}},
		{"vm run --name c8 --cpu 1 --memory 256M --grow-cpu 4 --grow-memory 1G --no-wait demo", nil},
		{"vm run --name c9 --cpu 1 --memory 256M --grow-cpu 4 --grow-memory 1G --no-wait disk", nil},
		{"vm run --name c7 --graphics --no-wait disk", nil},
		{"vm run --name c3 --password cocoon --run-as 1000 --no-wait demo", []string{"--password"}},
		{"vm run --name d --queue-size 512 --disk-queue-size=512 --fc=false --no-wait --output json demo", []string{"--disk-queue-size", "--queue-size"}},
		{"vm run --name e --bridge cocoon0 --no-wait demo", nil},
		{"vm clone --output json --name f --cpu 4 --memory 4G --no-direct-io --pull --on-demand --no-wait warm", []string{"--no-direct-io", "--on-demand", "--cpu 4", "--memory 4G"}},
		{"vm clone --name g --cpu 2 --memory 1G --no-wait warm", nil},
		{"vm clone --from-dir /srv/x --cpu 4 --memory 4G --network lan --no-wait", []string{"--cpu 4", "--memory 4G"}},
		{"vm rm -o json --force web", nil},
		{"vm status -n 5 web", []string{"--interval"}},
		{"vm status --format json web", nil},
		{"vm list --format json", nil},
		{"vm debug --max-cpu 4 demo", []string{"--max-cpu"}},
		{"snapshot list --format json --vm web", nil},
		{"image pull a b", nil},
		{"gc", nil},
		{
			"--config c --root-dir r --log-dir l --log-level debug --cni-conf-dir d --cni-bin-dir b --dns 1.1.1.1 vm list",
			[]string{"--cni-bin-dir", "--cni-conf-dir", "--config", "--dns", "--log-dir", "--log-level", "--root-dir"},
		},
	} {
		code, _, errOut := cocoon("", strings.Fields(c.line)...)
		var got []string
		for line := range strings.Lines(errOut) {
			what, _, ok := strings.Cut(strings.TrimPrefix(line, "Warning: "), " has no effect: ")
			if !ok {
				t.Errorf("%s: %q", c.line, line)
			}
			got = append(got, what)
		}
		slices.Sort(got)
		slices.Sort(c.warnings)
		if code != 0 || !slices.Equal(got, c.warnings) {
			t.Errorf("%s: code %d, warnings %q, want %q", c.line, code, got, c.warnings)
		}
	}
	if got := n.launched.NICs; len(got) != 1 || got[0].Network != "default" {
		t.Errorf("--bridge: interfaces %+v", got)
	}
	if n.cloned.Keep != (vm.Keep{Size: true, NICs: true}) {
		t.Errorf("a clone that may resume is to keep %+v", n.cloned.Keep)
	}
	if code, _, errOut := cocoon("", "vm", "clone", "--cold", "--cpu", "4", "--no-wait", "warm"); code != 0 || n.cloned.CPUs != 4 || errOut != "" {
		t.Errorf("cold: %d %q %+v", code, errOut, n.cloned)
	}
	if code, _, errOut := cocoon("", "vm", "run", "--bridge", "br9", "demo"); code != 3 || !strings.Contains(errOut, "br9") {
		t.Errorf("a bridge of nobody: %d %q", code, errOut)
	}
	if code, out, _ := cocoon("", "snapshot", "list", "-q", "--vm", "other"); code != 0 || out != "" {
		t.Errorf("snapshots of another VM: %d %q", code, out)
	}
	if code, _, errOut := cocoon("", "vm", "status", "nobody"); code != 3 || !strings.Contains(errOut, "vm not found") {
		t.Errorf("status of a VM that does not exist: %d %q", code, errOut)
	}
	if code, _, errOut := cocoon("", "vm", "status", "-n", "web"); code != 2 || !strings.Contains(errOut, `"web" is not a number of seconds`) {
		t.Errorf("status with an interval that is a name: %d %q", code, errOut)
	}
	if code, out, _ := cocoon("", "image", "pull", "a", "missing", "b"); code != 3 || out != "a\nb\n" {
		t.Errorf("pull of several: %d %q", code, out)
	}
	if code, _, errOut := cocoon("", "--run-dir", "/no/such", "--socket", "", "vm", "list"); code != 6 || !strings.Contains(errOut, "/no/such/cocoond.sock") {
		t.Errorf("--run-dir: %d %q", code, errOut)
	}
}

func TestStopTakesBothKindsOfFlags(t *testing.T) {
	n := &node{}
	cocoon := serve(t, n)
	for _, args := range [][]string{{"--timeout", "5"}, {"--timeout=1m30s"}, {"--grace=5s"}, {"--force"}, {"--now"}, nil} {
		if code, _, errOut := cocoon("", append([]string{"vm", "stop", "web"}, args...)...); code != 0 || errOut != "" {
			t.Errorf("%q: %d %q", args, code, errOut)
		}
	}
	if want := []time.Duration{5 * time.Second, 90 * time.Second, 5 * time.Second, 0, 0, -1}; !slices.Equal(n.stopped, want) {
		t.Errorf("got %v, want %v", n.stopped, want)
	}
	for _, args := range [][]string{{"--timeout", "x"}, {"--timeout=-1"}, {"--timeout=1", "--force"}} {
		if code, _, _ := cocoon("", append([]string{"vm", "stop", "web"}, args...)...); code != 2 {
			t.Errorf("%q: code %d", args, code)
		}
	}
}

// What debug prints is what run --spec takes.
func TestDebugPrintsTheRequest(t *testing.T) {
	n := &node{}
	cocoon := serve(t, n)
	code, spec, errOut := cocoon("", "vm", "debug", "--name", "web", "--cpu", "3", "--network", "default,lab", "-e", "A=b", "demo", "--", "sh")
	if code != 0 || n.launched.Name != "" {
		t.Fatalf("%d %q %+v", code, errOut, n.launched)
	}
	if code, _, errOut := cocoon(spec, "vm", "run", "--no-wait", "--spec", "-"); code != 0 || n.launched.CPUs != 3 || !slices.Equal(n.launched.Process.Args, []string{"sh"}) ||
		len(n.launched.NICs) != 2 || n.launched.NICs[0].Network != "default" || n.launched.NICs[1].Network != "lab" {
		t.Errorf("%d %q %+v", code, errOut, n.launched)
	}
}

func TestStatusFollowsTheNamedVMs(t *testing.T) {
	n := &node{events: func(_ context.Context, fn func(vm.Event) error) error {
		for _, name := range []string{"web", "db", "web-2"} {
			if err := fn(vm.Event{Type: vm.EventAdded, Record: vm.Record{ID: vm.ID("id-of-" + name), Spec: vm.Spec{Name: name}}}); err != nil {
				return err
			}
		}
		return nil
	}}
	code, out, errOut := serve(t, n)("", "vm", "status", "--event", "--format", "json", "web", "id-of-d")
	if code != 0 || strings.Count(out, "\n") != 2 || strings.Contains(out, "web-2") {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}
