package engine_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// realStore is an engine with the snapshot store of a real node, and with VMs that have no guest agent.
func realStore(t *testing.T, opts ...func(*rig)) (*rig, *fake.Host) {
	t.Helper()
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
		for _, o := range opts {
			o(r)
		}
	})
	web := r.must(r.Create(t.Context(), spec("web")))
	if err := os.Truncate(web.Disks[0].Path, 16<<20); err != nil { // the image of the test world has an empty disk
		t.Fatal(err)
	}
	r.must(r.Start(t.Context(), "web"))
	return r, host
}

// garbage writes 2 MiB into the middle of a file of a snapshot, and returns a function that undoes that.
func (r *rig) garbage(ref, file string) (heal func()) {
	r.t.Helper()
	h, err := r.snapshots.Hold(r.t.Context(), ref)
	if err != nil {
		r.t.Fatal(err)
	}
	path := filepath.Join(h.Dir(), file)
	h.Release()
	info, err := os.Stat(path)
	if err != nil {
		r.t.Fatal(err)
	}
	at := info.Size() / 2 / 4096 * 4096
	write := func(p []byte) {
		r.t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			r.t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt(p, at); err != nil {
			r.t.Fatal(err)
		}
	}
	n := min(2<<20, int(info.Size()-at))
	was := make([]byte, n)
	f, err := os.Open(path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(was, at); err != nil {
		r.t.Fatal(err)
	}
	write(bytes.Repeat([]byte("garbage!"), n/8+1)[:n])
	return func() { write(was) }
}

// TestWakeWithDamagedMemory: the VM stays hibernated, nothing of it is removed, and it wakes once its memory is
// intact again.
func TestWakeWithDamagedMemory(t *testing.T) {
	for _, file := range []string{snapshot.FileMemory, snapshot.FileState, "disk"} {
		t.Run(file, func(t *testing.T) {
			r, host := realStore(t)
			ctx := t.Context()
			web := r.must(r.Inspect(ctx, "web"))
			if err := host.Remember(web.ID, "one"); err != nil {
				t.Fatal(err)
			}
			slept := r.must(r.Hibernate(ctx, "web", ""))
			x, err := r.snapshots.Get(ctx, slept.Snapshot)
			if err != nil {
				t.Fatal(err)
			}
			if file == "disk" {
				file = x.Disks[0].Layers[0].File
				r.restartStore() // the store does not read again what it has just written
			}
			heal := r.garbage(slept.Snapshot, file)
			for range 2 {
				rec, err := r.Wake(ctx, "web")
				if !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), x.Name) {
					t.Fatalf("woken with damaged memory: %v, it is %s", err, rec.State)
				}
			}
			rec := r.must(r.Inspect(ctx, "web"))
			if rec.State != vm.StateHibernated || rec.Reason != vm.ReasonDataLoss || rec.Snapshot != slept.Snapshot || !strings.Contains(rec.Message, "is damaged at byte") {
				t.Errorf("it is %s: %s, %s", rec.State, rec.Reason, rec.Message)
			}
			if _, err := r.snapshots.Get(ctx, slept.Snapshot); err != nil {
				t.Fatalf("its snapshot: %v", err)
			}
			if _, err := r.Clone(ctx, vm.CloneSpec{Snapshot: x.Name, Name: "a"}); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), x.Name) {
				t.Errorf("cloned: %v", err)
			}
			heal()
			if rec = r.must(r.Wake(ctx, "web")); rec.State != vm.StateRunning || rec.Reason != "" {
				t.Errorf("healed it is %s: %s", rec.State, rec.Reason)
			}
			if got, _ := host.Memory(web.ID); got != "one" {
				t.Errorf("it remembers %q", got)
			}
			r.clearAll()
		})
	}
}

// restartStore makes another process use the store.
func (r *rig) restartStore() {
	r.t.Helper()
	r.stop()
	old := r.snapshots.(*local.Store)
	if err := old.Close(); err != nil {
		r.t.Fatal(err)
	}
	var err error
	if r.snapshots, err = local.New(local.Config{Dir: filepath.Join(r.dir, "state", "snapshots")}); err != nil {
		r.t.Fatal(err)
	}
	r.start()
}
