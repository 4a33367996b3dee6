package aggregated

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/vm"
)

// A request to add a volume to a machine writes it to two places: to the template of the machine, for the next instance, and to an annotation
// of the pod that runs now. The node of the pod plugs the volume. A request to add a volume to an instance writes the annotation only. If a
// request fails between the two writes, the client sends it again, and the second write follows.

// volumes is what a request about a volume is about.
type volumes struct {
	target
	vm   *v1.VirtualMachine         // nil: only the instance is meant
	vmi  *v1.VirtualMachineInstance // nil: it does not run
	pod  *corev1.Pod                // of vmi
	asks map[string]string          // claims that are plugged into pod, by the names of their volumes
	dry  []string
}

// addVolume gives a machine or an instance the volume of a claim.
func (s *Server) addVolume(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.AddVolumeOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, o.DryRun)
	if err != nil {
		return err
	}
	v, d, errs, warnings := kubevirt.Hotplug(&o)
	if len(errs) > 0 {
		return apierrors.NewBadRequest(errs.ToAggregate().Error())
	}
	x, err := s.volumesOf(r.Context(), t, dry)
	if err != nil {
		return err
	}
	claim := kubevirt.ClaimOf(&v)
	if err := x.mayAdd(v.Name, claim); err != nil {
		return err
	}
	if err := s.prepare(r.Context(), x, claim); err != nil {
		return err
	}
	if x.vm != nil && !has(x.template(), v.Name) {
		err = s.changeTemplate(r.Context(), x, func(spec *v1.VirtualMachineInstanceSpec) {
			spec.Volumes, spec.Domain.Devices.Disks = append(spec.Volumes, v), append(spec.Domain.Devices.Disks, d)
		})
	}
	if err == nil && x.pod != nil && x.asks[v.Name] == "" {
		err = s.askVolumes(r.Context(), x, func(asks map[string]string) { asks[v.Name] = claim })
	}
	if err == nil {
		warn(w, warnings)
	}
	return accepted(w, err)
}

// removeVolume takes a volume that was added from a machine or an instance. Its name is that of the volume or of its claim.
func (s *Server) removeVolume(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.RemoveVolumeOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, o.DryRun)
	if err != nil {
		return err
	}
	if o.Name == "" {
		return apierrors.NewBadRequest("name: Required value")
	}
	x, err := s.volumesOf(r.Context(), t, dry)
	if err != nil {
		return err
	}
	name, err := x.mayRemove(o.Name)
	if err != nil {
		return err
	}
	if x.vm != nil && has(x.template(), name) {
		err = s.changeTemplate(r.Context(), x, func(spec *v1.VirtualMachineInstanceSpec) { *spec = kubevirt.Without(*spec, name) })
	}
	if err == nil && x.asks[name] != "" {
		err = s.askVolumes(r.Context(), x, func(asks map[string]string) { delete(asks, name) })
	}
	return accepted(w, err)
}

// warn sends warnings beside an answer; virtctl prints them.
func warn(w http.ResponseWriter, warnings []string) {
	for _, text := range warnings {
		if header, err := utilnet.NewWarningHeader(299, "-", text); err == nil {
			w.Header().Add("Warning", header)
		}
	}
}

// volumesOf reads what the target has. Errors: 404; 409 for an instance that does not run, or is about to.
func (s *Server) volumesOf(ctx context.Context, t target, dry []string) (x volumes, err error) {
	x = volumes{target: t, dry: dry}
	if t.Resource == machines {
		var vmi *v1.VirtualMachineInstance
		if x.vm, vmi, err = s.pair(ctx, t); err != nil {
			return x, err
		}
		switch {
		case x.vm.Spec.Template == nil:
			return x, conflict(t, "spec.template is missing")
		case vmi == nil || vmi.IsFinal() || vmi.DeletionTimestamp != nil:
			return x, nil
		case vmi.Status.Phase != v1.Running:
			return x, conflict(t, "VMI is not running yet; try again when it runs")
		}
	}
	if x.vmi, x.pod, err = s.runs(ctx, t); err != nil {
		return x, err
	}
	if x.asks, err = contract.ParseVolumes(x.pod.Annotations); err != nil {
		return x, conflict(t, "the annotations of pod %s: %w", x.pod.Name, err)
	}
	return x, nil
}

// template returns the volumes of the machine's next instance.
func (x *volumes) template() []v1.Volume {
	if x.vm == nil {
		return nil
	}
	return x.vm.Spec.Template.Spec.Volumes
}

// started returns the volumes with which the running instance was started.
func (x *volumes) started() []v1.Volume {
	if x.vmi == nil {
		return nil
	}
	return x.vmi.Spec.Volumes
}

func claimOf(v v1.Volume) string { return kubevirt.ClaimOf(&v) }

func has(list []v1.Volume, name string) bool {
	return slices.ContainsFunc(list, func(v v1.Volume) bool { return v.Name == name })
}

// mayAdd refuses a volume whose name or claim is there already, unless an earlier request for the same was not completed.
func (x *volumes) mayAdd(name, claim string) error {
	if x.vmi != nil && x.vmi.Spec.Domain.Devices.DisableHotplug {
		return conflict(x.target, "spec.domain.devices.disableHotplug does not allow volumes to be added")
	}
	if len(x.asks) >= vm.MaxPort {
		return conflict(x.target, "VMI has %d volumes that were added, and cannot have more", len(x.asks))
	}
	begun := x.asks[name] == claim
	for _, v := range slices.Concat(x.template(), x.started()) {
		switch {
		case v.Name == name && claimOf(v) == claim && kubevirt.Hotpluggable(&v) && !has(x.started(), name) && x.pod != nil && !begun:
		case v.Name == name:
			return conflict(x.target, "Unable to add volume [%s] because volume with that name already exists", name)
		case claimOf(v) == claim:
			return conflict(x.target, "Unable to add volume source [%s] because it already exists", claim)
		}
	}
	for other, of := range x.asks {
		switch {
		case other == name && of == claim && x.vm != nil: // it is added to the machine, too
		case other == name:
			return conflict(x.target, "Unable to add volume [%s] because volume with that name already exists", name)
		case of == claim:
			return conflict(x.target, "Unable to add volume source [%s] because it already exists", claim)
		}
	}
	return nil
}

// mayRemove returns the name of the volume that is called so, or whose claim is. It refuses a volume that was not added.
func (x *volumes) mayRemove(called string) (string, error) {
	found := ""
	for _, v := range slices.Concat(x.template(), x.started()) {
		if v.Name != called && claimOf(v) != called {
			continue
		}
		if !kubevirt.Hotpluggable(&v) {
			return "", conflict(x.target, "Unable to remove volume [%s] because it is not hotpluggable", v.Name)
		}
		if has(x.started(), v.Name) {
			return "", conflict(x.target, "Unable to remove volume [%s] because the VM was started with it; stop the VM first", v.Name)
		}
		found = v.Name
	}
	for name, claim := range x.asks {
		if found == "" && (name == called || claim == called) {
			found = name
		}
	}
	if found == "" {
		return "", conflict(x.target, "Unable to remove volume [%s] because it does not exist", called)
	}
	return found, nil
}

// attempts is how often a change is tried that others overtake.
const attempts = 5

// retried calls change until no other write was faster. Errors: 409 after attempts.
func retried(t target, change func() error) (err error) {
	for range attempts {
		if err = change(); !apierrors.IsConflict(err) || isOurs(err) {
			return err
		}
	}
	return conflict(t, "it was changed at the same time; try again")
}

// changeTemplate changes the volumes and disks of the machine's template.
func (s *Server) changeTemplate(ctx context.Context, x volumes, change func(*v1.VirtualMachineInstanceSpec)) error {
	now := x.vm
	return retried(x.target, func() error {
		if now == nil {
			var err error
			if now, err = s.machine(ctx, x.target); err != nil {
				return err
			}
		}
		spec := now.Spec.Template.Spec.DeepCopy()
		change(spec)
		body, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": x.vm.UID, "resourceVersion": now.ResourceVersion},
			"spec":     map[string]any{"template": map[string]any{"spec": map[string]any{"volumes": spec.Volumes, "domain": map[string]any{"devices": map[string]any{"disks": spec.Domain.Devices.Disks}}}}},
		})
		if err != nil {
			return fmt.Errorf("encode patch of virtualmachine %s/%s: %w", x.Namespace, x.Name, err)
		}
		now = nil
		changed := &v1.VirtualMachine{}
		changed.Namespace, changed.Name = x.Namespace, x.Name
		if err := s.opts.Client.Patch(ctx, changed, client.RawPatch(types.MergePatchType, body), &client.PatchOptions{DryRun: x.dry}); err != nil {
			return fmt.Errorf("patch virtualmachine %s/%s: %w", x.Namespace, x.Name, err)
		}
		return nil
	})
}

// askVolumes changes which volumes the node plugs into the VM of the pod.
func (s *Server) askVolumes(ctx context.Context, x volumes, change func(map[string]string)) error {
	return retried(x.target, func() error {
		var now corev1.Pod
		if err := s.opts.Client.Get(ctx, client.ObjectKeyFromObject(x.pod), &now); err != nil {
			return fmt.Errorf("get pod %s/%s: %w", x.pod.Namespace, x.pod.Name, err)
		}
		asks, err := contract.ParseVolumes(now.Annotations)
		if err != nil || now.UID != x.pod.UID {
			return conflict(x.target, "VMI is not running")
		}
		if asks == nil {
			asks = map[string]string{}
		}
		change(asks)
		var value any // null removes the annotation
		if text := contract.VolumesText(asks); text != "" {
			value = text
		}
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": now.UID, "resourceVersion": now.ResourceVersion, "annotations": map[string]any{contract.KeyVolumes: value}}})
		if err == nil {
			err = s.opts.Client.Patch(ctx, &now, client.RawPatch(types.MergePatchType, body), &client.PatchOptions{DryRun: x.dry})
		}
		if err != nil {
			return fmt.Errorf("patch pod %s/%s: %w", x.pod.Namespace, x.pod.Name, err)
		}
		return nil
	})
}
