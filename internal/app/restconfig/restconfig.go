// Package restconfig reads the credentials for a cluster, in the same way for every binary that uses one. It sends
// nothing.
package restconfig

import (
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Load reads the kubeconfig at path; "" means the credentials of the pod that the process runs in.
// Errors: FailedPrecondition.
func Load(path string) (*rest.Config, error) {
	if path == "" {
		rc, err := rest.InClusterConfig()
		if err != nil {
			return nil, errdefs.Preconditionf("no kubeconfig is given (KUBECONFIG or --kubeconfig) and this does not run in a cluster: %w", err)
		}
		return rc, nil
	}
	rc, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, errdefs.Preconditionf("kubeconfig %s: %w", path, err)
	}
	return rc, nil
}
