package local_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/csinode/csitest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func always(csinode.Published) error { return nil }

func (w *world) release() {
	w.t.Helper()
	if err := w.Release(w.t.Context(), always); err != nil {
		w.t.Fatal(err)
	}
}

// TestRelease: after it, the driver has nothing, and the holders have their volumes when they publish them again.
func TestRelease(t *testing.T) {
	for name, able := range map[string][]csi.NodeServiceCapability_RPC_Type{"staged": staging, "not staged": nil} {
		t.Run(name, func(t *testing.T) {
			w, d := start(t, csitest.Options{Able: able})
			a, b, c := request("a", "v"), request("b", "v"), request("c", "u")
			p := w.publish(a)
			w.publish(b)
			w.publish(c)
			w.release()
			if left := d.Left(); left != nil {
				t.Errorf("the driver has %v", left)
			}
			if _, err := os.Lstat(w.dir + "/published/blue"); err == nil {
				t.Error("folders are left")
			}
			if list := w.List(); len(list) != 3 || list[0].Ready || list[1].Ready || list[2].Ready {
				t.Errorf("listed: %+v", list)
			}
			wantClass(t, w.Find(a.Owner, p.Path, false), errdefs.FailedPrecondition, "publish it again")

			calls := len(d.Calls())
			w.reopen() // the driver need not be there for what is released already
			d.Unregister()
			w.drivers()
			w.release()
			w.unpublish(c.Key)
			if got := d.Calls()[calls:]; len(got) > 0 {
				t.Errorf("calls for released volumes: %v", got)
			}
			d.Register(w.plugins)
			w.drivers("csi.test")
			if diff := diff.Of(p, w.publish(a)); diff != "" {
				t.Errorf("published again (-want +got):\n%s", diff)
			}
			w.unpublish(a.Key)
			w.unpublish(b.Key)
			w.clean(d)
		})
	}
}

// TestReleaseOfSome: what cannot be released stays, with its record, and the error says where and why. Others are released.
func TestReleaseOfSome(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	a, b := request("a", "v"), request("b", "v") // of one volume
	w.publish(a)
	w.publish(b)
	err := w.Release(t.Context(), func(p csinode.Published) error {
		if p.Holder == "a" {
			return errdefs.Preconditionf("VM a runs")
		}
		return nil
	})
	wantClass(t, err, errdefs.FailedPrecondition, "VM a runs", w.dir+"/published/blue/a/data/mount")
	if diff := diff.Of([]string{"v published at " + w.dir + "/published/blue/a/data/mount", "v staged at " + stagedAt(t, d)}, d.Left()); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}

	d.On("NodeUnstageVolume", &csitest.Fault{Err: status.Error(codes.FailedPrecondition, "the file system is busy")})
	wantClass(t, w.Release(t.Context(), always), errdefs.FailedPrecondition, "the file system is busy")
	d.On("NodeUnstageVolume", nil)
	d.On("NodeUnpublishVolume", &csitest.Fault{Until: make(chan struct{})})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantClass(t, w.Release(ctx, always), errdefs.DeadlineExceeded, "NodeUnpublishVolume", "log of CSI driver csi.test")
	d.On("NodeUnpublishVolume", nil)
	d.Unregister()
	w.drivers()
	w.LimitRegister(10 * time.Millisecond)
	wantClass(t, w.Release(t.Context(), always), errdefs.Unavailable, "csi.test is not registered", "start it")
	w.LimitRegister(20 * time.Second)
	late := make(chan error)
	go func() { late <- w.Release(t.Context(), always) }()
	d.Register(w.plugins) // while Release waits, or before
	if err := <-late; err != nil {
		t.Error(err)
	}
	if left := d.Left(); left != nil {
		t.Errorf("the driver has %v", left)
	}
	w.unpublish(a.Key)
	w.unpublish(b.Key)
	w.clean(d)
}

func stagedAt(t *testing.T, d *csitest.Driver) string {
	t.Helper()
	for _, l := range d.Left() {
		if _, at, ok := strings.Cut(l, " staged at "); ok {
			return at
		}
	}
	t.Fatal("nothing is staged")
	return ""
}

// TestReleaseWithADamagedRecord: the error names the record, and the other volumes are released, but not the staging that they share.
func TestReleaseWithADamagedRecord(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	a, b, c := request("a", "v"), request("b", "v"), request("c", "u")
	w.publish(a)
	files, err := os.ReadDir(w.dir + "/records")
	if err != nil || len(files) != 1 {
		t.Fatalf("%v: %v", files, err)
	}
	w.publish(b)
	w.publish(c)
	w.stop()
	file := w.dir + "/records/" + files[0].Name()
	if err := os.Truncate(file, 20); err != nil {
		t.Fatal(err)
	}
	w.open()
	w.drivers("csi.test")
	err = w.Release(t.Context(), always)
	wantClass(t, err, errdefs.DataLoss, file, "unmount what is published")
	if left := d.Left(); len(left) != 2 {
		t.Errorf("left: %v", left)
	}
	w.stop()
	if err := errors.Join(os.Remove(file), os.RemoveAll(w.dir+"/published/blue/a"), os.RemoveAll(w.dir+"/staged/csi.test")); err != nil {
		t.Fatal(err)
	}
}
