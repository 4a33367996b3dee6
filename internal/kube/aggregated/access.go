package aggregated

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	authorizationv1 "k8s.io/client-go/kubernetes/typed/authorization/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// access says who sends a request and whether that user may send it.
type access interface {
	authenticator.Request
	authorizer.Authorizer
	// run keeps what it knows up to date until ctx ends.
	run(ctx context.Context)
	ready() error
}

// The API server publishes the certificates and headers of its proxy in this ConfigMap of kube-system.
const proxyConfiguration = "extension-apiserver-authentication"

// frontProxy knows users only from the headers that the API server's proxy sets. The proxy is known by a client certificate of
// its own authority and with one of the allowed names. Bearer tokens and other client certificates are not accepted.
type frontProxy struct {
	authenticator.Request
	authorizer.Authorizer
	authority *dynamiccertificates.ConfigMapCAController
	headers   *headerrequest.RequestHeaderAuthRequestController
}

func newFrontProxy(kube kubernetes.Interface, reviews authorizationv1.AuthorizationV1Interface) (*frontProxy, error) {
	authority, err := dynamiccertificates.NewDynamicCAFromConfigMapController("front-proxy", metav1.NamespaceSystem, proxyConfiguration, "requestheader-client-ca-file", kube)
	if err != nil {
		return nil, fmt.Errorf("follow the certificates of the API server's proxy: %w", err)
	}
	h := headerrequest.NewRequestHeaderAuthRequestController(proxyConfiguration, metav1.NamespaceSystem, kube,
		"requestheader-username-headers", "requestheader-uid-headers", "requestheader-group-headers",
		"requestheader-extra-headers-prefix", "requestheader-allowed-names")
	authz, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: reviews, AllowCacheTTL: 10 * time.Second, DenyCacheTTL: 10 * time.Second,
		WebhookRetryBackoff: &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 5},
	}.New()
	if err != nil {
		return nil, fmt.Errorf("set up authorization: %w", err)
	}
	of := func(f headerrequest.StringSliceProviderFunc) headerrequest.StringSliceProvider { return f }
	return &frontProxy{
		Request: headerrequest.NewDynamicVerifyOptionsSecure(authority.VerifyOptions, of(h.AllowedClientNames), of(h.UsernameHeaders),
			of(h.UIDHeaders), of(h.GroupHeaders), of(h.ExtraHeaderPrefixes)),
		Authorizer: authz, authority: authority, headers: h,
	}, nil
}

func (p *frontProxy) run(ctx context.Context) {
	var both sync.WaitGroup
	both.Go(func() { p.authority.Run(ctx, 1) })
	both.Go(func() { p.headers.Run(ctx, 1) })
	both.Wait()
}

func (p *frontProxy) ready() error {
	if _, ok := p.authority.VerifyOptions(); !ok || len(p.headers.UsernameHeaders()) == 0 {
		return errdefs.Unavailablef("the certificates and headers of the API server's proxy are not known yet; "+
			"the manager must be allowed to read ConfigMap %s of %s", proxyConfiguration, metav1.NamespaceSystem)
	}
	return nil
}

// target is what a request is about.
type target struct {
	*request.RequestInfo
	rest []string // parts of the path after the subresource
}

// of returns RESOURCE/SUBRESOURCE, or RESOURCE alone.
func (t target) of() string {
	if t.Subresource == "" {
		return t.Resource
	}
	return t.Resource + "/" + t.Subresource
}

var paths = request.RequestInfoFactory{APIPrefixes: sets.NewString("apis"), GrouplessAPIPrefixes: sets.NewString()}

// targetOf parses the path. found is false for a path that names no subresource of an object of the group.
func targetOf(r *http.Request) (t target, found bool) {
	info, err := paths.NewRequestInfo(r)
	if err != nil || !info.IsResourceRequest || !servedVersion(info.APIGroup, info.APIVersion) {
		return target{}, false
	}
	whole := len(info.Parts) == 1 && info.Resource == expandVMSpec && info.APIGroup == Group
	if info.APIGroup == UploadGroup {
		if whole = len(info.Parts) == 1 && info.Resource == uploadTokens; !whole {
			return target{}, false
		}
	}
	if len(info.Parts) < 3 && !whole {
		return target{}, false
	}
	// Other ways to write the path, with a deprecated prefix or empty parts, are not served: they could be authorized as
	// something else.
	if r.URL.Path != "/apis/"+info.APIGroup+"/"+info.APIVersion+"/namespaces/"+info.Namespace+"/"+strings.Join(info.Parts, "/") {
		return target{}, false
	}
	if len(validation.IsDNS1123Label(info.Namespace)) > 0 || !whole && len(validation.IsDNS1123Subdomain(info.Name)) > 0 {
		return target{}, false
	}
	if whole {
		return target{RequestInfo: info}, true
	}
	t = target{RequestInfo: info, rest: info.Parts[3:]}
	for _, two := range []string{screenshotSubresource, cancelSubresource} { // subresources of two words
		if strings.Join(info.Parts[2:], "/") == two {
			info.Subresource, t.rest = two, nil
		}
	}
	return t, true
}

func servedVersion(group, version string) bool {
	return group == Group && slices.Contains(Versions, version) || group == UploadGroup && version == UploadVersion
}

// open lists the paths that every user of the API server may read: they say what the API is.
func open(path string) bool {
	switch path {
	case "/", "/apis", "/apis/" + Group, "/apis/" + UploadGroup, "/apis/" + UploadGroup + "/" + UploadVersion, "/healthz", "/livez", "/readyz":
		return true
	}
	for _, version := range Versions {
		at := "/apis/" + Group + "/" + version
		if path == at || path == at+"/version" || path == at+"/healthz" {
			return true
		}
	}
	return false
}

// guard passes only requests of the API server's proxy to next, for users with the right to send them.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, ok, err := s.access.AuthenticateRequest(r)
		if err != nil || !ok {
			if err != nil {
				s.opts.Log.Debug("authentication of a request failed", "err", err)
			}
			fail(w, apierrors.NewUnauthorized("this API answers only the proxy of the API server"))
			return
		}
		if open(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		t, found := targetOf(r)
		if !found {
			fail(w, missing(r))
			return
		}
		verb := map[string]string{http.MethodGet: "get", http.MethodPut: "update"}[r.Method]
		if t.APIGroup == UploadGroup {
			verb = map[string]string{http.MethodPost: "create"}[r.Method]
		}
		if verb == "" {
			fail(w, apierrors.NewMethodNotSupported(schema.GroupResource{Group: t.APIGroup, Resource: t.of()}, strings.ToLower(r.Method)))
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		decision, why, err := s.access.Authorize(ctx, authorizer.AttributesRecord{
			User: who.User, Verb: verb, Namespace: t.Namespace, APIGroup: t.APIGroup, APIVersion: t.APIVersion, Resource: t.Resource,
			Subresource: t.Subresource, Name: t.Name, ResourceRequest: true, Path: r.URL.Path,
		})
		cancel()
		switch {
		case decision == authorizer.DecisionAllow:
			next.ServeHTTP(w, r)
		case err != nil:
			s.opts.Log.Warn("authorization of a request failed", "err", err)
			fail(w, apierrors.NewInternalError(fmt.Errorf("check the rights of user %q: %w", who.User.GetName(), err)))
		default:
			fail(w, apierrors.NewForbidden(schema.GroupResource{Group: t.APIGroup, Resource: t.of()}, t.Name,
				fmt.Errorf("user %q cannot %s resource %q in API group %q in the namespace %q%s",
					who.User.GetName(), verb, t.of(), t.APIGroup, t.Namespace, prefixed(why))))
		}
	})
}

func prefixed(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}
