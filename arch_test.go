// Package cocoon tests the rules of this repository: which packages may import which, in which order the files of the
// largest packages stand, and that every package has a comment.
// It contains no product code.
package cocoon

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "cocoonstack.io/cocoon"

// A layer may import the layers below it. Its other permitted imports, ours and third-party, are listed in it.
type layer struct {
	name     string
	rank     int
	packages []string // folder below the module; a trailing slash means it and all below it
	third    []string // third-party modules allowed, by prefix; nil: none; "*": any
}

// The table of docs/architecture.md. The first layer that names a package applies.
var layers = []layer{
	{"L7 cmd", 7, []string{"cmd/"}, nil},
	{"L6 app", 6, []string{"internal/app/"}, []string{"*"}},

	{"L5 cli", 5, []string{"internal/cli/"}, []string{"github.com/spf13/", "golang.org/x/"}},
	{"L5 capsulectl", 5, []string{"internal/capsulectl/"}, []string{"github.com/spf13/", "golang.org/x/", "google.golang.org/", "go.yaml.in/yaml/v3"}},
	{"L5 nodeapi", 5, []string{"internal/nodeapi/"}, []string{"google.golang.org/", "golang.org/x/"}},
	{"L5 doctor", 5, []string{"internal/doctor/"}, []string{"golang.org/x/sys/", "github.com/google/nftables"}},
	{"L5 guest agent", 5, []string{"internal/guestagent/"}, []string{"github.com/cenkalti/backoff", "google.golang.org/", "golang.org/x/", "github.com/creack/pty", "github.com/vishvananda/"}},
	{"L5 registry", 5, []string{"internal/registry/"}, []string{"github.com/klauspost/compress", "github.com/prometheus", "github.com/minio/", "github.com/opencontainers/", "golang.org/x/"}},
	{"L5 cri", 5, []string{"internal/cri/"}, []string{"github.com/cenkalti/backoff", "google.golang.org/", "golang.org/x/", "k8s.io/apimachinery/pkg/api/resource", "k8s.io/cri-api/", "k8s.io/cri-streaming/", "k8s.io/utils/exec"}},
	{"L5 appliance", 5, []string{"internal/appliance/"}, []string{"github.com/beevik/ntp", "github.com/cenkalti/backoff", "github.com/google/uuid", "github.com/insomniacslk/dhcp", "github.com/vishvananda/netlink", "google.golang.org/", "golang.org/x/"}},
	{"L5 kube", 5, []string{"internal/kube/"}, []string{"kubevirt.io/api/", "kubevirt.io/containerized-data-importer-api/", "k8s.io/", "google.golang.org/grpc", "github.com/kubernetes-csi/external-snapshotter/", "sigs.k8s.io/", "github.com/virtual-kubelet/", "github.com/gorilla/mux", "github.com/prometheus", "golang.org/x/", "go.opentelemetry.io/", "gopkg.in/evanphx/json-patch.v4"}},

	{"L4 engine", 4, []string{"internal/engine/"}, []string{"github.com/cenkalti/backoff/"}},
	{"L4 catalog", 4, []string{"internal/catalog/"}, nil},

	{"L2 contracts", 2, []string{"internal/hypervisor", "internal/image", "internal/network", "internal/guest", "internal/journal", "internal/snapshot", "internal/volume", "internal/csinode", "internal/container", "internal/guest/console/", "internal/snapshot/artifact/", "internal/snapshot/bundle/"}, nil},
	{"L3 CSI drivers", 3, []string{"internal/csinode/"}, []string{"github.com/cenkalti/backoff", "github.com/container-storage-interface/spec", "github.com/fsnotify/fsnotify", "golang.org/x/sys/", "google.golang.org/grpc", "k8s.io/kubelet/pkg/apis/pluginregistration/"}},
	{"L3 jail", 3, []string{"internal/hypervisor/jail/", "internal/hypervisor/savedmemory/", "internal/hypervisor/pager/", "internal/hypervisor/tsc/"}, []string{"github.com/cenkalti/backoff", "golang.org/x/sys/"}},
	{"L3 qemu", 3, []string{"internal/hypervisor/qemu/"}, []string{"github.com/cenkalti/backoff", "golang.org/x/"}},
	{"L3 cloud hypervisor", 3, []string{"internal/hypervisor/cloudhypervisor/"}, []string{"github.com/cenkalti/backoff", "golang.org/x/sys/"}},
	{"L3 firecracker", 3, []string{"internal/hypervisor/firecracker/"}, []string{"github.com/cenkalti/backoff", "github.com/vishvananda/netlink", "golang.org/x/sys/"}},
	{"L3 fake hypervisor", 3, []string{"internal/hypervisor/fake/"}, nil},
	{"L3 hypervisor suite", 3, []string{"internal/hypervisor/hypervisortest/"}, []string{"golang.org/x/sys/"}},
	{"L3 image", 3, []string{"internal/image/"}, []string{"github.com/cenkalti/backoff", "sigs.k8s.io/yaml", "github.com/google/go-containerregistry", "github.com/klauspost/compress", "github.com/therootcompany/xz", "golang.org/x/"}},
	{"L3 snapshot", 3, []string{"internal/snapshot/"}, []string{"github.com/google/go-containerregistry", "github.com/klauspost/compress", "golang.org/x/"}},
	{"L3 volume", 3, []string{"internal/volume/"}, []string{"golang.org/x/"}},
	{"L3 network", 3, []string{"internal/network/"}, []string{"github.com/vishvananda/", "github.com/google/nftables", "github.com/insomniacslk/dhcp", "github.com/containernetworking/cni", "github.com/miekg/dns", "golang.org/x/", "github.com/mdlayher/"}},
	{"L3 guest", 3, []string{"internal/guest/agent/"}, []string{"google.golang.org/", "golang.org/x/"}},
	{"L3 qemu-guest-agent", 3, []string{"internal/guest/qga/"}, []string{"github.com/cenkalti/backoff"}},
	{"L3 container log", 3, []string{"internal/container/logfile/"}, []string{"github.com/fsnotify/fsnotify", "golang.org/x/sys/"}},
	{"L3 shim log", 3, []string{"internal/container/containerd/shimlog/"}, []string{"github.com/cenkalti/backoff", "github.com/containerd/containerd/api/runtime/task/", "github.com/containerd/ttrpc"}},
	{"L3 containerd", 3, []string{"internal/container/containerd/"}, []string{"github.com/cenkalti/backoff", "github.com/containerd/", "github.com/distribution/reference", "github.com/moby/sys/signal", "github.com/opencontainers/", "golang.org/x/", "google.golang.org/grpc", "google.golang.org/protobuf"}},
	{"L3 journal", 3, []string{"internal/journal/"}, []string{"modernc.org/sqlite", "golang.org/x/sys/"}},

	{"L2 wire", 2, []string{"internal/nodewire/", "internal/nodeclient/", "internal/nodejson/", "internal/nodecli/", "internal/guest/link/"}, []string{"google.golang.org/", "golang.org/x/sys/"}},

	{"L2 wire", 2, []string{"internal/capsulewire/"}, []string{"google.golang.org/grpc/credentials", "github.com/golang-jwt/jwt/"}},
	{"L2 wire", 2, []string{"internal/mdns/"}, []string{"github.com/miekg/dns", "golang.org/x/"}},

	{"L1 vocabulary", 1, []string{"internal/vm/"}, nil},
	{"L1 OCI client", 1, []string{"internal/ociclient/"}, []string{"github.com/cenkalti/backoff", "github.com/google/go-containerregistry", "github.com/opencontainers/go-digest"}},
	{"L1 disk overlays", 1, []string{"internal/qcow2/"}, []string{"golang.org/x/sys/"}},
	{"L1 file systems", 1, []string{"internal/ext4/"}, nil},
	{"L1 text interface", 1, []string{"internal/textui/"}, []string{"github.com/spf13/", "golang.org/x/term", "github.com/schollz/progressbar/"}},
	{"L1 disks with file systems", 1, []string{"internal/filesystem/"}, []string{"golang.org/x/sys/"}},
	{"L1 settings", 1, []string{"internal/settings/"}, []string{"github.com/spf13/pflag", "sigs.k8s.io/yaml"}},
	{"L1 clone hints", 1, []string{"internal/postclone/"}, nil},
	{"L1 cloud-init", 1, []string{"internal/cloudinit/"}, []string{"go.yaml.in/yaml/v3"}},
	{"L1 probes", 1, []string{"internal/probing/"}, nil},
	{"L1 manifests", 1, []string{"deploy/"}, nil},
	{"L1 api", 1, []string{"api/"}, []string{"google.golang.org/", "k8s.io/apimachinery", "k8s.io/api"}},
	{"L0 ground", 0, []string{"internal/errdefs/", "internal/blockdev/", "internal/filling/", "internal/hostdir/", "internal/logging/", "internal/undo/", "internal/proc/", "internal/atomicfile/", "internal/batch/", "internal/filelock/", "internal/keylock/", "internal/sparse/", "internal/version/", "internal/reach/", "internal/ociname/", "internal/unixsocket/"}, []string{"github.com/cenkalti/backoff", "golang.org/x/sys/"}},
	{"L0 grpc errors", 0, []string{"internal/grpcerr/"}, []string{"google.golang.org/"}},

	{"tests", 9, []string{"internal/testkit/", "test/", "examples/", "hack/", "guest/", "os/"}, []string{"*"}},
}

// exceptions are imports that the table forbids and we allow for now, "importer -> imported". It starts empty and should stay so.
var exceptions = map[string]bool{}

// rooms are the packages inside a layer that is a staircase of its own, from the ground up: each may import only those
// before it.
var rooms = map[string][]string{
	"internal/image":      {".", "compress", "disk", "oci", "seed", "translate", "fetch", "distribution", "pull", "local"},
	"internal/hypervisor": {".", "jail", "savedmemory", "pager", "tsc", "fake", "qemu/qmp", "qemu/stream", "qemu", "cloudhypervisor", "firecracker"},
	"internal/engine":     {"serial", "proclog", "coredisk", "firmware", "process", "pool", "session", "."},
	"internal/appliance":  {"bootctl", "bundle", "disk", "clock", "uplink", "pid1", "statecopy", "update", "identity", "install", "workload", "logins", "desired", "reconcile", "microvm", "containers", "machine", "."},
	"internal/container":  {".", "logfile", "containerd/shimlog", "containerd"},
	"internal/capsulectl": {"manifest", "config", "tree", "."},
	"internal/cri":        {"relay", "convert", "crilog", "image", "pod", "."},
	"internal/kube": {
		"convert", "imagemapping", "pauses", "probe", "servingcert", "stats", "kubelet", "placement",
		"podstatus", "csi", "podvolumes", "podsnapshots", "podhealth", "podprovider", "netpolicy", "storage", "node",
		"kubevirt", "claimnode", "snapshotclass", "machinebase", "upload", "aggregated", "controller", "controller/upload", "controller/datavolume", "controller/virtualmachineinstance", "controller/virtualmachineinstancereplicaset", "controller/virtualmachine", "controller/virtualmachinepool", "controller/virtualmachinesnapshot", "controller/virtualmachinerestore", "controller/virtualmachineclone", "controller/eviction", "controller/hibernation", "controller/unplaced", "controller/kubevirtstatus", "controller/vmplacement", "controller/cocoonset", "admission",
	},
}

// nouns are the L2/L3 packages that must not import each other. They exchange values of package vm.
var nouns = []string{"hypervisor", "image", "network", "guest", "journal", "snapshot", "volume", "csinode", "container"}

type pkg struct {
	ImportPath   string
	Dir          string
	Doc          string
	Standard     bool
	Imports      []string
	TestImports  []string
	XTestImports []string
	GoFiles      []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	list := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,Standard,Imports,TestImports,XTestImports,GoFiles", "./...")
	list.Env = append(list.Environ(), "GOWORK=") // as in a new clone, where only our own go.work would count
	out, err := list.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		t.Fatalf("go list: %v\n%s", err, exit.Stderr)
	} else if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if len(p.GoFiles) > 0 {
			all = append(all, p)
		}
	}
}

func layerOf(rel string) (layer, bool) {
	for _, l := range layers {
		for _, p := range l.packages {
			if rel == strings.TrimSuffix(p, "/") || strings.HasSuffix(p, "/") && strings.HasPrefix(rel+"/", p) {
				return l, true
			}
		}
	}
	return layer{}, false
}

func TestImportsPointOneWay(t *testing.T) {
	for _, p := range packages(t) {
		rel := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		if rel == "" {
			continue
		}
		from, ok := layerOf(rel)
		if !ok {
			t.Errorf("%s stands in no layer: name it in arch_test.go and docs/architecture.md", rel)
			continue
		}
		for _, imp := range p.Imports {
			if why := forbidden(rel, from, imp); why != "" && !exceptions[rel+" -> "+imp] {
				t.Errorf("%s (%s) must not import %s: %s", rel, from.name, imp, why)
			}
		}
		for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if strings.HasPrefix(imp, "github.com/google/go-cmp/") && rel != "internal/testkit/diff" {
				t.Errorf("%s must not import %s: tests compare with internal/testkit/diff", rel, imp)
			}
		}
	}
}

func forbidden(rel string, from layer, imp string) string {
	ours, isOurs := strings.CutPrefix(imp, module+"/")
	if !isOurs {
		if !strings.Contains(strings.SplitN(imp, "/", 2)[0], ".") {
			return "" // standard library
		}
		if slices.ContainsFunc(from.third, func(p string) bool { return p == "*" || strings.HasPrefix(imp, p) }) {
			return ""
		}
		return "this layer may not use that module"
	}
	to, ok := layerOf(ours)
	switch {
	case !ok:
		return "it stands in no layer"
	case from.rank == 9:
		return ""
	case to.rank == 9:
		return "product code must not know tests"
	case from.rank == 7:
		if ours == "internal/app/"+strings.ReplaceAll(strings.TrimPrefix(rel, "cmd/"), "-", "") {
			return ""
		}
		return "a main imports its own app package only"
	case from.rank == 6:
		return ""
	case from.rank == 5 && to.name == "L4 catalog":
		return "doors reach the catalog through an interface that they declare"
	case from.rank == 5 && to.rank == 3:
		return "doors reach implementations through the engine and the contracts"
	case from.rank == 5 && to.rank == 5 && from.name != to.name:
		return "a door knows no other door"
	case from.rank == 4 && to.rank == 3:
		return "engine and catalog know contracts, not implementations"
	case from.rank == 4 && to.rank == 4 && from.name != to.name:
		return "engine and catalog know each other through interfaces"
	case driver(rel) != "" && driver(ours) != "" && driver(rel) != driver(ours):
		return "a driver knows no other driver"
	case to.rank > from.rank:
		return "imports point downwards"
	case from.rank <= 3 && from.name != "L2 wire" && to.rank >= 2 && noun(rel) != noun(ours) && to.name != "L2 wire":
		return "nouns meet in vm, not in each other"
	}
	return ""
}

// driver returns the driver of a hypervisor to which a folder belongs, "" if it belongs to none.
func driver(rel string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(rel, "internal/hypervisor/"), "/")
	if !slices.Contains([]string{"qemu", "cloudhypervisor", "firecracker", "fake"}, name) {
		return ""
	}
	return name
}

// noun returns which of the nouns a folder belongs to, or the folder itself.
func noun(rel string) string {
	parts := strings.Split(rel, "/")
	if len(parts) > 1 && slices.Contains(nouns, parts[1]) {
		return parts[1]
	}
	return rel
}

func TestRoomsPointOneWay(t *testing.T) {
	for parent, steps := range rooms {
		rank := func(path string) int {
			rel, inside := strings.CutPrefix(path, module+"/"+parent)
			if !inside {
				return -1
			}
			return slices.Index(steps, cmp.Or(strings.TrimPrefix(rel, "/"), "."))
		}
		for _, p := range packages(t) {
			if !strings.HasPrefix(p.ImportPath+"/", module+"/"+parent+"/") || strings.HasSuffix(p.ImportPath, "test") {
				continue
			}
			from := rank(p.ImportPath)
			if from < 0 {
				t.Errorf("%s has no place in the staircase of %s: name it in arch_test.go", p.ImportPath, parent)
			}
			for _, imp := range p.Imports {
				if to := rank(imp); to > from {
					t.Errorf("%s must not import %s, which is above it", p.ImportPath, imp)
				}
			}
		}
	}
}
