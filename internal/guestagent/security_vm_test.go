//go:build vm

package guestagent_test

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMSecurity runs containers with different rights in one guest, whose kernel gets settings before they start.
func TestVMSecurity(t *testing.T) {
	q := bootGuest(t, busyboxDisks(t))
	a := q.connect(t)
	defer a.Close()
	k := a.(guest.ContainerKeeper)
	s := guest.Setup{Hostname: "web-0", Restart: vm.RestartNever}
	s.Sysctls = []vm.Sysctl{{Name: "kernel.none", Value: "1"}}
	if err := a.Setup(t.Context(), s); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "kernel.none: the kernel of the guest has no such setting") {
		t.Errorf("an unknown setting: %v", err)
	}
	s.Sysctls = []vm.Sysctl{{Name: "kernel.msgmax", Value: "10000000000"}}
	if err := a.Setup(t.Context(), s); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "kernel.msgmax: the kernel of the guest refuses the value") {
		t.Errorf("a value that is too large: %v", err)
	}
	s.Sysctls = []vm.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}, {Name: "net.ipv4.ip_local_port_range", Value: "20000 20100"}}
	var names []string
	for name, p := range map[string]vm.Process{
		"free":    {},
		"root":    {Security: &vm.Security{Capabilities: []string{"CHOWN", "NET_RAW"}}},
		"bare":    {Security: &vm.Security{NoNewPrivileges: true}},
		"user":    {User: "33:7", Security: &vm.Security{Capabilities: []string{"CHOWN", "NET_RAW"}, Groups: []int64{8, 9}}},
		"waiting": {StopSignal: "SIGUSR1"},
		"filter":  {User: "33:7", Security: &vm.Security{Capabilities: []string{"CHOWN", "NET_RAW"}, Filtered: true}},
		"covered": {Security: &vm.Security{Capabilities: []string{"SYS_ADMIN", "DAC_OVERRIDE"}, Masked: []string{"/proc/timer_list", "/sys/kernel", "/etc", "/none/x"}, ReadOnly: []string{"/proc/sys", "/bin", "/none"}}},
		"profile": {User: "33:7", Security: &vm.Security{Capabilities: []string{"CHOWN", "NET_RAW"}, SystemCalls: &vm.SystemCalls{
			Default: vm.CallAction{Do: vm.CallAllow},
			Rules: []vm.CallRule{
				{Calls: []string{"chmod", "fchmodat"}, Action: vm.CallAction{Do: vm.CallErrno, Data: 1}},
				{Calls: []string{"clone3", "setuid", "setgid", "setgroups", "chdir", "prctl", "capset", "unshare"}, Action: vm.CallAction{Do: vm.CallErrno, Data: 38}}, // a start needs them
			},
		}}},
		"strict": {Security: &vm.Security{NoNewPrivileges: true, Filtered: true}},
	} {
		c := containerOf(name, vm.ContainerApp, "exec sleep 1000")
		c.Process.User, c.Process.Security, c.Process.StopSignal = p.User, p.Security, p.StopSignal
		s.Containers, names = append(s.Containers, c), append(names, name)
	}
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	until(t, k, func(all []vm.ContainerStatus) bool {
		for _, c := range all {
			if c.State != vm.ContainerRunning {
				return false
			}
		}
		return true
	})
	for name, want := range map[string][]string{
		"free":    {"CapEff 1ffffffffff", "CapBnd 1ffffffffff", "NoNewPrivs 0", "Seccomp 0"},
		"root":    {"CapPrm 2001", "CapEff 2001", "CapBnd 2001", "NoNewPrivs 0"},
		"bare":    {"CapEff 0", "CapBnd 0", "NoNewPrivs 1"},
		"filter":  {"CapEff 0", "CapBnd 2001", "NoNewPrivs 0", "Seccomp 2", "Uid 33 33 33 33"},
		"profile": {"CapInh 0", "CapPrm 0", "CapEff 0", "CapBnd 2001", "NoNewPrivs 0", "Seccomp 2", "Uid 33 33 33 33", "Groups 7"},
		"strict":  {"CapBnd 0", "NoNewPrivs 1", "Seccomp 2"},
		"user":    {"CapInh 0", "CapPrm 0", "CapEff 0", "CapBnd 2001", "Uid 33 33 33 33", "Gid 7 7 7 7", "Groups 7 8 9"},
	} {
		own := sh(status)
		own.Container = name
		got := readable(output(t, a, own))
		for _, w := range want {
			if !strings.Contains(got, "\n"+w+"\n") {
				t.Errorf("%s: %q is missing in %s", name, w, got)
			}
		}
	}
	for i, s := range until(t, k, func([]vm.ContainerStatus) bool { return true }) {
		want := vm.ContainerUser{Groups: []int64{0}}
		switch names[i] {
		case "user":
			want = vm.ContainerUser{UID: 33, GID: 7, Groups: []int64{7, 8, 9}}
		case "filter", "profile":
			want = vm.ContainerUser{UID: 33, GID: 7, Groups: []int64{7}}
		}
		if d := diff.Of(&want, s.User); d != "" {
			t.Errorf("the user of %s: %s", names[i], d)
		}
	}
	for name, want := range map[string]string{"root": "denied\n", "free": "done\n"} {
		e := sh("mount -t tmpfs none /tmp 2>/dev/null && echo done || echo denied")
		e.Container = name
		if got := output(t, a, e); got != want {
			t.Errorf("a mount by %s: %s", name, got)
		}
	}
	for name, want := range map[string]string{"user": "done\n", "filter": "denied\n"} { // a user may make user namespaces
		e := sh("unshare -U true 2>/dev/null && echo done || echo denied")
		e.Container = name
		if got := output(t, a, e); got != want {
			t.Errorf("a user namespace by %s: %s", name, got)
		}
	}
	e := sh("touch /tmp/x; chmod 700 /tmp/x 2>&1; cat /proc/self/cgroup; ulimit -n")
	e.Container = "user"
	want := "chmod: /tmp/x: Operation not permitted\n" + output(t, a, e)
	e.Container = "profile"
	if got := output(t, a, e); got != want {
		t.Errorf("a command with a profile prints %q, want %q", got, want)
	}
	e = sh("wc -c </proc/timer_list; ls /sys/kernel /etc | grep -v : ; touch /etc/x /bin/x 2>/dev/null && echo written; echo 0 2>/dev/null >/proc/sys/kernel/shm_rmid_forced && echo set; cat /proc/sys/kernel/shm_rmid_forced")
	e.Container = "covered"
	if got := strings.Join(strings.Fields(output(t, a, e)), " "); got != "0 1" {
		t.Errorf("what is covered: %q", got)
	}
	e = sh("cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_local_port_range")
	e.Container = "user"
	if got := output(t, a, e); got != "1\n20000\t20100\n" {
		t.Errorf("settings of the kernel: %q", got)
	}
	if err := k.KillContainer(t.Context(), "waiting", 1, time.Minute); err != nil {
		t.Fatal(err)
	}
	all := until(t, k, func([]vm.ContainerStatus) bool { return true })
	for i, c := range s.Containers {
		if x := all[i].Exit; c.Name == "waiting" && (x == nil || x.Code != 128+10) {
			t.Errorf("it ended with %+v, want the end by SIGUSR1", x)
		}
	}
}
