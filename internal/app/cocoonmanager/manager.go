// Package cocoonmanager is the cocoon-manager binary: the controllers of Cocoon's custom resources.
//
// It only wires them; their behaviour is in internal/kube/controller.
package cocoonmanager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/go-logr/logr"
	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/app/epochclient"
	"cocoonstack.io/cocoon/internal/app/restconfig"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/controller/cocoonset"
	"cocoonstack.io/cocoon/internal/kube/controller/eviction"
	"cocoonstack.io/cocoon/internal/kube/controller/hibernation"
	"cocoonstack.io/cocoon/internal/kube/controller/unplaced"
	"cocoonstack.io/cocoon/internal/kube/controller/vmplacement"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
	"cocoonstack.io/cocoon/internal/kube/servingcert"
	"cocoonstack.io/cocoon/internal/kube/upload"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/version"
)

// leaseName is the lock that makes one manager the leader.
const leaseName = "cocoon-operator.cocoonset.cocoonstack.io"

// Config is the configuration of the manager.
type Config struct {
	Kubeconfig   string // "": the credentials of the pod it runs in
	Namespace    string // of the leader's lease
	LeaderElect  bool
	MetricsAddr  string // HOST:PORT, "0": none
	ProbeAddr    string // of /healthz and /readyz
	Sets         int    // CocoonSets reconciled at a time
	Hibernations int    // CocoonHibernations reconciled at a time
	LogLevel     string
	LogFormat    string
	Epoch        epochclient.Settings
	Webhook      WebhookConfig
	KubeVirt     KubeVirtConfig
}

const help = `cocoon-manager runs the controllers of CocoonSet, CocoonHibernation and VMPlacement, and the admission webhooks of VMs.

Each setting is a flag, an environment variable or a key of the YAML file given by --config.
A flag wins over the variable, and the variable over the file.
Several managers may run at the same time; only one of them acts.
`

// settings are all settings of the manager.
func (c *Config) settings() []settings.Setting {
	e, w, k := &c.Epoch, &c.Webhook, &c.KubeVirt
	return []settings.Setting{
		{Flag: "kubeconfig", Env: "KUBECONFIG", Key: "kubeconfig", Value: settings.Text(&c.Kubeconfig), Usage: "path of the kubeconfig (default: the credentials of the pod)"},
		{Flag: "namespace", Env: "POD_NAMESPACE", Key: "namespace", Default: "cocoon-system", Value: settings.Text(&c.Namespace), Usage: "namespace of the lease; of several managers, the one that holds the lease acts"},
		{Flag: "leader-elect", Env: "LEADER_ELECT", Key: "leaderElect", Default: "true", Value: settings.Bool(&c.LeaderElect), Usage: "act only while holding the lease"},
		{Flag: "metrics-addr", Env: "METRICS_ADDR", Key: "metricsAddr", Default: ":8080", Value: settings.Text(&c.MetricsAddr), Usage: "address of the Prometheus listener; 0: none"},
		{Flag: "probe-addr", Env: "PROBE_ADDR", Key: "probeAddr", Default: ":8081", Value: settings.Text(&c.ProbeAddr), Usage: "address of /healthz and /readyz; 0: none"},
		{Flag: "cocoonset-concurrency", Env: "COCOONSET_CONCURRENCY", Key: "cocoonsetConcurrency", Default: "4", Value: settings.Number(&c.Sets), Usage: "number of CocoonSets that are reconciled at the same time"},
		{Flag: "hibernation-concurrency", Env: "HIBERNATION_CONCURRENCY", Key: "hibernationConcurrency", Default: "4", Value: settings.Number(&c.Hibernations), Usage: "number of CocoonHibernations that are reconciled at the same time"},
		{Flag: "epoch-url", Env: "EPOCH_URL", Key: "epochURL", Value: settings.Text(&e.URL), Usage: "registry of snapshots, e.g. http://epoch.cocoon-system.svc:8080 (default: none, and nothing becomes Suspended or Hibernated)"},
		{Env: "EPOCH_TOKEN", Value: settings.Text(&e.Token), Usage: "bearer token of the registry; it has no flag because every user of the host can read command lines"},
		{Flag: "epoch-token-file", Env: "EPOCH_TOKEN_FILE", Key: "epochTokenFile", Value: settings.Text(&e.TokenFile), Usage: "file with the bearer token of the registry (or set the token itself in $EPOCH_TOKEN)"},
		{Flag: "epoch-ca-cert", Env: "EPOCH_CA_CERT", Key: "epochCACert", Value: settings.Text(&e.CACert), Usage: "PEM file with the certificate authority of the registry"},
		{Flag: "webhook-addr", Env: "LISTEN_ADDR", Key: "webhookAddr", Default: "0", Value: settings.Text(&w.Addr), Usage: "address of the admission webhooks, e.g. :8443; 0: none"},
		{Flag: "webhook-hosts", Env: "WEBHOOK_HOSTS", Key: "webhookHosts", Value: settings.Text(&w.Hosts), Usage: "names and addresses of the webhooks for the API server, separated by commas (default: cocoon-manager.NAMESPACE.svc)"},
		{Flag: "clone-dirs", Env: "CLONE_DIRS", Key: "cloneDirs", Value: settings.Text(&w.CloneDirs), Usage: "folders of the nodes, separated by commas, that clone-from-dir of pods may name; the same as cloneDirs of the nodes (default: none)"},
		{Flag: "tls-cert", Env: "TLS_CERT", Key: "tlsCert", Value: settings.Text(&w.Cert), Usage: "PEM file with the certificate of the webhooks (default: the manager keeps its own certificate in the Secret " + webhookSecret + " of the namespace)"},
		{Flag: "tls-key", Env: "TLS_KEY", Key: "tlsKey", Value: settings.Text(&w.Key), Usage: "PEM file with the key of that certificate"},
		{Flag: "client-ca-file", Env: "CLIENT_CA_FILE", Key: "clientCAFile", Value: settings.Text(&w.ClientCA), Usage: "PEM file with the authorities of client certificates; only clients with such a certificate are answered (default: all clients are answered); give the API server its certificate in the kubeConfigFile of its AdmissionConfiguration"},
		{Flag: "client-allowed-names", Env: "CLIENT_ALLOWED_NAMES", Key: "clientAllowedNames", Value: settings.List(&w.ClientNames), Usage: "allowed common names of client certificates, separated by commas (default: all that the authorities signed)"},
		{Flag: "kubevirt-addr", Env: "KUBEVIRT_ADDR", Key: "kubevirtAddr", Default: "0", Value: settings.Text(&k.Addr), Usage: "address of the API by which virtctl starts and stops VirtualMachines, e.g. :8444; 0: none, and VirtualMachines have no controller"},
		{Flag: "kubevirt-cert", Env: "KUBEVIRT_CERT", Key: "kubevirtCert", Value: settings.Text(&k.Cert), Usage: "PEM file with the certificate of that API (default: that of the webhooks, if the manager keeps it itself)"},
		{Flag: "kubevirt-key", Env: "KUBEVIRT_KEY", Key: "kubevirtKey", Value: settings.Text(&k.Key), Usage: "PEM file with the key of that certificate"},
		{Flag: "log-level", Env: "OPERATOR_LOG_LEVEL", Key: "logLevel", Default: "info", Value: settings.Text(&c.LogLevel), Usage: "debug, info, warn or error"},
		{Flag: "log-format", Env: "OPERATOR_LOG_FORMAT", Key: "logFormat", Default: "text", Value: settings.Text(&c.LogFormat), Usage: "text or json"},
	}
}

// parse reads flags, variables, the file and defaults; the first of these wins.
func parse(args []string, env func(string) string, out io.Writer) (Config, error) {
	var c Config
	if err := settings.New("cocoon-manager", "OPERATOR_CONFIG", c.settings()).Parse(help, args, env, out); err != nil {
		return c, err
	}
	if c.Sets < 1 || c.Hibernations < 1 {
		return c, errdefs.Invalidf("the numbers of CocoonSets and CocoonHibernations that are reconciled at the same time must be at least 1")
	}
	return c, errors.Join(c.Webhook.check(), c.KubeVirt.check(c.Webhook.own()))
}

// Main is the cocoon-manager binary: it runs until ctx ends and returns the exit code, 2 for a bad command line.
func Main(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) int {
	c, err := parse(args, env, stdout)
	if errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	if err == nil {
		err = Run(ctx, c, stderr)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, "cocoon-manager:", err)
	if errdefs.IsInvalid(err) {
		return 2
	}
	return 1
}

// Run runs the controllers until ctx ends.
func Run(ctx context.Context, c Config, stderr io.Writer) error {
	log, err := logging.New(stderr, c.LogLevel, c.LogFormat)
	if err != nil {
		return err
	}
	klog.SetSlogLogger(log.With("component", "client-go"))
	ctrl.SetLogger(logr.FromSlogHandler(log.Handler()))
	base, auth, err := c.Epoch.Read()
	if err != nil {
		return err
	}
	var snapshots controller.Registry
	var uploads upload.Registry
	if base != "" {
		r := registry{base: base, auth: auth}
		snapshots, uploads = r, r
	} else {
		log.Warn("no registry is configured (EPOCH_URL), so nothing becomes Suspended or Hibernated, and nothing can be uploaded")
	}
	rc, err := restconfig.Load(c.Kubeconfig)
	if err != nil {
		return err
	}
	rc.UserAgent = "cocoon-manager/" + version.Version
	rc.QPS, rc.Burst = 200, 400
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1.AddToScheme(scheme), volumesnapshotv1.AddToScheme(scheme), kubevirt.AddToScheme(scheme)); err != nil {
		return fmt.Errorf("create scheme: %w", err)
	}
	m, err := ctrl.NewManager(rc, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: c.MetricsAddr}, HealthProbeBindAddress: c.ProbeAddr,
		LeaderElection: c.LeaderElect, LeaderElectionID: leaseName, LeaderElectionNamespace: c.Namespace, LeaderElectionReleaseOnCancel: true,
		Cache: cache.Options{ByObject: c.cached()}, Client: client.Options{Cache: &client.CacheOptions{Unstructured: true}},
	})
	if err != nil {
		return fmt.Errorf("set up manager: %w", err)
	}
	metrics := newMetrics(ctrlmetrics.Registry)
	sets := &cocoonset.Reconciler{Client: m.GetClient(), Registry: snapshots, Events: m.GetEventRecorder("cocoon-manager"), Now: time.Now, Count: metrics.count}
	hibernations := &hibernation.Reconciler{Client: m.GetClient(), Live: m.GetAPIReader(), Registry: snapshots, Events: m.GetEventRecorder("cocoon-manager"), Now: time.Now, Observe: metrics.observe}
	placements := &vmplacement.Reconciler{Client: m.GetClient(), Registry: snapshots, Events: m.GetEventRecorder("cocoon-manager"), Now: time.Now, Count: metrics.count}
	synced := func(req *http.Request) error {
		ctx, cancel := context.WithTimeout(req.Context(), time.Second)
		defer cancel()
		if !m.GetCache().WaitForCacheSync(ctx) {
			return errdefs.Unavailablef("the objects of the API server are not loaded yet")
		}
		return nil
	}
	evictions := &eviction.Reconciler{Client: m.GetClient()}
	waiting := &unplaced.Reconciler{Reader: m.GetClient(), Events: m.GetEventRecorder("cocoon-manager")}
	if err := errors.Join(sets.Setup(m, c.Sets), hibernations.Setup(m, c.Hibernations), placements.Setup(ctx, m, 1), evictions.Setup(m), waiting.Setup(m),
		c.serve(m, snapshots, uploads, log), m.AddHealthzCheck("ping", healthz.Ping), m.AddReadyzCheck("informers", synced)); err != nil {
		return fmt.Errorf("set up controllers: %w", err)
	}
	return m.Start(ctx)
}

// cached selects the cluster objects that the manager caches.
func (c Config) cached() map[client.Object]cache.ByObject {
	kept := map[client.Object]cache.ByObject{&corev1.Pod{}: {Transform: slim}, &corev1.Node{}: {Transform: slimNode}}
	if c.Webhook.own() { // by name, so that rights to these two objects are enough
		configuration := cache.ByObject{Field: fields.OneTermEqualSelector(metav1.ObjectNameField, webhookConfiguration)}
		kept[&admissionv1.ValidatingWebhookConfiguration{}], kept[&admissionv1.MutatingWebhookConfiguration{}] = configuration, configuration
		kept[&corev1.Secret{}] = cache.ByObject{Namespaces: map[string]cache.Config{c.Namespace: {FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, webhookSecret)}}}
	}
	if c.KubeVirt.own() {
		kept[servingcert.APIService()] = cache.ByObject{Label: labels.SelectorFromSet(labels.Set{"app.kubernetes.io/part-of": "cocoon"})}
	}
	if c.KubeVirt.on() { // only the copies that machines have
		labelled, _ := labels.NewRequirement(machinebase.Label, selection.Exists, nil)
		kept[&appsv1.ControllerRevision{}] = cache.ByObject{Label: labels.NewSelector().Add(*labelled)}
		kept[&corev1.PersistentVolumeClaim{}] = cache.ByObject{Transform: slimClaim}
	}
	return kept
}

// slim drops fields that the manager does not read from the pods in the cache.
func slim(obj any) (any, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		pod.ManagedFields = slices.DeleteFunc(pod.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Operation != metav1.ManagedFieldsOperationApply })
		pod.Spec.Volumes = nil
		if !kubevirt.IsLauncher(pod) { // the others' are not read
			pod.Status.ContainerStatuses = nil
		}
	}
	return obj, nil
}

// slimClaim does the same for claims. Of most nothing is read but their storage class, whether they are of a DataVolume, and whether they ask for an upload.
func slimClaim(obj any) (any, error) {
	if claim, ok := obj.(*corev1.PersistentVolumeClaim); ok {
		claim.ManagedFields = nil
		if _, uploaded := claim.Annotations[contract.KeyUploadTarget]; !uploaded && claim.Labels[kubevirt.LabelClaim] != kubevirt.LabelClaimValue {
			claim.Annotations, claim.Labels, claim.Spec, claim.Status = nil, nil, corev1.PersistentVolumeClaimSpec{StorageClassName: claim.Spec.StorageClassName}, corev1.PersistentVolumeClaimStatus{}
		}
	}
	return obj, nil
}

// slimNode does the same for nodes.
func slimNode(obj any) (any, error) {
	if node, ok := obj.(*corev1.Node); ok {
		node.ManagedFields, node.Status.Images = nil, nil
	}
	return obj, nil
}

type metrics struct {
	rebuilds        prometheus.Counter
	deadLetters     prometheus.Counter
	failures        prometheus.Counter
	released        prometheus.Counter
	hibernate, wake prometheus.Histogram
}

func newMetrics(r prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "cocoon_operator_" + name, Help: help})
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: "cocoon_operator_" + name, Help: help, Buckets: []float64{.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}})
	}
	m := &metrics{
		rebuilds:    counter("subagent_rebuild_total", "Sub-agents that failed and were recreated."),
		deadLetters: counter("subagent_dead_letter_total", "Sub-agents that failed and are not recreated until their set changes."),
		failures:    counter("lifecycle_state_failed_observed_total", "Main VMs that failed."),
		released:    counter("placement_released_total", "Claims of VMs on nodes that were released by their policy."),
		hibernate:   seconds("hibernate_phase_duration_seconds", "Time from the request to hibernate until the registry has the state."),
		wake:        seconds("wake_phase_duration_seconds", "Time from the request to wake until the VM is ready."),
	}
	r.MustRegister(m.rebuilds, m.deadLetters, m.failures, m.released, m.hibernate, m.wake)
	return m
}

// count counts an Event of a set or a claim.
func (m *metrics) count(reason string) {
	switch reason {
	case cocoonset.ReasonRebuilding:
		m.rebuilds.Inc()
	case cocoonset.ReasonDeadLetter:
		m.deadLetters.Inc()
	case cocoonset.ReasonMainFailed:
		m.failures.Inc()
	case vmplacement.ReasonReleased:
		m.released.Inc()
	}
}

func (m *metrics) observe(desire v1.Desire, took time.Duration) {
	if desire == v1.DesireHibernate {
		m.hibernate.Observe(took.Seconds())
	} else {
		m.wake.Observe(took.Seconds())
	}
}
