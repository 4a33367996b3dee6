// Package kubevirtstatus keeps the KubeVirt object of a cluster, which says which version of KubeVirt's API is served, and that it is, and makes the CDIConfig
// in which the operator may say where disks are uploaded. virtctl and dashboards read them.
//
// It installs nothing else, and does not touch an object of another KubeVirt.
package kubevirtstatus

import (
	"context"
	"fmt"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	kubevirtv1 "kubevirt.io/api/core/v1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	machines "cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/version"
)

// Name is the name of the object, as of KubeVirt's own installation.
var Name = machines.ConfigName

// Config is the name of the CDIConfig, as of CDI's own installation.
const Config = "config"

const part, whole = "app.kubernetes.io/part-of", "cocoon"

// Reconciler keeps the object. Its field is required.
type Reconciler struct{ Client client.Client }

// Setup adds the reconciler to m.
func (r *Reconciler) Setup(m ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(m).Named("kubevirt-status").For(&kubevirtv1.KubeVirt{}).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			q.Add(reconcile.Request{NamespacedName: Name}) // without the object no event triggers it
			return nil
		})).Complete(r)
}

// ours reports whether k is Cocoon's. Earlier releases of `cocoon up` made it with another label.
func ours(k *kubevirtv1.KubeVirt) bool {
	return k.Labels[part] == whole || k.Labels["app.kubernetes.io/managed-by"] == "cocoon-up"
}

// Reconcile makes the object and writes its status. Its namespace must exist.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	k := &kubevirtv1.KubeVirt{}
	switch err := r.Client.Get(ctx, req.NamespacedName, k); {
	case apierrors.IsNotFound(err) && req.NamespacedName == Name:
		k.ObjectMeta = metav1.ObjectMeta{Namespace: Name.Namespace, Name: Name.Name, Labels: map[string]string{part: whole}}
		if err := r.Client.Create(ctx, k); err != nil && !apierrors.IsAlreadyExists(err) {
			return ctrl.Result{}, fmt.Errorf("create KubeVirt %s: %w", Name, err)
		}
		return ctrl.Result{}, nil // its event comes
	case err != nil:
		return ctrl.Result{}, client.IgnoreNotFound(err)
	case !ours(k):
		log.FromContext(ctx).Info("a KubeVirt that is not Cocoon's is in this cluster; remove one of the two", "object", req.String())
		return ctrl.Result{}, nil
	}
	if err := r.config(ctx); err != nil {
		return ctrl.Result{}, err
	}
	before := k.DeepCopy()
	k.Status.Phase, k.Status.OperatorVersion = kubevirtv1.KubeVirtPhaseDeployed, "cocoon "+version.Version
	k.Status.ObservedKubeVirtVersion, k.Status.TargetKubeVirtVersion = kubevirt.Version, kubevirt.Version
	if apiequality.Semantic.DeepEqual(before.Status, k.Status) {
		return ctrl.Result{}, nil
	}
	if err := client.IgnoreNotFound(r.Client.Status().Patch(ctx, k, client.MergeFrom(before))); err != nil {
		return ctrl.Result{}, fmt.Errorf("write status of KubeVirt %s: %w", req, err)
	}
	return ctrl.Result{}, nil
}

// overhead is what a claim needs beside its content: nothing, because a claim is the disk itself. virtctl makes no claim before it is known.
var overhead = cdi.FilesystemOverhead{Global: "0"}

// config makes the CDIConfig. One that exists keeps what it says.
func (r *Reconciler) config(ctx context.Context) error {
	config := &cdi.CDIConfig{ObjectMeta: metav1.ObjectMeta{Name: Config, Labels: map[string]string{part: whole}}, Status: cdi.CDIConfigStatus{FilesystemOverhead: overhead.DeepCopy()}}
	err := r.Client.Create(ctx, config)
	if apierrors.IsAlreadyExists(err) {
		if err = r.Client.Get(ctx, client.ObjectKeyFromObject(config), config); err == nil && config.Status.FilesystemOverhead == nil {
			before := config.DeepCopy()
			config.Status.FilesystemOverhead = overhead.DeepCopy()
			err = r.Client.Patch(ctx, config, client.MergeFrom(before))
		}
	}
	if err != nil {
		return fmt.Errorf("make CDIConfig %s: %w", Config, err)
	}
	return nil
}
