//go:build vm

package guestagent_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

func containerOf(name string, kind vm.ContainerKind, script string, mounts ...vm.Mount) guest.Container {
	return guest.Container{
		Name: name, Kind: kind, Layers: []string{"cocoon-l000"}, Mounts: mounts, Run: 1,
		Process: vm.Process{Entrypoint: []string{"sh", "-c"}, Args: []string{script}, Env: []vm.EnvVar{{Name: "ME", Value: name}}},
	}
}

// until waits until ok accepts the state of the containers.
func until(t *testing.T, k guest.ContainerKeeper, ok func([]vm.ContainerStatus) bool) (last []vm.ContainerStatus) {
	t.Helper()
	untilStates(t, k, func(all []guest.ContainerState) bool {
		last = nil
		for _, s := range all {
			last = append(last, s.Status)
		}
		return ok(last)
	})
	return last
}

func untilStates(t *testing.T, k guest.ContainerKeeper, ok func([]guest.ContainerState) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var last []guest.ContainerState
	enough := errors.New("enough")
	err := k.Containers(ctx, func(all []guest.ContainerState) error {
		if last = all; ok(all) {
			return enough
		}
		return nil
	})
	if err != nil && !errors.Is(err, enough) {
		t.Fatalf("%v; last: %+v", err, last)
	}
}

func logOf(t *testing.T, k guest.ContainerKeeper, name, want string) []guest.LogEntry {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var text strings.Builder
	var out []guest.LogEntry
	enough := errors.New("enough")
	err := k.ContainerLogs(ctx, name, 0, 0, func(e guest.LogEntry) error {
		text.Write(e.Data)
		out = append(out, e)
		if text.String() == want {
			return enough
		}
		return nil
	})
	if text.String() != want {
		t.Fatalf("log of %s: %q, want %q; %v", name, text.String(), want, err)
	}
	return out
}

// usageOf compares the reported usage of two containers with the work of one of them: computing and holding memory.
func usageOf(t *testing.T, a guest.Agent) {
	t.Helper()
	stats := func() map[string]guest.ContainerStats {
		t.Helper()
		s, err := a.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]guest.ContainerStats{}
		for _, c := range s.Containers {
			out[c.Name] = c
		}
		if len(out) != 5 || out["side"].Memory <= 0 || out["side"].CPUSeconds <= 0 || out["one"].CPUSeconds <= 0 {
			t.Fatalf("of two that run and three that have: %+v", s.Containers)
		}
		return out
	}
	const hold = 40 << 20
	before := stats()
	e := sh(fmt.Sprintf("head -c %d /dev/zero | tail -c %d | sleep 1000 & i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; times", hold, hold))
	e.Container = "side"
	var busy time.Duration
	for field := range strings.FieldsSeq(output(t, a, e)) {
		d, err := time.ParseDuration(field)
		if err != nil {
			t.Fatal(err)
		}
		busy += d
	}
	after := stats()
	got := time.Duration((after["side"].CPUSeconds - before["side"].CPUSeconds) * float64(time.Second))
	if got < busy*95/100 || got > 2*busy+time.Second { // its background process has computed too
		t.Errorf("computed for %s, %s are told", busy, got)
	}
	if other := after["app"].CPUSeconds - before["app"].CPUSeconds; other > got.Seconds()/2 {
		t.Errorf("the other one, that waits, computed for %.2f s of %s", other, got)
	}
	deadline := time.Now().Add(4 * time.Minute)
	for after["side"].Memory < before["side"].Memory+hold && time.Now().Before(deadline) {
		after = stats()
	}
	if more := after["side"].Memory - before["side"].Memory; more < hold || more > hold+hold/4 {
		t.Errorf("holds %d more bytes, %d are told", hold, more)
	}
	if s := after["side"]; s.Anonymous < hold || s.MemoryTotal < s.Memory || s.PageFaults < hold/4096 || s.Pressure.CPU == nil || s.Pressure.Memory == nil || s.Pressure.IO == nil {
		t.Errorf("of the one that holds memory: %+v", s)
	}
	if more := after["app"].Memory - before["app"].Memory; more > hold/4 {
		t.Errorf("the other one holds %d more", more)
	}
}

// TestVMContainerOutOfMemory: the kernel of the guest kills a container that takes all memory. The other one stays. The times of
// both ends are those of the host's clock, which the guest is given before anything starts.
func TestVMContainerOutOfMemory(t *testing.T) {
	q := bootGuest(t, busyboxDisks(t))
	a := q.connect(t)
	defer a.Close()
	k := a.(guest.ContainerKeeper)
	began := time.Now()
	err := a.Setup(t.Context(), guest.Setup{Hostname: "web-0", Restart: vm.RestartNever, Containers: []guest.Container{
		containerOf("greedy", vm.ContainerApp, "exec tail /dev/zero"),
		containerOf("killed", vm.ContainerApp, "kill -9 $$"),
		containerOf("other", vm.ContainerApp, "exec sleep 1000"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	all := until(t, k, func(all []vm.ContainerStatus) bool {
		return all[0].State == vm.ContainerTerminated && all[1].State == vm.ContainerTerminated
	})
	for i, want := range []string{vm.ContainerOOMKilled, vm.ContainerError} {
		if x := all[i].Exit; x.Code != 137 || x.Reason != want {
			t.Errorf("container %d: %+v, want %s", i, x, want)
		} else if x.StartedAt.Before(began) {
			t.Errorf("container %d began %s before its setup", i, began.Sub(x.StartedAt))
		}
	}
	if all[2].State != vm.ContainerRunning {
		t.Errorf("the other one: %+v", all[2])
	}
}

func TestVMContainers(t *testing.T) {
	q := bootGuest(t, busyboxDisks(t))
	a := q.connect(t)
	defer a.Close()
	k := a.(guest.ContainerKeeper)
	share := vm.Mount{Volume: "share", Path: "/share"}
	s := guest.Setup{
		Hostname: "web-0", Restart: vm.RestartOnFailure, Hosts: []string{"10.0.0.9 web-0"},
		Volumes: []vm.Volume{{Name: "share", Kind: vm.VolumeEmpty}},
		Containers: []guest.Container{
			containerOf("one", vm.ContainerInit, "echo first > /share/file; echo mine > /own; echo one is done", share),
			containerOf("two", vm.ContainerInit, "cat /share/file; ls /own 2>&1 || echo apart", share),
			containerOf("side", vm.ContainerSidecar, "exec 2>/dev/null; trap 'echo side ends; exit 0' TERM; echo up > /share/side; while :; do sleep 1; done", share),
			containerOf("app", vm.ContainerApp, "grep 10.0.0.9 /etc/hosts; until test -e /share/go; do sleep 0.2; done; echo app $ME", share),
			containerOf("flaky", vm.ContainerApp, "test -e /once && { echo again; exit 0; }; touch /once; (sleep 1000 &) ; exit 3"),
		},
	}
	s.Containers[2].Hold = true
	s.Containers[2].Process.ReadOnlyRoot, s.Containers[2].Process.WorkDir = true, "/work"
	for range 2 { // a host that reconnects repeats the whole request, and nothing runs twice
		if err := a.Setup(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	until(t, k, func(all []vm.ContainerStatus) bool {
		return all[2].State == vm.ContainerRunning && all[3].State == vm.ContainerWaiting
	})
	if err := k.ReleaseContainer(t.Context(), "side"); err != nil {
		t.Fatal(err)
	}
	all := until(t, k, func(all []vm.ContainerStatus) bool { return all[4].State == vm.ContainerTerminated })
	if x := all[0].Exit; x == nil || x.Code != 0 || x.Reason != vm.ContainerCompleted || x.FinishedAt.Before(x.StartedAt) {
		t.Errorf("the first init container: %+v", x)
	}
	if all[2].State != vm.ContainerRunning || all[3].State != vm.ContainerRunning {
		t.Errorf("sidecar and app: %+v", all[2:4])
	}
	if f := all[4]; f.Restarts != 1 || f.Last == nil || f.Last.Code != 3 || f.Last.Reason != vm.ContainerError || f.Exit.Code != 0 {
		t.Errorf("the container that failed once: %+v", f)
	}
	logOf(t, k, "two", "first\nls: /own: No such file or directory\napart\n")
	if e := logOf(t, k, "flaky", "again\n"); len(e) != 3 || e[1].Run != 2 || e[1].Seq != 0 || e[2].Run != 2 || e[2].Seq != 1 {
		t.Errorf("the second run: %+v", e)
	}

	e := sh("cat /share/side; echo $ME; ls -A /share; mount | grep -c 'on / '; ps | grep -c '[s]leep 1000'; true")
	e.Container = "app"
	if got := output(t, a, e); got != "up\napp\nfile\nside\n1\n0\n" {
		t.Errorf("exec in a container: %q", got)
	}
	if _, err := a.Exec(t.Context(), guest.Exec{Container: "one", Command: []string{"true"}}, guest.Streams{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("exec in one that has ended: %v", err)
	}
	usageOf(t, a)
	for range 2 { // one is killed with its background processes and runs again; the others continue
		if err := k.KillContainer(t.Context(), "side", 1, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	all = until(t, k, func(all []vm.ContainerStatus) bool {
		return all[2].State == vm.ContainerRunning && all[2].Restarts == 1
	})
	if x := all[2].Last; x == nil || x.Code != 0 || all[3].State != vm.ContainerRunning || all[3].Restarts != 0 {
		t.Errorf("after the sidecar was killed: %+v", all)
	}
	e = sh("ps | grep -c '[s]leep 1000'; true")
	e.Container = "app"
	if got := output(t, a, e); got != "0\n" {
		t.Errorf("processes that outlived their container: %q", got)
	}
	e = sh("pwd; touch /x 2>/dev/null || echo denied; touch /share/go")
	e.Container = "side"
	if got := output(t, a, e); got != "/work\ndenied\n" {
		t.Errorf("in the container with a read-only root: %q", got)
	}
	exit, err := a.Wait(t.Context())
	if err != nil || exit.Code != 0 {
		t.Errorf("all have ended: %+v, %v", exit, err)
	}
	logOf(t, k, "side", "side ends\nside ends\n")
	logOf(t, k, "app", "10.0.0.9 web-0\napp app\n")
	if err := a.AckExit(t.Context()); err != nil {
		t.Fatal(err)
	}
	q.waitEnd(t)
}

// TestVMAddContainer: a container joins a guest whose containers run. It runs once, has logs, a terminal, commands and a message as
// the others, and its end changes nothing for them. The guest of a single container takes it, too.
func TestVMAddContainer(t *testing.T) {
	for _, root := range []bool{false, true} {
		t.Run(fmt.Sprint("root ", root), func(t *testing.T) {
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			k, adder := a.(guest.ContainerKeeper), a.(guest.ContainerAdder)
			debug := containerOf("debug", vm.ContainerEphemeral, "echo hello; ls /own 2>&1; read line; printf 'heard %s' $line > /dev/termination-log; touch /mine; exit 3")
			debug.Process.Stdin, debug.MessagePath = true, "/dev/termination-log"
			if err := adder.AddContainer(t.Context(), debug); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("before the guest is set up: %v", err)
			}
			app := containerOf("app", vm.ContainerApp, "touch /own; until test -e /stop; do sleep 0.2; done")
			if root {
				app.Root, app.Layers = true, nil
			}
			app.MessagePath = "/dev/termination-log"
			if err := a.Setup(t.Context(), guest.Setup{Hostname: "web-0", Restart: vm.RestartAlways, Containers: []guest.Container{app}}); err != nil {
				t.Fatal(err)
			}
			until(t, k, func(all []vm.ContainerStatus) bool { return all[0].State == vm.ContainerRunning })
			mounts := debug
			mounts.Mounts = []vm.Mount{{Volume: "v", Path: "/v"}}
			if err := adder.AddContainer(t.Context(), mounts); !errdefs.IsInvalid(err) {
				t.Errorf("with a volume that the guest does not have: %v", err)
			}
			for range 2 { // again is no error
				if err := adder.AddContainer(t.Context(), debug); err != nil {
					t.Fatal(err)
				}
			}
			until(t, k, func(all []vm.ContainerStatus) bool { return len(all) == 2 && all[1].State == vm.ContainerRunning })
			logOf(t, k, "debug", "hello\nls: /own: No such file or directory\n")
			e := sh("echo $ME; ps | grep -c '[u]ntil test -e /stop'")
			e.Container = "debug"
			if got := output(t, a, e); got != "debug\n1\n" {
				t.Errorf("a command in it: %q", got)
			}
			if err := a.(guest.Attacher).Attach(t.Context(), guest.Attach{Container: "debug"}, guest.Streams{Stdin: strings.NewReader("words\n")}); err != nil {
				t.Fatal(err)
			}
			all := until(t, k, func(all []vm.ContainerStatus) bool { return all[1].State == vm.ContainerTerminated })
			if x := all[1].Exit; x.Code != 3 || x.Message != "heard words" || all[1].Restarts != 0 || all[0].State != vm.ContainerRunning || all[0].Restarts != 0 {
				t.Errorf("after its end: %+v", all)
			}
			second := containerOf("second", vm.ContainerEphemeral, "ls /mine 2>&1; exec sleep 1000")
			if err := adder.AddContainer(t.Context(), second); err != nil {
				t.Fatal(err)
			}
			logOf(t, k, "second", "ls: /mine: No such file or directory\n")
			if err := k.KillContainer(t.Context(), "second", 1, 0); err != nil {
				t.Fatal(err)
			}
			all = until(t, k, func(all []vm.ContainerStatus) bool { return all[2].State == vm.ContainerTerminated })
			if all[2].Exit.Code != 137 {
				t.Errorf("a killed one: %+v", all[2])
			}
			missing := containerOf("third", vm.ContainerEphemeral, "true")
			missing.Layers = []string{"cocoon-none"}
			limited, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			if err := adder.AddContainer(limited, missing); err == nil {
				t.Error("a container without its disk is accepted")
			}
			if err := a.Poweroff(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			q.waitEnd(t)
		})
	}
}

// TestVMRootContainer: the only container of a guest has the guest's root and runs again while the guest goes on. What it wrote, also
// into memory, stays.
func TestVMRootContainer(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		t.Run(fmt.Sprint("read-only ", readOnly), func(t *testing.T) {
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			k := a.(guest.ContainerKeeper)
			c := containerOf("web", vm.ContainerApp, "cat /mem/runs 2>/dev/null; echo run >> /mem/runs; touch /own 2>/dev/null || echo denied; "+
				"test $(wc -l < /mem/runs) = 1 && exec tail /dev/zero; exec sleep 1000",
				vm.Mount{Volume: "mem", Path: "/mem"})
			c.Root, c.Layers, c.Process.ReadOnlyRoot = true, nil, readOnly
			s := guest.Setup{
				Hostname: "web-0", Restart: vm.RestartAlways, Containers: []guest.Container{c},
				Volumes: []vm.Volume{{Name: "mem", Kind: vm.VolumeEmpty, Memory: true}},
			}
			for range 2 {
				if err := a.Setup(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			all := until(t, k, func(all []vm.ContainerStatus) bool {
				return all[0].Restarts == 1 && all[0].State == vm.ContainerRunning
			})
			if x := all[0].Last; x == nil || x.Code != 137 || x.Reason != vm.ContainerOOMKilled {
				t.Errorf("after the second run: %+v", all)
			}
			logOf(t, k, "web", map[bool]string{false: "run\n", true: "denied\nrun\ndenied\n"}[readOnly])
			found := output(t, a, sh("cat /mem/runs; ls /own 2>/dev/null; true"))
			if want := map[bool]string{false: "run\nrun\n/own\n", true: "run\nrun\n"}[readOnly]; found != want {
				t.Errorf("in the guest: %q, want %q", found, want)
			}
		})
	}
}

// TestVMMessages: a container says why it ends by a file, whoever it runs as, and whatever other containers write to the same path.
// Otherwise the end of its output says why it failed.
func TestVMMessages(t *testing.T) {
	const at = "/dev/termination-log"
	said := func(name, script, user string) guest.Container {
		c := containerOf(name, vm.ContainerApp, script)
		c.MessagePath, c.MessageFromLog, c.Process.User = at, true, user
		return c
	}
	for name, tc := range map[string]struct {
		containers []guest.Container
		want       []string
	}{
		"roots of their own": {[]guest.Container{
			said("one", "printf 'one is done' > "+at, "65534"),
			said("two", "sleep 2; cat "+at+"; echo two fails >&2; exit 3", ""),
			said("three", "echo fine", ""),
		}, []string{"one is done", "two fails\n", ""}},
		"the root of the guest": {[]guest.Container{said("one", "head -c 5000 /dev/zero | tr '\\0' x > "+at, "65534")}, []string{strings.Repeat("x", vm.MaxMessage)}},
	} {
		t.Run(name, func(t *testing.T) {
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			if len(tc.containers) == 1 {
				tc.containers[0].Root, tc.containers[0].Layers = true, nil
			}
			s := guest.Setup{Hostname: "web-0", Restart: vm.RestartNever, Containers: tc.containers}
			for range 2 {
				if err := a.Setup(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			all := until(t, a.(guest.ContainerKeeper), func(all []vm.ContainerStatus) bool {
				return !slices.ContainsFunc(all, func(s vm.ContainerStatus) bool { return s.State != vm.ContainerTerminated })
			})
			for i, want := range tc.want {
				if all[i].Exit.Message != want || all[i].Message != want {
					t.Errorf("%s: message %q and %q, want %q", tc.containers[i].Name, all[i].Exit.Message, all[i].Message, want)
				}
			}
		})
	}
}
