package convert_test

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// filtered returns what a container has whose profile has that text.
func filtered(t *testing.T, text string, capabilities ...string) (*vm.SystemCalls, error) {
	t.Helper()
	from := container()
	from.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/profiles/p.json"}
	from.Linux.SecurityContext.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: capabilities}
	c, err := convert.Container(from, "c")
	if err != nil {
		t.Fatal(err)
	}
	c, err = convert.Filtered(c, from, convert.Finds{Profile: func(path string) ([]byte, error) {
		if path != "/profiles/p.json" {
			t.Errorf("profile %s", path)
		}
		return []byte(text), nil
	}})
	return c.Process.Security.SystemCalls, err
}

var (
	allow = vm.CallAction{Do: vm.CallAllow}
	deny  = vm.CallAction{Do: vm.CallErrno, Data: 1}
)

func TestProfiles(t *testing.T) {
	rule := func(a vm.CallAction, calls ...string) vm.CallRule { return vm.CallRule{Calls: calls, Action: a} }
	for name, tc := range map[string]struct {
		text         string
		capabilities []string
		want         vm.SystemCalls
	}{
		"deny some": {
			`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["chmod", "no such call", "Read"], "action": "SCMP_ACT_ERRNO"}], "more": 1}`, nil,
			vm.SystemCalls{Default: allow, Rules: []vm.CallRule{rule(deny, "chmod")}},
		},
		"allow some": {
			`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"],
			"flags": ["SECCOMP_FILTER_FLAG_LOG"], "syscalls": [{"name": "read", "action": "SCMP_ACT_ALLOW", "args": null},
			{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}, {"names": ["bpf"], "action": "SCMP_ACT_ERRNO"},
			{"names": [], "action": "SCMP_ACT_ALLOW"}, {"names": ["acct"], "action": "SCMP_ACT_KILL", "errnoRet": 7}]}`, nil,
			vm.SystemCalls{Default: vm.CallAction{Do: vm.CallErrno, Data: 38}, Rules: []vm.CallRule{
				rule(allow, "read"), rule(deny, "bpf"), rule(vm.CallAction{Do: vm.CallKillThread}, "acct"),
			}},
		},
		"arguments": {
			`{"defaultAction": "SCMP_ACT_KILL_PROCESS", "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}], "syscalls": [
			{"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 2114060288, "valueTwo": 5, "op": "SCMP_CMP_MASKED_EQ"}, {"index": 1, "value": 18446744073709551615, "op": "SCMP_CMP_NE"}]},
			{"names": ["personality"], "action": "SCMP_ACT_TRAP", "args": [{"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}, {"index": 0, "value": 8, "op": "SCMP_CMP_GE"}]}]}`, nil,
			vm.SystemCalls{Default: vm.CallAction{Do: vm.CallKillProcess}, Rules: []vm.CallRule{
				{Calls: []string{"clone"}, Action: allow, Args: []vm.CallArg{{Op: vm.ArgMasked, Value: 5, Mask: 2114060288}, {Index: 1, Op: vm.ArgNotEqual, Value: 1<<64 - 1}}},
				{Calls: []string{"personality"}, Action: vm.CallAction{Do: vm.CallTrap}, Args: []vm.CallArg{{Op: vm.ArgEqual}}},
				{Calls: []string{"personality"}, Action: vm.CallAction{Do: vm.CallTrap}, Args: []vm.CallArg{{Op: vm.ArgGreaterEqual, Value: 8}}},
			}},
		},
		"conditions": {
			`{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
			{"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
			{"names": ["setns"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN", "CAP_BPF"]}},
			{"names": ["unshare"], "action": "SCMP_ACT_LOG", "excludes": {"caps": ["CAP_BPF", "CAP_SYS_ADMIN"]}},
			{"names": ["ptrace"], "action": "SCMP_ACT_TRACE", "errnoRet": 7, "includes": {"minKernel": "4.8"}, "excludes": {"minKernel": "9.1"}},
			{"names": ["arch_prctl"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64", "x32"]}},
			{"names": ["modify_ldt"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm"]}},
			{"names": ["s390_sthyi"], "action": "SCMP_ACT_ALLOW", "excludes": {"arches": ["amd64"]}}]}`,
			[]string{"SYS_ADMIN"},
			vm.SystemCalls{Default: deny, Rules: []vm.CallRule{
				rule(allow, "mount"),
				{Calls: []string{"ptrace"}, Action: vm.CallAction{Do: vm.CallTrace, Data: 7}, Since: "4.8", Before: "9.1"},
				rule(allow, "arch_prctl"),
			}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := filtered(t, tc.text, tc.capabilities...)
			if err != nil {
				t.Fatal(err)
			}
			if d := diff.Of(&tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRefusedProfiles(t *testing.T) {
	syscalls := func(rules string) string { return `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [` + rules + `]}` }
	for name, tc := range map[string]struct{ text, want string }{
		"nothing":        {"", "no profile in JSON"},
		"no object":      {"[]", "no profile in JSON"},
		"no action":      {"{}", `unknown action ""`},
		"action":         {`{"defaultAction": "allow"}`, `unknown action "allow"`},
		"its rule":       {syscalls(`{"names": ["read"], "action": "SCMP_ACT_ALLOW"}, {"names": ["read"], "action": "SCMP_ACT_X"}`), `rule 2 of it: unknown action "SCMP_ACT_X"`},
		"notify":         {syscalls(`{"names": ["no such call"], "action": "SCMP_ACT_NOTIFY"}`), "SCMP_ACT_NOTIFY"},
		"listener":       {`{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/x"}`, "listenerPath"},
		"architecture":   {`{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_VAX"]}`, `unknown architecture "SCMP_ARCH_VAX"`},
		"of the map":     {`{"defaultAction": "SCMP_ACT_ALLOW", "archMap": [{"architecture": "X86"}]}`, `unknown architecture "X86"`},
		"flag":           {`{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["X"]}`, `unknown flag "X"`},
		"operator":       {syscalls(`{"names": ["read"], "action": "SCMP_ACT_ERRNO", "args": [{"op": "=="}]}`), `unknown operator "=="`},
		"argument":       {syscalls(`{"names": ["read"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 6, "op": "SCMP_CMP_EQ"}]}`), "no argument 6"},
		"error number":   {syscalls(`{"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 4096}`), "4096 is not an error number"},
		"kernel":         {syscalls(`{"names": ["read"], "action": "SCMP_ACT_ERRNO", "includes": {"minKernel": "new"}}`), `"new" is not the version`},
		"two names":      {syscalls(`{"name": "read", "names": ["write"], "action": "SCMP_ACT_ERRNO"}`), "both a name and names"},
		"too much of it": {syscalls(strings.Repeat(`{"names": ["read"], "action": "SCMP_ACT_ERRNO", "args": [{"op": "SCMP_CMP_EQ"}]},`, 400) + `{"names": ["read"], "action": "SCMP_ACT_ERRNO"}`), "compares 400 arguments"},
	} {
		if _, err := filtered(t, tc.text); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "profile /profiles/p.json: ") {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

// TestWhoHasAProfile: a privileged container ignores its profile, and a profile needs a path.
func TestWhoHasAProfile(t *testing.T) {
	from := container()
	from.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "p.json"}
	c, err := convert.Container(from, "c")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := convert.Filtered(c, from, convert.Finds{}); !errdefs.IsInvalid(err) {
		t.Errorf("a relative path: %v", err)
	}
	from.Linux.SecurityContext.Privileged = true
	if got, err := convert.Filtered(c, from, convert.Finds{}); err != nil || got.Process.Security.SystemCalls != nil {
		t.Errorf("a privileged container: %+v, %v", got.Process.Security, err)
	}
	from.Linux.SecurityContext.Seccomp, from.Linux.SecurityContext.Privileged = nil, false
	if got, err := convert.Filtered(c, from, convert.Finds{}); err != nil || got.Process.Security.SystemCalls != nil {
		t.Errorf("a container without a profile: %+v, %v", got.Process.Security, err)
	}
}

// FuzzProfile: whatever a profile has, it is refused, or means something that the engine takes.
func FuzzProfile(f *testing.F) {
	f.Add(`{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}`)
	f.Add(`{"defaultAction": "SCMP_ACT_ALLOW", "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}], "syscalls": [
		{"name": "clone", "action": "SCMP_ACT_KILL", "args": [{"index": 0, "value": 5, "valueTwo": 4, "op": "SCMP_CMP_MASKED_EQ"}, {"index": 0, "value": 1, "op": "SCMP_CMP_GT"}], "includes": {"caps": ["CAP_CHOWN"], "minKernel": "4.8"}, "excludes": {"arches": ["arm"]}}]}`)
	f.Add(`{"defaultAction": "SCMP_ACT_NOTIFY", "listenerPath": "/run/x"}`)
	f.Fuzz(func(t *testing.T, text string) {
		calls, err := filtered(t, text, "CHOWN")
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		if err := (&vm.Security{SystemCalls: calls}).Validate(); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	})
}
