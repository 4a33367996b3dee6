package cocoon

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/network/cni"
)

func TestKubeletOfEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cocoond.env")
	if kubelet(file) != nil {
		t.Error("there is no file")
	}
	for text, want := range map[string][]string{
		"#COCOOND_CRI_SOCKET=/run/cri.sock\nCOCOOND_LOG_LEVEL=info\n":                                                     nil,
		"COCOOND_CRI_SOCKET=/run/cri.sock\n":                                                                              {"/run/cri.sock", "/run/containerd/containerd.sock", "", cni.DefaultConfDir},
		"COCOOND_CRI_SOCKET=\"/s\"\nCOCOOND_CRI_CONTAINERD=/c\nCOCOOND_NETWORK_MODE=cni\nCOCOOND_CNI_CONF_DIR=/etc/net.d": {"/s", "/c", "cni", "/etc/net.d"},
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		k := kubelet(file)
		if k == nil {
			if want != nil {
				t.Errorf("%q: no kubelet", text)
			}
			continue
		}
		if got := []string{k.Socket, k.Containerd, k.NetworkMode, k.ConfDir}; !slices.Equal(got, want) || len(k.BinDirs) == 0 {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
