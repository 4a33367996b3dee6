package podprovider

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// podState is the state that a worker shares with other goroutines. They read it, set requests in it (update, apply,
// requestRemoval) and wake the worker. A removal also interrupts the worker's current call. mu guards the fields below it. No
// other lock is taken while mu is held.
type podState struct {
	subject
	tenant  // access to VMs on behalf of the pod
	writer  *writer
	volumes *podvolumes.Volumes
	wake    chan struct{}
	freed   chan struct{} // closed when the VM is removed
	claimed bool          // of the worker: this process knows that the node claimed the VM's state

	mu sync.Mutex
	facts
	heard     map[vm.ID]vm.Event // events of VMs with the pod's label, before the pod's VM is known
	interrupt context.CancelFunc // cancels the worker's current call
}

// subject identifies the pod and the VM of a worker. It never changes.
type subject struct {
	log    *slog.Logger
	events record.EventRecorder
	key    string
	uid    types.UID
	vmName string
	static bool   // the pod represents a machine that the node does not run; rec is always nil
	leases string // lease file to look up a missing address; "" for none
}

// facts are the state of a pod and its VM at one time. The objects that they point to do not change any more.
type facts struct {
	pod     *corev1.Pod           // as the API server has it, without the status
	status  corev1.PodStatus      // as the worker computed it last
	gates   []corev1.PodCondition // conditions that others set
	rec     *vm.Record            // the pod's VM, as last reported; nil: none (yet)
	lost    bool                  // the engine reports that the VM is gone
	removal *removal              // the requested removal; nil: none
	logins  podstatus.Logins      // of its guest
}

// removal says how to remove the pod. If it is not confirmed, the worker first asks the API server.
type removal struct {
	grace     time.Duration
	confirmed bool
}

// vmKey returns the VM's name in the form that is unique on the node.
func (s *podState) vmKey() string { return s.owner.Qualify(s.vmName) }

// look returns the current facts.
func (s *podState) look() facts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.facts
}

// begin begins a step of the worker and returns the current facts. cancel interrupts the step.
func (s *podState) begin(cancel context.CancelFunc) facts {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.interrupt = cancel
	return s.facts
}

// podAndVM returns the pod, its VM and the VM's address.
func (s *podState) podAndVM() (pod *corev1.Pod, rec *vm.Record, ip string) {
	f := s.look()
	return f.pod, f.rec, s.address(f)
}

// address returns the address of the VM.
func (s *subject) address(f facts) string {
	if s.static && convert.Static(f.pod) { // the creator may have removed the mark, which says that the address is his claim
		return runtimeOf(f.pod).IP
	}
	if f.rec == nil || len(f.rec.NICs) == 0 {
		return ""
	}
	if ip := f.rec.NICs[0].IP; ip != "" {
		return ip
	}
	return leaseIP(s.leases, f.rec.NICs[0].MAC, time.Now())
}

// snapshot returns the pod with its status, for virtual-kubelet and the kubelet API.
func (s *podState) snapshot() *corev1.Pod {
	f := s.look()
	pod := f.pod.DeepCopy()
	f.status.DeepCopyInto(&pod.Status)
	return pod
}

// whyWaiting returns the reason for which the pod's containers do not run yet.
func (f facts) whyWaiting() string {
	if f.status.Reason != "" {
		return f.status.Reason
	}
	for _, c := range f.status.ContainerStatuses {
		if c.State.Waiting != nil {
			return c.State.Waiting.Reason
		}
	}
	return podstatus.ReasonCreating
}

// whyEphemeral returns the reason for which an ephemeral container does not run yet.
func (f facts) whyEphemeral(name string) string {
	for _, c := range f.status.EphemeralContainerStatuses {
		switch {
		case c.Name != name:
		case c.State.Waiting != nil:
			return c.State.Waiting.Reason
		case c.State.Terminated != nil:
			return c.State.Terminated.Message
		}
	}
	return podstatus.ReasonCreating
}

func (s *podState) event(kind, reason, format string, args ...any) {
	s.events.Eventf(s.look().pod, kind, reason, format, args...)
}

// update stores the pod's new state from the API server.
func (s *podState) update(pod *corev1.Pod) {
	s.mu.Lock()
	before := s.facts
	s.pod = bare(pod)
	s.mu.Unlock()
	if len(pod.Spec.EphemeralContainers) > len(before.pod.Spec.EphemeralContainers) && !podstatus.TakesEphemeral(pod, before.rec) {
		s.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "%s", podstatus.NoEphemeral)
	}
	if before.rec != nil && !slices.Equal(imagesOf(pod), imagesOf(before.pod)) {
		s.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "VM %s keeps the image that it was created from; to use another image, delete the pod and create it again", s.vmName)
	}
	s.volumes.Poke() // the pod's labels and annotations may be in volume files
	s.poke()
}

// imagesOf returns the images that pod names.
func imagesOf(pod *corev1.Pod) (images []string) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		images = append(images, c.Image)
	}
	return images
}

// renew stores the new state of a pod that is being deleted, because its annotations still decide about the VM's state.
func (s *podState) renew(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pod = bare(pod)
	s.poke()
}

// noteGates stores the pod's conditions that others set.
func (s *podState) noteGates(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gates = pod.Status.Conditions
	s.poke()
}

// noteLogins stores whether the guest has the logins of its pod. A refusal is told by an Event, once while it repeats.
func (s *podState) noteLogins(err error) {
	now := podstatus.Logins{Known: true}
	if err != nil {
		now.Failure = err.Error()
	}
	s.mu.Lock()
	was := s.logins
	s.logins = now
	s.mu.Unlock()
	if was == now {
		return
	}
	if err != nil {
		s.log.Warn("logins of the guest not set", "err", err)
		s.event(corev1.EventTypeWarning, podstatus.ReasonLoginsFailed, "%s", err)
	}
	s.poke()
}

// show stores the status that the worker has computed.
func (s *podState) show(status corev1.PodStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = status
}

func (s *podState) requestRemoval(r removal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removal != nil && s.removal.grace <= r.grace && (s.removal.confirmed || !r.confirmed) {
		return // a grace period can only become shorter
	}
	s.removal = &r
	if s.interrupt != nil {
		s.interrupt()
	}
	s.poke()
}

// keep withdraws the removal r.
func (s *podState) keep(r removal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removal != nil && *s.removal == r {
		s.removal = nil
	}
}

// replaced records that the pod is gone, because the API server has another pod of its name.
func (s *podState) replaced() {
	s.writer.stop()
	s.requestRemoval(removal{grace: convert.Grace(s.look().pod), confirmed: true})
}

func (s *podState) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// apply records an event of the pod's VM, or of a VM with the pod's label.
func (s *podState) apply(e vm.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec == nil {
		s.heard[e.Record.ID] = e
		return
	}
	s.settle(e)
	s.poke()
}

// settle updates rec from e, unless rec is newer.
func (f *facts) settle(e vm.Event) {
	switch {
	case e.Record.ID != f.rec.ID:
	case e.Type == vm.EventDeleted:
		f.lost = true
	case e.Record.Revision > f.rec.Revision:
		rec := e.Record
		f.rec = &rec
	}
}

// missing records that the Runtime's complete list does not contain the VM.
func (s *podState) missing(id vm.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec != nil && s.rec.ID == id {
		s.lost = true
		s.poke()
	}
}

// take records rec as the pod's VM, or as a newer state of it.
func (s *podState) take(rec vm.Record) *vm.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec == nil || s.rec.ID != rec.ID || rec.Revision >= s.rec.Revision {
		s.rec, s.lost = &rec, false
	}
	if e, ok := s.heard[rec.ID]; ok {
		s.settle(e)
	}
	clear(s.heard)
	return s.rec
}

// forget drops a lost VM without a loss of data, so that the pod gets another VM. The VM never ran: the engine rolls back a
// creation whose caller, such as an earlier process of ours, has ended. Or the VM is hibernated, and its snapshot is also in
// the registry.
func (s *podState) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log.Info("vm lost before it ran, creating another", "vm", s.rec.ID)
	s.rec, s.lost = nil, false
}

// vanish records that the run of rec has ended. It is not known when or how.
func (s *podState) vanish(rec *vm.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := *rec
	end.State, end.ExitCode, end.StoppedAt = vm.StateError, nil, time.Now()
	s.rec = &end
}

// bare returns pod without its status, because the worker keeps a status of its own. It shares the rest with pod, which must
// not change any more.
func bare(pod *corev1.Pod) *corev1.Pod {
	own := *pod
	own.Status = corev1.PodStatus{}
	return &own
}

// leaseIP returns the address leased to mac in the lease file: [{"mac","ip","expiry"}]. If the file is missing, or another
// process is writing it, leaseIP returns "". The next probe reads the file again.
func leaseIP(path, mac string, now time.Time) string {
	if path == "" || mac == "" {
		return ""
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return parseLeases(data, mac, now)
}

func parseLeases(data []byte, mac string, now time.Time) string {
	var leases []struct {
		MAC    string          `json:"mac"`
		IP     string          `json:"ip"`
		Expiry json.RawMessage `json:"expiry"`
	}
	if json.Unmarshal(data, &leases) != nil {
		return ""
	}
	for _, l := range leases {
		if !strings.EqualFold(l.MAC, mac) || expired(l.Expiry, now) {
			continue
		}
		if a, err := netip.ParseAddr(l.IP); err == nil {
			return a.String()
		}
	}
	return ""
}

// expired reports whether a lease has ended. raw is a time in RFC 3339 or in seconds since 1970. Any other value, and 0, means
// that the lease does not end.
func expired(raw json.RawMessage, now time.Time) bool {
	var t time.Time
	if json.Unmarshal(raw, &t) == nil {
		return !t.IsZero() && t.Before(now)
	}
	var seconds int64
	if json.Unmarshal(raw, &seconds) == nil {
		return seconds != 0 && seconds < now.Unix()
	}
	return false
}
