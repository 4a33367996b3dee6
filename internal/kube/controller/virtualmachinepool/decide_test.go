package virtualmachinepool

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	v1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func after(d time.Duration) time.Time { return epoch.Add(d) }

// webPool is a pool that wants n machines with the label app=web.
func webPool(n int32) *poolv1.VirtualMachinePool {
	guest, always := resource.MustParse("128Mi"), v1.RunStrategyAlways
	pool := &poolv1.VirtualMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "pool"}}
	pool.Spec.Replicas = &n
	pool.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	t := &poolv1.VirtualMachineTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}}}
	t.Spec.RunStrategy, t.Spec.Template = &always, &v1.VirtualMachineInstanceTemplateSpec{}
	t.Spec.Template.Spec.Domain.Memory = &v1.Memory{Guest: &guest}
	t.Spec.Template.Spec.Volumes = []v1.Volume{{Name: "root", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "a"}}}}
	pool.Spec.VirtualMachineTemplate = t
	return pool
}

// changed is webPool after its template has changed.
func changed(n int32) *poolv1.VirtualMachinePool {
	pool := webPool(n)
	pool.Spec.VirtualMachineTemplate.Spec.Template.Spec.Hostname = "h"
	return pool
}

// machine describes a machine of webPool by words. One is current unless it is old.
func machine(ordinal int, text string) *v1.VirtualMachine {
	vm := kubevirt.PoolMachine(webPool(0), ordinal)
	vm.UID, vm.CreationTimestamp = types.UID(vm.Name), metav1.NewTime(epoch)
	for _, word := range strings.Fields(text) {
		switch word {
		case "ready":
			vm.Status.Ready = true
		case "changed": // it has the changed template
			now := kubevirt.PoolMachine(changed(0), ordinal)
			vm.Labels, vm.Spec = now.Labels, now.Spec
		case "stale": // its instance has not
			vm.Status.Conditions = []v1.VirtualMachineCondition{{Type: v1.VirtualMachineRestartRequired, Status: corev1.ConditionTrue}}
		case "asked":
			vm.Status.StateChangeRequests = []v1.VirtualMachineStateChangeRequest{{Action: v1.StartRequest}}
		case "once":
			once := v1.RunStrategyOnce
			vm.Spec.RunStrategy = &once
		case "off":
			halted := v1.RunStrategyHalted
			vm.Spec.RunStrategy = &halted
		case "behind": // its controller has not seen the change
			vm.Generation = 2
		case "deleted":
			vm.DeletionTimestamp = &metav1.Time{Time: epoch}
		case "theirs":
			vm.OwnerReferences[0].UID = "other"
		case "free":
			vm.OwnerReferences = nil
		case "db":
			vm.Labels["app"] = "db"
		case "gold":
			vm.Spec.Template.ObjectMeta.Labels["tier"] = "gold"
		case "late":
			vm.CreationTimestamp = metav1.NewTime(after(time.Hour))
		default:
			panic(word)
		}
	}
	return vm
}

func (s *step) String() string {
	var all []string
	list := func(what string, of []*v1.VirtualMachine) {
		for _, vm := range of {
			all = append(all, what+strings.TrimPrefix(vm.Name, "web-"))
		}
	}
	list("release ", s.release)
	list("-", s.remove)
	list("~", s.update)
	list("restart ", s.restart)
	if s.create > 0 {
		all = append(all, fmt.Sprintf("+%d", s.create))
	}
	return strings.Join(all, " ")
}

func sorted(by poolv1.VirtualMachinePoolSortPolicy) *poolv1.VirtualMachinePoolSelectionPolicy {
	return &poolv1.VirtualMachinePoolSelectionPolicy{SortPolicy: &by}
}

func TestDecide(t *testing.T) {
	scaleIn := func(p *poolv1.VirtualMachinePoolSelectionPolicy) func(*poolv1.VirtualMachinePool) {
		return func(pool *poolv1.VirtualMachinePool) {
			pool.Spec.ScaleInStrategy = &poolv1.VirtualMachinePoolScaleInStrategy{Proactive: &poolv1.VirtualMachinePoolProactiveScaleInStrategy{SelectionPolicy: p}}
		}
	}
	most := func(n intstr.IntOrString) func(*poolv1.VirtualMachinePool) {
		return func(pool *poolv1.VirtualMachinePool) { pool.Spec.MaxUnavailable = &n }
	}
	gold := &poolv1.VirtualMachinePoolSelectionPolicy{Selectors: &poolv1.VirtualMachinePoolSelectors{LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "gold"}}}}
	for what, tc := range map[string]struct {
		pool *poolv1.VirtualMachinePool
		with func(*poolv1.VirtualMachinePool)
		of   []string // by ordinals
		want string
	}{
		"none":            {webPool(2), nil, nil, "+2"},
		"enough":          {webPool(2), nil, []string{"ready", ""}, ""},
		"one is missing":  {webPool(3), nil, []string{"ready", "ready"}, "+1"},
		"one is deleted":  {webPool(2), nil, []string{"deleted", "ready"}, ""},
		"not the pool's":  {webPool(2), nil, []string{"free", "theirs", "ready"}, "+1"},
		"one left":        {webPool(1), nil, []string{"db", "ready"}, "release 0"},
		"paused":          {webPool(2), func(p *poolv1.VirtualMachinePool) { p.Spec.Paused = true }, []string{"ready"}, ""},
		"paused, refused": {webPool(1), func(p *poolv1.VirtualMachinePool) { p.Spec.Selector = nil }, []string{"ready"}, ""},
		"too many":        {webPool(1), nil, []string{"ready", "", "ready", "ready"}, "-1 -3 -2"},
		"many too many":   {webPool(0), nil, make([]string, 25), "-24 -23 -22 -21 -20 -19 -18 -17 -16 -15 -14 -13 -12 -11 -10 -9 -8 -7 -6 -5"},
		"lowest first":    {webPool(1), scaleIn(sorted("AscendingOrder")), []string{"ready", "", "ready"}, "-0 -1"},
		"highest first":   {webPool(1), scaleIn(sorted("DescendingOrder")), []string{"", "ready", "ready"}, "-2 -1"},
		"newest first":    {webPool(2), scaleIn(sorted("Newest")), []string{"ready", "ready late", ""}, "-1"},
		"oldest first":    {webPool(2), scaleIn(sorted("Oldest")), []string{"ready late", "ready", "late"}, "-1"},
		"random":          {webPool(1), scaleIn(sorted("Random")), []string{"", "", ""}, "-0 -2"},
		"only some":       {webPool(0), scaleIn(gold), []string{"gold", "", "gold"}, "-2 -0"},
		"never": {webPool(0), func(p *poolv1.VirtualMachinePool) {
			p.Spec.ScaleInStrategy = &poolv1.VirtualMachinePoolScaleInStrategy{Unmanaged: &poolv1.VirtualMachinePoolUnmanagedStrategy{}}
		}, []string{"ready"}, ""},
		"when they go": {webPool(0), func(p *poolv1.VirtualMachinePool) {
			p.Spec.ScaleInStrategy = &poolv1.VirtualMachinePoolScaleInStrategy{Opportunistic: &poolv1.VirtualMachinePoolOpportunisticScaleInStrategy{}}
		}, []string{"ready"}, ""},
		"a new template":  {changed(3), nil, []string{"ready", "", "changed ready"}, "~0 ~1"},
		"then restarts":   {changed(3), nil, []string{"changed stale ready", "changed stale", "changed ready"}, "restart 1 restart 0"},
		"one at a time":   {changed(3), most(intstr.FromInt32(1)), []string{"changed stale ready", "changed stale ready", "changed ready"}, "restart 0"},
		"one is away":     {changed(3), most(intstr.FromInt32(1)), []string{"changed", "changed stale ready", "changed ready"}, ""},
		"one is asked":    {changed(3), most(intstr.FromInt32(1)), []string{"changed stale ready asked", "changed stale ready", "changed ready"}, ""},
		"one is off":      {changed(3), most(intstr.FromInt32(1)), []string{"changed off", "changed stale ready", "changed ready"}, "restart 1"},
		"a half":          {changed(4), most(intstr.FromString("50%")), []string{"changed stale ready", "changed stale ready", "changed stale ready", "changed ready"}, "restart 0 restart 1"},
		"at least one":    {changed(2), most(intstr.FromString("1%")), []string{"changed stale ready", "changed stale ready"}, "restart 0"},
		"runs once":       {changed(1), nil, []string{"changed stale ready once"}, ""},
		"not seen yet":    {changed(1), nil, []string{"changed stale ready behind"}, ""},
		"changed by hand": {webPool(1), nil, []string{"stale ready"}, ""},
		"newest restarts": {changed(2), func(p *poolv1.VirtualMachinePool) {
			most(intstr.FromInt32(1))(p)
			p.Spec.UpdateStrategy = &poolv1.VirtualMachinePoolUpdateStrategy{Proactive: &poolv1.VirtualMachinePoolProactiveUpdateStrategy{SelectionPolicy: sorted("Newest")}}
		}, []string{"changed stale ready", "changed stale ready late"}, "restart 1"},
		"updates only": {changed(2), func(p *poolv1.VirtualMachinePool) {
			p.Spec.UpdateStrategy = &poolv1.VirtualMachinePoolUpdateStrategy{Opportunistic: &poolv1.VirtualMachineOpportunisticUpdateStrategy{}}
		}, []string{"ready", "changed stale ready"}, "~0"},
		"updates nothing": {changed(2), func(p *poolv1.VirtualMachinePool) {
			p.Spec.UpdateStrategy = &poolv1.VirtualMachinePoolUpdateStrategy{Unmanaged: &poolv1.VirtualMachinePoolUnmanagedStrategy{}}
		}, []string{"ready", "changed stale ready"}, ""},
		"goes, no update":     {changed(1), nil, []string{"changed ready", "ready"}, "-1"},
		"the pool is deleted": {webPool(2), func(p *poolv1.VirtualMachinePool) { p.DeletionTimestamp = &metav1.Time{Time: epoch} }, []string{"db"}, ""},
	} {
		if tc.with != nil {
			tc.with(tc.pool)
		}
		x := seen{pool: tc.pool, instances: map[string]*metav1.ObjectMeta{}, now: epoch}
		var err error
		if x.selector, err = kubevirt.PoolSelector(tc.pool); err != nil {
			t.Fatal(err)
		}
		if errs := kubevirt.CheckPool(tc.pool); len(errs) > 0 {
			x.refusal = errs.ToAggregate().Error()
		}
		for i, text := range tc.of {
			vm := machine(i, text)
			x.all = append(x.all, vm)
			if stale(vm) { // the instance is of webPool's template
				x.instances[vm.Name] = &metav1.ObjectMeta{UID: "i", Labels: map[string]string{v1.VirtualMachinePoolRevisionName: kubevirt.Revision(webPool(0))}}
			}
		}
		s := decide(x)
		if got := s.String(); got != tc.want {
			t.Errorf("%s: %q, want %q", what, got, tc.want)
		}
	}
}

// What the API server refuses is tried again after pauses that double.
func TestPauses(t *testing.T) {
	s := step{}
	s.fail(ReasonCreateFailed, "quota", epoch)
	if got := s.pause(); got != firstPause {
		t.Errorf("at first: %s", got)
	}
	s.fail(ReasonCreateFailed, "quota", after(20*time.Second))
	if got := s.pause(); got != 20*time.Second {
		t.Errorf("after 20 s: %s", got)
	}
	s.fail(ReasonCreateFailed, "quota", after(time.Hour))
	if got := s.pause(); got != maxPause {
		t.Errorf("after an hour: %s", got)
	}
	x := seen{pool: webPool(1), now: after(time.Hour + time.Second)}
	x.pool.Status = s.status
	x.selector, _ = kubevirt.PoolSelector(x.pool)
	if s := decide(x); s.create != 0 || s.wait != maxPause-time.Second {
		t.Errorf("within the pause: %s, %s", &s, s.wait)
	}
	x.now = after(2 * time.Hour)
	if s := decide(x); s.create != 1 {
		t.Errorf("after the pause: %s", &s)
	}
}
