package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestConnectTasks(t *testing.T) {
	on := func(networks ...string) *vm.Record {
		r := &vm.Record{}
		for i, n := range networks {
			r.NICs = append(r.NICs, vm.NIC{Network: n, MAC: string(rune('a' + i))})
		}
		return r
	}
	moving := on("pods", "lab")
	moving.Moving = []int{1}
	lab, dmz := vm.NICSpec{Network: "lab"}, vm.NICSpec{Network: "dmz", MAC: "02:00:00:00:00:01"}
	for name, c := range map[string]struct {
		wants []vm.NICSpec
		rec   *vm.Record
		want  []connectTask
	}{
		"nothing":                {rec: on("pods")},
		"no interface at all":    {wants: []vm.NICSpec{lab}, rec: on()},
		"there":                  {wants: []vm.NICSpec{lab}, rec: on("pods", "lab")},
		"new ones":               {wants: []vm.NICSpec{lab, dmz}, rec: on("pods"), want: []connectTask{{want: lab}, {want: dmz}}},
		"away":                   {rec: on("pods", "lab"), want: []connectTask{{vm.NICSpec{Network: "lab", MAC: "b"}, true}}},
		"one for another":        {wants: []vm.NICSpec{dmz}, rec: on("pods", "lab"), want: []connectTask{{vm.NICSpec{Network: "lab", MAC: "b"}, true}, {want: dmz}}},
		"half there":             {wants: []vm.NICSpec{lab}, rec: moving, want: []connectTask{{want: lab}}},
		"half away":              {rec: moving, want: []connectTask{{vm.NICSpec{Network: "lab", MAC: "b"}, true}}},
		"two on that of the pod": {rec: on("pods", "pods")},
		"only that of the pod":   {wants: []vm.NICSpec{{Network: "pods"}}, rec: on("pods"), want: []connectTask{{want: vm.NICSpec{Network: "pods"}}}},
	} {
		if d := diff.Of(c.want, connectTasks(c.wants, c.rec)); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

// TestConnect: a network that the annotation gains is attached, one that it loses is detached, and what stands against it is told.
func TestConnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		first := pod()
		first.Annotations = map[string]string{contract.KeyNetworks: "lab"}
		w.create(first)
		expect(t, w.after(5*time.Second), "Running running ready")
		has := func(p *corev1.Pod, want ...string) {
			t.Helper()
			var have []string
			for _, n := range contract.ParseNetworkStatus(p.Annotations)[1:] {
				have = append(have, n.Name)
			}
			if d := diff.Of(want, have); d != "" {
				t.Errorf("the VM has:\n%s", d)
			}
		}
		w.annotate(contract.KeyNetworks, "lab,dmz")
		has(w.after(5*time.Second), "lab", "dmz")
		w.expectTold("Normal NetworkAttached Attached VM " + vmName + " to network dmz")
		w.annotate(contract.KeyNetworks, "dmz")
		has(w.after(5*time.Second), "dmz")
		w.expectTold("Normal NetworkDetached Detached VM " + vmName + " from network lab")

		w.stop() // the node is started again
		w.run(Config{})
		w.recall(t)
		writes, calls := w.writes(), len(w.engine.calls)
		has(w.after(time.Hour), "dmz")
		if n := w.engine.called("attach network dmz") + w.engine.called("detach network lab"); n > 1 || w.writes() != writes {
			t.Errorf("%d calls and %d writes in an hour: %v", n, w.writes()-writes, w.engine.calls[calls:])
		}

		w.annotate(contract.KeyNetworks, "dmz,none")
		p := w.after(time.Minute)
		has(p, "dmz")
		if c := condition(p, contract.ConditionNetworks); c.Status != corev1.ConditionFalse || c.Reason != "FailedNetworks" || !strings.Contains(c.Message, `no network is called "none"`) {
			t.Errorf("the condition is %+v", c)
		}
		if told := w.told(); strings.Count(told, "Warning NetworkAttachFailed VM "+vmName+" is not attached to network none yet") != 1 {
			t.Errorf("told %s", told)
		}
		w.annotate(contract.KeyNetworks, "dmz")
		if c := condition(w.after(time.Minute), contract.ConditionNetworks); c.Status != corev1.ConditionTrue {
			t.Errorf("in the end the condition is %+v", c)
		}

		w.annotate(contract.KeyNetworks, "dmz,dmz")
		p = w.after(time.Minute)
		has(p, "dmz")
		if c := condition(p, contract.ConditionNetworks); c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "names network dmz twice") {
			t.Errorf("with a wrong annotation the condition is %+v", c)
		}
		w.annotate(contract.KeyNetworks, "") // then the pod says nothing of networks
		has(w.after(time.Minute), "dmz")
		w.annotate(contract.KeyNetworks, "[]")
		has(w.after(time.Minute))
	})
}
