package netns

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

func TestEveryGoroutineAndChildIsInside(t *testing.T) {
	Require(t)
	outside, err := os.Readlink("/proc/" + parent(t) + "/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan string)
	for range 8 {
		go func() {
			ns, _ := os.Readlink(threadNS)
			seen <- ns
		}()
	}
	for range 8 {
		if ns := <-seen; ns == outside || ns == "" {
			t.Errorf("a goroutine runs in %q, the host is %q", ns, outside)
		}
	}
	out, err := exec.Command("readlink", "/proc/self/ns/net").Output()
	if err != nil || strings.TrimSpace(string(out)) == outside {
		t.Errorf("a child runs in %q (%v)", out, err)
	}
}

func TestNewIsAnotherOne(t *testing.T) {
	Require(t)
	path := New(t)
	Do(t, path, func() error {
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "only-there"}})
	})
	if _, err := netlink.LinkByName("only-there"); err == nil {
		t.Error("a link made in the new namespace is seen in ours")
	}
	Do(t, path, func() error {
		_, err := netlink.LinkByName("only-there")
		return err
	})
}

// TestNothingIsInherited: on a host that forwards packets, or has no IPv6, tests find what they find on others.
func TestNothingIsInherited(t *testing.T) {
	Require(t)
	Do(t, New(t), func() error {
		for key, value := range presumed {
			other := map[string]string{"0": "1", "1024": "80", "1\t0": "0\t7"}[value]
			if err := os.WriteFile("/proc/sys/net/"+key, []byte(other), 0o644); err != nil {
				return err
			}
		}
		if err := presume(); err != nil {
			return err
		}
		for key, value := range presumed {
			got, err := os.ReadFile("/proc/sys/net/" + key)
			if err != nil || strings.TrimSpace(string(got)) != value {
				t.Errorf("%s is %q (%v), want %q", key, got, err, value)
			}
		}
		return nil
	})
}

func parent(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	return f[1]
}
