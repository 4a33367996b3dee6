package containerdtest

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// widow removes what a test leaves that was killed: it waits for the end of its input, which the test holds open as long as it lives. If
// the folder is there then, the test did not clean up. Processes are known by the folder in their arguments, so the script gets it
// otherwise; those of containers are children of such.
const widow = `
cat >/dev/null
[ -d "$WATCHED" ] || exit 0
cgroups=
for id in "$WATCHED"/state/io.containerd.runtime.v2.task/*/*; do
	namespace=${id%/*}
	cgroups="$cgroups $(echo /sys/fs/cgroup/*/"${namespace##*/}/${id##*/}")"
done
for round in 1 2 3; do
	for cgroup in $cgroups; do
		kill -9 $(cat "$cgroup/cgroup.procs") 2>/dev/null
	done 2>/dev/null
	for file in $(grep -lsF -- "$WATCHED/" /proc/[0-9]*/cmdline); do
		pid=${file#/proc/} && pid=${pid%/cmdline}
		kill -9 $(cat /proc/$pid/task/*/children 2>/dev/null) $pid 2>/dev/null
	done
	sleep 1
done
rmdir $cgroups /sys/fs/cgroup/*/k8s.io /sys/fs/cgroup/*/capsule 2>/dev/null
awk -v below="$WATCHED/" 'index($5, below) == 1 {print $5}' /proc/self/mountinfo | sort -r | xargs -r umount -l
rm -rf --one-file-system "$WATCHED"
`

// watch lets the folder of a containerd, and all processes that work in it, go when this process is killed. Cleanups of the test that
// are registered later run before it looks, and it looks at once when the test ends.
func watch(t testing.TB, dir string) {
	t.Helper()
	watched, held, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer watched.Close()
	cmd := exec.Command("sh", "-c", widow)
	cmd.Env = append(os.Environ(), "WATCHED="+dir)
	cmd.Stdin = watched
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is not meant for it
	if err := cmd.Start(); err != nil {
		held.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		held.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the watch over %s: %v", dir, err)
		}
	})
}
