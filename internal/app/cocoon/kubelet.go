package cocoon

import (
	"cmp"
	"os"
	"strings"

	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/doctor"
	"cocoonstack.io/cocoon/internal/network/cni"
)

// environment is the file with the settings of the machine's cocoond.
const environment = "/etc/cocoon/cocoond.env"

// kubelet is what the doctor examines of a kubelet's side, as the file of cocoond's environment says; nil if it says nothing of a kubelet.
func kubelet(file string) *doctor.Kubelet {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	set := map[string]string{}
	for line := range strings.Lines(string(text)) { // as systemd reads it: a line that begins with # has no variable
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			set[name] = strings.Trim(value, `"'`)
		}
	}
	if set["COCOOND_CRI_SOCKET"] == "" {
		return nil
	}
	bins := cni.DefaultBinDirs
	if dirs := set["COCOOND_CNI_BIN_DIR"]; dirs != "" {
		bins = strings.Split(dirs, ",")
	}
	return &doctor.Kubelet{
		Socket: set["COCOOND_CRI_SOCKET"], Containerd: cmp.Or(set["COCOOND_CRI_CONTAINERD"], kubeletnode.ContainerdSocket),
		NetworkMode: set["COCOOND_NETWORK_MODE"], ConfDir: cmp.Or(set["COCOOND_CNI_CONF_DIR"], cni.DefaultConfDir), BinDirs: bins, Ask: kubeletnode.Ask,
	}
}
