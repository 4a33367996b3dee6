package manifest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// documented has what the documentation of manifests describes, in its words.
const documented = `
name: shared
kind: Volume
size: 2GiB
---
name: web
kind: Container
container:
  image: docker.io/library/nginx:1.27-alpine
  command: ["/bin/sh", "-c"]
  args: [sleep, 3600]
  env:
    - name: TZ
      value: UTC
    - name: EMPTY
  networkMode: NETWORK_MODE_BRIDGE
  ports:
    - containerPort: 80
      hostPort: 8080
      protocol: tcp
  mounts:
    - volumeName: shared
      mountPath: /data
      readOnly: true
---
# nothing here
---
name: vm
kind: MicroVM
microVm:
  kernelPath: /perm/vmlinux
  rootfsPath: /perm/root.ext4
  vcpus: 1
  memoryMib: 256
  env: {PORT: 8080, RATIO: 1.10, YES: yes}
  backend: qemu
restartPolicy: on-failure
startupProbe: {http: {port: 80, path: /}}
`

func TestDocumentedFields(t *testing.T) {
	got, err := Parse([]byte(documented))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got[0].Kind() != "Volume" || got[0].Volume.SizeMiB != 2048 || got[1].Line != 6 {
		t.Fatalf("got %+v", got)
	}
	for i, want := range map[int]*capsulev1.Workload{
		1: {
			Name: "web", Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER,
			Container: &capsulev1.ContainerSpec{
				Image: "docker.io/library/nginx:1.27-alpine", Command: []string{"/bin/sh", "-c"}, Args: []string{"sleep", "3600"},
				Env: map[string]string{"TZ": "UTC", "EMPTY": ""}, NetworkMode: capsulev1.NetworkMode_NETWORK_MODE_BRIDGE,
				Ports:  []*capsulev1.PortMapping{{ContainerPort: 80, HostPort: 8080, Protocol: "tcp"}},
				Mounts: []*capsulev1.VolumeMount{{VolumeName: "shared", MountPath: "/data", ReadOnly: true}},
			},
		},
		2: {
			Name: "vm", Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM,
			MicroVm: &capsulev1.MicroVMSpec{
				KernelPath: "/perm/vmlinux", RootfsPath: "/perm/root.ext4", Vcpus: 1, MemoryMib: 256,
				Env: map[string]string{"PORT": "8080", "RATIO": "1.10", "YES": "yes"}, Backend: capsulev1.MicroVMBackend_MICRO_VM_BACKEND_QEMU,
			},
			RestartPolicy: capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE,
			StartupProbe:  &capsulev1.Probe{Action: &capsulev1.Probe_Http{Http: &capsulev1.ProbeHTTP{Port: 80, Path: "/"}}},
		},
	} {
		if !proto.Equal(got[i].Workload, want) {
			t.Errorf("got %v, want %v", got[i].Workload, want)
		}
	}
}

// What Cocoon adds is written as the documented fields are.
func TestInitramfs(t *testing.T) {
	for _, field := range []string{"initramfsPath", "initramfs_path"} {
		got, err := Parse([]byte("name: vm\nkind: MicroVM\nmicroVm: {kernelPath: /k, " + field + ": /i, rootfsPath: /r}\n"))
		want := &capsulev1.MicroVMSpec{KernelPath: "/k", InitramfsPath: "/i", RootfsPath: "/r"}
		if err != nil || len(got) != 1 || !proto.Equal(got[0].Workload.GetMicroVm(), want) {
			t.Errorf("%s: %v, %v", field, got, err)
		}
	}
}

func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../../examples/appliance/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(data); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
}

// What the machine answers can be applied again.
func TestAnswerIsAManifest(t *testing.T) {
	got, err := Parse([]byte(documented))
	if err != nil {
		t.Fatal(err)
	}
	w := proto.CloneOf(got[2].Workload)
	w.Generation = 3
	w.Status = &capsulev1.WorkloadStatus{Phase: capsulev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, ObservedGeneration: 3, ExitCode: proto.Int32(-1), StartedAtUnix: 5}
	data, err := protojson.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(data)
	if err != nil || len(again) != 1 || !proto.Equal(again[0].Workload, got[2].Workload) {
		t.Errorf("got %v, %v", again, err)
	}
}

func TestProblems(t *testing.T) {
	container := "name: a\nkind: Container\ncontainer:\n  image: x\n"
	for text, want := range map[string]string{
		"":                         "the manifest is empty",
		"---\n---\n":               "the manifest is empty",
		"a: [":                     "is not YAML",
		"- a":                      "line 1: document: it is no mapping",
		"name: a\n":                `line 1: kind: it is ""; it must be Container, MicroVM or Volume`,
		"kind: Pod\nname: a":       `it is "Pod"`,
		"kind: [a]\nname: a":       "line 1: kind: it must be a single value",
		"kind: Container\nname: a": "line 1: container: it is missing",
		"kind: MicroVM\nname: a\ncontainer: {image: x}":                     "container: the workload is of the other kind",
		"kind: Volume\nname: a\nsise: 1G":                                   "line 3: sise: a volume has no such field; is it size?",
		"kind: Volume\nname: a\nsize: 1024":                                 "line 3: size: 1024 is bytes, and a volume has at least 32 MiB; write 1024MiB or 1024GiB",
		"kind: Volume\nname: a\nsize: 2TiB":                                 "2TiB is not from 32 MiB to 1 TiB",
		"kind: Volume\nname: a\nsize: 40000001":                             "40000001 is no whole number of MiB",
		"kind: Volume\nname: a\nsize: big":                                  `"big" is not a size`,
		"kind: Volume\nname: A_b":                                           `name: "A_b" is no name`,
		"kind: Volume":                                                      `name: "" is no name`,
		container + "  prots: []":                                           "line 5: container.prots: there is no such field; is it ports?",
		container + "  foo: []":                                             "line 5: container.foo: there is no such field",
		container + "  ports: 80":                                           "line 5: container.ports: it must be a list",
		container + "  ports: [80]":                                         "line 5: container.ports[0]: it must be a mapping",
		container + "  ports: [{hostport: 1}]":                              "container.ports[0].hostport: there is no such field; is it hostPort?",
		container + "  ports: [{hostPort: -1}]":                             "container.ports[0].hostPort: it must be a number from 0",
		container + "  ports: [{hostPort: 1.5}]":                            `not "1.5"`,
		container + "  privileged: yes":                                     `container.privileged: it must be true or false, not "yes"`,
		container + "  networkMode: hots":                                   `container.networkMode: "hots" is none of host, bridge, none`,
		container + "  image: y":                                            "line 5: container.image: it is there twice",
		container + "  env: [A=1]":                                          "container.env[0]: it must be a mapping of name and value",
		container + "  env: [{name: A, valeu: 1}]":                          "container.env[0].valeu: there is no such field; is it value?",
		container + "  env: {A: {}}":                                        "container.env.A: it must be a single value",
		container + "  env: {A=B: 1}":                                       `"A=B" is no name of a variable`,
		container + "  env: [{name: A}, {name: A}]":                         "A is there twice",
		container + "  env: 1":                                              "container.env: it must be a mapping",
		container + "  command: [[a]]":                                      "container.command[0]: it must be a single value",
		container + "  host_pid: true\n  hostPid: true":                     "container.hostPid: it is there twice, in two ways of writing it",
		container + "livenessProbe: {tcp: {port: 1}, exec: {command: [a]}}": "livenessProbe.exec: tcp is there too; only one of them can be",
		container + "---\n" + container:                                     "line 6: name: a is described at line 1 too",
		container + "x: &x {<<: *x}":                                        "line 5: x: there is no such field",
		container + "  env: &e {<<: *e}":                                    "it has more than 100000 nodes",
		strings.Repeat("#", MaxSize+1):                                      "at most 4M",
		container + "  ? [a]\n  : b":                                        "a key is no word",
	} {
		_, err := Parse([]byte(text))
		if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.200q: %v, want %q", text, err, want)
		}
	}
	many := container + strings.Repeat("  ports: 1\n", 50)
	if _, err := Parse([]byte(many)); err == nil || !strings.HasSuffix(err.Error(), "\nand more") || strings.Count(err.Error(), "\n") != maxProblems {
		t.Errorf("many problems: %v", err)
	}
}

func TestAnchorsAndMerges(t *testing.T) {
	got, err := Parse([]byte("name: a\nkind: container\ncontainer: &c\n  image: x\n  env: &e {A: 1}\n---\nname: b\nkind: CONTAINER\ncontainer:\n  image: y\n"))
	if err != nil || len(got) != 2 {
		t.Fatalf("%v, %v", got, err)
	}
	got, err = Parse([]byte("name: a\nkind: Container\ncontainer:\n  ports:\n  - &p {containerPort: 80, hostPort: 80}\n  - {<<: *p, hostPort: 81}\n  - *p\n"))
	if err != nil {
		t.Fatal(err)
	}
	if ports := got[0].Workload.GetContainer().GetPorts(); len(ports) != 3 || ports[1].GetContainerPort() != 80 || ports[1].GetHostPort() != 81 || ports[2].GetHostPort() != 80 {
		t.Errorf("ports %v", ports)
	}
}

func TestVolumeSize(t *testing.T) {
	for in, want := range map[string]uint64{"32MiB": 32, "500M": 500, "10G": 10240, "1TiB": 1 << 20, "1.5GiB": 1536, " 64MiB ": 64} {
		if got, err := VolumeSize(in, 1); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
	}
	if got, err := VolumeSize("512", 1<<20); err != nil || got != 512 {
		t.Errorf("512 without a unit, in MiB: %d, %v", got, err)
	}
	for _, in := range []string{"1", "31", "1048577", "9223372036854775807", "99999999999"} {
		if got, err := VolumeSize(in, 1<<20); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
}

// The configurations of the network in examples are read as they are meant.
func TestNetworkExamples(t *testing.T) {
	files, err := filepath.Glob("../../../examples/appliance/network/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		c := &capsulev1.NetworkConfig{}
		if err := Message(data, c); err != nil || c.GetIpv4().GetMethod() == capsulev1.IPv4Method_IPV4_METHOD_UNSPECIFIED || c.GetLink() == "" && len(c.GetBond().GetLinks()) != 2 {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}

// Any text is refused with its problems, or read; and what was read is read again from what the API makes of it.
func FuzzParse(f *testing.F) {
	f.Add([]byte(documented))
	f.Add([]byte("name: a\nkind: Container\ncontainer: &c {env: &e {<<: *e}}\n"))
	f.Add([]byte(`{"name":"a","kind":"WORKLOAD_KIND_MICRO_VM","microVm":{"image":"x","env":{"A":"\u001b"}}}`))
	files, _ := filepath.Glob("../../../examples/appliance/*.yaml")
	for _, name := range files {
		if data, err := os.ReadFile(name); err == nil {
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		objects, err := Parse(data)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("class %v: %v", errdefs.ClassOf(err), err)
			}
			return
		}
		for _, o := range objects {
			if o.Volume != nil {
				continue
			}
			again, err := protojson.Marshal(o.Workload)
			if err != nil {
				if !strings.Contains(err.Error(), "UTF-8") {
					t.Errorf("no JSON of it: %v", err)
				}
				continue
			}
			if strings.ContainsFunc(string(again), func(r rune) bool { return !unicode.IsPrint(r) }) {
				continue // YAML has no such characters
			}
			if got, err := Parse(again); err != nil || len(got) != 1 || !proto.Equal(got[0].Workload, o.Workload) {
				t.Errorf("%s became %v, %v", again, got, err)
			}
		}
	})
}
