package local_test

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/csinode/csitest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

func TestWhatIsPublishedIsChecked(t *testing.T) {
	for name, replace := range map[string]func(path string) error{
		"link":  func(path string) error { return os.Symlink("/etc", path) },
		"file":  func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"pipe":  func(path string) error { return unix.Mkfifo(path, 0o600) },
		"gone":  func(string) error { return nil },
		"other": nil, // a folder instead of a device
	} {
		t.Run(name, func(t *testing.T) {
			w, d := start(t, csitest.Options{Able: staging})
			r := request("pod", "v")
			if replace == nil {
				r.Access = csinode.AsDevice
				replace = func(path string) error { return os.Mkdir(path, 0o700) }
			}
			w.OnStep(func(step string) {
				path := w.Root() + "/blue/pod/data/mount"
				if step == "publish" {
					d.On("NodePublishVolume", &csitest.Fault{Lie: &csi.NodePublishVolumeResponse{}, Entry: func() {
						if err := replace(path); err != nil {
							t.Error(err)
						}
					}})
				}
			})
			_, err := w.Publish(t.Context(), r)
			wantClass(t, err, errdefs.FailedPrecondition, "the driver")
			if diff := diff.Of([]string{"NodeStageVolume v", "NodePublishVolume v", "NodeUnpublishVolume v"}, d.Calls()); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
			w.unpublish(r.Key)
			w.clean(d)
		})
	}
}

func TestNothingBelowATargetIsRemoved(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	r := request("pod", "v")
	p := w.publish(r)
	file := p.Path + "/precious"
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.On("NodeUnpublishVolume", &csitest.Fault{Err: status.Error(codes.NotFound, "never heard of it")})
	err := w.Unpublish(t.Context(), r.Key)
	wantClass(t, err, errdefs.FailedPrecondition, p.Path, "not empty")
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	if slices.Contains(d.Calls(), "NodeUnstageVolume v") {
		t.Error("the volume was unstaged although it is not unpublished")
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	d.On("NodeUnpublishVolume", nil)
	w.unpublish(r.Key)
	w.clean(d)
}

func TestADriverThatHangs(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	w.Limit(50 * time.Millisecond)
	d.On("NodeStageVolume", &csitest.Fault{Until: make(chan struct{})})
	r := request("pod", "v")
	_, err := w.Publish(t.Context(), r)
	wantClass(t, err, errdefs.Unavailable, "NodeStageVolume")
	w.Limit(time.Minute)
	entered := make(chan struct{})
	d.On("NodeStageVolume", &csitest.Fault{Until: make(chan struct{}), Entry: sync.OnceFunc(func() { close(entered) })})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	_, err = w.Publish(ctx, r)
	wantClass(t, err, errdefs.Canceled)
	w.unpublish(r.Key)
	w.clean(d)
}

func TestOtherVolumesDoNotWait(t *testing.T) {
	w, d := start(t, csitest.Options{})
	entered, until := make(chan struct{}), make(chan struct{})
	d.On("NodePublishVolume", &csitest.Fault{Until: until, Entry: sync.OnceFunc(func() { close(entered) })})
	slow := make(chan error)
	go func() {
		_, err := w.Publish(t.Context(), request("a", "slow"))
		slow <- err
	}()
	<-entered
	d.On("NodePublishVolume", nil)
	w.publish(request("b", "fast"))
	close(until)
	if err := <-slow; err != nil {
		t.Error(err)
	}
}

func TestManyAtOnce(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	var wg sync.WaitGroup
	for _, holder := range []string{"a", "b", "c", "d"} {
		for _, volume := range []string{"u", "v"} {
			wg.Go(func() {
				r := request(holder, volume)
				r.Name = volume
				for range 5 {
					if _, err := w.Publish(t.Context(), r); err != nil {
						t.Error(err)
					}
					if err := w.Unpublish(t.Context(), r.Key); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	w.clean(d)
}

func TestSecretsAreNowhere(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	const secret = "s3cr3t-w0rd"
	r := request("pod", "v")
	const token = "t0ken-0f-the-p0d"
	r.Secrets = csinode.Secrets{Stage: map[string]string{"k": secret}, Publish: map[string]string{"k": secret}, Context: map[string]string{"token": token}}
	r.Attributes = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": secret}
	r.MountFlags = []string{"password=" + secret}
	for _, method := range []string{"NodeStageVolume", "NodePublishVolume"} {
		d.On(method, &csitest.Fault{Err: status.Error(codes.Internal, "bad password "+secret)})
		_, err := w.Publish(t.Context(), r)
		wantClass(t, err, errdefs.Internal, "bad password ***")
		if strings.Contains(err.Error(), secret) {
			t.Errorf("the error has the secret: %v", err)
		}
		d.On(method, nil)
	}
	w.publish(r)
	files := 0
	if err := filepath.WalkDir(w.dir, func(path string, f fs.DirEntry, err error) error {
		if err != nil || !f.Type().IsRegular() {
			return err
		}
		files++
		text, err := os.ReadFile(path)
		if bytes.Contains(text, []byte(secret)) || bytes.Contains(text, []byte(token)) {
			t.Errorf("%s has the secret", path)
		}
		return err
	}); err != nil || files < 2 {
		t.Errorf("%d files read: %v", files, err)
	}
	if strings.Contains(w.log.String(), secret) || strings.Contains(w.log.String(), token) {
		t.Errorf("the log has the secret:\n%s", w.log)
	}
}

// TestAgain: a driver that wants to be asked again is, and whatever it answers, the volume stays published.
func TestAgain(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	r := request("pod", "v")
	first := w.publish(r)
	r.Again = true
	if again, err := w.Publish(t.Context(), r); err != nil || diff.Of(first, again) != "" {
		t.Errorf("again: %+v, %v", again, err)
	}
	d.On("NodePublishVolume", &csitest.Fault{Err: status.Error(codes.Internal, "no token")})
	_, err := w.Publish(t.Context(), r)
	wantClass(t, err, errdefs.Internal, "no token")
	if all := w.List(); len(all) != 1 || !all[0].Ready {
		t.Errorf("after a failure there is %+v", all)
	}
	d.On("NodePublishVolume", nil)
	if got := strings.Join(d.Calls(), ", "); got != "NodeStageVolume v, NodePublishVolume v, NodePublishVolume v, NodePublishVolume v" {
		t.Errorf("calls: %s", got)
	}
	other := request("pod-2", "v") // the first time is as without it
	other.Again = true
	if p := w.publish(other); !p.Ready {
		t.Errorf("%+v", p)
	}
}

func TestUsageAndGrow(t *testing.T) {
	w, _ := start(t, csitest.Options{Able: append(slices.Clone(staging), csi.NodeServiceCapability_RPC_GET_VOLUME_STATS, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)})
	r := request("pod", "v")
	if _, err := w.Usage(t.Context(), r.Key); !errdefs.IsNotFound(err) {
		t.Errorf("usage of nothing: %v", err)
	}
	w.publish(r)
	u, err := w.Usage(t.Context(), r.Key)
	want := csinode.Usage{Bytes: csinode.Amount{Total: 100, Used: 30, Available: 70}, Inodes: csinode.Amount{Total: 10, Used: 3}, Abnormal: "worn  out"}
	if diff := diff.Of(want, u); diff != "" || err != nil {
		t.Errorf("usage (-want +got):\n%s%v", diff, err)
	}
	if got, err := w.Grow(t.Context(), r.Key, 4096); got != 4097 || err != nil {
		t.Errorf("grown to %d: %v", got, err)
	}
	if _, err := w.Grow(t.Context(), r.Key, 0); !errdefs.IsInvalid(err) {
		t.Errorf("grown to nothing: %v", err)
	}
}

func TestADriverThatCannotGrow(t *testing.T) {
	w, _ := start(t, csitest.Options{})
	r := request("pod", "v")
	w.publish(r)
	_, err := w.Usage(t.Context(), r.Key)
	wantClass(t, err, errdefs.Unsupported)
	_, err = w.Grow(t.Context(), r.Key, 4096)
	wantClass(t, err, errdefs.Unsupported)
}

func TestGroup(t *testing.T) {
	for _, able := range [][]csi.NodeServiceCapability_RPC_Type{nil, {csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP}} {
		w, _ := start(t, csitest.Options{Able: able})
		r := request("pod", "v")
		r.Group = "1000"
		if p := w.publish(r); p.Grouped != (able != nil) {
			t.Errorf("with %v: grouped %t", able, p.Grouped)
		}
	}
}

func TestMounts(t *testing.T) {
	need.Root(t)
	w, d := start(t, csitest.Options{Able: staging, Mount: true})
	r := request("pod", "v")
	r.ReadOnly = true
	p := w.publish(r)
	if err := os.WriteFile(d.Folder("v")+"/file", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(p.Path + "/file"); string(text) != "x" {
		t.Errorf("read %q: %v", text, err)
	}
	if err := os.WriteFile(p.Path+"/file", nil, 0o600); err == nil {
		t.Error("a read-only volume was written to")
	}
	d.On("NodeUnpublishVolume", &csitest.Fault{Lie: &csi.NodeUnpublishVolumeResponse{}}) // says so and does nothing
	wantClass(t, w.Unpublish(t.Context(), r.Key), errdefs.FailedPrecondition, "still mounted", p.Path)
	d.On("NodeUnpublishVolume", nil)
	dev := request("pod", "dev")
	dev.Name, dev.Access = "dev", csinode.AsDevice
	if info, err := os.Lstat(w.publish(dev).Path); err != nil || info.Mode().Type() != fs.ModeDevice {
		t.Errorf("a device: %v, %v", info, err)
	}
	w.unpublish(r.Key)
	w.unpublish(dev.Key)
	w.clean(d)
	if _, err := os.Stat(d.Folder("v") + "/file"); err != nil {
		t.Errorf("content of the volume: %v", err)
	}
}
