package virtualmachine

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// dumping is a machine whose memory somebody asked for, its instance, and the pod of that. A manager may be killed after each write.
type dumping struct {
	t   *testing.T
	vm  *v1.VirtualMachine
	vmi *v1.VirtualMachineInstance
	pod *corev1.Pod
	now time.Time
}

func newDumping(t *testing.T) *dumping {
	return &dumping{t, machine(v1.RunStrategyAlways, func(vm *v1.VirtualMachine) {
		vm.Status.MemoryDumpRequest = &v1.VirtualMachineMemoryDumpRequest{ClaimName: "core", Phase: v1.MemoryDumpAssociating}
	}), in(v1.Running), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "virt-launcher-web"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}, now}
}

// step lets the controllers of the machine and of the instance look once. killed: the machine's does not write its own status.
func (d *dumping) step(killed bool) {
	s := decide(seen{vm: d.vm, template: d.vm.Spec.Template, vmi: d.vmi, now: d.now})
	if s.told != nil {
		d.vmi.Status = *s.told
	}
	if !killed {
		d.vm.Status = s.status
	}
	if d.vmi == nil || d.vmi.IsFinal() {
		return
	}
	d.vmi.Status = kubevirt.Observe(d.vmi, d.pod, d.now)
	if ask, same := kubevirt.DumpRequest(d.vmi, d.pod); !same {
		if delete(d.pod.Annotations, contract.KeyMemoryDump); ask != "" {
			metav1.SetMetaDataAnnotation(&d.pod.ObjectMeta, contract.KeyMemoryDump, ask)
		}
	}
}

// answer lets the node answer what it was asked.
func (d *dumping) answer(why string) contract.MemoryDump {
	d.t.Helper()
	ask, err := contract.ParseMemoryDump(d.pod.Annotations)
	if err != nil || ask.Claim != "core" {
		d.t.Fatalf("the node is asked for %+v, %v", ask, err)
	}
	metav1.SetMetaDataAnnotation(&d.pod.ObjectMeta, contract.KeyMemoryDumped, contract.MemoryDumped{
		Claim: ask.Claim, File: ask.File, Begun: now.Add(time.Second), Ended: now.Add(time.Minute), Why: why,
	}.String())
	return ask
}

// until steps until the request has the phase. It goes through phases alone that between lists.
func (d *dumping) until(phase v1.MemoryDumpPhase, between ...v1.MemoryDumpPhase) *v1.VirtualMachineMemoryDumpRequest {
	d.t.Helper()
	for range 10 {
		r := d.vm.Status.MemoryDumpRequest
		if r != nil && r.Phase == phase {
			return r
		}
		if r == nil || !strings.Contains(strings.Join(texts(between), " ")+" ", string(r.Phase)+" ") {
			d.t.Fatalf("it goes through %+v", r)
		}
		d.step(true)
		d.step(false)
	}
	d.t.Fatalf("it stays %+v", d.vm.Status.MemoryDumpRequest)
	return nil
}

func texts(list []v1.MemoryDumpPhase) (out []string) {
	for _, p := range list {
		out = append(out, string(p))
	}
	return out
}

func (d *dumping) clean() {
	d.t.Helper()
	d.step(false)
	if len(d.vmi.Status.VolumeStatus) > 0 {
		d.t.Errorf("left behind: %+v", d.vmi.Status.VolumeStatus)
	}
}

// A dump goes through KubeVirt's phases, also if the manager is killed between any two writes.
func TestMemoryDump(t *testing.T) {
	d := newDumping(t)
	d.until(v1.MemoryDumpInProgress, v1.MemoryDumpAssociating)
	for range 3 {
		d.step(false)
	}
	if s := d.vmi.Status.VolumeStatus; len(s) != 1 || s[0].Name != "core" || s[0].Phase != v1.MemoryDumpVolumeInProgress || s[0].MemoryDumpVolume.ClaimName != "core" {
		t.Errorf("the instance says %+v", s)
	}
	ask := d.answer("")
	r := d.until(v1.MemoryDumpCompleted, v1.MemoryDumpInProgress, v1.MemoryDumpUnmounting)
	if r.FileName == nil || *r.FileName != ask.File || r.ClaimName != "core" || !r.StartTimestamp.Time.Equal(now.Add(time.Second)) || !r.EndTimestamp.Time.Equal(now.Add(time.Minute)) || r.Message != "" {
		t.Errorf("%+v", r)
	}
	d.clean()

	d.vm.Status.MemoryDumpRequest = &v1.VirtualMachineMemoryDumpRequest{ClaimName: "core", Phase: v1.MemoryDumpAssociating} // again
	d.now = now.Add(time.Hour)
	d.until(v1.MemoryDumpInProgress, v1.MemoryDumpAssociating)
	if next := d.answer("no room"); next.File == ask.File {
		t.Errorf("the second dump is the file %s, too", next.File)
	}
	if r := d.until(v1.MemoryDumpFailed, v1.MemoryDumpInProgress); r.Message != "no room" || r.FileName != nil {
		t.Errorf("%+v", r)
	}
	d.clean()

	d.vm.Status.MemoryDumpRequest = &v1.VirtualMachineMemoryDumpRequest{ClaimName: "core", Phase: v1.MemoryDumpDissociating, Remove: true}
	d.step(false)
	if r := d.vm.Status.MemoryDumpRequest; r != nil {
		t.Errorf("removed: %+v", r)
	}
}

// A dump of a machine that stops fails, and one that is to be removed in the middle is.
func TestMemoryDumpEnds(t *testing.T) {
	for name, stop := range map[string]func(d *dumping){
		"no instance":  func(d *dumping) { d.vmi = nil },
		"final":        func(d *dumping) { d.vmi.Status.Phase = v1.Succeeded },
		"being gone":   func(d *dumping) { d.vmi.DeletionTimestamp = &metav1.Time{Time: now} },
		"another one":  func(d *dumping) { d.vmi = in(v1.Running) },
		"not run here": func(d *dumping) { d.vmi.Status.Phase = v1.Scheduled },
	} {
		for _, phase := range []v1.MemoryDumpPhase{v1.MemoryDumpAssociating, v1.MemoryDumpInProgress} {
			d := newDumping(t)
			if phase == v1.MemoryDumpInProgress {
				d.until(phase, v1.MemoryDumpAssociating)
			}
			stop(d)
			if name == "another one" && phase == v1.MemoryDumpAssociating {
				continue // that one is dumped
			}
			d.vm.Status = decide(seen{vm: d.vm, template: d.vm.Spec.Template, vmi: d.vmi, now: now}).status
			if r := d.vm.Status.MemoryDumpRequest; r.Phase != v1.MemoryDumpFailed || r.Message == "" || r.EndTimestamp == nil {
				t.Errorf("%s, %s: %+v", name, phase, r)
			}
		}
	}
	d := newDumping(t)
	d.until(v1.MemoryDumpInProgress, v1.MemoryDumpAssociating)
	d.vm.Status.MemoryDumpRequest.Remove = true
	d.step(true)
	d.step(false)
	d.step(false)
	if r := d.vm.Status.MemoryDumpRequest; r != nil || len(d.vmi.Status.VolumeStatus) > 0 || d.pod.Annotations[contract.KeyMemoryDump] != "" {
		t.Errorf("removed in the middle: %+v, %+v, the node is asked for %q", r, d.vmi.Status.VolumeStatus, d.pod.Annotations[contract.KeyMemoryDump])
	}
}
