// Package podgen makes pods out of bytes, for fuzz tests: most are close to pods that run, and any field may hold any
// value.
//
// It knows the annotations of the contract. It does not know how a node or an admission handles a pod.
package podgen

import (
	"encoding/json"
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/randfill"

	"cocoonstack.io/cocoon/api/contract"
)

// Pod is the pod for data; the same data gives the same pod. The API server could send it: it has been encoded as JSON
// and decoded.
func Pod(data []byte) *corev1.Pod {
	var which byte // bit set of changes; 0: a completely random pod
	if len(data) > 0 {
		which, data = data[0], data[1:]
	}
	var wild corev1.Pod
	filler(data).Fill(&wild)
	if which == 0 {
		return sent(&wild)
	}
	pod := plain()
	for i, change := range changes {
		if which>>i&1 == 1 {
			change(pod, &wild)
		}
	}
	return sent(pod)
}

// sent is pod after encoding to JSON and decoding.
func sent(pod *corev1.Pod) *corev1.Pod {
	text, err := json.Marshal(pod)
	if err != nil {
		panic(err) // every value of a pod encodes as JSON
	}
	out := &corev1.Pod{}
	if err := json.Unmarshal(text, out); err != nil {
		panic(err)
	}
	return out
}

// plain is a pod that every node accepts.
func plain() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "uid-1"},
		Spec:       corev1.PodSpec{RestartPolicy: corev1.RestartPolicyAlways, Containers: []corev1.Container{{Name: "c", Image: "cocoon/demo:latest"}}},
	}
}

// changes copy parts of another pod, or add valid values.
var changes = [8]func(to, from *corev1.Pod){
	func(to, _ *corev1.Pod) {
		always := corev1.ContainerRestartPolicyAlways
		to.Spec.InitContainers = []corev1.Container{{Name: "i0", Image: "cocoon/demo:latest"}, {Name: "s0", Image: "cocoon/demo:latest", RestartPolicy: &always}}
		to.Spec.Containers = append(to.Spec.Containers, corev1.Container{Name: "d", Image: "cocoon/demo:latest"})
	},
	func(to, from *corev1.Pod) { to.Annotations = from.Annotations },
	func(to, from *corev1.Pod) {
		for i := range min(len(from.Spec.Containers), 3) {
			c := from.Spec.Containers[i]
			c.Name, c.Image = "c"+string(rune('0'+i)), "cocoon/demo:latest"
			to.Spec.Containers = append(to.Spec.Containers[:i:i], c)
		}
	},
	func(to, from *corev1.Pod) {
		for i := range min(len(from.Spec.InitContainers), 2) {
			c := from.Spec.InitContainers[i]
			c.Name, c.Image = "i"+string(rune('0'+i)), "cocoon/demo:latest"
			to.Spec.InitContainers = append(to.Spec.InitContainers, c)
		}
	},
	func(to, from *corev1.Pod) { to.Spec.Volumes = from.Spec.Volumes },
	func(to, from *corev1.Pod) {
		to.Spec.SecurityContext, to.Spec.TerminationGracePeriodSeconds = from.Spec.SecurityContext, from.Spec.TerminationGracePeriodSeconds
		to.Spec.Hostname, to.Spec.Resources = from.Spec.Hostname, from.Spec.Resources
	},
	func(to, from *corev1.Pod) { to.ObjectMeta = from.ObjectMeta },
	func(to, from *corev1.Pod) {
		to.Spec.Tolerations, to.Spec.NodeSelector, to.Spec.Affinity = from.Spec.Tolerations, from.Spec.NodeSelector, from.Spec.Affinity
	},
}

// words are the usual parts of generated texts.
var words = []string{
	"", "a", "web", "default", "c0", "i0", "true", "false", "run", "clone", "static", "always", "never", "main-only", "wait", "10Gi", "5m",
	"qemu", "linux", "windows", "80", "-1", "65536", "/srv/x", "../x", "/", "10.0.0.1", "fe80::1%eth0", "vk-default-web", "vk-other-db:hibernate",
	"$(A)", "$(", "A", "status.podIP", "metadata.name", "Always", "Memory", "None", contract.TaintValue,
	"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "\x1b[2J", "ü", "a\nb",
}

// amounts are sizes at which arithmetic may fail.
var amounts = []string{"0", "1", "100m", "2", "96Mi", "256Mi", "1Gi", "-1Gi", "9223372036854775807", "8Ei", "1e30", "1n", "10Gi"}

func filler(data []byte) *randfill.Filler {
	keys := []string{contract.LabelPool, contract.TaintKey, "app"}
	for _, e := range contract.Reference() {
		keys = append(keys, e.Key)
	}
	return randfill.NewFromGoFuzz(data).NilChance(0.75).NumElements(0, 3).MaxDepth(14).Funcs(
		func(s *string, c randfill.Continue) {
			if *s = words[c.Intn(len(words))]; c.Intn(8) == 0 {
				*s = c.String(0)
			}
		},
		func(b *bool, c randfill.Continue) { *b = c.Intn(12) == 0 },
		func(n *int64, c randfill.Continue) {
			*n = []int64{0, 1, 30, 1000, -1, math.MaxInt64, math.MaxInt64 / int64(time.Second), math.MaxInt64/int64(time.Second) + 1}[c.Intn(8)]
		},
		func(m *map[string]string, c randfill.Continue) {
			*m = map[string]string{}
			for range c.Intn(5) {
				(*m)[keys[c.Intn(len(keys))]] = words[c.Intn(len(words))]
			}
		},
		func(l *corev1.ResourceList, c randfill.Continue) {
			*l = corev1.ResourceList{}
			names := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, "example.com/gpu"}
			for range c.Intn(4) {
				i := c.Intn(len(names)*4 - 3) // the last is rare
				(*l)[names[i/4]] = resource.MustParse(amounts[c.Intn(len(amounts))])
			}
		},
		func(q *resource.Quantity, c randfill.Continue) {
			*q = resource.MustParse(amounts[c.Intn(len(amounts))])
		},
		func(v *corev1.VolumeSource, c randfill.Continue) {
			kinds := []corev1.VolumeSource{
				{EmptyDir: &corev1.EmptyDirVolumeSource{}},
				{ConfigMap: &corev1.ConfigMapVolumeSource{}},
				{Secret: &corev1.SecretVolumeSource{}},
				{Projected: &corev1.ProjectedVolumeSource{}},
				{HostPath: &corev1.HostPathVolumeSource{Path: "/"}},
				{},
			}
			if *v = kinds[c.Intn(len(kinds))]; c.Intn(6) == 0 {
				c.FillNoCustom(v)
			}
		},
		func(o *metav1.FieldsV1, _ randfill.Continue) { *o = metav1.FieldsV1{} },
		func(t *metav1.Time, c randfill.Continue) { *t = metav1.Unix(int64(c.Intn(1<<31)), 0) },
		func(t *metav1.MicroTime, _ randfill.Continue) { *t = metav1.MicroTime{} },
	)
}

// Seeds are corpus data that together reach every change.
func Seeds() (out [][]byte) {
	for i := range 256 {
		seed := slices.Repeat([]byte{byte(i * 37), byte(i), byte(255 - i), byte(i * 11)}, 40)
		out = append(out, append([]byte{byte(i)}, seed...))
	}
	return out
}
