package bridge

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/networktest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func build(t testing.TB, cfg Config) *Network {
	t.Helper()
	n, err := New(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestContract(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for name, cfg := range map[string]Config{
		"guarded":  {NAT: true},
		"isolated": {Unguarded: true, Isolation: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			networktest.Run(t, func(t testing.TB, dir, subnet string) network.Network {
				cfg := cfg
				cfg.StateDir, cfg.Subnet, cfg.NetNS = dir, subnet, namespaceOf(t, dir)
				return build(t, cfg)
			})
		})
	}
}

// namespaceOf returns the namespace that belongs to dir, created at the first call. When the test ends it must be empty.
func namespaceOf(t testing.TB, dir string) string {
	t.Helper()
	link := filepath.Join(dir, "netns")
	if path, err := os.Readlink(link); err == nil {
		return path
	}
	path := netns.New(t)
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Do(t, path, func() error { assertClean(t); return nil }) })
	return path
}
