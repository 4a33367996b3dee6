package cocoond

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestNetworksAreChosen(t *testing.T) {
	dir := t.TempDir()
	for file, name := range map[string]string{"10-a.conflist": "alpha", "20-b.conflist": "beta", "30-a.conflist": "alpha"} {
		text := `{"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [{"type": "bridge"}]}`
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
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
			if err != nil || !slices.Equal(n.names(), tt.want) {
				t.Fatalf("%v, want %v (%v)", n.names(), tt.want, err)
			}
			if _, first := n.byName(); len(tt.want) > 0 && first != tt.want[0] {
				t.Errorf("the default one is %s", first)
			}
		})
	}
}
