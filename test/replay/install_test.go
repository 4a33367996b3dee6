//go:build replay

package replay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/console"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

const (
	targetSize = 16 << 30
	installing = 30 * time.Minute // of a machine, on a busy host
	samples    = 30               // disks that are started, besides the first and the last ones
	ends       = 5                // that many first and last ones
)

// running starts a machine by its firmware, calls then once it has said all of the words, and ends it.
func (b *bench) running(words []string, then func(said string), options ...string) {
	b.t.Helper()
	ctx, stop := context.WithTimeout(b.t.Context(), installing)
	defer stop()
	vars := b.path("running.fd")
	b.do("cp", "--no-preserve=mode", b.vars, vars)
	w := console.New()
	cmd := exec.CommandContext(ctx, b.qemu, append([]string{
		"-M", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-smp", "2", "-m", "2048", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio", "-monitor", "none", "-drive", "if=pflash,format=raw,unit=0,readonly=on,file=" + b.code, "-drive", "if=pflash,format=raw,unit=1,file=" + vars,
		"-device", "virtio-rng-pci",
	}, options...)...)
	cmd.Stdout, cmd.Stderr = w, w
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // QEMU closes the log of writes then
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	defer func() { stop(); <-ended }()
	for {
		text, more := w.Said()
		missing := false
		for _, word := range words {
			missing = missing || !strings.Contains(text, word)
		}
		if !missing {
			then(text)
			return
		}
		select {
		case <-more:
		case <-ended:
			b.t.Fatalf("the machine ended before it said %q:\n%s", words, tail(text))
		}
	}
}

// capsulectl is the operator's program. It returns what that prints.
func (b *bench) capsulectl(args ...string) string {
	b.t.Helper()
	cmd := exec.CommandContext(b.t.Context(), need.Built(b.t, "bin/capsulectl", "make binaries"), args...)
	cmd.Env = append(os.Environ(), "CAPSULE_CONFIG_DIR="+b.path("contexts"), "CAPSULE_HOST=")
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.t.Fatalf("capsulectl %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// freePort returns a port of this machine on which nobody listens.
func (b *bench) freePort() int {
	b.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // local
	if err != nil {
		b.t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// install installs over the network on a disk, whose writes are logged, with the code of the console.
func (b *bench) install(target, log string) {
	b.t.Helper()
	port := b.freePort()
	code := regexp.MustCompile(`code, to overwrite data: (\S+)`)
	b.running([]string{"code, to overwrite data: ", "10.0.2.15:50000"}, func(said string) {
		b.write("code", []byte(code.FindStringSubmatch(said)[1]))
		b.capsulectl("install", "--addr", fmt.Sprintf("127.0.0.1:%d", port), "--yes", "--name", "box", "--reinstall", "--code-file", b.path("code"))
	},
		"-drive", "if=none,id=usb,format=raw,snapshot=on,file="+need.Built(b.t, "bin/os/installer.raw", "make os-installer"), "-device", "virtio-blk-pci,drive=usb,bootindex=0",
		"-blockdev", "driver=file,node-name=f0,filename="+target, "-blockdev", "driver=file,node-name=l0,filename="+log,
		"-blockdev", "driver=blklogwrites,node-name=d0,file=f0,log=l0,log-sector-size=512", "-device", "virtio-blk-pci,drive=d0",
		"-netdev", fmt.Sprintf("user,id=net,hostfwd=tcp:127.0.0.1:%d-:50000", port), "-device", "virtio-net-pci,netdev=net,romfile=",
	)
}

// startBefore starts a disk by its firmware, with another one after it, and returns the kernel that ran.
func (b *bench) startBefore(disk, next string) string {
	b.t.Helper()
	b.starts++
	vars := b.path("vars.fd")
	b.do("cp", "--no-preserve=mode", b.vars, vars)
	return parse(b.machine(append(
		drive(disk, ""), "-device", "virtio-blk-pci,drive=d0,bootindex=0",
		"-drive", "if=none,id=d1,format=raw,snapshot=on,file="+next, "-device", "virtio-blk-pci,drive=d1,bootindex=1",
		"-drive", "if=pflash,format=raw,unit=0,readonly=on,file="+b.code, "-drive", "if=pflash,format=raw,unit=1,file="+vars,
	)...)).kernel
}

// TestInstallation cuts the power after each write of an installation, over a disk with an older system. The firmware starts the older one until the first write, and
// then passes the disk on, until the last one, after which the new system starts, whole.
func TestInstallation(t *testing.T) {
	b := newBench(t)
	old, next, target, log := b.path("old.raw"), b.path("next.raw"), b.path("target.raw"), b.path("install.log")
	for _, path := range []string{old, next} {
		b.do("cp", "--sparse=always", b.path("disk.raw"), path)
	}
	b.write("vmlinuz-passed", standIn("kernel=passed"))
	b.do("mcopy", "-o", "-i", next+"@@1M", b.path("vmlinuz-passed"), "::/vmlinuz_a-v1")
	if err := os.Truncate(old, targetSize); err != nil {
		t.Fatal(err)
	}
	b.do("cp", "--sparse=always", old, target)
	b.write("install.log", nil)
	b.install(target, log)

	writes, err := readLog(log)
	if err != nil {
		t.Fatal(err)
	}
	work := b.path("work.raw")
	b.do("cp", "--sparse=always", old, work)
	file, err := os.OpenFile(work, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	base, err := os.Open(old)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	first, last := recordWrites(t, base, writes)

	// What the firmware and the loader can read: the record, and the boot partition.
	plan := distinct(t, base, writes)
	sample := map[int]bool{}
	for i, at := range plan {
		if i < ends || i >= len(plan)-ends || i%max(len(plan)/samples, 1) == 0 {
			sample[at] = true
		}
	}
	sample[first], sample[last-1] = true, true
	if got := b.startBefore(work, next); got != "v1" {
		t.Errorf("before the first write: %q starts", got)
	}
	for i, w := range writes {
		if _, err := file.WriteAt(w.data, w.sector*sector); err != nil {
			t.Fatal(err)
		}
		if i >= last || !sample[i] {
			continue
		}
		want := "passed"
		if i < first {
			want = "v1"
		}
		if got := b.startBefore(work, next); got != want {
			t.Errorf("after write %d of %d: %q starts, not %q", i+1, len(writes), got, want)
		}
	}
	starts := b.starts
	same(t, work, target)
	b.running([]string{"slot a, files", "Cocoon OS", "10.0.2.15:50000"}, func(said string) {
		if strings.Contains(said, "first start") {
			t.Error("the first start made volumes again")
		}
	}, "-drive", "if=none,id=d0,format=raw,snapshot=on,file="+work, "-device", "virtio-blk-pci,drive=d0,bootindex=0", "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")
	t.Logf("installation: %d writes, %d of them before the record goes and %d after it is written; in between %d prefixes without a record, %d of them distinct for firmware and loader; "+
		"%d disks started: the older system until the record goes, then none; the last one starts whole", len(writes), first, len(writes)-1-last, last-first, len(plan), starts)
}

// recordWrites returns which writes take the first sector away and give the disk a new one. No other one, and no part of one, leaves a record.
func recordWrites(t *testing.T, base io.ReaderAt, writes []write) (first, last int) {
	t.Helper()
	record := make([]byte, sector)
	if _, err := base.ReadAt(record, 0); err != nil {
		t.Fatal(err)
	}
	first, last = -1, -1
	zero := make([]byte, sector)
	for i, w := range writes {
		if w.sector != 0 {
			continue
		}
		now := w.data[:sector]
		switch {
		case bytes.Equal(now, record):
		case bytes.Equal(now, zero) && first < 0:
			first = i
		case !bytes.Equal(now, zero) && first >= 0 && last < 0:
			last = i
		default:
			t.Errorf("write %d changes the first sector once more", i)
		}
		record = now
	}
	if first < 0 || last <= first {
		t.Fatalf("the record goes with write %d, and comes with write %d of %d", first, last, len(writes))
	}
	return first, last
}

// distinct returns the writes after which the firmware and the loader see a disk that they did not see before.
func distinct(t *testing.T, base *os.File, writes []write) (at []int) {
	t.Helper()
	s := state{changed: map[int64][]byte{}}
	seen := map[[32]byte]bool{s.sum: true}
	for i, w := range writes {
		for off := 0; off < len(w.data); off += sector {
			if where := w.sector + int64(off/sector); where < diskSize/sector {
				if err := s.put(base, where, w.data[off:off+sector]); err != nil {
					t.Fatal(err)
				}
			}
		}
		if !seen[s.sum] {
			seen[s.sum] = true
			at = append(at, i)
		}
	}
	return at
}

// same wants two files to be equal: the log has each write.
func same(t *testing.T, a, b string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), need.Tool(t, "cmp"), a, b).CombinedOutput(); err != nil {
		t.Errorf("the writes of the log do not make %s: %s", filepath.Base(b), out)
	}
}
