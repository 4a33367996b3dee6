package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// resolve reads what the VM of pod is created from; it reads the volumes in parallel with all else. reason is for what is
// missing: a pod whose volumes are missing is shown as being created, as with the kubelet.
func (w *worker) resolve(ctx context.Context, pod *corev1.Pod) (spec vm.Spec, reason string, err error) {
	filled := make(chan error, 1)
	volumes := convert.Spec(pod, w.p.cfg.Node, nil).Volumes
	go func() { filled <- w.volumes.Fill(ctx, pod, volumes) }()
	spec, err = w.wanted(ctx, pod)
	missing := <-filled
	switch {
	case missing != nil:
		return vm.Spec{}, podstatus.ReasonCreating, missing
	case err != nil:
		return vm.Spec{}, reasonConfigError, err
	}
	spec.Volumes = volumes
	return spec, "", nil
}

// newVolumes returns the volumes of w's pod. They have a lock of their own and may be used with mu held.
func (w *worker) newVolumes() *podvolumes.Volumes {
	return podvolumes.New(w.p.objects, w.p.cfg.Node, podvolumes.Owner{
		Pod:    func() *corev1.Pod { pod, _, _ := w.look(); return pod },
		Update: w.containers.UpdateVolume,
		Count:  func(err error) { w.p.Metrics.done("volume", err) },
		Complain: func(id vm.ID, err error) {
			w.log.Warn("volumes of vm not brought up to date", "vm", id, "err", err)
			w.event(corev1.EventTypeWarning, eventFailedMount, "%s", err)
		},
	})
}

// launch creates the VM and remembers what its volumes contain.
func (w *worker) launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	rec, err := w.vms.Launch(ctx, spec)
	if err == nil {
		w.volumes.Launched(spec.Volumes)
	}
	return rec, err
}

// keepVolumes makes sure that the volumes of rec are kept up to date until stopKeeper.
func (w *worker) keepVolumes(pod *corev1.Pod, rec *vm.Record) { w.volumes.Keep(pod, rec, w.background) }

func (w *worker) stopKeeper() { w.volumes.Stop() }

// emptyVolumes returns the names of rec's volumes that start empty.
func emptyVolumes(rec *vm.Record) (names []string) {
	for _, v := range rec.Spec.Volumes {
		if v.Kind == vm.VolumeEmpty {
			names = append(names, v.Name)
		}
	}
	return names
}
