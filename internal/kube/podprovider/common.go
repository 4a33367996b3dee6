package podprovider

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/vm"
)

// common holds what the provider and all its workers use. After Run has begun, only fields with a lock of their own change.
type common struct {
	cfg        Config
	Deps                // without Runtime and Snapshots
	node       operator // access to Runtime and Snapshots for the operator; pods have access through a tenant
	index      *index
	deletions  deletionLog
	keeper     keeper
	pace       *rate.Limiter // rate limit of the status writes that may be delayed
	objects    *podvolumes.Objects
	probes     *probing.Scheduler
	background func(func(context.Context)) context.CancelFunc // runs work that lasts at most as long as Run; nil before Run
}

// remote reports whether the node has a registry.
func (c *common) remote() bool { return c.node.snapshots.Remote() }

func (c *common) newHealth(s *podState) *podhealth.Health {
	return podhealth.New(podhealth.Config{
		Prober: c.Prober, Scheduler: c.probes, Static: s.static,
		Measured: func(d time.Duration) { c.Metrics.probe.Observe(d.Seconds()) }, Count: c.Metrics.probed,
	}, podhealth.Owner{
		Look: s.podAndVM,
		Exec: s.guests.Exec, Ping: s.ping, Kill: s.containers.KillContainer, Release: s.containers.ReleaseContainer,
		Poke: s.poke, Event: s.event, Log: s.log, Spawn: c.background,
	})
}

func (c *common) newVolumes(s *podState) *podvolumes.Volumes {
	return podvolumes.New(c.objects, c.cfg.Node, podvolumes.Owner{
		Pod:    func() *corev1.Pod { return s.look().pod },
		Update: s.containers.UpdateVolume,
		Count:  func(err error) { c.Metrics.done("volume", err) },
		Complain: func(id vm.ID, err error) {
			s.log.Warn("volumes of vm not updated", "vm", id, "err", err)
			s.event(corev1.EventTypeWarning, eventFailedMount, "%s", err)
		},
		SetLogins: s.setLogins, LoginsSet: s.noteLogins,
	})
}

// on returns the tenant for o. Precondition: o is not the operator.
func (c *common) on(o vm.Owner) tenant {
	r := c.node.runtime
	return tenant{owner: o, vms: ownMachines{r, o}, guests: ownGuests{r, o}, containers: ownContainers{r, o}, puller: ownPuller{r, o}}
}

func newPodState(c *common, pod *corev1.Pod, rec *vm.Record) *podState {
	key := pod.Namespace + "/" + pod.Name
	log := c.Log.With("pod", key)
	s := &podState{
		subject: subject{
			log: log, events: c.Recorder, key: key, uid: pod.UID, vmName: nameOf(pod, rec), static: rec == nil && convert.Static(pod),
			leases: c.cfg.LeasesPath,
		},
		tenant: c.on(ownerOf(pod)),
		writer: newWriter(c.Client.CoreV1().Pods(pod.Namespace), pod, c.pace, log),
		wake:   make(chan struct{}, 1), freed: make(chan struct{}),
		facts: facts{pod: bare(pod), status: pod.Status, gates: pod.Status.Conditions, rec: rec},
		heard: map[vm.ID]vm.Event{},
	}
	s.writer.spawn = func() { c.background(s.writer.run) }
	s.volumes = c.newVolumes(s)
	return s
}

// nameOf returns the name of pod's VM. If rec exists, that is the name in rec, because a VM of an earlier release keeps its
// name.
func nameOf(pod *corev1.Pod, rec *vm.Record) string {
	if rec != nil {
		return rec.Spec.Name
	}
	return convert.VMName(pod)
}

// policed reports whether the VM of a new pod is closed until its network policies are set.
func (c *common) policed() (bool, error) {
	if c.Policed == nil {
		return false, nil
	}
	return c.Policed()
}
