package content

import (
	"bytes"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestUploadsAreLimited(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Uploads: UploadLimits{PerOwner: 3, Total: 5}}
	w := open(t, dir, cfg)
	begin := func(owner string, want Code) *Upload {
		t.Helper()
		u, err := w.Begin("a", owner)
		if CodeOf(err) != want || want != "" && !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Fatalf("an upload of %s: %v, want %q", owner, err, want)
		}
		return u
	}
	first := begin("ci", "")
	begin("ci", "")
	begin("ci", "")
	begin("ci", TooManyRequests)
	begin("dev", "")
	second := begin("dev", "")
	begin("dev", TooManyRequests)   // the total limit
	begin("other", TooManyRequests) // the total limit
	if d := diff.Of(Refused{PerOwner: 1, Total: 2}, w.Refused()); d != "" {
		t.Errorf("refused: %s", d)
	}
	if err := first.Append(t.Context(), bytes.NewReader([]byte("some")), 0, -1); err != nil {
		t.Fatal(err)
	}

	w = open(t, dir, cfg) // a restart keeps all uploads
	begin("ci", TooManyRequests)
	begin("other", TooManyRequests)
	if u, err := w.Upload("a", second.ID); err != nil || u.Cancel() != nil {
		t.Fatal(err)
	}
	begin("other", "")
	begin("other", TooManyRequests)

	w.pass(11 * time.Minute) // those without a byte expire by themselves
	begin("other", "")
	if n := w.Usage().Uploads; n != 2 {
		t.Errorf("%d uploads, want the one with bytes and the new one", n)
	}
	if _, err := w.Upload("a", first.ID); err != nil {
		t.Errorf("the upload with bytes: %v", err)
	}
}
