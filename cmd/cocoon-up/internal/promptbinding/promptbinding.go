// Package promptbinding is kube-scheduler's plugin VolumeBinding, which binds a
// pod as soon as its new claims are bound. VolumeBinding itself looks once a
// second, and first after a second, so each pod with a new claim waits that long.
package promptbinding

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	listers "k8s.io/client-go/listers/core/v1"
	storage "k8s.io/component-helpers/storage/volume"
	configv1 "k8s.io/kube-scheduler/config/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/volumebinding"
)

// Name is the plugin's name in the scheduler's configuration. A profile that
// enables it disables VolumeBinding.
const Name = "PromptVolumeBinding"

// pause is between two looks at the informers' claims.
const pause = 10 * time.Millisecond

// Plugin is VolumeBinding under another name.
type Plugin struct{ *volumebinding.VolumeBinding }

// Name implements fwk.Plugin.
func (Plugin) Name() string { return Name }

// New is the plugin's factory. args are those of VolumeBinding, or nil for its
// defaults.
func New(ctx context.Context, args runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
	if args == nil {
		own, err := defaults()
		if err != nil {
			return nil, fmt.Errorf("%s: defaults: %w", Name, err)
		}
		args = own
	}
	stock, err := volumebinding.New(ctx, args, h, feature.NewSchedulerFeaturesFromGates(utilfeature.DefaultFeatureGate))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Name, err)
	}
	pl, ok := stock.(*volumebinding.VolumeBinding)
	if !ok {
		return nil, fmt.Errorf("%s: VolumeBinding is a %T", Name, stock)
	}
	core := h.SharedInformerFactory().Core().V1()
	pl.Binder = &binder{
		SchedulerVolumeBinder: pl.Binder,
		claims:                core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), nodes: core.Nodes().Lister(),
	}
	return Plugin{pl}, nil
}

func defaults() (*config.VolumeBindingArgs, error) {
	outer, args := &configv1.VolumeBindingArgs{}, &config.VolumeBindingArgs{}
	scheme.Scheme.Default(outer)
	return args, scheme.Scheme.Convert(outer, args, nil)
}

// Replace makes a profile use this plugin in the place of VolumeBinding.
func Replace(p *config.Plugins) {
	for n := range p.MultiPoint.Enabled {
		if p.MultiPoint.Enabled[n].Name == names.VolumeBinding {
			p.MultiPoint.Enabled[n].Name = Name
		}
	}
}

// binder returns from BindPodVolumes when the claims are bound.
type binder struct {
	volumebinding.SchedulerVolumeBinder
	claims  listers.PersistentVolumeClaimLister
	volumes listers.PersistentVolumeLister
	nodes   listers.NodeLister
}

// BindPodVolumes implements volumebinding.SchedulerVolumeBinder. The stock
// binder does the work, finds all errors, and sees the result up to a second
// later; it is not interrupted then, because it would count that as a failure.
func (b *binder) BindPodVolumes(ctx context.Context, pod *v1.Pod, volumes *volumebinding.PodVolumes) error {
	if len(volumes.StaticBindings) > 0 { // only the stock binder sees which they are
		return b.SchedulerVolumeBinder.BindPodVolumes(ctx, pod, volumes)
	}
	stock, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() {
		defer cancel()
		done <- b.SchedulerVolumeBinder.BindPodVolumes(stock, pod, volumes)
	}()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			cancel()
			return <-done
		case <-tick.C:
			if b.bound(pod, volumes.DynamicProvisions) {
				return nil
			}
		}
	}
}

// bound reports whether all claims are bound to volumes that the pod's node can
// use. What is wrong is left to the stock binder.
func (b *binder) bound(pod *v1.Pod, provisions []*volumebinding.DynamicProvision) bool {
	node, err := b.nodes.Get(pod.Spec.NodeName)
	if err != nil {
		return false
	}
	for _, p := range provisions {
		claim, err := b.claims.PersistentVolumeClaims(p.PVC.Namespace).Get(p.PVC.Name)
		if err != nil || claim.UID != p.PVC.UID || claim.DeletionTimestamp != nil || claim.Annotations[storage.AnnSelectedNode] != node.Name ||
			claim.Spec.VolumeName == "" || !metav1.HasAnnotation(claim.ObjectMeta, storage.AnnBindCompleted) {
			return false
		}
		pv, err := b.volumes.Get(claim.Spec.VolumeName)
		if err != nil || storage.CheckNodeAffinity(pv, node.Labels) != nil {
			return false
		}
	}
	return true
}
