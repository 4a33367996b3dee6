//go:build cri

package cocoond_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
)

// privateRegistry serves the images of containerdtest to the user ann with the password.
func privateRegistry(t *testing.T, password string) (host string) {
	t.Helper()
	to, err := url.Parse(containerdtest.Serve(t).URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Header.Del("Authorization")
	}}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, given, ok := r.BasicAuth(); !ok || user != "ann" || given != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// TestApplianceRegistries: a container and a micro-VM run images of a private registry once the machine has credentials for it, which
// nobody reads again.
func TestApplianceRegistries(t *testing.T) {
	const password = "pa55:word-of-ann"
	d := containerdtest.Start(t)
	n, o := newAppliance(t, "appliance: {containerd: "+d.Socket()+", listen: ADDR}")
	ctx := t.Context()
	host := privateRegistry(t, password)
	_, name, _ := strings.Cut(containerdtest.BusyBox, "/")
	name = host + "/" + name
	c := ofContainer("c", &capsulev1.ContainerSpec{Command: []string{"sleep", "100000"}, NetworkMode: capsulev1.NetworkMode_NETWORK_MODE_NONE})
	v := microVM("v", &capsulev1.MicroVMSpec{Command: []string{"sleep", "100000"}})
	c.Container.Image, v.MicroVm.Image = name, name
	for _, w := range []*capsulev1.Workload{c, v} {
		o.apply(w)
		o.until(w.GetName(), "is refused", func(s *capsulev1.WorkloadStatus) bool { return s.GetReason() == "StartFailed" })
	}
	_, err := o.images.RegistryLogin(ctx, &capsulev1.RegistryLoginRequest{Registry: host + "/path", Username: "ann", Password: password})
	o.code("a path", err, codes.InvalidArgument, "HOST:PORT")
	if _, err := o.images.RegistryLogin(ctx, &capsulev1.RegistryLoginRequest{Registry: host, Username: "ann", Password: password}); err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"c", "v"} {
		if _, err := o.workloads.Restart(ctx, &capsulev1.WorkloadRestartRequest{Name: w}); err != nil {
			t.Fatal(err)
		}
		o.until(w, "runs", func(s *capsulev1.WorkloadStatus) bool {
			return s.GetPhase() == capsulev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING
		})
	}
	n.crash()
	list, err := o.images.RegistryList(ctx, &capsulev1.RegistryListRequest{})
	if err != nil || len(list.GetRegistries()) != 1 || list.GetRegistries()[0].GetRegistry() != host || list.GetRegistries()[0].GetUsername() != "ann" {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := o.images.RegistryLogout(ctx, &capsulev1.RegistryLogoutRequest{Registry: host}); err != nil {
		t.Error(err)
	}
	_, err = o.images.RegistryLogout(ctx, &capsulev1.RegistryLogoutRequest{Registry: host})
	o.code("twice", err, codes.NotFound, "no credentials")

	// The password is nowhere: it was in one file, which is rewritten.
	err = filepath.WalkDir(n.dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || strings.Contains(path, "/images/") {
			return nil //nolint:nilerr // it is gone meanwhile
		}
		if info, err := e.Info(); err != nil || info.Size() > 16<<20 {
			return nil //nolint:nilerr // likewise
		}
		b, _ := os.ReadFile(path)
		if bytes.Contains(b, []byte(password)) {
			t.Errorf("the password is in %s", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	o.delete("c", "v")
}
