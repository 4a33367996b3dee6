package testguest

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// Bridged makes a network namespace in which a bridge with the address 10.9.8.1/24 has n taps, tap0 and so on. It goes with the test.
func Bridged(t testing.TB, n int) (ns string) {
	t.Helper()
	ns = fmt.Sprintf("cocoon-test-%d", os.Getpid())
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	ip("netns", "add", ns)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() })
	ip("-n", ns, "link", "add", "br0", "type", "bridge")
	ip("-n", ns, "addr", "add", "10.9.8.1/24", "dev", "br0")
	ip("-n", ns, "link", "set", "br0", "up")
	for tap := range n {
		name := fmt.Sprintf("tap%d", tap)
		ip("-n", ns, "tuntap", "add", name, "mode", "tap", "vnet_hdr")
		ip("-n", ns, "link", "set", name, "master", "br0", "up")
	}
	return ns
}
