package eviction

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

func TestDecide(t *testing.T) {
	there := func() (bool, error) { return true, nil }
	absent := func() (bool, error) { return false, nil }
	broken := func() (bool, error) { return false, errors.New("registry unavailable") }
	managed := map[string]string{contract.KeyManaged: "true", contract.KeyName: "v"}
	and := func(more ...string) map[string]string {
		m := map[string]string{}
		for k, v := range managed {
			m[k] = v
		}
		for i := 0; i < len(more); i += 2 {
			m[more[i]] = more[i+1]
		}
		return m
	}
	asleep := and(contract.KeyHibernate, "true", contract.KeyLifecycleState, "hibernated")
	for name, c := range map[string]struct {
		annotations map[string]string
		change      func(*corev1.Pod)
		emptied     bool
		durable     Durable
		answer      Answer
		hibernate   bool
		says        string
	}{
		"no VM annotations":                         {nil, nil, true, there, Allow, false, ""},
		"VM without a policy":                       {map[string]string{contract.KeyName: "v"}, nil, true, nil, Allow, false, ""},
		"snapshot policy never":                     {and(contract.KeySnapshotPolicy, "never"), nil, true, there, Allow, false, ""},
		"eviction policy delete":                    {and(contract.KeyEvictionPolicy, "delete"), nil, true, there, Allow, false, ""},
		"pod is being deleted":                      {managed, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }, true, there, Allow, false, ""},
		"pod is Pending":                            {managed, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, true, there, Allow, false, ""},
		"pod is Failed":                             {managed, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, true, there, Allow, false, ""},
		"eviction policy refuse":                    {and(contract.KeyEvictionPolicy, "refuse"), nil, true, there, Refuse, false, "delete the pod"},
		"invalid eviction policy":                   {and(contract.KeyEvictionPolicy, "perhaps"), nil, true, there, Refuse, false, "hibernate, delete, refuse"},
		"node is drained":                           {managed, nil, true, absent, Wait, true, "is told to hibernate"},
		"eviction policy hibernate":                 {map[string]string{contract.KeyName: "v", contract.KeyEvictionPolicy: "hibernate"}, nil, true, absent, Wait, true, "is told to hibernate"},
		"next pod gets another name":                {map[string]string{contract.KeyEvictionPolicy: "hibernate"}, func(p *corev1.Pod) { p.GenerateName = "x-" }, true, absent, Refuse, false, contract.KeyName},
		"node accepts pods":                         {managed, nil, false, absent, Wait, false, "cordon node n"},
		"node accepts pods, told to hibernate":      {and(contract.KeyHibernate, "true"), nil, false, absent, Wait, false, "can be evicted when"},
		"hibernating":                               {and(contract.KeyHibernate, "true", contract.KeyLifecycleState, "hibernating", contract.KeyLifecycleMessage, "no room"), nil, true, absent, Wait, true, "no room"},
		"hibernated, not in the registry":           {asleep, nil, true, absent, Wait, false, "not in the registry yet"},
		"hibernated, registry fails":                {asleep, nil, true, broken, Wait, false, "registry unavailable"},
		"hibernated and durable":                    {asleep, nil, true, there, Allow, false, ""},
		"hibernated and durable, node accepts pods": {asleep, nil, false, there, Allow, false, ""},
		"failed":                             {and(contract.KeyLifecycleState, "failed", contract.KeyLifecycleMessage, "panic"), nil, true, absent, Refuse, false, "panic"},
		"no registry":                        {managed, nil, true, nil, Refuse, false, "no registry"},
		"hibernated for an older generation": {and(contract.KeyHibernate, "true", contract.KeyLifecycleState, "hibernated", contract.KeyGeneration, "3", contract.KeyLifecycleObserved, "2"), nil, true, there, Wait, true, "is told"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", Annotations: c.annotations}, Spec: corev1.PodSpec{NodeName: "n"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
			if c.change != nil {
				c.change(pod)
			}
			v := Decide(pod, c.emptied, c.durable)
			if v.Answer != c.answer || v.Hibernate != c.hibernate || !strings.Contains(v.Why, c.says) || (v.Why == "") != (c.answer == Allow) {
				t.Errorf("%+v", v)
			}
		})
	}
}
