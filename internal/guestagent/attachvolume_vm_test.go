//go:build vm

package guestagent_test

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// attached is the volume on the disk with that serial.
func attached(serial string) vm.Volume {
	return vm.Volume{Name: "late", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: serial}}
}

// TestVMAttachVolume attaches and detaches a volume while programs run: in the guest's own root, in one that is read-only, and in the
// rooms of containers.
func TestVMAttachVolume(t *testing.T) {
	base := busyboxDisks(t)
	roots := map[string]func(s *guest.Setup){
		"own root":       func(*guest.Setup) {},
		"read-only root": func(s *guest.Setup) { s.Process.ReadOnlyRoot = true },
		"containers": func(s *guest.Setup) {
			s.Process, s.Restart = nil, vm.RestartNever
			one, two := containerOf("one", vm.ContainerApp, "exec sleep 1000"), containerOf("two", vm.ContainerApp, "exec sleep 1000")
			two.Process.ReadOnlyRoot = true
			s.Containers = []guest.Container{one, two}
		},
		"containers with volumes": func(s *guest.Setup) {
			s.Process, s.Restart = nil, vm.RestartNever
			s.Volumes = []vm.Volume{{Name: "mem", Kind: vm.VolumeEmpty, Memory: true}}
			s.Containers = []guest.Container{
				containerOf("one", vm.ContainerApp, "exec sleep 1000", vm.Mount{Volume: "mem", Path: "/mem"}), containerOf("two", vm.ContainerApp, "exec sleep 1000"),
			}
		},
	}
	for name, root := range roots {
		t.Run(name, func(t *testing.T) {
			data, other := rawDisk(t, 64*mebibyte, ""), rawDisk(t, 64*mebibyte, "not a file system")
			q := bootGuest(t, withDisks(base, map[string]string{"data": data, "other": other}))
			a := q.connect(t)
			s := diskSetup()
			root(&s)
			v, in := a.(guest.VolumeAttacher), []string{""}
			if len(s.Containers) > 0 {
				in = []string{"one", "two"}
			}
			if err := v.AttachVolume(t.Context(), attached("vol-data"), "/data"); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("before the setup: %v", err)
			}
			if err := a.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			for _, bad := range []struct {
				serial, path string
				class        errdefs.Class
			}{
				{"vol-other", "/data", errdefs.FailedPrecondition},
				{"vol-data", "/proc/x", errdefs.InvalidArgument},
				{"vol-data", "/etc/passwd/x", errdefs.InvalidArgument},
				{"vol-data", "data", errdefs.InvalidArgument},
			} {
				if err := v.AttachVolume(t.Context(), attached(bad.serial), bad.path); !errdefs.Is(err, bad.class) {
					t.Errorf("%s at %s: %v", bad.serial, bad.path, err)
				}
			}
			for range 2 { // again is no error
				if err := v.AttachVolume(t.Context(), attached("vol-data"), "/data/deep"); err != nil {
					t.Fatal(err)
				}
			}
			if err := v.AttachVolume(t.Context(), attached("vol-other"), "/x"); !errdefs.Is(err, errdefs.Conflict) {
				t.Errorf("another disk as the same volume: %v", err)
			}
			asRoot(t, a, in[0], "echo hi > /data/deep/f")
			for _, c := range in {
				if got := asRoot(t, a, c, "cat /data/deep/f; mount | grep -c ' /data/deep type ext4'; mount | grep -c cocoon-volumes || true"); got != "hi\n1\n0\n" {
					t.Errorf("in %q: %q", c, got)
				}
			}
			detach := func() error { return v.DetachVolume(t.Context(), "late", "vol-data") }
			refused := func(how string) {
				t.Helper()
				if err := detach(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "in use") {
					t.Errorf("%s: %v", how, err)
				}
				for _, c := range in {
					if got := asRoot(t, a, c, "cat /data/deep/f; mount | grep -c ' /data/deep type ext4 (rw'"); got != "hi\n1\n" {
						t.Errorf("%s, in %q: %q", how, c, got)
					}
				}
			}
			last := in[len(in)-1]
			asRoot(t, a, last, "(cd /data/deep && exec sleep 1000) >/dev/null 2>&1 </dev/null & echo $! > /dev/shm/pid")
			refused("a program works there")
			asRoot(t, a, last, "kill $(cat /dev/shm/pid); while kill -0 $(cat /dev/shm/pid) 2>/dev/null; do :; done")
			asRoot(t, a, last, "busybox unshare -m sleep 1000 >/dev/null 2>&1 </dev/null & echo $! > /dev/shm/pid; while [ $(readlink /proc/$!/ns/mnt) = $(readlink /proc/self/ns/mnt) ]; do :; done")
			refused("a program has mounted it")
			asRoot(t, a, last, "kill $(cat /dev/shm/pid); while kill -0 $(cat /dev/shm/pid) 2>/dev/null; do :; done")
			for range 2 { // again is no error
				if err := detach(); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range in {
				if got := asRoot(t, a, c, "ls -A /data/deep; mount | grep -c /data || true"); got != "0\n" {
					t.Errorf("detached, in %q: %q", c, got)
				}
			}
			run(t, "e2fsck", "-fn", data)
			if n, err := a.(guest.Freezer).Freeze(t.Context()); err != nil || n != 1 {
				t.Errorf("%d file systems are frozen, %v", n, err)
			}
			if _, err := a.(guest.Freezer).Thaw(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := v.AttachVolume(t.Context(), attached("vol-other"), ""); err != nil {
				t.Errorf("only the disk: %v", err)
			}
			if err := v.DetachVolume(t.Context(), "late", "vol-other"); err != nil {
				t.Errorf("only the disk: %v", err)
			}
			readOnly := attached("vol-data")
			readOnly.Disk.ReadOnly = true
			if err := v.AttachVolume(t.Context(), readOnly, "/again"); err != nil {
				t.Fatal(err)
			}
			if err := a.Setup(t.Context(), s); err != nil { // of the next session
				t.Fatal(err)
			}
			for _, c := range in {
				if got := asRoot(t, a, c, "cat /again/f; echo x 2>/dev/null > /again/f || echo denied"); got != "hi\ndenied\n" {
					t.Errorf("attached again, in %q: %q", c, got)
				}
			}
			off(t, q, a, data)
		})
	}
}

// TestVMDetachVolumeOfTheSetup detaches what was mounted before any program began.
func TestVMDetachVolumeOfTheSetup(t *testing.T) {
	base, data := busyboxDisks(t), rawDisk(t, 64*mebibyte, "")
	at := vm.Mount{Volume: "data", Path: "/data"}
	main := func(s *guest.Setup) { s.Mounts = []vm.Mount{at} }
	for name, root := range map[string]func(s *guest.Setup){
		"own root":       main,
		"read-only root": func(s *guest.Setup) { main(s); s.Process.ReadOnlyRoot = true },
		"containers": func(s *guest.Setup) {
			s.Process, s.Restart = nil, vm.RestartNever
			one, two := containerOf("one", vm.ContainerApp, "exec sleep 1000", at), containerOf("two", vm.ContainerApp, "exec sleep 1000", at)
			two.Process.ReadOnlyRoot = true
			s.Containers = []guest.Container{one, two}
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := bootGuest(t, withDisks(base, map[string]string{"data": data}))
			a := q.connect(t)
			s, in := diskSetup(diskVolume("data", 0)), []string{""}
			root(&s)
			if err := a.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if len(s.Containers) > 0 {
				in = []string{"one", "two", "eph"}
				eph := containerOf("eph", vm.ContainerEphemeral, "exec sleep 1000", vm.Mount{Volume: "data", Path: "/data", SubPath: "sub"})
				if err := a.(guest.ContainerAdder).AddContainer(t.Context(), eph); err != nil {
					t.Fatal(err)
				}
			}
			asRoot(t, a, in[len(in)-1], "echo hi > /data/f")
			v := a.(guest.VolumeAttacher)
			asRoot(t, a, in[0], "(cd /data && exec sleep 1000) >/dev/null 2>&1 </dev/null & echo $! > /dev/shm/pid")
			if err := v.DetachVolume(t.Context(), "data", "vol-data"); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("a program works there: %v", err)
			}
			for _, c := range in {
				if got := asRoot(t, a, c, "mount | grep -c ' /data type ext4 (rw'"); got != "1\n" {
					t.Errorf("refused, in %q: %q", c, got)
				}
			}
			if got := asRoot(t, a, in[len(in)-1], "cat /data/f"); got != "hi\n" {
				t.Errorf("refused: %q", got)
			}
			asRoot(t, a, in[0], "kill $(cat /dev/shm/pid); while kill -0 $(cat /dev/shm/pid) 2>/dev/null; do :; done")
			if err := v.DetachVolume(t.Context(), "data", "vol-data"); err != nil {
				t.Fatal(err)
			}
			for _, c := range in {
				if got := asRoot(t, a, c, "ls -A /data; mount | grep -c /data || true"); got != "0\n" {
					t.Errorf("detached, in %q: %q", c, got)
				}
			}
			off(t, q, a, data)
		})
	}
}
