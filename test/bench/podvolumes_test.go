//go:build bench

package bench

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

const (
	claimRounds = 7
	claimGoal   = 250 * time.Millisecond
	plugRounds  = 9
	plugGoal    = 300 * time.Millisecond
)

// podsWithClaims compares pods with a claim that is created with them, and pods without, until they are Ready.
func podsWithClaims(t *testing.T, results *table) {
	c := up(t, results)
	api := c.kube.CoreV1().PersistentVolumeClaims(namespace)
	once := func(name string, claimed bool) time.Duration {
		began, edit := time.Now(), func(*corev1.Pod) {}
		if claimed {
			claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Mi")}},
			}}
			must(api.Create(t.Context(), claim, metav1.CreateOptions{}))(t)
			edit = func(p *corev1.Pod) {
				p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}}}
				p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
			}
		}
		w, _, gone := c.create(t, name, edit)
		took := w.await(t, name+" is Ready", podReady).Sub(began)
		gone()
		if claimed {
			if err := api.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		return took
	}
	var took [2]samples
	for n := range claimRounds + 1 {
		for turn := range 2 {
			with := (n + turn) % 2
			at := once(fmt.Sprintf("claim-%d-%d", n, with), with == 1)
			if n > 0 { // the first round warms up
				took[with] = append(took[with], at)
			}
		}
	}
	more := took[1].median() - took[0].median()
	results.add(row{
		what: "pod and its claim created until Ready (A), a pod without (B)", a: ms(took[1].median()), b: ms(took[0].median()),
		figure: fmt.Sprintf("%+.0f ms", float64(more)/1e6), goal: "<= " + ms(claimGoal), n: claimRounds, missed: more > claimGoal,
	})
}

// plugs measures attaching a volume to a guest that runs, until the guest has mounted it, and taking it away.
func plugs(t *testing.T, results *table) {
	d := start(t, "")
	ready := watchReady(t, d.Client)
	must(d.CreateVolume(t.Context(), volume.Spec{Name: "plug", Size: 64 << 20}))(t)
	must(d.Launch(t.Context(), spec("plugged")))(t)
	ready.wait(t, "plugged")
	var attaches, detaches samples
	for n := range plugRounds + 1 {
		began := time.Now()
		must(d.AttachVolume(t.Context(), "plugged", vm.VolumeUse{Ref: "plug"}, "/plug"))(t)
		attached := time.Since(began)
		code, err := d.Exec(t.Context(), "plugged", guest.Exec{Command: []string{"grep", "-q", " /plug ext4 rw", "/proc/mounts"}}, guest.Streams{})
		if err != nil || code != 0 {
			t.Fatalf("the volume is not mounted: %d, %v", code, err)
		}
		began = time.Now()
		must(d.DetachVolume(t.Context(), "plugged", "plug"))(t)
		if n > 0 { // the first round makes the file system
			attaches, detaches = append(attaches, attached), append(detaches, time.Since(began))
		}
	}
	results.add(row{
		what: "volume plugged into a guest that runs, until it is mounted (A), unmounted and unplugged (B)", a: ms(attaches.median()), b: ms(detaches.median()),
		goal: "<= " + ms(plugGoal), n: plugRounds, missed: attaches.median() > plugGoal,
	})
}
