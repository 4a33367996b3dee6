package guestagent_test

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// status prints what the kernel says about the rights of a process.
const status = "grep -E '^(Uid|Gid|Groups|Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp):' /proc/self/status"

// TestLimitsOfAProcess runs real processes with limits, and a command beside each, which has the same ones.
func TestLimitsOfAProcess(t *testing.T) {
	need.Root(t)                       // processes of other users
	chown := []string{"CHOWN", "KILL"} // bits 0 and 5
	for name, tc := range map[string]struct {
		user     string
		security vm.Security
		want     []string
	}{
		"root": {"0:0", vm.Security{Capabilities: chown}, []string{
			"CapInh 0", "CapPrm 21", "CapEff 21", "CapBnd 21", "CapAmb 0", "NoNewPrivs 0", "Groups 0",
		}},
		"no capabilities": {"0:0", vm.Security{}, []string{"CapPrm 0", "CapEff 0", "CapBnd 0"}},
		"another user": {"1234:77", vm.Security{Capabilities: chown, NoNewPrivileges: true}, []string{
			"CapInh 0", "CapPrm 0", "CapEff 0", "CapBnd 21", "NoNewPrivs 1", "Uid 1234 1234 1234 1234", "Gid 77 77 77 77", "Groups 77",
		}},
		"filter":           {"0:0", vm.Security{Capabilities: chown, Filtered: true}, []string{"CapEff 21", "NoNewPrivs 0", "Seccomp 2"}},
		"filter of a user": {"1234:77", vm.Security{NoNewPrivileges: true, Filtered: true}, []string{"NoNewPrivs 1", "Seccomp 2", "Uid 1234 1234 1234 1234"}},
		"groups":           {"1234:77", vm.Security{Groups: []int64{9, 77, 8, 9}, StrictGroups: true}, []string{"Groups 8 9 77"}},
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := newAgent(t)
			s := setup(status + "; echo main $$; exec sleep 1000")
			s.Process.User, s.Process.Security, s.Process.WorkDir = tc.user, &tc.security, "/"
			if err := a.Setup(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			var own, beside string
			err := a.Logs(t.Context(), 0, func(e guest.LogEntry) error {
				pid, last := strings.CutPrefix(string(e.Data), "main ")
				if !last {
					own += string(e.Data)
					return nil
				}
				var out bytes.Buffer
				code, err := a.Exec(t.Context(), sh(status+" && kill -9 "+pid), guest.Streams{Stdout: &out})
				if code != 0 {
					err = errors.Join(err, fmt.Errorf("exit code %d", code))
				}
				beside = readable(out.String())
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range tc.want {
				if !strings.Contains(beside, "\n"+want+"\n") {
					t.Errorf("%q is missing in %s", want, beside)
				}
			}
			if main := readable(own); main != beside {
				t.Errorf("the main process has %s, a command beside it %s", main, beside)
			}
		})
	}
}

// readable drops zeros, colons and tabs.
func readable(status string) string {
	status = regexp.MustCompile(`(?m)^(Cap...:)\s+0*([0-9a-f])`).ReplaceAllString(status, "$1 $2")
	status = regexp.MustCompile(`[ \t]+`).ReplaceAllString(status, " ")
	return "\n" + strings.ReplaceAll(strings.ReplaceAll(status, ":", ""), " \n", "\n")
}

func TestLimitsAreCheckedBeforeTheStart(t *testing.T) {
	for name, change := range map[string]func(*guest.Setup){
		"capability": func(s *guest.Setup) { s.Process.Security = &vm.Security{Capabilities: []string{"FLY"}} },
		"group":      func(s *guest.Setup) { s.Process.Security = &vm.Security{Groups: []int64{-1}} },
		"sysctl":     func(s *guest.Setup) { s.Sysctls = []vm.Sysctl{{Name: "../x", Value: "1"}} },
	} {
		a, m := newAgent(t)
		s := setup("exit 1")
		change(&s)
		if err := a.Setup(t.Context(), s); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
		if len(m.tuned) > 0 {
			t.Errorf("%s: the kernel was changed: %v", name, m.tuned)
		}
	}
}

// The settings of the kernel belong to the guest once its programs run.
func TestSysctlsAreSetOnce(t *testing.T) {
	a, m := newAgent(t)
	s := setup("exec sleep 1000")
	s.Sysctls = []vm.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}}
	for range 2 {
		if err := a.Setup(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.tuned) != 1 || m.tuned[0] != s.Sysctls[0] {
		t.Errorf("settings: %v", m.tuned)
	}
}
