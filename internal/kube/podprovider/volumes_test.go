package podprovider

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

func mounting(name string, src corev1.VolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: src})
		p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: name, MountPath: "/" + name})
	}
}

func confMap(value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "conf"}, Data: map[string]string{"key": value}}
}

func ofConf() corev1.VolumeSource {
	return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "conf"}}}
}

func TestPodWaitsForItsVolumeAndFollowsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		w.create(pod(mounting("conf", ofConf())))
		got := w.after(2 * time.Second)
		waiting := got.Status.ContainerStatuses[0].State.Waiting
		if waiting == nil || waiting.Reason != podstatus.ReasonCreating || !strings.Contains(waiting.Message, `configmap "conf" not found`) {
			t.Fatalf("without its volume the pod is %+v", got.Status)
		}
		if told := w.told(); strings.Count(told, "FailedMount") != 1 {
			t.Errorf("told: %s", told)
		}
		maps := w.client.CoreV1().ConfigMaps("default")
		if _, err := maps.Create(t.Context(), confMap("one"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if w.after(time.Minute); w.engine.volume("conf") != "one" || w.engine.called("update conf") != 0 {
			t.Fatalf("the VM has %q after %d updates", w.engine.volume("conf"), w.engine.called("update conf"))
		}
		if _, err := maps.Update(t.Context(), confMap("two"), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if w.after(time.Second); w.engine.volume("conf") != "two" {
			t.Errorf("after a change the VM has %q", w.engine.volume("conf"))
		}
		w.stop()
		if _, err := maps.Update(t.Context(), confMap("three"), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.run(Config{}) // the next process finds the change
		w.recall(t)
		if w.after(time.Second); w.engine.volume("conf") != "three" {
			t.Errorf("after a restart the VM has %q", w.engine.volume("conf"))
		}
	})
}

// recall calls CreatePod of a new provider for the existing pod.
func (w *world) recall(t *testing.T) {
	t.Helper()
	p, err := w.client.CoreV1().Pods("default").Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.p.CreatePod(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

func TestLabelsInFilesFollowThePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		p := pod(mounting("info", corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{
			{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}},
		}}}))
		w.create(p)
		w.after(time.Second)
		p = p.DeepCopy()
		p.Labels = map[string]string{"color": "green"}
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if w.after(time.Second); w.engine.volume("info") != `color="green"` {
			t.Errorf("the VM has %q", w.engine.volume("info"))
		}
	})
}

func TestTokensAreRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		var asked atomic.Int64
		var refuse atomic.Bool
		w.client.PrependReactor("create", "serviceaccounts", func(a clienttesting.Action) (bool, runtime.Object, error) {
			r := a.(clienttesting.CreateAction).GetObject().(*authv1.TokenRequest)
			if bound := r.Spec.BoundObjectRef; bound == nil || bound.UID != "uid-1" || bound.Name != "web" {
				t.Errorf("the token is bound to %+v", bound)
			}
			if refuse.Load() {
				return true, nil, fmt.Errorf("not now")
			}
			r.Status = authv1.TokenRequestStatus{
				Token:               fmt.Sprint("token ", asked.Add(1)),
				ExpirationTimestamp: metav1.NewTime(time.Now().Add(time.Duration(*r.Spec.ExpirationSeconds) * time.Second)),
			}
			return true, r, nil
		})
		w.create(pod(func(p *corev1.Pod) { p.UID = "uid-1" }, mounting("token", corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: new(int64(1000))}}},
		}})))
		if w.after(700 * time.Second); w.engine.volume("token") != "token 1" {
			t.Fatalf("the VM has %q", w.engine.volume("token"))
		}
		refuse.Store(true)
		if w.after(150 * time.Second); w.engine.volume("token") != "token 1" {
			t.Errorf("a token that cannot be renewed must stay until it expires; the VM has %q", w.engine.volume("token"))
		}
		refuse.Store(false)
		if w.after(time.Minute); w.engine.volume("token") != "token 2" {
			t.Errorf("the VM has %q", w.engine.volume("token"))
		}
		if n := asked.Load(); n != 2 {
			t.Errorf("%d token requests", n)
		}
	})
}

// While another VM has the volume, the pod is shown as being created, as with the kubelet, and starts soon after it is free.
func TestPodWaitsForAVolumeInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		var free atomic.Bool
		var asked vm.Volume
		e.launchAt = func(s vm.Spec) error {
			if !free.Load() {
				return errdefs.Preconditionf("volume data: it is attached to VM x, to read and write; remove that VM first")
			}
			asked = s.DiskVolumes()[0]
			return nil
		}
		w := start(t, e)
		defer func() { w.stop() }()
		w.create(pod(mounting("data", corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}})))
		waits := func(want string) {
			t.Helper()
			got := w.after(5 * time.Second)
			waiting := got.Status.ContainerStatuses[0].State.Waiting
			if waiting == nil || waiting.Reason != podstatus.ReasonCreating || !strings.Contains(waiting.Message, want) {
				t.Fatalf("the pod is %+v, want %q", got.Status, want)
			}
		}
		waits(`persistentvolumeclaim "data" not found`)
		core := w.client.CoreV1()
		if _, err := core.PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
			ClaimRef: &corev1.ObjectReference{UID: "claim"}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: contract.VolumeDriver, VolumeHandle: "01disk"}},
		}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := core.PersistentVolumeClaims("default").Create(t.Context(), &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "data", UID: "claim"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.pass(30 * time.Second)
		waits("it is attached to VM x")
		if told := w.told(); strings.Count(told, "FailedMount") != 2 {
			t.Errorf("told: %s", told)
		}
		free.Store(true)
		if got := w.after(31 * time.Second); got.Status.Phase != corev1.PodRunning || asked.Disk.Ref != "01disk" {
			t.Errorf("the pod is %s, its VM asked for %+v", sketch(got), asked.Disk)
		}
	})
}

// A pod with a folder that the node's operator does not allow waits, and says why. It runs as soon as the folder is allowed.
func TestRefusedFolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		why := errdefs.Preconditionf("volume logs: the folder /var/log of the node is not below one that its operator has allowed")
		var allowed atomic.Bool
		e.launchAt = func(s vm.Spec) error {
			if len(s.Dirs()) == 1 && !allowed.Load() {
				return why
			}
			return nil
		}
		w := start(t, e)
		defer w.stop()
		w.create(pod(mounting("logs", corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/log"}})))
		p := w.after(time.Minute)
		expect(t, p, "Pending waiting:CreateContainerConfigError")
		if got := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(got, why.Error()) {
			t.Errorf("it says %q", got)
		}
		allowed.Store(true)
		expect(t, w.after(10*time.Minute), "Running running ready")
	})
}
