package cocoonmanager

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/aggregated"
	"cocoonstack.io/cocoon/internal/kube/controller/datavolume"
	"cocoonstack.io/cocoon/internal/kube/controller/kubevirtstatus"
	uploadcontroller "cocoonstack.io/cocoon/internal/kube/controller/upload"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachine"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachineclone"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachineinstance"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachineinstancereplicaset"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachinepool"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachinerestore"
	"cocoonstack.io/cocoon/internal/kube/controller/virtualmachinesnapshot"
	"cocoonstack.io/cocoon/internal/kube/snapshotclass"
	"cocoonstack.io/cocoon/internal/kube/upload"
)

// KubeVirtConfig configures the door for KubeVirt's objects.
type KubeVirtConfig struct {
	Addr string // HOST:PORT of the aggregated API, "0": disabled
	Cert string // PEM file; "": the certificate of the webhooks, which the manager keeps
	Key  string
}

func (k KubeVirtConfig) on() bool { return k.Addr != "0" && k.Addr != "" }

// own reports whether the API has the certificate that the manager keeps.
func (k KubeVirtConfig) own() bool { return k.on() && k.Cert == "" }

// check refuses a configuration that cannot work. kept says that the manager keeps a certificate.
func (k KubeVirtConfig) check(kept bool) error {
	if !k.on() {
		return nil
	}
	if _, _, err := net.SplitHostPort(k.Addr); err != nil {
		return errdefs.Invalidf("kubevirt-addr %q must be HOST:PORT, or 0 for none", k.Addr)
	}
	switch {
	case (k.Cert == "") != (k.Key == ""):
		return errdefs.Invalidf("kubevirt-cert and kubevirt-key must be set together")
	case k.Cert == "" && !kept:
		return errdefs.Invalidf("kubevirt-addr needs kubevirt-cert and kubevirt-key, or webhook-addr without tls-cert: then the manager keeps a certificate itself")
	}
	return nil
}

// workers is how many objects of KubeVirt of one kind are reconciled at the same time.
const workers = 8

// serveKubeVirt adds the controllers of KubeVirt's objects to m and, in every replica, the API of virtctl, if they are enabled. own is the
// certificate that m keeps, nil if none. uploads is the registry for disks that are uploaded, nil if there is none.
func (c Config) serveKubeVirt(m ctrl.Manager, own certificate, uploads upload.Registry, log *slog.Logger) error {
	if !c.KubeVirt.on() {
		return nil
	}
	if !c.KubeVirt.own() {
		file, err := certwatcher.New(c.KubeVirt.Cert, c.KubeVirt.Key)
		if err != nil {
			return errdefs.Preconditionf("read the certificate of the API for virtctl: %w", err)
		}
		if err := m.Add(inEveryReplica(file.Start)); err != nil { // reads the files again when they change
			return err
		}
		own = file.GetCertificate
	}
	live, err := client.New(m.GetConfig(), client.Options{Scheme: m.GetScheme()}) // what a person has just written counts
	if err != nil {
		return fmt.Errorf("create client of the API for virtctl: %w", err)
	}
	journal := upload.Journal{Client: live, Object: types.NamespacedName{Namespace: c.Namespace, Name: journalName}}
	api, err := aggregated.New(aggregated.Options{
		Addr: c.KubeVirt.Addr, Certificate: own, Config: m.GetConfig(), Client: live,
		Uploads: upload.New(upload.Options{Client: live, Registry: uploads, Key: uploadKey(own), Journal: journal, Now: time.Now, Log: log.With("component", "uploads")}),
		Metrics: aggregated.NewMetrics(ctrlmetrics.Registry), Log: log.With("component", "virtctl-api"),
	})
	if err != nil {
		return err
	}
	machines := &virtualmachine.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("virtualmachine-controller"), Now: time.Now, Jitter: rand.Float64, Classes: &snapshotclass.Memo{From: m.GetAPIReader(), Now: time.Now}}
	instances := &virtualmachineinstance.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("virtualmachine-controller"), Now: time.Now}
	sets := &virtualmachineinstancereplicaset.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("virtualmachine-controller"), Now: time.Now}
	pools := &virtualmachinepool.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("virtualmachine-controller"), Now: time.Now}
	clones := &virtualmachineclone.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("clone-controller"), Now: time.Now}
	restores := &virtualmachinerestore.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("restore-controller"), Now: time.Now}
	snapshots := &virtualmachinesnapshot.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("snapshot-controller"), Guests: aggregated.NewFreezer(m.GetConfig()), Now: time.Now}
	status := &kubevirtstatus.Reconciler{Client: m.GetClient()}
	volumes := &datavolume.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("datavolume-controller"), Now: time.Now}
	uploaded := &uploadcontroller.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder("upload-controller"), Registry: uploads, Journal: journal}
	return errors.Join(uploaded.Setup(m, workers), status.Setup(m), machines.Setup(m, workers), instances.Setup(m, workers), sets.Setup(m, workers), pools.Setup(m, workers), volumes.Setup(m, workers), snapshots.Setup(m, workers), restores.Setup(m, workers), clones.Setup(m, workers), m.Add(inEveryReplica(api.Start)),
		m.AddReadyzCheck("virtctl-api", func(*http.Request) error { return api.Ready() }))
}
