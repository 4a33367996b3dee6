package podprovider

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// plugger plugs the volumes of claims into the pod's running VM, and takes them away, as an annotation of the pod says. Another annotation
// names a volume before it is plugged, so that the next process of the node knows what to take away. The record of the VM says what the
// guest has.
type plugger struct {
	base
	retries retryTasks // by volume
	wrong   string     // the announced error in the annotation
}

// flushPatience is how long a volume waits for its name to be written.
const flushPatience = 30 * time.Second

// plugTask is a volume that has to be plugged, or taken away.
type plugTask struct {
	contract.Plugged
	away bool
}

// plugTasks returns what has to be done so that rec has the volumes of the claims in wants, and none of those in plugged beside them. It is
// pure. A volume whose claim changes is taken away first.
func plugTasks(wants map[string]string, plugged []contract.Plugged, rec *vm.Record) (out []plugTask) {
	for _, p := range plugged {
		switch claim, wanted := wants[p.Volume]; {
		case !wanted || claim != p.Claim:
			out = append(out, plugTask{p, true})
		case p.Serial == "" || p.Why != "" || serialOf(rec, p.ID) == "": // attaching again does no harm, and what is said becomes true
			out = append(out, plugTask{Plugged: p})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wants)) {
		if !slices.ContainsFunc(plugged, func(p contract.Plugged) bool { return p.Volume == name }) {
			out = append(out, plugTask{Plugged: contract.Plugged{Volume: name, Claim: wants[name]}})
		}
	}
	return out
}

// serialOf returns the serial number of the disk by which rec has the volume id; "" if it does not have it.
func serialOf(rec *vm.Record, id string) string {
	for _, a := range rec.Attached {
		if id != "" && string(a.ID) == id {
			return a.Serial
		}
	}
	return ""
}

func (p *plugger) tasks(f facts) []plugTask {
	wants, err := contract.ParseVolumes(f.pod.Annotations)
	wrong := ""
	if err != nil {
		wrong = err.Error()
	}
	if wrong != p.wrong {
		if p.wrong = wrong; wrong != "" {
			p.event(corev1.EventTypeWarning, eventPlugFailed, "No volume is plugged or taken away: %s", wrong)
		}
	}
	if err != nil {
		return nil
	}
	return plugTasks(wants, p.plugged, f.rec)
}

// due reports whether the worker has something to do for a volume, and when.
func (p *plugger) due(f facts) (some bool, left time.Duration) {
	var names []string
	for _, t := range p.tasks(f) {
		names = append(names, t.Volume)
	}
	left = p.retries.left(names)
	return len(names) > 0, left
}

// act does the first task that is due.
func (p *plugger) act(ctx context.Context, pod *corev1.Pod, rec *vm.Record) {
	for _, t := range p.tasks(p.look()) {
		if p.retries.of(t.Volume).left() > 0 {
			continue
		}
		op, call := "plug", p.plug
		if t.away {
			op, call = "unplug", p.unplug
		}
		err := call(ctx, pod, rec, t.Plugged)
		if ctx.Err() != nil {
			return
		}
		p.Metrics.done(op, err)
		if err != nil {
			p.failed(t, err)
		}
		p.publish(0)
		return
	}
}

func (p *plugger) plug(ctx context.Context, pod *corev1.Pod, rec *vm.Record, x contract.Plugged) error {
	if slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == x.Volume }) {
		return errdefs.Preconditionf("the pod has a volume of that name")
	}
	use, err := p.volumes.Plug(ctx, pod, x.Claim)
	if err != nil {
		return err
	}
	if x.ID != use.Ref {
		if x.ID != "" { // the claim is another one of that name
			return p.unplug(ctx, pod, rec, x)
		}
		x.ID = use.Ref
		p.note(x)
		p.publish(0)
		limited, cancel := context.WithTimeout(ctx, flushPatience)
		defer cancel()
		if err := p.writer.flush(limited); err != nil {
			return errdefs.Unavailablef("the API server does not take note of it: %w", err)
		}
	}
	got, err := p.vms.AttachVolume(ctx, string(rec.ID), use, "")
	if err != nil {
		return err
	}
	if x.Serial, x.Why = serialOf(&got, x.ID), ""; x.Serial == "" {
		return errdefs.Unavailablef("the record of the VM lacks it")
	}
	p.note(x)
	p.event(corev1.EventTypeNormal, eventPlugged, "Plugged volume %s of claim %s into VM %s, as the disk with the serial number %s", x.Volume, x.Claim, p.vmName, x.Serial)
	p.take(got)
	return nil
}

func (p *plugger) unplug(ctx context.Context, _ *corev1.Pod, rec *vm.Record, x contract.Plugged) error {
	if serialOf(rec, x.ID) != "" {
		got, err := p.vms.DetachVolume(ctx, string(rec.ID), x.ID)
		if err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		if err == nil {
			p.take(got)
		}
		p.event(corev1.EventTypeNormal, eventUnplugged, "Took volume %s of claim %s from VM %s", x.Volume, x.Claim, p.vmName)
	}
	p.plugged = slices.DeleteFunc(slices.Clone(p.plugged), func(o contract.Plugged) bool { return o.Volume == x.Volume })
	return nil
}

// note sets what is said of a volume.
func (p *plugger) note(x contract.Plugged) {
	list := slices.Clone(p.plugged)
	if i := slices.IndexFunc(list, func(o contract.Plugged) bool { return o.Volume == x.Volume }); i >= 0 {
		list[i] = x
	} else {
		list = append(list, x)
	}
	p.plugged = list
}

// failed says why t is not done. It is tried again.
func (p *plugger) failed(t plugTask, err error) {
	what, reason := "plugged into", eventPlugFailed
	if t.away {
		what, reason = "taken from", eventUnplugFailed
	}
	if i := slices.IndexFunc(p.plugged, func(o contract.Plugged) bool { return o.Volume == t.Volume }); i >= 0 {
		t.Plugged = p.plugged[i]
	}
	t.Why = err.Error()
	p.note(t.Plugged)
	if p.retries.of(t.Volume).failed(err) {
		p.event(corev1.EventTypeWarning, reason, "Volume %s of claim %s is not %s VM %s yet: %s", t.Volume, t.Claim, what, p.vmName, err)
		p.log.Warn("volume not plugged or unplugged", "op", fmt.Sprint("volume ", t.Volume), "err", err)
	}
}
