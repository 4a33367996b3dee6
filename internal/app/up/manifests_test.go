package up

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestManifestsHaveTheirPlaces(t *testing.T) {
	list, err := manifests()
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, m := range list {
		paths = append(paths, m.path)
		if !json.Valid(m.body) {
			t.Errorf("%s is no JSON", m.path)
		}
	}
	if want := []string{
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/virtletimagemappings.virtlet.k8s",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles/cocoon-image-mappings",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings/cocoon-image-mappings",
	}; !slices.Equal(paths, want) {
		t.Errorf("paths %q", paths)
	}
}

func TestManifestsAreAppliedUntilTheyAreThere(t *testing.T) {
	var mu sync.Mutex
	tries := map[string]int{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method != http.MethodPatch || r.Header.Get("Content-Type") != "application/apply-patch+yaml" || r.FormValue("fieldManager") == "" || !json.Valid(body) {
			t.Errorf("%s %s: %s", r.Method, r.URL, body)
		}
		mu.Lock()
		defer mu.Unlock()
		if tries[r.URL.Path]++; tries[r.URL.Path] == 1 {
			http.Error(w, `{"message":"namespaces kube-system not found"}`, http.StatusNotFound)
			return
		}
		w.WriteHeader(http.StatusCreated)
	}))
	defer srv.Close()
	in := &instance{api: &apiClient{base: srv.URL, http: srv.Client()}}
	if err := in.installManifests(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	for path, n := range tries {
		if n != 2 {
			t.Errorf("%s was sent %d times", path, n)
		}
	}
	if len(tries) != 3 {
		t.Errorf("sent: %v", tries)
	}
}

func TestAManifestThatIsRefusedEndsTheStart(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"message":"spec is wrong"}`, http.StatusUnprocessableEntity)
	}))
	defer srv.Close()
	in := &instance{api: &apiClient{base: srv.URL, http: srv.Client()}}
	if err := in.installManifests(t.Context(), nil); err == nil || errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
}
