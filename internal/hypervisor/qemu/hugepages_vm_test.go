//go:build vm

package qemu

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// The memory of a guest is huge pages, and the node has them back when the VM ends. A VM for which there are too few does not start.
func TestHugePages(t *testing.T) {
	for _, size := range vm.AllHugePages {
		t.Run(size.String(), func(t *testing.T) { hugePages(t, size) })
	}
}

func hugePages(t *testing.T, size vm.HugePages) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	p.Huge, p.Memory = size, max(p.Memory, int64(size))
	if jail.EnoughHugePages(jail.Sysfs, p) != nil {
		if _, err := d.Launch(t.Context(), p); !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Fatalf("without huge pages: %v", err)
		}
	}
	setAside(t, size, p.Memory/int64(size))
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", i.PID()))
	if err != nil {
		t.Fatal(err)
	}
	mapping := regexp.MustCompile(fmt.Sprintf(`(?s)\nSize:\s+(\d+) kB\nKernelPageSize:\s+%d kB`, size>>10)) // a part of smaps
	found := int64(0)
	for _, m := range mapping.FindAllStringSubmatch(string(maps), -1) {
		kib, _ := strconv.ParseInt(m[1], 10, 64)
		found += kib << 10
	}
	if found != p.Memory {
		t.Errorf("%d bytes of %d are huge pages", found, p.Memory)
	}
	second := a.plan(t)
	second.Huge, second.Memory = size, p.Memory
	if _, err := d.Launch(t.Context(), second); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a second VM: %v", err)
	}
	if left := left(t, second); len(left) > 0 {
		t.Errorf("left of it: %v", left)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := jail.EnoughHugePages(jail.Sysfs, hypervisor.Plan{Huge: size, Memory: p.Memory}); err != nil {
		t.Errorf("after its end: %v", err)
	}
}

// setAside gives the node n more huge pages until the test ends.
func setAside(t *testing.T, size vm.HugePages, n int64) {
	t.Helper()
	path := filepath.Join(size.Dir(jail.Sysfs), "nr_hugepages")
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
	for range 20 { // the kernel may have to move other pages first
		if err := write(was + n); err != nil {
			need.Missing(t, "huge pages: "+err.Error())
		}
		if read() == was+n || size > vm.HugePages2M {
			break
		}
		if err := os.WriteFile("/proc/sys/vm/compact_memory", []byte("1"), 0o600); err != nil {
			t.Log(err)
		}
		<-time.After(500 * time.Millisecond)
	}
	if got := read(); got != was+n && size > vm.HugePages2M {
		t.Skipf("the memory of this machine is in pieces smaller than %s; set such pages aside when it boots", size)
	} else if got != was+n {
		need.Missing(t, fmt.Sprintf("%d huge pages: the memory of this machine is in pieces", n))
	}
}
