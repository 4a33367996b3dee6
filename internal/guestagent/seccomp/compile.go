package seccomp

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
)

// atArgs is the offset of the arguments in struct seccomp_data. Each has 8 bytes, the lower half first.
const atArgs = 16

// results are what a filter returns for the actions.
var results = map[string]uint32{
	vm.CallAllow: unix.SECCOMP_RET_ALLOW, vm.CallLog: unix.SECCOMP_RET_LOG, vm.CallErrno: unix.SECCOMP_RET_ERRNO, vm.CallTrace: unix.SECCOMP_RET_TRACE,
	vm.CallTrap: unix.SECCOMP_RET_TRAP, vm.CallKillThread: unix.SECCOMP_RET_KILL_THREAD, vm.CallKillProcess: unix.SECCOMP_RET_KILL_PROCESS,
}

func result(a vm.CallAction) uint32 { return results[a.Do] | uint32(a.Data)&unix.SECCOMP_RET_DATA }

// Compile returns the filter of s for a kernel of that release. Calls of 32-bit programs fail with ENOSYS, because they have other numbers.
// Preconditions: s is valid.
func Compile(s *vm.SystemCalls, release string) (Filter, error) {
	var rules []vm.CallRule
	for _, r := range s.Rules {
		if (r.Since == "" || !older(release, r.Since)) && (r.Before == "" || older(release, r.Before)) {
			rules = append(rules, r)
		}
	}
	out := []bpf.Instruction{
		bpf.LoadAbsolute{Off: atArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: archAMD64, SkipTrue: 1},
		bpf.RetConstant{Val: unknown},
		bpf.LoadAbsolute{Off: atNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32, SkipTrue: 1},
		bpf.RetConstant{Val: unknown},
	}
	raw, err := bpf.Assemble(append(out, search(ranges(rules, result(s.Default)))...))
	if err != nil {
		return nil, fmt.Errorf("assemble the filter of system calls: %w", err)
	}
	if len(raw) > unix.BPF_MAXINSNS {
		return nil, fmt.Errorf("the filter of system calls needs %d instructions; the kernel accepts %d", len(raw), unix.BPF_MAXINSNS)
	}
	return raw, nil
}

// span is what happens for calls from a number on.
type span struct {
	first uint32
	code  []bpf.Instruction // returns in every case
}

// ranges returns what happens for all numbers, the lowest first.
func ranges(rules []vm.CallRule, otherwise uint32) []span {
	fixed, tested := map[uint32]uint32{}, map[uint32][]bpf.Instruction{}
	for _, r := range rules {
		for _, name := range r.Calls {
			n, known := numbers[name]
			if !known {
				continue
			}
			if len(r.Args) > 0 {
				tested[n] = append(tested[n], test(r.Args, result(r.Action))...)
			} else if _, has := fixed[n]; !has {
				fixed[n] = result(r.Action)
			}
		}
	}
	out := []span{{0, []bpf.Instruction{bpf.RetConstant{Val: otherwise}}}}
	add := func(first uint32, code ...bpf.Instruction) {
		switch last := &out[len(out)-1]; {
		case slices.Equal(last.code, code):
		case last.first == first:
			last.code = code
		default:
			out = append(out, span{first, code})
		}
	}
	last := slices.Max(slices.Collect(maps.Values(numbers)))
	for n := range last + 1 {
		always, is := fixed[n]
		switch {
		case is:
			add(n, bpf.RetConstant{Val: always})
		case len(tested[n]) > 0:
			add(n, append(tested[n], bpf.RetConstant{Val: otherwise})...)
		default:
			add(n, bpf.RetConstant{Val: otherwise})
		}
	}
	add(last+1, bpf.RetConstant{Val: otherwise})
	return out
}

// search returns code that finds the span of the number in the register.
func search(all []span) []bpf.Instruction {
	if len(all) == 1 {
		return all[0].code
	}
	half := len(all) / 2
	low, high := search(all[:half]), search(all[half:])
	var out []bpf.Instruction
	if len(low) > 255 {
		out = append(out, bpf.JumpIf{Cond: bpf.JumpLessThan, Val: all[half].first, SkipTrue: 1}, bpf.Jump{Skip: uint32(len(low))})
	} else {
		out = append(out, bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: all[half].first, SkipTrue: uint8(len(low))})
	}
	return slices.Concat(out, low, high)
}

// test returns code that returns then if all arguments match, and otherwise goes on behind itself.
func test(args []vm.CallArg, then uint32) []bpf.Instruction {
	out := []bpf.Instruction{bpf.RetConstant{Val: then}}
	for _, a := range slices.Backward(args) {
		out = append(compare(a, uint8(len(out))), out...)
	}
	return out
}

// compare returns code that goes on behind itself if an argument matches, and otherwise skips as many instructions more.
func compare(a vm.CallArg, skip uint8) []bpf.Instruction {
	at := atArgs + 8*uint32(a.Index)
	loadHigh, loadLow := bpf.LoadAbsolute{Off: at + 4, Size: 4}, bpf.LoadAbsolute{Off: at, Size: 4}
	high, low := uint32(a.Value>>32), uint32(a.Value)
	// ordered compares by a condition whose result for the lower halves decides if the upper halves are equal.
	ordered := func(last bpf.JumpTest, greater bool) []bpf.Instruction {
		out := []bpf.Instruction{loadHigh}
		if greater {
			out = append(out, bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: high, SkipTrue: 3}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: high, SkipFalse: 2 + skip})
		} else {
			out = append(out, bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: high, SkipTrue: 3 + skip}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: high, SkipFalse: 2})
		}
		return append(out, loadLow, bpf.JumpIf{Cond: last, Val: low, SkipFalse: skip})
	}
	switch a.Op {
	case vm.ArgNotEqual:
		return []bpf.Instruction{
			loadHigh,
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: high, SkipFalse: 2},
			loadLow,
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: low, SkipTrue: skip},
		}
	case vm.ArgLess:
		return ordered(bpf.JumpLessThan, false)
	case vm.ArgLessEqual:
		return ordered(bpf.JumpLessOrEqual, false)
	case vm.ArgGreater:
		return ordered(bpf.JumpGreaterThan, true)
	case vm.ArgGreaterEqual:
		return ordered(bpf.JumpGreaterOrEqual, true)
	case vm.ArgMasked:
		return []bpf.Instruction{
			loadHigh,
			bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(a.Mask >> 32)},
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: high, SkipFalse: 3 + skip},
			loadLow,
			bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(a.Mask)},
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: low, SkipFalse: skip},
		}
	}
	return []bpf.Instruction{ // vm.ArgEqual
		loadHigh,
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: high, SkipFalse: 2 + skip},
		loadLow,
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: low, SkipFalse: skip},
	}
}

// older reports whether a kernel of that release is older than version, which is MAJOR.MINOR.
func older(release, version string) bool {
	parts := func(s string) (out [2]int) {
		for i, part := range strings.SplitN(s, ".", 3) {
			if i < len(out) {
				digits := strings.IndexFunc(part, func(r rune) bool { return r < '0' || r > '9' })
				if digits >= 0 {
					part = part[:digits]
				}
				out[i], _ = strconv.Atoi(part)
			}
		}
		return out
	}
	is, want := parts(release), parts(version)
	return slices.Compare(is[:], want[:]) < 0
}
