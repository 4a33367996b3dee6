package convert

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file reads seccomp profiles of the node, in the form of OCI runtimes and in that of Docker.

// profile is a profile as its file has it. Flags have no effect: they change what is logged, or how fast processors guess.
type profile struct {
	DefaultAction    string        `json:"defaultAction"`
	DefaultErrnoRet  *int          `json:"defaultErrnoRet"`
	Architectures    []string      `json:"architectures"`
	ArchMap          []profileArch `json:"archMap"`
	Flags            []string      `json:"flags"`
	ListenerPath     string        `json:"listenerPath"`
	ListenerMetadata string        `json:"listenerMetadata"`
	Syscalls         []profileRule `json:"syscalls"`
}

type profileArch struct {
	Architecture     string   `json:"architecture"`
	SubArchitectures []string `json:"subArchitectures"`
}

type profileRule struct {
	Name     string        `json:"name"`
	Names    []string      `json:"names"`
	Action   string        `json:"action"`
	ErrnoRet *int          `json:"errnoRet"`
	Args     []profileArg  `json:"args"`
	Includes profileFilter `json:"includes"`
	Excludes profileFilter `json:"excludes"`
}

type profileArg struct {
	Index    int    `json:"index"`
	Value    uint64 `json:"value"`
	ValueTwo uint64 `json:"valueTwo"`
	Op       string `json:"op"`
}

type profileFilter struct {
	Caps      []string `json:"caps"`
	MinKernel string   `json:"minKernel"`
	Arches    []string `json:"arches"`
}

var profileActions = map[string]string{
	"SCMP_ACT_ALLOW": vm.CallAllow, "SCMP_ACT_LOG": vm.CallLog, "SCMP_ACT_ERRNO": vm.CallErrno, "SCMP_ACT_TRACE": vm.CallTrace, "SCMP_ACT_TRAP": vm.CallTrap,
	"SCMP_ACT_KILL": vm.CallKillThread, "SCMP_ACT_KILL_THREAD": vm.CallKillThread, "SCMP_ACT_KILL_PROCESS": vm.CallKillProcess,
}

var profileOps = map[string]string{
	"SCMP_CMP_EQ": vm.ArgEqual, "SCMP_CMP_NE": vm.ArgNotEqual, "SCMP_CMP_LT": vm.ArgLess, "SCMP_CMP_LE": vm.ArgLessEqual, "SCMP_CMP_GT": vm.ArgGreater,
	"SCMP_CMP_GE": vm.ArgGreaterEqual, "SCMP_CMP_MASKED_EQ": vm.ArgMasked,
}

// profileFlags are all that the OCI runtime specification has.
var profileFlags = []string{
	"SECCOMP_FILTER_FLAG_TSYNC", "SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW", "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV",
}

// profileArches are all that the OCI runtime specification has, without SCMP_ARCH_.
var profileArches = strings.Fields("NATIVE X86 X86_64 X32 ARM AARCH64 MIPS MIPS64 MIPS64N32 MIPSEL MIPSEL64 MIPSEL64N32 PPC PPC64 PPC64LE S390 S390X PARISC PARISC64 RISCV64 LOONGARCH64 M68K SH SHEB")

const (
	errnoDefault = 1       // EPERM, as other runtimes have it
	nativeArch   = "amd64" // the guest's, as Docker calls it
)

// Filtered returns c with the seccomp profile of the node that a configuration names. Capabilities of c decide which of its rules hold.
// Errors: InvalidArgument for a profile that cannot be kept.
func Filtered(c vm.Container, from *cri.ContainerConfig, find Finds) (vm.Container, error) {
	sc := from.GetLinux().GetSecurityContext()
	file := sc.GetSeccomp().GetLocalhostRef()
	if sc.GetSeccomp().GetProfileType() != cri.SecurityProfile_Localhost || sc.GetPrivileged() {
		return c, nil
	}
	if !path.IsAbs(file) {
		return c, errdefs.Invalidf("the seccomp profile %q must be the absolute path of a file of the node", file)
	}
	text, err := find.Profile(file)
	if err != nil {
		return c, err
	}
	s := c.Process.Security.Clone()
	if s.SystemCalls, err = parseProfile(text, s.Capabilities); err == nil {
		err = s.Validate()
	}
	if err != nil {
		return c, fmt.Errorf("seccomp profile %s: %w", file, err)
	}
	c.Process.Security = s
	return c, nil
}

// parseProfile returns the filter of a container with these capabilities.
func parseProfile(text []byte, capabilities []string) (*vm.SystemCalls, error) {
	var p profile
	if err := json.Unmarshal(text, &p); err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "it is no profile in JSON: %w", err)
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	out := &vm.SystemCalls{}
	var err error
	if out.Default, err = profileAction(p.DefaultAction, p.DefaultErrnoRet); err != nil {
		return nil, err
	}
	for i, r := range p.Syscalls {
		rules, err := r.rules(out.Default, capabilities)
		if err != nil {
			return nil, fmt.Errorf("rule %d of it: %w", i+1, err)
		}
		out.Rules = append(out.Rules, rules...)
	}
	return out, nil
}

// check refuses what a guest cannot do, and what nobody knows.
func (p *profile) check() error {
	arches := p.Architectures
	for _, a := range p.ArchMap {
		arches = append(append(arches, a.Architecture), a.SubArchitectures...)
	}
	for _, a := range arches {
		if name, ok := strings.CutPrefix(a, "SCMP_ARCH_"); !ok || !slices.Contains(profileArches, name) {
			return errdefs.Invalidf("unknown architecture %q", a)
		}
	}
	for _, f := range p.Flags {
		if !slices.Contains(profileFlags, f) {
			return errdefs.Invalidf("unknown flag %q", f)
		}
	}
	if p.ListenerPath != "" || p.ListenerMetadata != "" {
		return errdefs.Invalidf("it has a listener (listenerPath), which is a program of the node, and a guest cannot ask that; remove it")
	}
	return nil
}

func profileAction(name string, errno *int) (vm.CallAction, error) {
	do, ok := profileActions[name]
	switch {
	case name == "SCMP_ACT_NOTIFY":
		return vm.CallAction{}, errdefs.Invalidf("it has SCMP_ACT_NOTIFY, which asks a program of the node, and a guest cannot do that; use SCMP_ACT_ERRNO")
	case !ok:
		return vm.CallAction{}, errdefs.Invalidf("unknown action %q", name)
	case do != vm.CallErrno && do != vm.CallTrace:
		return vm.CallAction{Do: do}, nil
	case errno == nil:
		return vm.CallAction{Do: do, Data: errnoDefault}, nil
	}
	return vm.CallAction{Do: do, Data: *errno}, nil
}

// rules returns what r means for a container with these capabilities; nothing if it adds nothing to what happens otherwise.
func (r profileRule) rules(otherwise vm.CallAction, capabilities []string) ([]vm.CallRule, error) {
	action, err := profileAction(r.Action, r.ErrnoRet)
	if err != nil {
		return nil, err
	}
	names := r.Names
	switch {
	case r.Name != "" && len(names) > 0:
		return nil, errdefs.Invalidf("it has both a name and names; use names")
	case r.Name != "":
		names = []string{r.Name}
	}
	out := vm.CallRule{Action: action, Since: r.Includes.MinKernel, Before: r.Excludes.MinKernel}
	for _, name := range names {
		if vm.IsCallName(name) { // other runtimes ignore what they do not know, too
			out.Calls = append(out.Calls, name)
		}
	}
	repeated := false
	for i, a := range r.Args {
		op, ok := profileOps[a.Op]
		if !ok {
			return nil, errdefs.Invalidf("unknown operator %q", a.Op)
		}
		arg := vm.CallArg{Index: a.Index, Op: op, Value: a.Value}
		if op == vm.ArgMasked {
			arg.Mask, arg.Value = a.Value, a.ValueTwo
		}
		out.Args = append(out.Args, arg)
		repeated = repeated || slices.ContainsFunc(r.Args[:i], func(o profileArg) bool { return o.Index == a.Index })
	}
	switch {
	case action == otherwise || len(out.Calls) == 0 || !r.holds(capabilities):
		return nil, nil
	case !repeated:
		return []vm.CallRule{out}, nil
	}
	var all []vm.CallRule // several comparisons of one argument are alternatives, as in other runtimes
	for _, a := range out.Args {
		one := out
		one.Args = []vm.CallArg{a}
		all = append(all, one)
	}
	return all, nil
}

// holds reports whether the guest and a container with these capabilities are such as r wants. The guest itself looks at its kernel.
func (r profileRule) holds(capabilities []string) bool {
	has := func(name string) bool { return slices.Contains(capabilities, strings.TrimPrefix(name, "CAP_")) }
	lacks := func(name string) bool { return !has(name) }
	switch {
	case slices.Contains(r.Excludes.Arches, nativeArch), slices.ContainsFunc(r.Excludes.Caps, has):
		return false
	case len(r.Includes.Arches) > 0 && !slices.Contains(r.Includes.Arches, nativeArch), slices.ContainsFunc(r.Includes.Caps, lacks):
		return false
	}
	return true
}
