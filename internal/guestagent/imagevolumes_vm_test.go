//go:build vm

package guestagent_test

import (
	"fmt"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// volumesToShare are one of each kind.
func volumesToShare(c ...guest.Container) guest.Setup {
	return guest.Setup{
		Hostname: "web-0", Restart: vm.RestartNever, Containers: c,
		Volumes: []vm.Volume{
			{Name: "conf", Kind: vm.VolumeFiles},
			{Name: "disk", Kind: vm.VolumeEmpty},
			{Name: "mem", Kind: vm.VolumeEmpty, Memory: true},
			{Name: "files", Kind: vm.VolumeImage, Image: "demo"},
		},
		VolumeLayers: map[string][]string{"files": {"cocoon-l000"}},
	}
}

// TestVMFileKeys: containers read variables from what others have written into volumes, and nothing leads out of a volume.
func TestVMFileKeys(t *testing.T) {
	q := bootGuest(t, busyboxDisks(t))
	a := q.connect(t)
	defer a.Close()
	k := a.(guest.ContainerKeeper)
	both := []vm.Mount{{Volume: "disk", Path: "/disk"}, {Volume: "mem", Path: "/mem"}}
	key := func(volume, path string, optional bool) vm.FileKey {
		return vm.FileKey{Name: "V", Volume: volume, Path: path, Key: "V", Optional: optional, Absent: "none"}
	}
	reader := func(name string, f vm.FileKey) guest.Container {
		c := containerOf(name, vm.ContainerApp, "echo $V "+vm.FileWord(0))
		c.Process.FileKeys = []vm.FileKey{f}
		return c
	}
	writer := containerOf("writer", vm.ContainerInit, `mkdir /disk/d; echo "V='one'" > /disk/d/f; echo "V='two'" > /mem/f
		ln -s d/f /disk/link; ln -s /etc/passwd /disk/absolute; ln -s ../../../../etc/passwd /disk/up; ln -s /proc/1/environ /disk/proc; ln -s . /disk/d/self
		cp /dev/null /disk/empty; busybox mkfifo /disk/pipe; busybox mknod /disk/null c 1 3; busybox head -c 70000 /dev/zero > /disk/large`, both...)
	writer.Process.Args[0] = strings.ReplaceAll(writer.Process.Args[0], "cp /dev/null", "busybox cp /dev/null")
	all := []guest.Container{
		writer, reader("one", key("disk", "d/f", false)), reader("two", key("mem", "f", false)), reader("link", key("disk", "link", false)),
		reader("self", key("disk", "d/self/self/f", false)),
	}
	good := len(all)
	for _, path := range []string{"absolute", "up", "proc", "pipe", "null", "large", "d", "none", "empty"} {
		all = append(all, reader("bad-"+path, key("disk", path, false)))
	}
	all = append(all, reader("optional", key("disk", "none", true)))
	setup := volumesToShare(all...)
	if err := a.Setup(t.Context(), setup); err != nil {
		t.Fatal(err)
	}
	states := until(t, k, func(s []vm.ContainerStatus) bool {
		for i := range s {
			waits := s[i].Reason == vm.ContainerConfigError
			if bad := i >= good && i < len(s)-1; bad != waits || !bad && s[i].State != vm.ContainerTerminated {
				return false
			}
		}
		return true
	})
	for name, want := range map[string]string{"one": "one one\n", "two": "two two\n", "link": "one one\n", "self": "one one\n", "optional": "none\n"} {
		logOf(t, k, name, want)
	}
	for i, s := range states[good : len(states)-1] {
		if s.State != vm.ContainerWaiting || !s.StartedAt.IsZero() || strings.Contains(s.Message, "root:") {
			t.Errorf("%s: %+v", all[good+i].Name, s)
		}
	}
	if err := a.Poweroff(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	q.waitEnd(t)
}

// TestVMImageVolumes: the files of an image are a volume that nobody can write to or execute, also in the VM's own root. A container
// that is added later mounts every kind of volume.
func TestVMImageVolumes(t *testing.T) {
	for _, root := range []bool{false, true} {
		t.Run(fmt.Sprint("root ", root), func(t *testing.T) {
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			k, adder := a.(guest.ContainerKeeper), a.(guest.ContainerAdder)
			mounts := []vm.Mount{
				{Volume: "files", Path: "/img"},
				{Volume: "files", Path: "/one/user", SubPath: "etc/passwd"},
				{Volume: "files", Path: "/sub", SubPath: "bin"},
				{Volume: "conf", Path: "/conf"},
				{Volume: "disk", Path: "/disk"},
				{Volume: "mem", Path: "/mem"},
			}
			script := `ls -A /img; grep -c web /one/user; test -e /sub/busybox && echo there; /img/bin/busybox true 2>/dev/null || echo denied
				for f in /img/x /sub/x /one/user; do (echo > $f) 2>/dev/null || echo denied; done; echo d > /disk/f; echo m > /mem/f; exec sleep 1000`
			app := containerOf("app", vm.ContainerApp, script, mounts...)
			s := volumesToShare(app)
			if root {
				s.Containers[0].Root, s.Containers[0].Layers = true, nil
			} else {
				lacks := containerOf("lacks", vm.ContainerApp, "true", vm.Mount{Volume: "files", Path: "/img", SubPath: "none"})
				s.Containers = append(s.Containers, lacks)
			}
			for range 2 { // a host that reconnects repeats the whole request
				put(t, a, confFiles("one"))
				if err := a.Setup(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			logOf(t, k, "app", "bin\netc\nproc\n1\nthere\ndenied\ndenied\ndenied\ndenied\n")
			e := sh("mount | grep -c -e 'on /img.*ro,nosuid,nodev,noexec'; mount | grep -c ' on /run/'; ls -A /run 2>/dev/null || true")
			e.Container = "app"
			if got := output(t, a, e); got != "1\n0\n" {
				t.Errorf("the mounts: %q", got)
			}
			if !root {
				all := until(t, k, func(all []vm.ContainerStatus) bool { return all[1].Reason == vm.ContainerConfigError })
				if !strings.Contains(all[1].Message, "the volume has no none") {
					t.Errorf("a part that the image does not have: %+v", all[1])
				}
			}

			late := containerOf("late", vm.ContainerEphemeral, `cat /conf/key /disk/f /mem/f; ls -A /img; echo $V; echo late > /disk/late; for f in /img/x /conf/x; do (echo > $f) 2>/dev/null || echo denied; done; sleep 1000`,
				vm.Mount{Volume: "conf", Path: "/conf"}, vm.Mount{Volume: "disk", Path: "/disk"}, vm.Mount{Volume: "mem", Path: "/mem"}, vm.Mount{Volume: "files", Path: "/img"})
			late.Process.FileKeys = []vm.FileKey{{Name: "V", Volume: "mem", Path: "env", Key: "V"}}
			e = sh(`echo "V='eph'" > /mem/env`)
			e.Container = "app"
			output(t, a, e)
			for range 2 { // again is no error
				if err := adder.AddContainer(t.Context(), late); err != nil {
					t.Fatal(err)
				}
			}
			logOf(t, k, "late", "one\nd\nm\nbin\netc\nproc\neph\ndenied\ndenied\n")
			put(t, a, confFiles("two"))
			for name, want := range map[string]string{"late": "two\nlate\n", "app": "two\nlate\n"} {
				e := sh("cat /conf/key /disk/late")
				e.Container = name
				if got := output(t, a, e); got != want {
					t.Errorf("in %s: %q", name, got)
				}
			}
			late.Name, late.Mounts = "none", []vm.Mount{{Volume: "none", Path: "/v"}}
			if err := adder.AddContainer(t.Context(), late); !errdefs.IsInvalid(err) {
				t.Errorf("with a volume that the guest does not have: %v", err)
			}
			if err := a.Poweroff(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			q.waitEnd(t)
		})
	}
}
