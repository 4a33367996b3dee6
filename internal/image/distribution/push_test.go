package distribution_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// export returns the content of an image as the store exports it.
func export(t testing.TB, s *local.Store, ref string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := s.Export(t.Context(), ref, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestPushOfContainerImage(t *testing.T) {
	srv := newServer(t, false)
	srv.pushImage(t, "app", ociimage.Image{Layers: []ociimage.Layer{
		layer(ociimage.File("a", "lower")), layer(ociimage.File("b", strings.Repeat("upper", 1000))),
	}})
	here, there := store(t, t.TempDir()), store(t, t.TempDir())
	c := client(here, nil)
	img, err := c.Pull(t.Context(), srv.host()+"/app:v1", "app:v1", nil, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	srv.sabotage(nil)
	var last image.Progress
	digest, err := c.Push(t.Context(), image.PushRequest{Ref: "app:v1", To: srv.host() + "/copy:v2"}, func(p image.Progress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	if last.Done != last.Total || last.Done == 0 || last.Phase != distribution.PhaseSend {
		t.Errorf("the last progress is %+v", last)
	}
	got, err := client(there, nil).Pull(t.Context(), srv.host()+"/copy:v2", "copy:v2", nil, false, nil)
	if err != nil || got.ID != img.ID || got.Digest != digest {
		t.Errorf("%+v, %v; want id %s, digest %s", got, err, img.ID, digest)
	}
	srv.sabotage(nil)
	again, err := c.Push(t.Context(), image.PushRequest{Ref: img.ID, To: srv.host() + "/copy:v3"}, nil)
	if err != nil || again != digest || srv.asked(http.MethodPost, "/blobs/") != 0 {
		t.Errorf("%s, %v: what is there was sent again in %d requests", again, err, srv.asked(http.MethodPost, "/blobs/"))
	}
}

// TestPushOfDisk pushes a disk in parts and pulls it again.
func TestPushOfDisk(t *testing.T) {
	srv := newServer(t, false)
	raw := make([]byte, 4<<20)
	random := rand.New(rand.NewChaCha8([32]byte{1}))
	for i := range 1 << 20 {
		raw[i+512<<10] = byte(random.Uint32())
	}
	raw[510], raw[511] = 0x55, 0xaa
	here, there := store(t, t.TempDir()), store(t, t.TempDir())
	img, err := here.Import(t.Context(), "disk", bytes.NewReader(raw), nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, part := range map[string]int64{"one": 0, "parts": 1 << 20} {
		c := distribution.New(distribution.Config{Backoff: time.Millisecond, Part: part, Keychain: noKeychain{}}, here)
		digest, err := c.Push(t.Context(), image.PushRequest{Ref: "disk", To: srv.host() + "/os/debian:" + name}, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := client(there, nil).Pull(t.Context(), srv.host()+"/os/debian:"+name, "debian:"+name, nil, false, nil)
		if err != nil || got.ID != img.ID || got.Digest != digest || !bytes.Equal(export(t, there, got.ID), raw) {
			t.Errorf("%s: %+v, %v; want %s", name, got, err, img.ID)
		}
	}
}

func TestPushOfDiskThatIsDamagedThere(t *testing.T) {
	srv := newServer(t, false)
	here, there := store(t, t.TempDir()), store(t, t.TempDir())
	raw := bytes.Repeat([]byte("disk"), 1<<18)
	raw[510], raw[511] = 0x55, 0xaa
	if _, err := here.Import(t.Context(), "disk", bytes.NewReader(raw), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := client(here, nil).Push(t.Context(), image.PushRequest{Ref: "disk", To: srv.host() + "/os"}, nil); err != nil {
		t.Fatal(err)
	}
	srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		_, _ = w.Write(append([]byte("x"), raw[1:]...))
		return true
	})
	if _, err := client(there, nil).Pull(t.Context(), srv.host()+"/os:latest", "os:latest", nil, false, nil); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("%v", err)
	}
	if all, err := there.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
}

func TestPushThatFails(t *testing.T) {
	srv := newServer(t, false)
	here := store(t, t.TempDir())
	raw := make([]byte, 1<<20)
	raw[510], raw[511] = 0x55, 0xaa
	if _, err := here.Import(t.Context(), "disk", bytes.NewReader(raw), nil); err != nil {
		t.Fatal(err)
	}
	c := client(here, nil)
	push := func(ref, to string) error {
		_, err := c.Push(t.Context(), image.PushRequest{Ref: ref, To: to, Token: "sesame"}, nil)
		if err != nil && strings.Contains(err.Error(), "sesame") {
			t.Errorf("the token is in the error: %v", err)
		}
		return err
	}
	if err := push("disk", srv.host()+"/Disk"); !errdefs.IsInvalid(err) {
		t.Errorf("%v", err)
	}
	if err := push("disk", srv.host()+"/disk@sha256:"+strings.Repeat("0", 64)); !errdefs.IsInvalid(err) {
		t.Errorf("%v", err)
	}
	if err := push("other", srv.host()+"/disk"); !errdefs.IsNotFound(err) {
		t.Errorf("%v", err)
	}
	for status, class := range map[int]errdefs.Class{
		http.StatusUnauthorized: errdefs.FailedPrecondition, http.StatusForbidden: errdefs.FailedPrecondition,
		http.StatusInsufficientStorage: errdefs.ResourceExhausted, http.StatusServiceUnavailable: errdefs.Unavailable,
	} {
		srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPost {
				return false
			}
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(status)
			return true
		})
		if err := push("disk", srv.host()+"/disk"); !errdefs.Is(err, class) {
			t.Errorf("%d: %v", status, err)
		}
	}
	srv.Close()
	if err := push("disk", srv.host()+"/disk"); !errdefs.IsUnavailable(err) {
		t.Errorf("%v", err)
	}
}

// TestPushWithTheHostsCredentials uses docker's credentials, unless the request has its own.
func TestPushWithTheHostsCredentials(t *testing.T) {
	srv := newServer(t, false)
	srv.sabotage(func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, _ := r.BasicAuth(); user == "node" && password == "sesame" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	here := store(t, t.TempDir())
	raw := make([]byte, 1<<20)
	raw[510], raw[511] = 0x55, 0xaa
	if _, err := here.Import(t.Context(), "disk", bytes.NewReader(raw), nil); err != nil {
		t.Fatal(err)
	}
	push := func(k authn.Keychain, r image.PushRequest) error {
		r.Ref, r.To = "disk", srv.host()+"/os"
		_, err := distribution.New(distribution.Config{Backoff: time.Millisecond, Keychain: k}, here).Push(t.Context(), r, nil)
		return err
	}
	if err := push(noKeychain{}, image.PushRequest{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("nobody: %v", err)
	}
	docker := keychain{Username: "node", Password: "sesame"}
	if err := push(docker, image.PushRequest{}); err != nil {
		t.Errorf("the host's: %v", err)
	}
	if err := push(docker, image.PushRequest{Username: "node", Password: "wrong"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the request's: %v", err)
	}
}

type keychain authn.AuthConfig

func (k keychain) Resolve(authn.Resource) (authn.Authenticator, error) {
	return authn.FromConfig(authn.AuthConfig(k)), nil
}
