package up

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	vkcocoon "cocoonstack.io/cocoon/deploy/vk-cocoon"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestManifestsHaveTheirPlaces(t *testing.T) {
	list, err := manifests(baseManifests...)
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
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/cocoonsets.cocoonset.cocoonstack.io",
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/cocoonhibernations.cocoonset.cocoonstack.io",
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/vmplacements.cocoonset.cocoonstack.io",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles/cocoon-image-mappings",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings/cocoon-image-mappings",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/cocoon-placements",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/cocoon-placements",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/cocoon-network-policies",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/cocoon-network-policies",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/cocoon-volumes",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/cocoon-volumes",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles/cocoon-volumes",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings/cocoon-volumes",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/cocoon-volumes",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/cocoon-volumes",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/cocoon-volume-room",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/cocoon-volume-room",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/cocoon-volume-snapshots",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/cocoon-volume-snapshots",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/cocoon-placements",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/cocoon-placements",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/cocoon-pod-annotations",
		"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/cocoon-pod-annotations",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/cocoon-node-bootstrap",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/cocoon-node-renewal",
		"/apis/storage.k8s.io/v1/csidrivers/volume.cocoonstack.io",
		"/apis/storage.k8s.io/v1/storageclasses/cocoon-local",
		"/apis/storage.k8s.io/v1/storageclasses/cocoon-thin",
	}; !slices.Equal(paths, want) {
		t.Errorf("paths %q", paths)
	}
}

// Claims of an instance that name no class have volumes of its nodes.
func TestClassIsTheDefault(t *testing.T) {
	list, err := manifests(defaultClass(vkcocoon.StorageClass))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list {
		name, text := filepath.Base(m.path), string(m.body)
		if strings.Contains(text, `"storageclass.kubernetes.io/is-default-class":"true"`) != (name == "cocoon-local") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

func TestMetricsServerManifests(t *testing.T) {
	p := pki{dir: t.TempDir(), now: time.Now()}
	if err := p.ensure(Settings{}); err != nil {
		t.Fatal(err)
	}
	in := &instance{pki: p, settings: Settings{ServerPort: 4443}}
	list, err := in.metricsServerManifests("192.0.2.1")
	if err != nil || len(list) != 8 {
		t.Fatalf("%d manifests, %v", len(list), err)
	}
	slice := list[6]
	if slice.path != "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/metrics-server" || !strings.Contains(string(slice.body), `"192.0.2.1"`) || !strings.Contains(string(slice.body), `4443`) {
		t.Errorf("%s: %s", slice.path, slice.body)
	}
	if list[7].path != metricsServerAPI {
		t.Errorf("the API is at %s", list[7].path)
	}
}

// Our own registration is removed with its component; one made by others stays.
func TestRegistrationIsTakenBack(t *testing.T) {
	for by, want := range map[string]bool{"cocoon-up": true, "helm": false, "": false} {
		deleted := false
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case by == "":
				http.NotFound(w, r)
			case r.Method == http.MethodDelete:
				deleted = true
			default:
				_, _ = io.WriteString(w, `{"metadata":{"uid":"u","labels":{"app.kubernetes.io/managed-by":"`+by+`"}}}`)
			}
		}))
		if err := (&apiClient{base: srv.URL, http: srv.Client()}).remove(t.Context(), metricsServerAPI); err != nil || deleted != want {
			t.Errorf("of %q: deleted %v, %v", by, deleted, err)
		}
		srv.Close()
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
	if err := in.installManifests(t.Context(), nil, baseManifests...); err != nil {
		t.Fatal(err)
	}
	for path, n := range tries {
		if n != 2 {
			t.Errorf("%s was sent %d times", path, n)
		}
	}
	if len(tries) != 29 {
		t.Errorf("sent: %v", tries)
	}
}

func TestAManifestThatIsRefusedEndsTheStart(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"message":"spec is wrong"}`, http.StatusUnprocessableEntity)
	}))
	defer srv.Close()
	in := &instance{api: &apiClient{base: srv.URL, http: srv.Client()}}
	if err := in.installManifests(t.Context(), nil, baseManifests...); err == nil || errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
}
