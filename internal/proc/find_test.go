package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// A process that executes its program has memory but no arguments for a moment. A folder stands for it: the real moment is too
// short to be met.
func TestArgsOfProcessThatStarts(t *testing.T) {
	dir := t.TempDir()
	cmdline, exe := filepath.Join(dir, "cmdline"), filepath.Join(dir, "exe")
	if err := os.WriteFile(cmdline, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := argsIn(dir); err != nil || got != nil {
		t.Errorf("a kernel thread has %q, %v", got, err)
	}
	if err := os.Symlink("/bin/sleep", exe); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) { // so the time of argsIn passes only while nobody does anything
		result := make(chan []string)
		go func() {
			got, err := argsIn(dir)
			if err != nil {
				t.Error(err)
			}
			result <- got
		}()
		written := filepath.Join(dir, "written")
		if err := errors.Join(os.WriteFile(written, []byte("sleep\x00600\x00"), 0o600), os.Rename(written, cmdline)); err != nil {
			t.Fatal(err)
		}
		if got, want := <-result, []string{"sleep", "600"}; !slices.Equal(got, want) {
			t.Error(diff.Of(want, got))
		}
	})
}

// TestVeryLongArguments: a process chooses where its arguments begin and end, so they can be as long as its address space. The beginning of those is read.
func TestVeryLongArguments(t *testing.T) {
	in, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer hold.Close()
	_ = in.Fd() // makes it blocking, as a shell needs it
	marker := "proc-test-" + strconv.FormatInt(time.Now().UnixNano(), 36)
	s := Spec{Path: "/bin/sh", Args: []string{"sh", "-c", "read x", marker}, In: in}
	for range 8 { // 1 MiB
		s.Args = append(s.Args, strings.Repeat("x", 128<<10-1))
	}
	p := start(t, s)
	args, err := Args(p.PID())
	if n := len(strings.Join(args, "\x00")); err != nil || n > maxArgs || !slices.Equal(args[:5], s.Args[:5]) {
		t.Errorf("%d bytes are read, %v; want at most %d", n, err, maxArgs)
	}
	found, err := Find(t.Context(), nil, func(_ int, args []string) bool { return slices.Contains(args, marker) })
	if err != nil || len(found) != 1 || found[0].PID() != p.PID() {
		t.Errorf("Find = %v, %v; want process %d", found, err, p.PID())
	}
	for _, p := range found {
		_ = p.Close()
	}
	again, err := Open(p.PID(), p.StartTime(), marker)
	if err != nil {
		t.Fatal(err)
	}
	_ = again.Close()
}

// bare takes its arguments away, writes a byte, and waits to be ended.
var bare = []byte{
	0x48, 0x8b, 0x7c, 0x24, 8, // mov rdi, [rsp+8]: the first argument
	0x48, 0x81, 0xe7, 0, 0xf0, 0xff, 0xff, // and rdi, -4096: its page
	0xbe, 0, 0x10, 0, 0, // mov esi, 4096
	0x31, 0xd2, // xor edx, edx: nobody can read it
	0xb8, 10, 0, 0, 0, // mov eax, 10: mprotect
	0x0f, 0x05, // syscall
	0xbf, 1, 0, 0, 0, // mov edi, 1: stdout
	0xbe, 0, 0, codeAt >> 16, 0, // mov esi, codeAt
	0xba, 1, 0, 0, 0, // mov edx, 1
	0xb8, 1, 0, 0, 0, // mov eax, 1: write
	0x0f, 0x05, // syscall
	0xb8, 34, 0, 0, 0, // mov eax, 34: pause
	0x0f, 0x05, // syscall
	0xeb, 0xf7, // jmp to the third last
}

// TestFindAmongBareProcesses: processes without arguments, which every container can have, are waited for together, and not longer than the
// caller wants; those that are no candidates are not waited for. The clock is that of the test.
func TestFindAmongBareProcesses(t *testing.T) {
	program := programOf(t, bare)
	for range 3 {
		said, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer said.Close()
		p := start(t, Spec{Path: program, Args: []string{"bare"}, Out: out})
		_ = out.Close()
		if _, err := io.ReadFull(said, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID())); err != nil || len(args) > 0 {
			t.Fatalf("process %d still has the arguments %q, %v", p.PID(), args, err)
		}
	}
	marker := "proc-test-" + strconv.FormatInt(time.Now().UnixNano(), 36)
	sought := start(t, Spec{Path: "/bin/sleep", Args: []string{marker, "600"}})
	for args := []string(nil); len(args) == 0; { // the clock of the test would not wait for them
		var err error
		if args, err = Args(sought.PID()); err != nil {
			t.Fatal(err)
		}
	}
	is := func(_ int, args []string) bool { return args[0] == marker }
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		found, err := Find(t.Context(), nil, is)
		if err != nil || len(found) != 1 || found[0].PID() != sought.PID() {
			t.Errorf("Find = %v, %v; want process %d", found, err, sought.PID())
		}
		for _, p := range found {
			_ = p.Close()
		}
		if took := time.Since(began); took > execTime {
			t.Errorf("a scan took %s, want at most %s", took, execTime)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), execTime/4)
		defer cancel()
		if found, err := Find(ctx, nil, is); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Find with a context that ends = %v, %v", found, err)
		}
		if took := time.Since(began); took > execTime/4 {
			t.Errorf("a scan took %s after its context had ended", took-execTime/4)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		found, err := Find(t.Context(), func(pid int) bool { return pid == sought.PID() }, is)
		if err != nil || len(found) != 1 {
			t.Errorf("Find among candidates = %v, %v", found, err)
		}
		for _, p := range found {
			_ = p.Close()
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("a scan has waited %s for others than candidates", took)
		}
	})
}

// Whoever looks for a process that has just been started finds it.
func TestFoundAtOnce(t *testing.T) {
	for range 200 {
		p := start(t, sleeper)
		q, err := Open(p.PID(), p.StartTime(), "600")
		if err != nil {
			t.Fatal(err)
		}
		_ = q.Close()
		if err := p.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOpenRefusesAnother(t *testing.T) {
	p := start(t, sleeper)
	for name, open := range map[string]func() (*Process, error){
		"start time": func() (*Process, error) { return Open(p.PID(), p.StartTime()+1, "600") },
		"marker":     func() (*Process, error) { return Open(p.PID(), p.StartTime(), "60") },
		"no such":    func() (*Process, error) { return Open(1<<22+1, 1, "600") },
		"bad pid":    func() (*Process, error) { return Open(-3, 1, "600") },
	} {
		if q, err := open(); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v, %v; want NotFound", name, q, err)
		}
	}
}

func TestOutlivesParentAndIsFound(t *testing.T) {
	marker := "proc-test-" + strconv.FormatInt(time.Now().UnixNano(), 36)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), "PROC_TEST_PARENT="+marker)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var pid int
	var ticks uint64
	if _, err := fmt.Sscan(string(out), &pid, &ticks); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p, err := Open(pid, ticks, marker)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	found, err := Find(t.Context(), nil, func(_ int, args []string) bool { return args[0] == marker })
	if err != nil || len(found) != 1 || found[0].PID() != pid {
		t.Fatalf("Find = %v, %v; want process %d", found, err, pid)
	}
	defer found[0].Close()
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := found[0].Wait(t.Context()); err != nil || got.Code != Unknown {
		t.Fatalf("Wait of a stranger's child = %+v, %v", got, err)
	}
	if _, err := Open(pid, ticks, marker); !errdefs.IsNotFound(err) {
		t.Fatalf("Open after the end: %v, want NotFound", err)
	}
}

func TestInCgroup(t *testing.T) {
	dir := t.TempDir()
	if got, err := InCgroup(dir); err != nil || len(got) > 0 {
		t.Errorf("no cgroup: %v, %v", got, err)
	}
	lives, gone := start(t, sleeper), start(t, sleeper)
	if err := gone.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	procs := fmt.Sprintf("0\n%d\n%d\n", gone.PID(), lives.PID())
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(procs), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := InCgroup(dir)
	if err != nil || len(got) != 1 || got[0].PID() != lives.PID() || got[0].StartTime() != lives.StartTime() {
		t.Errorf("InCgroup = %+v, %v; want process %d", got, err, lives.PID())
	}
	for _, p := range got {
		_ = p.Close()
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("1 (init) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 42 0 0\n"))
	f.Add([]byte("1 (a) b) (c) Z 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 43 0 0\n"))
	f.Add([]byte(")"))
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := parseStat(data)
		if err != nil && st != (stat{}) {
			t.Fatalf("an error and a value: %+v, %v", st, err)
		}
	})
}

func BenchmarkFindNobody(b *testing.B) {
	for b.Loop() {
		if _, err := Find(b.Context(), nil, func(int, []string) bool { return false }); err != nil {
			b.Fatal(err)
		}
	}
}
