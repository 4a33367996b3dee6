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
		"away":                   {rec: on("pods", "lab"), want: []connectTask{{want: vm.NICSpec{Network: "lab", MAC: "b"}, away: true}}},
		"one for another":        {wants: []vm.NICSpec{dmz}, rec: on("pods", "lab"), want: []connectTask{{want: vm.NICSpec{Network: "lab", MAC: "b"}, away: true}, {want: dmz}}},
		"half there":             {wants: []vm.NICSpec{lab}, rec: moving, want: []connectTask{{want: lab}}},
		"half away":              {rec: moving, want: []connectTask{{want: vm.NICSpec{Network: "lab", MAC: "b"}, away: true}}},
		"two on that of the pod": {rec: on("pods", "pods")},
		"only that of the pod":   {wants: []vm.NICSpec{{Network: "pods"}}, rec: on("pods"), want: []connectTask{{want: vm.NICSpec{Network: "pods"}}}},
	} {
		if d := diff.Of(c.want, connectTasks(c.wants, c.rec)); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

func TestLinkTasks(t *testing.T) {
	rec := &vm.Record{NICs: []vm.NIC{{Network: "pods", MAC: "a"}, {Network: "dmz", MAC: "b", LinkDown: true}, {Network: "lab", MAC: "c"}, {Network: "lan", MAC: "d"}}, Moving: []int{3}}
	wants := []vm.NICSpec{{}, {Network: "lab"}, {Network: "dmz"}, {Network: "lan"}, {Network: "new"}}
	task := func(network, mac string, down bool) connectTask {
		return connectTask{want: vm.NICSpec{Network: network, MAC: mac, LinkDown: down}, link: true}
	}
	for name, c := range map[string]struct {
		links []string
		want  []connectTask
	}{
		"nothing":           {},
		"as it is":          {links: []string{"up", "", "down"}},
		"the first down":    {links: []string{"down"}, want: []connectTask{task("pods", "a", true)}},
		"by their networks": {links: []string{"", "down", "up"}, want: []connectTask{task("lab", "c", true), task("dmz", "b", false)}},
		"half there":        {links: []string{"", "", "", "down"}},
		"not there":         {links: []string{"", "", "", "", "down", "down"}},
	} {
		if d := diff.Of(c.want, linkTasks(c.links, wants, rec)); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

// TestLinks: a link goes down and up with the annotation, of which the status of the network tells.
func TestLinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		first := pod()
		first.Annotations = map[string]string{contract.KeyNetworks: "lab", contract.KeyHardware: `{"links": ["", "down"]}`}
		w.create(first)
		expect(t, w.after(5*time.Second), "Running running ready")
		has := func(p *corev1.Pod, want ...string) {
			t.Helper()
			var have []string
			for _, n := range contract.ParseNetworkStatus(p.Annotations) {
				have = append(have, n.Link)
			}
			if d := diff.Of(want, have); d != "" {
				t.Errorf("the links are:\n%s", d)
			}
		}
		has(w.after(5*time.Second), "", "down")
		w.annotate(contract.KeyHardware, `{"links": ["down", "up"]}`)
		has(w.after(5*time.Second), "down", "")
		w.expectTold("Normal LinkSet Set the link of VM " + vmName + " on network lab up")
		w.annotate(contract.KeyHardware, `{"links": ["sideways"]}`)
		p := w.after(time.Minute)
		has(p, "down", "")
		if c := condition(p, contract.ConditionNetworks); c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, `links[0]: Unsupported value: "sideways"`) {
			t.Errorf("with a wrong annotation the condition is %+v", c)
		}
		w.annotate(contract.KeyHardware, "") // then the pod says nothing of links
		has(w.after(time.Minute), "down", "")
		writes := w.writes()
		if has(w.after(time.Hour), "down", ""); w.writes() != writes {
			t.Errorf("%d writes in an hour", w.writes()-writes)
		}
	})
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
