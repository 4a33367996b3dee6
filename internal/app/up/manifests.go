package up

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/deploy/crds"
	vkcocoon "cocoonstack.io/cocoon/deploy/vk-cocoon"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// collections are the API paths of the objects in our manifests, by kind.
var collections = map[string]string{
	"CustomResourceDefinition":         "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
	"Namespace":                        "/api/v1/namespaces",
	"ClusterRole":                      "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding":               "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"Role":                             "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/roles",
	"RoleBinding":                      "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/rolebindings",
	"Service":                          "/api/v1/namespaces/%s/services",
	"Endpoints":                        "/api/v1/namespaces/%s/endpoints",
	"EndpointSlice":                    "/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices",
	"MutatingWebhookConfiguration":     "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
	"ValidatingWebhookConfiguration":   "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
	"ValidatingAdmissionPolicy":        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
	"ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
	"RuntimeClass":                     "/apis/node.k8s.io/v1/runtimeclasses",
	"CSIDriver":                        "/apis/storage.k8s.io/v1/csidrivers",
	"StorageClass":                     "/apis/storage.k8s.io/v1/storageclasses",
	"VolumeSnapshotClass":              snapshotsAPI + "/volumesnapshotclasses",
	"APIService":                       "/apis/apiregistration.k8s.io/v1/apiservices",
	"KubeVirt":                         "/apis/kubevirt.io/v1/namespaces/%s/kubevirts",
	"CDIConfig":                        "/apis/cdi.kubevirt.io/v1beta1/cdiconfigs",
}

// baseManifests hold the objects that every instance has: our custom resources, the rights of its nodes, and their storage classes.
var baseManifests = [][]byte{
	crds.ImageMappings, crds.Sets, crds.Hibernations, crds.Placements,
	vkcocoon.Rights, vkcocoon.NetworkPolicies, vkcocoon.Volumes, vkcocoon.VolumePolicies, vkcocoon.Policies, vkcocoon.Bootstrap,
	defaultClass(vkcocoon.StorageClass),
}

// defaultClass makes the storage class cocoon-local in text the one of claims that name none.
func defaultClass(text []byte) []byte {
	return bytes.Replace(text, []byte("\n  name: cocoon-local\n"), []byte("\n  name: cocoon-local\n  annotations: {storageclass.kubernetes.io/is-default-class: 'true'}\n"), 1)
}

// manifest is one object that must exist in the cluster.
type manifest struct {
	path string // of the object in the API
	body []byte // JSON
}

// manifests are the objects in texts.
func manifests(texts ...[]byte) ([]manifest, error) {
	var out []manifest
	for _, text := range texts {
		for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
			var object struct {
				Kind     string                           `json:"kind"`
				Metadata struct{ Name, Namespace string } `json:"metadata"`
			}
			body, err := yaml.YAMLToJSONStrict(doc)
			if err == nil {
				err = json.Unmarshal(body, &object)
			}
			if err != nil {
				return nil, fmt.Errorf("read manifest: %w", err)
			}
			collection, ok := collections[object.Kind]
			if !ok {
				return nil, fmt.Errorf("manifest %s has the kind %q, which cannot be installed", object.Metadata.Name, object.Kind)
			}
			if object.Metadata.Namespace != "" {
				collection = fmt.Sprintf(collection, object.Metadata.Namespace)
			}
			out = append(out, manifest{path: collection + "/" + object.Metadata.Name, body: body})
		}
	}
	return out, nil
}

// installManifests applies the objects of texts as this version has them. A control plane that has just started may
// still lack the namespace, so it retries until ctx or the child ends.
func (in *instance) installManifests(ctx context.Context, ended <-chan error, texts ...[]byte) error {
	list, err := manifests(texts...)
	if err != nil {
		return err
	}
	return in.install(ctx, list, in.controlPlane(), ended)
}

// install applies manifests; it stops when the child c ends.
func (in *instance) install(ctx context.Context, list []manifest, c child, ended <-chan error) error {
	for _, m := range list {
		var failed error
		err := in.await(ctx, c, ended, func(ctx context.Context) bool {
			failed = in.api.apply(ctx, m)
			return failed == nil || !errdefs.IsUnavailable(failed)
		})
		if err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
	}
	return nil
}

// apply brings an object to the state of m, by server-side apply: it changes nothing if the state is right, and keeps
// fields that others added.
// Errors: Unavailable for failures that a retry may fix.
func (c *apiClient) apply(ctx context.Context, m manifest) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPatch, c.base+m.path+"?fieldManager=cocoon-up&force=true", bytes.NewReader(m.body))
	if err != nil {
		return fmt.Errorf("install %s: %w", m.path, err)
	}
	req.Header.Set("Content-Type", "application/apply-patch+yaml")
	resp, err := c.http.Do(req)
	if err != nil {
		return errdefs.Unavailablef("install %s: %w", m.path, err)
	}
	defer resp.Body.Close()
	var answer struct {
		Message string `json:"message"`
	}
	_ = json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&answer)
	switch code := resp.StatusCode; {
	case code == http.StatusOK || code == http.StatusCreated:
		return nil
	case code == http.StatusNotFound || code == http.StatusForbidden || code == http.StatusConflict || code == http.StatusTooManyRequests || code >= http.StatusInternalServerError:
		return errdefs.Unavailablef("install %s: the API server answers %s: %s", m.path, resp.Status, answer.Message)
	}
	return fmt.Errorf("install %s: the API server answers %s: %s", m.path, resp.Status, answer.Message)
}
