package pull

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// inside is a server that only the node can reach. It counts its requests.
func inside(t *testing.T) (host string, came *atomic.Int64) {
	came = &atomic.Int64{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		came.Add(1)
		if strings.HasSuffix(r.URL.Path, ".img") {
			_, _ = w.Write(diskOf(9, 1<<20))
			return
		}
		http.NotFound(w, r)
	}))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://"), came
}

// A name from a pod cannot reach what only the node can reach; a name from the operator can.
func TestPodsReachNoPrivateNetworks(t *testing.T) {
	host, came := inside(t)
	_, port, _ := strings.Cut(host, ":")
	r := newRig(t, Config{Regexps: true})
	r.mapping("translations:\n- {name: alias, url: 'http://" + host + "/a.img'}\n" +
		"- {regexp: 'file/(\\w+)', fullMatch: true, url: 'http://" + host + "/$1.img'}\n" +
		"- {regexp: 'any/(.+)', fullMatch: true, url: 'http://$1/b.img'}\n")
	pull := func(namespace, name string) error {
		_, err := r.Pull(r.behalf(namespace), image.PullRequest{Name: name}, nil)
		return err
	}
	for _, name := range []string{
		"http://" + host + "/u.img", "virtlet.cloud/" + host + "/u.img", host + "/u.img", "http://localhost:" + port + "/u.img",
		"http://u:p@" + host + "/u.img", "http://127.1:" + port + "/u.img", "virtlet.cloud/any/" + host,
		host + "/team/app:1", "localhost:" + port + "/team/app:1", "oci://" + host + "/team/app:1", host + "/team/app@" + sum(nil),
		"virtlet.cloud/169.254.169.254/latest/u.img",
	} {
		if err := pull("bob", name); !errdefs.IsFailedPrecondition(err) && !errdefs.IsUnavailable(err) && !errdefs.IsInvalid(err) || came.Load() > 0 {
			t.Fatalf("%s: %v, %d requests", name, err, came.Load())
		}
	}
	err := pull("bob", "http://"+host+"/u.img")
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("what is said of it: %v", err)
	}
	err = pull("bob", host+"/team/app:1")
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("what is said of a registry: %v", err)
	}
	for _, name := range []string{"virtlet.cloud/alias", "virtlet.cloud/file/c"} {
		if err := pull("bob", name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := pull("", "http://"+host+"/u.img"); err != nil {
		t.Errorf("the operator: %v", err)
	}
}

// A redirect cannot reach what the URL itself could not.
func TestRedirectsReachNoPrivateNetworks(t *testing.T) {
	host, came := inside(t)
	_, port, _ := strings.Cut(host, ":")
	front := httptest.NewServer(http.RedirectHandler("http://localhost:"+port+"/u.img", http.StatusFound))
	t.Cleanup(front.Close)
	at := strings.TrimPrefix(front.URL, "http://")
	open, err := (reach.Policy{Setting: "images.allow"}).Open([]string{at})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, Config{Reach: Reach{URLs: open}})
	_, err = r.Pull(r.behalf("bob"), image.PullRequest{Name: front.URL + "/u.img"}, nil)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "images.allow") || came.Load() > 0 {
		t.Errorf("%v, %d requests", err, came.Load())
	}
}

// Registries that the operator names are open. For others, the place of their tokens is checked like the registry itself.
func TestRegistriesOfPods(t *testing.T) {
	need.Tool(t, "mkfs.ext4")
	h, _ := newOffice(t)
	h.push(t, "public/app:1", "x")
	r := newRig(t, Config{Registries: distribution.Config{Registries: map[string]distribution.RegistryConfig{h.host: {}}}})
	if _, err := r.wish(h, wish{"bob", "", h.host + "/public/app:1", image.PullIfNotPresent}); err != nil {
		t.Errorf("a registry that is configured: %v", err)
	}

	host, came := inside(t)
	_, port, _ := strings.Cut(host, ":")
	theirs := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://localhost:`+port+`/token",service="x"`)
		w.WriteHeader(http.StatusUnauthorized)
	}))
	t.Cleanup(theirs.Close)
	at := strings.TrimPrefix(theirs.URL, "http://")
	open, err := (reach.Policy{}).Open([]string{at})
	if err != nil {
		t.Fatal(err)
	}
	r = newRig(t, Config{Reach: Reach{Registries: open}})
	_, err = r.wish(h, wish{"bob", "", at + "/team/app:1", image.PullIfNotPresent})
	if !errdefs.IsFailedPrecondition(err) || came.Load() > 0 {
		t.Errorf("by the realm of a challenge: %v, %d requests", err, came.Load())
	}
}
