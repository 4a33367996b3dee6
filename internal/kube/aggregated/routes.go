package aggregated

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	deploy "cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/version"
)

const (
	machines  = "virtualmachines"
	instances = "virtualmachineinstances"
)

// A route serves one subresource.
type route struct {
	group  string // "": Group
	method string
	stream bool // it answers with a websocket, and takes as long as its client wants
	serve  func(*Server, http.ResponseWriter, *http.Request, target) error
}

// served are the subresources, by RESOURCE/SUBRESOURCE, and a resource that has no objects.
var served = map[string]route{
	machines + "/start":   {method: http.MethodPut, serve: (*Server).start},
	machines + "/stop":    {method: http.MethodPut, serve: (*Server).stop},
	machines + "/restart": {method: http.MethodPut, serve: (*Server).restart},

	machines + "/expand-spec": {method: http.MethodGet, serve: (*Server).expandMachine},
	expandVMSpec:              {method: http.MethodPut, serve: (*Server).expandGiven},
	uploadTokens:              {group: UploadGroup, method: http.MethodPost, serve: (*Server).uploadToken},

	instances + "/console":     {method: http.MethodGet, stream: true, serve: (*Server).console},
	instances + "/portforward": {method: http.MethodGet, stream: true, serve: (*Server).portForward},
	machines + "/portforward":  {method: http.MethodGet, stream: true, serve: (*Server).portForward},

	instances + "/" + vncSubresource:        {method: http.MethodGet, stream: true, serve: (*Server).vnc},
	instances + "/" + screenshotSubresource: {method: http.MethodGet, serve: (*Server).screenshot},

	instances + "/pause":   {method: http.MethodPut, serve: (*Server).pause},
	instances + "/unpause": {method: http.MethodPut, serve: (*Server).unpause},

	instances + "/reset":      {method: http.MethodPut, serve: reboot(true)},
	instances + "/softreboot": {method: http.MethodPut, serve: reboot(false)},

	instances + "/freeze":          {method: http.MethodPut, serve: (*Server).freeze},
	instances + "/unfreeze":        {method: http.MethodPut, serve: (*Server).unfreeze},
	instances + "/addvolume":       {method: http.MethodPut, serve: (*Server).addVolume},
	instances + "/removevolume":    {method: http.MethodPut, serve: (*Server).removeVolume},
	machines + "/addvolume":        {method: http.MethodPut, serve: (*Server).addVolume},
	machines + "/removevolume":     {method: http.MethodPut, serve: (*Server).removeVolume},
	machines + "/migrate":          {method: http.MethodPut, serve: unoffered("live migration yet")},
	machines + "/memorydump":       {method: http.MethodPut, serve: (*Server).memoryDump},
	machines + "/removememorydump": {method: http.MethodPut, serve: (*Server).removeMemoryDump},

	instances + "/" + cancelSubresource: {method: http.MethodPut, serve: (*Server).cancelEvacuation},
	machines + "/" + cancelSubresource:  {method: http.MethodPut, serve: (*Server).cancelEvacuation},

	instances + "/guestosinfo":    {method: http.MethodGet, serve: (*Server).guestOSInfo},
	instances + "/userlist":       {method: http.MethodGet, serve: (*Server).userList},
	instances + "/filesystemlist": {method: http.MethodGet, serve: (*Server).fileSystemList},
}

// dispatch serves a request that access has passed.
func (s *Server) dispatch(w http.ResponseWriter, r *http.Request) {
	if open(r.URL.Path) {
		s.describe(w, r)
		return
	}
	t, found := targetOf(r)
	if !found {
		fail(w, missing(r))
		return
	}
	to, known := served[t.of()]
	switch {
	case !known || cmp.Or(to.group, Group) != t.APIGroup || len(t.rest) > 0 && t.Subresource != "portforward":
		fail(w, missing(r))
		return
	case r.Method != to.method:
		fail(w, apierrors.NewMethodNotSupported(schema.GroupResource{Group: Group, Resource: t.of()}, strings.ToLower(r.Method)))
		return
	}
	if !to.stream {
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		r = r.WithContext(ctx)
	}
	if err := to.serve(s, w, r, t); err != nil {
		fail(w, err)
	}
}

// describe answers the paths that say what the API is.
func (s *Server) describe(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		fail(w, apierrors.NewMethodNotSupported(schema.GroupResource{Group: Group}, strings.ToLower(r.Method)))
		return
	}
	var body any
	if strings.HasPrefix(r.URL.Path, "/apis/"+UploadGroup) {
		describeUploads(w, r)
		return
	}
	at, _ := strings.CutPrefix(r.URL.Path, "/apis/"+Group+"/")
	of, what, _ := strings.Cut(at, "/")
	switch {
	case r.URL.Path == "/":
		body = metav1.RootPaths{Paths: []string{"/apis", "/apis/" + Group, "/apis/" + Group + "/" + Versions[0], "/healthz"}}
	case r.URL.Path == "/apis":
		body = metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}, Groups: []metav1.APIGroup{group(), uploadGroup()}}
	case r.URL.Path == "/apis/"+Group:
		body = group()
	case what == "version":
		body = product()
	case what == "healthz" || !slices.Contains(Versions, of):
		_, _ = w.Write([]byte("ok"))
		return
	default:
		body = resources(of)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body)
}

func group() metav1.APIGroup {
	g := metav1.APIGroup{TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}, Name: Group}
	for _, version := range Versions {
		g.Versions = append(g.Versions, metav1.GroupVersionForDiscovery{GroupVersion: Group + "/" + version, Version: version})
	}
	g.PreferredVersion = g.Versions[0]
	return g
}

// resources lists the subresources. The objects themselves are not in the list: they belong to another group.
func resources(version string) metav1.APIResourceList {
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: Group + "/" + version}
	for name, to := range served {
		if to.group != "" {
			continue
		}
		if !strings.Contains(name, "/") { // as KubeVirt has it: clients must not take it for objects
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: name, Namespaced: true, Verbs: metav1.Verbs{}})
			continue
		}
		kind, verb := "VirtualMachine", "update"
		if strings.HasPrefix(name, instances+"/") {
			kind = "VirtualMachineInstance"
		}
		if to.method == http.MethodGet {
			verb = "get"
		}
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: name, Namespaced: true, Kind: kind, Verbs: metav1.Verbs{verb}})
	}
	slices.SortFunc(list.APIResources, func(a, b metav1.APIResource) int { return strings.Compare(a.Name, b.Name) })
	return list
}

type productVersion struct {
	GitVersion    string `json:"gitVersion"`
	GitCommit     string `json:"gitCommit"`
	GitTreeState  string `json:"gitTreeState"`
	BuildDate     string `json:"buildDate"`
	GoVersion     string `json:"goVersion"`
	Compiler      string `json:"compiler"`
	Platform      string `json:"platform"`
	CocoonVersion string `json:"cocoonVersion"` // our own
}

func product() productVersion {
	return productVersion{
		GitVersion: deploy.Version, GitTreeState: "clean", GoVersion: runtime.Version(), Compiler: runtime.Compiler,
		Platform: runtime.GOOS + "/" + runtime.GOARCH, CocoonVersion: version.Version,
	}
}

// unoffered answers that Cocoon does not offer what was asked for.
func unoffered(what string) func(*Server, http.ResponseWriter, *http.Request, target) error {
	return func(s *Server, _ http.ResponseWriter, r *http.Request, t target) error {
		if err := s.exists(r.Context(), t); err != nil {
			return err
		}
		return conflict(t, "Cocoon does not offer %s", what)
	}
}

func (s *Server) exists(ctx context.Context, t target) error {
	if t.Resource == machines {
		_, err := s.machine(ctx, t)
		return err
	}
	_, err := s.instance(ctx, t)
	return err
}

// machine returns the VirtualMachine of the target. Errors: 404.
func (s *Server) machine(ctx context.Context, t target) (*v1.VirtualMachine, error) {
	vm := &v1.VirtualMachine{}
	return vm, s.get(ctx, t, "virtualmachine", vm)
}

// instance returns the VirtualMachineInstance of the target. Errors: 404.
func (s *Server) instance(ctx context.Context, t target) (*v1.VirtualMachineInstance, error) {
	vmi := &v1.VirtualMachineInstance{}
	return vmi, s.get(ctx, t, "virtualmachineinstance", vmi)
}

func (s *Server) get(ctx context.Context, t target, kind string, into client.Object) error {
	err := s.opts.Client.Get(ctx, types.NamespacedName{Namespace: t.Namespace, Name: t.Name}, into)
	if apierrors.IsNotFound(err) {
		return apierrors.NewNotFound(v1.Resource(kind), t.Name)
	}
	if err != nil {
		return fmt.Errorf("get %s %s/%s: %w", kind, t.Namespace, t.Name, err)
	}
	return nil
}

// conflict is the answer for an object in a state that does not allow what was asked for.
func conflict(t target, format string, args ...any) error {
	return apierrors.NewConflict(v1.Resource(strings.TrimSuffix(t.Resource, "s")), t.Name, fmt.Errorf(format, args...))
}

// maxBody is the limit of a request's body in bytes.
const maxBody = 64 << 10

// decode reads the body into options, if there is one. Errors: 400, 413.
func decode(w http.ResponseWriter, r *http.Request, options any) error {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields()
	err := dec.Decode(options)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil {
		if _, more := dec.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("there is more than one JSON value")
			if more != nil {
				err = more
			}
		}
	}
	switch large := (*http.MaxBytesError)(nil); {
	case errors.As(err, &large):
		return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("the limit is %d bytes", large.Limit))
	case err != nil:
		return apierrors.NewBadRequest(fmt.Sprintf("Can not unmarshal Request body to struct, error: %s", err))
	}
	return nil
}

// dryRun joins what the body and the query say. Errors: 400.
func dryRun(r *http.Request, body []string) ([]string, error) {
	all := slices.Concat(body, r.URL.Query()["dryRun"])
	for _, v := range all {
		if v != metav1.DryRunAll {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("dryRun %q must be %s", v, metav1.DryRunAll))
		}
	}
	return slices.Compact(all), nil
}
