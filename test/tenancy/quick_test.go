package tenancy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1oci "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	kube "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/image/pull"
	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podprovider"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestTenancyMatrix runs every cell in this process: the provider and the engine of a node, its snapshots and a registry, with
// and without the webhooks. Whatever a pod names, nothing of another namespace or of the operator is given away, changed,
// woken or removed: while the pods exist, after a restart of the node, and after the pods are deleted.
func TestTenancyMatrix(t *testing.T) {
	for _, front := range []bool{true, false} {
		t.Run("admission "+map[bool]string{true: "on", false: "off"}[front], func(t *testing.T) {
			t.Parallel()
			p := newProcess(t)
			Build(p, true)
			if p.front = front; front {
				p.webhooks = webhooks(t, p.listed)
			}
			p.matrix(Cases())
		})
	}
}

// process is a world inside this process, and its stage.
type process struct {
	*stage
	node     *fakenode.Node
	client   *kube.Clientset
	tracker  clienttesting.ObjectTracker // the objects of client
	provider *podprovider.Provider
	stop     func()
	uids     atomic.Int64
	webhooks map[string]http.Handler // nil: no webhooks in front of the node
}

func newProcess(t *testing.T) *process {
	t.Helper()
	p := &process{client: &kube.Clientset{}, tracker: clienttesting.NewObjectTracker(scheme.Scheme, scheme.Codecs.UniversalDecoder())}
	p.client.AddReactor("*", "*", clienttesting.ObjectReaction(p.tracker)) // NewClientset's also tracks field owners, which is slow
	dir := room(t)
	p.stage = &stage{
		t: t, world: p, client: p.client, token: "sesame", listed: room(t), other: room(t), kept: filepath.Join(dir, "state", "snapshots"),
		image: fakenode.Image, network: "loopback", pace: 5 * time.Millisecond, hub: newHub(t, small(t)), images: map[Whose]image.Image{},
	}
	p.serveRegistry()
	p.node = fakenode.Alone(t, fakenode.Options{Name: NodeName, Dir: dir, CloneDirs: []string{p.listed}, Images: p.pulled})
	p.machine = p.node.Machine()
	p.start()
	t.Cleanup(func() { p.stop() })
	return p
}

// room is a folder of the test, in memory if possible: many files are synced, which a test does not need.
func room(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tenancy-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (p *process) serveRegistry() {
	log := slog.New(slog.DiscardHandler)
	store, err := folder.New(room(p.t))
	p.check(err)
	kept, err := content.New(p.t.Context(), store, content.Config{UploadTTL: time.Hour, Log: log})
	p.check(err)
	tokens, err := access.Open("", p.token, log)
	p.check(err)
	srv := httptest.NewServer(registry.New(registry.Config{}, kept, tokens, prometheus.NewRegistry(), log))
	p.t.Cleanup(srv.Close)
	p.url = srv.URL
}

// start runs a provider. After stop, it acts as the provider of a restarted node.
func (p *process) start() {
	p.t.Helper()
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("TENANCY_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	var err error
	p.provider, err = podprovider.New(podprovider.Config{
		Node: convert.Node{Name: NodeName, IP: "192.0.2.1"}, Settle: -1,
		Registry:      podsnapshots.Registry{URL: p.url, Auth: snapshot.Auth{Token: p.token}, Public: strings.Split(PublicRepositories, ",")},
		StaticForward: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
	}, podprovider.Deps{
		Runtime: p.machine, Snapshots: p.machine, Client: p.client, Recorder: record.NewFakeRecorder(1 << 16), Prober: answers{}, Metrics: podprovider.NewMetrics(prometheus.NewRegistry()), Log: log,
		Cached: func(namespace, name string) (*corev1.Pod, error) {
			return p.client.CoreV1().Pods(namespace).Get(context.Background(), name, metav1.GetOptions{})
		},
	})
	p.check(err)
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.provider.Run(ctx, func() { close(ready) })
	}()
	p.stop = func() { cancel(); <-ended }
	<-ready
}

// again restarts the node: it starts a new provider and passes it every pod, as virtual-kubelet does.
func (p *process) again() {
	p.t.Helper()
	p.stop()
	p.start()
	pods, err := p.client.CoreV1().Pods("").List(p.t.Context(), metav1.ListOptions{})
	p.check(err)
	for i := range pods.Items {
		p.check(p.provider.CreatePod(p.t.Context(), pods.Items[i].DeepCopy()))
	}
}

// answers is a Prober for guests that always answer.
type answers struct{}

func (answers) Probe(context.Context, string, int) error { return nil }

// small is an image that could run; no test runs it.
func small(t *testing.T) v1oci.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layer(t, "bin/app"))
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Config = "linux", "amd64", v1oci.Config{Entrypoint: []string{"/bin/app"}}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}

// pulled adds a real image store, and a real puller from the hub, to the node's own images.
func (p *process) pulled(own image.Store, pulls image.Puller) (image.Store, image.Puller) {
	store, err := local.New(local.Config{Dir: filepath.Join(room(p.t), "images")})
	p.check(err)
	p.check(store.Open(p.t.Context()))
	open, err := (reach.Policy{}).Open([]string{"127.0.0.0/8"})
	p.check(err)
	puller, err := pull.New(pull.Config{Protocol: "http", Reach: pull.Reach{URLs: open, Registries: open}}, store)
	p.check(err)
	both := twoStores{Store: own, Puller: pulls, real: store, puller: puller}
	return both, both
}

// twoStores combines the node's own images, by name, and those of a real store, by name and id.
type twoStores struct {
	image.Store
	image.Puller
	real   *local.Store
	puller *pull.Puller
}

var realID = regexp.MustCompile(`^(sha256:)?[0-9a-f]{12,64}$`)

func (s twoStores) isReal(ref string) bool {
	return strings.Contains(ref, "/app") || realID.MatchString(ref)
}

func (s twoStores) Get(ctx context.Context, ref string) (image.Image, error) {
	if s.isReal(ref) {
		return s.puller.Get(ctx, ref)
	}
	return s.Store.Get(ctx, ref)
}

func (s twoStores) Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	if s.isReal(r.Name) {
		return s.puller.Pull(ctx, r, progress)
	}
	return s.Puller.Pull(ctx, r, progress)
}

func (s twoStores) Prepare(ctx context.Context, img image.Image, l image.Layout) (image.Rootfs, error) {
	if s.isReal(img.ID) {
		return s.real.Prepare(ctx, img, l)
	}
	return s.Store.Prepare(ctx, img, l)
}

func (s twoStores) Base(ctx context.Context, img image.Image) ([]vm.Disk, error) {
	if s.isReal(img.ID) {
		return s.real.Base(ctx, img)
	}
	return s.Store.Base(ctx, img)
}

func (s twoStores) OpenFile(ctx context.Context, img image.Image, path string) (*image.File, error) {
	return s.real.OpenFile(ctx, img, path)
}

// remembers implements world.
func (p *process) remembers(rec vm.Record) (secret, boot string) {
	g := p.node.GuestOf(rec.ID)
	if g == nil {
		return "", ""
	}
	return g.Env[secretName], g.BootID
}

// create implements world: it creates a pod in the API and notifies the node, as virtual-kubelet does.
func (p *process) create(pod *corev1.Pod) {
	p.t.Helper()
	pod.UID, pod.Generation, pod.Spec.NodeName = types.UID(fmt.Sprintf("uid-%d", p.uids.Add(1))), 1, NodeName
	pod.Spec.RestartPolicy, pod.Status.Phase = corev1.RestartPolicyAlways, corev1.PodPending
	_, err := p.client.CoreV1().Pods(pod.Namespace).Create(p.t.Context(), pod, metav1.CreateOptions{})
	p.check(err)
	p.check(p.provider.CreatePod(p.t.Context(), pod.DeepCopy()))
}

// change implements world.
func (p *process) change(namespace, name string, f func(*corev1.Pod)) {
	p.t.Helper()
	pod := p.get(namespace, name)
	f(pod)
	pod, err := p.client.CoreV1().Pods(namespace).Update(p.t.Context(), pod, metav1.UpdateOptions{})
	p.check(err)
	p.check(p.provider.UpdatePod(p.t.Context(), pod.DeepCopy()))
}

// remove implements world.
func (p *process) remove(namespace, name string) {
	p.t.Helper()
	pod := p.get(namespace, name)
	pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(1))
	p.check(p.tracker.Update(corev1.SchemeGroupVersion.WithResource("pods"), pod, namespace))
	p.check(p.provider.DeletePod(p.t.Context(), pod))
}

// closed implements world: a machine that is not the node's has no exec and no logs, and its ports are reachable only if the
// operator lists its network.
func (p *process) closed(cases []Case) {
	p.t.Helper()
	for _, c := range cases {
		if c.Cell.Node.State != Stands {
			continue
		}
		ctx, cancel := context.WithTimeout(p.t.Context(), 50*time.Millisecond)
		for what, err := range map[string]error{
			"exec": second(p.provider.Exec(ctx, Dev, c.PodName(), "c", guest.Exec{Command: []string{"true"}}, guest.Streams{})),
			"logs": p.provider.Logs(ctx, Dev, c.PodName(), "c", guest.LogOptions{}, func(guest.LogEntry) error { return nil }),
		} {
			if !errdefs.IsFailedPrecondition(err) {
				p.t.Errorf("%s: %s: %v", c, what, err)
			}
		}
		err := p.provider.Forward(ctx, Dev, c.PodName(), 22, new(bytes.Buffer))
		if errdefs.IsFailedPrecondition(err) == (c.Whose == Public && strings.Contains(c.Row.Name, "listed")) {
			p.t.Errorf("%s: forward: %v", c, err)
		}
		cancel()
	}
}

func second[T any](_ T, err error) error { return err }

// author implements world: the webhooks complete and validate the pod.
func (p *process) author(pod *corev1.Pod) (why string) {
	p.t.Helper()
	if p.webhooks == nil {
		p.create(pod)
		return ""
	}
	resp := p.review(admission.PathPod, pod)
	if !resp.Allowed {
		return resp.Result.Message
	}
	if len(resp.Patch) > 0 {
		p.patch(pod, resp.Patch)
	}
	if resp = p.review(admission.PathCheckPod, pod); !resp.Allowed {
		return resp.Result.Message
	}
	p.create(pod)
	return ""
}

func (p *process) review(path string, pod *corev1.Pod) *admissionv1.AdmissionResponse {
	p.t.Helper()
	req := &admissionv1.AdmissionRequest{UID: "u", Operation: admissionv1.Create, Namespace: pod.Namespace, Name: pod.Name}
	req.Object.Object = pod
	body, err := json.Marshal(&admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"}, Request: req})
	p.check(err)
	r := httptest.NewRequestWithContext(p.t.Context(), http.MethodPost, "/", bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	p.webhooks[path].ServeHTTP(w, r)
	var review admissionv1.AdmissionReview
	p.check(json.Unmarshal(w.Body.Bytes(), &review))
	return review.Response
}

// patch applies the patch of a webhook: additions and replacements.
func (p *process) patch(pod *corev1.Pod, patch []byte) {
	p.t.Helper()
	var ops []struct {
		Op, Path string
		Value    any
	}
	p.check(json.Unmarshal(patch, &ops))
	data, err := json.Marshal(pod)
	p.check(err)
	var doc any
	p.check(json.Unmarshal(data, &doc))
	for _, op := range ops {
		if op.Op != "add" && op.Op != "replace" {
			p.t.Fatalf("the webhooks %s %s", op.Op, op.Path)
		}
		doc = put(doc, strings.Split(op.Path[1:], "/"), op.Op == "add", op.Value)
	}
	data, err = json.Marshal(doc)
	p.check(err)
	*pod = corev1.Pod{}
	p.check(json.Unmarshal(data, pod))
}

// put returns doc with value set at path.
func put(doc any, path []string, add bool, value any) any {
	if len(path) == 0 {
		return value
	}
	key := strings.NewReplacer("~1", "/", "~0", "~").Replace(path[0])
	switch d := doc.(type) {
	case map[string]any:
		d[key] = put(d[key], path[1:], add, value)
		return d
	case []any:
		at, err := strconv.Atoi(key)
		if err != nil {
			at = len(d)
		}
		if add && len(path) == 1 {
			return slices.Insert(d, at, value)
		}
		d[at] = put(d[at], path[1:], add, value)
		return d
	}
	return map[string]any{key: put(nil, path[1:], add, value)}
}

// webhooks returns the webhooks for pods, as the manager serves them.
func webhooks(t *testing.T, listed string) map[string]http.Handler {
	t.Helper()
	ctrllog.SetLogger(logr.Discard())
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), v1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	at := served{at: map[string]http.Handler{}}
	(&admission.Webhooks{Client: bareCluster{scheme: s}, Live: bareCluster{scheme: s}, CloneDirs: []string{listed}, Metrics: admission.NewMetrics(prometheus.NewRegistry())}).Register(at)
	return at.at
}

type served struct {
	webhook.Server // nil: only Register is called
	at             map[string]http.Handler
}

func (s served) Register(path string, h http.Handler) { s.at[path] = h }

// bareCluster is a cluster without the objects that webhooks look up.
type bareCluster struct {
	client.Client // nil: no other method is called
	scheme        *runtime.Scheme
}

func (n bareCluster) Scheme() *runtime.Scheme { return n.scheme }

func (bareCluster) Get(_ context.Context, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}
