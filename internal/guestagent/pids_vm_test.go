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

// TestVMPIDs: a container has processes of its own if that is asked for, and so have the commands in it; another one may see the same ones. Its
// program is process 1, and all others end with it.
func TestVMPIDs(t *testing.T) {
	q := bootGuest(t, busyboxDisks(t))
	a := q.connect(t)
	defer a.Close()
	k, adder := a.(guest.ContainerKeeper), a.(guest.ContainerAdder)
	shared := containerOf("shared", vm.ContainerApp, "exec sleep 1000")
	if err := a.Setup(t.Context(), guest.Setup{Hostname: "web-0", Restart: vm.RestartNever, Containers: []guest.Container{shared}}); err != nil {
		t.Fatal(err)
	}
	limited := &vm.Security{
		Capabilities: []string{"CHOWN", "SETUID", "SETGID"}, Filtered: true,
		Masked: []string{"/proc/timer_list"}, ReadOnly: []string{"/proc/sys"},
	}
	add := func(name, script string, pids vm.PIDs, s *vm.Security) {
		t.Helper()
		c := containerOf(name, vm.ContainerEphemeral, script)
		c.PIDs, c.Process.Security = pids, s
		if err := adder.AddContainer(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	add("own", "sleep 1001 & echo $$; exec sleep 1002", vm.PIDs{Own: true}, limited)
	add("free", "echo $$; trap 'echo asked; exit 7' TERM; sleep 1003 & wait", vm.PIDs{Own: true}, nil)
	logOf(t, k, "own", "1\n")
	logOf(t, k, "free", "1\n")
	add("beside", "exec sleep 1004", vm.PIDs{Of: "own"}, limited)
	add("second", "exec sleep 1005", vm.PIDs{Of: "beside"}, nil)
	running := func(all []vm.ContainerStatus) bool {
		for _, s := range all {
			if s.State != vm.ContainerRunning {
				return false
			}
		}
		return true
	}
	until(t, k, running)

	const sleeps = `for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline; echo; done | grep -o '^sleep [0-9]*' | sort`
	for _, tt := range []struct{ container, script, want string }{
		{"own", sleeps, "sleep 1001\nsleep 1002\nsleep 1004\nsleep 1005\n"},
		{"beside", sleeps, "sleep 1001\nsleep 1002\nsleep 1004\nsleep 1005\n"},
		{"second", sleeps, "sleep 1001\nsleep 1002\nsleep 1004\nsleep 1005\n"},
		{"free", sleeps, "sleep 1003\n"},
		{"shared", sleeps, "sleep 1000\nsleep 1001\nsleep 1002\nsleep 1003\nsleep 1004\nsleep 1005\n"},
		{"own", "tr '\\0' ' ' </proc/1/cmdline; test -e /proc/self/fd/0 && echo self; wc -c </proc/timer_list; echo 1 2>/dev/null >/proc/sys/kernel/shm_rmid_forced && echo set; grep -c . /proc/self/cgroup", "sleep 1002 self\n0\n1\n"},
		{"free", "grep -E '^(CapEff|Seccomp):' /proc/1/status", "CapEff:\t000001ffffffffff\nSeccomp:\t0\n"},
		{"own", "grep -E '^(CapEff|CapBnd|Seccomp):' /proc/1/status", "CapEff:\t00000000000000c1\nCapBnd:\t00000000000000c1\nSeccomp:\t2\n"},
		{"own", "kill -9 1; kill -0 1 && echo lives", "lives\n"}, // from inside
	} {
		e := sh(tt.script)
		e.Container = tt.container
		if got := output(t, a, e); got != tt.want {
			t.Errorf("%s: %s prints %q, want %q", tt.container, tt.script, got, tt.want)
		}
	}

	if err := k.KillContainer(t.Context(), "free", 1, time.Minute); err != nil { // its trap is asked
		t.Fatal(err)
	}
	if err := k.KillContainer(t.Context(), "own", 1, 0); err != nil {
		t.Fatal(err)
	}
	all := until(t, k, func(all []vm.ContainerStatus) bool {
		ended := 0
		for _, s := range all {
			if s.State == vm.ContainerTerminated {
				ended++
			}
		}
		return ended == 4
	})
	for i, want := range []int{-1, 137, 7, 137, 137} { // what sees the processes of one that ends has ended with them
		if x := all[i].Exit; want < 0 && x != nil || want >= 0 && (x == nil || x.Code != want) {
			t.Errorf("container %d ended with %+v, want %d", i, x, want)
		}
	}
	add("late", "true", vm.PIDs{Of: "own"}, nil)
	all = until(t, k, func(all []vm.ContainerStatus) bool { return all[5].State == vm.ContainerTerminated })
	if x := all[5].Exit; x.Reason != vm.ContainerStartError || !strings.Contains(x.Message, "container own, whose processes it is to see, is not running") {
		t.Errorf("one that sees processes of an ended container: %+v", x)
	}
	both := containerOf("both", vm.ContainerEphemeral, "true")
	both.PIDs = vm.PIDs{Own: true, Of: "shared"}
	if err := adder.AddContainer(t.Context(), both); !errdefs.IsInvalid(err) {
		t.Errorf("its own processes and those of another: %v", err)
	}
}
