//go:build vm

package cocoond_test

import (
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestSavedWhileBooting saves a VM as soon as its process runs, while the firmware reads the kernel. Its clone
// continues to boot from there and starts its main process with its own identity. So does the VM itself after it was
// hibernated at such a moment.
func TestSavedWhileBooting(t *testing.T) {
	n := newNode(t)
	launch := func(name string) {
		t.Helper()
		_, err := n.Launch(t.Context(), vm.Spec{
			Name: name, Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
			Process: vm.Process{Entrypoint: []string{"sh", "-c", "n=0; while :; do n=$((n+1)); echo count $n; sleep 0.1; done"}},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	launch("web")
	if _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "early"}); err != nil {
		t.Fatal(err)
	}
	launch("sleeper")
	if _, err := n.Hibernate(t.Context(), "sleeper", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "early", Name: "copy"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Wake(t.Context(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "copy", "sleeper"} {
		r := n.ready(name)
		n.until(name+" counts", func() bool { return len(n.counts(name)) > 3 })
		if got := n.sh(name, "hostname; ip -4 addr show eth0 | grep -c "+r.NICs[0].IP+"; cat /sys/class/net/eth0/address"); got != name+"\n1\n"+r.NICs[0].MAC {
			t.Errorf("%s is %q, want %+v", name, got, r.NICs[0])
		}
	}
}
