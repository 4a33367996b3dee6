package vm

import (
	"regexp"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// SystemCalls filters the system calls of a process (a seccomp profile). A rule without arguments holds before those with arguments; otherwise
// the first rule that matches holds.
type SystemCalls struct {
	Default CallAction `json:"default"` // of calls that no rule matches
	Rules   []CallRule `json:"rules,omitempty"`
}

// CallAction is what happens when a process makes a system call.
type CallAction struct {
	Do   string `json:"do"`             // one of the Call constants
	Data int    `json:"data,omitempty"` // the error number of CallErrno and CallTrace
}

// What happens when a process makes a system call.
const (
	CallAllow       = "allow"
	CallLog         = "log"   // it is done, and the kernel may log it
	CallErrno       = "errno" // it fails with an error number
	CallTrace       = "trace" // a tracer decides; it fails if there is none
	CallTrap        = "trap"  // the process gets SIGSYS
	CallKillThread  = "kill-thread"
	CallKillProcess = "kill-process"
)

// CallRule is the action of some system calls.
type CallRule struct {
	Calls  []string   `json:"calls"` // names of Linux; those that the kernel of the guest does not know mean nothing
	Action CallAction `json:"action"`
	Args   []CallArg  `json:"args,omitempty"` // all have to match

	Since  string `json:"since,omitempty"`  // the rule needs a kernel of this version (MAJOR.MINOR) or newer
	Before string `json:"before,omitempty"` // the rule needs a kernel that is older
}

// CallArg compares an argument of a system call, as a number of 64 bits.
type CallArg struct {
	Index int    `json:"index,omitempty"` // 0 to 5
	Op    string `json:"op"`              // one of the Arg constants
	Value uint64 `json:"value,omitempty"`
	Mask  uint64 `json:"mask,omitempty"` // of ArgMasked: the bits that are compared
}

// How an argument of a system call is compared with a value.
const (
	ArgEqual        = "eq"
	ArgNotEqual     = "ne"
	ArgLess         = "lt"
	ArgLessEqual    = "le"
	ArgGreater      = "gt"
	ArgGreaterEqual = "ge"
	ArgMasked       = "masked" // the bits of the mask are equal
)

var (
	callActions = []string{CallAllow, CallLog, CallErrno, CallTrace, CallTrap, CallKillThread, CallKillProcess}
	argOps      = []string{ArgEqual, ArgNotEqual, ArgLess, ArgLessEqual, ArgGreater, ArgGreaterEqual, ArgMasked}

	callNameRE  = regexp.MustCompile(`^[a-z0-9_]{1,64}$`)
	kernelAgeRE = regexp.MustCompile(`^[0-9]{1,5}\.[0-9]{1,5}$`)
)

// Limits of a filter. The kernel accepts 4096 instructions, and one with maxCallTests fits.
const (
	maxCallNames = 4096
	maxCallTests = 340 // comparisons of arguments, one for each call of a rule that has it
	maxErrno     = 4095
	maxCallArg   = 5
)

// IsCallName reports whether name can be that of a system call.
func IsCallName(name string) bool { return callNameRE.MatchString(name) }

// validate returns the first thing that makes s impossible, as an InvalidArgument error.
func (s *SystemCalls) validate() error {
	if s == nil {
		return nil
	}
	if err := s.Default.validate(); err != nil {
		return err
	}
	names, tests := 0, 0
	for _, r := range s.Rules {
		if err := r.validate(); err != nil {
			return err
		}
		names += len(r.Calls)
		tests += len(r.Calls) * len(r.Args)
	}
	switch {
	case names > maxCallNames:
		return errdefs.Invalidf("the filter of system calls has %d names; at most %d are possible", names, maxCallNames)
	case tests > maxCallTests:
		return errdefs.Invalidf("the filter of system calls compares %d arguments; at most %d are possible", tests, maxCallTests)
	}
	return nil
}

func (a CallAction) validate() error {
	switch {
	case !slices.Contains(callActions, a.Do):
		return errdefs.Invalidf("unknown action %q of a system call", a.Do)
	case a.Data < 0 || a.Data > maxErrno:
		return errdefs.Invalidf("%d is not an error number; at most %d is possible", a.Data, maxErrno)
	}
	return nil
}

func (r CallRule) validate() error {
	for _, name := range r.Calls {
		if !IsCallName(name) {
			return errdefs.Invalidf("%q is not the name of a system call", name)
		}
	}
	if len(r.Args) > maxCallArg+1 {
		return errdefs.Invalidf("a rule compares %d arguments of a system call; it has at most %d", len(r.Args), maxCallArg+1)
	}
	for _, a := range r.Args {
		switch {
		case a.Index < 0 || a.Index > maxCallArg:
			return errdefs.Invalidf("a system call has no argument %d; the last one is %d", a.Index, maxCallArg)
		case !slices.Contains(argOps, a.Op):
			return errdefs.Invalidf("unknown comparison %q of the argument of a system call", a.Op)
		}
	}
	for _, v := range []string{r.Since, r.Before} {
		if v != "" && !kernelAgeRE.MatchString(v) {
			return errdefs.Invalidf("%q is not the version of a kernel; use for example 4.8", v)
		}
	}
	return r.Action.validate()
}

// Filters returns what of s filters system calls.
func (s *Security) Filters() Security {
	if s == nil {
		return Security{}
	}
	return Security{Filtered: s.Filtered, SystemCalls: s.SystemCalls}
}

// Clone returns a copy of s that shares no memory with it.
func (s *SystemCalls) Clone() *SystemCalls {
	if s == nil {
		return nil
	}
	c := *s
	c.Rules = cloneSlice(s.Rules)
	for i, r := range c.Rules {
		c.Rules[i].Calls, c.Rules[i].Args = cloneSlice(r.Calls), cloneSlice(r.Args)
	}
	return &c
}
