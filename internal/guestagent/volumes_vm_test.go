//go:build vm

package guestagent_test

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func put(t *testing.T, a guest.Agent, v vm.Volume) {
	t.Helper()
	keeper, ok := a.(guest.VolumeKeeper)
	if !ok {
		t.Fatal("the agent keeps no volumes")
	}
	if err := keeper.PutVolume(t.Context(), v); err != nil {
		t.Fatal(err)
	}
}

func volumeSetup() guest.Setup {
	group := int64(2000)
	return guest.Setup{
		Hostname: "web-0",
		Process:  &vm.Process{Entrypoint: []string{"sh", "-c"}, Args: []string{"cat /etc/conf/key; exec sleep 1000"}, User: "33"},
		Volumes: []vm.Volume{
			{Name: "conf", Kind: vm.VolumeFiles},
			{Name: "secret", Kind: vm.VolumeFiles, Group: &group},
			{Name: "disk", Kind: vm.VolumeEmpty, Group: &group},
			{Name: "mem", Kind: vm.VolumeEmpty, Memory: true, SizeLimit: 1 << 20},
		},
		Mounts: []vm.Mount{
			{Volume: "conf", Path: "/etc/conf"},
			{Volume: "conf", Path: "/etc/one.conf", SubPath: "key"},
			{Volume: "conf", Path: "/made/on/the/way", SubPath: "sub"},
			{Volume: "secret", Path: "/secret", ReadOnly: true},
			{Volume: "disk", Path: "/data"},
			{Volume: "disk", Path: "/part", SubPath: "a/b"},
			{Volume: "disk", Path: "/look", ReadOnly: true},
			{Volume: "mem", Path: "/dev/shm"},
			{Volume: "mem", Path: "/link/mem"},
		},
	}
}

func confFiles(text string) vm.Volume {
	return vm.Volume{Name: "conf", Kind: vm.VolumeFiles, Files: []vm.VolumeFile{
		{Path: "key", Data: []byte(text + "\n"), Mode: 0o644}, {Path: "sub/deep", Data: []byte("deep\n"), Mode: 0o755},
	}}
}

func TestVMVolumes(t *testing.T) {
	disks := busyboxDisks(t)
	s := volumeSetup()
	secret := s.Volumes[1]
	secret.Files = []vm.VolumeFile{{Path: "token", Data: []byte("hush"), Mode: 0o600}}
	check := func(a guest.Agent, script, want string) {
		t.Helper()
		if got := output(t, a, sh(script)); got != want {
			t.Errorf("%s:\n got %q\nwant %q", script, got, want)
		}
	}
	begin := func(a guest.Agent) {
		t.Helper()
		put(t, a, confFiles("one"))
		put(t, a, secret)
		for range 2 { // a host that reconnects repeats the whole request
			if err := a.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
	}
	q := bootGuest(t, disks)
	a := q.connect(t)
	root := sh("mkdir -p /tmp/away; ln -s tmp/away /link")
	root.User = "root"
	output(t, a, root)
	begin(a)

	check(a, "cat /etc/conf/key /etc/one.conf /etc/conf/sub/deep /made/on/the/way/deep", "one\none\ndeep\ndeep\n")
	check(a, "cat /secret/token; id -G", "hush33 2000\n")
	check(a, "ls -l /etc/conf | grep -o 'key -> .*'; ls -ld /secret/..data/ | grep -o '^[a-z-]* .* 2000'", "key -> ..data/key\ndrwxr-sr-x    2 root     2000\n")
	check(a, "echo hi > /data/new; echo there > /part/new; cat /look/new /data/a/b/new; ls -l /data/new | grep -o '2000'", "hi\nthere\n2000\n")
	check(a, "echo mem > /dev/shm/x; cat /link/mem/x /tmp/away/mem/x", "mem\nmem\n")
	check(a, "dd if=/dev/zero of=/dev/shm/big bs=1k count=2000 2>/dev/null || echo full", "full\n")
	for _, denied := range []string{"/etc/conf/x", "/secret/x", "/etc/one.conf", "/look/x"} {
		e := sh("echo x > " + denied + " 2>/dev/null || echo denied")
		e.User = "root"
		if got := output(t, a, e); got != "denied\n" {
			t.Errorf("writing to %s: %q", denied, got)
		}
	}
	check(a, "mount | grep -c cocoon-volumes; ls -A /run", "0\n")

	put(t, a, confFiles("two"))
	check(a, "cat /etc/conf/key /etc/one.conf", "two\none\n") // a sub-path does not change, as with the kubelet
	a.Close()
	a = q.connect(t)
	put(t, a, confFiles("three"))
	check(a, "cat /etc/conf/key", "three\n")
	if err := a.Poweroff(t.Context(), time.Second); err != nil {
		t.Fatal(err)
	}
	q.waitEnd(t)
	a.Close()

	q = bootGuest(t, disks) // data on disk survives a restart, data in memory does not
	a = q.connect(t)
	defer a.Close()
	s.Process.ReadOnlyRoot, s.Process.WorkDir = true, "/work/made"
	begin(a)
	check(a, "cat /data/new /part/new; ls -A /dev/shm; cat /etc/conf/key", "hi\nthere\none\n")

	// The same with a root that even root cannot write to; volumes keep their mount options, and the agent is not
	// restricted.
	root = sh("pwd; for f in /x /etc/hosts /work/made/x; do echo x 2>/dev/null > $f || echo denied; done; echo yes > /data/yes; echo yes > /dev/shm/yes; cat /data/yes /dev/shm/yes")
	root.User = "root"
	if got := output(t, a, root); got != "/work/made\ndenied\ndenied\ndenied\nyes\nyes\n" {
		t.Errorf("with a read-only root: %q", got)
	}
	s.Hosts = []string{"10.0.0.9 web-0"}
	begin(a)
	put(t, a, confFiles("two"))
	check(a, "grep 10.0.0.9 /etc/hosts; cat /etc/conf/key", "10.0.0.9 web-0\ntwo\n")
}

// TestVMVolumesOfAHostileImage: links of the image can lead a mount only to paths inside the image.
func TestVMVolumesOfAHostileImage(t *testing.T) {
	for name, c := range map[string]struct {
		image, path, sub, want string
	}{
		"root":     {"ln -s / /evil", "/evil", "", "leads to the root folder"},
		"proc":     {"ln -s /proc/sys /evil", "/evil/x", "", "no such file"},
		"kernel":   {"ln -s /proc /evil", "/evil", "", "a file system of the kernel"},
		"magic":    {"ln -s /proc/self/root/tmp /evil", "/evil", "", "too many levels"},
		"dangling": {"ln -s nowhere /evil", "/evil", "", "broken symbolic link"},
		"file":     {"echo > /evil", "/evil", "", "is a file in this image"},
		"below":    {"echo > /evil", "/evil/x", "", "/evil is a file of the image"},
		"escape":   {"", "/data", "../../etc", "is not a path inside it"},
		"missing":  {"", "/data", "nothing", "the volume has no nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			if c.image != "" {
				e := sh(c.image)
				e.User = "root"
				output(t, a, e)
			}
			put(t, a, confFiles("one"))
			err := a.Setup(t.Context(), guest.Setup{
				Process: &vm.Process{Entrypoint: []string{"sleep", "1000"}},
				Volumes: []vm.Volume{{Name: "conf", Kind: vm.VolumeFiles}},
				Mounts:  []vm.Mount{{Volume: "conf", Path: c.path, SubPath: c.sub}},
			})
			if err == nil || !strings.Contains(err.Error(), c.want) || errdefs.IsUnavailable(err) {
				t.Errorf("%v (%v), want %q in it", err, errdefs.ClassOf(err), c.want)
			}
			if info, err := a.Info(t.Context()); err != nil || info.Process {
				t.Errorf("the main process runs without its volumes: %+v, %v", info, err)
			}
		})
	}
}
