package engine_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestCloneArriving clones a snapshot whose memory is not all here: a clone that resumes waits for what it needs, and one that boots for all.
func TestCloneArriving(t *testing.T) {
	host, err := fake.NewHost("")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(r *rig) {
		r.vmm = fake.New(fake.Config{}, host)
		r.snapshots, err = local.New(local.Config{Dir: filepath.Join(r.dir, "state", "snapshots")})
		if err != nil {
			t.Fatal(err)
		}
	})
	ctx := t.Context()
	small := spec("web")
	small.Memory = vm.MinMemory // all of it is read again and again
	web := r.must(r.Create(ctx, small))
	if err := os.Truncate(web.Disks[0].Path, 16<<20); err != nil { // the image of the test world has an empty disk
		t.Fatal(err)
	}
	r.must(r.Start(ctx, "web"))
	if err := host.Remember(web.ID, "one"); err != nil {
		t.Fatal(err)
	}
	gold := r.saved("gold")

	// The same snapshot arrives.
	from, err := r.snapshots.Hold(ctx, "gold")
	if err != nil {
		t.Fatal(err)
	}
	defer from.Release()
	d, err := r.snapshots.Create(ctx, "late")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Discard() }()
	var memory []byte
	for _, f := range gold.Files() {
		text, err := os.ReadFile(filepath.Join(from.Dir(), f))
		if err != nil {
			t.Fatal(err)
		}
		if f == snapshot.FileMemory {
			memory, text = text, make([]byte, len(text))
		}
		if err := os.WriteFile(filepath.Join(d.Dir(), f), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(d.Dir()) // the path may be too long for a socket
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: snapshot.FileFeed})
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(r.dir)
	l.SetUnlinkOnClose(false)
	all := sparse.Extent{Length: int64(len(memory))}
	w := filling.NewWriter(all.Length, []sparse.Extent{all})
	served, stop := context.WithCancel(ctx)
	go func() { _ = w.Serve(served, l) }()
	defer stop()
	if _, err := d.Offer(ctx, gold); err != nil {
		t.Fatal(err)
	}

	type result struct {
		vm.Record
		err error
	}
	clone := func(s vm.CloneSpec) <-chan result {
		done := make(chan result, 1)
		go func() {
			c, err := r.Clone(ctx, s)
			done <- result{c, err}
		}()
		return done
	}
	live := clone(vm.CloneSpec{Snapshot: "late", Name: "a"})
	cold := clone(vm.CloneSpec{Snapshot: "late", Name: "b", Cold: true})
	<-w.Wants()
	select {
	case c := <-live:
		t.Fatalf("it runs without its memory: %+v", c)
	default:
	}
	if err := os.WriteFile(filepath.Join(d.Dir(), snapshot.FileMemory), memory, 0o600); err != nil {
		t.Fatal(err)
	}
	w.Put(sparse.Extent{Length: sparse.Block})
	a := <-live
	if got, _ := host.Memory(a.ID); a.err != nil || got != "one" || a.Snapshot != d.ID() {
		t.Fatalf("%+v remembers %q, %v", a.Record, got, a.err)
	}
	select {
	case c := <-cold:
		t.Fatalf("it did not wait for all: %+v", c)
	default:
	}
	if _, err := d.Commit(ctx, gold); err != nil {
		t.Fatal(err)
	}
	if b := <-cold; b.err != nil {
		t.Fatal(b.err)
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "late", Name: "c"}))
	if got, _ := host.Memory(c.ID); got != "one" {
		t.Errorf("it remembers %q", got)
	}
}
