package cocoonmanager

import (
	"errors"
	"math/rand/v2"
	"net"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachine"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachineinstance"
)

// KubeVirtConfig configures the door for KubeVirt's objects.
type KubeVirtConfig struct {
	Addr string // HOST:PORT of the aggregated API, "0": disabled
	Cert string // PEM file
	Key  string
}

func (k KubeVirtConfig) on() bool { return k.Addr != "0" && k.Addr != "" }

func (k KubeVirtConfig) check() error {
	if !k.on() {
		return nil
	}
	if _, _, err := net.SplitHostPort(k.Addr); err != nil {
		return errdefs.Invalidf("kubevirt-addr %q must be HOST:PORT, or 0 for none", k.Addr)
	}
	if k.Cert == "" || k.Key == "" {
		return errdefs.Invalidf("kubevirt-addr needs kubevirt-cert and kubevirt-key")
	}
	return nil
}

// workers is how many objects of KubeVirt of one kind are reconciled at the same time.
const workers = 8

// serveKubeVirt adds the controllers of KubeVirt's objects to m, if they are enabled.
func (c Config) serveKubeVirt(m ctrl.Manager) error {
	if !c.KubeVirt.on() {
		return nil
	}
	machines := &virtualmachine.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("virtualmachine-controller"), Now: time.Now, Jitter: rand.Float64}
	instances := &virtualmachineinstance.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("virtualmachine-controller"), Now: time.Now}
	return errors.Join(machines.Setup(m, workers), instances.Setup(m, workers))
}
