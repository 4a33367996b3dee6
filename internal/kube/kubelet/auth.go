package kubelet

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
)

// Auth authenticates and authorizes requests. Anonymous requests are refused.
type Auth interface {
	authenticator.Request
	authorizer.Authorizer
	// NodeName returns the node for which permissions are checked.
	NodeName() string
}

type delegated struct {
	authenticator.Request
	authorizer.Authorizer
	node string
}

func (d delegated) NodeName() string { return d.node }

// Delegate returns an Auth that works like the kubelet's. It accepts client certificates signed by clientCA (nil: none), and
// bearer tokens that a TokenReview accepts. A SubjectAccessReview decides about permissions. Cache times are the kubelet's.
func Delegate(client kubernetes.Interface, node string, clientCA dynamiccertificates.CAContentProvider) (Auth, error) {
	retry := &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 5}
	authn, _, err := authenticatorfactory.DelegatingAuthenticatorConfig{
		TokenAccessReviewClient: client.AuthenticationV1(), TokenAccessReviewTimeout: 10 * time.Second,
		WebhookRetryBackoff: retry, CacheTTL: 2 * time.Minute, ClientCertificateCAContentProvider: clientCA,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("set up authentication: %w", err)
	}
	authz, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: client.AuthorizationV1(), AllowCacheTTL: 5 * time.Minute, DenyCacheTTL: 30 * time.Second,
		WebhookRetryBackoff: retry,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("set up authorization: %w", err)
	}
	return delegated{Request: authn, Authorizer: authz, node: node}, nil
}

// guard passes only authenticated and authorized requests to next.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, ok, err := s.cfg.Auth.AuthenticateRequest(r)
		if err != nil || !ok {
			if err != nil {
				s.cfg.Log.Debug("authentication of a request failed", "err", err)
			}
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		allowed, err := s.allowed(r.Context(), who.User, r)
		if err != nil {
			s.cfg.Log.Warn("authorization of a request failed", "err", err)
			http.Error(w, "Authorization error (user="+who.User.GetName()+")", http.StatusInternalServerError)
			return
		}
		if !allowed {
			http.Error(w, fmt.Sprintf("Forbidden (user=%s, verb=%s, resource=nodes, subresource(s)=%v)",
				who.User.GetName(), verb(r.Method), subresources(r.URL.Path)), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// allowed checks the subresources that cover the path, one after the other, until the user has access to one.
func (s *Server) allowed(ctx context.Context, who user.Info, r *http.Request) (bool, error) {
	var failed error
	for _, sub := range subresources(r.URL.Path) {
		decision, _, err := s.cfg.Auth.Authorize(ctx, authorizer.AttributesRecord{
			User: who, Verb: verb(r.Method), APIVersion: "v1", Resource: "nodes", Subresource: sub,
			Name: s.cfg.Auth.NodeName(), ResourceRequest: true, Path: r.URL.Path,
		})
		if decision == authorizer.DecisionAllow {
			return true, nil
		}
		if err != nil {
			failed = err
		}
	}
	return false, failed
}

func verb(method string) string {
	switch method {
	case http.MethodPost:
		return "create"
	case http.MethodGet, http.MethodHead:
		return "get"
	case http.MethodPut:
		return "update"
	case http.MethodPatch:
		return "patch"
	case http.MethodDelete:
		return "delete"
	}
	return ""
}

// subresources returns the subresources of nodes that give access to a path, as in the kubelet. A fine-grained subresource
// comes first.
func subresources(path string) []string {
	under := func(prefix string) bool { return path == prefix || strings.HasPrefix(path, prefix+"/") }
	switch {
	case under("/pods"), under("/runningpods"):
		return []string{"pods", "proxy"}
	case under("/healthz"):
		return []string{"healthz", "proxy"}
	case under("/configz"):
		return []string{"configz", "proxy"}
	case under("/stats"):
		return []string{"stats"}
	case under("/metrics"):
		return []string{"metrics"}
	case under("/logs"):
		return []string{"log"}
	}
	return []string{"proxy"}
}
