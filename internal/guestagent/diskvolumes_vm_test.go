//go:build vm

package guestagent_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

const mebibyte = 1 << 20

// rawDisk makes a sparse file with text at its start.
func rawDisk(t *testing.T, size int64, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, size); err != nil {
		t.Fatal(err)
	}
	return file
}

// diskVolume is a volume on the disk with the serial "vol-"+name.
func diskVolume(name string, group int64) vm.Volume {
	v := vm.Volume{Name: name, Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: name}}
	if group > 0 {
		v.Group = &group
	}
	return v
}

func diskSetup(volumes ...vm.Volume) guest.Setup {
	s := guest.Setup{Hostname: "web-0", Process: &vm.Process{Entrypoint: []string{"sleep", "1000"}}, Volumes: volumes, VolumeSerials: map[string]string{}}
	for _, v := range volumes {
		s.VolumeSerials[v.Name] = "vol-" + v.Name
	}
	return s
}

func withDisks(base, more map[string]string) map[string]string {
	all := maps.Clone(base)
	for name, file := range more {
		all["vol-"+name] = file
	}
	return all
}

// asRoot runs a script as root, in a container as soon as that runs, or in the guest.
func asRoot(t *testing.T, a guest.Agent, container, script string) string {
	t.Helper()
	if container != "" {
		untilStates(t, a.(guest.ContainerKeeper), func(all []guest.ContainerState) bool {
			return slices.ContainsFunc(all, func(s guest.ContainerState) bool { return s.Name == container && s.Status.State == vm.ContainerRunning })
		})
	}
	e := sh(script)
	e.User, e.Container = "root", container
	return output(t, a, e)
}

// off powers the guest off and checks the file systems on these disks. They must need no replay.
func off(t *testing.T, q *qemu, a guest.Agent, disks ...string) {
	t.Helper()
	if err := a.Poweroff(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	q.waitEnd(t)
	a.Close()
	for _, d := range disks {
		run(t, "e2fsck", "-fn", d)
		out, err := exec.Command("dumpe2fs", "-h", d).CombinedOutput()
		if err != nil || strings.Contains(string(out), "needs_recovery") || !strings.Contains(string(out), "state:         clean\n") {
			t.Errorf("after the power-off: %v\n%s", err, out)
		}
	}
}

// TestVMDiskVolume follows one disk through three guests: it gets a file system, keeps its files, grows and changes its group.
func TestVMDiskVolume(t *testing.T) {
	base, data := busyboxDisks(t), rawDisk(t, 64*mebibyte, "")
	disks := withDisks(base, map[string]string{"data": data})
	s := diskSetup(diskVolume("data", 0))
	s.Mounts = []vm.Mount{
		{Volume: "data", Path: "/data"},
		{Volume: "data", Path: "/look", ReadOnly: true},
		{Volume: "data", Path: "/part", SubPath: "a/b"},
	}
	q := bootGuest(t, disks)
	a := q.connect(t)
	for range 2 { // a host that reconnects repeats the whole request
		if err := a.Setup(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	if got := asRoot(t, a, "", "ls -A /data; ls -ld /data | grep -o '^[a-z-]*'; mount | grep ' /data ' | grep -o 'type ext4 (rw'"); got != "a\ndrwxrwxrwx\ntype ext4 (rw\n" {
		t.Errorf("a new file system: %q", got)
	}
	script := `echo hi > /data/new; echo part > /part/f; cat /look/new /data/a/b/f; echo x 2>/dev/null > /look/x || echo denied
		mkdir -p /data/deep/er; echo own > /data/deep/er/f; busybox chmod 600 /data/deep/er/f; ln -s /etc /data/evil; ln -s a/b /data/good; ln -s ../../etc/passwd /data/up; ln -s f /data/deep/er/link
		mount | grep -c cocoon-volumes; ls -A /run; (while :; do echo more >> /data/busy; done) >/dev/null 2>&1 </dev/null &`
	if got := asRoot(t, a, "", script); got != "hi\npart\ndenied\n0\n" {
		t.Errorf("the first guest: %q", got)
	}
	freezer, ok := a.(guest.Freezer)
	if !ok {
		t.Fatal("the agent cannot freeze")
	}
	if n, err := freezer.Freeze(t.Context()); err != nil || n != 2 {
		t.Errorf("%d file systems are frozen, %v", n, err)
	}
	if _, err := freezer.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	off(t, q, a, data)

	if err := os.Truncate(data, 1<<30); err != nil {
		t.Fatal(err)
	}
	s.Volumes[0] = diskVolume("data", 2000)
	q = bootGuest(t, disks)
	a = q.connect(t)
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	megs := func() int {
		n, _ := strconv.Atoi(strings.TrimSpace(asRoot(t, a, "", "busybox df -m /data | tail -n 1 | busybox awk '{print $2}'")))
		return n
	}
	if n := megs(); n < 900 {
		t.Errorf("the file system has %d MiB of a disk with 1024", n)
	}
	script = `cat /data/new /part/f /data/deep/er/f; ls -ld /data | grep -o '^[a-z-]* .* 2000'; ls -l /data/deep/er/f | grep -o '^[a-z-]* .* 2000'; ls -ld /data/deep | grep -o '^[a-z-]* .* 2000'
		busybox stat -c %g /etc /etc/passwd /data/deep/er/link`
	want := "hi\npart\nown\ndrwxrwsrwx    4 root     2000\n-rw-rw----    1 root     2000\ndrwxrwsr-x    3 root     2000\n0\n0\n2000\n"
	if got := asRoot(t, a, "", script); got != want {
		t.Errorf("the second guest:\n got %q\nwant %q", got, want)
	}
	if got := output(t, a, sh("echo of the group > /data/deep/er/f; cat /data/deep/er/f")); got != "of the group\n" {
		t.Errorf("as a user: %q", got)
	}
	off(t, q, a, data)

	q = bootGuest(t, disks)
	a = q.connect(t)
	for sub, want := range map[string]string{"evil": "leads out of the volume", "up": "leads out of the volume", "evil/x": "leads out of the volume", "new/x": "not a directory"} {
		s.Mounts = []vm.Mount{{Volume: "data", Path: "/x", SubPath: sub}}
		if err := a.Setup(t.Context(), s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("sub-path %s: %v, want %q", sub, err, want)
		}
	}
	s.Mounts[0].SubPath = "good"
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if got := output(t, a, sh("cat /x/f")); got != "part\n" {
		t.Errorf("a link inside the volume: %q", got)
	}
	off(t, q, a, data)
}

// TestVMDiskVolumesOfContainers: containers share the file systems of disks, and use others as devices.
func TestVMDiskVolumesOfContainers(t *testing.T) {
	base := busyboxDisks(t)
	data, late, raw, fixed := rawDisk(t, 64*mebibyte, ""), rawDisk(t, 64*mebibyte, ""), rawDisk(t, mebibyte, "raw disk\n"), rawDisk(t, mebibyte, "fixed disk\n")
	disks := withDisks(base, map[string]string{"data": data, "late": late, "raw": raw})
	q := startGuest(t, disks, "-drive", "if=none,format=raw,file="+fixed+",id=fixed,read-only=on", "-device", "virtio-blk-pci,drive=fixed,serial=vol-fixed")
	a := q.connect(t)
	defer a.Close()
	k, adder := a.(guest.ContainerKeeper), a.(guest.ContainerAdder)
	s := diskSetup(diskVolume("data", 2000), diskVolume("late", 0), diskVolume("raw", 2000), diskVolume("fixed", 2000))
	s.Volumes[3].Disk.ReadOnly = true
	s.Process, s.Restart = nil, vm.RestartNever
	device := func(volume, path string) vm.Mount { return vm.Mount{Volume: volume, Path: path, Device: true} }
	both := `busybox head -c 9 /dev/xvda; busybox head -c 11 /mine/fixed; echo x 2>/dev/null > /mine/fixed || echo denied; ls -l /dev/xvda | grep -o '^[a-z-]* .* 2000'
		echo $ME | dd of=/dev/xvda conv=notrunc 2>/dev/null; ls -l /mine/fixed | grep -o '^[a-z-]* .* 2000'; exec sleep 1000`
	one := containerOf("one", vm.ContainerApp, both, vm.Mount{Volume: "data", Path: "/data"}, device("raw", "/dev/xvda"), device("fixed", "/mine/fixed"))
	one.Process.User, one.Process.Security = "33:33", &vm.Security{NoNewPrivileges: true, Filtered: true}
	two := containerOf("two", vm.ContainerApp, "exec sleep 1000", vm.Mount{Volume: "data", Path: "/d", ReadOnly: true}, device("raw", "/other/raw"))
	two.Process.Security = &vm.Security{Filtered: true}
	s.Containers = []guest.Container{one, two}
	for range 2 {
		if err := a.Setup(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	logOf(t, k, "one", "raw disk\nfixed disk\ndenied\nbrw-rw----    1 root     2000\nbr--r-----    1 root     2000\n")
	e := sh("echo shared > /data/f; exec 3> /data/open; (while :; do echo more; done) >&3 2>/dev/null </dev/null &")
	e.Container = "one"
	output(t, a, e)
	if got := asRoot(t, a, "two", "cat /d/f; echo x 2>/dev/null > /d/x || echo denied; busybox head -c 4 /other/raw; test -b /dev/xvda || echo none; mount | grep -c ' /run'; ls /mine 2>/dev/null || true"); got != "shared\ndenied\none\nnone\n0\n" {
		t.Errorf("the other container: %q", got)
	}
	if n, err := a.(guest.Freezer).Freeze(t.Context()); err != nil || n != 2 {
		t.Errorf("%d file systems are frozen, %v", n, err)
	}
	if _, err := a.(guest.Freezer).Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	eph := containerOf("eph", vm.ContainerEphemeral, "cat /d/f; cd /late && ls -A; echo late > /late/f; echo done; exec sleep 1000",
		vm.Mount{Volume: "data", Path: "/d"}, vm.Mount{Volume: "late", Path: "/late"})
	if err := adder.AddContainer(t.Context(), eph); err != nil {
		t.Fatal(err)
	}
	logOf(t, k, "eph", "shared\ndone\n")
	eph.Name, eph.Mounts = "bad", []vm.Mount{{Volume: "raw", Path: "/raw"}}
	if err := adder.AddContainer(t.Context(), eph); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "already used as a device") {
		t.Errorf("a device as a file system: %v", err)
	}
	off(t, q, a, data, late)
	if text, err := os.ReadFile(raw); err != nil || !bytes.HasPrefix(text, []byte("one\n")) {
		t.Errorf("the device: %q, %v", text[:16], err)
	}
}

// halfFormatted is a disk on which the power went off.
func halfFormatted(t *testing.T) string {
	t.Helper()
	file := rawDisk(t, 64*mebibyte, "")
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := ext4.Format(&failing{f, 5}, ext4.Empty{Size: 64 * mebibyte}); err == nil {
		t.Fatal("the disk is whole")
	}
	return file
}

type failing struct {
	*os.File
	writes int
}

func (f *failing) WriteAt(p []byte, off int64) (int, error) {
	if f.writes--; f.writes < 0 {
		return 0, io.ErrShortWrite
	}
	return f.File.WriteAt(p, off)
}

func sum(t *testing.T, file string) [sha256.Size]byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(text)
}

// TestVMDiskVolumesInBadState: a disk with data that is not a file system stays as it is, and a damaged file system is repaired or
// not mounted.
func TestVMDiskVolumesInBadState(t *testing.T) {
	const size = 64 * mebibyte
	made := func(commands ...string) string {
		file := rawDisk(t, size, "")
		run(t, "mke2fs", "-q", "-t", "ext4", file)
		for _, c := range commands {
			run(t, "debugfs", "-w", "-R", c, file)
		}
		return file
	}
	middle := rawDisk(t, size, "")
	run(t, "dd", "if=/dev/urandom", "of="+middle, "bs=4096", "seek=4000", "count=1", "conv=notrunc")
	more := map[string]string{
		"text":    rawDisk(t, size, "hello"),
		"table":   rawDisk(t, size, strings.Repeat("\x00", 510)+"\x55\xaa"),
		"xfs":     rawDisk(t, size, "XFSB"),
		"blank":   rawDisk(t, size, ""),
		"tiny":    rawDisk(t, mebibyte, ""),
		"broken":  made("ssv state 3", "clri <2>"),
		"errors":  made("ssv state 3", "ssv error_count 7", "ssv free_blocks_count 1"),
		"half":    halfFormatted(t),
		"foreign": made(),
	}
	base := busyboxDisks(t)
	disks, args := withDisks(base, more), []string(nil)
	for name, file := range map[string]string{"ro-blank": rawDisk(t, size, ""), "ro-errors": made("ssv state 3"), "ro-good": made(), "ro-dirty": made("feature needs_recovery")} {
		args = append(args, "-drive", "if=none,format=raw,file="+file+",id="+name+",read-only=on", "-device", "virtio-blk-pci,drive="+name+",serial=vol-"+name)
		more[name] = file
	}
	sums := map[string][sha256.Size]byte{}
	for name, file := range more {
		sums[name] = sum(t, file)
	}
	q := startGuest(t, disks, args...)
	a := q.connect(t)
	defer a.Close()
	xfs := diskVolume("blank", 0)
	xfs.Disk.FSType = "xfs"
	for _, c := range []struct {
		v     vm.Volume
		class errdefs.Class
		want  string
	}{
		{diskVolume("none", 0), errdefs.Unavailable, "the guest has no disk with the serial vol-none"},
		{diskVolume("text", 0), errdefs.FailedPrecondition, "disk vol-text: it holds data of an unknown kind instead of an ext4 or xfs file system, and stays unchanged; use the volume as a device, or erase"},
		{diskVolume("table", 0), errdefs.FailedPrecondition, "it holds an MBR partition table or a boot sector"},
		{diskVolume("xfs", 0), errdefs.DataLoss, "its xfs file system is damaged, or too new"},
		{xfs, errdefs.FailedPrecondition, "the image has no mkfs.xfs"},
		{diskVolume("tiny", 0), errdefs.InvalidArgument, "must have at least 16777216"},
		{diskVolume("ro-good", 0), errdefs.FailedPrecondition, "the disk is read-only; use the volume read-only"},
		{readOnlyVolume("ro-blank"), errdefs.FailedPrecondition, "the disk is blank"},
		{readOnlyVolume("ro-errors"), errdefs.DataLoss, "has errors, and the disk is read-only"},
		{readOnlyVolume("ro-dirty"), errdefs.FailedPrecondition, "its journal cannot be replayed"},
		{diskVolume("broken", 0), errdefs.DataLoss, "volume broken at /data: disk vol-broken: its ext4 file system has errors and is not mounted; run e2fsck"},
	} {
		s := diskSetup(c.v)
		s.Mounts = []vm.Mount{{Volume: c.v.Name, Path: "/data"}}
		err := a.Setup(t.Context(), s)
		if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v (%v), want %q", c.v.Name, err, errdefs.ClassOf(err), c.want)
		}
		if file := more[c.v.Name]; file != "" && c.v.Name != "broken" && sum(t, file) != sums[c.v.Name] {
			t.Errorf("the disk %s has changed", c.v.Name)
		}
	}
	s := diskSetup(diskVolume("errors", 0), diskVolume("half", 0), diskVolume("foreign", 0), readOnlyVolume("ro-good"))
	for _, v := range s.Volumes {
		s.Mounts = append(s.Mounts, vm.Mount{Volume: v.Name, Path: "/" + v.Name})
	}
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if got := asRoot(t, a, "", "for d in errors half foreign ro-good; do echo yes 2>/dev/null > /$d/f || echo denied; done; cat /errors/f /half/f /foreign/f"); got != "denied\nyes\nyes\nyes\n" {
		t.Errorf("the mounted ones: %q", got)
	}
	off(t, q, a, more["errors"], more["half"], more["foreign"])
	if sum(t, more["ro-good"]) != sums["ro-good"] {
		t.Error("a read-only disk has changed")
	}
}

func readOnlyVolume(name string) vm.Volume {
	v := diskVolume(name, 0)
	v.Disk.ReadOnly = true
	return v
}

// withMkfsXFS adds a layer to the image in disks. The layer has this machine's mkfs.xfs.
func withMkfsXFS(t *testing.T, disks map[string]string) map[string]string {
	t.Helper()
	program := need.Tool(t, "mkfs.xfs")
	libraries, err := exec.Command("ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, file := range append(strings.Fields(string(libraries)), program) {
		if !filepath.IsAbs(file) {
			continue
		}
		to := file
		if file == program {
			to = "/usr/sbin/mkfs.xfs"
		}
		data, err := os.ReadFile(file)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(dir+to), 0o755)
		}
		if err == nil {
			err = os.WriteFile(dir+to, data, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	layer := rawDisk(t, 64*mebibyte, "")
	run(t, "mke2fs", "-q", "-t", "ext4", "-d", dir, layer)
	disks = maps.Clone(disks)
	disks["cocoon-l001"] = layer
	return disks
}

// TestVMDiskVolumesOfXFS: a guest mounts disks that have xfs. It makes xfs on a blank disk, if the volume asks for that and the image has
// mkfs.xfs. The file systems grow with their disks: in the running guest, and at the next boot.
func TestVMDiskVolumesOfXFS(t *testing.T) {
	const size, grown = 512 * mebibyte, 1024 * mebibyte
	made := rawDisk(t, size, "")
	run(t, need.Tool(t, "mkfs.xfs"), "-q", made)
	blank := rawDisk(t, size, "")
	disks := withDisks(withMkfsXFS(t, busyboxDisks(t)), map[string]string{"made": made, "blank": blank})
	asked := diskVolume("blank", 2000)
	asked.Disk.FSType = "xfs"
	s := diskSetup(diskVolume("made", 0), asked)
	s.Mounts = []vm.Mount{{Volume: "made", Path: "/made"}, {Volume: "blank", Path: "/blank"}}
	const (
		look = "grep -cE ' /(made|blank) xfs rw' /proc/mounts; stat -c '%g %A' /blank; "
		// More than the disk had: the last MiB has the data, and can only be in the new room.
		more = "busybox fallocate -l 800M /%[1]s/more && echo new room | dd of=/%[1]s/more bs=1M seek=799 conv=notrunc 2>/dev/null && sync && "
		last = "dd if=/%[1]s/more bs=1M skip=799 2>/dev/null | busybox head -c 9"
	)
	q := startGuest(t, disks)
	a := q.connect(t)
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if got := asRoot(t, a, "", look+"echo one >/made/f; echo two >/blank/f"); got != "2\n2000 drwxrwsr-x\n" {
		t.Errorf("the first time: %q", got)
	}
	q.qmp(t).do(fmt.Sprintf(`{"execute":"block_resize","arguments":{"device":"vol-made","size":%d}}`, grown))
	for range 2 { // again is no error
		if err := a.(guest.VolumeAttacher).GrowVolume(t.Context(), "made", "vol-made", grown); err != nil {
			t.Fatal(err)
		}
	}
	if got := asRoot(t, a, "", fmt.Sprintf(more+last, "made")); got != "new room\n" {
		t.Errorf("grown while the guest runs: %q", got)
	}
	off(t, q, a)
	if err := os.Truncate(blank, grown); err != nil {
		t.Fatal(err)
	}
	q = startGuest(t, disks)
	a = q.connect(t)
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if got := asRoot(t, a, "", look+"cat /made/f /blank/f; "+fmt.Sprintf(last, "made")); got != "2\n2000 drwxrwsr-x\none\ntwo\nnew room\n" {
		t.Errorf("the second time: %q", got)
	}
	if got := asRoot(t, a, "", fmt.Sprintf(more+last, "blank")); got != "new room\n" {
		t.Errorf("grown between two boots: %q", got)
	}
	off(t, q, a)
	for _, d := range []string{made, blank} {
		run(t, need.Tool(t, "xfs_repair"), "-n", "-f", d)
	}
}

// TestVMDiskVolumeIsLarge measures the CPU time of a blank disk of 10 GiB.
func TestVMDiskVolumeIsLarge(t *testing.T) {
	large := rawDisk(t, 10<<30, "")
	q := bootGuest(t, withDisks(busyboxDisks(t), map[string]string{"large": large}))
	a := q.connect(t)
	s := diskSetup(diskVolume("large", 0))
	s.Mounts = []vm.Mount{{Volume: "large", Path: "/data"}}
	before := q.work()
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	spent := q.work() - before
	out, err := exec.Command("du", "-k", large).Output()
	if err != nil {
		t.Fatal(err)
	}
	used, _, _ := strings.Cut(string(out), "\t")
	t.Logf("%v of CPU time; the disk uses %s KiB", spent, used)
	if n, err := strconv.Atoi(used); err != nil || n > 1024 {
		t.Errorf("the disk uses %s KiB", used)
	}
	off(t, q, a, large)
}
