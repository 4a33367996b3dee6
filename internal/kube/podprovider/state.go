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

// podState is what a worker shares with other goroutines. They read it, leave requests in it (update, apply,
// requestRemoval) and wake the worker. A removal also interrupts the worker's current call. mu guards what is below it; no
// other lock is taken while it is held.
type podState struct {
	subject
	tenant  // access to VMs on behalf of the pod
	writer  *writer
	volumes *podvolumes.Volumes
	wake    chan struct{}
	freed   chan struct{} // closed when the VM is gone for good

	mu sync.Mutex
	facts
	heard     map[vm.ID]vm.Event // events of VMs with our label, before we know which VM is ours
	interrupt context.CancelFunc // cancels the worker's current call
}

// subject is what a worker is about. It never changes.
type subject struct {
	log    *slog.Logger
	events record.EventRecorder
	key    string
	uid    types.UID
	vmName string
	static bool   // the pod stands for a machine that the node does not run; rec is always nil
	leases string // lease file to look up a missing address; "" for none
}

// facts are what is known of a pod and its VM at one time. What they point to does not change any more.
type facts struct {
	pod     *corev1.Pod           // as the API server has it, without the status
	status  corev1.PodStatus      // as we see it
	gates   []corev1.PodCondition // conditions as others set them
	rec     *vm.Record            // our VM as last reported; nil: none (yet)
	lost    bool                  // the engine reports that our VM is gone
	removal *removal              // the requested removal; nil: none
}

// removal says how to remove the pod. An unconfirmed removal is first checked with the API server.
type removal struct {
	grace     time.Duration
	confirmed bool
}

// vmKey returns the VM's name in the form that is unique on the node.
func (s *podState) vmKey() string { return s.owner.Qualify(s.vmName) }

// look returns what is known now.
func (s *podState) look() facts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.facts
}

// begin begins a step of the worker that cancel interrupts, and returns what is known.
func (s *podState) begin(cancel context.CancelFunc) facts {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.interrupt = cancel
	return s.facts
}

// whereabouts returns the pod, its VM and the VM's address.
func (s *podState) whereabouts() (pod *corev1.Pod, rec *vm.Record, ip string) {
	f := s.look()
	return f.pod, f.rec, s.address(f)
}

// address returns the address of the VM.
func (s *subject) address(f facts) string {
	if s.static {
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

// whyWaiting returns why the pod's containers do not run yet.
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

func (s *podState) event(kind, reason, format string, args ...any) {
	s.events.Eventf(s.look().pod, kind, reason, format, args...)
}

// update stores the pod as the API server now has it.
func (s *podState) update(pod *corev1.Pod) {
	s.mu.Lock()
	before := s.facts
	s.pod = bare(pod)
	s.mu.Unlock()
	if len(pod.Spec.EphemeralContainers) > len(before.pod.Spec.EphemeralContainers) {
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

// renew stores the pod when it is being deleted, because its annotations about the VM's state still count.
func (s *podState) renew(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pod = bare(pod)
	s.poke()
}

// noteGates stores the conditions of the pod as others set them.
func (s *podState) noteGates(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gates = pod.Status.Conditions
	s.poke()
}

// show stores the status as the worker now sees it.
func (s *podState) show(status corev1.PodStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = status
}

func (s *podState) requestRemoval(r removal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removal != nil && s.removal.grace <= r.grace && (s.removal.confirmed || !r.confirmed) {
		return // nothing new: a grace can only become shorter
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

// replaced is called when the API server has another pod of our name: our pod is gone.
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

// apply takes an event of a VM that is ours, or that will be ours by its label.
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

// missing is called when the Runtime's complete list does not contain our VM.
func (s *podState) missing(id vm.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec != nil && s.rec.ID == id {
		s.lost = true
		s.poke()
	}
}

// take records rec as our VM, or as a newer state of it.
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

// forget drops a VM that vanished before it ever ran: the engine rolls back a creation when its caller, such as an earlier
// process of ours, goes away. The pod lost nothing and gets another VM. The same applies to a hibernated VM whose snapshot
// is also in the registry.
func (s *podState) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log.Info("vm lost before it ran, creating another", "vm", s.rec.ID)
	s.rec, s.lost = nil, false
}

// vanish records that the run of rec is over. Nobody knows when or how it ended.
func (s *podState) vanish(rec *vm.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := *rec
	end.State, end.ExitCode, end.StoppedAt = vm.StateError, nil, time.Now()
	s.rec = &end
}

// bare returns pod without its status, because the worker keeps its own. Pods that were handed over do not change any
// more.
func bare(pod *corev1.Pod) *corev1.Pod {
	own := *pod
	own.Status = corev1.PodStatus{}
	return &own
}

// leaseIP looks up the address leased to mac in the lease file: [{"mac","ip","expiry"}]. A file that is missing, or that
// another process is writing, yields no address and never an error: the next probe looks again.
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

// expired understands RFC 3339 and seconds since 1970. Anything else, and 0, means that the lease does not end.
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
