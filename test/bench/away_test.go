//go:build bench

package bench

import (
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/vm"
)

// absence is how long the API server is stopped: longer than leases, watches and back-offs last.
const absence = 3 * time.Minute

// away stops the API server of a node with real guests. Meanwhile one guest is killed and must be started again. Another guest
// counts and must keep running. A pod is deleted as soon as the API server is back.
func away(t *testing.T, k *kubetest.Cluster, c *cluster, engine *daemon) {
	t.Helper()
	api := c.kube.CoreV1().Pods(namespace)
	for name, command := range map[string][]string{
		"counts": {"sh", "-c", "n=0; while :; do n=$((n+1)); echo $n; sleep 0.2; done"}, "crashes": nil, "goes": nil,
	} {
		must(api.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
			NodeName: "ours", TerminationGracePeriodSeconds: new(int64(2)),
			Containers: []corev1.Container{{Name: "main", Image: image, ImagePullPolicy: corev1.PullNever, Command: command}},
		}}, metav1.CreateOptions{}))(t)
	}
	restarted := func(name string, times int32) func() bool {
		return func() bool {
			pod, err := api.Get(t.Context(), name, metav1.GetOptions{})
			return err == nil && podReady(pod) && len(pod.Status.ContainerStatuses) == 1 && pod.Status.ContainerStatuses[0].RestartCount == times
		}
	}
	find := func(name string) vm.Record {
		all, _ := engine.List(t.Context())
		for _, r := range all {
			if r.Spec.Name == contract.VMName(namespace, name) {
				return r
			}
		}
		return vm.Record{}
	}
	for _, name := range []string{"counts", "crashes", "goes"} {
		until(t, 2*time.Minute, name+" is Ready", restarted(name, 0))
	}
	counts, crashes := find("counts"), find("crashes")
	counted := count(t, engine, counts)

	k.Stop(t)
	gone := time.Now()
	if err := syscall.Kill(crashes.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	again := until(t, 2*time.Minute, "the guest that was killed runs again", func() bool {
		r := find("crashes")
		return r.PID != crashes.PID && r.State == vm.StateRunning && r.AgentReady
	}).Sub(gone)
	<-time.After(time.Until(gone.Add(absence)))
	if r := find("counts"); r.PID != counts.PID || !r.StartedAt.Equal(counts.StartedAt) {
		t.Errorf("a guest was touched while the API server was away: %+v, before %+v", r, counts)
	}
	meanwhile := count(t, engine, counts) - counted
	if meanwhile < int(absence/time.Second) { // without emulation it counts to five each second
		t.Errorf("the guest counted to no more than %d in %s", meanwhile, absence)
	}

	k.Start(t)
	back := time.Now()
	if err := api.Delete(t.Context(), "goes", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	deleted := until(t, 2*time.Minute, "the pod that was deleted is gone", func() bool {
		list, err := api.List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=goes"})
		return err == nil && len(list.Items) == 0
	}).Sub(back)
	told := until(t, 2*time.Minute, "the restart is in the pod's status", restarted("crashes", 1)).Sub(back)
	c.await(t, "ours")
	until(t, 2*time.Minute, "the other pod is as it was", restarted("counts", 0))
	if r := find("counts"); r.PID != counts.PID {
		t.Error("a guest was touched when the API server was back")
	}
	t.Logf("the API server was away for %s: a guest that was killed ran again after %s, another one counted to %d; once it was back a pod was deleted in %s, and the restart in its status after %s",
		absence, again.Round(100*time.Millisecond), meanwhile, deleted.Round(100*time.Millisecond), told.Round(100*time.Millisecond))
	for _, name := range []string{"counts", "crashes"} {
		if err := api.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
}

// count returns how far r's guest has counted. Its log must have no gap.
func count(t *testing.T, engine *daemon, r vm.Record) (n int) {
	t.Helper()
	err := engine.Logs(t.Context(), string(r.ID), guest.LogOptions{Tail: -1}, func(e guest.LogEntry) error {
		if i, err := strconv.Atoi(strings.TrimSpace(string(e.Data))); err != nil || i != n+1 {
			t.Errorf("%q follows %d in the log of the guest that counts", e.Data, n)
		}
		n++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}
