//go:build cri

package containerd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/logfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// clientEnv tells the test binary to be a client of the containerd in this folder, which does what it is told on its input.
const clientEnv = "COCOON_CONTAINER_CLIENT"

// asClient obeys lines: each is a verb and the ID of a container. It answers with a line.
func asClient() int {
	state, image, _ := strings.Cut(os.Getenv(clientEnv), " ")
	exe, _ := os.Executable()
	programs := os.Getenv("PROGRAMS")
	r, err := Open(Config{
		Socket: filepath.Join(state, "c.sock"), Root: filepath.Join(state, "containers"), State: filepath.Join(state, "run"), Logger: exe,
		Runc: filepath.Join(programs, "runc"), RuncRoot: filepath.Join(state, "runc-capsule"),
	})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	ctx := context.Background()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		verb, rest, _ := strings.Cut(in.Text(), " ")
		id, script, _ := strings.Cut(rest, " ")
		go func() {
			var err error
			switch verb {
			case "run":
				err = errors.Join(r.Create(ctx, container.Spec{ID: id, Image: image, Command: []string{"sh", "-c", script}}), r.Start(ctx, id))
			case "start":
				err = r.Start(ctx, id)
			case "stop":
				err = r.Stop(ctx, id, 50*time.Millisecond)
			case "remove":
				err = r.Remove(ctx, id, false)
			case "exec":
				_, err = r.Exec(ctx, id, container.Exec{Command: []string{"sh", "-c", script}}, container.Streams{Stdout: os.Stdout})
			}
			fmt.Println("done", err)
		}()
	}
	return 0
}

// process is a client that is killed.
type process struct {
	cmd *exec.Cmd
	in  *os.File
	out *bufio.Reader
}

func (r *rig) other() *process {
	r.t.Helper()
	in, tell, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	hear, out, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), clientEnv+"="+r.d.State+" "+r.image, "PROGRAMS="+r.d.Programs)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, os.Stderr
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	in.Close()
	out.Close()
	r.t.Cleanup(func() { tell.Close(); hear.Close() })
	p := &process{cmd: cmd, in: tell, out: bufio.NewReader(hear)}
	r.t.Cleanup(p.kill)
	return p
}

func (p *process) tell(line string) { fmt.Fprintln(p.in, line) }

func (p *process) hear(t testing.TB) string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// count writes numbered lines without an end.
const count = "i=0; while :; do i=$((i+1)); echo line $i; [ $((i % 50)) != 0 ] || sleep 0.01; done"

// numbered fails the test unless a log has all lines from its first one on.
func numbered(t testing.TB, log string) int {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(log, "\n"), "\n")
	var first, n int
	if _, err := fmt.Sscanf(lines[0], "line %d", &first); err != nil {
		t.Fatalf("the first line is %q", lines[0])
	}
	for i, l := range lines[:len(lines)-1] { // the last one may be a part
		if want := fmt.Sprint("line ", first+i); l != want {
			t.Fatalf("line %d is %q, want %q", i, l, want)
		}
		n = first + i
	}
	return n
}

func TestClientIsKilled(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	p := r.other()
	for _, id := range []string{"talks", "ends", "ends-later"} {
		p.tell("run " + id + " " + map[string]string{"talks": count, "ends": "exit 9", "ends-later": "while ! [ -e /go ]; do sleep 0.1; done; exit 11"}[id])
		if got := p.hear(t); got != "done <nil>" {
			t.Fatal(got)
		}
	}
	p.tell("exec ends-later echo begun; exec sleep 77")
	if got := p.hear(t); got != "begun" {
		t.Fatal(got)
	}
	r.says("talks", "line 100\n")
	p.kill()

	r.open()
	found := map[string]container.Phase{}
	all, err := r.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		found[c.Spec.ID] = c.State.Phase
	}
	if len(found) != 3 || found["talks"] != container.Running || found["ends-later"] != container.Running {
		t.Fatalf("found %v", found)
	}
	n := numbered(t, r.log("talks", container.LogOptions{Tail: -1}))
	r.says("talks", fmt.Sprintf("line %d\n", n+1000))
	numbered(t, r.log("talks", container.LogOptions{Tail: -1}))

	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	seen := map[string]container.State{}
	watched := make(chan error, 1)
	go func() {
		watched <- r.Watch(watch, func(id string, s container.State) error {
			mu.Lock()
			defer mu.Unlock()
			seen[id] = s
			return nil
		})
	}()
	see := func(id string, holds func(container.State) bool) {
		t.Helper()
		eventually(t, "the watch sees "+id, func() bool {
			mu.Lock()
			defer mu.Unlock()
			s, ok := seen[id]
			return ok && holds(s)
		})
	}
	see("talks", func(s container.State) bool { return s.Phase == container.Running && s.PID > 0 })
	see("ends", func(s container.State) bool { return s.Phase == container.Exited && s.ExitCode == 9 })
	if out, _, _ := r.exec("ends-later", script("ps | grep '[s]leep 77'; touch /go"), nil); out != "" {
		t.Errorf("execs of the killed client run: %s", out)
	}
	see("ends-later", func(s container.State) bool { return s.Phase == container.Exited && s.ExitCode == 11 })
	cancel()
	if err := <-watched; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	// The exit codes do not need the tasks any more.
	for id, want := range map[string]int{"ends": 9, "ends-later": 11} {
		if tk, err := r.task(ctx, id); err != nil || tk != nil {
			t.Errorf("%s has the task %v, %v", id, tk, err)
		}
		if c, err := r.Inspect(ctx, id); err != nil || c.State.ExitCode != want || c.State.FinishedAt.IsZero() {
			t.Errorf("%s: %+v, %v", id, c.State, err)
		}
	}
}

func TestContainerdIsKilled(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	r.run(r.sh("talks", count))
	r.run(r.sh("ends", "while ! [ -e /go ]; do sleep 0.1; done; exit 13"))
	mark := filepath.Join(fmt.Sprint("/proc/", must(r.Inspect(ctx, "ends")).State.PID), "root/go")
	watched := make(chan error, 1)
	go func() { watched <- r.Watch(ctx, func(string, container.State) error { return nil }) }()
	followed := make(chan error, 1)
	lines := make(chan int, 1)
	go func() {
		n := 0
		followed <- r.Logs(ctx, "talks", container.LogOptions{Follow: true, Tail: -1}, func(container.LogEntry) error {
			n++
			select {
			case <-lines:
			default:
			}
			lines <- n
			return nil
		})
	}()
	<-lines
	r.d.Kill()
	if err := <-watched; !errdefs.IsUnavailable(err) {
		t.Error("the watch ended with", err)
	}
	for name, err := range map[string]error{
		"start": r.Start(ctx, "talks"), "stop": r.Stop(ctx, "talks", 0), "remove": r.Remove(ctx, "talks", false), "create": r.Create(ctx, r.sh("new", ":")),
		"list": second(r.List(ctx)), "inspect": second(r.Inspect(ctx, "talks")), "images": second(r.ListImages(ctx)), "stats": second(r.Stats(ctx, "talks")),
		"wait": second(r.Wait(ctx, "talks")), "exec": second(r.Exec(ctx, "talks", script(":"), container.Streams{})),
	} {
		if !errdefs.IsUnavailable(err) {
			t.Errorf("%s: %v, want Unavailable", name, err)
		}
	}
	if err := os.WriteFile(mark, nil, 0o600); err != nil { // it ends while nobody is there
		t.Fatal(err)
	}
	eventually(t, "it has ended", func() bool { _, err := os.Stat(filepath.Dir(mark)); return err != nil })
	for now := <-lines; <-lines < now+1000; { // the log goes on
	}
	r.d.Start()
	eventually(t, "containerd is found again", func() bool { return second(r.List(ctx)) == nil })
	if s := r.ended("ends"); s.ExitCode != 13 {
		t.Errorf("%+v", s)
	}
	if s := must(r.Inspect(ctx, "talks")).State; s.Phase != container.Running {
		t.Errorf("%+v", s)
	}
	if err := r.Stop(ctx, "talks", 0); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-followed:
		if err != nil {
			t.Error("follow:", err)
		}
	case <-time.After(patience):
		t.Error("the reader of a log does not end with the container")
	}
	numbered(t, r.log("talks", container.LogOptions{Tail: -1}))
}

func TestLogIsBounded(t *testing.T) {
	r := start(t)
	r.run(r.sh("talks", "i=0; while [ $i -lt 30 ]; do i=$((i+1)); head -c 1000000 /dev/zero | tr '\\0' x; echo; done; echo last"))
	r.ended("talks")
	files := glob(filepath.Join(r.logs("talks"), "*"))
	if len(files) != 2 {
		t.Errorf("the log has the files %v", files)
	}
	for _, f := range files {
		if fi, err := os.Stat(f); err != nil || fi.Size() > logfile.MaxSize {
			t.Errorf("%s: %d bytes, %v", f, fi.Size(), err)
		}
	}
	if got := r.log("talks", container.LogOptions{Tail: 1}); got != "last\n" {
		t.Errorf("the last line is %q", got)
	}
	if got := r.log("talks", container.LogOptions{Tail: 2}); len(got) != 1_000_001+5 {
		t.Errorf("the last two have %d bytes", len(got))
	}
}

func TestShimIsKilled(t *testing.T) {
	r := start(t)
	r.run(r.sh("orphan", "sleep 1000"))
	c := must(r.Inspect(t.Context(), "orphan"))
	for _, p := range glob("/proc/[0-9]*/cmdline") {
		b, _ := os.ReadFile(p)
		if args := strings.Split(string(b), "\x00"); strings.HasSuffix(args[0], "containerd-shim-runc-v2") && strings.Contains(string(b), r.d.State+"/") {
			var pid int
			if _, err := fmt.Sscanf(p, "/proc/%d/", &pid); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	if s := r.ended("orphan"); s.Phase != container.Exited || (s.ExitCode != container.ExitUnknown && s.ExitCode != 137) {
		t.Errorf("%+v", s)
	}
	eventually(t, "its process is gone", func() bool {
		_, err := os.Stat(fmt.Sprint("/proc/", c.State.PID))
		return err != nil
	})
	if err := r.Start(t.Context(), "orphan"); err != nil {
		t.Error("start it again:", err)
	}
}

// TestChurn runs 50 containers through a client that is killed at random, and removes all that is left of them.
func TestChurn(t *testing.T) {
	r := start(t)
	const containers, kills = 50, 10
	dice := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	verbs := []string{"run", "run", "run", "start", "stop", "remove", "exec"}
	done := 0
	for range kills {
		p := r.other()
		for range 50 {
			id := fmt.Sprint("c", dice.IntN(containers))
			switch verb := verbs[dice.IntN(len(verbs))]; verb {
			case "run":
				p.tell(verb + " " + id + " sleep " + []string{"0", "1000"}[dice.IntN(2)])
			case "exec":
				p.tell(verb + " " + id + " sleep 0.1")
			default:
				p.tell(verb + " " + id)
			}
		}
		for n := 10 + dice.IntN(40); n > 0; n-- {
			if p.hear(t) == "done <nil>" {
				done++
			}
		}
		if dice.IntN(4) == 0 {
			r.d.Kill()
			p.kill()
			r.d.Start()
			continue
		}
		p.kill()
	}
	r.open() // what interrupted calls have left of tasks does not keep the containers from starting
	ctx := t.Context()
	all, err := r.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d calls have succeeded, and %d containers are there", done, len(all))
	for _, c := range all {
		if err := r.Start(ctx, c.Spec.ID); err != nil && c.State.Phase != container.Removing {
			t.Errorf("start %s: %v", c.Spec.ID, err)
		}
	}
	var group sync.WaitGroup
	for i := range containers {
		group.Go(func() {
			if err := r.Remove(ctx, fmt.Sprint("c", i), false); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	r.nothingLeft(ctx)
}

func second[T any](_ T, err error) error { return err }

func must(c container.Container, err error) container.Container {
	if err != nil {
		panic(err)
	}
	return c
}
