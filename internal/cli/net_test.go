package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/network"
)

func TestNet(t *testing.T) {
	run := serve(t, &node{})
	code, out, errs := run("", "net", "status")
	for _, want := range []string{"default (default)", "10.88.0.0/24", "249", "down: no plugin"} {
		if !strings.Contains(out, want) {
			t.Errorf("status (%d, %s) does not show %q:\n%s", code, errs, want, out)
		}
	}
	if code, out, _ := run("", "net", "conflist", "--bridge", "br7"); code != 0 || out != network.Conflist("br7") {
		t.Errorf("conflist: %d, %s", code, out)
	}
	dir := filepath.Join(t.TempDir(), "net.d")
	for range 2 {
		if code, _, errs := run("", "net", "conflist", "--install", "--conf-dir", dir); code != 0 {
			t.Errorf("install: %d, %s", code, errs)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, network.ConflistFile)); err != nil || string(b) != network.Conflist("cocoon0") {
		t.Errorf("installed %s (%v)", b, err)
	}
	if code, _, errs := run("", "net", "conflist", "--install", "--conf-dir", dir, "--bridge", "br7"); code == 0 || !strings.Contains(errs, "different") {
		t.Errorf("another conflist is there: %d, %s", code, errs)
	}
	for link, want := range map[string]string{"lo": "not a bridge", "nowhere0": "nowhere0"} {
		if code, out, errs := run("", "net", "adopt", link); code == 0 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("adopt %s: %d, %s", link, code, errs)
		}
	}
	if code, _, errs := run("", "net", "teardown"); code == 0 || !strings.Contains(errs, "VM web runs") {
		t.Errorf("teardown: %d, %s", code, errs)
	}
}
