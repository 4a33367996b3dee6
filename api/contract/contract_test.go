package contract

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func full() VMSpec {
	return VMSpec{
		Name: "vk-default-a-0", Image: "repo/app:1", Mode: ModeRun, OS: OSLinux, Storage: resource.MustParse("10Gi"),
		Network: "lab", SnapshotPolicy: SnapshotNever, Managed: true, ForcePull: true, ForkFrom: "vk-default-b-0",
		ConnType: ConnSSH, Backend: BackendQEMU, NoDirectIO: true, ProbePort: 8080, CloneFromDir: "/srv/x",
	}
}

func TestApplySetsAndClears(t *testing.T) {
	m := map[string]string{"other": "kept"}
	full().Apply(m)
	got, err := ParseVMSpec(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := full(); got.Storage.Cmp(want.Storage) != 0 {
		t.Errorf("storage %s, want %s", got.Storage.String(), want.Storage.String())
	} else {
		got.Storage = want.Storage
		if d := diff.Of(want, got); d != "" {
			t.Errorf("read back: %s", d)
		}
	}
	VMSpec{}.Apply(m)
	if !maps.Equal(m, map[string]string{"other": "kept"}) {
		t.Errorf("an empty spec left %v", m)
	}

	rt := VMRuntime{ID: "abc", IP: "10.0.0.7", VNCPort: 5901}
	rt.Apply(m)
	if got, err := ParseVMRuntime(m); err != nil {
		t.Errorf("read back: %v", err)
	} else if d := diff.Of(rt, got); d != "" {
		t.Errorf("read back: %s", d)
	}
	VMRuntime{}.Apply(m)
	SetHibernate(m, true)
	if !Hibernate(m) {
		t.Error("hibernate was not set")
	}
	SetHibernate(m, false)
	if !maps.Equal(m, map[string]string{"other": "kept"}) {
		t.Errorf("clearing left %v", m)
	}
}

func TestParseReportsEveryBadKey(t *testing.T) {
	_, err := ParseVMSpec(map[string]string{
		KeyName: " padded", KeyMode: "teleport", KeyOS: "plan9", KeyStorage: "-1Gi", KeySnapshotPolicy: "maybe",
		KeyManaged: "yes", KeyForcePull: "1", KeyConnType: "telnet", KeyBackend: "bochs", KeyNoDirectIO: "True",
		KeyProbePort: "70000", KeyCloneFromDir: "../x", KeyImage: "fine",
	})
	errs, ok := errors.AsType[Errors](err)
	if !ok || len(errs) != 12 {
		t.Fatalf("%d errors in %v, want 12", len(errs), err)
	}
	for _, e := range errs {
		if !strings.Contains(err.Error(), e.Key) || e.Reason == "" {
			t.Errorf("the message does not tell of %s: %v", e.Key, err)
		}
	}
	if _, err := ParseVMRuntime(map[string]string{KeyIP: "300.1.1.1", KeyVNCPort: "-1"}); err == nil {
		t.Error("a bad address and port were taken")
	}
}

func TestParseOfNothing(t *testing.T) {
	if got, err := ParseVMSpec(nil); err != nil || got != (VMSpec{}) {
		t.Errorf("%+v, %v", got, err)
	}
	if Hibernate(map[string]string{KeyHibernate: "TRUE"}) {
		t.Error("only the literal true hibernates")
	}
}

// For any annotations, parsing must not panic, and the parsed values must survive Apply and a second parse.
func FuzzParse(f *testing.F) {
	f.Add("vm", "10Gi", "run", "linux", "true", "8080", "/srv/x", "10.0.0.1")
	f.Add("4294967295,1", "1Gi", "run", "linux", "true", "1", "/", "::1")
	f.Add("", "1e3", "", "", "", "0", "", "::1")
	f.Add("\x00", "9223372036854775807Ei", "RUN", " ", "false", "+1", "/a/../b", "fe80::1%eth0")
	f.Fuzz(func(t *testing.T, name, storage, mode, os, flag, port, dir, ip string) {
		in := map[string]string{
			KeyName: name, KeyStorage: storage, KeyMode: mode, KeyOS: os, KeyManaged: flag, KeyForcePull: flag,
			KeyProbePort: port, KeyCloneFromDir: dir, KeyIP: ip, KeyVNCPort: port, KeyID: name,
		}
		s, err := ParseVMSpec(in)
		if err != nil {
			_ = err.Error()
		}
		out := map[string]string{}
		s.Apply(out)
		again, err := ParseVMSpec(out)
		if err != nil {
			t.Fatalf("what Apply wrote cannot be read: %v", err)
		}
		if again.Storage.Cmp(s.Storage) != 0 {
			t.Fatalf("storage changed from %s to %s", s.Storage.String(), again.Storage.String())
		}
		again.Storage, s.Storage = resource.Quantity{}, resource.Quantity{}
		if d := diff.Of(s, again); d != "" {
			t.Fatalf("read back: %s", d)
		}
		kernel, initrd := KernelSums(map[string]string{KeyKernelSums: name})
		if k, i := KernelSums(map[string]string{KeyKernelSums: KernelSumsText(kernel, initrd)}); k != kernel || i != initrd {
			t.Fatalf("%q: the checksums %d and %d become %d and %d", name, kernel, initrd, k, i)
		}
		rt, _ := ParseVMRuntime(in)
		out = map[string]string{}
		rt.Apply(out)
		if back, err := ParseVMRuntime(out); err != nil {
			t.Fatalf("%+v: %v", rt, err)
		} else if d := diff.Of(rt, back); d != "" {
			t.Fatalf("read back: %s", d)
		}
	})
}
