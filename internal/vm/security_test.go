package vm

import (
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestSecurityIsValidated(t *testing.T) {
	for name, tc := range map[string]struct {
		process Process
		want    string // in the message; "" if it is valid
	}{
		"none":         {},
		"all":          {process: Process{Security: &Security{Capabilities: AllCapabilities(), Groups: []int64{0, maxID}}, StopSignal: "SIGRTMIN+3"}},
		"with prefix":  {process: Process{Security: &Security{Capabilities: []string{"CAP_KILL"}}}, want: "without CAP_"},
		"lower case":   {process: Process{Security: &Security{Capabilities: []string{"kill"}}}, want: `unknown capability "kill"`},
		"group":        {process: Process{Security: &Security{Groups: []int64{maxID + 1}}}, want: "not the id of a group"},
		"many groups":  {process: Process{Security: &Security{Groups: make([]int64, maxGroups+1)}}, want: "too many additional groups"},
		"covered":      {process: Process{Security: &Security{Masked: []string{"/proc/kcore"}, ReadOnly: []string{"/proc/sys"}}}},
		"relative":     {process: Process{Security: &Security{Masked: []string{"proc"}}}, want: `invalid masked path "proc"`},
		"upwards":      {process: Process{Security: &Security{ReadOnly: []string{"/proc/.."}}}, want: `invalid read-only path "/proc/.."`},
		"all of it":    {process: Process{Security: &Security{Masked: []string{"/"}}}, want: `invalid masked path "/"`},
		"many paths":   {process: Process{Security: &Security{ReadOnly: make([]string, maxCovered+1)}}, want: "too many read-only paths"},
		"signal":       {process: Process{StopSignal: "no; signal"}, want: "invalid stop signal"},
		"signal by 15": {process: Process{StopSignal: "15"}},
	} {
		s := Spec{Name: "a", Image: "i", Process: tc.process}.Default()
		err := s.Validate()
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsInvalid(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
		s.Process, s.Containers = Process{}, []Container{{Name: "c", Image: "i", Kind: ContainerApp, Process: tc.process}}
		if err := s.Default().Validate(); (err == nil) != (tc.want == "") {
			t.Errorf("%s, of a container: %v", name, err)
		}
	}
}

func TestCapabilities(t *testing.T) {
	all := AllCapabilities()
	for name, want := range map[string]int{"CHOWN": 0, "NET_RAW": 13, "SYS_ADMIN": 21, "SETFCAP": 31, "CHECKPOINT_RESTORE": 40} {
		if n, ok := CapabilityNumber(name); !ok || n != want {
			t.Errorf("%s is %d, want %d", name, n, want)
		}
	}
	if _, ok := CapabilityNumber("ALL"); ok || len(all) != 41 {
		t.Errorf("%d capabilities", len(all))
	}
	if all[0] = "x"; slices.Contains(AllCapabilities(), "x") {
		t.Error("a caller can change the list")
	}
}

func TestProcessMayRunAsItsUser(t *testing.T) {
	strict := &Security{NonRoot: true}
	for user, want := range map[string]string{
		"": "image will run as root", "0": "image will run as root", "0:5": "image will run as root", ":5": "image will run as root",
		"root": "non-numeric user (root)", "web:33": "non-numeric user (web)", "1000": "", "1000:0": "", "-1": "non-numeric", "4294967296": "non-numeric",
	} {
		if err := (Process{User: user}).Allowed(); err != nil {
			t.Errorf("%q without the rule: %v", user, err)
		}
		err := Process{User: user, Security: strict}.Allowed()
		if want == "" && err != nil || want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", user, err, want)
		}
	}
}

func TestSysctls(t *testing.T) {
	for name, want := range map[string]string{
		"kernel.shm_rmid_forced": "kernel/shm_rmid_forced", "net.ipv4.conf.eth0/5.rp_filter": "net/ipv4/conf/eth0.5/rp_filter",
		"net/ipv4/conf/eth0.5/rp_filter": "net/ipv4/conf/eth0.5/rp_filter", "kernel": "kernel",
	} {
		s := Spec{Sysctls: []Sysctl{{Name: name, Value: "1 2\t3"}}}
		if err := s.ValidateSysctls(); err != nil || s.Sysctls[0].Path() != want {
			t.Errorf("%s is %s, want %s; %v", name, s.Sysctls[0].Path(), want, err)
		}
	}
	for _, c := range []Sysctl{
		{Name: ""},
		{Name: "../x"},
		{Name: "a..b"},
		{Name: "/a"},
		{Name: "a."},
		{Name: "a.-b"},
		{Name: "foo-"},
		{Name: "bar."},
		{Name: "A.b"},
		{Name: "a\x00"},
		{Name: strings.Repeat("a", maxSysctlName+1)},
		{Name: "a.b", Value: "1\n2"},
		{Name: "a.b", Value: strings.Repeat("1", maxSysctlValue+1)},
	} {
		if err := (Spec{Sysctls: []Sysctl{c}}).ValidateSysctls(); !errdefs.IsInvalid(err) {
			t.Errorf("%.40q=%.10q: %v", c.Name, c.Value, err)
		}
	}
	if err := (Spec{Sysctls: make([]Sysctl, maxSysctls+1)}).ValidateSysctls(); !errdefs.IsInvalid(err) {
		t.Errorf("too many: %v", err)
	}
}
