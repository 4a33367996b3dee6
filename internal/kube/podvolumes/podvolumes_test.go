package podvolumes

import (
	"context"
	"encoding/pem"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	certv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine is the owner of a pod. It records the updates that its VM gets.
type machine struct {
	pod *corev1.Pod

	mu         sync.Mutex
	refuse     error
	tries      int
	got        []string
	complaints []string
}

func (m *machine) owner() Owner {
	return Owner{
		Pod: func() *corev1.Pod { return m.pod },
		Update: func(_ context.Context, _, _ string, files []vm.VolumeFile) error {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.tries++; m.refuse == nil {
				m.got = append(m.got, string(files[0].Data))
			}
			return m.refuse
		},
		Count: func(error) {},
		Complain: func(_ vm.ID, err error) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.complaints = append(m.complaints, err.Error())
		},
	}
}

// spawner returns a Spawn, and a function that ends its work.
func spawner(t *testing.T) (Spawn, func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	return func(f func(context.Context)) context.CancelFunc {
			ctx, cancel := context.WithCancel(ctx)
			work.Go(func() { f(ctx) })
			return cancel
		}, func() {
			cancel()
			work.Wait()
		}
}

func (m *machine) answer(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuse = err
}

func confMap(value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "conf"}, Data: map[string]string{"key": value}}
}

func TestVolumesFollowTheirSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spawn, end := spawner(t)
		defer end()
		client := fake.NewClientset(confMap("one"))
		o := NewObjects(client, slog.New(slog.DiscardHandler))
		o.Start(spawn)
		change := func(value string) {
			t.Helper()
			if _, err := client.CoreV1().ConfigMaps("default").Update(t.Context(), confMap(value), metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		pass := func(d time.Duration) {
			time.Sleep(d) //nolint:forbidigo // the fake clock of synctest
			synctest.Wait()
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.PodSpec{
			Volumes: []corev1.Volume{{Name: "conf", VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "conf"}},
			}}},
			Containers: []corev1.Container{{Name: "c", VolumeMounts: []corev1.VolumeMount{{Name: "conf", MountPath: "/conf"}}}},
		}}
		made, found := &machine{pod: pod}, &machine{pod: pod} // launched by this process, and by an earlier one
		first, second := New(o, convert.Node{}, made.owner()), New(o, convert.Node{}, found.owner())
		volumes := convert.Spec(pod, convert.Node{}, nil).Volumes
		if err := first.Fill(t.Context(), pod, volumes); err != nil {
			t.Fatal(err)
		}
		first.Launched(volumes)
		first.Keep(pod, &vm.Record{ID: "made", ImageType: vm.ImageOCI}, spawn)
		second.Keep(pod, &vm.Record{ID: "found", ImageType: vm.ImageOCI}, spawn)
		if pass(time.Minute); len(made.got) != 0 || !slices.Equal(found.got, []string{"one"}) {
			t.Errorf("at first they got %q and %q", made.got, found.got)
		}
		change("two")
		if pass(time.Second); !slices.Equal(made.got, []string{"two"}) || !slices.Equal(found.got, []string{"one", "two"}) {
			t.Errorf("after a change they got %q and %q", made.got, found.got)
		}
		made.answer(errors.New("guest is busy"))
		change("three")
		if pass(time.Hour); len(made.complaints) != 1 || made.tries < 50 {
			t.Errorf("complaints %q after %d tries", made.complaints, made.tries)
		}
		made.answer(nil)
		if pass(2 * retryMost); made.got[len(made.got)-1] != "three" {
			t.Errorf("after the failure it got %q", made.got)
		}
		watches := 0
		for _, a := range client.Actions() {
			if a.GetVerb() == "watch" {
				watches++
			}
		}
		first.Stop()
		if pass(0); watches != 1 || len(o.all) != 1 {
			t.Errorf("%d watches; after the first stop %d objects are watched", watches, len(o.all))
		}
		second.Stop()
		change("four")
		if pass(time.Minute); len(o.all) != 0 || slices.Contains(found.got, "four") {
			t.Errorf("after the last stop %d objects are watched, and the VM got %q", len(o.all), found.got)
		}
	})
}

// The certificates of a signer follow its bundles, also new ones.
func TestVolumesFollowTrustBundles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spawn, end := spawner(t)
		defer end()
		pass := func() {
			time.Sleep(time.Second) //nolint:forbidigo // the fake clock of synctest
			synctest.Wait()
		}
		bundle := func(name string) *certv1.ClusterTrustBundle {
			text := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(name)}))
			return &certv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certv1.ClusterTrustBundleSpec{SignerName: "test/one", TrustBundle: text}}
		}
		client := fake.NewClientset(bundle("first"))
		o := NewObjects(client, slog.New(slog.DiscardHandler))
		o.Start(spawn)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.PodSpec{
			Volumes: []corev1.Volume{{Name: "ca", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{SignerName: new("test/one"), LabelSelector: &metav1.LabelSelector{}, Path: "ca.pem"}},
			}}}}},
			Containers: []corev1.Container{{Name: "c", VolumeMounts: []corev1.VolumeMount{{Name: "ca", MountPath: "/ca"}}}},
		}}
		m := &machine{pod: pod}
		v := New(o, convert.Node{}, m.owner())
		volumes := convert.Spec(pod, convert.Node{}, nil).Volumes
		if err := v.Fill(t.Context(), pod, volumes); err != nil {
			t.Fatal(err)
		}
		if none, err := o.TrustBundles(t.Context(), "test/one", labels.Nothing()); err != nil || len(none) != 0 {
			t.Errorf("a selector that matches nothing found %d bundles, %v", len(none), err)
		}
		first := bundle("first").Spec.TrustBundle
		if len(volumes[0].Files) != 1 || string(volumes[0].Files[0].Data) != first {
			t.Fatalf("the volume has %+v", volumes[0].Files)
		}
		v.Launched(volumes)
		v.Keep(pod, &vm.Record{ID: "id", ImageType: vm.ImageOCI}, spawn)
		pass()
		second := bundle("second")
		if _, err := client.CertificatesV1().ClusterTrustBundles().Create(t.Context(), second, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if pass(); !slices.Equal(m.got, []string{first + second.Spec.TrustBundle}) {
			t.Errorf("after a new bundle the VM got %q", m.got)
		}
		if err := client.CertificatesV1().ClusterTrustBundles().Delete(t.Context(), "second", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if pass(); len(m.got) != 2 || m.got[1] != first {
			t.Errorf("after its removal the VM got %q", m.got)
		}
		v.Stop()
		if pass(); len(o.all) != 0 {
			t.Errorf("%d objects are watched after the end", len(o.all))
		}
	})
}
