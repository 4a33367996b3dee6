package cocoond

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

func conflist(t *testing.T, dir, file, name string) {
	t.Helper()
	text := `{"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [{"type": "bridge"}]}`
	if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func namesOf(n *networks) []string {
	var out []string
	for _, k := range n.All() {
		out = append(out, k.Name())
	}
	return out
}

func TestNewConflistsAreFound(t *testing.T) {
	dir := t.TempDir()
	conflist(t, dir, "10-a.conflist", "alpha")
	cfg := Config{StateDir: t.TempDir(), Network: NetworkConfig{CNI: CNIConfig{ConfDir: dir}}}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	n, err := newNetworks(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if n.Get("beta") != nil {
		t.Error("there is a network that nobody made")
	}
	conflist(t, dir, "20-b.conflist", "beta")
	conflist(t, dir, "30-c.conflist", "default") // the bridge already has this name
	if got := n.Get("beta"); got == nil || got.Name() != "beta" {
		t.Errorf("the new conflist is not found: %v", got)
	}
	if err := os.Remove(filepath.Join(dir, "10-a.conflist")); err != nil {
		t.Fatal(err)
	}
	if n.Get("alpha") == nil {
		t.Error("a network went with its conflist, and its interfaces are nobody's")
	}
	if err := os.WriteFile(filepath.Join(dir, "40-d.conflist"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n.Get("delta") != nil || n.first() != "default" {
		t.Error("a broken file changed the networks")
	}
	if got, want := namesOf(n), []string{"default", "alpha", "beta"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestNetworksAreChosen(t *testing.T) {
	dir := t.TempDir()
	for file, name := range map[string]string{"10-a.conflist": "alpha", "20-b.conflist": "beta", "30-a.conflist": "alpha"} {
		conflist(t, dir, file, name)
	}
	off := false
	for name, tt := range map[string]struct {
		cfg  NetworkConfig
		want []string
		err  func(error) bool
	}{
		"bridge":           {NetworkConfig{}, []string{"default"}, nil},
		"off":              {NetworkConfig{Enabled: &off, Mode: modeCNI, CNI: CNIConfig{ConfDir: dir}}, nil, nil},
		"both":             {NetworkConfig{CNI: CNIConfig{ConfDir: dir}}, []string{"default", "alpha", "beta"}, nil},
		"cni":              {NetworkConfig{Mode: modeCNI, CNI: CNIConfig{ConfDir: dir}}, []string{"alpha", "beta"}, nil},
		"cni, the other":   {NetworkConfig{Mode: modeCNI, CNI: CNIConfig{ConfDir: dir, Default: "beta"}}, []string{"beta", "alpha"}, nil},
		"cni, none such":   {NetworkConfig{Mode: modeCNI, CNI: CNIConfig{ConfDir: dir, Default: "gamma"}}, nil, errdefs.IsNotFound},
		"cni, empty":       {NetworkConfig{Mode: modeCNI, CNI: CNIConfig{ConfDir: t.TempDir()}}, nil, errdefs.IsFailedPrecondition},
		"one name twice":   {NetworkConfig{Name: "alpha", CNI: CNIConfig{ConfDir: dir}}, nil, errdefs.IsInvalid},
		"no mode":          {NetworkConfig{Mode: "magic"}, nil, errdefs.IsInvalid},
		"a useless choice": {NetworkConfig{CNI: CNIConfig{Default: "alpha"}}, nil, errdefs.IsInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{StateDir: t.TempDir(), Network: tt.cfg}
			err := cfg.complete()
			var n *networks
			if err == nil {
				n, err = newNetworks(cfg, slog.New(slog.DiscardHandler))
			}
			if tt.err != nil {
				if err == nil || !tt.err(err) {
					t.Errorf("error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := namesOf(n); !slices.Equal(got, tt.want) {
				t.Fatalf("%v, want %v", got, tt.want)
			}
			if first := n.first(); len(tt.want) > 0 && first != tt.want[0] {
				t.Errorf("the default one is %s", first)
			}
		})
	}
}

// Policies are about the guests of all namespaces. Whoever acts for one of them may not set any.
func TestOnlyTheOperatorPolices(t *testing.T) {
	cfg := Config{StateDir: t.TempDir()}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	nets, err := newNetworks(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	n := &node{nets: nets}
	tenant := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod", PodUID: "1"})
	if err := n.Police(tenant, network.Policies{Node: "n"}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "prod") {
		t.Errorf("a tenant: %v", err)
	}
	if err := n.Police(t.Context(), network.Policies{Node: "n", Guests: []network.Guest{{}}}); !errdefs.IsInvalid(err) {
		t.Errorf("bad policies: %v", err)
	}
	if err := n.Police(t.Context(), network.Policies{Node: "n"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a network that is not up: %v", err)
	}
}
