package up

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// clusterOf is an API server that has objects with labels, by path, and notes what is changed.
func clusterOf(t *testing.T, labels map[string]string) (*apiClient, *[]string) {
	t.Helper()
	var changed []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		label, ok := labels[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if r.Method != http.MethodGet {
			changed = append(changed, r.Method+" "+r.URL.Path)
		}
		key, value, _ := strings.Cut(label, "=")
		fmt.Fprintf(w, `{"metadata":{"uid":"u","labels":{%q:%q}}}`, key, value)
	}))
	t.Cleanup(srv.Close)
	return &apiClient{base: srv.URL, http: srv.Client()}, &changed
}

var withManager = Settings{With: []string{partManager}, Nodes: []NodeSettings{{Name: "n", Address: "192.0.2.1"}}, KubeVirtPort: 8444}

const (
	crdPath      = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
	registration = "/apis/apiregistration.k8s.io/v1/apiservices/"
	oursCRD      = "app.kubernetes.io/part-of=cocoon"
	oursAPI      = "app.kubernetes.io/managed-by=cocoon-up"
)

// A cluster has one KubeVirt. Beside one of others nothing is installed; an earlier start of ours is no obstacle.
func TestAnotherKubeVirtIsLeftAlone(t *testing.T) {
	for what, tc := range map[string]struct {
		there    map[string]string
		settings Settings
		foreign  string // what the error names; "": none
	}{
		"nothing":           {nil, withManager, ""},
		"ours":              {map[string]string{crdPath + "kubevirts.kubevirt.io": oursCRD, registration + "v1.subresources.kubevirt.io": oursAPI}, withManager, ""},
		"its operator":      {map[string]string{crdPath + "kubevirts.kubevirt.io": "operator.kubevirt.io="}, withManager, "kubevirts.kubevirt.io"},
		"its machines":      {map[string]string{crdPath + "virtualmachines.kubevirt.io": "app.kubernetes.io/managed-by=virt-operator"}, withManager, "virtualmachines.kubevirt.io"},
		"its instances":     {map[string]string{crdPath + "virtualmachineinstances.kubevirt.io": ""}, withManager, "virtualmachineinstances.kubevirt.io"},
		"its volumes":       {map[string]string{crdPath + "datavolumes.cdi.kubevirt.io": ""}, withManager, "datavolumes.cdi.kubevirt.io"},
		"its sets":          {map[string]string{crdPath + "virtualmachineinstancereplicasets.kubevirt.io": ""}, withManager, "virtualmachineinstancereplicasets.kubevirt.io"},
		"its instancetypes": {map[string]string{crdPath + "virtualmachineclusterinstancetypes.instancetype.kubevirt.io": ""}, withManager, "virtualmachineclusterinstancetypes.instancetype.kubevirt.io"},
		"its preferences":   {map[string]string{crdPath + "virtualmachinepreferences.instancetype.kubevirt.io": ""}, withManager, "virtualmachinepreferences.instancetype.kubevirt.io"},
		"its API":           {map[string]string{registration + "v1.subresources.kubevirt.io": "app.kubernetes.io/managed-by=virt-operator"}, withManager, "v1.subresources.kubevirt.io"},
		"its older API":     {map[string]string{registration + "v1alpha3.subresources.kubevirt.io": oursCRD}, withManager, "v1alpha3.subresources.kubevirt.io"},
		"without a manager": {map[string]string{crdPath + "kubevirts.kubevirt.io": ""}, Settings{Nodes: withManager.Nodes}, ""},
		"without a node":    {map[string]string{crdPath + "kubevirts.kubevirt.io": ""}, Settings{With: withManager.With}, ""},
		"kinds of others":   {map[string]string{crdPath + "cdis.cdi.kubevirt.io": ""}, withManager, ""},
		"its pools":         {map[string]string{crdPath + "virtualmachinepools.pool.kubevirt.io": ""}, withManager, "virtualmachinepools.pool.kubevirt.io"},
		"its migrations":    {map[string]string{crdPath + "virtualmachineinstancemigrations.kubevirt.io": ""}, withManager, "virtualmachineinstancemigrations.kubevirt.io"},
	} {
		api, changed := clusterOf(t, tc.there)
		err := (&instance{api: api, settings: tc.settings}).checkKubeVirt(t.Context())
		if errdefs.IsFailedPrecondition(err) != (tc.foreign != "") || (err != nil && !strings.Contains(err.Error(), " "+tc.foreign+" ")) {
			t.Errorf("%s: %v", what, err)
		}
		if len(*changed) > 0 {
			t.Errorf("%s: %q", what, *changed)
		}
	}
}

// An instance that does not serve KubeVirt's objects has no registration of them: the objects stay, as does what others have.
func TestKubeVirtIsUnregistered(t *testing.T) {
	there := map[string]string{
		registration + "v1.subresources.kubevirt.io":       oursAPI,
		registration + "v1alpha3.subresources.kubevirt.io": "app.kubernetes.io/managed-by=virt-operator",
		kubeVirtObject:                    oursAPI,
		crdPath + "kubevirts.kubevirt.io": oursCRD,
	}
	for what, tc := range map[string]struct {
		settings Settings
		want     []string
	}{
		"served":            {withManager, nil},
		"without a manager": {Settings{Nodes: withManager.Nodes}, []string{"DELETE " + registration + "v1.subresources.kubevirt.io", "DELETE " + kubeVirtObject}},
		"without a node":    {Settings{With: withManager.With}, []string{"DELETE " + registration + "v1.subresources.kubevirt.io", "DELETE " + kubeVirtObject}},
	} {
		api, changed := clusterOf(t, there)
		if err := (&instance{api: api, settings: tc.settings}).unregisterKubeVirt(t.Context()); err != nil || !slices.Equal(*changed, tc.want) {
			t.Errorf("%s: %q, %v", what, *changed, err)
		}
	}
}

func TestKubeVirtManifests(t *testing.T) {
	p := pki{dir: t.TempDir(), now: time.Now()}
	if err := p.ensure(Settings{}); err != nil {
		t.Fatal(err)
	}
	in := &instance{pki: p, settings: withManager, layout: layout{"/a"}}
	list, err := in.kubeVirtManifests("192.0.2.1", 4711)
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string]string{}
	for _, m := range list {
		paths[m.path] = string(m.body)
		if !json.Valid(m.body) {
			t.Errorf("%s is no JSON", m.path)
		}
	}
	for path, want := range map[string]string{
		"/api/v1/namespaces/kubevirt/services/virt-api":                         `"targetPort":4711`,
		"/apis/discovery.k8s.io/v1/namespaces/kubevirt/endpointslices/virt-api": `"addresses":["192.0.2.1"]`,
		registration + "v1.subresources.kubevirt.io":                            `"name":"virt-api"`,
		registration + "v1alpha3.subresources.kubevirt.io":                      `"caBundle":"`,
		registration + "v1beta1.upload.cdi.kubevirt.io":                         `"caBundle":"`,
		kubeVirtConfig: `"uploadProxyURL":"https://127.0.0.1:8444"`,
	} {
		if !strings.Contains(paths[path], want) {
			t.Errorf("%s: %q, want %s", path, paths[path], want)
		}
	}
	if len(list) != 6 {
		t.Errorf("%d manifests", len(list))
	}
	base, err := manifests(in.part(partManager).install...)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range kubeVirtKinds {
		if !slices.ContainsFunc(base, func(m manifest) bool { return m.path == crdPath+name }) {
			t.Errorf("the manager starts without the kind %s", name)
		}
	}
	for _, path := range []string{"/apis/rbac.authorization.k8s.io/v1/clusterroles/kubevirt.io:edit", "/apis/rbac.authorization.k8s.io/v1/clusterroles/cocoon-manager-kubevirt"} {
		if !slices.ContainsFunc(base, func(m manifest) bool { return m.path == path }) {
			t.Errorf("the manager starts without %s", path)
		}
	}
	if args := in.part(partManager).args; !slices.Contains(args, "127.0.0.1:8444") {
		t.Errorf("the manager's arguments are %q", args)
	}
	in.settings.Nodes = nil
	if args := in.part(partManager).args; slices.Contains(args, "--kubevirt-addr") {
		t.Errorf("without a node, the manager's arguments are %q", args)
	}
	if base, err := manifests(in.part(partManager).install...); err != nil || slices.ContainsFunc(base, func(m manifest) bool { return strings.HasPrefix(m.path, crdPath) }) {
		t.Errorf("without a node, the kinds are installed, %v", err)
	}
}
