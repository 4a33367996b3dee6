package guestagent

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// several runs containers as processes of this computer, in its own root.
func several(t *testing.T, all ...*container) *containers {
	t.Helper()
	p := newContainers(newProcs(false), restartPace{base: time.Millisecond, most: time.Millisecond, forgive: time.Hour})
	for _, c := range all {
		p.add(c, 1)
	}
	go p.run() // ends with the containers
	t.Cleanup(func() { p.shutdown(t.Context(), 0); <-p.done })
	return p
}

func script(name string, kind vm.ContainerKind, restart vm.RestartPolicy, text string) *container {
	return &container{name: name, kind: kind, restart: vm.Restart{Policy: restart}, command: command{args: []string{"/bin/sh", "-c", text}}}
}

// ruled gives c rules.
func ruled(c *container, rules ...vm.RestartRule) *container {
	c.restart.Rules = rules
	return c
}

// outcome is a short form of the state of the containers.
func outcome(p *containers) (out []string) {
	all, _ := p.look()
	for i, s := range all {
		text := p.all[i].name + " " + string(s.State) + " " + s.Reason
		if s.Restarts > 0 {
			text += " again"
		}
		out = append(out, text)
	}
	return out
}

func TestContainersRunInTheirOrder(t *testing.T) {
	const never, onFailure, always = vm.RestartNever, vm.RestartOnFailure, vm.RestartAlways
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		all  []*container
		want []string
		code int32
	}{
		"all well": {[]*container{
			script("a", vm.ContainerInit, onFailure, "echo a > "+dir+"/order"),
			script("b", vm.ContainerInit, onFailure, "echo b >> "+dir+"/order"),
			script("c", vm.ContainerApp, never, `test "$(cat `+dir+`/order | tr -d '\n')" = ab`),
			script("d", vm.ContainerApp, never, "exit 4"),
		}, []string{"a terminated Completed", "b terminated Completed", "c terminated Completed", "d terminated Error"}, 4},
		"init fails for good": {[]*container{
			script("a", vm.ContainerInit, never, "exit 2"),
			script("b", vm.ContainerSidecar, always, "exit 0"),
			script("c", vm.ContainerApp, never, "exit 0"),
		}, []string{"a terminated Error", "b waiting PodInitializing", "c waiting PodInitializing"}, 2},
		"init succeeds at last": {[]*container{
			script("a", vm.ContainerInit, onFailure, "mkdir "+dir+"/one && exit 1; mkdir "+dir+"/two && exit 1; true"),
			script("c", vm.ContainerApp, onFailure, "true"),
		}, []string{"a terminated Completed again", "c terminated Completed"}, 0},
		"a sidecar does not hold up the end": {[]*container{
			script("a", vm.ContainerSidecar, always, "exec sleep 1000"),
			script("c", vm.ContainerApp, never, "true"),
		}, []string{"a terminated Error", "c terminated Completed"}, 0},
		"a rule restarts what the policy does not": {[]*container{
			ruled(script("a", vm.ContainerInit, never, "mkdir "+dir+"/three && exit 7; true"), vm.RestartRule{Codes: []int{6, 7}}),
			ruled(script("c", vm.ContainerApp, never, "mkdir "+dir+"/four && exit 3; exit 5"), vm.RestartRule{Codes: []int{4}}, vm.RestartRule{Not: true, Codes: []int{5}}),
		}, []string{"a terminated Completed again", "c terminated Error again"}, 5},
		"no such program": {[]*container{
			{name: "c", kind: vm.ContainerApp, restart: vm.Restart{Policy: never}, command: command{args: []string{"/no/such"}}},
		}, []string{"c terminated StartError"}, 128},
	} {
		t.Run(name, func(t *testing.T) {
			p := several(t, tc.all...)
			<-p.done
			if got := outcome(p); !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got  %q\nwant %q", got, tc.want)
			}
			if got := p.exit().GetCode(); got != tc.code {
				t.Errorf("the whole ended with %d, want %d", got, tc.code)
			}
		})
	}
}

func TestContainersRestartAndStop(t *testing.T) {
	p := several(t,
		script("web", vm.ContainerApp, vm.RestartAlways, "exec sleep 1000"),
		script("flaky", vm.ContainerApp, vm.RestartAlways, "echo run; exit 3"))
	for {
		all, changed := p.look()
		if all[0].State == vm.ContainerRunning && all[1].Restarts > 2 {
			if all[0].Restarts != 0 || all[1].Last == nil || all[1].Last.Code != 3 {
				t.Errorf("got %+v", all)
			}
			break
		}
		<-changed
	}
	e, run, err := p.all[1].log.next(t.Context(), 0, 0)
	if err != nil || run < 2 || e.seq != 0 {
		t.Errorf("the beginning of a later run: %+v of %d, %v", e, run, err)
	}
	p.shutdown(t.Context(), time.Minute)
	<-p.done
	for _, s := range []int{0, 1} {
		if all, _ := p.look(); all[s].State != vm.ContainerTerminated || all[s].Exit == nil {
			t.Errorf("after the end: %+v", all[s])
		}
	}
	if _, run, err := p.all[1].log.next(t.Context(), 1<<20, 0); run != 0 || err != nil {
		t.Errorf("the log has no end: %d, %v", run, err)
	}
}

// Only one run is killed: the others continue, and a new run follows as after a failure.
func TestKillContainer(t *testing.T) {
	const never, onFailure, always = vm.RestartNever, vm.RestartOnFailure, vm.RestartAlways
	dir := t.TempDir()
	polite := "trap 'echo asked; exit 0' TERM; echo up; touch " + dir + "/polite; while :; do sleep 0.01; done"
	p := several(t,
		script("polite", vm.ContainerApp, onFailure, polite),
		script("deaf", vm.ContainerApp, always, "trap '' TERM; touch "+dir+"/deaf; while :; do sleep 0.01; done"),
		script("last", vm.ContainerApp, never, "exec sleep 1000"))
	await := func(ok func([]vm.ContainerStatus) bool) []vm.ContainerStatus {
		for {
			all, changed := p.look()
			if ok(all) {
				return all
			}
			<-changed
		}
	}
	running := func(i, restarts int) func([]vm.ContainerStatus) bool {
		return func(all []vm.ContainerStatus) bool {
			return all[i].State == vm.ContainerRunning && all[i].Restarts == restarts
		}
	}
	for _, name := range []string{"polite", "deaf"} { // its trap is set
		for _, err := os.Stat(filepath.Join(dir, name)); err != nil; _, err = os.Stat(filepath.Join(dir, name)) {
			<-time.After(time.Millisecond)
		}
	}
	if err := p.kill(t.Context(), "none", 0, 0); !errdefs.IsNotFound(err) {
		t.Errorf("no such container: %v", err)
	}
	if err := p.kill(t.Context(), "polite", 1, time.Minute); err != nil {
		t.Error(err)
	}
	all := await(running(0, 1))
	if x := all[0].Last; x == nil || x.Code != 0 || x.Reason != vm.ContainerCompleted || all[1].Restarts != 0 || all[2].Restarts != 0 {
		t.Errorf("after the first was asked: %+v", all)
	}
	if err := p.kill(t.Context(), "polite", 1, 0); err != nil {
		t.Errorf("a run that is over: %v", err)
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	if err := p.kill(gone, "deaf", 0, 20*time.Millisecond); !errdefs.Is(err, errdefs.Canceled) {
		t.Errorf("a host that goes away: %v", err)
	}
	all = await(running(1, 1)) // it ends anyway
	if x := all[1].Last; x == nil || x.Code != 137 || all[0].Restarts != 1 {
		t.Errorf("after the deaf one was killed: %+v", all)
	}
	if err := p.kill(t.Context(), "last", 0, time.Minute); err != nil {
		t.Error(err)
	}
	if all, _ = p.look(); all[2].State != vm.ContainerTerminated || all[2].Exit.Code != 143 || all[2].Restarts != 0 {
		t.Errorf("one that is never started again: %+v", all[2])
	}
}

// Sidecars end after the apps, the last one first, each after the next one has ended.
func TestSidecarsEndInReverse(t *testing.T) {
	dir := t.TempDir()
	side := func(name string) *container {
		return script(name, vm.ContainerSidecar, vm.RestartAlways,
			"trap 'echo "+name+" >> "+dir+"/order; exit 0' TERM; touch "+dir+"/"+name+"; while :; do sleep 0.01; done")
	}
	order := func(app string, stop bool) string {
		t.Helper()
		_ = os.Remove(filepath.Join(dir, "order"))
		p := several(t, side("one"), side("two"), side("three"), script("app", vm.ContainerApp, vm.RestartNever,
			"until test -e "+dir+"/one -a -e "+dir+"/two -a -e "+dir+"/three; do sleep 0.01; done; "+app))
		if stop {
			for _, err := os.Stat(filepath.Join(dir, "app")); err != nil; _, err = os.Stat(filepath.Join(dir, "app")) {
				<-time.After(time.Millisecond)
			}
			p.shutdown(t.Context(), time.Minute)
		}
		<-p.done
		b, err := os.ReadFile(filepath.Join(dir, "order"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range []string{"one", "two", "three"} {
			_ = os.Remove(filepath.Join(dir, f))
		}
		return string(b)
	}
	if got := order("echo app >> "+dir+"/order", false); got != "app\nthree\ntwo\none\n" {
		t.Errorf("apps that end by themselves: %q", got)
	}
	if got := order("trap 'echo app >> "+dir+"/order; exit 0' TERM; touch "+dir+"/app; while :; do sleep 0.01; done", true); got != "app\nthree\ntwo\none\n" {
		t.Errorf("a stop: %q", got)
	}
}

// Containers after one that holds them wait until it is released, or until the first run of an app has ended.
func TestHold(t *testing.T) {
	held := func(c *container) *container { c.hold = true; return c }
	p := several(t,
		held(script("side", vm.ContainerSidecar, vm.RestartAlways, "exec sleep 1000")),
		script("init", vm.ContainerInit, vm.RestartOnFailure, "true"),
		held(script("first", vm.ContainerApp, vm.RestartNever, "exec sleep 1000")),
		held(script("second", vm.ContainerApp, vm.RestartNever, "exit 1")),
		script("third", vm.ContainerApp, vm.RestartNever, "exec sleep 1000"))
	state := func(name string, want vm.ContainerState) []string {
		for {
			all, changed := p.look()
			for i, s := range all {
				if p.all[i].name == name && s.State == want {
					return outcome(p)
				}
			}
			<-changed
		}
	}
	waits := " waiting PodInitializing"
	if got := state("side", vm.ContainerRunning); got[1] != "init"+waits || got[2] != "first"+waits {
		t.Errorf("held by the sidecar: %q", got)
	}
	if err := p.release("none"); !errdefs.IsNotFound(err) {
		t.Errorf("no such container: %v", err)
	}
	for _, name := range []string{"side", "side"} {
		if err := p.release(name); err != nil {
			t.Error(err)
		}
	}
	if got := state("first", vm.ContainerRunning); got[1] != "init terminated Completed" || got[3] != "second"+waits {
		t.Errorf("held by the first app: %q", got)
	}
	if err := p.release("first"); err != nil {
		t.Error(err)
	}
	if got := state("third", vm.ContainerRunning); got[3] != "second terminated Error" {
		t.Errorf("after an app that failed: %q", got)
	}

	p = several(t,
		held(script("side", vm.ContainerSidecar, vm.RestartAlways, "exec sleep 1000")),
		script("app", vm.ContainerApp, vm.RestartNever, "true"))
	state("side", vm.ContainerRunning)
	p.shutdown(t.Context(), time.Minute)
	<-p.done
	if got := outcome(p); got[1] != "app"+waits {
		t.Errorf("stopped while it was held: %q", got)
	}
}
