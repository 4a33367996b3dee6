package imagemapping

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/internal/image"
)

// node receives mappings; the test sets its answer.
type node struct {
	calls    chan []image.Mapping
	mu       sync.Mutex
	problems []image.MappingProblem
	err      error
}

func (n *node) SyncMappings(ctx context.Context, source string, mappings []image.Mapping) ([]image.MappingProblem, error) {
	if source != Source {
		return nil, fmt.Errorf("source %q", source)
	}
	select {
	case n.calls <- mappings:
	case <-ctx.Done():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.problems, n.err
}

func (n *node) say(err error, problems ...image.MappingProblem) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err, n.problems = err, problems
}

// next returns the mappings of the next sync, as "name: yaml" lines.
func (n *node) next(t *testing.T) string {
	t.Helper()
	select {
	case ms := <-n.calls:
		var out []string
		for _, m := range ms {
			out = append(out, m.Name+": "+strings.ReplaceAll(strings.TrimSpace(string(m.YAML)), "\n", "|"))
		}
		return strings.Join(out, "\n")
	case <-t.Context().Done():
	}
	t.Fatal("no sync")
	return ""
}

// until waits for the sync that equals want.
func (n *node) until(t *testing.T, want string) {
	t.Helper()
	for got := ""; got != want; got = n.next(t) {
		t.Logf("synced: %q", got)
	}
}

func mapping(namespace, name string, generation int64, spec map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{}}
	if spec != nil {
		o.Object["spec"] = spec
	}
	o.SetAPIVersion("virtlet.k8s/v1")
	o.SetKind("VirtletImageMapping")
	o.SetNamespace(namespace)
	o.SetName(name)
	o.SetGeneration(generation)
	return o
}

type cluster struct {
	*fake.FakeDynamicClient
	statuses chan map[string]any
	watched  chan struct{} // closed when the watch has started; the fake client does not replay earlier changes
}

func newCluster(objects ...runtime.Object) *cluster {
	c := &cluster{
		FakeDynamicClient: fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{Resource: "VirtletImageMappingList"}, objects...),
		statuses:          make(chan map[string]any, 100),
		watched:           make(chan struct{}),
	}
	var once sync.Once
	c.PrependWatchReactor(Resource.Resource, func(a clienttesting.Action) (bool, watch.Interface, error) {
		w, err := c.Tracker().Watch(a.GetResource(), a.GetNamespace())
		once.Do(func() { close(c.watched) })
		return true, w, err
	})
	// The fake client lets a stale status overwrite the spec. Tests wait for the statuses before they continue.
	c.PrependReactor("update", Resource.Resource, func(a clienttesting.Action) (bool, runtime.Object, error) {
		u, isUpdate := a.(clienttesting.UpdateAction)
		if !isUpdate || a.GetSubresource() != "status" {
			return false, nil, nil
		}
		o, ok := u.GetObject().(*unstructured.Unstructured)
		if !ok {
			return true, nil, fmt.Errorf("status of a %T", u.GetObject())
		}
		err := c.Tracker().Update(Resource, o, Namespace)
		status, _, _ := unstructured.NestedMap(o.Object, "status")
		c.statuses <- status
		return true, o, err
	})
	return c
}

func (c *cluster) objects() interface {
	Create(context.Context, *unstructured.Unstructured, metav1.CreateOptions, ...string) (*unstructured.Unstructured, error)
	Update(context.Context, *unstructured.Unstructured, metav1.UpdateOptions, ...string) (*unstructured.Unstructured, error)
	Delete(context.Context, string, metav1.DeleteOptions, ...string) error
	Get(context.Context, string, metav1.GetOptions, ...string) (*unstructured.Unstructured, error)
} {
	return c.Resource(Resource).Namespace(Namespace)
}

// journal is a log that can be read while it is written.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// start runs a watcher until the test ends.
func start(t *testing.T, c *cluster, n *node, resync time.Duration) (*Watcher, *journal) {
	t.Helper()
	log := &journal{}
	w, err := New(Config{Client: c, Syncer: n, Log: slog.New(slog.NewTextHandler(log, nil)), Resync: resync})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	return w, log
}

func TestObjectsAreHandedOver(t *testing.T) {
	n := &node{calls: make(chan []image.Mapping)}
	rules := []any{map[string]any{"name": "cirros", "url": "https://example.net/cirros.img"}}
	c := newCluster(
		mapping(Namespace, "b", 1, map[string]any{"prefix": "p", "translations": rules}),
		mapping(Namespace, "a", 1, nil),
		mapping("default", "elsewhere", 1, map[string]any{"prefix": "q"}),
	)
	w, _ := start(t, c, n, time.Hour)
	b := "b: prefix: p|translations:|- name: cirros|  url: https://example.net/cirros.img"
	n.until(t, "a: {}\n"+b)
	<-w.Settled()
	<-c.watched
	<-c.statuses
	<-c.statuses

	if _, err := c.objects().Create(t.Context(), mapping(Namespace, "c", 1, map[string]any{"prefix": "c"}), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.until(t, "a: {}\n"+b+"\nc: prefix: c")
	<-c.statuses
	if _, err := c.objects().Update(t.Context(), mapping(Namespace, "c", 2, map[string]any{"prefix": "d"}), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.until(t, "a: {}\n"+b+"\nc: prefix: d")
	<-c.statuses
	for _, name := range []string{"b", "c"} {
		if err := c.objects().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	n.until(t, "a: {}")
	w.Poke()
	n.until(t, "a: {}")
}

func TestStatusSaysWhatIsWrong(t *testing.T) {
	n := &node{calls: make(chan []image.Mapping)}
	n.say(nil,
		image.MappingProblem{Source: Source, Mapping: "bad", Rule: "name x", Message: "it has no url"},
		image.MappingProblem{Source: Source, Mapping: "bad", Message: "the key is not known"})
	const since = "2020-01-01T00:00:00Z"
	bad := mapping(Namespace, "bad", 3, nil)
	bad.Object["status"] = map[string]any{"observedGeneration": int64(2), "conditions": []any{map[string]any{"type": "Valid", "status": "False", "lastTransitionTime": since}}}
	c := newCluster(bad)
	w, _ := start(t, c, n, time.Hour)
	n.next(t)
	status := <-c.statuses
	condition := status["conditions"].([]any)[0].(map[string]any)
	if status["observedGeneration"] != int64(3) || condition["type"] != "Valid" || condition["status"] != "False" ||
		condition["message"] != "name x: it has no url (and 1 more, see status.problems)" || condition["lastTransitionTime"] != since {
		t.Errorf("status %v", status)
	}
	if got := fmt.Sprint(status["problems"]); got != "[map[message:it has no url rule:name x] map[message:the key is not known]]" {
		t.Errorf("problems %s", got)
	}

	// The same result is not written again.
	for range 3 {
		w.Poke()
		n.next(t)
	}
	// Another problem: the condition keeps its transition time.
	n.say(nil, image.MappingProblem{Source: Source, Mapping: "bad", Message: "other"})
	w.Poke()
	n.next(t)
	status = <-c.statuses
	condition = status["conditions"].([]any)[0].(map[string]any)
	if condition["message"] != "other" || condition["lastTransitionTime"] != since || len(c.statuses) != 0 {
		t.Errorf("status %v, %d more", status, len(c.statuses))
	}
	n.say(nil)
	w.Poke()
	n.next(t)
	status = <-c.statuses
	if condition = status["conditions"].([]any)[0].(map[string]any); condition["status"] != "True" || status["problems"] != nil {
		t.Errorf("status after the mapping was corrected: %v", status)
	}
}

func TestAnotherNodesVerdictIsNotFought(t *testing.T) {
	n := &node{calls: make(chan []image.Mapping)}
	c := newCluster(mapping(Namespace, "m", 1, nil))
	w, _ := start(t, c, n, time.Hour)
	n.next(t)
	<-c.statuses
	theirs, err := c.objects().Get(t.Context(), "m", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	theirs.Object["status"] = map[string]any{"observedGeneration": int64(1)}
	if _, err := c.objects().Update(t.Context(), theirs, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.Poke()
		n.next(t)
	}
	if len(c.statuses) != 0 {
		t.Errorf("the status was written again: %v", <-c.statuses)
	}
}

func TestProblemsAreBounded(t *testing.T) {
	problems := make([]image.MappingProblem, 1000)
	status := statusOf(mapping(Namespace, "m", 1, nil), problems)
	if list := status["problems"].([]any); len(list) != maxReported+1 || list[maxReported].(map[string]any)["message"] != "and 950 more" {
		t.Errorf("%d problems, last %v", len(list), list[len(list)-1])
	}
}

func TestFailuresAreRetried(t *testing.T) {
	n := &node{calls: make(chan []image.Mapping)}
	n.say(errors.New("daemon is unavailable"))
	w, _ := start(t, newCluster(mapping(Namespace, "m", 1, nil)), n, time.Millisecond)
	for range 3 {
		n.next(t)
	}
	select {
	case <-w.Settled():
		t.Error("settled although no sync succeeded")
	default:
	}
	n.say(nil)
	n.next(t)
	n.next(t)
	<-w.Settled()
}

func TestAClusterWithoutTheResourceIsWaitedFor(t *testing.T) {
	for name, refusal := range map[string]error{
		"missing":   apierrors.NewNotFound(Resource.GroupResource(), ""),
		"forbidden": apierrors.NewForbidden(Resource.GroupResource(), "", errors.New("no")),
	} {
		t.Run(name, func(t *testing.T) {
			n := &node{calls: make(chan []image.Mapping)}
			c := newCluster(mapping(Namespace, "m", 1, nil))
			asked, there := make(chan struct{}), make(chan struct{})
			c.PrependReactor("list", Resource.Resource, func(clienttesting.Action) (bool, runtime.Object, error) {
				select {
				case <-there:
					return false, nil, nil
				case asked <- struct{}{}:
				}
				return true, nil, refusal
			})
			w, log := start(t, c, n, time.Millisecond)
			for range 3 {
				<-asked
			}
			<-w.Settled() // pods must not wait for mappings that cannot be read
			close(there)
			n.until(t, "m: {}")
			if got, want := strings.Count(log.String(), "WARN"), map[string]int{"missing": 0, "forbidden": 1}[name]; got != want {
				t.Errorf("%d warnings, want %d:\n%s", got, want, log)
			}
		})
	}
}

func TestAStatusThatCannotBeWrittenStopsNothing(t *testing.T) {
	n := &node{calls: make(chan []image.Mapping)}
	c := newCluster(mapping(Namespace, "m", 1, nil))
	c.PrependReactor("update", Resource.Resource, func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(Resource.GroupResource(), "m", errors.New("no"))
	})
	w, _ := start(t, c, n, time.Hour)
	n.until(t, "m: {}")
	<-w.Settled()
	w.Poke()
	n.until(t, "m: {}")
}

func TestNewWantsItsParts(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("no error")
	}
}
