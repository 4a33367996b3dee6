package tenancy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
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
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podprovider"
	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestTenancyMatrix runs every cell: the provider and the engine of a node, its snapshots and a registry, in this process, with
// the webhooks in front and without. Whatever is named, nothing of another namespace's or of the operator's is given away,
// changed, woken or removed, while the pods are there, when the node starts anew and when they are gone.
func TestTenancyMatrix(t *testing.T) {
	for _, front := range []bool{true, false} {
		t.Run("admission "+map[bool]string{true: "on", false: "off"}[front], func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			Build(s, true)
			if front {
				s.webhooks = webhooks(t, s.listed)
			}
			s.matrix()
		})
	}
}

// stage is a Stage in this process.
type stage struct {
	t        *testing.T
	url      string // of the registry
	token    string
	listed   string // folder that namespaces may clone from
	other    string // one that they may not
	node     *fakenode.Node
	machine  *fakenode.Machine
	client   *kube.Clientset
	tracker  clienttesting.ObjectTracker // what client has
	provider *podprovider.Provider
	stop     func()
	uids     atomic.Int64

	webhooks map[string]http.Handler // nil: nobody stands in front of the node
}

func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{t: t, token: "sesame", listed: room(t), other: room(t), tracker: clienttesting.NewObjectTracker(scheme.Scheme, scheme.Codecs.UniversalDecoder()), client: &kube.Clientset{}}
	s.client.AddReactor("*", "*", clienttesting.ObjectReaction(s.tracker)) // NewClientset's knows who wrote what, and is slow
	s.serveRegistry()
	s.node = fakenode.Alone(t, fakenode.Options{Name: NodeName, Dir: room(t), CloneDirs: []string{s.listed}})
	s.machine = s.node.Machine()
	s.start()
	t.Cleanup(func() { s.stop() })
	return s
}

// room is a folder of the test's: in memory where it can be, because much is synced that no power cut will ask for.
func room(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tenancy-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (s *stage) serveRegistry() {
	log := slog.New(slog.DiscardHandler)
	store, err := folder.New(room(s.t))
	s.check(err)
	kept, err := content.New(s.t.Context(), store, content.Config{UploadTTL: time.Hour, Log: log})
	s.check(err)
	tokens, err := access.Open("", s.token, log)
	s.check(err)
	srv := httptest.NewServer(registry.New(registry.Config{}, kept, tokens, prometheus.NewRegistry(), log))
	s.t.Cleanup(srv.Close)
	s.url = srv.URL
}

// start runs a provider; after stop it is that of a node that starts anew.
func (s *stage) start() {
	s.t.Helper()
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("TENANCY_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	var err error
	s.provider, err = podprovider.New(podprovider.Config{
		Node: convert.Node{Name: NodeName, IP: "192.0.2.1"}, Settle: -1,
		Registry:      podprovider.Registry{URL: s.url, Auth: snapshot.Auth{Token: s.token}, Public: strings.Split(PublicRepositories, ",")},
		StaticForward: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
	}, podprovider.Deps{
		Runtime: s.machine, Snapshots: s.machine, Client: s.client, Recorder: record.NewFakeRecorder(1 << 16), Prober: answers{}, Metrics: podprovider.NewMetrics(prometheus.NewRegistry()), Log: log,
		Cached: func(namespace, name string) (*corev1.Pod, error) {
			return s.client.CoreV1().Pods(namespace).Get(context.Background(), name, metav1.GetOptions{})
		},
	})
	s.check(err)
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.provider.Run(ctx, func() { close(ready) })
	}()
	s.stop = func() { cancel(); <-ended }
	<-ready
}

// again has the node start anew: a new process of it, which virtual-kubelet tells of every pod.
func (s *stage) again() {
	s.t.Helper()
	s.stop()
	s.start()
	pods, err := s.client.CoreV1().Pods("").List(s.t.Context(), metav1.ListOptions{})
	s.check(err)
	for i := range pods.Items {
		s.check(s.provider.CreatePod(s.t.Context(), pods.Items[i].DeepCopy()))
	}
}

// answers is a Prober for guests that always answer.
type answers struct{}

func (answers) Probe(context.Context, string, int) error { return nil }

func (s *stage) check(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// patience is how long a pod may take to come to where it has to, on a machine that does much else.
const patience = 4 * time.Minute

// until asks again until there is nothing to say against it.
func (s *stage) until(what string, why func() string) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(5 * time.Millisecond) {
		text := why()
		if text == "" {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s: %s", what, text)
		}
	}
}

// as is a context on behalf of a namespace, or of the operator.
func (s *stage) as(namespace string) context.Context {
	return vm.OnBehalf(s.t.Context(), vm.Owner{Namespace: namespace})
}

func (s *stage) get(namespace, name string) *corev1.Pod {
	s.t.Helper()
	p, err := s.client.CoreV1().Pods(namespace).Get(s.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	s.check(err)
	return p
}

// create makes a pod in the API and tells the node, as virtual-kubelet does.
func (s *stage) create(p *corev1.Pod) {
	s.t.Helper()
	p.UID, p.Generation, p.Spec.NodeName = types.UID(fmt.Sprintf("uid-%d", s.uids.Add(1))), 1, NodeName
	p.Spec.RestartPolicy, p.Status.Phase = corev1.RestartPolicyAlways, corev1.PodPending
	_, err := s.client.CoreV1().Pods(p.Namespace).Create(s.t.Context(), p, metav1.CreateOptions{})
	s.check(err)
	s.check(s.provider.CreatePod(s.t.Context(), p.DeepCopy()))
}

// Pod implements Stage.
func (s *stage) Pod(namespace, name, secret string, annotations map[string]string) {
	s.t.Helper()
	p := (Case{Row: &Row{}}).Pod(fakenode.Image, nil)
	p.Namespace, p.Name, p.Annotations = namespace, name, maps.Clone(annotations)
	p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: secretName, Value: secret}}
	s.create(p)
	s.until(namespace+"/"+name, func() string { return unlike(s.sees(s.get(namespace, name)), GoesOn, "") })
	if annotations[contract.KeyOfferFork] != "" {
		s.until("fork of "+name, func() string {
			_, err := s.machine.TagDigest(s.t.Context(), s.url+"/"+contract.Repository(namespace, contract.VMName(namespace, name))+":fork", snapshot.Auth{Token: s.token})
			return text(err)
		})
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// secretName is the variable in which guests have their secret.
const secretName = "SECRET"

// Hibernate implements Stage.
func (s *stage) Hibernate(namespace, name string) {
	s.t.Helper()
	s.change(namespace, name, func(p *corev1.Pod) { p.Annotations[contract.KeyHibernate] = "true" })
	s.until(namespace+"/"+name, func() string {
		p := s.get(namespace, name)
		if life := p.Annotations[contract.KeyLifecycleState]; life != string(contract.LifecycleHibernated) {
			return "it is " + life + " " + p.Annotations[contract.KeyLifecycleMessage]
		}
		return ""
	})
}

func (s *stage) change(namespace, name string, f func(*corev1.Pod)) {
	s.t.Helper()
	p := s.get(namespace, name)
	f(p)
	p, err := s.client.CoreV1().Pods(namespace).Update(s.t.Context(), p, metav1.UpdateOptions{})
	s.check(err)
	s.check(s.provider.UpdatePod(s.t.Context(), p.DeepCopy()))
}

// Delete implements Stage.
func (s *stage) Delete(namespace, name string) {
	s.t.Helper()
	s.remove(namespace, name)
	s.until(namespace+"/"+name, func() string {
		if s.get(namespace, name) != nil {
			return "it is there still"
		}
		return ""
	})
}

func (s *stage) remove(namespace, name string) {
	s.t.Helper()
	p := s.get(namespace, name)
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(1))
	s.check(s.tracker.Update(corev1.SchemeGroupVersion.WithResource("pods"), p, namespace))
	s.check(s.provider.DeletePod(s.t.Context(), p))
}

// Launch implements Stage.
func (s *stage) Launch(namespace, name, secret string, labels map[string]string, offered ...string) {
	s.t.Helper()
	spec := vm.Spec{Name: name, Image: fakenode.Image, Labels: labels, Offered: offered, NICs: []vm.NICSpec{{}}}
	spec.Process.Env = []vm.EnvVar{{Name: secretName, Value: secret}}
	rec, err := s.machine.Launch(s.as(namespace), spec.Default())
	s.check(err)
	s.until(name, func() string {
		if g := s.node.GuestOf(rec.ID); g == nil || g.Env[secretName] != secret {
			return "its guest is not up"
		}
		if rec, err := s.machine.Inspect(s.t.Context(), string(rec.ID)); err != nil || !rec.AgentReady {
			return "it is not ready"
		}
		return ""
	})
}

// Save implements Stage.
func (s *stage) Save(name, snap string, labels map[string]string, published ...string) {
	s.t.Helper()
	_, err := s.machine.SaveSnapshot(s.t.Context(), name, vm.SaveSpec{Name: snap, Labels: labels})
	s.check(err)
	_, err = s.machine.PublishSnapshot(s.t.Context(), snap, published)
	s.check(err)
}

// Rest implements Stage.
func (s *stage) Rest(name, snap string) {
	s.t.Helper()
	_, err := s.machine.Hibernate(s.t.Context(), name, snap)
	s.check(err)
}

// Push implements Stage.
func (s *stage) Push(namespace, snap, to string) {
	s.t.Helper()
	_, err := s.machine.PushSnapshot(s.as(namespace), snap, s.url+"/"+to, snapshot.Auth{Token: s.token}, nil)
	s.check(err)
}

// Forget implements Stage.
func (s *stage) Forget(snap string) {
	s.t.Helper()
	s.check(s.machine.RemoveSnapshot(s.t.Context(), snap))
}

// Export implements Stage.
func (s *stage) Export(namespace, snap string, listed bool) {
	s.t.Helper()
	dir := s.other
	if listed {
		dir = s.listed
	}
	s.check(s.machine.ExportSnapshotDir(s.t.Context(), vm.Owner{Namespace: namespace}.Qualify(snap), filepath.Join(dir, snap)))
}

// Link implements Stage.
func (s *stage) Link(namespace, snap string) {
	s.t.Helper()
	s.check(os.Symlink(s.folder(namespace, snap), filepath.Join(s.listed, "link-"+snap)))
}

// folder is where the node keeps a snapshot.
func (s *stage) folder(namespace, snap string) string {
	x, err := s.machine.GetSnapshot(s.as(namespace), snap)
	s.check(err)
	h, err := s.machine.Store.Hold(s.t.Context(), x.ID)
	s.check(err)
	defer h.Release()
	return h.Dir()
}

// Object implements Stage.
func (s *stage) Object(namespace, name string) {
	s.t.Helper()
	meta, data := metav1.ObjectMeta{Namespace: namespace, Name: name}, map[string]string{"authorized_keys": "ssh-ed25519 AAAA of " + namespace, "a": "b", "authorized_keys_path": "/a", "authorized_keys_encoding": "plain", "a_path": "/b", "a_encoding": "plain"}
	_, err := s.client.CoreV1().ConfigMaps(namespace).Create(s.t.Context(), &corev1.ConfigMap{ObjectMeta: meta, Data: data}, metav1.CreateOptions{})
	s.check(err)
	secret := &corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{}}
	for k, v := range data {
		secret.Data[k] = []byte(v)
	}
	_, err = s.client.CoreV1().Secrets(namespace).Create(s.t.Context(), secret, metav1.CreateOptions{})
	s.check(err)
}

// find is what the cells ask of the stage.
func (s *stage) find(w Whose, kind, thing string) string {
	s.t.Helper()
	ns := ""
	if w == Own || w == Foreign {
		ns = w.prefix()
	}
	name := w.VM(thing)
	if thing == "found" {
		name = w.prefix() + "-found"
	}
	switch snap := "fork-" + w.VM("db"); kind {
	case "network":
		return "loopback"
	case "snapshot", "shortsnapshot":
		x, err := s.machine.GetSnapshot(s.as(ns), snap)
		s.check(err)
		if kind == "shortsnapshot" {
			return x.ID[:10]
		}
		return x.ID
	case "store":
		return s.folder(ns, snap)
	case "link":
		return filepath.Join(s.listed, "link-"+snap)
	case "dir":
		if w == Operators {
			return filepath.Join(s.other, snap)
		}
		return filepath.Join(s.listed, snap)
	}
	rec, err := s.machine.Inspect(s.as(ns), name)
	s.check(err)
	switch kind {
	case "id":
		return string(rec.ID)
	case "short":
		return string(rec.ID)[:10]
	case "ip":
		return rec.NICs[0].IP
	case "uid":
		return rec.Spec.Labels[contract.VMLabelPodUID]
	}
	s.t.Fatalf("the table asks for %s of %s", kind, thing)
	return ""
}

// seen is what became of a pod.
type seen struct {
	state        State
	secret       string
	reason, says string
	vm           vm.ID
}

func (x seen) String() string {
	return fmt.Sprintf("%s %q %s %q", x.state, x.secret, x.reason, x.says)
}

// sees says what became of p.
func (s *stage) sees(p *corev1.Pod) (x seen) {
	s.t.Helper()
	if p == nil {
		return seen{state: "gone"}
	}
	all, err := s.machine.List(s.as(p.Namespace))
	s.check(err)
	if convert.Static(p) { // which says what it likes
		all = nil
	}
	for _, rec := range all { // the one that the pod says, or that was made for it
		if rec.Spec.Labels[contract.VMLabelPodUID] == string(p.UID) || len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].ContainerID == contract.ContainerIDScheme+string(rec.ID) {
			x.vm = rec.ID
			if g := s.node.GuestOf(rec.ID); g != nil {
				x.secret = g.Env[secretName]
			}
		}
	}
	var c corev1.ContainerState
	if len(p.Status.ContainerStatuses) > 0 {
		c = p.Status.ContainerStatuses[0].State
	}
	ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	switch {
	case p.Status.Phase == corev1.PodFailed:
		x.state, x.reason, x.says = Fails, p.Status.Reason, p.Status.Message
	case p.Annotations[contract.KeyLifecycleState] == string(contract.LifecycleHibernated):
		x.state = Sleeps
	case c.Waiting != nil:
		x.state, x.reason, x.says = Waits, c.Waiting.Reason, c.Waiting.Message
	case convert.Static(p) && c.Running != nil: // that it is ready, its address says, which may be one that nobody asks
		x.state = Stands
	case !ready:
	case x.secret != "":
		x.state = GoesOn
	case x.vm != "":
		x.state = Boots
	}
	return x
}

// unlike says what of x is not as it should be. "" of is any secret.
func unlike(x seen, state State, of string) string {
	if x.state != state || of != "" && x.secret != of {
		return x.String()
	}
	return ""
}

// not says how x is not the outcome.
func (o Outcome) not(x seen) string {
	of := ""
	if o.State == GoesOn {
		of = o.Of.Secret()
	}
	why := unlike(x, o.State, of)
	if why == "" && (o.State == Waits || o.State == Fails) && (x.reason != o.Reason || !strings.Contains(x.says, o.Says)) {
		why = x.String()
	}
	if why == "" && x.vm != "" && (o.State == Waits || o.State == Fails || o.State == Stands) {
		why = "a VM was made"
	}
	return why
}

// matrix runs the cells.
func (s *stage) matrix() {
	s.t.Helper()
	before := s.others()
	var cases []Case
	for _, c := range Cases() {
		pod := c.Pod(fakenode.Image, s.find)
		refusal := s.ask(pod)
		want := c.Cell.Refused
		if s.webhooks == nil {
			want = ""
		}
		switch {
		case want == "" && refusal != "":
			s.t.Errorf("%s: admission refuses it: %s", c, refusal)
		case !strings.Contains(refusal, want), want != "" && refusal == "":
			s.t.Errorf("%s: admission says %q, want %q", c, refusal, want)
		case refusal == "":
			s.create(pod)
			cases = append(cases, c)
		}
	}
	s.settle(cases, false)
	s.closed(cases)
	s.unchanged("while the pods are there", before)
	s.again()
	s.settle(cases, true)
	s.unchanged("when the node has started anew", before)
	for _, c := range cases {
		s.remove(Dev, c.PodName())
	}
	for _, c := range cases {
		s.until(c.String()+" goes", func() string {
			if s.get(Dev, c.PodName()) != nil {
				return "it is there still"
			}
			return ""
		})
	}
	s.unchanged("when the pods are gone", before)
	s.t.Logf("%d cells, %d of them admitted", len(Cases()), len(cases))
}

// settle waits until each case has come to what the table says, and looks once more when all have.
func (s *stage) settle(cases []Case, later bool) {
	s.t.Helper()
	want := func(c Case) Outcome {
		if later && c.Cell.Later != nil {
			return *c.Cell.Later
		}
		return c.Cell.Node
	}
	for range 2 { // what is tried again and again is seen once more when all others have come to their end
		for _, c := range cases {
			s.await(c, want(c))
		}
	}
}

// await waits until the pod of the case has come to its outcome. It must not have anybody's memory on the way there but what the
// outcome says.
func (s *stage) await(c Case, want Outcome) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(5 * time.Millisecond) {
		x := s.sees(s.get(Dev, c.PodName()))
		why := want.not(x)
		switch {
		case why == "":
			return
		case x.secret != "" && (want.State != GoesOn || x.secret != want.Of.Secret()), time.Now().After(deadline):
			s.t.Errorf("%s: it %s; want that it %s", c, why, want)
			return
		}
	}
}

// closed looks at the doors of the kubelet API: into a machine that is not the node's leads none, and to its ports only where the
// operator lists its network.
func (s *stage) closed(cases []Case) {
	s.t.Helper()
	for _, c := range cases {
		if c.Cell.Node.State != Stands {
			continue
		}
		ctx, cancel := context.WithTimeout(s.t.Context(), 50*time.Millisecond)
		for what, err := range map[string]error{
			"exec": second(s.provider.Exec(ctx, Dev, c.PodName(), "c", guest.Exec{Command: []string{"true"}}, guest.Streams{})),
			"logs": s.provider.Logs(ctx, Dev, c.PodName(), "c", guest.LogOptions{}, func(guest.LogEntry) error { return nil }),
		} {
			if !errdefs.IsFailedPrecondition(err) {
				s.t.Errorf("%s: %s: %v", c, what, err)
			}
		}
		err := s.provider.Forward(ctx, Dev, c.PodName(), 22, new(bytes.Buffer))
		if errdefs.IsFailedPrecondition(err) == (c.Whose == Public && strings.Contains(c.Row.Name, "listed")) {
			s.t.Errorf("%s: forward: %v", c, err)
		}
		cancel()
	}
}

func second[T any](_ T, err error) error { return err }

// others is all that there is of others than Dev: VMs with what they remember, snapshots, and the tags of the registry.
func (s *stage) others() map[string]string {
	s.t.Helper()
	out := map[string]string{}
	var takes []string
	for i := range rows {
		takes = append(takes, rows[i].Takes...)
	}
	all, err := s.machine.List(s.t.Context())
	s.check(err)
	for _, r := range all {
		if r.Owner.Namespace == Dev || slices.Contains(takes, r.Spec.Name) {
			continue
		}
		secret := ""
		if g := s.node.GuestOf(r.ID); g != nil {
			secret = g.Env[secretName] + " " + g.BootID
		}
		out["VM "+r.Owner.Qualify(r.Spec.Name)] = fmt.Sprint(r.ID, " ", r.State, " ", r.StartedAt, " ", r.Snapshot, " ", len(r.SnapshotIDs), " ", secret)
	}
	snaps, err := s.machine.ListSnapshots(s.t.Context())
	s.check(err)
	for _, x := range snaps {
		if x.Owner.Namespace != Dev {
			out["snapshot "+x.Owner.Qualify(x.Name)] = fmt.Sprint(x.ID, " ", x.Digest, " ", x.Published)
		}
	}
	var catalog struct{ Repositories []string }
	s.read("/v2/_catalog?n=1000", &catalog)
	for _, repo := range catalog.Repositories {
		if strings.HasPrefix(repo, Dev+"/") {
			continue
		}
		var list struct{ Tags []string }
		s.read("/v2/"+repo+"/tags/list", &list)
		for _, tag := range list.Tags {
			digest, err := s.machine.TagDigest(s.t.Context(), s.url+"/"+repo+":"+tag, snapshot.Auth{Token: s.token})
			s.check(err)
			out["tag "+repo+":"+tag] = digest
		}
	}
	return out
}

// read asks the registry.
func (s *stage) read(path string, into any) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+path, nil)
	s.check(err)
	req.Header.Set("Authorization", "Bearer "+s.token)
	resp, err := http.DefaultClient.Do(req)
	s.check(err)
	defer resp.Body.Close()
	s.check(json.NewDecoder(resp.Body).Decode(into))
}

// unchanged compares what others have with what they had.
func (s *stage) unchanged(when string, before map[string]string) {
	s.t.Helper()
	after := s.others()
	for _, what := range slices.Sorted(maps.Keys(before)) {
		if now, there := after[what]; !there {
			s.t.Errorf("%s: %s is gone", when, what)
		} else if now != before[what] {
			s.t.Errorf("%s: %s was %s and is %s", when, what, before[what], now)
		}
	}
	for what := range after {
		if _, there := before[what]; !there {
			s.t.Errorf("%s: there is %s now", when, what)
		}
	}
}

// ask has the webhooks complete p, and returns why they refuse it; "": they admit it.
func (s *stage) ask(p *corev1.Pod) string {
	s.t.Helper()
	if s.webhooks == nil {
		return ""
	}
	resp := s.review(admission.PathPod, p)
	if !resp.Allowed {
		return resp.Result.Message
	}
	if len(resp.Patch) > 0 {
		s.patch(p, resp.Patch)
	}
	if resp = s.review(admission.PathCheckPod, p); !resp.Allowed {
		return resp.Result.Message
	}
	return ""
}

func (s *stage) review(path string, p *corev1.Pod) *admissionv1.AdmissionResponse {
	s.t.Helper()
	req := &admissionv1.AdmissionRequest{UID: "u", Operation: admissionv1.Create, Namespace: p.Namespace, Name: p.Name}
	req.Object.Object = p
	body, err := json.Marshal(&admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"}, Request: req})
	s.check(err)
	r := httptest.NewRequestWithContext(s.t.Context(), http.MethodPost, "/", bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	s.webhooks[path].ServeHTTP(w, r)
	var review admissionv1.AdmissionReview
	s.check(json.Unmarshal(w.Body.Bytes(), &review))
	return review.Response
}

// patch applies what the webhooks answer: additions and replacements.
func (s *stage) patch(p *corev1.Pod, patch []byte) {
	s.t.Helper()
	var ops []struct {
		Op, Path string
		Value    any
	}
	s.check(json.Unmarshal(patch, &ops))
	data, err := json.Marshal(p)
	s.check(err)
	var doc any
	s.check(json.Unmarshal(data, &doc))
	for _, op := range ops {
		if op.Op != "add" && op.Op != "replace" {
			s.t.Fatalf("the webhooks %s %s", op.Op, op.Path)
		}
		doc = put(doc, strings.Split(op.Path[1:], "/"), op.Op == "add", op.Value)
	}
	data, err = json.Marshal(doc)
	s.check(err)
	*p = corev1.Pod{}
	s.check(json.Unmarshal(data, p))
}

// put is doc with a value at a path.
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

// webhooks are those that stand in front of pods, as the manager serves them.
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

// bareCluster is one with nothing that webhooks look up.
type bareCluster struct {
	client.Client // nil: nothing else is asked
	scheme        *runtime.Scheme
}

func (n bareCluster) Scheme() *runtime.Scheme { return n.scheme }

func (bareCluster) Get(_ context.Context, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}
