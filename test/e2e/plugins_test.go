//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/csinode/csitest"
)

// plugins makes a folder for the registration of CSI drivers, $CSI_PLUGINS, for the scripts of such drivers. For the script csi, it starts
// some, which register in $CSI_PLUGINS: csi.test and csi.attached.test mount folders, and
// csi.spiffe.io is the program that the script starts, which has its socket at $SPIFFE_SOCKET. $DATA is
// the folder of volume v1 of csi.test.
func plugins(t *testing.T, env *testscript.Env) error {
	script := filepath.Base(env.WorkDir)
	if script != "script-csi" && script != "script-csihostpath" {
		return nil
	}
	dir, err := os.MkdirTemp("", "cocoon-e2e-csi-") // short, for sockets
	if err != nil {
		return err
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	env.Setenv("CSI_PLUGINS", dir)
	socket := filepath.Join(dir, "driver", "csi.sock")
	if err := os.Mkdir(filepath.Dir(socket), 0o700); err != nil {
		return err
	}
	if script != "script-csi" {
		return nil
	}
	env.Setenv("SPIFFE_SOCKET", socket)
	able := []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS}
	for _, o := range []csitest.Options{
		{Name: "csi.test", Mount: true, Able: able, Topology: map[string]string{"topology.csi.test/rack": "r1"}},
		{Name: "csi.attached.test", Mount: true, Able: able, MaxVolumes: 7},
		{Name: "csi.spiffe.io", Endpoint: socket},
	} {
		d := csitest.Start(t, o)
		d.Register(dir)
		if o.Name == "csi.test" {
			env.Setenv("DATA", d.Folder("v1"))
		}
	}
	return nil
}
