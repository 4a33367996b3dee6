package contract

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestResolveConnType(t *testing.T) {
	for _, c := range []struct {
		spec VMSpec
		port int32
		want ConnType
	}{
		{VMSpec{}, 0, ConnSSH},
		{VMSpec{OS: OSLinux}, 5900, ConnVNC},
		{VMSpec{OS: OSWindows}, 0, ConnRDP},
		{VMSpec{OS: OSWindows}, 5900, ConnVNC},
		{VMSpec{OS: OSAndroid}, 0, ConnADB},
		{VMSpec{OS: OSMacOS}, 0, ConnSSH},
		{VMSpec{OS: OSAndroid, ConnType: ConnSSH}, 5900, ConnSSH},
	} {
		if got := ResolveConnType(c.spec, VMRuntime{VNCPort: c.port}); got != c.want {
			t.Errorf("%+v with port %d: %s, not %s", c.spec, c.port, got, c.want)
		}
	}
}

// Port 0 means no port: it is never written, and an unreadable value also means no port.
func TestVNCPort(t *testing.T) {
	for text, want := range map[string]int32{"0": 0, "5901": 5901, "": 0} {
		rt, err := ParseVMRuntime(map[string]string{KeyVNCPort: text})
		if err != nil || rt.VNCPort != want {
			t.Errorf("%q: %d, %v", text, rt.VNCPort, err)
		}
	}
	if rt, err := ParseVMRuntime(map[string]string{KeyVNCPort: "many"}); err == nil || rt.VNCPort != 0 {
		t.Errorf("%d, %v", rt.VNCPort, err)
	}
	out := map[string]string{KeyVNCPort: "5901"}
	VMRuntime{}.Apply(out)
	if _, ok := out[KeyVNCPort]; ok {
		t.Error("a port of 0 is written")
	}
}

// The reference contains the key of every annotation exactly once.
func TestReferenceIsWhole(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "contract.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := 0
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && strings.HasPrefix(v.Names[0].Name, "Key") {
			declared++
		}
		return true
	})
	seen := map[string]bool{}
	for _, e := range Reference() {
		if seen[e.Key] || e.Text == "" || e.Who == "" {
			t.Errorf("%+v", e)
		}
		seen[e.Key] = true
	}
	if len(seen) != declared {
		t.Errorf("%d keys are declared, %d described", declared, len(seen))
	}
}

// Any annotations can be read without a panic, and the values that were read survive a write and a second read.
func FuzzApply(f *testing.F) {
	f.Add("run", "10Gi", "true", "80", "/srv/x", "10.0.0.1")
	f.Add("\x00", "-1", "TRUE", "65536", "../x", "fe80::1%eth0")
	f.Fuzz(func(t *testing.T, mode, storage, flag, port, dir, ip string) {
		in := map[string]string{
			KeyMode: mode, KeyStorage: storage, KeyManaged: flag, KeyForcePull: flag, KeyProbePort: port, KeyVNCPort: port,
			KeyCloneFromDir: dir, KeyIP: ip, KeyName: dir, KeyOS: mode, KeySnapshotPolicy: mode, KeyLifecycleState: mode, KeyGeneration: port,
		}
		s, _ := ParseVMSpec(in)
		rt, _ := ParseVMRuntime(in)
		_, _ = ParseLifecycle(in)
		out := map[string]string{}
		s.Apply(out)
		rt.Apply(out)
		again, err := ParseVMSpec(out)
		if err != nil {
			t.Fatalf("what was written is bad: %v", err)
		}
		if s.Storage.Cmp(again.Storage) != 0 {
			t.Fatalf("storage %s became %s", &s.Storage, &again.Storage)
		}
		s.Storage = again.Storage
		if d := diff.Of(s, again); d != "" {
			t.Fatalf("read back: %s", d)
		}
		if other, err := ParseVMRuntime(out); err != nil {
			t.Fatalf("%+v: %v", rt, err)
		} else if d := diff.Of(rt, other); d != "" {
			t.Fatalf("read back: %s", d)
		}
	})
}
