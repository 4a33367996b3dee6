package aggregated

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	uploadv1beta1 "kubevirt.io/containerized-data-importer-api/pkg/apis/upload/v1beta1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// fakeUploads has a claim of each namespace, called disk.
type fakeUploads struct{}

func (*fakeUploads) Token(_ context.Context, namespace, claim string) (string, error) {
	switch claim {
	case "disk":
		return "token of " + namespace, nil
	case "full":
		return "", errdefs.Preconditionf("it has its disk")
	}
	return "", errdefs.NotFoundf("no such claim")
}

func (*fakeUploads) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(w, r.Body)
}

const tokensPath = "/apis/upload.cdi.kubevirt.io/v1beta1/namespaces/team/uploadtokenrequests"

func TestUploadTokens(t *testing.T) {
	r := start(t)
	body := func(claim string) string {
		return `{"kind":"UploadTokenRequest","apiVersion":"upload.cdi.kubevirt.io/v1beta1","metadata":{"generateName":"x-"},"spec":{"pvcName":"` + claim + `"},"status":{}}`
	}
	code, text, header := r.do(call{method: http.MethodPost, path: tokensPath, body: body("disk"), cert: r.proxy})
	var got uploadv1beta1.UploadTokenRequest
	if err := json.Unmarshal([]byte(text), &got); err != nil || code != http.StatusCreated || got.Status.Token != "token of team" || got.Namespace != "team" || header.Get("Cache-Control") != "no-store" {
		t.Errorf("%d %s, %v", code, text, err)
	}
	if a := r.reviews[len(r.reviews)-1].ResourceAttributes; a.Verb != "create" || a.Group != UploadGroup || a.Resource != "uploadtokenrequests" || a.Namespace != "team" {
		t.Errorf("the review: %+v", a)
	}
	for name, c := range map[string]struct {
		call
		code int
	}{
		"no right":         {call{user: "mallory", body: body("disk")}, http.StatusForbidden},
		"no proxy":         {call{cert: r.other, body: body("disk")}, http.StatusUnauthorized},
		"no claim":         {call{body: body("none")}, http.StatusNotFound},
		"a full one":       {call{body: body("full")}, http.StatusConflict},
		"a hostile name":   {call{body: body("../x")}, http.StatusBadRequest},
		"no JSON":          {call{body: "{"}, http.StatusBadRequest},
		"too long":         {call{body: `{"spec":{"pvcName":"` + strings.Repeat("a", maxBody) + `"}}`}, http.StatusBadRequest},
		"another method":   {call{method: http.MethodGet}, http.StatusMethodNotAllowed},
		"one of them":      {call{path: tokensPath + "/x", body: body("disk")}, http.StatusNotFound},
		"another resource": {call{path: strings.Replace(tokensPath, "uploadtokenrequests", "start", 1)}, http.StatusNotFound},
		"in another group": {call{path: prefix + "uploadtokenrequests", body: body("disk")}, http.StatusNotFound},
		"a machine's part": {call{method: http.MethodPost, path: strings.Replace(tokensPath, "uploadtokenrequests", "virtualmachines/web/start", 1)}, http.StatusNotFound},
	} {
		if c.method == "" {
			c.method = http.MethodPost
		}
		if c.path == "" {
			c.path = tokensPath
		}
		if c.cert == nil {
			c.cert = r.proxy
		}
		if code, text, _ := r.do(c.call); code != c.code || strings.Contains(text, "token of") {
			t.Errorf("%s: %d %s", name, code, text)
		}
	}
}

// An upload comes from anybody, not from the API server's proxy; what it may do, its token says.
func TestUploadsPass(t *testing.T) {
	r := start(t)
	if code, text, _ := r.do(call{method: http.MethodPost, path: "/v1beta1/upload", body: "disk", user: "-"}); code != http.StatusOK || text != "disk" {
		t.Errorf("%d %s", code, text)
	}
	if len(r.reviews) != 0 {
		t.Errorf("reviews: %v", r.reviews)
	}
}
