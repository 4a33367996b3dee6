package eviction

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
)

func TestDecideInstance(t *testing.T) {
	for name, c := range map[string]struct {
		strategy v1.EvictionStrategy
		change   func(*v1.VirtualMachineInstance, *corev1.Pod)
		answer   Answer
		evacuate bool
		says     string
	}{
		"none":             {strategy: ""},
		"None":             {strategy: v1.EvictionStrategyNone},
		"if possible":      {strategy: v1.EvictionStrategyLiveMigrateIfPossible},
		"LiveMigrate":      {strategy: v1.EvictionStrategyLiveMigrate, answer: Wait, says: "nodes of Cocoon do not migrate VMs; stop it with virtctl"},
		"External":         {strategy: v1.EvictionStrategyExternal, answer: Wait, evacuate: true, says: "status.evacuationNodeName tells"},
		"External, noted":  {v1.EvictionStrategyExternal, func(i *v1.VirtualMachineInstance, _ *corev1.Pod) { i.Status.EvacuationNodeName = "n" }, Wait, false, "External"},
		"External, before": {v1.EvictionStrategyExternal, func(i *v1.VirtualMachineInstance, _ *corev1.Pod) { i.Status.EvacuationNodeName = "m" }, Wait, true, "External"},
		"it ends":          {strategy: v1.EvictionStrategyLiveMigrate, change: func(_ *v1.VirtualMachineInstance, p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }},
		"it has ended":     {strategy: v1.EvictionStrategyLiveMigrate, change: func(_ *v1.VirtualMachineInstance, p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }},
	} {
		vmi := &v1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Name: "web"}}
		if c.strategy != "" {
			vmi.Spec.EvictionStrategy = &c.strategy
		}
		pod := &corev1.Pod{Spec: corev1.PodSpec{NodeName: "n"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
		if c.change != nil {
			c.change(vmi, pod)
		}
		if v := DecideInstance(vmi, pod); v.Answer != c.answer || v.Evacuate != c.evacuate || !strings.Contains(v.Why, c.says) || (v.Why == "") != (c.answer == Allow) {
			t.Errorf("%s: %+v", name, v)
		}
	}
}
