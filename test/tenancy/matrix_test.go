package tenancy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// seen is the observed state of a pod.
type seen struct {
	state        State
	secret       string
	reason, says string
	vm           vm.ID
}

func (x seen) String() string {
	return fmt.Sprintf("%s %q %s %q", x.state, x.secret, x.reason, x.says)
}

// sees returns the observed state of p.
func (s *stage) sees(p *corev1.Pod) (x seen) {
	s.t.Helper()
	if p == nil {
		return seen{state: "gone"}
	}
	all, err := s.machine.List(s.as(p.Namespace))
	s.check(err)
	if convert.Static(p) { // the status of a static pod may claim any id
		all = nil
	}
	for _, rec := range all { // the VM in the pod's status, or the one made for it
		if rec.Spec.Labels[contract.VMLabelPodUID] == string(p.UID) || len(p.Status.ContainerStatuses) > 0 && podstatus.VMOf(p.Status.ContainerStatuses[0].ContainerID) == rec.ID {
			x.vm = rec.ID
			x.secret, _ = s.world.remembers(rec)
		}
	}
	var c corev1.ContainerState
	if len(p.Status.ContainerStatuses) > 0 {
		c = p.Status.ContainerStatuses[0].State
	}
	ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	switch {
	case p.Status.Phase == corev1.PodFailed:
		x.state, x.reason, x.says = "failed", p.Status.Reason, p.Status.Message
	case p.Annotations[contract.KeyLifecycleState] == string(contract.LifecycleHibernated):
		x.state = Sleeps
	case c.Waiting != nil:
		x.state, x.reason, x.says = Waits, cmp.Or(p.Status.Reason, c.Waiting.Reason), c.Waiting.Message
	case convert.Static(p) && c.Running != nil: // it is ready if its address answers, and some addresses are never probed
		x.state = Stands
	case !ready:
	case x.secret != "":
		x.state = GoesOn
	case x.vm != "":
		x.state = Boots
	}
	return x
}

// unlike returns how x differs from the expected state, or "". An empty of accepts any secret.
func unlike(x seen, state State, of string) string {
	if x.state != state || of != "" && x.secret != of {
		return x.String()
	}
	return ""
}

// not returns how x differs from the outcome, or "".
func (o Outcome) not(x seen) string {
	of := ""
	if o.State == GoesOn {
		of = o.Of.Secret()
	}
	why := unlike(x, o.State, of)
	if why == "" && o.State == Waits && (x.reason != o.Reason || !strings.Contains(x.says, o.Says)) {
		why = x.String()
	}
	if why == "" && x.vm != "" && (o.State == Waits || o.State == Stands) {
		why = "a VM was made"
	}
	return why
}

// burst is how many pods may start at once. The API server does not answer in time beside more guests that boot.
const burst = 16

// matrix runs the cells.
func (s *stage) matrix(all []Case) {
	s.t.Helper()
	before := s.others()
	var cases []Case
	for _, c := range all {
		refusal := s.world.author(c.Pod(s.image, s.find))
		want := c.Cell.Refused
		if !s.front {
			want = ""
		}
		switch {
		case want == "" && refusal != "":
			s.t.Errorf("%s: it is refused: %s", c, refusal)
		case !strings.Contains(refusal, want), want != "" && refusal == "":
			s.t.Errorf("%s: admission says %q, want %q", c, refusal, want)
		case refusal == "":
			cases = append(cases, c)
			if len(cases)%burst == 0 {
				s.settle(cases[len(cases)-burst:], false)
			}
		}
	}
	s.settle(cases, false)
	s.world.closed(cases)
	s.unchanged("while the pods are there", before)
	s.world.again()
	s.settle(cases, true)
	s.unchanged("when the node has started anew", before)
	for _, c := range cases {
		s.world.remove(Dev, c.PodName())
	}
	for _, c := range cases {
		s.until(c.String()+" goes", func() string {
			if s.get(Dev, c.PodName()) != nil {
				return "it is there still"
			}
			return ""
		})
	}
	s.unchanged("when the pods are gone", before)
	s.t.Logf("%d cells, %d of them admitted", len(all), len(cases))
}

// settle waits until each case has reached its outcome in the table, and checks all once more at the end.
func (s *stage) settle(cases []Case, later bool) {
	s.t.Helper()
	want := func(c Case) Outcome {
		if later && c.Cell.Later != nil {
			return *c.Cell.Later
		}
		return c.Cell.Node
	}
	for range 2 { // checks the retried steps again after all cases have ended
		for _, c := range cases {
			s.await(c, want(c))
		}
	}
}

// await waits until the pod of the case has reached its outcome. On the way it must never hold a secret other than the one in
// the outcome.
func (s *stage) await(c Case, want Outcome) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(s.pace) {
		x := s.sees(s.get(Dev, c.PodName()))
		why := want.not(x)
		switch {
		case why == "":
			return
		case x.secret != "" && (want.State != GoesOn || x.secret != want.Of.Secret()), time.Now().After(deadline):
			s.t.Errorf("%s: it %s; want that it %s", c, why, want)
			return
		}
	}
}

// others returns everything that does not belong to Dev: VMs with their secrets, snapshots, and the tags of the registry.
func (s *stage) others() map[string]string {
	s.t.Helper()
	out := map[string]string{}
	var takes []string
	for i := range rows {
		takes = append(takes, rows[i].Takes...)
	}
	all, err := s.machine.List(s.t.Context())
	s.check(err)
	for _, r := range all {
		if r.Owner.Namespace == Dev || slices.Contains(takes, r.Spec.Name) {
			continue
		}
		secret, boot := s.world.remembers(r)
		out["VM "+r.Owner.Qualify(r.Spec.Name)] = fmt.Sprint(r.ID, " ", r.State, " ", r.StartedAt, " ", r.Snapshot, " ", secret, " ", boot)
	}
	snaps, err := s.machine.ListSnapshots(s.t.Context())
	s.check(err)
	for _, x := range snaps {
		if x.Owner.Namespace != Dev {
			out["snapshot "+x.Owner.Qualify(x.Name)] = fmt.Sprint(x.ID, " ", x.Digest, " ", x.Published)
		}
	}
	var catalog struct{ Repositories []string }
	s.read("/v2/_catalog?n=1000", &catalog)
	for _, repo := range catalog.Repositories {
		if strings.HasPrefix(repo, Dev+"/") {
			continue
		}
		var list struct{ Tags []string }
		s.read("/v2/"+repo+"/tags/list", &list)
		for _, tag := range list.Tags {
			digest, err := s.machine.TagDigest(s.t.Context(), s.url+"/"+repo+":"+tag, snapshot.Auth{Token: s.token})
			s.check(err)
			out["tag "+repo+":"+tag] = digest
		}
	}
	return out
}

// read reads JSON from the registry.
func (s *stage) read(path string, into any) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+path, nil)
	s.check(err)
	req.Header.Set("Authorization", "Bearer "+s.token)
	resp, err := http.DefaultClient.Do(req)
	s.check(err)
	defer resp.Body.Close()
	s.check(json.NewDecoder(resp.Body).Decode(into))
}

// unchanged compares what others have now with what they had before.
func (s *stage) unchanged(when string, before map[string]string) {
	s.t.Helper()
	after := s.others()
	for _, what := range slices.Sorted(maps.Keys(before)) {
		if now, there := after[what]; !there {
			s.t.Errorf("%s: %s is gone", when, what)
		} else if now != before[what] {
			s.t.Errorf("%s: %s was %s and is %s", when, what, before[what], now)
		}
	}
	for what := range after {
		if _, there := before[what]; !there {
			s.t.Errorf("%s: there is %s now", when, what)
		}
	}
}
