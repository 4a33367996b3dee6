package up

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/base64"
	"fmt"
	"os"
	"slices"
	"text/template"
	"time"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// KubeVirt's objects are served by the part manager: it has their controllers, and the API that virtctl uses.

const (
	kubeVirtServing = "kubevirt-serving"
	kubeVirtService = "virt-api.kubevirt.svc" // in a certificate
	kubeVirtAPI     = "/apis/subresources.kubevirt.io/v1"
	kubeVirtUploads = "/apis/upload.cdi.kubevirt.io/v1beta1"
	kubeVirtObject  = "/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt"
	kubeVirtConfig  = "/apis/cdi.kubevirt.io/v1beta1/cdiconfigs/config"
)

// kubeVirtRegistrations are the paths of the APIServices.
var kubeVirtRegistrations = []string{
	"/apis/apiregistration.k8s.io/v1/apiservices/v1.subresources.kubevirt.io",
	"/apis/apiregistration.k8s.io/v1/apiservices/v1alpha3.subresources.kubevirt.io",
	"/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.upload.cdi.kubevirt.io",
}

// kubeVirtKinds are the names of the kinds' definitions.
var kubeVirtKinds = []string{
	"kubevirts.kubevirt.io", "virtualmachines.kubevirt.io", "virtualmachineinstances.kubevirt.io", "virtualmachineinstancereplicasets.kubevirt.io",
	"virtualmachineinstancetypes.instancetype.kubevirt.io", "virtualmachineclusterinstancetypes.instancetype.kubevirt.io",
	"virtualmachinepreferences.instancetype.kubevirt.io", "virtualmachineclusterpreferences.instancetype.kubevirt.io",
	"datavolumes.cdi.kubevirt.io", "cdiconfigs.cdi.kubevirt.io",
	"virtualmachinesnapshots.snapshot.kubevirt.io", "virtualmachinesnapshotcontents.snapshot.kubevirt.io", "virtualmachinerestores.snapshot.kubevirt.io",
	"virtualmachineclones.clone.kubevirt.io", "virtualmachinepools.pool.kubevirt.io",
	"virtualmachineinstancemigrations.kubevirt.io", "virtualmachineinstancepresets.kubevirt.io", "migrationpolicies.migrations.kubevirt.io",
	"virtualmachineexports.export.kubevirt.io",
}

//go:embed kubevirt.yaml
var kubeVirtManifest string

// kubeVirt reports whether the instance serves KubeVirt's objects. Their API needs an address that is not loopback: a node's.
func (s Settings) kubeVirt() bool { return s.with(partManager) && len(s.Nodes) > 0 }

func (in *instance) kubeVirtAddr() string {
	return fmt.Sprintf("%s:%d", nodeIP, in.settings.KubeVirtPort)
}

// kubeVirtArgs are the manager's arguments.
func (in *instance) kubeVirtArgs() []string {
	if !in.settings.kubeVirt() {
		return nil
	}
	return []string{"--kubevirt-addr", in.kubeVirtAddr(), "--kubevirt-cert", in.pki.crt(kubeVirtServing), "--kubevirt-key", in.pki.key(kubeVirtServing)}
}

// kubeVirtBase is what the manager needs of the cluster before it starts.
func (in *instance) kubeVirtBase() [][]byte {
	if !in.settings.kubeVirt() {
		return nil
	}
	return append(kubevirt.Kinds(), kubevirt.Rights, kubevirt.Policy, kubevirt.ManagerRights, kubevirt.UploadRights, kubevirt.Namespace, []byte(kubeVirtBinding))
}

// checkKubeVirt looks for objects of a KubeVirt that is not ours. Names of KubeVirt's kinds belong to one of the two in a cluster.
// Errors: FailedPrecondition if there is one.
func (in *instance) checkKubeVirt(ctx context.Context) error {
	if !in.settings.kubeVirt() {
		return nil
	}
	for _, name := range kubeVirtKinds {
		if labels, ok := in.api.labels(ctx, collections["CustomResourceDefinition"]+"/"+name); ok && labels["app.kubernetes.io/part-of"] != "cocoon" {
			return errForeign("CustomResourceDefinition", name)
		}
	}
	for _, path := range kubeVirtRegistrations {
		if labels, ok := in.api.labels(ctx, path); ok && labels["app.kubernetes.io/managed-by"] != "cocoon-up" {
			return errForeign("APIService", path[len(collections["APIService"])+1:])
		}
	}
	return nil
}

func errForeign(kind, name string) error {
	return errdefs.Preconditionf("the %s %s is of another KubeVirt, and a cluster has room for one; remove that KubeVirt, or start without the part manager", kind, name)
}

// labels returns the labels of the object at path, if it exists.
func (c *apiClient) labels(ctx context.Context, path string) (map[string]string, bool) {
	var object struct {
		Metadata struct {
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
	}
	return object.Metadata.Labels, c.get(ctx, path, &object)
}

// unregisterKubeVirt removes the registration of an earlier start that served KubeVirt's objects: an API that is registered but not
// served blocks the deletion of namespaces. The objects stay.
func (in *instance) unregisterKubeVirt(ctx context.Context) error {
	if in.settings.kubeVirt() {
		return nil
	}
	for _, path := range slices.Concat(kubeVirtRegistrations, []string{kubeVirtObject, kubeVirtConfig}) {
		if err := in.api.remove(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

// registerKubeVirt makes the API server reach the API of the manager, which listens on loopback, at the first node's address. The
// rules of the bridge block guests from it.
func (in *instance) registerKubeVirt(ctx context.Context, also func(stop func())) error {
	if !in.settings.kubeVirt() {
		return nil
	}
	began := time.Now()
	addr := in.settings.Nodes[0].Address
	relay, err := startRelay(ctx, addr, in.kubeVirtAddr())
	if err != nil {
		return err
	}
	also(relay.Close)
	list, err := in.kubeVirtManifests(addr, relay.Port())
	if err != nil {
		return err
	}
	if err := in.install(ctx, list, in.manager().child, nil); err != nil {
		return err
	}
	if err := in.await(ctx, in.manager().child, nil, func(ctx context.Context) bool {
		var object struct {
			Status struct {
				Phase string `json:"phase"`
			} `json:"status"`
		}
		return in.api.get(ctx, kubeVirtAPI, nil) && in.api.get(ctx, kubeVirtUploads, nil) && in.api.get(ctx, kubeVirtObject, &object) && object.Status.Phase == "Deployed"
	}); err != nil {
		return err
	}
	in.report("KubeVirt's objects are served", time.Since(began))
	return nil
}

// kubeVirtManifests are the registration of the API at addr.
func (in *instance) kubeVirtManifests(addr string, port int) ([]manifest, error) {
	ca, err := os.ReadFile(in.pki.crt("ca"))
	if err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	t, err := template.New("kubevirt").Parse(kubeVirtManifest)
	if err != nil {
		return nil, fmt.Errorf("read manifest of KubeVirt's API: %w", err)
	}
	var text bytes.Buffer
	if err := t.Execute(&text, map[string]any{"Address": addr, "Port": port, "Uploads": in.kubeVirtAddr(), "CA": base64.StdEncoding.EncodeToString(ca)}); err != nil {
		return nil, fmt.Errorf("render manifest of KubeVirt's API: %w", err)
	}
	return manifests(text.Bytes())
}

// kubeVirtBinding gives the manager of an instance, which is identified by a certificate, its rights on KubeVirt's objects, and lets it
// read by which certificates the API server's proxy is known.
const kubeVirtBinding = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: cocoon-up:cocoon-manager-kubevirt
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: cocoon-manager-kubevirt
subjects:
  - apiGroup: rbac.authorization.k8s.io
    kind: User
    name: cocoon-manager
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: cocoon-up:cocoon-manager-auth-reader
  namespace: kube-system
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: extension-apiserver-authentication-reader
subjects:
  - apiGroup: rbac.authorization.k8s.io
    kind: User
    name: cocoon-manager
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: cocoon-up:cocoon-manager-uploads
  namespace: cocoon-system
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: cocoon-manager-uploads
subjects:
  - apiGroup: rbac.authorization.k8s.io
    kind: User
    name: cocoon-manager
`
