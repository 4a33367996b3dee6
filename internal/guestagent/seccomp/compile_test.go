package seccomp

import (
	"encoding/binary"
	"runtime"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
)

func ret(do string, data int) uint32 { return result(vm.CallAction{Do: do, Data: data}) }

// machine returns a machine that runs f as the kernel does.
func machine(t *testing.T, f Filter) func(arch, number uint32, args ...uint64) uint32 {
	t.Helper()
	b, err := f.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	var again Filter
	if err := again.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	code, ok := bpf.Disassemble(again)
	if !ok {
		t.Fatal("the filter has an unknown instruction")
	}
	m, err := bpf.NewVM(code)
	if err != nil {
		t.Fatal(err)
	}
	return func(arch, number uint32, args ...uint64) uint32 {
		data := make([]byte, 64)
		binary.BigEndian.PutUint32(data[atNumber:], number)
		binary.BigEndian.PutUint32(data[atArch:], arch)
		for i, a := range args { // the machine reads big-endian words
			binary.BigEndian.PutUint32(data[atArgs+8*i:], uint32(a))
			binary.BigEndian.PutUint32(data[atArgs+8*i+4:], uint32(a>>32))
		}
		got, err := m.Run(data)
		if err != nil {
			t.Fatal(err)
		}
		return uint32(got)
	}
}

func compiled(t *testing.T, s *vm.SystemCalls) Filter {
	t.Helper()
	if err := (&vm.Security{SystemCalls: s}).Validate(); err != nil {
		t.Fatal(err)
	}
	f, err := Compile(s, "6.12.5+deb13-cloud-amd64")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestCompile(t *testing.T) {
	rule := func(do string, data int, args []vm.CallArg, calls ...string) vm.CallRule {
		return vm.CallRule{Calls: calls, Action: vm.CallAction{Do: do, Data: data}, Args: args}
	}
	run := machine(t, compiled(t, &vm.SystemCalls{Default: vm.CallAction{Do: vm.CallErrno, Data: 38}, Rules: []vm.CallRule{
		rule(vm.CallTrap, 0, []vm.CallArg{{Op: vm.ArgEqual, Value: 7}}, "read"), // the one without arguments holds
		rule(vm.CallAllow, 0, nil, "read", "write", "no_such_call", "rseq_slice_yield"),
		rule(vm.CallErrno, 5, nil, "read"),
		rule(vm.CallKillProcess, 0, nil, "open"),
		rule(vm.CallLog, 0, nil, "stat"),
		rule(vm.CallTrace, 9, nil, "fstat"),
		rule(vm.CallAllow, 0, []vm.CallArg{{Index: 0, Op: vm.ArgMasked, Mask: 0x1_0000_00f0, Value: 0x30}, {Index: 5, Op: vm.ArgNotEqual, Value: 1}}, "clone", "unshare"),
		rule(vm.CallErrno, 2, []vm.CallArg{{Index: 0, Op: vm.ArgEqual, Value: 9}}, "clone"),
		{Calls: []string{"ptrace"}, Action: vm.CallAction{Do: vm.CallAllow}, Since: "4.8", Before: "6.13"},
		{Calls: []string{"bpf"}, Action: vm.CallAction{Do: vm.CallAllow}, Since: "6.13"},
		{Calls: []string{"acct"}, Action: vm.CallAction{Do: vm.CallAllow}, Before: "6.12"},
	}}))
	otherwise := ret(vm.CallErrno, 38)
	for name, tc := range map[string]struct {
		arch, number uint32
		args         []uint64
		want         uint32
	}{
		"allowed":                    {archAMD64, unix.SYS_READ, []uint64{7}, allowed},
		"the last one":               {archAMD64, unix.SYS_RSEQ_SLICE_YIELD, nil, allowed},
		"behind the last one":        {archAMD64, unix.SYS_RSEQ_SLICE_YIELD + 1, nil, otherwise},
		"killed":                     {archAMD64, unix.SYS_OPEN, nil, ret(vm.CallKillProcess, 0)},
		"no rule":                    {archAMD64, unix.SYS_CLOSE, nil, otherwise},
		"logged":                     {archAMD64, unix.SYS_STAT, nil, ret(vm.CallLog, 0)},
		"traced":                     {archAMD64, unix.SYS_FSTAT, nil, ret(vm.CallTrace, 9)},
		"both arguments":             {archAMD64, unix.SYS_CLONE, []uint64{0xf_ee00_0f3f &^ 0x1_0000_0000, 0, 0, 0, 0, 2}, allowed},
		"an upper bit of the mask":   {archAMD64, unix.SYS_CLONE, []uint64{0x1_0000_0030, 0, 0, 0, 0, 2}, otherwise},
		"the second argument":        {archAMD64, unix.SYS_CLONE, []uint64{0x30, 0, 0, 0, 0, 1}, otherwise},
		"its upper half":             {archAMD64, unix.SYS_CLONE, []uint64{0x30, 0, 0, 0, 0, 1<<40 + 1}, allowed},
		"the next rule":              {archAMD64, unix.SYS_CLONE, []uint64{9}, ret(vm.CallErrno, 2)},
		"the next rule, not exactly": {archAMD64, unix.SYS_CLONE, []uint64{9 + 1<<32}, otherwise},
		"another call of a rule":     {archAMD64, unix.SYS_UNSHARE, []uint64{0x30}, allowed},
		"a new kernel":               {archAMD64, unix.SYS_PTRACE, nil, allowed},
		"a newer kernel":             {archAMD64, unix.SYS_BPF, nil, otherwise},
		"an older kernel":            {archAMD64, unix.SYS_ACCT, nil, otherwise},
		"32-bit read":                {archI386, 3, nil, unknown},
		"32-bit call with a number":  {archI386, unix.SYS_READ, nil, unknown},
		"x32":                        {archAMD64, x32 | unix.SYS_READ, nil, unknown},
		"no number":                  {archAMD64, 1<<32 - 1, nil, unknown},
		"another machine":            {unix.AUDIT_ARCH_AARCH64, 63, nil, unknown},
	} {
		if got := run(tc.arch, tc.number, tc.args...); got != tc.want {
			t.Errorf("%s: the filter answers %#x, want %#x", name, got, tc.want)
		}
	}
}

// TestComparisons compares at the edges of both halves of a number.
func TestComparisons(t *testing.T) {
	numbers := []uint64{0, 1, 5, 6, 1<<32 - 1, 1 << 32, 1<<32 + 5, 5 << 32, 5<<32 + 4, 5<<32 + 5, 5<<32 + 6, 6 << 32, 6<<32 + 4, 1<<63 + 5, 1<<64 - 1}
	holds := map[string]func(a, b uint64) bool{
		vm.ArgEqual: func(a, b uint64) bool { return a == b }, vm.ArgNotEqual: func(a, b uint64) bool { return a != b },
		vm.ArgLess: func(a, b uint64) bool { return a < b }, vm.ArgLessEqual: func(a, b uint64) bool { return a <= b },
		vm.ArgGreater: func(a, b uint64) bool { return a > b }, vm.ArgGreaterEqual: func(a, b uint64) bool { return a >= b },
		vm.ArgMasked: func(a, b uint64) bool { return a&0xf_0000_000f == b },
	}
	for op, want := range holds {
		for _, b := range numbers {
			// The second argument always matches, so what an argument skips when it does not match is more than its own code.
			args := []vm.CallArg{{Index: 3, Op: op, Value: b, Mask: 0xf_0000_000f}, {Index: 1, Op: vm.ArgLess, Value: 9}}
			run := machine(t, compiled(t, &vm.SystemCalls{Default: vm.CallAction{Do: vm.CallTrap}, Rules: []vm.CallRule{{Calls: []string{"read"}, Action: vm.CallAction{Do: vm.CallAllow}, Args: args}}}))
			for _, a := range numbers {
				if got := run(archAMD64, unix.SYS_READ, 0, 8, 0, a); (got == allowed) != want(a, b) {
					t.Errorf("%#x %s %#x: the filter answers %#x", a, op, b, got)
				}
			}
		}
	}
}

// TestLargestFilter: the largest filter that is valid fits into the kernel, and every call gets its own answer.
func TestLargestFilter(t *testing.T) {
	s := &vm.SystemCalls{Default: vm.CallAction{Do: vm.CallTrap}}
	n := 0
	for name, number := range numbers {
		r := vm.CallRule{Calls: []string{name}, Action: vm.CallAction{Do: vm.CallErrno, Data: int(number) + 1}}
		if n++; n <= 340 {
			r.Args = []vm.CallArg{{Op: vm.ArgGreater, Value: 1<<40 + 1}}
		}
		s.Rules = append(s.Rules, r)
	}
	f := compiled(t, s)
	run := machine(t, f)
	for name, number := range numbers {
		if got, want := run(archAMD64, number, 1<<41), ret(vm.CallErrno, int(number)+1); got != want {
			t.Errorf("%s: the filter answers %#x, want %#x", name, got, want)
		}
	}
	one := &vm.SystemCalls{Default: vm.CallAction{Do: vm.CallTrap}}
	for i := range 340 {
		one.Rules = append(one.Rules, vm.CallRule{Calls: []string{"read"}, Action: vm.CallAction{Do: vm.CallErrno, Data: i}, Args: []vm.CallArg{{Op: vm.ArgEqual, Value: uint64(i)}}})
	}
	if got := machine(t, compiled(t, one))(archAMD64, unix.SYS_READ, 339); got != ret(vm.CallErrno, 339) {
		t.Errorf("the filter answers %#x", got)
	}
}

// TestLoad loads a filter into a thread of this process.
func TestLoad(t *testing.T) {
	f := compiled(t, &vm.SystemCalls{Default: vm.CallAction{Do: vm.CallAllow}, Rules: []vm.CallRule{
		{Calls: []string{"getppid"}, Action: vm.CallAction{Do: vm.CallErrno, Data: 38}, Args: []vm.CallArg{{Index: 2, Op: vm.ArgEqual, Value: 7 << 32}}},
	}})
	errnos := make(chan [2]unix.Errno)
	go func() {
		runtime.LockOSThread() // the thread ends with its filter
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			t.Error(err)
		}
		if err := f.Load(); err != nil {
			t.Error(err)
		}
		_, _, with := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 7<<32)
		_, _, without := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 7)
		errnos <- [2]unix.Errno{with, without}
	}()
	if got := <-errnos; got != [2]unix.Errno{unix.ENOSYS, 0} {
		t.Errorf("the calls answer %v", got)
	}
}
