// Package servingcert maintains the serving certificate of admission webhooks and aggregated APIs, and the authority that signs it.
// Both are in a Secret that all replicas share. They are replaced before they expire, without a restart. The package publishes the
// authority to the API server through the webhook configurations and the registrations of the APIs. It serves nothing.
package servingcert

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	applyadmission "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// fieldOwner is the field owner of the CA bundles in webhook configurations and APIServices.
const fieldOwner = "cocoon-webhook-certificates"

// again is the longest delay between two checks of the certificates' age.
const again = time.Hour

// Keeper maintains one serving certificate. Every replica of the program runs a Keeper. The first replica writes the Secret,
// and the others read it. All fields but APIs are required.
type Keeper struct {
	// Client writes directly, and reads from a cache, also unstructured objects. The cache needs only the objects that are named here.
	Client client.Client
	Secret types.NamespacedName
	// Configuration is the name of the ValidatingWebhookConfiguration and of the MutatingWebhookConfiguration.
	Configuration string
	APIs          []string // names of the APIServices that the certificate serves, too
	Hosts         []string // DNS names and addresses of the certificate
	Lives         Lives
	Now           func() time.Time

	current atomic.Pointer[material]
}

// Setup adds the keeper to m, on every replica, leader or not.
func (k *Keeper) Setup(m ctrl.Manager) error {
	one := reconcile.Request{NamespacedName: k.Secret}
	same := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{one} })
	named := func(key types.NamespacedName) builder.Predicates {
		return builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool { return client.ObjectKeyFromObject(o) == key }))
	}
	everyReplica := false
	b := ctrl.NewControllerManagedBy(m).Named("webhook-certificates").
		Watches(&corev1.Secret{}, same, named(k.Secret)).
		Watches(&admissionv1.ValidatingWebhookConfiguration{}, same, named(types.NamespacedName{Name: k.Configuration})).
		Watches(&admissionv1.MutatingWebhookConfiguration{}, same, named(types.NamespacedName{Name: k.Configuration})).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			q.Add(one) // reconcile once at the start, because without the objects no event triggers it
			return nil
		})).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: 1, NeedLeaderElection: &everyReplica})
	if len(k.APIs) > 0 {
		b = b.Watches(APIService(), same, builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool { return slices.Contains(k.APIs, o.GetName()) })))
	}
	return b.Complete(k)
}

// Reconcile updates the Secret and the configurations.
func (k *Keeper) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	secret := &corev1.Secret{}
	err := k.Client.Get(ctx, k.Secret, secret)
	if err != nil && !apierrors.IsNotFound(err) {
		return reconcile.Result{}, fmt.Errorf("get secret %s: %w", k.Secret, err)
	}
	m, changed, err := read(secret.Data).next(k.Now(), k.Hosts, k.Lives)
	if err != nil {
		return reconcile.Result{}, err
	}
	if changed {
		if err := k.write(ctx, secret, m); apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
			return reconcile.Result{RequeueAfter: 100 * time.Millisecond}, nil // another replica has written the Secret
		} else if err != nil {
			return reconcile.Result{}, err
		}
	}
	k.current.Store(&m)
	if err := k.inject(ctx, m.bundle()); err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: min(again, k.Lives.Serving/12, k.Lives.Overlap)}, nil
}

func (k *Keeper) write(ctx context.Context, secret *corev1.Secret, m material) error {
	data, err := m.data()
	if err != nil {
		return err
	}
	secret = secret.DeepCopy()
	secret.Data = data
	if secret.ResourceVersion != "" {
		err = k.Client.Update(ctx, secret)
	} else {
		secret.Namespace, secret.Name, secret.Type = k.Secret.Namespace, k.Secret.Name, corev1.SecretTypeTLS
		err = k.Client.Create(ctx, secret)
	}
	if err != nil {
		return fmt.Errorf("write secret %s: %w", k.Secret, err)
	}
	return nil
}

// inject writes the CA bundle to the webhook configurations. A missing configuration gets the bundle as soon as it exists.
func (k *Keeper) inject(ctx context.Context, bundle []byte) error {
	v, m, err := k.configurations(ctx)
	if err != nil {
		return err
	}
	if v != nil && !trusted(clientsOf(v), bundle) {
		apply := applyadmission.ValidatingWebhookConfiguration(v.Name).WithUID(v.UID).WithResourceVersion(v.ResourceVersion)
		for _, w := range v.Webhooks {
			apply.WithWebhooks(applyadmission.ValidatingWebhook().WithName(w.Name).WithClientConfig(applyadmission.WebhookClientConfig().WithCABundle(bundle...)))
		}
		if err := k.Client.Apply(ctx, apply, client.FieldOwner(fieldOwner), client.ForceOwnership); err != nil {
			return stale(fmt.Errorf("inject authorities into ValidatingWebhookConfiguration %s: %w", v.Name, err))
		}
	}
	if m != nil && !trusted(clientsOfMutating(m), bundle) {
		apply := applyadmission.MutatingWebhookConfiguration(m.Name).WithUID(m.UID).WithResourceVersion(m.ResourceVersion)
		for _, w := range m.Webhooks {
			apply.WithWebhooks(applyadmission.MutatingWebhook().WithName(w.Name).WithClientConfig(applyadmission.WebhookClientConfig().WithCABundle(bundle...)))
		}
		if err := k.Client.Apply(ctx, apply, client.FieldOwner(fieldOwner), client.ForceOwnership); err != nil {
			return stale(fmt.Errorf("inject authorities into MutatingWebhookConfiguration %s: %w", m.Name, err))
		}
	}
	apis, err := k.apis(ctx)
	if err != nil {
		return err
	}
	for _, api := range apis {
		if bytes.Equal(authorities(api), bundle) {
			continue
		}
		apply := APIService()
		apply.SetName(api.GetName())
		apply.SetUID(api.GetUID())
		apply.SetResourceVersion(api.GetResourceVersion())
		if err := unstructured.SetNestedField(apply.Object, base64.StdEncoding.EncodeToString(bundle), "spec", "caBundle"); err != nil {
			return err
		}
		if err := k.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(apply), client.FieldOwner(fieldOwner), client.ForceOwnership); err != nil {
			if err := stale(fmt.Errorf("inject authorities into APIService %s: %w", api.GetName(), err)); err != nil {
				return err
			}
		}
	}
	return nil
}

// stale ignores the error if the object was changed or deleted meanwhile, because that change triggers the next
// reconciliation.
func stale(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// configurations returns the two configurations. A configuration that does not exist is nil.
func (k *Keeper) configurations(ctx context.Context) (*admissionv1.ValidatingWebhookConfiguration, *admissionv1.MutatingWebhookConfiguration, error) {
	v, m := &admissionv1.ValidatingWebhookConfiguration{}, &admissionv1.MutatingWebhookConfiguration{}
	key := types.NamespacedName{Name: k.Configuration}
	switch err := k.Client.Get(ctx, key, v); {
	case apierrors.IsNotFound(err):
		v = nil
	case err != nil:
		return nil, nil, fmt.Errorf("get ValidatingWebhookConfiguration %s: %w", k.Configuration, err)
	}
	switch err := k.Client.Get(ctx, key, m); {
	case apierrors.IsNotFound(err):
		m = nil
	case err != nil:
		return nil, nil, fmt.Errorf("get MutatingWebhookConfiguration %s: %w", k.Configuration, err)
	}
	return v, m, nil
}

// APIService returns an empty registration of an API (apiregistration.k8s.io/v1).
func APIService() *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiregistration.k8s.io", Version: "v1", Kind: "APIService"})
	return u
}

// apis returns the registrations that exist and are in the cache.
func (k *Keeper) apis(ctx context.Context) (all []*unstructured.Unstructured, err error) {
	for _, name := range k.APIs {
		api := APIService()
		switch err := k.Client.Get(ctx, types.NamespacedName{Name: name}, api); {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, fmt.Errorf("get APIService %s: %w", name, err)
		default:
			all = append(all, api)
		}
	}
	return all, nil
}

// authorities returns the authorities that the API server trusts for api.
func authorities(api *unstructured.Unstructured) []byte {
	text, _, _ := unstructured.NestedString(api.Object, "spec", "caBundle")
	bundle, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil
	}
	return bundle
}

func clientsOf(v *admissionv1.ValidatingWebhookConfiguration) (all []admissionv1.WebhookClientConfig) {
	for _, w := range v.Webhooks {
		all = append(all, w.ClientConfig)
	}
	return all
}

func clientsOfMutating(m *admissionv1.MutatingWebhookConfiguration) (all []admissionv1.WebhookClientConfig) {
	for _, w := range m.Webhooks {
		all = append(all, w.ClientConfig)
	}
	return all
}

func trusted(clients []admissionv1.WebhookClientConfig, bundle []byte) bool {
	for _, c := range clients {
		if !apiequality.Semantic.DeepEqual(c.CABundle, bundle) {
			return false
		}
	}
	return true
}

// Certificate returns the serving certificate, for tls.Config.GetCertificate. Errors: Unavailable before it exists.
func (k *Keeper) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	m := k.current.Load()
	if m == nil {
		return nil, errdefs.Unavailablef("the serving certificate does not exist yet")
	}
	return m.serving, nil
}

// Check is a readiness check. It fails unless the certificate exists and the API server's configurations trust it.
func (k *Keeper) Check(req *http.Request) error {
	m := k.current.Load()
	if m == nil {
		return errdefs.Unavailablef("the serving certificate does not exist yet")
	}
	v, mut, err := k.configurations(req.Context())
	switch {
	case err != nil:
		return err
	case v == nil || mut == nil:
		return errdefs.Preconditionf("the webhook configurations %s are not installed, so the API server does not call this webhook; apply the manifests of cocoon-manager", k.Configuration)
	case !trusted(append(clientsOf(v), clientsOfMutating(mut)...), m.bundle()):
		return errdefs.Unavailablef("the webhook configurations %s do not trust the certificate yet", k.Configuration)
	}
	apis, err := k.apis(req.Context())
	switch {
	case err != nil:
		return err
	case len(apis) < len(k.APIs):
		return errdefs.Preconditionf("not all of the APIServices %s of Cocoon are installed, so virtctl does not reach this API; apply deploy/kubevirt", strings.Join(k.APIs, ", "))
	}
	for _, api := range apis {
		if !bytes.Equal(authorities(api), m.bundle()) {
			return errdefs.Unavailablef("the APIService %s does not trust the certificate yet", api.GetName())
		}
	}
	return nil
}
