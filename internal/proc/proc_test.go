package proc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// TestMain lets the test binary act as a parent that dies: it starts a process, prints its identity and exits. It also acts as a process
// that holds a tap.
func TestMain(m *testing.M) {
	if marker := os.Getenv("PROC_TEST_PARENT"); marker != "" {
		p, err := Start(Spec{Path: "/bin/sleep", Args: []string{marker, "600"}})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.PID(), p.StartTime())
		os.Exit(0)
	}
	if how := os.Getenv("PROC_TEST_RUN"); how != "" {
		s := sh(`exec /bin/sh -c 'read -r pid rest </proc/self/stat; echo "$pid"; exec sleep 600' sh 600`)
		s.Out, s.Isolated = os.Stdout, how == "isolated"
		_, err := Run(context.Background(), s, Limits{})
		fmt.Println(err)
		os.Exit(1)
	}
	if os.Getenv("PROC_TEST_NAMESPACE") != "" {
		takeNamespace()
		os.Exit(0)
	}
	if os.Getenv("PROC_TEST_NOTHING") != "" {
		os.Exit(0)
	}
	if os.Getenv("PROC_TEST_TAP") != "" {
		takeAddress()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func start(t *testing.T, s Spec) *Process {
	t.Helper()
	p, err := Start(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Kill(context.Background())
		_ = p.Close()
	})
	return p
}

var sleeper = Spec{Path: "/bin/sleep", Args: []string{"sleep", "600"}}

func sh(script string) Spec {
	return Spec{Path: "/bin/sh", Args: []string{"sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}}
}

func TestWaitTellsHow(t *testing.T) {
	tests := []struct {
		name, script string
		want         Exit
	}{
		{"zero", "exit 0", Exit{}},
		{"code", "exit 7", Exit{Code: 7}},
		{"signal", "kill -15 $$", Exit{Code: Unknown, Signal: 15}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := start(t, sh(tt.script))
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					if got, err := p.Wait(t.Context()); err != nil || got != tt.want {
						t.Errorf("Wait: %v, %s", err, diff.Of(tt.want, got))
					}
				})
			}
			wg.Wait()
			if err := p.Signal(0); !errdefs.IsNotFound(err) {
				t.Errorf("Signal after the end: %v, want NotFound", err)
			}
			if err := p.Kill(t.Context()); err != nil {
				t.Errorf("Kill after the end: %v", err)
			}
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", p.PID())); err == nil {
				t.Error("a zombie is left")
			}
		})
	}
}

func TestWaitEndsWithContextAndClose(t *testing.T) {
	p := start(t, sleeper)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("Wait = %v, want canceled", err)
	}
	q, err := Open(p.PID(), p.StartTime(), "600")
	if err != nil {
		t.Fatal(err)
	}
	done := q.Done()
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
	if _, err := q.Wait(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("Wait after Close = %v, want FailedPrecondition", err)
	}
}

func TestFilesOutputAndSession(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "in")
	if err := os.WriteFile(in, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(in)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	s := sh(`cat <&3; echo; ls /proc/self/fd | wc -l; cut -d' ' -f6 /proc/self/stat; echo $$; env | grep -c HOME`)
	s.Files, s.Out = []*os.File{f}, out
	p := start(t, s)
	if _, err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	data, _ := os.ReadFile(out.Name())
	lines := strings.Fields(string(data))
	// ls sees 0, 1, 2, 3 and the directory that it lists.
	if len(lines) != 5 || lines[0] != "hello" || lines[1] != "5" || lines[2] != lines[3] || lines[4] != "0" {
		t.Fatalf("the process saw %q", lines)
	}
}

// TestSmallPages starts processes of both kinds at once: each gets its own setting, and this process keeps its setting.
func TestSmallPages(t *testing.T) {
	huge := func(status []byte) string {
		_, rest, _ := strings.Cut(string(status), "THP_enabled:\t")
		return rest[:min(1, len(rest))]
	}
	own := func() string {
		status, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		return huge(status)
	}
	if own() != "1" {
		t.Skip("huge pages are off, or Linux does not tell")
	}
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			out, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Error(err)
				return
			}
			defer out.Close()
			s := sh("cat /proc/self/status")
			s.Out, s.SmallPages = out, i%2 == 0
			p, err := Start(s)
			if err != nil {
				t.Error(err)
				return
			}
			defer p.Close()
			if _, err := p.Wait(t.Context()); err != nil {
				t.Error(err)
			}
			want := "1"
			if s.SmallPages {
				want = "0"
			}
			if status, err := os.ReadFile(out.Name()); err != nil || huge(status) != want {
				t.Errorf("SmallPages %v: huge pages %q, %v", s.SmallPages, huge(status), err)
			}
		})
	}
	all.Wait()
	if own() != "1" {
		t.Error("this process has lost its huge pages")
	}
}

func TestUnprivileged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to become somebody else")
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	s := Spec{
		Path: "/bin/cat", Args: []string{"cat", "/proc/self/status", "/proc/self/net/dev"}, Out: out,
		User: &User{UID: 0x70000001, GID: 0x70000002}, Isolated: true,
	}
	p := start(t, s)
	if got, err := p.Wait(t.Context()); err != nil || got.Code != 0 {
		t.Fatalf("Wait = %+v, %v", got, err)
	}
	f, err := os.Open(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := map[string]string{}
	links := 0
	for sc := bufio.NewScanner(f); sc.Scan(); {
		k, v, ok := strings.Cut(sc.Text(), ":")
		if ok {
			got[strings.TrimSpace(k)] = strings.Join(strings.Fields(v), " ")
		}
		if ok && strings.HasPrefix(sc.Text(), " ") { // only the rows of the link table are indented
			links++
		}
	}
	want := map[string]string{
		"Uid": "1879048193 1879048193 1879048193 1879048193", "Gid": "1879048194 1879048194 1879048194 1879048194",
		"Groups": "", "NoNewPrivs": "1", "CapPrm": zeros, "CapEff": zeros, "CapBnd": zeros, "CapInh": zeros, "CapAmb": zeros,
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s is %q, want %q", k, got[k], v)
		}
	}
	if _, ok := got["lo"]; !ok || links != 1 {
		t.Errorf("the network namespace is not empty: %v", got)
	}
	// The caller still has what the child lost.
	if n, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil || n != 0 {
		t.Errorf("no_new_privs of the caller: %d, %v", n, err)
	}
}

// An isolated process is number 1 of its namespace and sees no other process in /proc. In the outer namespace it has its own
// pid.
func TestIsolated(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make namespaces")
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			out, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Error(err)
				return
			}
			defer out.Close()
			in, err := os.CreateTemp(t.TempDir(), "in")
			if err != nil {
				t.Error(err)
				return
			}
			defer in.Close()
			uid := 0x70000010 + uint32(i)
			if err := errors.Join(os.WriteFile(in.Name(), []byte("given"), 0o600), in.Chown(int(uid), int(uid))); err != nil {
				t.Error(err)
				return
			}
			s := sh("echo $$; cat /proc/self/fd/3; echo; ls /proc")
			s.Files, s.Out, s.Isolated, s.User = []*os.File{in}, out, true, &User{UID: uid, GID: uid}
			p, err := Start(s)
			if err != nil {
				t.Error(err)
				return
			}
			defer p.Close()
			if exit, err := p.Wait(t.Context()); err != nil || exit != (Exit{}) {
				t.Errorf("Wait: %v, %s", err, diff.Of(Exit{}, exit))
			}
			said, err := os.ReadFile(out.Name())
			if err != nil {
				t.Error(err)
				return
			}
			words := strings.Fields(string(said))
			if len(words) < 2 || words[0] != "1" || words[1] != "given" {
				t.Errorf("the process said %q", said)
				return
			}
			var pids []string
			for _, name := range words[2:] {
				if _, err := strconv.Atoi(name); err == nil {
					pids = append(pids, name)
				}
			}
			if !slices.Contains(pids, strconv.Itoa(p.PID())) || len(pids) != 2 { // the shell and ls
				t.Errorf("process %d sees %v", p.PID(), pids)
			}
		})
	}
	all.Wait()
	ours, _ := os.Readlink("/proc/self/ns/mnt")
	for _, thread := range tasks(t) {
		if theirs, err := os.Readlink(thread + "/ns/mnt"); err == nil && theirs != ours {
			t.Errorf("%s has left for %s", thread, theirs)
		}
	}
}

// tasks lists the task folders of this process's threads, after threads that are about to end have ended.
func tasks(t *testing.T) []string {
	t.Helper()
	ours, _ := os.Readlink("/proc/self/ns/mnt")
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(10 * time.Millisecond) {
		all, err := filepath.Glob("/proc/self/task/*")
		if err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) || !slices.ContainsFunc(all, func(thread string) bool {
			theirs, err := os.Readlink(thread + "/ns/mnt")
			return err == nil && theirs != ours
		}) {
			return all
		}
	}
}

const zeros = "0000000000000000"

// The main thread represents the process in /proc, so OnThread must never end it.
// TestCgroupTasks starts a process in a folder of cgroup v1. The caller stays where it is.
func TestCgroupTasks(t *testing.T) {
	own := fmt.Sprintf("/cocoon-proc-%d", os.Getpid())
	dir := "/sys/fs/cgroup/pids" + own
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("needs a hierarchy of cgroup v1 that can be written, which a host with version 2 alone cannot have: ", err)
	}
	defer func() {
		err := os.Remove(dir)
		for deadline := time.Now().Add(5 * time.Second); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); err = os.Remove(dir) {
			runtime.Gosched()
		}
		if err != nil {
			t.Error(err)
		}
	}()
	tasks, err := os.OpenFile(dir+"/tasks", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tasks.Close()
	for _, change := range []func(*Spec){func(*Spec) {}, func(s *Spec) { s.Isolated = true }, func(s *Spec) { s.User = &User{UID: 0x70000020, GID: 0x70000020} }} {
		out, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		s := sh("cat /proc/self/cgroup")
		s.Out, s.CgroupTasks = out, []*os.File{tasks}
		change(&s)
		if exit, err := start(t, s).Wait(t.Context()); err != nil || exit != (Exit{}) {
			t.Errorf("Wait: %v, %v", exit, err)
		}
		if said, err := os.ReadFile(out.Name()); err != nil || !strings.Contains(string(said), ":pids:"+own+"\n") {
			t.Errorf("it started in %s, %v", said, err)
		}
	}
	if here, err := os.ReadFile("/proc/self/cgroup"); err != nil || strings.Contains(string(here), own) {
		t.Errorf("the caller is in %s, %v", here, err)
	}
	_ = tasks.Close()
	s := sleeper
	s.CgroupTasks = []*os.File{tasks}
	if _, err := Start(s); err == nil {
		t.Error("a process started that cannot join its cgroup")
	}
}

func TestOnThreadSparesTheMainThread(t *testing.T) {
	for range 200 {
		if err := OnThread(func() error {
			if unix.Gettid() == unix.Getpid() {
				return errors.New("f runs on the main thread")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkStart compares the cost of starting a process with and without isolation.
func BenchmarkStart(b *testing.B) {
	user := &User{UID: 0x70000001, GID: 0x70000001}
	for name, s := range map[string]Spec{"plain": {}, "user": {User: user}, "isolated": {User: user, Isolated: true}} {
		b.Run(name, func(b *testing.B) {
			s.Path, s.Args = "/bin/true", []string{"true"}
			for b.Loop() {
				p, err := Start(s)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := p.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
				_ = p.Close()
			}
		})
	}
}

func TestStartFails(t *testing.T) {
	_, err := Start(Spec{Path: "/nonexistent/x", Args: []string{"x"}})
	if !errors.Is(err, syscall.ENOENT) {
		t.Fatalf("Start = %v, want ENOENT", err)
	}
}

// The caller may be protected from the OOM killer or preferred by it; the process is neither.
func TestOrdinaryWhenMemoryRunsOut(t *testing.T) {
	const own = "/proc/self/oom_score_adj"
	before, err := os.ReadFile(own)
	if err != nil {
		t.Fatal(err)
	}
	if strings.TrimSpace(string(before)) != "0" {
		t.Skipf("this process has %s", before)
	}
	if err := os.WriteFile(own, []byte("300"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(own, before, 0); err != nil {
			t.Error(err)
		}
	})
	p := start(t, Spec{Path: "/bin/sleep", Args: []string{"sleep", "600"}})
	if got, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.PID())); err != nil || string(got) != "0\n" {
		t.Errorf("the process has %s (%v)", got, err)
	}
}
