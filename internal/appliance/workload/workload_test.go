package workload

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// parse returns the workload of a JSON text, with a name and a kind.
func parse(t testing.TB, text string) *capsulev1.Workload {
	t.Helper()
	w := &capsulev1.Workload{Name: "web"}
	if err := protojson.Unmarshal([]byte(text), w); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if w.Name == "" {
		w.Name = "web"
	}
	if w.GetMicroVm() != nil {
		w.Kind = capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM
	} else if w.GetContainer() != nil {
		w.Kind = capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER
	}
	return w
}

const image = `"image": "demo"`

func TestValidate(t *testing.T) {
	for _, text := range []string{
		`{"container": {` + image + `}}`,
		`{"microVm": {` + image + `, "vcpus": 2, "memoryMib": 512, "mounts": [{"volumeName": "data", "mountPath": "/data"}]}}`,
		`{"microVm": {"kernelPath": "/perm/vmlinux", "rootfsPath": "/perm/root.ext4"}}`,
		`{"microVm": {"kernelPath": "/perm/vmlinuz", "initramfsPath": "/perm/initrd.img", "rootfsPath": "/perm/root.ext4"}}`,
		`{"container": {` + image + `, "networkMode": "NETWORK_MODE_HOST", "privileged": true, "hostBindPaths": ["/", "/a:/b:ro"]}}`,
		`{"container": {` + image + `, "ports": [{"containerPort": 80, "hostPort": 80}, {"containerPort": 80, "hostPort": 80, "protocol": "UDP"}]}}`,
		`{"container": {` + image + `}, "dependsOn": ["db"], "livenessProbe": {"http": {"port": 80}}, "readinessProbe": {"exec": {"command": ["true"]}, "successThreshold": 2}}`,
	} {
		if err := Validate(parse(t, text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	long := strings.Repeat("a", 64)
	for text, want := range map[string]string{
		`{}`: "kind:",
		`{"name": "a.b", "container": {` + image + `}}`:              "DNS label",
		`{"name": "` + long + `", "container": {` + image + `}}`:     "DNS label",
		`{"container": {` + image + `}, "microVm": {` + image + `}}`: "microVm:",
		`{"container": {}}`:               "container.image",
		`{"container": {"image": "a b"}}`: "container.image",
		`{"container": {` + image + `}, "desiredState": "DESIRED_STATE_DELETING"}`:                                                             "desiredState",
		`{"container": {` + image + `}, "restartPolicy": 9}`:                                                                                   "restartPolicy",
		`{"container": {` + image + `}, "stopGraceSeconds": 3601}`:                                                                             "stopGraceSeconds",
		`{"container": {` + image + `}, "hostname": "A"}`:                                                                                      "hostname",
		`{"container": {` + image + `}, "dependsOn": ["web"]}`:                                                                                 "wait for itself",
		`{"container": {` + image + `}, "dependsOn": ["a", "a"]}`:                                                                              "twice",
		`{"container": {` + image + `}, "livenessProbe": {}}`:                                                                                  "livenessProbe:",
		`{"container": {` + image + `}, "livenessProbe": {"tcp": {"port": 0}}}`:                                                                "livenessProbe.tcp.port",
		`{"container": {` + image + `}, "livenessProbe": {"exec": {}}}`:                                                                        "livenessProbe.exec.command",
		`{"container": {` + image + `}, "livenessProbe": {"tcp": {"port": 1}, "successThreshold": 2}}`:                                         "successThreshold",
		`{"container": {` + image + `}, "startupProbe": {"http": {"port": 1, "scheme": "ftp"}}}`:                                               "scheme",
		`{"container": {` + image + `, "networkMode": "NETWORK_MODE_NONE"}, "startupProbe": {"tcp": {"port": 1}}}`:                             "only exec",
		`{"container": {` + image + `, "networkMode": "NETWORK_MODE_HOST", "ports": [{"containerPort": 1, "hostPort": 1}]}}`:                   "only workloads on the bridge",
		`{"container": {` + image + `, "hostBindPaths": ["a"]}}`:                                                                               "hostBindPaths[0]",
		`{"container": {` + image + `, "hostBindPaths": ["/a/../b"]}}`:                                                                         "hostBindPaths[0]",
		`{"container": {` + image + `, "mounts": [{"volumeName": "d", "mountPath": "/a/../b"}]}}`:                                              "mountPath",
		`{"container": {` + image + `, "mounts": [{"volumeName": "d", "mountPath": "/proc/x"}]}}`:                                              "mountPath",
		`{"container": {` + image + `, "mounts": [{"volumeName": "../d", "mountPath": "/a"}]}}`:                                                "volumeName",
		`{"container": {` + image + `, "mounts": [{"volumeName": "d", "mountPath": "/a"}, {"volumeName": "d", "mountPath": "/b"}]}}`:           "mounted twice",
		`{"container": {` + image + `, "ports": [{"containerPort": 1, "hostPort": 70000}]}}`:                                                   "hostPort",
		`{"container": {` + image + `, "ports": [{"containerPort": 1, "hostPort": 1, "protocol": "icmp"}]}}`:                                   "protocol",
		`{"microVm": {` + image + `, "ports": [{"containerPort": 1, "hostPort": 1}, {"containerPort": 2, "hostPort": 1, "protocol": "tcp"}]}}`: "twice",
		`{"container": {` + image + `, "env": {"A=B": "c"}}}`:                                                                                  "env",
		`{"container": {` + image + `, "command": ["a\u0000b"]}}`:                                                                              "zero byte",
		`{"microVm": {"kernelPath": "/perm/vmlinux"}}`:                                                                                         "rootfsPath",
		`{"microVm": {` + image + `, "initramfsPath": "/i"}}`:                                                                                  "microVm.kernelPath",
		`{"microVm": {"kernelPath": "/k", "initramfsPath": "/i"}}`:                                                                             "microVm.rootfsPath",
		`{"microVm": {"rootfsPath": "/r", "initramfsPath": "/i"}}`:                                                                             "microVm.kernelPath",
		`{"microVm": {"kernelPath": "/k", "rootfsPath": "/r", "initramfsPath": "i"}}`:                                                          "microVm.initramfsPath",
		`{"microVm": {"kernelPath": "/k", "rootfsPath": "/r", "initramfsPath": "/a/../i"}}`:                                                    "microVm.initramfsPath",
		`{"microVm": {` + image + `, "kernelPath": "/perm/vmlinux", "rootfsPath": "/r"}}`:                                                      "microVm.image",
		`{"container": {"image": "demo", "args": ["` + strings.Repeat("a", MaxBytes) + `"]}}`:                                                  "bytes",
	} {
		if err := Validate(parse(t, text)); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.200s: %v, want %q", text, err, want)
		}
	}
}

// Each field that gives control over the machine is named, and no other.
func TestReaches(t *testing.T) {
	for text, want := range map[string]string{
		`{"container": {` + image + `, "networkMode": "NETWORK_MODE_BRIDGE", "mounts": [{"volumeName": "d", "mountPath": "/d"}]}}`: "",
		`{"container": {` + image + `, "networkMode": "NETWORK_MODE_NONE"}}`:                                                       "",
		`{"microVm": {` + image + `}}`: "",
		`{"container": {` + image + `, "privileged": true, "hostPid": true, "hostMount": true, "hostIpc": true, "hostBindPaths": ["/"]}}`: "privileged hostPid hostMount hostIpc hostBindPaths",
		`{"container": {` + image + `, "networkMode": "NETWORK_MODE_HOST"}}`:                                                              "networkMode HOST",
		`{"microVm": {"kernelPath": "/k", "rootfsPath": "/r"}}`:                                                                           "kernelPath rootfsPath",
		`{"microVm": {"kernelPath": "/k", "rootfsPath": "/r", "initramfsPath": "/i"}}`:                                                    "kernelPath rootfsPath initramfsPath",
	} {
		if got := strings.Join(Reaches(parse(t, text)), " "); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

// One answer names all faults.
func TestValidateTellsAll(t *testing.T) {
	err := Validate(parse(t, `{"container": {"image": "", "networkMode": 7}, "stopGraceSeconds": 9999}`))
	for _, want := range []string{"container.image", "networkMode", "stopGraceSeconds"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v names no %s", err, want)
		}
	}
}

func TestConflicts(t *testing.T) {
	web := parse(t, `{"container": {`+image+`, "ports": [{"containerPort": 80, "hostPort": 8080}], "mounts": [{"volumeName": "data", "mountPath": "/d"}]}, "dependsOn": ["db"]}`)
	row := func(text string) Row { return Row{Workload: parse(t, text)} }
	for name, tc := range map[string]struct {
		other    Row
		reserved map[string]string
		want     string
	}{
		"nothing":           {other: row(`{"name": "a", "microVm": {` + image + `, "ports": [{"containerPort": 80, "hostPort": 8081}]}}`)},
		"itself":            {other: Row{Workload: web}},
		"port":              {other: row(`{"name": "a", "microVm": {` + image + `, "ports": [{"containerPort": 1, "hostPort": 8080, "protocol": "TCP"}]}}`), want: "port 8080/tcp is that of workload a"},
		"other protocol":    {other: row(`{"name": "a", "microVm": {` + image + `, "ports": [{"containerPort": 1, "hostPort": 8080, "protocol": "udp"}]}}`)},
		"stopped":           {other: row(`{"name": "a", "desiredState": "DESIRED_STATE_STOPPED", "microVm": {` + image + `, "ports": [{"containerPort": 1, "hostPort": 8080}]}}`)},
		"of the machine":    {other: Row{Workload: web}, reserved: map[string]string{"8080/tcp": "the API"}, want: "port 8080/tcp is that of the API"},
		"volume":            {other: row(`{"name": "a", "microVm": {` + image + `, "mounts": [{"volumeName": "data", "mountPath": "/x", "readOnly": true}]}}`), want: "volume data is in use by workload a"},
		"circle":            {other: row(`{"name": "db", "dependsOn": ["web"], "container": {` + image + `}}`), want: "web, db, web"},
		"circle of another": {other: row(`{"name": "db", "dependsOn": ["x"], "container": {` + image + `}}`)},
	} {
		err := Conflicts(web, []Row{tc.other}, tc.reserved)
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	readers := row(`{"name": "a", "microVm": {` + image + `, "mounts": [{"volumeName": "data", "mountPath": "/x", "readOnly": true}]}}`)
	web.GetContainer().GetMounts()[0].ReadOnly = true
	if err := Conflicts(web, []Row{readers}, nil); err != nil {
		t.Errorf("two that only read: %v", err)
	}
}

// Only what a container or VM is made from makes another one necessary.
func TestHash(t *testing.T) {
	a := Row{Workload: parse(t, `{"container": {`+image+`, "env": {"A": "1", "B": "2", "C": "3", "D": "4"}}}`)}
	same := func(change func(*Row)) bool {
		b := a.Clone()
		change(&b)
		return a.Hash() == b.Hash()
	}
	for range 20 {
		if !same(func(*Row) {}) {
			t.Fatal("the hash of the same workload differs")
		}
	}
	for name, change := range map[string]func(*Row){
		"status":     func(r *Row) { r.Status().RestartCount = 7 },
		"generation": func(r *Row) { r.Workload.Generation = 7 },
		"policy":     func(r *Row) { r.Workload.RestartPolicy = capsulev1.RestartPolicy_RESTART_POLICY_NEVER },
		"probe":      func(r *Row) { r.Workload.LivenessProbe = &capsulev1.Probe{PeriodSeconds: 3} },
	} {
		if !same(change) {
			t.Errorf("%s makes another hash", name)
		}
	}
	for name, change := range map[string]func(*Row){
		"image":    func(r *Row) { r.Workload.GetContainer().Image = "other" },
		"restart":  func(r *Row) { r.Restart++ },
		"hostname": func(r *Row) { r.Workload.Hostname = "h" },
	} {
		if same(change) {
			t.Errorf("%s makes no other hash", name)
		}
	}
	b := Row{Workload: parse(t, `{"microVm": {"kernelPath": "/k", "rootfsPath": "/r"}}`)}
	c := b.Clone()
	if c.Workload.GetMicroVm().InitramfsPath = "/i"; b.Hash() == c.Hash() {
		t.Error("an initramfs makes no other hash")
	}
}

func TestChanges(t *testing.T) {
	old := parse(t, `{"container": {`+image+`, "ports": [{"containerPort": 80, "hostPort": 80}], "env": {"A": "1"}}}`)
	now := proto.CloneOf(old)
	now.Status, now.Generation, now.DesiredState = &capsulev1.WorkloadStatus{Message: "x"}, 7, capsulev1.DesiredState_DESIRED_STATE_RUNNING
	if c := Changes(old, now); len(c) != 0 {
		t.Errorf("changes by the machine: %v", c)
	}
	now.GetContainer().GetPorts()[0].HostPort = 81
	now.GetContainer().Env = map[string]string{"B": "2"}
	var got []string
	for _, c := range Changes(old, now) {
		got = append(got, c.GetPath()+" "+c.GetOld()+" "+c.GetNew())
	}
	if want := `container.env.A "1" ;container.env.B  "2";container.ports[0].hostPort 80 81`; strings.Join(got, ";") != want {
		t.Errorf("%q, want %q", strings.Join(got, ";"), want)
	}
	if c := Changes(nil, old); len(c) < 4 {
		t.Errorf("a new workload: %v", c)
	}
}

// A row is the same after it was stored. What a newer Cocoon wrote is ignored, and a damaged row is an error.
func TestRowIsStored(t *testing.T) {
	r := Row{Workload: parse(t, `{"container": {`+image+`}, "generation": "7"}`), Past: Past{Restart: 3, Instance: "i", Delay: 5}}
	data, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode("web", data)
	if err != nil || !proto.Equal(got.Workload, r.Workload) || got.Past != r.Past {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := Decode("web", []byte(`{"workload": {"name": "web", "newer": 1}, "newer": 2}`)); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "{", `{"workload": 7}`, `{"workload": {"name": "other"}}`} {
		if _, err := Decode("web", []byte(bad)); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Whatever an operator sends is valid or refused. What is valid has a hash, a stored form and no changes against itself.
func FuzzValidate(f *testing.F) {
	for _, text := range []string{`{"container": {` + image + `}}`, `{"microVm": {` + image + `, "mounts": [{"volumeName": "d", "mountPath": "/d"}]}}`} {
		b, err := proto.Marshal(parse(f, text))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		w := &capsulev1.Workload{}
		if proto.Unmarshal(data, w) != nil || Validate(w) != nil {
			return
		}
		r := Row{Workload: w}
		text, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := Decode(w.GetName(), text)
		if err != nil || back.Hash() != r.Hash() || len(Changes(w, back.Workload)) != 0 {
			t.Errorf("%v: %v", w, err)
		}
		_ = Conflicts(w, []Row{r, back}, map[string]string{"1/tcp": "x"})
		for _, b := range w.GetContainer().GetHostBindPaths() {
			if _, err := ParseBind(b); err != nil {
				t.Errorf("%q: %v", b, err)
			}
		}
	})
}
