//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/testkit/nfsserver"
)

type nfsKey struct{}

// exports makes an NFS server for the script nfs, which does not run yet: $NFS_SERVER is its address, and $EXPORTED the folder of the host
// that it exports as /data.
func exports(t *testing.T, env *testscript.Env) error {
	if filepath.Base(env.WorkDir) != "script-nfs" {
		return nil
	}
	dir := filepath.Join(env.WorkDir, "exported")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	env.Values[nfsKey{}] = nfsserver.New(t, dir)
	env.Setenv("NFS_SERVER", nfsserver.Addr)
	env.Setenv("EXPORTED", dir)
	return nil
}

// nfsServer controls the server of exports: nfs-server start|kill.
func nfsServer(ts *testscript.TestScript, neg bool, args []string) {
	s, ok := ts.Value(nfsKey{}).(*nfsserver.Server)
	if neg || !ok || len(args) != 1 {
		ts.Fatalf("usage: nfs-server start|kill, in the script nfs")
	}
	switch args[0] {
	case "start":
		s.Start()
	case "kill":
		s.Kill()
	default:
		ts.Fatalf("nfs-server: unknown verb %s", args[0])
	}
}
