package registry_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
)

// These are the requests of the distribution specification's conformance suite, with the expected responses.

func (r *rig) begin(repo string) (location string) {
	r.t.Helper()
	got := r.want(r.do("POST", "/v2/"+repo+"/blobs/uploads/", nil), 202)
	if got.Header.Get("Location") == "" || got.Header.Get("Range") != "0-0" {
		r.t.Fatalf("no place to upload to: %v", got.Header)
	}
	return got.Header.Get("Location")
}

func (r *rig) stored(got reply, repo string, data []byte, d digest.Digest) {
	r.t.Helper()
	r.want(got, 201)
	if got.Header.Get("Docker-Content-Digest") != d.String() {
		r.t.Errorf("digest %q, want %s", got.Header.Get("Docker-Content-Digest"), d)
	}
	if back := r.want(r.do("GET", got.Header.Get("Location"), nil), 200); string(back.body) != string(data) {
		r.t.Errorf("%d bytes came back of %d", len(back.body), len(data))
	}
	head := r.want(r.do("HEAD", "/v2/"+repo+"/blobs/"+d.String(), nil), 200)
	if head.ContentLength != int64(len(data)) || head.Header.Get("Docker-Content-Digest") != d.String() {
		r.t.Errorf("HEAD: %v", head.Header)
	}
}

func TestSpecBlobUploads(t *testing.T) {
	const repo = "conformance/blobs"
	for _, alg := range []digest.Algorithm{digest.SHA256, digest.SHA512} {
		r := newRig(t, registry.Config{}, content.Config{})
		blob := func(name string) ([]byte, digest.Digest) {
			b := append([]byte(name+alg.String()), pattern(3000, 7)...)
			return b, alg.FromBytes(b)
		}
		ways := map[string]func(b []byte, d digest.Digest) reply{
			"post only": func(b []byte, d digest.Digest) reply {
				return r.do("POST", "/v2/"+repo+"/blobs/uploads/?digest="+d.String(), b)
			},
			"post and put": func(b []byte, d digest.Digest) reply {
				return r.do("PUT", r.begin(repo)+"?digest="+d.String(), b)
			},
			"streamed": func(b []byte, d digest.Digest) reply {
				got := r.want(r.send("PATCH", r.begin(repo), io.MultiReader(strings.NewReader(string(b)))), 202) // unknown length
				return r.do("PUT", got.Header.Get("Location")+"?digest="+d.String(), nil)
			},
			"direct put": func(b []byte, d digest.Digest) reply {
				return r.do("PUT", "/v2/"+repo+"/blobs/"+d.String(), b)
			},
			"chunks": func(b []byte, d digest.Digest) reply {
				at := r.begin(repo)
				for i := 0; i < len(b); i += 1000 {
					end := min(i+1000, len(b))
					bad := r.want(r.do("PATCH", at, b[i:end], fmt.Sprintf("Content-Range: %d-%d", i+1, end)), 416, content.BlobUploadInvalid)
					if bad.Header.Get("Location") == "" || bad.Header.Get("Range") != fmt.Sprintf("0-%d", max(0, i-1)) {
						t.Errorf("416 does not say where to go on: %v", bad.Header)
					}
					got := r.want(r.do("PATCH", at, b[i:end], fmt.Sprintf("Content-Range: %d-%d", i, end-1)), 202)
					if at = got.Header.Get("Location"); got.Header.Get("Range") != fmt.Sprintf("0-%d", end-1) {
						t.Errorf("range %s after byte %d", got.Header.Get("Range"), end)
					}
					status := r.want(r.do("GET", at, nil), 204)
					if status.Header.Get("Range") != fmt.Sprintf("0-%d", end-1) || status.Header.Get("Location") == "" {
						t.Errorf("status: %v", status.Header)
					}
				}
				return r.do("PUT", at+"?digest="+d.String(), nil)
			},
			"last chunk in put": func(b []byte, d digest.Digest) reply {
				at := r.begin(repo)
				r.want(r.do("PATCH", at, b[:1000], "Content-Range: 0-999"), 202)
				r.want(r.do("PUT", at+"?digest="+d.String(), b[1001:], fmt.Sprintf("Content-Range: 1001-%d", len(b)-1)), 416, content.BlobUploadInvalid)
				return r.do("PUT", at+"?digest="+d.String(), b[1000:], fmt.Sprintf("Content-Range: 1000-%d", len(b)-1))
			},
			"mount": func(b []byte, d digest.Digest) reply {
				r.want(r.do("POST", "/v2/other/repo/blobs/uploads/?digest="+d.String(), b), 201)
				return r.do("POST", "/v2/"+repo+"/blobs/uploads/?mount="+d.String()+"&from=other/repo", nil)
			},
		}
		for name, push := range ways {
			b, d := blob(name)
			r.want(r.do("GET", "/v2/"+repo+"/blobs/"+d.String(), nil), 404, content.BlobUnknown)
			r.stored(push(b, d), repo, b, d)
			r.want(r.do("DELETE", "/v2/"+repo+"/blobs/"+d.String(), nil), 202)
			r.want(r.do("GET", "/v2/"+repo+"/blobs/"+d.String(), nil), 404, content.BlobUnknown)
		}
		empty := alg.FromBytes(nil)
		r.stored(r.do("POST", "/v2/"+repo+"/blobs/uploads/?digest="+empty.String(), nil), repo, nil, empty)
		r.stored(r.do("PUT", r.begin(repo)+"?digest="+empty.String(), nil), repo, nil, empty)
		if n := r.content.Usage(); n.Uploads != 0 || n.Staged != 0 {
			t.Errorf("uploads are left: %+v", n)
		}
	}
}

func TestSpecUploadsThatCannotBe(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	b := pattern(2000, 1)
	d := digest.FromBytes(b)
	wrong := digest.FromString("other")
	r.want(r.do("POST", "/v2/a/blobs/uploads/?digest="+wrong.String(), b), 400, content.DigestInvalid)
	r.want(r.do("POST", "/v2/a/blobs/uploads/?digest=md5:00", b), 400, content.DigestInvalid)
	r.want(r.do("PUT", "/v2/a/blobs/"+wrong.String(), b), 400, content.DigestInvalid)
	r.want(r.do("POST", "/v2/a/blobs/uploads/?mount=sha256:zz&from=b", nil), 400, content.DigestInvalid)
	for _, q := range []string{"mount=" + d.String() + "&from=b", "mount=" + d.String()} {
		got := r.want(r.do("POST", "/v2/a/blobs/uploads/?"+q, nil), 202) // a failed mount becomes an upload
		r.want(r.do("DELETE", got.Header.Get("Location"), nil), 204)
		r.want(r.do("GET", got.Header.Get("Location"), nil), 404, content.BlobUploadUnknown)
	}
	at := r.begin("a")
	r.want(r.do("PUT", at, b), 400, content.DigestInvalid)
	for header, want := range map[string]content.Code{"0-99": content.SizeInvalid, "x": content.BlobUploadInvalid, "5-2": content.BlobUploadInvalid, "-5": content.BlobUploadInvalid, "0-9223372036854775807": content.BlobUploadInvalid} {
		r.want(r.do("PATCH", at, b, "Content-Range: "+header), 400, want)
	}
	other := strings.Replace(at, "/v2/a/", "/v2/b/", 1)
	r.want(r.do("PATCH", other, b), 404, content.BlobUploadUnknown) // the upload is of another repository
	r.want(r.do("GET", "/v2/a/blobs/uploads/../../../tokens", nil), 404)
	r.want(r.do("PUT", at+"?digest="+wrong.String(), b), 400, content.DigestInvalid)
	r.want(r.do("GET", at, nil), 404, content.BlobUploadUnknown)
	if n := r.content.Usage(); n.Blobs != 0 || n.Bytes != 0 || n.Uploads != 0 || n.Staged != 0 {
		t.Errorf("something is left: %+v", n)
	}
}

func TestSpecRanges(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	b := pattern(2048, 5)
	d := r.pushBlob("a", b)
	path := "/v2/a/blobs/" + d.Digest.String()
	etag := r.do("HEAD", path, nil).Header.Get("ETag")
	for header, want := range map[string][2]int{"500-1499": {500, 1500}, "500-": {500, 2048}, "-500": {1548, 2048}, "0-0": {0, 1}, "2000-9999": {2000, 2048}} {
		got := r.want(r.do("GET", path, nil, "Range: bytes="+header), 206)
		if string(got.body) != string(b[want[0]:want[1]]) || got.Header.Get("Content-Range") != fmt.Sprintf("bytes %d-%d/2048", want[0], want[1]-1) {
			t.Errorf("%s: %d bytes, %s", header, len(got.body), got.Header.Get("Content-Range"))
		}
	}
	r.want(r.do("GET", path, nil, "Range: bytes=2048-"), 416)
	r.want(r.do("GET", path, nil, "Range: bytes=0-1", "If-Range: "+etag), 206)
	r.want(r.do("GET", path, nil, "Range: bytes=0-1", `If-Range: "x"`), 200)
	r.want(r.do("GET", path, nil, "If-None-Match: "+etag), 304)
}

func TestSpecManifests(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	desc, m := r.pushImage("a/b", "v1", "one", "two")
	byTag := r.want(r.do("GET", "/v2/a/b/manifests/v1", nil), 200)
	if byTag.Header.Get("Content-Type") != v1.MediaTypeImageManifest || byTag.Header.Get("Docker-Content-Digest") != desc.Digest.String() || digest.FromBytes(byTag.body) != desc.Digest {
		t.Errorf("%v", byTag.Header)
	}
	byDigest := r.want(r.do("GET", "/v2/a/b/manifests/"+desc.Digest.String(), nil), 200)
	head := r.want(r.do("HEAD", "/v2/a/b/manifests/v1", nil), 200)
	if string(byDigest.body) != string(byTag.body) || head.ContentLength != desc.Size || len(head.body) != 0 {
		t.Error("tag, digest and HEAD differ")
	}
	r.want(r.do("GET", "/v2/a/b/manifests/.INVALID_MANIFEST_NAME", nil), 404, content.ManifestUnknown)
	r.want(r.do("GET", "/v2/a/b/manifests/"+digest.FromString("no").String(), nil), 404, content.ManifestUnknown)
	r.want(r.do("GET", "/v2/a/b/manifests/sha256:totallywrong", nil), 400, content.DigestInvalid)
	r.want(r.do("PUT", "/v2/a/b/manifests/-bad", byTag.body), 400, content.ManifestInvalid)

	put := func(ref, mediaType, body string) reply {
		return r.do("PUT", "/v2/a/b/manifests/"+ref, []byte(body), "Content-Type: "+mediaType)
	}
	const oci = v1.MediaTypeImageManifest
	r.want(put("x", oci, "blablabla"), 400, content.ManifestInvalid)
	r.want(put("x", oci, `{"schemaVersion":2,"mediaType":"`+oci+`"}`), 400, content.ManifestInvalid)
	r.want(put("x", "text/plain", string(byTag.body)), 400, content.ManifestInvalid)
	r.want(put("x", v1.MediaTypeImageIndex, string(byTag.body)), 400, content.ManifestInvalid)
	r.want(put(digest.FromString("other").String(), oci, string(byTag.body)), 400, content.DigestInvalid)
	missing := strings.Replace(string(byTag.body), m.Layers[0].Digest.String(), digest.FromString("missing").String(), 1)
	r.want(put("x", oci, missing), 400, content.ManifestBlobUnknown)
	short := strings.Replace(string(byTag.body), `"size":3`, `"size":4`, 1)
	r.want(put("x", oci, short), 400, content.ManifestInvalid)
	r.want(r.do("PUT", "/v2/c/manifests/x", byTag.body, "Content-Type: "+oci), 400, content.ManifestBlobUnknown) // another repository's blobs
	sum := digest.SHA512.FromBytes(byTag.body)
	got := r.want(put(sum.String(), oci, string(byTag.body)), 201)
	if got.Header.Get("Docker-Content-Digest") != sum.String() {
		t.Errorf("%v", got.Header)
	}
	r.want(r.do("GET", got.Header.Get("Location"), nil), 200)

	// Unknown fields, docker's types, foreign layers, large ones, indexes of indexes, empty indexes.
	config := fmt.Sprintf(`{"mediaType":"x/y","digest":%q,"size":2}`, m.Config.Digest)
	r.want(put("custom", oci, `{"schemaVersion":2,"future":{"a":1},"mediaType":"`+oci+`","config":`+config+`,"layers":[]}`), 201)
	foreign := fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.layer.nondistributable.v1.tar","digest":%q,"size":5,"urls":["https://example.com/x"]}`, digest.FromString("foreign"))
	r.want(put("foreign", oci, `{"schemaVersion":2,"mediaType":"`+oci+`","config":`+config+`,"layers":[`+foreign+`]}`), 201)
	const docker = "application/vnd.docker.distribution.manifest.v2+json"
	r.want(put("docker", docker, `{"schemaVersion":2,"mediaType":"`+docker+`","config":`+config+`,"layers":[]}`), 201)
	if got := r.do("GET", "/v2/a/b/manifests/docker", nil); got.Header.Get("Content-Type") != docker {
		t.Errorf("docker's manifest is a %s", got.Header.Get("Content-Type"))
	}
	r.want(put("notype", oci, `{"schemaVersion":2,"config":`+config+`,"layers":[]}`), 201)
	r.want(put("large", oci, `{"schemaVersion":2,"config":`+config+`,"layers":[],"annotations":{"a":"`+strings.Repeat("A", 5<<20)+`"}}`), 201)
	r.want(put("empty", v1.MediaTypeImageIndex, `{"schemaVersion":2,"mediaType":"`+v1.MediaTypeImageIndex+`","manifests":[]}`), 201)
	child := func(mediaType string, d digest.Digest) string {
		return fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"manifests":[{"mediaType":%q,"digest":%q,"size":1}]}`, v1.MediaTypeImageIndex, mediaType, d)
	}
	r.want(put("index", v1.MediaTypeImageIndex, child(oci, desc.Digest)), 201)
	r.want(put("nested", v1.MediaTypeImageIndex, child(v1.MediaTypeImageIndex, digest.FromString(child(oci, desc.Digest)))), 201)
	r.want(put("orphan", v1.MediaTypeImageIndex, child(oci, digest.FromString("none"))), 400, content.ManifestBlobUnknown)

	r.want(r.do("DELETE", "/v2/a/b/manifests/custom", nil), 202)
	r.want(r.do("GET", "/v2/a/b/manifests/custom", nil), 404, content.ManifestUnknown)
	r.want(put("v2", oci, string(byTag.body)), 201)
	r.want(r.do("DELETE", "/v2/a/b/manifests/"+desc.Digest.String(), nil), 202)
	for _, ref := range []string{"v1", "v2", desc.Digest.String()} {
		r.want(r.do("GET", "/v2/a/b/manifests/"+ref, nil), 404, content.ManifestUnknown)
	}
	r.want(r.do("DELETE", "/v2/a/b/manifests/"+desc.Digest.String(), nil), 404, content.ManifestUnknown)
}

func TestSpecTagsAndCatalog(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	r.want(r.do("GET", "/v2/none/tags/list", nil), 404, content.NameUnknown)
	_, m := r.pushImage("a/b", "t0")
	for i := 1; i < 7; i++ {
		r.pushManifest("a/b", fmt.Sprint("t", i), m)
	}
	r.pushImage("z", "only")
	r.pushImage("a", "only")
	follow := func(path, field string) (all []string) {
		for pages := 0; path != ""; pages++ {
			got := r.want(r.do("GET", path, nil), 200)
			var doc map[string]any
			if err := json.Unmarshal(got.body, &doc); err != nil || pages > 10 {
				t.Fatal(path, err)
			}
			for _, v := range doc[field].([]any) {
				all = append(all, v.(string))
			}
			path, _, _ = strings.Cut(strings.TrimPrefix(got.Header.Get("Link"), "<"), ">")
		}
		return all
	}
	for _, q := range []string{"", "?n=3", "?n=1", "?n=100"} {
		if got := strings.Join(follow("/v2/a/b/tags/list"+q, "tags"), " "); got != "t0 t1 t2 t3 t4 t5 t6" {
			t.Errorf("tags%s: %s", q, got)
		}
		if got := strings.Join(follow("/v2/_catalog"+q, "repositories"), " "); got != "a a/b z" {
			t.Errorf("catalog%s: %s", q, got)
		}
	}
	if got := strings.Join(follow("/v2/a/b/tags/list?last=t4", "tags"), " "); got != "t5 t6" {
		t.Errorf("after t4: %s", got)
	}
	if got := strings.Join(follow("/v2/a/b/tags/list?last=t45", "tags"), " "); got != "t5 t6" {
		t.Errorf("after t45: %s", got)
	}
	if got := r.do("GET", "/v2/a/b/tags/list?n=0", nil); string(got.body) != `{"name":"a/b","tags":[]}` || got.Header.Get("Link") != "" {
		t.Errorf("no tags: %s", got.body)
	}
	r.want(r.do("GET", "/v2/a/b/tags/list?n=x", nil), 400)
	r.want(r.do("GET", "/v2/a/b/tags/list?n=-1", nil), 400)
}

func TestSpecReferrers(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	subject, m := r.pushImage("a", "v1", "layer")
	list := func(of digest.Digest, query string) v1.Index {
		got := r.want(r.do("GET", "/v2/a/referrers/"+of.String()+query, nil), 200)
		var index v1.Index
		if err := json.Unmarshal(got.body, &index); err != nil || got.Header.Get("Content-Type") != v1.MediaTypeImageIndex || index.SchemaVersion != 2 || index.Manifests == nil {
			t.Fatalf("%v: %s", got.Header, got.body)
		}
		if (got.Header.Get("OCI-Filters-Applied") == "artifactType") != strings.Contains(query, "artifactType") {
			t.Errorf("filters applied: %q", got.Header.Get("OCI-Filters-Applied"))
		}
		return index
	}
	if got := list(subject.Digest, ""); len(got.Manifests) != 0 {
		t.Errorf("%d referrers of what has none", len(got.Manifests))
	}
	push := func(artifactType string, config v1.Descriptor, of v1.Descriptor, mark string) v1.Descriptor {
		data, err := json.Marshal(v1.Manifest{MediaType: v1.MediaTypeImageManifest, ArtifactType: artifactType, Config: config, Layers: []v1.Descriptor{}, Subject: &of, Annotations: map[string]string{"mark": mark}, Versioned: m.Versioned})
		if err != nil {
			t.Fatal(err)
		}
		data = []byte(strings.Replace(string(data), `"schemaVersion":0`, `"schemaVersion":2`, 1))
		d := digest.FromBytes(data)
		got := r.want(r.do("PUT", "/v2/a/manifests/"+d.String(), data, "Content-Type: "+v1.MediaTypeImageManifest), 201)
		if got.Header.Get("OCI-Subject") != of.Digest.String() {
			t.Errorf("OCI-Subject: %q", got.Header.Get("OCI-Subject"))
		}
		return v1.Descriptor{Digest: d}
	}
	signature := push("example/signature", m.Config, subject, "one")
	typed := m.Config
	typed.MediaType = "example/sbom"
	push("", typed, subject, "two")
	absent := v1.Descriptor{MediaType: v1.MediaTypeImageManifest, Digest: digest.FromString("absent"), Size: 5}
	push("example/signature", m.Config, absent, "three")

	if got := list(subject.Digest, ""); len(got.Manifests) != 2 || got.Manifests[0].Annotations["mark"] == "" || got.Manifests[0].ArtifactType == "" {
		t.Errorf("%+v", got.Manifests)
	}
	for kind, mark := range map[string]string{"example/signature": "one", "example/sbom": "two"} {
		if got := list(subject.Digest, "?artifactType="+kind); len(got.Manifests) != 1 || got.Manifests[0].Annotations["mark"] != mark {
			t.Errorf("%s: %+v", kind, got.Manifests)
		}
	}
	if got := list(absent.Digest, ""); len(got.Manifests) != 1 {
		t.Errorf("of what is not there: %+v", got.Manifests)
	}
	r.want(r.do("DELETE", "/v2/a/manifests/"+signature.Digest.String(), nil), 202)
	if got := list(subject.Digest, ""); len(got.Manifests) != 1 {
		t.Errorf("after a deletion: %+v", got.Manifests)
	}
	r.want(r.do("GET", "/v2/a/referrers/nothing", nil), 400, content.DigestInvalid)
}

func TestBaseAndHostileNames(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	got := r.want(r.do("GET", "/v2/", nil), 200)
	if got.Header.Get("Docker-Distribution-Api-Version") != "registry/2.0" {
		t.Errorf("%v", got.Header)
	}
	got = r.want(r.do("GET", "/v2/", nil, "Authorization: "), 401, content.Unauthorized)
	if want := fmt.Sprintf(`Bearer realm="%s/v2/token",service="epoch"`, r.url); got.Header.Get("WWW-Authenticate") != want {
		t.Errorf("challenge %q, want %q", got.Header.Get("WWW-Authenticate"), want)
	}
	got = r.want(r.do("PUT", "/v2/team/app/manifests/x", nil, "Authorization: "), 401, content.Unauthorized)
	if !strings.Contains(got.Header.Get("WWW-Authenticate"), `scope="repository:team/app:pull,push"`) {
		t.Errorf("challenge %q", got.Header.Get("WWW-Authenticate"))
	}
	for _, name := range []string{"..", "a/..", "a/../b", "%2e%2e/x", "A", "a//b", "a/_tags", "_catalog", "a%00", "a%2f..%2fb", "-a", "a.", strings.Repeat("a", 256), `a"b`, "a%0d%0aX:1", "ü"} {
		for _, rest := range []string{"/tags/list", "/manifests/latest", "/blobs/" + digest.FromString("x").String(), "/blobs/uploads/"} {
			got := r.do("GET", "/v2/"+name+rest, nil)
			if got.StatusCode != 400 && got.StatusCode != 404 {
				t.Errorf("%s%s: %s", name, rest, got.Status)
			}
		}
		if got := r.do("POST", "/v2/"+name+"/blobs/uploads/", nil); got.StatusCode != 400 && got.StatusCode != 404 {
			t.Errorf("upload to %s: %s", name, got.Status)
		}
	}
	for _, path := range []string{"/", "/v1/", "/v2/x", "/v2/x/y/z", "/dl/", "/api/tokens", "/v2/a/tags/", "/v2//tags/list"} {
		if got := r.do("GET", path, nil); got.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s", path, got.Status)
		}
	}
	for _, c := range [][2]string{{"POST", "/v2/"}, {"PUT", "/v2/_catalog"}, {"POST", "/v2/a/manifests/x"}, {"PATCH", "/v2/a/blobs/" + digest.FromString("x").String()}, {"GET", "/v2/a/blobs/uploads/"}, {"DELETE", "/v2/a/tags/list"}, {"BREW", "/v2/a/tags/list"}} {
		got := r.want(r.do(c[0], c[1], nil), 405, content.Unsupported)
		if got.Header.Get("Allow") == "" {
			t.Errorf("%s %s: 405 without Allow", c[0], c[1])
		}
	}
}

func TestRights(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	desc, m := r.pushImage("team/app", "v1", "layer")
	r.pushImage("secret", "v1", "hidden")
	hidden := digest.FromString("hidden").String()
	as := func(token string) string { return "Authorization: Bearer " + token }
	layer := "/v2/team/app/blobs/" + m.Layers[0].Digest.String()
	for _, c := range []struct {
		token, method, path string
		status              int
	}{
		{pullToken, "GET", "/v2/team/app/manifests/v1", 200},
		{pullToken, "GET", layer, 200},
		{pullToken, "GET", "/v2/secret/manifests/v1", 403},
		{pullToken, "GET", "/v2/secret/blobs/" + hidden, 403},
		{pullToken, "GET", "/v2/team/app/blobs/" + hidden, 404}, // exists only in another repository
		{pullToken, "POST", "/v2/team/app/blobs/uploads/", 403},
		{pullToken, "PUT", "/v2/team/app/manifests/v1", 403},
		{pullToken, "GET", "/v2/team/app/referrers/" + hidden, 200},
		{pushToken, "POST", "/v2/team/app/blobs/uploads/", 202},
		{pushToken, "POST", "/v2/team/app/blobs/uploads/?from=secret&mount=" + hidden, 202}, // no mount without the right to pull
		{pushToken, "POST", "/v2/secret/blobs/uploads/", 403},
		{pushToken, "DELETE", "/v2/team/app/manifests/v1", 403},
		{pushToken, "DELETE", layer, 403},
		{pushToken, "POST", "/api/gc", 403},
		{oldToken, "GET", "/v2/team/app/manifests/v1", 401},
		{"unknown", "GET", "/v2/", 401},
		{allToken, "POST", "/api/gc", 200},
		{allToken, "DELETE", "/v2/team/app/manifests/" + desc.Digest.String(), 202},
	} {
		if got := r.do(c.method, c.path, nil, as(c.token)); got.StatusCode != c.status {
			t.Errorf("%s: %s %s: %s, want %d: %s", c.token, c.method, c.path, got.Status, c.status, got.body)
		} else if strings.Contains(string(got.body), c.token+`"`) {
			t.Errorf("a token is in %s", got.body)
		}
	}
	got := r.do("GET", "/v2/", nil, as(oldToken))
	if !strings.Contains(string(got.body), "expired") || !strings.Contains(got.Header.Get("WWW-Authenticate"), "invalid_token") {
		t.Errorf("an expired token: %s, %v", got.body, got.Header)
	}
	if got := r.do("GET", "/v2/_catalog", nil, as(pullToken)); string(got.body) != `{"repositories":[]}` {
		t.Errorf("catalog shows what is not allowed: %s", got.body)
	}
	if got := r.do("GET", "/v2/_catalog", nil, as(allToken)); string(got.body) != `{"repositories":["secret"]}` {
		t.Errorf("catalog: %s", got.body)
	}
	for _, path := range []string{"/healthz", "/metrics"} {
		r.want(r.do("GET", path, nil, "Authorization: "), 200)
	}
}

func TestTokenEndpoint(t *testing.T) {
	for _, open := range []bool{false, true} {
		r := newRig(t, registry.Config{AnonymousPull: open}, content.Config{})
		token := func(got reply) string {
			r.want(got, 200)
			var doc struct {
				Token       string `json:"token"`
				AccessToken string `json:"access_token"`
				ExpiresIn   int    `json:"expires_in"`
			}
			if err := json.Unmarshal(got.body, &doc); err != nil || doc.Token != doc.AccessToken || doc.ExpiresIn != 3600 {
				t.Fatalf("%s", got.body)
			}
			return doc.Token
		}
		basic := func(user, password string) string {
			req, _ := http.NewRequest("GET", "/", nil) //nolint:noctx // only its header is used
			req.SetBasicAuth(user, password)
			return "Authorization: " + req.Header.Get("Authorization")
		}
		form := "Content-Type: application/x-www-form-urlencoded"
		if token(r.do("GET", "/v2/token?service=epoch&scope=repository:a:pull", nil, basic("x", pullToken))) != pullToken {
			t.Error("basic")
		}
		if token(r.do("POST", "/v2/token", []byte("grant_type=refresh_token&refresh_token="+pullToken), form, "Authorization: ")) != pullToken {
			t.Error("refresh token")
		}
		if token(r.do("POST", "/v2/token", []byte("grant_type=password&username=x&password="+pullToken), form, "Authorization: ")) != pullToken {
			t.Error("password")
		}
		r.want(r.do("GET", "/v2/token", nil, basic("x", "wrong")), 401, content.Unauthorized)
		r.want(r.do("GET", "/v2/token", nil, basic("x", oldToken)), 401, content.Unauthorized)
		nobody := r.do("GET", "/v2/token", nil, "Authorization: ")
		if open {
			r.pushImage("a", "v1")
			r.want(r.do("GET", "/v2/a/manifests/v1", nil, "Authorization: Bearer "+token(nobody)), 200)
			r.want(r.do("PUT", "/v2/a/manifests/v1", nil, "Authorization: Bearer "+token(nobody)), 401, content.Unauthorized)
		} else {
			r.want(nobody, 401, content.Unauthorized)
			r.want(r.do("GET", "/v2/", nil, "Authorization: Bearer anonymous"), 401, content.Unauthorized)
		}
	}
}

func TestQuotaIsDenied(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{Quota: 3000})
	r.pushBlob("a", pattern(2000, 1))
	b := pattern(2000, 2)
	r.want(r.do("POST", "/v2/a/blobs/uploads/?digest="+digest.FromBytes(b).String(), b), 403, content.Denied)
	got := r.want(r.do("PATCH", r.begin("a"), b), 403, content.Denied)
	if !strings.Contains(string(got.body), "quota") || !strings.Contains(string(got.body), "QUOTA_EXCEEDED") {
		t.Errorf("%s", got.body)
	}
}
