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
	broken := func() (bool, error) { return false, errors.New("registry away") }
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
		"a pod as others":              {nil, nil, true, there, Allow, false, ""},
		"a VM without a policy":        {map[string]string{contract.KeyName: "v"}, nil, true, nil, Allow, false, ""},
		"never to be saved":            {and(contract.KeySnapshotPolicy, "never"), nil, true, there, Allow, false, ""},
		"to be deleted":                {and(contract.KeyEvictionPolicy, "delete"), nil, true, there, Allow, false, ""},
		"on its way out":               {managed, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }, true, there, Allow, false, ""},
		"not up yet":                   {managed, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, true, there, Allow, false, ""},
		"over":                         {managed, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, true, there, Allow, false, ""},
		"never to be evicted":          {and(contract.KeyEvictionPolicy, "refuse"), nil, true, there, Refuse, false, "delete the pod"},
		"a policy nobody knows":        {and(contract.KeyEvictionPolicy, "perhaps"), nil, true, there, Refuse, false, "hibernate, delete, refuse"},
		"drained":                      {managed, nil, true, absent, Wait, true, "is told to hibernate"},
		"drained by its own wish":      {map[string]string{contract.KeyName: "v", contract.KeyEvictionPolicy: "hibernate"}, nil, true, absent, Wait, true, "is told to hibernate"},
		"nobody would wake it":         {map[string]string{contract.KeyEvictionPolicy: "hibernate"}, func(p *corev1.Pod) { p.GenerateName = "x-" }, true, absent, Refuse, false, contract.KeyName},
		"on a node that takes pods":    {managed, nil, false, absent, Wait, false, "cordon node n"},
		"there, by somebody's wish":    {and(contract.KeyHibernate, "true"), nil, false, absent, Wait, false, "can be evicted when"},
		"on its way":                   {and(contract.KeyHibernate, "true", contract.KeyLifecycleState, "hibernating", contract.KeyLifecycleMessage, "no room"), nil, true, absent, Wait, true, "no room"},
		"asleep, not in the registry":  {asleep, nil, true, absent, Wait, false, "not in the registry yet"},
		"asleep, nobody knows":         {asleep, nil, true, broken, Wait, false, "registry away"},
		"asleep and durable":           {asleep, nil, true, there, Allow, false, ""},
		"asleep, durable, not drained": {asleep, nil, false, there, Allow, false, ""},
		"failed":                       {and(contract.KeyLifecycleState, "failed", contract.KeyLifecycleMessage, "panic"), nil, true, absent, Refuse, false, "panic"},
		"no registry":                  {managed, nil, true, nil, Refuse, false, "no registry"},
		"asleep for an older wish":     {and(contract.KeyHibernate, "true", contract.KeyLifecycleState, "hibernated", contract.KeyGeneration, "3", contract.KeyLifecycleObserved, "2"), nil, true, there, Wait, true, "is told"},
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
