package convert

import (
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Annotations of Kubernetes that limit what a pod can transfer.
const (
	ingressBandwidth = "kubernetes.io/ingress-bandwidth"
	egressBandwidth  = "kubernetes.io/egress-bandwidth"
)

// bandwidth returns the limits that the annotations of a pod have.
// Errors: InvalidArgument for one that is no quantity.
func bandwidth(annotations map[string]string) (out vm.Bandwidth, err error) {
	for key, to := range map[string]*int64{ingressBandwidth: &out.Ingress, egressBandwidth: &out.Egress} {
		text, ok := annotations[key]
		if !ok {
			continue
		}
		q, err := resource.ParseQuantity(text)
		if err != nil || q.Value() <= 0 {
			return out, errdefs.Invalidf("the annotation %s is %q; use bits per second, for example 10M", key, text)
		}
		*to = q.Value()
	}
	return out, nil
}
