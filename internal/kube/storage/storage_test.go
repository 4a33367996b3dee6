package storage

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	component "k8s.io/component-helpers/storage/volume"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
	"cocoonstack.io/cocoon/internal/volume/kinds"
)

// node is a Storage with a real volume store and a fake API server.
type node struct {
	t      *testing.T
	client *fake.Clientset
	store  *file.Store
	free   atomic.Int64
	thin   atomic.Int64 // room of its thin pool; -1: it has none
	busy   atomic.Bool  // the guest does not use a new size yet
	events *record.FakeRecorder

	readying func() // called between New and Run

	images  func(ctx context.Context, s volume.Spec, from image.PullRequest) (io.Reader, error) // nil: there are none
	uploads Uploads
}

func start(t *testing.T, objects ...runtime.Object) *node {
	t.Helper()
	n := prepare(t, objects...)
	n.run()
	return n
}

// prepare returns a node that does not run yet.
func prepare(t *testing.T, objects ...runtime.Object) *node {
	t.Helper()
	store, err := file.New(t.Context(), file.Config{Dir: t.TempDir() + "/volumes"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	n := &node{t: t, store: store, events: record.NewFakeRecorder(100)}
	n.free.Store(1 << 40)
	n.thin.Store(-1)
	n.client = fake.NewClientset(append(objects, class("cocoon-local", nil), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}})...)
	return n
}

// stored is the store as the engine gives it.
type stored struct {
	*file.Store
	n *node
}

func (s stored) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	return kinds.New([]kinds.Kind{{Name: file.Kind, Making: s.Store}}).Create(ctx, spec)
}

func (s stored) FromImage(ctx context.Context, spec volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error) {
	if s.n.images == nil {
		return volume.Volume{}, errdefs.NotFoundf("there is no image %s", from.Name)
	}
	r, err := s.n.images(ctx, spec, from)
	if err != nil {
		return volume.Volume{}, err
	}
	progress(image.Progress{Phase: image.PhaseFill})
	return s.Import(ctx, spec, r, nil)
}

func (n *node) room(_ context.Context, kind string) (int64, bool, error) {
	if kind == "" {
		return n.free.Load(), true, nil
	}
	room := n.thin.Load()
	return room, kind == "lvm" && room >= 0, nil
}

func (s stored) Grow(ctx context.Context, ref string, size int64) (volume.Resized, error) {
	v, err := s.Resize(ctx, ref, size)
	out := volume.Resized{Volume: v}
	if s.n.busy.Load() {
		out.Waiting = []volume.Waiting{{VM: "vm-1", Reason: "its agent does not answer"}}
	}
	return out, err
}

func (n *node) run() {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	s, err := New(ctx, Config{Node: "node-1", Client: n.client, Uploads: n.uploads, Volumes: stored{n.store, n}, Free: n.room, Events: n.events, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		n.t.Fatal(err)
	}
	if n.readying != nil {
		n.readying()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Run(ctx)
	}()
	n.t.Cleanup(func() { cancel(); <-ended })
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	kubetest.Eventually(t, what, func() string { return fmt.Sprint(ok()) }, "true")
}

func class(name string, change func(*storagev1.StorageClass)) *storagev1.StorageClass {
	reclaim, binding := corev1.PersistentVolumeReclaimDelete, storagev1.VolumeBindingWaitForFirstConsumer
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: contract.VolumeDriver, ReclaimPolicy: &reclaim, VolumeBindingMode: &binding}
	if change != nil {
		change(c)
	}
	return c
}

// claim is a claim whose pod the scheduler has sent to a node.
func claim(name, on string, change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name), Annotations: map[string]string{
			component.AnnSelectedNode: on, component.AnnStorageProvisioner: contract.VolumeDriver,
		}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: new("cocoon-local"),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("10Mi")}},
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func (n *node) create(c *corev1.PersistentVolumeClaim) {
	n.t.Helper()
	if _, err := n.client.CoreV1().PersistentVolumeClaims(c.Namespace).Create(n.t.Context(), c, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

// volume waits for the PersistentVolume of a claim.
func (n *node) volume(claim string) (pv *corev1.PersistentVolume) {
	n.t.Helper()
	until(n.t, "a volume of claim "+claim, func() bool {
		var err error
		pv, err = n.client.CoreV1().PersistentVolumes().Get(n.t.Context(), "pvc-uid-"+claim, metav1.GetOptions{})
		return err == nil
	})
	return pv
}

// bind does what the cluster's volume controller does.
func (n *node) bind(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) *corev1.PersistentVolumeClaim {
	n.t.Helper()
	c = c.DeepCopy()
	c.Spec.VolumeName, c.Status.Phase, c.Status.Capacity = pv.Name, corev1.ClaimBound, pv.Spec.Capacity
	c, err := n.client.CoreV1().PersistentVolumeClaims(c.Namespace).Update(n.t.Context(), c, metav1.UpdateOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return c
}

func (n *node) kept(namespace string) []volume.Volume {
	n.t.Helper()
	all, err := n.store.List(vm.OnBehalf(n.t.Context(), vm.Owner{Namespace: namespace}))
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

// told waits for an Event of the API server that contains text.
func (n *node) told(text string) {
	n.t.Helper()
	until(n.t, "an Event with "+text, func() bool {
		list, err := n.client.CoreV1().Events("").List(n.t.Context(), metav1.ListOptions{})
		if err != nil {
			return false
		}
		for _, e := range list.Items {
			if strings.Contains(e.Message, text) {
				return true
			}
		}
		return false
	})
}

func TestVolumeOfAClaim(t *testing.T) {
	n := start(t)
	c := claim("data", "node-1")
	n.create(c)
	n.create(claim("elsewhere", "node-2"))
	pv := n.volume("data")
	csi := pv.Spec.CSI
	if csi == nil || csi.Driver != contract.VolumeDriver || csi.VolumeAttributes[attributeNode] != "node-1" || pv.Spec.ClaimRef.UID != c.UID || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		t.Fatalf("the volume is %+v", pv.Spec)
	}
	if terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms; len(terms) != 1 || terms[0].MatchExpressions[0].Key != corev1.LabelHostname || terms[0].MatchExpressions[0].Values[0] != "node-1" {
		t.Errorf("node affinity %+v", terms)
	}
	all := n.kept("team")
	if len(all) != 1 || string(all[0].ID) != csi.VolumeHandle || all[0].Size != 10<<20 || all[0].Labels[contract.KeyVolumeClaim] != "uid-data" {
		t.Fatalf("the node has %+v", all)
	}
	if len(n.kept("other")) != 0 {
		t.Error("another namespace finds the volume")
	}

	// The claim grows, and its status when the guest has grown, too.
	c = n.bind(c, pv)
	n.busy.Store(true)
	c.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("20Mi")
	if _, err := n.client.CoreV1().PersistentVolumeClaims("team").Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the condition of the claim", func() bool {
		now, err := n.client.CoreV1().PersistentVolumeClaims("team").Get(t.Context(), "data", metav1.GetOptions{})
		return err == nil && len(now.Status.Conditions) == 1 && now.Status.Conditions[0].Message == "VM vm-1: its agent does not answer" && now.Status.Capacity.Storage().String() == "10Mi"
	})
	n.busy.Store(false)
	until(t, "the capacity of the claim", func() bool {
		now, err := n.client.CoreV1().PersistentVolumeClaims("team").Get(t.Context(), "data", metav1.GetOptions{})
		return err == nil && now.Status.Capacity.Storage().String() == "20Mi"
	})
	if got := n.volume("data").Spec.Capacity.Storage().String(); got != "20Mi" || n.kept("team")[0].Size != 20<<20 {
		t.Errorf("the volume has %s, and %d bytes on the node", got, n.kept("team")[0].Size)
	}

	// The claim is deleted.
	pv = n.volume("data")
	pv.Status.Phase = corev1.VolumeReleased
	if _, err := n.client.CoreV1().PersistentVolumes().UpdateStatus(t.Context(), pv, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the volume", func() bool {
		_, err := n.client.CoreV1().PersistentVolumes().Get(t.Context(), pv.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err) && len(n.kept("team")) == 0
	})
	if _, err := n.client.CoreV1().PersistentVolumes().Get(t.Context(), "pvc-uid-elsewhere", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the claim of another node: %v", err)
	}
}

// Other parts of the process read client-go's scheme in each request, so a Storage must not write to it once it runs. The race
// detector sees it if it does.
func TestRunLeavesTheSchemeAlone(t *testing.T) {
	n := prepare(t)
	stop, stopped := make(chan struct{}), make(chan struct{})
	n.readying = func() {
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
					_, _, _ = scheme.Scheme.ObjectKinds(&corev1.PersistentVolumeClaim{})
				}
			}
		}()
	}
	n.run()
	n.create(claim("data", "node-1"))
	n.volume("data")
	close(stop)
	<-stopped
}

// The class of a claim chooses the file system, which the agent of the guest makes. A disk without a file system has no such choice.
func TestFileSystemOfAClass(t *testing.T) {
	n := start(t,
		class("xfs", func(c *storagev1.StorageClass) { c.Parameters = map[string]string{"csi.storage.k8s.io/fstype": "xfs"} }))
	of := func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = new("xfs") }
	block := func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = new(corev1.PersistentVolumeBlock) }
	n.create(claim("usual", "node-1"))
	n.create(claim("files", "node-1", of))
	n.create(claim("disk", "node-1", of, block))
	for name, want := range map[string]string{"usual": "", "files": "xfs", "disk": ""} {
		if got := n.volume(name).Spec.CSI.FSType; got != want {
			t.Errorf("the file system of claim %s is %q, want %q", name, got, want)
		}
	}
}

// A node may end after it has made a volume and before the cluster knows it. The next attempt finds that volume.
func TestVolumeIsMadeOnce(t *testing.T) {
	n := start(t)
	made, err := n.store.Create(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "team"}), volume.Spec{Name: "pvc-uid-data", Size: 10 << 20, Labels: map[string]string{contract.KeyVolumeClaim: "uid-data"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.store.Create(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "team"}), volume.Spec{Name: "pvc-uid-taken", Size: 10 << 20}); err != nil {
		t.Fatal(err)
	}
	n.create(claim("data", "node-1"))
	n.create(claim("taken", "node-1"))
	if pv := n.volume("data"); pv.Spec.CSI.VolumeHandle != string(made.ID) {
		t.Errorf("another volume was made: %+v", pv.Spec.CSI)
	}
	n.told("volume pvc-uid-taken exists already and was not made for this claim")
}

func TestClaimsThatAreRefused(t *testing.T) {
	n := start(t,
		class("options", func(c *storagev1.StorageClass) { c.MountOptions = []string{"noatime"} }),
		class("unknown", func(c *storagev1.StorageClass) { c.Parameters = map[string]string{"replicas": "3"} }),
		class("btrfs", func(c *storagev1.StorageClass) { c.Parameters = map[string]string{contract.ParamFSType: "btrfs"} }))
	of := func(class string) func(*corev1.PersistentVolumeClaim) {
		return func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &class }
	}
	for i, one := range []struct {
		want   string
		change func(*corev1.PersistentVolumeClaim)
	}{
		{"mount options (noatime)", of("options")},
		{"the parameter replicas", of("unknown")},
		{`the file system "btrfs"`, of("btrfs")},
		{"ReadWriteMany", func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes[0] = corev1.ReadWriteMany }},
		{"remove the selector", func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} }},
		{"the content of a Cake", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: new("bakery"), Kind: "Cake", Name: "x"}
		}},
		{"of another namespace", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "data", Namespace: new("other")}
		}},
		{"does not exist or has no volume yet", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "nobody"}
		}},
		{"invalid volume size", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("100Ti")
		}},
	} {
		n.create(claim(fmt.Sprint("c", i), "node-1", one.change))
		n.told(one.want)
	}
	if all := n.kept(""); len(all) != 0 {
		t.Errorf("made: %+v", all)
	}
}

func TestCopyOfAClaim(t *testing.T) {
	n := start(t)
	c := claim("data", "node-1")
	n.create(c)
	pv := n.volume("data")
	n.bind(c, pv)
	copied := claim("copy", "node-1", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "data"}
	})
	foreign := claim("foreign", "node-1", func(c *corev1.PersistentVolumeClaim) {
		c.Namespace = "other"
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "data"}
	})
	n.create(copied)
	n.create(foreign)
	of := n.volume("copy")
	v, err := n.store.Get(t.Context(), of.Spec.CSI.VolumeHandle)
	if err != nil || v.From != pv.Spec.CSI.VolumeHandle || v.Owner.Namespace != "team" {
		t.Errorf("the copy is %+v, %v", v, err)
	}
	n.told("the source, claim data, does not exist")
	if len(n.kept("other")) != 0 {
		t.Error("a claim of another namespace was copied")
	}
}

// The CSINode may have drivers of others.
func TestDriversOfOthersStay(t *testing.T) {
	n := start(t, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: "example.com/disks", NodeID: "x"}}}})
	until(t, "two drivers", func() bool {
		csi, err := n.client.StorageV1().CSINodes().Get(t.Context(), "node-1", metav1.GetOptions{})
		return err == nil && len(csi.Spec.Drivers) == 2
	})
}

// A volume that a VM uses stays until the VM is gone, and an attempt to remove it is repeated.
func TestVolumeInUseStays(t *testing.T) {
	n := start(t)
	n.create(claim("data", "node-1"))
	pv := n.volume("data")
	id := vm.NewID()
	if _, _, err := n.store.Attach(t.Context(), pv.Spec.CSI.VolumeHandle, id, volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	pv.Status.Phase = corev1.VolumeReleased
	if _, err := n.client.CoreV1().PersistentVolumes().UpdateStatus(t.Context(), pv, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.told("attached to VM " + string(id))
	if err := n.store.Detach(t.Context(), pv.Spec.CSI.VolumeHandle, id); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the volume", func() bool { return len(n.kept("team")) == 0 })
}

// A PersistentVolume that somebody else made about this node's disks does not reach those of another namespace.
func TestForgedVolume(t *testing.T) {
	n := start(t)
	n.create(claim("data", "node-1"))
	pv := n.volume("data")
	forged := pv.DeepCopy()
	forged.Name, forged.ResourceVersion, forged.Spec.ClaimRef.Namespace = "forged", "", "other"
	forged.Status.Phase = corev1.VolumeReleased
	if _, err := n.client.CoreV1().PersistentVolumes().Create(t.Context(), forged, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the forged volume", func() bool {
		_, err := n.client.CoreV1().PersistentVolumes().Get(t.Context(), "forged", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	if len(n.kept("team")) != 1 {
		t.Error("the disk of another namespace was removed")
	}
}

// While the API server refuses to store a PersistentVolume, its disk is made once.
func TestVolumeIsNotStored(t *testing.T) {
	n := prepare(t)
	var refused atomic.Int32
	n.client.PrependReactor("create", "persistentvolumes", func(ktesting.Action) (bool, runtime.Object, error) {
		if refused.Add(1) <= 2 {
			return true, nil, apierrors.NewServiceUnavailable("not now")
		}
		return false, nil, nil
	})
	n.run()
	n.create(claim("data", "node-1"))
	n.volume("data")
	if all := n.kept("team"); len(all) != 1 {
		t.Errorf("%d disks: %+v", len(all), all)
	}
}

func TestGrowthThatFails(t *testing.T) {
	n := start(t)
	c := claim("data", "node-1")
	n.create(c)
	c = n.bind(c, n.volume("data"))
	c.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("100Ti")
	if _, err := n.client.CoreV1().PersistentVolumeClaims("team").Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-n.events.Events:
		if !strings.Contains(e, eventFailed) || !strings.Contains(e, "invalid volume size") {
			t.Error(e)
		}
	case <-time.After(30 * time.Second):
		t.Error("no Event")
	}
}
