package kubetest

import (
	"net/http"
	"strings"
)

// tries limits how often a request is made. The API server takes half a minute for each before it answers Timeout.
const tries = 5

// Patient returns a transport that repeats a request when the API server answers Timeout (504), as it does on a busy machine.
func Patient(next http.RoundTripper) http.RoundTripper { return patient{next} }

type patient struct{ next http.RoundTripper }

// WrappedRoundTripper implements net.RoundTripperWrapper of apimachinery.
func (p patient) WrappedRoundTripper() http.RoundTripper { return p.next }

// RoundTrip implements http.RoundTripper.
func (p patient) RoundTrip(r *http.Request) (*http.Response, error) {
	for try := 1; ; try++ {
		resp, err := p.next.RoundTrip(r)
		if err != nil || resp.StatusCode != http.StatusGatewayTimeout || try == tries || r.Body != nil && r.GetBody == nil {
			return resp, err
		}
		resp.Body.Close()
		if r = r.Clone(r.Context()); r.Body != nil {
			if r.Body, err = r.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// late says whether kubectl failed because the API server, or a webhook that it called, had no time.
func late(out string) bool {
	return strings.Contains(out, "Error from server (Timeout)") || strings.Contains(out, "failed calling webhook") && strings.Contains(out, "context deadline exceeded")
}
