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
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/internal/app/epochclient"
	"cocoonstack.io/cocoon/internal/app/restconfig"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/controller/cocoonset"
	"cocoonstack.io/cocoon/internal/kube/controller/eviction"
	"cocoonstack.io/cocoon/internal/kube/controller/hibernation"
	"cocoonstack.io/cocoon/internal/kube/controller/vmplacement"
	"cocoonstack.io/cocoon/internal/logging"
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
}

const help = `cocoon-manager runs the controllers of CocoonSet, CocoonHibernation and VMPlacement, and the admission webhooks of VMs.

Each setting is a flag or the environment variable in its description; the flag counts. EPOCH_TOKEN, the bearer token of the
snapshot registry, is a variable only: a command line is everybody's to read. Several managers may run; one acts.

Usage:
`

// parse reads flags, then environment variables.
func parse(args []string, env func(string) string, out io.Writer) (Config, error) {
	c := Config{Epoch: epochclient.Settings{Token: env("EPOCH_TOKEN")}}
	f := pflag.NewFlagSet("cocoon-manager", pflag.ContinueOnError)
	f.SortFlags = false
	f.SetOutput(out)
	variables := map[string]string{}
	in := func(flag, variable string) {
		variables[flag] = variable
		f.Lookup(flag).Usage += " [$" + variable + "]"
	}
	text := func(p *string, flag, variable, value, usage string) {
		f.StringVar(p, flag, value, usage)
		in(flag, variable)
	}
	text(&c.Kubeconfig, "kubeconfig", "KUBECONFIG", "", "path of the kubeconfig (credentials of the pod otherwise)")
	text(&c.Namespace, "namespace", "POD_NAMESPACE", "cocoon-system", "namespace of the lease by which one of several managers acts")
	f.BoolVar(&c.LeaderElect, "leader-elect", true, "act only while holding the lease")
	in("leader-elect", "LEADER_ELECT")
	text(&c.MetricsAddr, "metrics-addr", "METRICS_ADDR", ":8080", "address of the Prometheus listener, 0 for none")
	text(&c.ProbeAddr, "probe-addr", "PROBE_ADDR", ":8081", "address of /healthz and /readyz, 0 for none")
	f.IntVar(&c.Sets, "cocoonset-concurrency", 4, "CocoonSets that are worked on at a time")
	in("cocoonset-concurrency", "COCOONSET_CONCURRENCY")
	f.IntVar(&c.Hibernations, "hibernation-concurrency", 4, "CocoonHibernations that are worked on at a time")
	in("hibernation-concurrency", "HIBERNATION_CONCURRENCY")
	text(&c.Epoch.URL, "epoch-url", "EPOCH_URL", "", "registry of snapshots, e.g. http://epoch.cocoon-system.svc:8080 (none otherwise: nothing is ever Suspended or Hibernated)")
	text(&c.Epoch.TokenFile, "epoch-token-file", "EPOCH_TOKEN_FILE", "", "file with the registry's bearer token (or the token itself in $EPOCH_TOKEN)")
	text(&c.Epoch.CACert, "epoch-ca-cert", "EPOCH_CA_CERT", "", "PEM file with the registry's certificate authority")
	text(&c.Webhook.Addr, "webhook-addr", "LISTEN_ADDR", "0", "address of the admission webhooks, e.g. :8443, 0 for none")
	text(&c.Webhook.Hosts, "webhook-hosts", "WEBHOOK_HOSTS", "", "names and addresses, separated by commas, by which the API server reaches them (default cocoon-manager.NAMESPACE.svc)")
	text(&c.Webhook.CloneDirs, "clone-dirs", "CLONE_DIRS", "", "folders of the nodes, separated by commas, that pods may be cloned from by clone-from-dir, as the nodes' cloneDirs say (none otherwise)")
	text(&c.Webhook.Cert, "tls-cert", "TLS_CERT", "", "PEM file of their certificate, if somebody else keeps it (otherwise one is kept in the Secret "+webhookSecret+" of the namespace)")
	text(&c.Webhook.Key, "tls-key", "TLS_KEY", "", "PEM file of its key")
	text(&c.Webhook.ClientCA, "client-ca-file", "CLIENT_CA_FILE", "", "PEM file with the authorities of client certificates, without one of which nobody is answered (otherwise everybody is); give the API server its certificate by the kubeConfigFile of its AdmissionConfiguration")
	f.StringSliceVar(&c.Webhook.ClientNames, "client-allowed-names", nil, "common names of the client certificates, separated by commas (default: all that the authorities signed)")
	in("client-allowed-names", "CLIENT_ALLOWED_NAMES")
	text(&c.LogLevel, "log-level", "OPERATOR_LOG_LEVEL", "info", "debug, info, warn or error")
	text(&c.LogFormat, "log-format", "OPERATOR_LOG_FORMAT", "text", "text or json")
	f.Usage = func() { fmt.Fprint(out, help, f.FlagUsages()) }
	for flag, variable := range variables {
		if v := env(variable); v != "" {
			if err := f.Set(flag, v); err != nil {
				return c, errdefs.Invalidf("%s: %w", variable, err)
			}
		}
	}
	switch err := f.Parse(args); {
	case errors.Is(err, pflag.ErrHelp):
		return c, err
	case err != nil:
		return c, errdefs.As(errdefs.InvalidArgument, err)
	case f.NArg() > 0:
		return c, errdefs.Invalidf("cocoon-manager takes no arguments, only flags; %q is one", f.Arg(0))
	case c.Sets < 1 || c.Hibernations < 1:
		return c, errdefs.Invalidf("at least one object must be worked on at a time")
	}
	return c, c.Webhook.check()
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
	if base != "" {
		snapshots = registry{base: base, auth: auth}
	} else {
		log.Warn("no registry is given (EPOCH_URL): nothing will be called Suspended or Hibernated")
	}
	rc, err := restconfig.Load(c.Kubeconfig)
	if err != nil {
		return err
	}
	rc.UserAgent = "cocoon-manager/" + version.Version
	rc.QPS, rc.Burst = 200, 400
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1.AddToScheme(scheme)); err != nil {
		return fmt.Errorf("make scheme: %w", err)
	}
	m, err := ctrl.NewManager(rc, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: c.MetricsAddr}, HealthProbeBindAddress: c.ProbeAddr,
		LeaderElection: c.LeaderElect, LeaderElectionID: leaseName, LeaderElectionNamespace: c.Namespace, LeaderElectionReleaseOnCancel: true,
		Cache: cache.Options{ByObject: c.cached()},
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
			return errdefs.Unavailablef("the API server's objects are not known yet")
		}
		return nil
	}
	evictions := &eviction.Reconciler{Client: m.GetClient()}
	if err := errors.Join(sets.Setup(m, c.Sets), hibernations.Setup(m, c.Hibernations), placements.Setup(ctx, m, 1), evictions.Setup(m),
		c.serveWebhooks(m, snapshots), m.AddHealthzCheck("ping", healthz.Ping), m.AddReadyzCheck("informers", synced)); err != nil {
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
	return kept
}

// slim drops fields that the manager does not read from the pods in the cache.
func slim(obj any) (any, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		pod.ManagedFields = slices.DeleteFunc(pod.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Operation != metav1.ManagedFieldsOperationApply })
		pod.Spec.Volumes, pod.Status.ContainerStatuses = nil, nil
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
		rebuilds:    counter("subagent_rebuild_total", "Sub-agents that failed and were made anew."),
		deadLetters: counter("subagent_dead_letter_total", "Sub-agents that were given up until their set changes."),
		failures:    counter("lifecycle_state_failed_observed_total", "Main VMs that were found failed."),
		released:    counter("placement_released_total", "Claims of VMs on nodes that ended by their policy."),
		hibernate:   seconds("hibernate_phase_duration_seconds", "From the wish to hibernate until the registry has the state."),
		wake:        seconds("wake_phase_duration_seconds", "From the wish to wake until the VM is ready."),
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
