//go:build vm

package cocoond_test

import (
	"net/http"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// The guest sees the link of an interface as its VM says, also after kill -9 of the daemon, hibernation, a restore, a stop and in a clone. No request
// passes while the link is down.
func TestVMKeepsLinks(t *testing.T) {
	n := newNode(t)
	if _, err := n.Launch(t.Context(), vm.Spec{Name: "web", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}, {LinkDown: true}}}); err != nil {
		t.Fatal(err)
	}
	has := func(ref, when, first, second string) vm.Record {
		t.Helper()
		r := n.ready(ref)
		if got := n.sh(ref, "cat /sys/class/net/eth0/carrier /sys/class/net/eth1/carrier"); got != first+"\n"+second {
			t.Errorf("%s %s: the carriers are %q", ref, when, got)
		}
		return r
	}
	r := has("web", "launched", "1", "0")
	serves := func() bool {
		resp, err := http.Get("http://" + r.NICs[0].IP + ":8080/")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	}
	set := func(nic int, down bool) {
		t.Helper()
		if _, err := n.SetLink(t.Context(), "web", r.NICs[nic].MAC, down); err != nil {
			t.Fatal(err)
		}
	}
	n.until("it serves", serves)
	if _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	set(0, true)
	set(1, false)
	has("web", "changed", "0", "1")
	client := http.Client{Timeout: time.Second}
	if resp, err := client.Get("http://" + r.NICs[0].IP + ":8080/"); err == nil {
		resp.Body.Close()
		t.Error("it serves on a link that is down")
	}
	n.crash()
	has("web", "after a crash", "0", "1")
	if _, err := n.Hibernate(t.Context(), "web", ""); err != nil {
		t.Fatal(err)
	}
	n.crash() // no process holds its taps now
	if _, err := n.Wake(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	has("web", "awake", "0", "1")
	if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "gold", Name: "copy"}); err != nil {
		t.Fatal(err)
	}
	has("copy", "has the links of its source", "1", "0")
	if err := n.Remove(t.Context(), "copy", true); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Restore(t.Context(), "web", "gold"); err != nil {
		t.Fatal(err)
	}
	has("web", "restored", "0", "1")
	if _, err := n.Stop(t.Context(), "web", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Start(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	has("web", "started again", "0", "1")
	set(0, false)
	n.until("it serves again", serves)
	if err := n.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
}
