package nodewire

import (
	"slices"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

func encodeSystemCalls(s *vm.SystemCalls) *nodev1.SystemCalls {
	if s == nil {
		return nil
	}
	return &nodev1.SystemCalls{Default: encodeCallAction(s.Default), Rules: each(s.Rules, encodeCallRule)}
}

func decodeSystemCalls(m *nodev1.SystemCalls) *vm.SystemCalls {
	if m == nil {
		return nil
	}
	return &vm.SystemCalls{Default: decodeCallAction(m.GetDefault()), Rules: each(m.GetRules(), decodeCallRule)}
}

func encodeCallAction(a vm.CallAction) *nodev1.CallAction {
	return &nodev1.CallAction{Do: a.Do, Data: int32(a.Data)}
}

func decodeCallAction(m *nodev1.CallAction) vm.CallAction {
	return vm.CallAction{Do: m.GetDo(), Data: int(m.GetData())}
}

func encodeCallRule(r vm.CallRule) *nodev1.CallRule {
	return &nodev1.CallRule{Calls: slices.Clone(r.Calls), Action: encodeCallAction(r.Action), Args: each(r.Args, encodeCallArg), Since: r.Since, Before: r.Before}
}

func decodeCallRule(m *nodev1.CallRule) vm.CallRule {
	return vm.CallRule{Calls: cloneSlice(m.GetCalls()), Action: decodeCallAction(m.GetAction()), Args: each(m.GetArgs(), decodeCallArg), Since: m.GetSince(), Before: m.GetBefore()}
}

func encodeCallArg(a vm.CallArg) *nodev1.CallArg {
	return &nodev1.CallArg{Index: int32(a.Index), Op: a.Op, Value: a.Value, Mask: a.Mask}
}

func decodeCallArg(m *nodev1.CallArg) vm.CallArg {
	return vm.CallArg{Index: int(m.GetIndex()), Op: m.GetOp(), Value: m.GetValue(), Mask: m.GetMask()}
}
