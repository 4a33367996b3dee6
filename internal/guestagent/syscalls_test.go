package guestagent_test

import (
	"bytes"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// needed are the calls of a shell with a few tools, and none that only the start of a process needs.
var needed = strings.Fields(`read write open openat close stat fstat newfstatat lstat access faccessat2 mmap munmap mprotect brk rt_sigaction rt_sigprocmask
	rt_sigreturn ioctl pread64 pwrite64 execve exit exit_group wait4 arch_prctl set_tid_address set_robust_list rseq prlimit64 getrandom fcntl dup2 dup
	pipe2 vfork fork clone getpid getppid getuid geteuid getgid getegid lseek getcwd getdents64 statfs readlink sysinfo uname futex poll fadvise64 umask nanosleep clock_nanosleep`)

func only(calls []string, otherwise vm.CallAction) *vm.SystemCalls {
	return &vm.SystemCalls{Default: otherwise, Rules: []vm.CallRule{{Calls: calls, Action: vm.CallAction{Do: vm.CallAllow}}}}
}

func except(errno int, calls ...string) *vm.SystemCalls {
	return &vm.SystemCalls{Default: vm.CallAction{Do: vm.CallAllow}, Rules: []vm.CallRule{{Calls: calls, Action: vm.CallAction{Do: vm.CallErrno, Data: errno}}}}
}

// inherited prints what a process has from its start.
const inherited = "pwd; ls /proc/self/fd; ulimit -n; ulimit -c; umask; env | grep -v ^_= | sort; cut -d' ' -f5-8 /proc/self/stat | wc -w; grep -E '^(Sig[^Q]|Shd)' /proc/self/status"

var kills = vm.CallAction{Do: vm.CallKillProcess}

// TestFilterOfAProfile runs real processes whose filter comes from a profile, and a command beside each.
func TestFilterOfAProfile(t *testing.T) {
	need.Root(t)
	start := except(1, "clone3", "setuid", "setgid", "setgroups", "chdir", "prctl", "capset", "unshare", "close_range", "setsid", "prlimit64", "dup3")
	for name, tc := range map[string]struct {
		user     string
		security vm.Security
		script   string
		want     []string
	}{
		"root": {"0:0", vm.Security{Capabilities: []string{"CHOWN"}, SystemCalls: except(38, "sethostname", "mkdir", "mkdirat")}, status + "; mkdir /tmp/x 2>&1", []string{
			"CapPrm 1", "CapEff 1", "CapBnd 1", "NoNewPrivs 0", "Seccomp 2", "Function not implemented",
		}},
		"user": {"1234:77", vm.Security{Capabilities: []string{"CHOWN"}, Groups: []int64{8}, SystemCalls: except(1, "mkdir", "mkdirat")}, status + "; mkdir /tmp/x 2>&1", []string{
			"CapPrm 0", "CapEff 0", "CapBnd 1", "CapInh 0", "CapAmb 0", "NoNewPrivs 0", "Seccomp 2", "Uid 1234 1234 1234 1234", "Gid 77 77 77 77", "Groups 8 77", "Operation not permitted",
		}},
		"user without new privileges": {"1234:77", vm.Security{NoNewPrivileges: true, SystemCalls: except(1, "mkdir")}, status, []string{
			"CapPrm 0", "CapBnd 0", "NoNewPrivs 1", "Seccomp 2", "Uid 1234 1234 1234 1234",
		}},
		"what a start needs":          {"1234:77", vm.Security{SystemCalls: start}, status, []string{"Seccomp 2", "Uid 1234 1234 1234 1234"}},
		"nothing but what it needs":   {"1234:77", vm.Security{SystemCalls: only(needed, kills)}, "echo here", []string{"here"}},
		"its folder, files and limit": {"0:0", vm.Security{SystemCalls: except(1, "mkdir")}, inherited, []string{"FREE"}},
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := newAgent(t)
			s := setup("exec sleep 60")
			s.Process.WorkDir = "/"
			if err := a.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			free := readable(output(t, a, sh(inherited+"; true")))
			s.Process.User, s.Process.Security = tc.user, &tc.security
			b, _ := newAgent(t)
			if err := b.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			beside := output(t, b, sh(tc.script+"; true"))
			s.Process.Args = []string{tc.script}
			c, _ := newAgent(t)
			if err := c.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			var own string
			for _, e := range logs(t, c, 0) {
				own += string(e.Data)
			}
			for _, got := range []string{readable(own), readable(beside)} {
				for _, w := range tc.want {
					if !strings.Contains(got, strings.ReplaceAll(w, "FREE", free)) {
						t.Errorf("%q is missing in %s", w, got)
					}
				}
			}
		})
	}
}

// TestFilterThatForbidsTheStart: the start of a command fails or the filter ends it, whatever it forbids.
func TestFilterThatForbidsTheStart(t *testing.T) {
	need.Root(t)
	for name, tc := range map[string]struct {
		calls *vm.SystemCalls
		code  int    // of its end
		want  string // or of the error of its start
	}{
		"execve":      {calls: except(1, "execve"), want: "operation not permitted"},
		"everything":  {calls: only(nil, vm.CallAction{Do: vm.CallErrno, Data: 13}), want: "permission denied"},
		"by the end":  {calls: only(nil, kills), code: 128 + 31},
		"by a signal": {calls: only(nil, vm.CallAction{Do: vm.CallTrap}), code: 128 + 31},
		"a tracer":    {calls: only(nil, vm.CallAction{Do: vm.CallTrace, Data: 1}), want: "not implemented"},
		"of threads":  {calls: only(nil, vm.CallAction{Do: vm.CallKillThread}), code: 128 + 31},
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := newAgent(t)
			s := setup("echo never")
			s.Process.WorkDir, s.Process.Security = "/", &vm.Security{SystemCalls: tc.calls}
			if err := a.Setup(t.Context(), s); tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%v", err)
				}
				return
			} else if err != nil {
				t.Fatal(err)
			}
			exit, err := a.Wait(t.Context())
			if err != nil || exit.Code != tc.code {
				t.Errorf("it ended with %+v: %v", exit, err)
			}
		})
	}
	a, _ := newAgent(t)
	s := setup("exec sleep 60")
	s.Process.WorkDir, s.Process.Security = "/", &vm.Security{SystemCalls: except(1, "mkdir")}
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for what, command := range map[string][]string{"does not exist": {"/none"}, "is a folder": {"/tmp"}} {
		var out bytes.Buffer
		if _, err := a.Exec(t.Context(), guest.Exec{Command: command}, guest.Streams{Stdout: &out}); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v: %v", command, err)
		}
	}
}
