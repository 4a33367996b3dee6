package cli_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestEmptyListsAreLists(t *testing.T) {
	cocoon := serve(t, &node{})
	for _, args := range [][]string{{"vm", "list", "-o", "json"}, {"image", "ls", "-o", "json"}, {"vm", "ps", "--output", "json"}, {"vm", "status", "--format", "json"}} {
		if code, out, errOut := cocoon("", args...); code != 0 || strings.TrimSpace(out) != "[]" {
			t.Errorf("%v: %d %q %q", args, code, out, errOut)
		}
	}
}

func TestErrorsAreOneSentence(t *testing.T) {
	cocoon := serve(t, &node{record: vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web"}}})
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"nonsense"}, 2, `unknown command "nonsense"`},
		{[]string{"vm", "nonsense"}, 2, `unknown command "nonsense"`},
		{[]string{"vm", "run"}, 2, "requires at least 1 arg"},
		{[]string{"vm", "run", "--memory", "0", "demo"}, 2, "--memory"},
		{[]string{"vm", "run", "--memory", "lots", "demo"}, 2, "not a size"},
		{[]string{"vm", "run", "--disk-bandwidth", "1K", "demo"}, 2, "bytes per second"},
		{[]string{"vm", "run", "--disk-iops", "-1", "demo"}, 2, "requests per second"},
		{[]string{"vm", "run", "--cpu", "0", "demo"}, 2, "at least one CPU"},
		{[]string{"vm", "run", "--nics", "99", "demo"}, 2, "interfaces"},
		{[]string{"vm", "run", "--nics", "2", "--network", "a,b", "demo"}, 2, "leave out --nics"},
		{[]string{"vm", "run", "--label", "x", "demo"}, 2, "KEY=VALUE"},
		{[]string{"vm", "run", "--name", "web", "demo"}, 4, "already exists"},
		{[]string{"vm", "exec", "web", "ls", "-l"}, 2, "put -- before"},
		{[]string{"vm", "exec", "web"}, 2, "requires at least 2 arg"},
		{[]string{"vm", "list", "-o", "yaml"}, 2, "table or json"},
		{[]string{"vm", "inspect", "nothing"}, 3, `vm not found: "nothing"`},
		{[]string{"snapshot", "save", "web"}, 2, "--name NAME"},
		{[]string{"snapshot", "save", "--name", "s", "nothing"}, 3, "nothing"},
		{[]string{"snapshot", "inspect", "nothing"}, 3, `snapshot not found: "nothing"`},
		{[]string{"snapshot", "rm", "kept"}, 5, "hibernated"},
		{[]string{"snapshot", "export", "nothing", "-o", "/nowhere/f"}, 3, "nothing"},
		{[]string{"snapshot", "export", "warm", "-o", "/nowhere/f"}, 5, "/nowhere"},
		{[]string{"snapshot", "export", "warm", "-o", "/"}, 2, "folder"},
		{[]string{"snapshot", "export", "warm", "--to-dir", "x", "--gzip"}, 2, "--to-dir"},
		{[]string{"snapshot", "import", "--from-dir", "/x", "file"}, 2, "not from both"},
		{[]string{"snapshot", "import", "/no/such/file"}, 3, "/no/such/file"},
		{[]string{"snapshot", "push", "warm", "r/x", "--token-file", "/no/such/file"}, 2, "/no/such/file"},
		{[]string{"snapshot", "push", "warm", "r/x", "--ca-cert", "/"}, 2, "a folder or too large"},
		{[]string{"snapshot", "pull", "r/x", "--auth-file", "/no/such/file"}, 2, "/no/such/file"},
		{[]string{"vm", "clone"}, 2, "--from-dir"},
		{[]string{"vm", "clone", "--from-dir", "/x", "warm"}, 2, "not of both"},
		{[]string{"vm", "clone", "--nics", "99", "warm"}, 2, "interfaces"},
		{[]string{"vm", "clone", "--auth-file", "f", "warm"}, 2, "--pull"},
		{[]string{"vm", "clone", "--memory", "0", "warm"}, 2, "--memory"},
		{[]string{"vm", "clone", "nothing"}, 3, "snapshot not found"},
		{[]string{"vm", "hibernate", "--snapshot", "s", "a", "b"}, 2, "2 VMs"},
		{[]string{"vm", "restore", "web"}, 2, "accepts 2 arg"},
		{[]string{"vm", "rm", "web"}, 5, "--force"},
		{[]string{"vm", "stop", "--grace", "-1s", "web"}, 2, "negative"},
		{[]string{"vm", "restart", "--container", "none", "web"}, 3, "no container"},
		{[]string{"vm", "restart", "--run", "2", "web"}, 2, "--container"},
		{[]string{"vm", "logs", "--since", "noon", "web"}, 2, "--since"},
		{[]string{"vm", "inspect", "bad\xff"}, 2, "UTF-8"},
		{[]string{"image", "import", "x", "/no/such/file"}, 3, "/no/such/file"},
		{[]string{"image", "import", "x", "/"}, 2, "folder"},
		{[]string{"node", "reset"}, 5, "--yes"},
		{[]string{"doctor", "--fix", "--node"}, 2, "--fix"},
		{[]string{"doctor"}, 5, "1 check failed"},
		{[]string{"--socket", "/no/such/socket", "vm", "list"}, 6, "cannot reach cocoond at /no/such/socket"},
		{[]string{"--socket", "", "--dir", "/no/such", "vm", "list"}, 6, "/no/such/run/cocoond.sock"},
	} {
		code, _, errOut := cocoon("", c.args...)
		if code != c.code || !strings.HasPrefix(errOut, "Error: ") || !strings.Contains(errOut, c.want) || strings.Count(errOut, "\n") != 1 {
			t.Errorf("%q: code %d, want %d; %q, want one line with %q", c.args, code, c.code, errOut, c.want)
		}
	}
}

func TestRestartAndReleaseOfContainers(t *testing.T) {
	n := &node{record: vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web"}}}
	cocoon := serve(t, n)
	for _, args := range [][]string{{"-c", "proxy"}, {"--container=proxy", "--run=3", "--grace=7s"}, {"-c", "proxy", "--now"}} {
		if code, out, errOut := cocoon("", append([]string{"vm", "restart", "web"}, args...)...); code != 0 || out != "web\n" {
			t.Errorf("%v: %d %q %q", args, code, out, errOut)
		}
	}
	if code, _, errOut := cocoon("", "vm", "release", "web", "proxy"); code != 0 {
		t.Errorf("release: %d %q", code, errOut)
	}
	const debug = `{"name":"debug","kind":"ephemeral","image":"busybox:1.36","process":{"args":["sleep","60"]}}`
	if code, _, errOut := cocoon(debug, "vm", "add-container", "web"); code != 0 {
		t.Errorf("add-container: %d %q", code, errOut)
	}
	for _, verb := range []string{"start-container", "remove-container"} {
		if code, _, errOut := cocoon("", "vm", verb, "web", "debug"); code != 0 {
			t.Errorf("%s: %d %q", verb, code, errOut)
		}
	}
	if code, _, errOut := cocoon("{", "vm", "add-container", "web"); code == 0 {
		t.Errorf("add-container of what is no JSON: %d %q", code, errOut)
	}
	if code, _, errOut := cocoon(`{"proxy":{"cpu_limit":500,"memory_limit":1048576}}`, "vm", "resize-containers", "web"); code != 0 {
		t.Errorf("resize-containers: %d %q", code, errOut)
	}
	if want := []string{"web proxy 0 -1ns", "web proxy 3 7s", "web proxy 0 0s", "web releases proxy", "web gets debug busybox:1.36 [sleep 60]", "web starts debug", "web loses debug", "web resizes map[proxy:{500 0 1048576 0 0}]"}; !slices.Equal(n.killed, want) {
		t.Errorf("got %q, want %q", n.killed, want)
	}
}

func TestRunWaitsForTheAgent(t *testing.T) {
	n := &node{record: vm.Record{ID: "x", Spec: vm.Spec{Name: "cocoon-demo"}}}
	n.events = func(_ context.Context, fn func(vm.Event) error) error {
		r := vm.Record{ID: "abcdefghijklmnop", Spec: n.launched, State: vm.StateRunning, ImageType: vm.ImageOCI}
		for _, r.AgentReady = range []bool{false, true} {
			if err := fn(vm.Event{Type: vm.EventModified, Record: r}); err != nil {
				return err
			}
		}
		return errors.New("the CLI went on watching")
	}
	cocoon := serve(t, n)
	code, out, errOut := cocoon("", "vm", "run", "-o", "json", "--memory", "256M", "--disk-bandwidth", "100M", "--disk-iops", "1000", "-e", "A=1", "-e", "HOME", "--label", "k=v", "--stop-grace", "5s", "demo", "--", "sh", "-c", "x")
	if code != 0 {
		t.Fatalf("%d %s", code, errOut)
	}
	want := vm.Spec{
		Name: "cocoon-demo-2", Image: "demo", CPUs: 2, Memory: 256 << 20, DiskRate: vm.DiskRate{Bytes: 100 << 20, Ops: 1000}, Accel: vm.AccelAuto, StopGrace: 5 * time.Second,
		Labels: map[string]string{"k": "v"}, NICs: []vm.NICSpec{{}},
		Process: vm.Process{Args: []string{"sh", "-c", "x"}, Env: []vm.EnvVar{{Name: "A", Value: "1"}, {Name: "HOME", Value: "/here"}}},
	}
	if d := diff.Of(want, n.launched); d != "" {
		t.Errorf("asked for %s", d)
	}
	var got struct {
		AgentReady bool `json:"agent_ready"`
		Config     struct{ Name string }
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || !got.AgentReady || got.Config.Name != "cocoon-demo-2" {
		t.Errorf("%v %+v", err, got)
	}
}

func TestRunSaysWhenTheAgentStaysAway(t *testing.T) {
	n := &node{events: func(ctx context.Context, _ func(vm.Event) error) error { <-ctx.Done(); return ctx.Err() }}
	code, _, errOut := serve(t, n)("", "vm", "run", "--wait-timeout", "20ms", "demo")
	if code != 124 || !strings.Contains(errOut, "has not answered within 20ms") {
		t.Errorf("%d %q", code, errOut)
	}
}

func TestRunSaysWhyItDidNotComeUp(t *testing.T) {
	n := &node{}
	n.events = func(_ context.Context, fn func(vm.Event) error) error {
		return fn(vm.Event{Record: vm.Record{ID: "abcdefghijklmnop", Spec: n.launched, State: vm.StateError, Message: "no root file system"}})
	}
	code, _, errOut := serve(t, n)("", "vm", "run", "demo")
	if code != 1 || !strings.Contains(errOut, "no root file system") {
		t.Errorf("%d %q", code, errOut)
	}
}

func TestExec(t *testing.T) {
	n := &node{exec: func(_ context.Context, e guest.Exec, s guest.Streams) (int, error) {
		if !reflect.DeepEqual(e.Command, []string{"cat", "-n"}) || e.WorkDir != "/srv" || e.Env[0] != (vm.EnvVar{Name: "A", Value: "b"}) {
			return 0, errdefs.Invalidf("asked for %+v", e)
		}
		if s.Stdin != nil {
			if _, err := io.Copy(s.Stdout, s.Stdin); err != nil {
				return 0, err
			}
		}
		_, err := io.WriteString(s.Stderr, "oops")
		return 7, err
	}}
	cocoon := serve(t, n)
	if code, out, errOut := cocoon("hello", "vm", "exec", "-i", "-w", "/srv", "-e", "A=b", "web", "--", "cat", "-n"); code != 7 || out != "hello" || errOut != "oops" {
		t.Errorf("with stdin: %d %q %q", code, out, errOut)
	}
	if code, out, errOut := cocoon("hello", "vm", "exec", "-w", "/srv", "-e", "A=b", "web", "--", "cat", "-n"); code != 7 || out != "" || errOut != "oops" {
		t.Errorf("without: %d %q %q", code, out, errOut)
	}
}

func TestExecPassesSignals(t *testing.T) {
	got := make(chan int, 8)
	n := &node{exec: func(ctx context.Context, _ guest.Exec, s guest.Streams) (int, error) {
		if err := syscall.Kill(syscall.Getpid(), syscall.SIGUSR1); err != nil {
			return 0, err
		}
		got <- <-s.Signals
		return 0, nil
	}}
	if code, _, errOut := serve(t, n)("", "vm", "exec", "web", "--", "sleep"); code != 0 || <-got != int(syscall.SIGUSR1) {
		t.Errorf("%d %q", code, errOut)
	}
}

func TestConsoleLeavesAtTheEscape(t *testing.T) {
	ours, theirs := net.Pipe()
	n := &node{console: theirs}
	typed := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(ours)
		typed <- string(b)
	}()
	if code, _, errOut := serve(t, n)("ls\n\x1dnever", "vm", "console", "web"); code != 0 {
		t.Errorf("%d %q", code, errOut)
	}
	if got := <-typed; got != "ls\n" {
		t.Errorf("the guest got %q", got)
	}
}

func TestConsoleEndsWithTheVM(t *testing.T) {
	ours, theirs := net.Pipe()
	go func() { _, _ = io.WriteString(ours, "bye\r\n"); ours.Close() }()
	if code, out, errOut := serve(t, &node{console: theirs})("", "vm", "console", "web"); code != 0 || out != "bye\r\n" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}

func TestImportFromStdin(t *testing.T) {
	code, out, errOut := serve(t, &node{})("content", "image", "import", "-o", "json", "demo:1")
	var img image.Image
	if err := json.Unmarshal([]byte(out), &img); code != 0 || err != nil || img.Name != "demo:1" || img.Size != 7 {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}

func TestCompletionOffersVMs(t *testing.T) {
	cocoon := serve(t, &node{record: vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web"}}})
	if code, out, _ := cocoon("", "__complete", "vm", "exec", ""); code != 0 || !strings.HasPrefix(out, "web\n") {
		t.Errorf("%d %q", code, out)
	}
}

// The documented keys of reference 6.2, and our own.
func TestJSONKeys(t *testing.T) {
	code := 3
	at := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	n := &node{record: vm.Record{
		ID: "abcdefghijklmnop", State: vm.StateStopped, Driver: "qemu", ImageType: vm.ImageOCI, ImageDigest: "sha256:1", PID: 0, ExitCode: &code,
		Reason: vm.ReasonExited, Message: "it ended", FirstBooted: true, CreatedAt: at, UpdatedAt: at, StartedAt: at, Restarts: 1, Revision: 9,
		Spec: vm.Spec{
			Name: "web", Labels: map[string]string{"a": "b"}, Image: "demo", CPUs: 1, Memory: 1 << 28, Storage: 1 << 30, Hostname: "web",
			Accel: vm.AccelAuto, StopGrace: 30 * time.Second,
			Process: vm.Process{Env: []vm.EnvVar{{Name: "TOKEN", Value: "secret"}}},
		},
		Disks: []vm.Disk{{Path: "/d", Format: vm.DiskRaw, ReadOnly: true, Serial: "cocoon-root", Role: vm.RoleLayer}},
		NICs: []vm.NIC{
			{Network: "default", Tap: "t0", MAC: "02:00:00:00:00:01", IP: "10.0.0.2", Prefix: 24, Gateway: "10.0.0.1", DHCP: true},
			{Network: "other", Tap: "t1", MAC: "02:00:00:00:00:02", NetNS: "/run/netns/x"},
			{Network: "static", Tap: "t2", MAC: "02:00:00:00:00:03", IP: "10.0.1.2", Prefix: 24, Gateway: "10.0.1.1"},
		},
		SnapshotIDs: []string{"snap"},
	}}
	_, out, _ := serve(t, n)("", "vm", "inspect", "web")
	want := `{
  "id": "abcdefghijklmnop",
  "hypervisor": "qemu",
  "state": "stopped",
  "config": {
    "name": "web",
    "cpu": 1,
    "memory": 268435456,
    "storage": 1073741824,
    "image": "demo",
    "image_digest": "sha256:1",
    "image_type": "oci",
    "network": "default",
    "hostname": "web",
    "accel": "auto",
    "stop_grace_seconds": 30
  },
  "pid": 0,
  "network_configs": [
    {
      "tap": "t0",
      "mac": "02:00:00:00:00:01",
      "network_name": "default",
      "dhcp": true,
      "address": {
        "ip": "10.0.0.2",
        "gateway": "10.0.0.1",
        "prefix": 24
      }
    },
    {
      "tap": "t1",
      "mac": "02:00:00:00:00:02",
      "network_name": "other",
      "netns_path": "/run/netns/x",
      "dhcp": false
    },
    {
      "tap": "t2",
      "mac": "02:00:00:00:00:03",
      "network_name": "static",
      "dhcp": false,
      "network": {
        "ip": "10.0.1.2",
        "gateway": "10.0.1.1",
        "prefix": 24
      },
      "address": {
        "ip": "10.0.1.2",
        "gateway": "10.0.1.1",
        "prefix": 24
      }
    }
  ],
  "storage_configs": [
    {
      "path": "/d",
      "ro": true,
      "serial": "cocoon-root",
      "role": "layer",
      "format": "raw"
    }
  ],
  "first_booted": true,
  "snapshot_ids": {
    "snap": {}
  },
  "created_at": "2026-11-21T10:00:00Z",
  "updated_at": "2026-11-21T10:00:00Z",
  "started_at": "2026-11-21T10:00:00Z",
  "stopped_at": null,
  "agent_ready": false,
  "exit_code": 3,
  "reason": "Exited",
  "message": "it ended",
  "restarts": 1,
  "labels": {
    "a": "b"
  },
  "revision": 9
}
`
	if out != want {
		t.Errorf("got %s", out)
	}
	if strings.Contains(out, "secret") {
		t.Error("the environment is shown")
	}
}

func TestEventsAreLines(t *testing.T) {
	n := &node{events: func(_ context.Context, fn func(vm.Event) error) error {
		for rev, typ := range []vm.EventType{vm.EventAdded, vm.EventDeleted} {
			if err := fn(vm.Event{Type: typ, Revision: int64(rev), Record: vm.Record{ID: "i", Spec: vm.Spec{Name: "web"}}}); err != nil {
				return err
			}
		}
		return nil
	}}
	_, out, _ := serve(t, n)("", "vm", "status", "--event", "--format", "json")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], `{"event":"ADDED","vm":{"id":"i",`) || !strings.HasPrefix(lines[1], `{"event":"DELETED","vm":{`) {
		t.Errorf("%q", out)
	}
}

func TestPull(t *testing.T) {
	n := &node{}
	run := serve(t, n)
	auth := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(auth, []byte(`{"auths":{"r.example":{"username":"u","password":"hunter2"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	helpers := filepath.Join(t.TempDir(), "helpers.json")
	if err := os.WriteFile(helpers, []byte(`{"credsStore":"desktop"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args string
		code int
		out  string // of stdout, or of stderr if it fails
		want image.PullRequest
	}{
		{"debian:12", 0, "debian:12\n", image.PullRequest{Name: "debian:12", Policy: image.PullAlways}},
		{"-q debian:12", 0, "sha256:1234\n", image.PullRequest{Name: "debian:12", Policy: image.PullAlways}},
		{"--policy missing debian:12", 0, "debian:12\n", image.PullRequest{Name: "debian:12", Policy: image.PullIfNotPresent}},
		{"--force https://x/y.img", 0, "x/y.img\n", image.PullRequest{Name: "https://x/y.img", Policy: image.PullAlways, Force: true}},
		{"--policy never debian:12", 3, "Error: debian:12 is not there\n", image.PullRequest{Name: "debian:12", Policy: image.PullNever}},
		{"--policy sometimes debian:12", 2, "", image.PullRequest{}},
		{"--policy missing --force debian:12", 2, "", image.PullRequest{}},
		{"--auth-file /nonexistent debian:12", 2, "", image.PullRequest{}},
		{"--auth-file " + helpers + " debian:12", 2, "", image.PullRequest{}},
		{"--auth-file " + auth + " debian:12", 0, "debian:12\n", image.PullRequest{
			Name: "debian:12", Policy: image.PullAlways, Auth: []image.RegistryAuth{{Registry: "r.example", Username: "u", Password: "hunter2"}},
		}},
	} {
		n.pulls.asked = nil
		code, stdout, stderr := run("", append([]string{"image", "pull"}, strings.Fields(tc.args)...)...)
		got := stdout
		if tc.code != 0 {
			got = stderr
		}
		if code != tc.code || tc.out != "" && got != tc.out || strings.Count(stdout+stderr, "\n") != 1 {
			t.Errorf("%s: code %d, stdout %q, stderr %q", tc.args, code, stdout, stderr)
		}
		if tc.want.Name == "" && len(n.pulls.asked) == 0 {
			continue
		}
		if d := diff.Of([]image.PullRequest{tc.want}, n.pulls.asked); d != "" {
			t.Errorf("%s: asked for %s", tc.args, d)
		}
	}
}

func TestExplain(t *testing.T) {
	run := serve(t, &node{})
	code, stdout, stderr := run("", "image", "explain", "virtlet.cloud/k")
	want := "virtlet.cloud/k\n  1. first [2J\n  2. second\n\nKind:          mapped\nStored as:     k\nRule:          name k\nHere already:  yes\n"
	if code != 0 || stdout != want {
		t.Errorf("code %d, %q, %s", code, stdout, stderr)
	}
	var e image.Explanation
	if code, stdout, _ = run("", "image", "explain", "-o", "json", "k"); code != 0 || json.Unmarshal([]byte(stdout), &e) != nil || e.Kind != "mapped" || len(e.Steps) != 2 {
		t.Errorf("code %d, %s", code, stdout)
	}
}

func TestRunPullsWhatIsMissing(t *testing.T) {
	n := &node{}
	run := serve(t, n)
	for _, tc := range []struct {
		args   string
		code   int
		policy image.PullPolicy // "": not pulled
		image  string           // launched with
	}{
		{"demo", 0, image.PullIfNotPresent, "demo"},
		{"--pull always demo", 0, image.PullAlways, "demo"},
		{"--pull never demo", 0, "", "demo"},
		{"missing", 3, image.PullIfNotPresent, ""},
		{"https://me:hunter2@x/d.img", 0, image.PullIfNotPresent, "me:hunter2@x/d.img"}, // the name that the puller of this test gives it
		{"--cpu 1000 demo", 2, "", ""},
	} {
		n.pulls.asked, n.launched = nil, vm.Spec{}
		code, _, stderr := run("", append([]string{"vm", "run", "--wait=false"}, strings.Fields(tc.args)...)...)
		var policy image.PullPolicy
		if len(n.pulls.asked) == 1 {
			policy = n.pulls.asked[0].Policy
		}
		if code != tc.code || policy != tc.policy || n.launched.Image != tc.image {
			t.Errorf("%s: code %d, asked %+v, launched %q: %s", tc.args, code, n.pulls.asked, n.launched.Image, stderr)
		}
	}
}
