package podvolumes

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		defer work.Wait()
		defer cancel()
		spawn := func(f func(context.Context)) context.CancelFunc {
			ctx, cancel := context.WithCancel(ctx)
			work.Go(func() { f(ctx) })
			return cancel
		}
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
		if pass(time.Minute); made.got[len(made.got)-1] != "three" {
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
