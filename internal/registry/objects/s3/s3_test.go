package s3_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/objects/objectstest"
	"cocoonstack.io/cocoon/internal/registry/objects/s3"
)

func service(t *testing.T) string {
	t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(gofakes3.New(backend).Server())
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

func config(t *testing.T) s3.Config {
	return s3.Config{Endpoint: service(t), Insecure: true, Region: "us-east-1", Bucket: "bucket", Prefix: "epoch/", Access: "a", Secret: "s", Staging: t.TempDir()}
}

func TestStore(t *testing.T) {
	objectstest.Run(t, func(t *testing.T) objects.Store {
		s, err := s3.New(t.Context(), config(t))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func TestWhatIsWrongIsSaidAtOnce(t *testing.T) {
	for name, change := range map[string]func(*s3.Config){
		"no bucket":   func(c *s3.Config) { c.Bucket = "other" },
		"no endpoint": func(c *s3.Config) { c.Endpoint = "" },
	} {
		cfg := config(t)
		change(&cfg)
		if _, err := s3.New(t.Context(), cfg); !errdefs.IsFailedPrecondition(err) && !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
