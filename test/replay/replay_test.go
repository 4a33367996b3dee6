//go:build replay

package replay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

const (
	espStart = 2048 // sectors
	espSize  = 256 << 20
	diskSize = espStart*sector + espSize
	startup  = 3 * time.Minute // of a machine, on a busy host
)

// bench is the disk of an appliance with stand-ins for its kernels, and what starts machines with it.
type bench struct {
	t    *testing.T
	dir  string
	qemu string
	code string // firmware
	vars string

	kernel, initramfs string // of the actor

	starts int // of machines, by their firmware
}

func (b *bench) path(name string) string { return filepath.Join(b.dir, name) }

func (b *bench) do(program string, args ...string) string {
	b.t.Helper()
	out, err := exec.CommandContext(b.t.Context(), need.Tool(b.t, program), args...).CombinedOutput()
	if err != nil {
		b.t.Fatalf("%s %q: %v\n%s", program, args, err, out)
	}
	return string(out)
}

// newMachines starts machines by their firmware.
func newMachines(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, dir: t.TempDir(), qemu: need.QEMU(t)}
	for _, dir := range []string{"/usr/share/OVMF", "/usr/share/edk2/ovmf"} {
		for _, size := range []string{"_4M", ""} {
			if _, err := os.Stat(filepath.Join(dir, "OVMF_CODE"+size+".fd")); err == nil && b.code == "" {
				b.code, b.vars = filepath.Join(dir, "OVMF_CODE"+size+".fd"), filepath.Join(dir, "OVMF_VARS"+size+".fd")
			}
		}
	}
	if b.code == "" {
		need.Missing(t, "UEFI firmware is needed: install ovmf")
	}
	return b
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := newMachines(t)
	b.makeDisk(need.Built(t, "bin/os/disk.raw", "make os-image"))
	b.makeActor(need.Built(t, "bin/os/cache/vmlinuz", "make os-image"), need.Built(t, "bin/os/cache/system.tar", "make os-image"), need.Built(t, "bin/os/cache/modules.tar", "make os-image"), need.Built(t, "bin/os/cache/pack", "make os-image"))
	return b
}

// makeDisk makes the start of the image's own disk, whose kernels are stand-ins and whose loader does not wait for people.
func (b *bench) makeDisk(image string) {
	b.t.Helper()
	in, err := os.Open(image)
	if err != nil {
		b.t.Fatal(err)
	}
	defer in.Close()
	disk := b.path("disk.raw")
	copySparse(b.t, io.LimitReader(in, diskSize), disk)
	b.oneEntry(disk)
	esp := disk + "@@1M"
	config := b.path("grub.cfg")
	b.do("mcopy", "-n", "-i", esp, "::/EFI/BOOT/grub.cfg", config)
	text, err := os.ReadFile(config)
	if err != nil {
		b.t.Fatal(err)
	}
	quick := strings.Replace(string(text), "set timeout=2\n", "set timeout=0\n", 1)
	if quick == string(text) {
		b.t.Fatal("the loader's configuration has no timeout to shorten")
	}
	block, err := bootctl.NewBlock("v1")
	if err != nil {
		b.t.Fatal(err)
	}
	b.write("grub.cfg", []byte(quick))
	b.write("grubenv", block)
	b.do("mcopy", "-o", "-i", esp, config, "::/EFI/BOOT/grub.cfg")
	b.do("mcopy", "-o", "-i", esp, b.path("grubenv"), "::/EFI/BOOT/grubenv")
	for _, name := range strings.Fields(b.do("mdir", "-b", "-i", esp, "::/")) {
		if strings.Contains(name, "vmlinuz_") || strings.Contains(name, "initramfs_") {
			b.do("mdel", "-i", esp, name)
		}
	}
	for _, id := range []string{"v1", "v2", "v3"} {
		b.write("vmlinuz-"+id, standIn("kernel="+id))
		b.write("initramfs-"+id, append([]byte("initramfs="+id), 0))
	}
	for _, slot := range []string{"a", "b"} {
		b.do("mcopy", "-i", esp, b.path("vmlinuz-v1"), "::/vmlinuz_"+slot+"-v1")
		b.do("mcopy", "-i", esp, b.path("initramfs-v1"), "::/initramfs_"+slot+"-v1")
	}
}

// oneEntry leaves the boot partition alone in the partition table: firmware does not believe a table with partitions behind the end of the disk.
func (b *bench) oneEntry(disk string) {
	b.t.Helper()
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	const second, entry = 0x1be + 16, 16
	if _, err := f.WriteAt(make([]byte, 3*entry), second); err != nil {
		b.t.Fatal(err)
	}
}

// makeActor makes the small machine that writes as an update does.
func (b *bench) makeActor(kernel, system, modules, pack string) {
	b.t.Helper()
	tree := b.path("tree")
	for _, dir := range []string{"modules", "new"} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	build := exec.CommandContext(b.t.Context(), "go", "build", "-trimpath", "-o", filepath.Join(tree, "init"), "./actor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.t.Fatalf("%v\n%s", err, out)
	}
	b.do("tar", "-C", filepath.Join(tree, "modules"), "-xf", modules, "--wildcards", "*virtio*")
	b.do("tar", "-C", b.dir, "-xf", system, "--wildcards", "*/fs/fat/*.ko", "*/fs/nls/nls_*.ko")
	for i, name := range []string{"fat", "vfat", "nls_cp437", "nls_ascii", "nls_iso8859-1"} {
		found, err := filepath.Glob(b.path("usr/lib/modules/*/kernel/fs/*/" + name + ".ko"))
		if err != nil || len(found) != 1 {
			b.t.Fatalf("module %s: %q, %v", name, found, err)
		}
		if err := os.Rename(found[0], filepath.Join(tree, "modules", fmt.Sprintf("900%d-%s.ko", i, name))); err != nil {
			b.t.Fatal(err)
		}
	}
	for _, id := range []string{"v2", "v3"} {
		for _, name := range []string{"vmlinuz-", "initramfs-"} {
			b.do("cp", b.path(name+id), filepath.Join(tree, "new", name+id))
		}
	}
	b.kernel, b.initramfs = kernel, b.path("actor.initramfs")
	b.do(pack, "initramfs", tree, b.initramfs)
}

func (b *bench) write(name string, data []byte) {
	b.t.Helper()
	if err := os.WriteFile(b.path(name), data, 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// copySparse copies what is not zero.
func copySparse(t *testing.T, from io.Reader, to string) {
	t.Helper()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	buf, zero := make([]byte, 1<<16), make([]byte, 1<<16)
	for at := int64(0); ; {
		n, err := io.ReadFull(from, buf)
		if !bytes.Equal(buf[:n], zero[:n]) {
			if _, err := out.WriteAt(buf[:n], at); err != nil {
				t.Fatal(err)
			}
		}
		at += int64(n)
		if err != nil {
			if err := out.Truncate(at); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
}

// drive returns the options of the disk: with a log of its writes, or with none of them kept.
func drive(disk, log string) []string {
	if log == "" {
		return []string{"-drive", "if=none,id=d0,format=raw,snapshot=on,file=" + disk}
	}
	return []string{
		"-blockdev", "driver=file,node-name=f0,filename=" + disk, "-blockdev", "driver=file,node-name=l0,filename=" + log,
		"-blockdev", "driver=blklogwrites,node-name=d0,file=f0,log=l0,log-sector-size=512",
	}
}

func (b *bench) machine(options ...string) string {
	b.t.Helper()
	ctx, stop := context.WithTimeout(b.t.Context(), startup)
	defer stop()
	args := append([]string{
		"-M", "q35", "-accel", "tcg,thread=multi,tb-size=128", "-cpu", "max", "-m", "512", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio", "-monitor", "none",
	}, options...)
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, b.qemu, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		b.t.Logf("QEMU: %v", err)
	}
	return out.String()
}

// start starts the disk by its firmware and returns what the stand-in said.
func (b *bench) start(disk, log string) booted {
	b.t.Helper()
	b.starts++
	vars := b.path("vars.fd")
	b.do("cp", "--no-preserve=mode", b.vars, vars)
	out := b.machine(append(
		drive(disk, log), "-device", "virtio-blk-pci,drive=d0,bootindex=0",
		"-drive", "if=pflash,format=raw,unit=0,readonly=on,file="+b.code, "-drive", "if=pflash,format=raw,unit=1,file="+vars,
	)...)
	got := parse(out)
	if got == (booted{}) {
		b.t.Logf("nothing started:\n%s", tail(out))
	}
	return got
}

func tail(s string) string { return s[max(0, len(s)-1500):] }

// booted is what started.
type booted struct {
	kernel, initramfs string
	boot              bootctl.Boot
}

var said = regexp.MustCompile(`(?s)kernel=(\S+)\s+initramfs=(\S+)\s+(BOOT_IMAGE=[^\n]*)\n`)

func parse(out string) booted {
	m := said.FindStringSubmatch(strings.ReplaceAll(out, "\r", ""))
	if m == nil {
		return booted{}
	}
	return booted{m[1], m[2], bootctl.ParseBoot(m[3])}
}

// act lets the actor write, in a system that was started as the words say.
func (b *bench) act(disk, log, words string) {
	b.t.Helper()
	out := b.machine(append(drive(disk, log), "-device", "virtio-blk-pci,drive=d0", "-kernel", b.kernel, "-initrd", b.initramfs,
		"-append", "console=ttyS0 quiet panic=-1 "+words)...)
	if !strings.Contains(out, "actor: done") {
		b.t.Fatalf("the actor failed:\n%s", tail(out))
	}
}

// environment reads what the loader's environment of a disk says.
func (b *bench) environment(disk string) (bootctl.State, error) {
	b.t.Helper()
	to := b.path("grubenv.read")
	b.do("mcopy", "-n", "-o", "-i", disk+"@@1M", "::/EFI/BOOT/grubenv", to)
	return bootctl.New(to, bootctl.Boot{}).Read()
}

// TestEveryWrite cuts the power after each write, and inside each, of an appliance's life: an update in slot b, its trial, a confirmation or a
// rollback, and an update back in slot a. Each disk that is left starts a slot whose kernel and initramfs are one version and whole: the trial if the environment has one, else the good slot.
func TestEveryWrite(t *testing.T) {
	b := newBench(t)
	const (
		onA     = "capsule.slot=a capsule.files=v1 "
		onTrial = "capsule.slot=b capsule.trial=1 capsule.uid=v2 capsule.files=v2 "
		onB     = "capsule.slot=b capsule.files=v2 "
	)
	total := counts{}
	steps := []struct {
		name, from, words string // no words: the loader writes
	}{
		{"update", "installed", onA + "actor.do=update,b,v2"},
		{"trial", "update", ""},
		{"confirm", "trial", onTrial + "actor.do=good"},
		{"mark bad", "trial", onTrial + "actor.do=bad"},
		{"rolled back", "mark bad", ""},
		{"second trial", "trial", ""},
		{"no try left", "second trial", ""},
		{"confirm the last try", "second trial", onTrial + "actor.do=good"},
		{"update back", "confirm", onB + "actor.do=update,a,v3"},
		{"trial back", "update back", ""},
		{"update after a rollback", "no try left", onA + "actor.do=update,b,v3"},
	}
	disks := map[string]string{"installed": b.path("disk.raw")}
	for i, s := range steps {
		disk, log := b.path(fmt.Sprintf("disk%d.raw", i)), b.path(fmt.Sprintf("log%d", i))
		b.do("cp", "--sparse=always", disks[s.from], disk)
		b.write(filepath.Base(log), nil)
		if s.words == "" {
			if got := b.start(disk, log); got == (booted{}) {
				t.Fatalf("%s: nothing started", s.name)
			}
		} else {
			b.act(disk, log, s.words)
		}
		disks[s.name] = disk
		c := b.cut(s.name, disks[s.from], log)
		t.Logf("%-24s %3d writes, %4d torn writes, %4d distinct disks: all start", s.name, c.writes, c.torn, c.disks)
		total.add(c)
	}
	t.Logf("%-24s %3d writes, %4d torn writes, %4d distinct disks, %d machines started, %d of them on trial", "all", total.writes, total.torn, total.disks, total.disks, total.trials)
}

type counts struct{ writes, torn, disks, trials int }

func (c *counts) add(d counts) {
	c.writes += d.writes
	c.torn += d.torn
	c.disks += d.disks
	c.trials += d.trials
}

// cut starts each disk that a power cut can leave.
func (b *bench) cut(name, from, log string) counts {
	b.t.Helper()
	writes, err := readLog(log)
	if err != nil {
		b.t.Fatal(err)
	}
	base, err := os.Open(from)
	if err != nil {
		b.t.Fatal(err)
	}
	defer base.Close()
	all, prefixes, torn, err := states(base, writes)
	if err != nil {
		b.t.Fatal(err)
	}
	c := counts{writes: prefixes, torn: torn, disks: len(all)}
	work := b.path("work.raw")
	b.do("cp", "--sparse=always", from, work)
	file, err := os.OpenFile(work, os.O_RDWR, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	defer file.Close()
	for i, s := range all {
		if err := s.with(file, base, func() {
			got := b.start(work, "")
			env, err := b.environment(work)
			if err != nil {
				b.t.Errorf("%s, disk %d: the environment is damaged: %v", name, i, err)
				return
			}
			want := booted{boot: bootctl.Boot{Slot: env.Good, Files: env.Files.Of(env.Good)}}
			if env.Open() {
				c.trials++
				want.boot = bootctl.Boot{Slot: env.Try, Trial: true, UID: env.UID, Files: env.Files.Of(env.Try)}
			}
			want.kernel, want.initramfs = want.boot.Files, want.boot.Files
			if got != want {
				b.t.Errorf("%s, disk %d: started %+v, and the environment says %+v", name, i, got, want)
			}
		}); err != nil {
			b.t.Fatal(err)
		}
	}
	return c
}
