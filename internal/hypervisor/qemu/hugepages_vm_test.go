//go:build vm

package qemu

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// hugeMapping matches a part of smaps whose pages have 2 MiB.
var hugeMapping = regexp.MustCompile(`(?s)\nSize:\s+(\d+) kB\nKernelPageSize:\s+2048 kB`)

// The memory of a guest is huge pages, and the node has them back when the VM ends. A VM for which there are too few does not start.
func TestHugePages(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	p.Huge = true
	setAside(t, p.Memory/vm.HugePage)
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", i.PID()))
	if err != nil {
		t.Fatal(err)
	}
	found := int64(0)
	for _, m := range hugeMapping.FindAllStringSubmatch(string(maps), -1) {
		kib, _ := strconv.ParseInt(m[1], 10, 64)
		found += kib << 10
	}
	if found != p.Memory {
		t.Errorf("%d bytes of %d are huge pages", found, p.Memory)
	}
	second := a.plan(t)
	second.Huge = true
	if _, err := d.Launch(t.Context(), second); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a second VM: %v", err)
	}
	if left := left(t, second); len(left) > 0 {
		t.Errorf("left of it: %v", left)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := enoughHugePages(hugePages, hypervisor.Plan{Huge: true, Memory: p.Memory}); err != nil {
		t.Errorf("after its end: %v", err)
	}
}

// setAside gives the node n more huge pages until the test ends.
func setAside(t *testing.T, n int64) {
	t.Helper()
	const path = hugePages + "/nr_hugepages"
	read := func() int64 {
		text, err := os.ReadFile(path)
		if err != nil {
			need.Missing(t, "huge pages: "+err.Error())
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	write := func(n int64) error { return os.WriteFile(path, []byte(strconv.FormatInt(n, 10)), 0o600) }
	was := read()
	t.Cleanup(func() {
		if err := write(was); err != nil {
			t.Error(err)
		}
	})
	if err := write(was + n); err != nil {
		need.Missing(t, "huge pages: "+err.Error())
	}
	if got := read(); got != was+n {
		need.Missing(t, fmt.Sprintf("%d huge pages: the memory of this machine is in pieces", n))
	}
}
