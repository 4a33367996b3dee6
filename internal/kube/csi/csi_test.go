package csi

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// node is a machine whose drivers a test writes.
type node struct {
	mu      sync.Mutex
	drivers []csinode.Driver
	changed chan struct{}
	asked   csinode.Request
	grouped bool
	has     []nodewire.Published
	held    string // the name of a volume that a VM has
	fail    error
	away    error // of lists
	grown   []string
}

func (n *node) set(drivers ...csinode.Driver) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.drivers = drivers
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *node) WatchDrivers(ctx context.Context, fn func([]csinode.Driver) error) error {
	for {
		n.mu.Lock()
		now, changed, fail := n.drivers, n.changed, n.fail
		n.mu.Unlock()
		if fail != nil {
			return fail
		}
		if err := fn(now); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *node) PublishVolume(_ context.Context, r csinode.Request) (nodewire.Published, error) {
	n.asked = r
	p := nodewire.Published{Published: csinode.Published{Key: r.Key, Driver: r.Driver, Handle: r.Handle, Access: r.Access, Path: "/csi/" + r.Name, Grouped: n.grouped, Ready: true}}
	if r.Access == csinode.AsDevice {
		p.Volume = "01device"
	}
	return p, n.fail
}

func (n *node) UnpublishVolume(_ context.Context, k csinode.Key) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if k.Name == n.held {
		return errdefs.Preconditionf("a VM has it")
	}
	for i, v := range n.has {
		if v.Key == k {
			n.has = append(n.has[:i:i], n.has[i+1:]...)
			break
		}
	}
	return nil
}

func (n *node) ListPublished(ctx context.Context) ([]nodewire.Published, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.away != nil {
		return nil, n.away
	}
	var out []nodewire.Published
	for _, v := range n.has {
		if who := vm.Behalf(ctx); who.Operator() || who.Namespace == v.Owner.Namespace {
			out = append(out, v)
		}
	}
	return out, nil
}

func (n *node) GrowPublished(_ context.Context, k csinode.Key, size int64) (int64, error) {
	n.grown = append(n.grown, k.Name)
	return size, n.fail
}

func (n *node) PublishedUsage(_ context.Context, k csinode.Key) (csinode.Usage, error) {
	return csinode.Usage{Bytes: csinode.Amount{Total: int64(len(k.Name))}}, nil
}

func (n *node) names() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, v := range n.has {
		out = append(out, v.Holder+"/"+v.Name)
	}
	return strings.Join(out, " ")
}

func published(namespace, holder, name string, ready bool) nodewire.Published {
	return nodewire.Published{Published: csinode.Published{
		Key: csinode.Key{Owner: vm.Owner{Namespace: namespace}, Holder: holder, Name: name}, Driver: "d", Handle: name, Access: csinode.AsFolder, Ready: ready,
	}}
}

func plugins(n *node, objects ...runtime.Object) (*Plugins, kubernetes.Interface) {
	n.changed = make(chan struct{})
	client := fake.NewClientset(append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "node", Labels: map[string]string{"kubernetes.io/hostname": "n1"}}})...)
	return New(Config{
		Name: "n1", Client: client, Node: n, Log: slog.New(slog.DiscardHandler),
		Known: func(uid types.UID) bool { return uid == "pod" }, Changed: func() {},
	}), client
}

func web() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "pod"}, Spec: corev1.PodSpec{
		ServiceAccountName: "robot", SecurityContext: &corev1.PodSecurityContext{FSGroup: new(int64(2000))},
	}}
}

func token(_ context.Context, _ *corev1.Pod, audience string, seconds int64) (string, time.Time, error) {
	return "token of " + audience, time.Unix(seconds, 0).UTC(), nil
}

func TestPersistent(t *testing.T) {
	secret := func(namespace, name, value string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: map[string][]byte{"key": []byte(value)}}
	}
	noAttach := storagev1.CSIDriverSpec{AttachRequired: new(false)}
	plain := func(more func(*csinode.Request)) csinode.Request {
		r := csinode.Request{
			Key: csinode.Key{Owner: vm.Owner{Namespace: "default"}, Holder: "pod", Name: "data"}, Driver: "example.com", Handle: "v1",
			Access: csinode.AsFolder, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Group: "2000", Attributes: map[string]string{"a": "b"},
		}
		if more != nil {
			more(&r)
		}
		return r
	}
	folder := convert.Disk{Dir: &vm.HostDir{Path: "/csi/data", Published: true}, Group: true}
	for name, c := range map[string]struct {
		driver   *storagev1.CSIDriverSpec // nil: there is no object
		volume   func(*corev1.PersistentVolume)
		readOnly bool
		grouped  bool
		asked    csinode.Request
		want     convert.Disk
		refused  string
	}{
		"plain":         {driver: &noAttach, asked: plain(nil), want: folder},
		"grouped by it": {driver: &noAttach, grouped: true, asked: plain(nil), want: convert.Disk{Dir: folder.Dir}},
		"attached": {
			driver: &storagev1.CSIDriverSpec{}, asked: plain(func(r *csinode.Request) { r.Attachment = map[string]string{"device": "/dev/x"} }), want: folder,
		},
		"attached, without an object": {asked: plain(func(r *csinode.Request) { r.Attachment = map[string]string{"device": "/dev/x"} }), want: folder},
		"not attached": {
			driver: &storagev1.CSIDriverSpec{}, volume: func(v *corev1.PersistentVolume) { v.Spec.CSI.VolumeHandle = "v2" }, refused: "is not attached to node n1 yet",
		},
		"read only": {
			driver: &noAttach, readOnly: true, asked: plain(func(r *csinode.Request) { r.ReadOnly = true }), want: convert.Disk{Dir: folder.Dir, Group: true, ReadOnly: true},
		},
		"block": {
			driver: &noAttach, volume: func(v *corev1.PersistentVolume) {
				v.Spec.VolumeMode, v.Spec.AccessModes = new(corev1.PersistentVolumeBlock), []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
			},
			asked: plain(func(r *csinode.Request) {
				r.Access, r.FSType, r.Group, r.Mode = csinode.AsDevice, "", "", "SINGLE_NODE_SINGLE_WRITER"
			}),
			want: convert.Disk{ID: "01device", Device: true},
		},
		"shared, without groups": {
			driver: &noAttach, volume: func(v *corev1.PersistentVolume) {
				v.Spec.AccessModes, v.Spec.MountOptions = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, []string{"noatime"}
			},
			asked: plain(func(r *csinode.Request) {
				r.Mode, r.MountFlags, r.Group = "MULTI_NODE_MULTI_WRITER", []string{"noatime"}, ""
			}),
			want: convert.Disk{Dir: folder.Dir},
		},
		"shared, with groups": {
			driver: &storagev1.CSIDriverSpec{AttachRequired: new(false), FSGroupPolicy: new(storagev1.FileFSGroupPolicy)},
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
			},
			asked: plain(func(r *csinode.Request) { r.Mode = "MULTI_NODE_READER_ONLY" }), want: folder,
		},
		"never groups": {
			driver: &storagev1.CSIDriverSpec{AttachRequired: new(false), FSGroupPolicy: new(storagev1.NoneFSGroupPolicy)},
			asked:  plain(func(r *csinode.Request) { r.Group = "" }), want: convert.Disk{Dir: folder.Dir},
		},
		"secrets": {
			driver: &noAttach, volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI.NodeStageSecretRef = &corev1.SecretReference{Namespace: "kube-system", Name: "stage"}
				v.Spec.CSI.NodePublishSecretRef = &corev1.SecretReference{Namespace: "kube-system", Name: "publish"}
			},
			asked: plain(func(r *csinode.Request) {
				r.Secrets.Stage, r.Secrets.Publish = map[string]string{"key": "one"}, map[string]string{"key": "two"}
			}), want: folder,
		},
		"a missing secret": {
			driver: &noAttach,
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI.NodeStageSecretRef = &corev1.SecretReference{Namespace: "kube-system", Name: "none"}
			},
			refused: "secret kube-system/none, which the CSI driver needs, not found",
		},
		"the pod and its tokens": {
			driver: &storagev1.CSIDriverSpec{AttachRequired: new(false), PodInfoOnMount: new(true), TokenRequests: []storagev1.TokenRequest{{Audience: "vault", ExpirationSeconds: new(int64(600))}}},
			asked: plain(func(r *csinode.Request) {
				r.Attributes = map[string]string{
					"a": "b", "csi.storage.k8s.io/pod.name": "web", "csi.storage.k8s.io/pod.namespace": "default", "csi.storage.k8s.io/pod.uid": "pod",
					"csi.storage.k8s.io/serviceAccount.name": "robot", "csi.storage.k8s.io/ephemeral": "false",
				}
				r.Secrets.Context = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": `{"vault":{"token":"token of vault","expirationTimestamp":"1970-01-01T00:10:00Z"}}`}
			}), want: folder,
		},
		"tokens as secrets": {
			driver: &storagev1.CSIDriverSpec{AttachRequired: new(false), ServiceAccountTokenInSecrets: new(true), TokenRequests: []storagev1.TokenRequest{{Audience: ""}}},
			asked: plain(func(r *csinode.Request) {
				r.Secrets.Publish = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": `{"":{"token":"token of ","expirationTimestamp":"1970-01-01T01:00:00Z"}}`}
			}), want: folder,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				objects := []runtime.Object{
					secret("kube-system", "stage", "one"), secret("kube-system", "publish", "two"),
					&storagev1.VolumeAttachment{
						ObjectMeta: metav1.ObjectMeta{Name: attachmentName("v1", "example.com", "n1")},
						Spec:       storagev1.VolumeAttachmentSpec{Attacher: "example.com", NodeName: "n1"},
						Status:     storagev1.VolumeAttachmentStatus{Attached: true, AttachmentMetadata: map[string]string{"device": "/dev/x"}},
					},
				}
				if c.driver != nil {
					objects = append(objects, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "example.com"}, Spec: *c.driver})
				}
				n := &node{grouped: c.grouped}
				p, _ := plugins(n, objects...)
				pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
					AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
						Driver: "example.com", VolumeHandle: "v1", FSType: "ext4", VolumeAttributes: map[string]string{"a": "b"},
					}},
				}}
				if c.volume != nil {
					c.volume(pv)
				}
				got, err := p.Persistent(t.Context(), web(), "data", pv, c.readOnly, Ask{Token: token})
				if c.refused != "" {
					if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), c.refused) {
						t.Errorf("%v, want %q in it", err, c.refused)
					}
					return
				}
				if d := diff.Of(c.want, got); err != nil || d != "" {
					t.Errorf("%v (-want +got):\n%s", err, d)
				}
				if d := diff.Of(c.asked, n.asked); d != "" {
					t.Errorf("the node was asked (-want +got):\n%s", d)
				}
				if used := p.InUse(); len(used) != 1 || used[0] != "kubernetes.io/csi/example.com^v1" {
					t.Errorf("in use: %q", used)
				}
			})
		})
	}
}

func TestAttachmentsThatFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for want, status := range map[string]storagev1.VolumeAttachmentStatus{
			"has not attached the volume": {}, "AttachVolume.Attach failed: VolumeAttachment": {AttachError: &storagev1.VolumeError{Message: "no disk"}},
		} {
			a := &storagev1.VolumeAttachment{
				ObjectMeta: metav1.ObjectMeta{Name: attachmentName("v1", "d", "n1")},
				Spec:       storagev1.VolumeAttachmentSpec{Attacher: "d", NodeName: "n1"}, Status: status,
			}
			p, _ := plugins(&node{}, a)
			if _, err := p.attached(t.Context(), "d", "v1"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q in it", err, want)
			}
		}
		// It waits for one that comes.
		p, client := plugins(&node{})
		go func() {
			time.Sleep(5 * time.Second) //nolint:forbidigo // the fake clock of synctest
			_, _ = client.StorageV1().VolumeAttachments().Create(t.Context(), &storagev1.VolumeAttachment{
				ObjectMeta: metav1.ObjectMeta{Name: attachmentName("v1", "d", "n1")},
				Spec:       storagev1.VolumeAttachmentSpec{Attacher: "d", NodeName: "n1"}, Status: storagev1.VolumeAttachmentStatus{Attached: true},
			}, metav1.CreateOptions{})
		}()
		if _, err := p.attached(t.Context(), "d", "v1"); err != nil {
			t.Error(err)
		}
	})
}

// TestRenew: only a driver that wants to is asked again.
func TestRenew(t *testing.T) {
	modes := []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}
	for _, wants := range []bool{true, false} {
		n := &node{}
		p, _ := plugins(n, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "d"}, Spec: storagev1.CSIDriverSpec{VolumeLifecycleModes: modes, RequiresRepublish: &wants}})
		v := &corev1.Volume{Name: "tmp", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "d"}}}
		if _, err := p.Inline(t.Context(), web(), v, Ask{Token: token, Renew: true}); err != nil || n.asked.Again != wants || (n.asked.Driver == "") == wants {
			t.Errorf("%t: %v, asked %+v", wants, err, n.asked)
		}
	}
}

func TestInline(t *testing.T) {
	both := []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}, Data: map[string][]byte{"k": []byte("v")}}
	n := &node{}
	p, _ := plugins(n, secret,
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "one"}, Spec: storagev1.CSIDriverSpec{VolumeLifecycleModes: both, PodInfoOnMount: new(true)}},
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "two"}})
	inline := func(driver string) *corev1.Volume {
		return &corev1.Volume{Name: "tmp", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{
			Driver: driver, ReadOnly: new(true), VolumeAttributes: map[string]string{"a": "b"}, NodePublishSecretRef: &corev1.LocalObjectReference{Name: "s"},
		}}}
	}
	got, err := p.Inline(t.Context(), web(), inline("one"), Ask{Token: token})
	if d := diff.Of(convert.Disk{Dir: &vm.HostDir{Path: "/csi/tmp", Published: true}, ReadOnly: true}, got); err != nil || d != "" {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	r := n.asked
	if !r.Ephemeral || !r.ReadOnly || len(r.Handle) != 68 || r.Secrets.Publish["k"] != "v" || r.Attributes["csi.storage.k8s.io/ephemeral"] != "true" || r.Attributes["a"] != "b" || r.Attachment != nil {
		t.Errorf("the node was asked %+v", r)
	}
	for _, driver := range []string{"two", "none"} {
		if _, err := p.Inline(t.Context(), web(), inline(driver), Ask{Token: token}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "for single pods") {
			t.Errorf("%s: %v", driver, err)
		}
	}
}

// TestRelease: a pod's volumes are unpublished, and nobody else's.
func TestRelease(t *testing.T) {
	n := &node{has: []nodewire.Published{published("default", "pod", "a", true), published("default", "pod", "b", false), published("default", "other", "c", true), published("prod", "pod", "d", true)}}
	p, _ := plugins(n)
	if stale, err := p.Stale(t.Context(), web()); err != nil || !stale {
		t.Errorf("stale %t, %v", stale, err)
	}
	n.held = "a"
	if err := p.Release(t.Context(), web()); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `volume "a"`) {
		t.Errorf("while a VM has one: %v", err)
	}
	n.held = ""
	p.using(csinode.Key{Owner: vm.Owner{Namespace: "default"}, Holder: "pod", Name: "never attached"}, "x")
	if err := p.Release(t.Context(), web()); err != nil || n.names() != "other/c pod/d" || len(p.InUse()) != 0 {
		t.Errorf("%v, there are %s, in use %v", err, n.names(), p.InUse())
	}
	if stale, err := p.Stale(t.Context(), web()); err != nil || stale {
		t.Errorf("stale %t, %v", stale, err)
	}
}

func TestGrow(t *testing.T) {
	n := &node{has: []nodewire.Published{published("default", "pod", "a", true), published("default", "other", "a", true), published("default", "pod", "b", true), published("prod", "pod", "a", true)}}
	p, _ := plugins(n)
	grow := func(handle string) bool {
		t.Helper()
		here, err := p.Grow(t.Context(), "default", "d", handle, 1<<30)
		if err != nil {
			t.Error(err)
		}
		return here
	}
	if !grow("a") || len(n.grown) != 2 || grow("none") {
		t.Errorf("grown %v", n.grown)
	}
	n.fail = errdefs.Unsupportedf("nothing to do")
	if !grow("b") {
		t.Error("a driver with nothing to do failed")
	}
	n.fail = errdefs.Unavailablef("away")
	if _, err := p.Grow(t.Context(), "default", "d", "b", 1<<30); !errdefs.IsUnavailable(err) {
		t.Errorf("a driver that is away: %v", err)
	}
}

// TestRun: the cluster learns which drivers there are, and what pods have left that are gone is unpublished, but not at once.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{has: []nodewire.Published{published("default", "pod", "a", true), published("default", "gone", "b", true), published("default", "gone", "c", true)}, held: "c"}
		p, client := plugins(n, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
			{Name: contract.VolumeDriver, NodeID: "n1", TopologyKeys: []string{"kubernetes.io/hostname"}}, {Name: "old", NodeID: "x"},
		}}})
		n.set(csinode.Driver{Name: "new", NodeID: "i-1", MaxVolumes: 5, Topology: map[string]string{"zone": "a"}},
			csinode.Driver{Name: "moved", NodeID: "i-2", Topology: map[string]string{"kubernetes.io/hostname": "other"}})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		synctest.Wait()
		drivers := func() (names string) {
			t.Helper()
			c, err := client.StorageV1().CSINodes().Get(t.Context(), "n1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range c.Spec.Drivers {
				names += d.Name + " " + d.NodeID + " " + strings.Join(d.TopologyKeys, ",") + ";"
			}
			return names
		}
		if got := drivers(); got != "new i-1 zone;volume.cocoonstack.io n1 kubernetes.io/hostname;" {
			t.Errorf("drivers: %s", got)
		}
		self, err := client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil || self.Labels["zone"] != "a" || self.Labels["kubernetes.io/hostname"] != "n1" || self.Annotations[annotationManaged] != "true" {
			t.Errorf("%v, labels %v, annotations %v", err, self.Labels, self.Annotations)
		}
		if n.names() != "pod/a gone/b gone/c" || len(p.InUse()) != 3 {
			t.Errorf("at the first look there are %s, in use %v", n.names(), p.InUse())
		}
		n.set()
		p.using(csinode.Key{Owner: vm.Owner{Namespace: "default"}, Holder: "gone", Name: "never attached"}, "x")
		time.Sleep(sweepEvery) //nolint:forbidigo // the fake clock of synctest
		synctest.Wait()
		if got := drivers(); got != "volume.cocoonstack.io n1 kubernetes.io/hostname;" {
			t.Errorf("without drivers: %s", got)
		}
		if n.names() != "pod/a gone/c" || len(p.InUse()) != 2 {
			t.Errorf("later there are %s, in use %v", n.names(), p.InUse())
		}
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
