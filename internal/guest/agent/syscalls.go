package agent

import (
	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

func systemCalls(s *vm.SystemCalls) *guestv1.SystemCalls {
	if s == nil {
		return nil
	}
	out := &guestv1.SystemCalls{Default: callAction(s.Default)}
	for _, r := range s.Rules {
		m := &guestv1.CallRule{Calls: r.Calls, Action: callAction(r.Action), Since: r.Since, Before: r.Before}
		for _, a := range r.Args {
			m.Args = append(m.Args, &guestv1.CallArg{Index: int32(a.Index), Op: a.Op, Value: a.Value, Mask: a.Mask})
		}
		out.Rules = append(out.Rules, m)
	}
	return out
}

func callAction(a vm.CallAction) *guestv1.CallAction {
	return &guestv1.CallAction{Do: a.Do, Data: int32(a.Data)}
}

// filters reports whether a process has a filter of its own, which an earlier agent would ignore.
func filters(p vm.Process) bool { return p.Security != nil && p.Security.SystemCalls != nil }
