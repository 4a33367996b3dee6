//go:build os

package appliance

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestNumbers prints what docs/os.md says of the system's speed and size, measured on this machine, side by side with its bare kernel.
func TestNumbers(t *testing.T) {
	if os.Getenv("COCOON_OS_NUMBERS") == "" {
		t.Skip("make bench-os measures")
	}
	var bare, whole []time.Duration
	image := disk(t)
	for range 3 {
		bare = append(bare, bareKernel(t))
		whole = append(whole, untilPort(t, image))
	}
	t.Logf("the same kernel and initramfs with /bin/true as process 1: %v (of %v)", median(bare), bare)
	t.Logf("power on to an answer at port 50000, without firmware: %v (of %v), %.1f times as long", median(whole), whole, float64(median(whole))/float64(median(bare)))
	for _, name := range []string{"rootfs.sqsh", "vmlinuz", "initramfs", "disk.raw"} {
		fi := must(os.Stat(need.Built(t, "bin/os/"+name, "make os-image")))
		t.Logf("%s: %.1f MiB", name, float64(fi.Size())/(1<<20))
	}
	memory(t, image)
	updateTime(t)
}

func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// bareKernel returns how long the kernel takes to start a program that ends.
func bareKernel(t *testing.T) time.Duration {
	t.Helper()
	dir := t.TempDir()
	initrd := filepath.Join(dir, "initramfs")
	if err := os.WriteFile(initrd, initramfs(t, "export PATH=/bin", "exit 0"), 0o600); err != nil {
		t.Fatal(err)
	}
	m, cmd := start(t, "-action", "reboot=shutdown", "-kernel", need.Built(t, "bin/os/vmlinuz", "make os-image"), "-initrd", initrd, "-append", "console=ttyS0,115200n8 panic=-1")
	defer m.off(cmd)
	m.wait(m.serial, "Attempted to kill init")
	return time.Since(m.begin).Round(10 * time.Millisecond)
}

// untilPort returns how long the machine takes to answer at its port. Its volumes exist after the first start.
func untilPort(t *testing.T, image string) time.Duration {
	t.Helper()
	port := freePort(t)
	id := strings.TrimSpace(string(must(os.ReadFile(need.Built(t, "bin/os/id", "make os-image")))))
	m, cmd := startAt(t, userNet(fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-:50000", port)), append([]string{"-kernel", need.Built(t, "bin/os/vmlinuz", "make os-image"), "-initrd", need.Built(t, "bin/os/initramfs", "make os-image"), "-append", slotA(id)}, "-drive", "if=none,id=d0,format=raw,file="+image, "-device", "virtio-blk-pci,drive=d0")...)
	defer m.off(cmd)
	limit := time.Now().Add(patience)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for ; !speaksTLS(port); <-tick.C {
		if time.Now().After(limit) {
			t.Fatal("the machine does not answer")
		}
	}
	return time.Since(m.begin).Round(10 * time.Millisecond)
}

// memory prints what our programs take while nothing happens, as the kernel counts it.
func memory(t *testing.T, image string) {
	t.Helper()
	m := withShell(t, image, "")
	m.wait(m.serial, "10.0.2.15:50000")
	m.run("export PATH=/usr/sbin:/usr/bin")
	m.run("i=0; until cocoon vm list >/dev/null 2>&1 || [ $i = 60 ]; do i=$((i+1)); sleep 1; done; sleep 20")
	total := 0
	for line := range strings.Lines(m.run(`for p in /proc/[0-9]*; do [ -r $p/smaps_rollup ] && [ -n "$(tr '\0' ' ' <$p/cmdline)" ] && echo "$(awk '/^Rss/ {r=$2} /^Pss:/ {s=$2} END {print r, s}' $p/smaps_rollup) $(tr '\0' ' ' <$p/cmdline | cut -c1-60)"; done | grep -E 'cocoon|containerd|/sbin/init'`)) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		rss, _ := strconv.Atoi(fields[0])
		pss, _ := strconv.Atoi(fields[1])
		total += pss
		t.Logf("idle: RSS %.1f MiB, share %.1f MiB: %s", float64(rss)/1024, float64(pss)/1024, strings.Join(fields[2:], " "))
	}
	t.Logf("idle: %.1f MiB together", float64(total)/1024)
}

// updateTime prints how long an update takes.
func updateTime(t *testing.T) {
	t.Helper()
	o, cmd := adopted(t)
	path := o.dir + "/next.tar"
	newer(t, path, "v999.1", func(map[string]string) {})
	t.Logf("bundle: %.1f MiB", float64(must(os.Stat(path)).Size())/(1<<20))
	begin := time.Now()
	o.do("capsule", "update", "push", path)
	t.Logf("update: %v until it is written, verified and armed", time.Since(begin).Round(time.Second))
	o.until("active slot      slot_b", "capsule", "info")
	t.Logf("update: %v until the new system answers", time.Since(begin).Round(time.Second))
	o.m.off(cmd)
}

// speaksTLS reports whether a server behind a port of this machine answers.
func speaksTLS(port int) bool {
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: time.Second}, Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}} //nolint:gosec // nothing is said to it
	ctx, stop := context.WithTimeout(context.Background(), 2*time.Second)
	defer stop()
	c, err := d.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	return c.Close() == nil
}
