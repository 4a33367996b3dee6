package aggregated

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	deploy "cocoonstack.io/cocoon/deploy/kubevirt"
)

// message is the message of a metav1.Status.
func message(body string) string {
	var s metav1.Status
	if json.Unmarshal([]byte(body), &s) == nil && s.Kind == "Status" {
		return s.Message
	}
	return body
}

// Only the proxy of the API server is answered, and only for users who have the right.
func TestAccess(t *testing.T) {
	r := start(t, machine("Halted"))
	path := prefix + "virtualmachines/web/start"
	for name, c := range map[string]struct {
		call
		code int
	}{
		"no certificate":           {call{}, http.StatusUnauthorized},
		"a name not allowed":       {call{cert: r.other}, http.StatusUnauthorized},
		"another authority":        {call{cert: r.foreign}, http.StatusUnauthorized},
		"a bearer token":           {call{header: http.Header{"Authorization": {"Bearer admin"}}, user: "-"}, http.StatusUnauthorized},
		"no user":                  {call{cert: r.proxy, user: "-"}, http.StatusUnauthorized},
		"no right":                 {call{cert: r.proxy, user: "mallory"}, http.StatusForbidden},
		"no answer of the cluster": {call{cert: r.proxy, user: "broken"}, http.StatusInternalServerError},
	} {
		t.Run(name, func(t *testing.T) {
			c.method, c.path = http.MethodPut, path
			code, body, header := r.do(c.call)
			if code != c.code || header.Get("Content-Type") != "application/json" || message(body) == body {
				t.Errorf("%d %s", code, body)
			}
		})
	}
	if r.vm().Spec.Running != nil || *r.vm().Spec.RunStrategy != "Halted" {
		t.Error("somebody without the right started the VM")
	}
	code, body, _ := r.do(call{method: http.MethodPut, path: path, cert: r.proxy, user: "mallory"})
	if code != http.StatusForbidden || !strings.Contains(message(body), `user "mallory" cannot update resource "virtualmachines/start" in API group "subresources.kubevirt.io" in the namespace "default"`) {
		t.Errorf("%d %s", code, body)
	}
}

// The review names the subresource, without port and protocol of a port-forward. A picture of the screen is a subresource of its own.
func TestReviews(t *testing.T) {
	r := start(t)
	for path, want := range map[string]string{
		"virtualmachineinstances/web/console":                 "get virtualmachineinstances console",
		"virtualmachineinstances/web/portforward/22/tcp":      "get virtualmachineinstances portforward",
		"virtualmachines/web/portforward/22":                  "get virtualmachines portforward",
		"virtualmachineinstances/web/vnc/screenshot":          "get virtualmachineinstances vnc/screenshot",
		"virtualmachineinstances/web/console?continue=secret": "get virtualmachineinstances console",
	} {
		r.reviews = nil
		r.do(call{method: http.MethodGet, path: prefix + path, cert: r.proxy, user: "bob" + strings.ReplaceAll(path, "/", ".")})
		if len(r.reviews) != 1 {
			t.Fatalf("%s: %d reviews", path, len(r.reviews))
		}
		a := r.reviews[0].ResourceAttributes
		if got := a.Verb + " " + a.Resource + " " + a.Subresource; got != want || a.Name != "web" || a.Namespace != "default" || a.Group != Group || a.Version != "v1" {
			t.Errorf("%s: %s, %+v", path, got, a)
		}
	}
}

// A path that could be read in two ways is not served, and nothing is reviewed for it.
func TestHostilePaths(t *testing.T) {
	r := start(t, machine("Halted"))
	at := "/apis/subresources.kubevirt.io/v1"
	for path, code := range map[string]int{
		prefix + "virtualmachines/web%2Fstart/start":                                     http.StatusNotFound,
		prefix + "virtualmachines/../../start":                                           http.StatusNotFound,
		prefix + "virtualmachines/web/start/":                                            http.StatusNotFound,
		prefix + "virtualmachines//start":                                                http.StatusNotFound,
		prefix + "virtualmachines/WEB/start":                                             http.StatusNotFound,
		prefix + "virtualmachines/web/start/more":                                        http.StatusNotFound,
		prefix + "virtualmachines/web/nothing":                                           http.StatusNotFound,
		prefix + "virtualmachines/web":                                                   http.StatusNotFound,
		prefix + "pods/web/start":                                                        http.StatusNotFound,
		at + "/proxy/namespaces/default/virtualmachines/web/start":                       http.StatusNotFound,
		at + "/namespaces/de%00fault/virtualmachines/web/start":                          http.StatusNotFound,
		at + "//namespaces/default/virtualmachines/web/start":                            http.StatusNotFound,
		"/apis/subresources.kubevirt.io/v2/namespaces/default/virtualmachines/web/start": http.StatusNotFound,
		"/apis/other/v1/namespaces/default/virtualmachines/web/start":                    http.StatusNotFound,
		"/metrics": http.StatusNotFound,
		prefix + "virtualmachines/web" + strings.Repeat("x", 300) + "/start": http.StatusNotFound,
	} {
		if got, body, _ := r.do(call{method: http.MethodPut, path: path, cert: r.proxy}); got != code {
			t.Errorf("%s: %d %s", path, got, body)
		}
	}
	for method, path := range map[string]string{
		http.MethodPost: "virtualmachines/web/start", http.MethodDelete: "virtualmachines/web/stop", http.MethodGet: "virtualmachines/web/start",
		http.MethodPut: "virtualmachineinstances/web/console", http.MethodPatch: "virtualmachines/web/start", http.MethodHead: "virtualmachineinstances/web/console",
	} {
		if code, body, _ := r.do(call{method: method, path: prefix + path, cert: r.proxy}); code != http.StatusMethodNotAllowed {
			t.Errorf("%s %s: %d %s", method, path, code, body)
		}
	}
	if *r.vm().Spec.RunStrategy != "Halted" {
		t.Error("a path that is not served started the VM")
	}
	// What a client invents is no label of a metric.
	families, err := r.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if len(f.GetMetric()) > 12 {
			t.Errorf("%d series of %s", len(f.GetMetric()), f.GetName())
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if v := l.GetValue(); v == "nothing" || v == "PATCH" || v == "web" {
					t.Errorf("the label %s is the client's choice: %s", l.GetName(), v)
				}
			}
		}
	}
}

func TestDiscovery(t *testing.T) {
	r := start(t)
	get := func(path string, into any) {
		t.Helper()
		code, body, header := r.do(call{method: http.MethodGet, path: path, cert: r.proxy, user: "mallory"})
		if code != http.StatusOK || header.Get("Content-Type") != "application/json" {
			t.Fatalf("%s: %d %s", path, code, body)
		}
		if err := json.Unmarshal([]byte(body), into); err != nil {
			t.Fatal(err)
		}
	}
	var g metav1.APIGroup
	if get("/apis/subresources.kubevirt.io", &g); g.Kind != "APIGroup" || g.PreferredVersion.GroupVersion != "subresources.kubevirt.io/v1" || len(g.Versions) != 2 {
		t.Errorf("%+v", g)
	}
	var groups metav1.APIGroupList
	if get("/apis", &groups); len(groups.Groups) != 2 {
		t.Errorf("%+v", groups)
	}
	for _, version := range Versions {
		var list metav1.APIResourceList
		get("/apis/subresources.kubevirt.io/"+version, &list)
		if list.Kind != "APIResourceList" || list.GroupVersion != "subresources.kubevirt.io/"+version || len(list.APIResources) != len(served)-1 { // that of uploads is in another group
			t.Errorf("%+v", list)
		}
		for _, a := range list.APIResources {
			if part := strings.Contains(a.Name, "/"); !a.Namespaced || part && len(a.Verbs) != 1 || !part && (a.Kind != "" || len(a.Verbs) != 0) {
				t.Errorf("%+v: kubectl must not take it for an object", a)
			}
		}
		var v map[string]string
		get("/apis/subresources.kubevirt.io/"+version+"/version", &v)
		for _, key := range []string{"gitVersion", "goVersion", "compiler", "platform", "cocoonVersion"} {
			if v[key] == "" {
				t.Errorf("no %s", key)
			}
		}
	}
	for _, path := range []string{"/healthz", "/apis/subresources.kubevirt.io/v1/healthz"} {
		if code, body, _ := r.do(call{method: http.MethodGet, path: path, cert: r.proxy}); code != http.StatusOK || body != "ok" {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	var tokens metav1.APIResourceList
	if get("/apis/upload.cdi.kubevirt.io/v1beta1", &tokens); len(tokens.APIResources) != 1 || tokens.APIResources[0].Name != "uploadtokenrequests" || tokens.APIResources[0].Verbs.String() != "[create]" {
		t.Errorf("%+v", tokens)
	}
	if get("/apis/upload.cdi.kubevirt.io", &g); g.Name != UploadGroup || g.PreferredVersion.Version != UploadVersion {
		t.Errorf("%+v", g)
	}
	if len(r.reviews) != 0 {
		t.Errorf("discovery needs rights: %v", r.reviews)
	}
	if code, _, _ := r.do(call{method: http.MethodGet, path: "/apis/subresources.kubevirt.io/v1"}); code != http.StatusUnauthorized {
		t.Errorf("without the proxy: %d", code)
	}
	if code, _, _ := r.do(call{method: http.MethodPost, path: "/apis/subresources.kubevirt.io/v1/version", cert: r.proxy}); code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", code)
	}
}

// The version that virtctl compares itself with is that of the types.
func TestVersionIsThatOfTheModule(t *testing.T) {
	mod, err := os.ReadFile("../../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(mod), "kubevirt.io/api "+deploy.Version+"\n") {
		t.Errorf("go.mod has another version of kubevirt.io/api than %s", deploy.Version)
	}
}
