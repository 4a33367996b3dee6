// Package kubetest gives a test a real Kubernetes control plane: API server, scheduler and controllers, without a node.
// It starts what `make build` made and holds nothing of the product.
package kubetest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Start runs a control plane until the test ends and returns an administrator's access to it. The custom resources of
// Cocoon are installed. args are further arguments of `cocoon up`. It takes about three seconds: start one for a package
// and give each test a namespace of its own.
func Start(t *testing.T, args ...string) *rest.Config {
	t.Helper()
	cocoon := filepath.Join(root(t), "bin", "cocoon")
	// Not t.TempDir: the names of unix sockets must stay short.
	dir, err := os.MkdirTemp("", "kubetest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if out, err := exec.Command(cocoon, append([]string{"up", "--dir", dir, "--nodes", "0", "--detach"}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("start a control plane (make build makes it): %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command(cocoon, "down", "--dir", dir).CombinedOutput(); err != nil {
			t.Errorf("stop the control plane: %v\n%s", err, out)
		}
	})
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 1000, 1000
	return config
}

// root is the folder of the module that the test belongs to.
func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod is above the test")
	return ""
}
