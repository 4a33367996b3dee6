package stickyvm

import (
	"os"
	"strings"
	"testing"
)

func TestVMName(t *testing.T) {
	data, err := os.ReadFile("../../../../api/contract/testdata/vmnames.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if got := vmName(f[0], f[1]); got != f[2] {
			t.Errorf("%s/%s is %s, want %s", f[0], f[1], got, f[2])
		}
	}
}
