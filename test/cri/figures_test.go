//go:build cri

package cri

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestFigures prints how long a pod needs until it is Ready, as a container and as a VM of a kubelet and as a pod of the virtual node, one after
// the other in the same run, and the memory of cocoond for each VM of a kubelet. It compares and judges nothing.
func TestFigures(t *testing.T) {
	const rounds, together = 7, 8
	need.Root(t)
	need.Built(t, "bin/containerd/containerd", "make containerd")
	c := kubetest.Up(t, "--nodes", "1", "--with", "", "--kubelet")
	client, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	pods := client.CoreV1().Pods("default")
	ready := func(name, class string) time.Duration {
		t.Helper()
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PodSpec{TerminationGracePeriodSeconds: new(int64), Containers: []corev1.Container{{
				Name: "main", Image: "cocoon/demo:latest", ImagePullPolicy: corev1.PullIfNotPresent,
			}}},
		}
		if class == "" {
			pod.Spec.NodeName = "cocoon-node-0"
			pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		} else {
			pod.Spec.RuntimeClassName = &class
		}
		began := time.Now()
		if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w, err := pods.Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name, TimeoutSeconds: new(int64(300))})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		for e := range w.ResultChan() {
			p, _ := e.Object.(*corev1.Pod)
			if p != nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			}) {
				return time.Since(began)
			}
		}
		t.Fatalf("the pod %s is not ready", name)
		return 0
	}
	remove := func(name string) {
		t.Helper()
		if err := pods.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, "the pod "+name, func() string {
			_, err := pods.Get(t.Context(), name, metav1.GetOptions{})
			return strconv.FormatBool(apierrors.IsNotFound(err))
		}, "true")
	}

	kinds := []struct{ what, class string }{{"container of a kubelet", "runc"}, {"VM of a kubelet", "cocoon"}, {"VM of the virtual node", ""}}
	took := make([][]time.Duration, len(kinds))
	for round := range rounds + 1 {
		for i, kind := range kinds {
			name := fmt.Sprintf("figure-%d-%d", round, i)
			if d := ready(name, kind.class); round > 0 { // the first one fetches the image
				took[i] = append(took[i], d)
			}
			remove(name)
		}
	}
	for i, kind := range kinds {
		slices.Sort(took[i])
		t.Logf("%-24s Ready after %v (median of %d; %v to %v), %.1f of the first", kind.what, took[i][rounds/2].Round(time.Millisecond), rounds,
			took[i][0].Round(time.Millisecond), took[i][rounds-1].Round(time.Millisecond), float64(took[i][rounds/2])/float64(took[0][rounds/2]))
	}

	daemon := processOf(t, "--config", c.Dir+"/etc/kubelet-cocoond.yaml")
	before := resident(t, daemon)
	for i := range together {
		ready(fmt.Sprintf("together-%d", i), "cocoon")
	}
	t.Logf("cocoond has %d KiB of memory, and %d KiB more for each of %d VMs", before, (resident(t, daemon)-before)/together, together)
	for i := range together {
		remove(fmt.Sprintf("together-%d", i))
	}
}

// resident returns the memory in KiB that only this process has.
func resident(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		if rest, ok := strings.CutPrefix(string(line), "Anonymous:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("the kernel tells no anonymous memory")
	return 0
}
