package cli_test

import (
	"strings"
	"testing"
)

func TestKeptFirmware(t *testing.T) {
	run := serve(t, &node{})
	if code, out, _ := run("", "vm", "firmware"); code != 0 || !strings.Contains(out, "prod") || !strings.Contains(out, "db") || !strings.Contains(out, "uid") {
		t.Errorf("list: %d\n%s", code, out)
	}
	if code, out, _ := run("", "vm", "firmware", "-o", "json"); code != 0 || !strings.Contains(out, `"key": "uid"`) {
		t.Errorf("as JSON: %d\n%s", code, out)
	}
	if code, _, text := run("", "vm", "firmware", "rm", "db", "k", "--namespace", "dev", "--yes"); code == 0 || !strings.Contains(text, `no state of firmware is kept for VM dev/db with key "k"`) {
		t.Errorf("remove: %d, %s", code, text)
	}
	if code, _, text := run("n\n", "vm", "firmware", "rm", "db", "uid"); code == 0 || strings.Contains(text, "no state") {
		t.Errorf("remove, unconfirmed: %d, %s", code, text)
	}
}
