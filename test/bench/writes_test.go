//go:build bench

package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// request is a kind of request to the API server.
type request struct{ verb, resource string }

// writes counts the write requests to the API server between its creation and its report.
type writes struct {
	c      *cluster
	before map[request]int
}

func (c *cluster) countWrites(t *testing.T) writes {
	t.Helper()
	return writes{c, c.requests(t)}
}

var (
	counter = regexp.MustCompile(`^apiserver_request_total\{(.*)\} (\S+)$`)
	label   = regexp.MustCompile(`(\w+)="([^"]*)"`)
)

// requests is the API server's own count of write requests, whatever their result.
func (c *cluster) requests(t *testing.T) map[request]int {
	t.Helper()
	counts := c.asked(t)
	maps.DeleteFunc(counts, func(r request, _ int) bool {
		return !slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}, r.verb)
	})
	return counts
}

// asked is the API server's own count of all requests, writes and reads.
func (c *cluster) asked(t *testing.T) map[request]int {
	t.Helper()
	text := must(c.kube.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context()))(t)
	counts := map[request]int{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		m := counter.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		of := map[string]string{}
		for _, l := range label.FindAllStringSubmatch(m[1], -1) {
			of[l[1]] = l[2]
		}
		r := request{of["verb"], strings.TrimSuffix(of["resource"]+"/"+of["subresource"], "/")}
		counts[r] += int(must(strconv.ParseFloat(m[2], 64))(t))
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return counts
}

// report attributes the writes to their authors, by the API's rules: this test creates and deletes each pod once, and the
// scheduler binds it; events name their author; a pod's status and all other changes to a bound pod come from the
// node.
func (w writes) report(t *testing.T, results *table) {
	t.Helper()
	after := w.c.requests(t)
	events := w.c.eventWrites(t)
	byNode := 0
	results.note("\nAPI writes while %d pods were created, Ready and deleted:", podRounds)
	line := func(r request, n int, who string) {
		results.note("  %4d  %5.1f per pod  %-7s %-28s %s", n, float64(n)/podRounds, r.verb, r.resource, who)
		if who == "virtual node" {
			byNode += n
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(after), func(a, b request) int {
		return strings.Compare(a.resource+a.verb, b.resource+b.verb)
	}) {
		n := after[r] - w.before[r]
		switch {
		case n == 0:
		case r.resource == "pods" && r.verb == "POST":
			line(r, n, "this test")
		case r.resource == "pods" && r.verb == "DELETE":
			line(r, podRounds, "this test")
			line(r, n-podRounds, "virtual node")
		case r.resource == "pods/binding":
			line(r, n, "scheduler")
		case strings.HasPrefix(r.resource, "pods"):
			line(r, n, "virtual node")
		case r.resource == "serviceaccounts/token":
			line(r, n, "virtual node; signs, writes nothing to the store")
		case r.resource == "events":
			for _, author := range slices.Sorted(maps.Keys(events)) {
				if m := events[author][r.verb]; m > 0 {
					n -= m
					line(r, m, author)
				}
			}
			if n != 0 {
				line(r, n, "not known")
			}
		default:
			line(r, n, "heartbeat, not per pod")
		}
	}
	perPod := float64(byNode) / podRounds
	results.add(row{
		what: "API writes of the virtual node per pod", figure: fmt.Sprintf("%.1f", perPod), goal: "<= 5", n: podRounds, missed: perPod > 5,
	})
}

// eventWrites counts, by author and verb, the requests that wrote the events of our pods. A repeated event is patched.
func (w *cluster) eventWrites(t *testing.T) map[string]map[string]int {
	t.Helper()
	list := must(w.kube.CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{}))(t)
	by := map[string]map[string]int{}
	for _, e := range list.Items {
		if !strings.HasPrefix(e.InvolvedObject.Name, "bench-") {
			continue
		}
		who := author(e)
		if by[who] == nil {
			by[who] = map[string]int{}
		}
		by[who]["POST"]++
		by[who]["PATCH"] += max(0, int(e.Count)-1)
	}
	return by
}

func author(e corev1.Event) string {
	name := e.ReportingController
	if name == "" {
		name = e.Source.Component
	}
	if strings.Contains(name, "scheduler") {
		return "scheduler"
	}
	return "virtual node"
}
