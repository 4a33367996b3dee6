package firecracker

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// TestHungAtLaunch: a process that does not answer while it is told what its VM is fails the launch, and not only one that never listens.
func TestHungAtLaunch(t *testing.T) {
	for what, plan := range map[string]hypervisor.Plan{"boot": {}, "resume": {Incoming: &hypervisor.Incoming{}}} {
		t.Run(what, func(t *testing.T) {
			i, api := answered(t)
			go serveBy(api, func(string, string) string { <-t.Context().Done(); return "" })
			l := &launch{d: i.d}
			l.Plan, l.Proc, l.Title = plan, i.Proc, "Firecracker"
			l.Plan.ID, l.Plan.Dir = testID, i.h.Dir
			l.setup.last = []request{{"PUT", "/snapshot/load", loadConfig{}}}
			l.d.cfg.LaunchTime = 50 * time.Millisecond
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := l.boot(ctx); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "50ms") {
				t.Errorf("it is told: %v", err)
			}
		})
	}
}

// TestHungBeforeItsPager: nor does one wait for a process that does not say where its memory is.
func TestHungBeforeItsPager(t *testing.T) {
	i, api := answered(t)
	go serveBy(api, func(string, string) string { <-t.Context().Done(); return "" })
	l, _ := launchOf(t, i.h.Dir, userfaultfd(t))
	_ = l.Proc.Kill(t.Context())
	l.d, l.Proc, l.setup.last = i.d, i.Proc, []request{{"PUT", "/snapshot/load", loadConfig{}}}
	if conn, err := l.late.listener.Accept(); err != nil { // what launchOf has said is not heard
		t.Fatal(err)
	} else {
		_ = conn.Close()
	}
	l.d.cfg.LaunchTime = 50 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := l.attended(ctx, i); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "50ms") {
		t.Errorf("it is told: %v", err)
	}
}

// TestLaunchWaitsForMemory: while its pager works, a process may wait for memory that comes from afar, longer than a launch may take otherwise.
func TestLaunchWaitsForMemory(t *testing.T) {
	i, api := answered(t)
	const limit = 10 * time.Second
	go serveBy(api, func(path, _ string) string {
		if path == "/snapshot/load" {
			<-time.After(limit + limit/4)
		}
		return "{}"
	})
	l, _ := launchOf(t, i.h.Dir, userfaultfd(t))
	_ = l.Proc.Kill(t.Context())
	l.d, l.Proc, l.setup.last = i.d, i.Proc, []request{{"PUT", "/snapshot/load", loadConfig{}}}
	l.Plan.Incoming = &hypervisor.Incoming{}
	l.d.cfg.LaunchTime = limit
	if err := l.attended(t.Context(), i); err != nil {
		t.Fatal(err)
	}
	i.pager.release()
}

// TestShutdownWhileItBegins: the button is not waited for while the guest begins, and is pressed then.
func TestShutdownWhileItBegins(t *testing.T) {
	i, api := answered(t)
	began, goOn := make(chan struct{}), make(chan struct{})
	var pressed atomic.Bool
	go serveBy(api, func(_, body string) string {
		switch {
		case strings.Contains(body, "InstanceStart"):
			close(began)
			<-goOn
		case strings.Contains(body, "SendCtrlAltDel"):
			pressed.Store(true)
		}
		return `{"state":"Not started"}` // as a request that came before says
	})
	resumed, asked := make(chan error, 1), make(chan error, 1)
	go func() { resumed <- i.Resume(t.Context()) }()
	<-began
	go func() { asked <- i.Shutdown(t.Context()) }()
	select {
	case err := <-asked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it waits until the guest has begun")
	}
	close(goOn)
	if err := <-resumed; err != nil {
		t.Error(err)
	}
	if !pressed.Swap(false) {
		t.Error("the button was not pressed")
	}
	if err := i.Shutdown(t.Context()); err != nil || !pressed.Load() {
		t.Errorf("the state is that of before: the button was pressed: %v, %v", pressed.Load(), err)
	}
}

// TestBeginUnheard: a guest has begun if the process says so, also if it did not answer the request. The button that was pressed before is pressed then.
func TestBeginUnheard(t *testing.T) {
	i, api := answered(t)
	var begun, pressed atomic.Bool
	go serveBy(api, func(path, body string) string {
		switch {
		case strings.Contains(body, "InstanceStart"):
			begun.Store(true)
			return unheard
		case strings.Contains(body, "SendCtrlAltDel"):
			pressed.Store(true)
		case begun.Load():
			return `{"state":"Running"}`
		}
		return `{"state":"Not started"}`
	})
	if err := i.Shutdown(t.Context()); err != nil || pressed.Load() {
		t.Fatalf("before it begins: the button was pressed: %v, %v", pressed.Load(), err)
	}
	if err := i.Resume(t.Context()); err != nil || !pressed.Load() {
		t.Errorf("the button was pressed: %v, %v", pressed.Load(), err)
	}
}
