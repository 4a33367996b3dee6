package upload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// rig is a service with an API server and a registry in memory.
type rig struct {
	*Service
	t      *testing.T
	client client.WithWatch
	logs   bytes.Buffer
	has    map[string]string // in the registry, by repository and digest
	refuse error             // of the registry
	meet   func()            // called when the registry has all bytes
	patch  func() error      // of a claim
	stop   error             // of the registry, after the note
}

const digest = "sha256:aa"

func (r *rig) Put(_ context.Context, repo string, body io.Reader, size int64, before func(string) error) (string, error) {
	all, err := io.ReadAll(body)
	if err != nil {
		return "", err
	}
	if r.refuse != nil {
		return "", r.refuse
	}
	if r.meet != nil {
		r.meet()
	}
	if err := errors.Join(before(digest), r.stop); err != nil {
		return "", err
	}
	r.has[repo+"@"+digest] = string(all)
	return digest, nil
}

func (r *rig) Remove(context.Context, string, string) error { return nil }

func claim(change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "disk", UID: "uid-1", Annotations: map[string]string{contract.KeyUploadTarget: ""}},
		Spec:       corev1.PersistentVolumeClaimSpec{Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Ki")}}},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func start(t *testing.T, objects ...client.Object) *rig {
	t.Helper()
	r := &rig{t: t, has: map[string]string{}}
	r.client = fake.NewClientBuilder().WithObjects(objects...).WithInterceptorFuncs(interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if _, ok := o.(*corev1.PersistentVolumeClaim); ok && r.patch != nil {
				if err := r.patch(); err != nil {
					return err
				}
			}
			return c.Patch(ctx, o, p, opts...)
		},
	}).Build()
	r.Service = New(Options{
		Client: r.client, Registry: r, Key: func() ([]byte, error) { return key, nil }, Now: func() time.Time { return now }, Log: slog.New(slog.NewTextHandler(&r.logs, nil)),
		Journal: Journal{Client: r.client, Object: types.NamespacedName{Namespace: "system", Name: "uploads"}},
	})
	return r
}

func (r *rig) token() string {
	r.t.Helper()
	token, err := r.Token(r.t.Context(), "team", "disk")
	if err != nil {
		r.t.Fatal(err)
	}
	return token
}

// send sends a request and returns "CODE TEXT".
func (r *rig) send(method, path, token string, body io.Reader, change ...func(*http.Request)) string {
	r.t.Helper()
	server := httptest.NewServer(r)
	defer server.Close()
	req, err := http.NewRequestWithContext(r.t.Context(), method, server.URL+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	for _, f := range change {
		f(req)
	}
	resp, err := server.Client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	if token != "" && strings.Contains(r.logs.String()+string(text), token) {
		r.t.Errorf("the token is in the log or the answer: %s %s", r.logs.String(), text)
	}
	return strings.TrimSpace(fmt.Sprint(resp.StatusCode, " ", string(text)))
}

func (r *rig) claim() *corev1.PersistentVolumeClaim {
	r.t.Helper()
	c := &corev1.PersistentVolumeClaim{}
	if err := r.client.Get(r.t.Context(), client.ObjectKey{Namespace: "team", Name: "disk"}, c); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) journal() []Entry {
	r.t.Helper()
	all, err := r.Journal.List(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

func TestUpload(t *testing.T) {
	form := func() (io.Reader, string) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		_ = w.WriteField("name", "x")
		part, _ := w.CreateFormFile("file", "disk.img")
		_, _ = io.WriteString(part, "the disk")
		_ = w.Close()
		return &b, w.FormDataContentType()
	}
	for _, path := range []string{"/v1beta1/upload", "/v1beta1/upload-async", "/v1beta1/upload-form", "/v1beta1/upload-form-async"} {
		r := start(t, claim())
		token := r.token()
		if got := r.send(http.MethodHead, path, token, nil); got != "200" {
			t.Errorf("HEAD %s: %s", path, got)
		}
		var body io.Reader = strings.NewReader("the disk")
		kind := "application/octet-stream"
		if strings.Contains(path, "form") {
			body, kind = form()
		}
		if got := r.send(http.MethodPost, path, token, body, func(req *http.Request) { req.Header.Set("Content-Type", kind) }); got != "200" {
			t.Fatalf("%s: %s", path, got)
		}
		want := map[string]string{contract.KeyUploadTarget: "", contract.KeyVolumeUpload: digest, AnnReady: "false", AnnPhase: "Succeeded"}
		if d := diff.Of(want, r.claim().Annotations); d != "" {
			t.Errorf("%s: %s", path, d)
		}
		if d := diff.Of(map[string]string{"uploads/team/uid-1@" + digest: "the disk"}, r.has); d != "" {
			t.Errorf("%s: %s", path, d)
		}
		if all := r.journal(); len(all) != 1 || all[0] != (Entry{Claim{"team", "disk", "uid-1"}, digest}) {
			t.Errorf("%s: the journal has %v", path, all)
		}
		if got := r.send(http.MethodPost, path, token, strings.NewReader("another")); !strings.HasPrefix(got, "409 a disk was uploaded") {
			t.Errorf("%s: again: %s", path, got)
		}
		if _, err := r.Token(t.Context(), "team", "disk"); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: another token: %v", path, err)
		}
	}
}

func TestUploadsThatAreRefused(t *testing.T) {
	expired, err := sign(key, Claim{"team", "disk", "uid-1"}, now)
	if err != nil {
		t.Fatal(err)
	}
	other, err := sign(key, Claim{"team", "disk", "uid-0"}, now.Add(Life))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		token  string // "": a good one
		method string
		path   string
		body   io.Reader
		change func(*rig)
		want   string
	}{
		"without a token":           {token: "-", want: "401 an upload needs the token"},
		"with an expired one":       {token: expired, want: "401 the token has expired"},
		"of a claim before":         {token: other, want: "404 PersistentVolumeClaim team/disk does not exist any more"},
		"by GET":                    {method: http.MethodGet, want: "405"},
		"elsewhere":                 {path: "/v1beta1/uploads", want: "404"},
		"too large, as said":        {body: bytes.NewReader(make([]byte, 2<<20)), want: "413 the upload has 2097152 bytes"},
		"too large, without saying": {body: io.MultiReader(bytes.NewReader(make([]byte, 2<<20))), want: "413 the upload has more bytes"},
		"no disk":                   {change: func(r *rig) { r.refuse = errdefs.Invalidf("no disk") }, want: "400 no disk"},
		"a full registry":           {change: func(r *rig) { r.refuse = errdefs.Exhaustedf("full") }, want: "429 full"},
		"no registry that answers":  {change: func(r *rig) { r.refuse = errdefs.Unavailablef("away") }, want: "503 away"},
		"no form":                   {path: "/v1beta1/upload-form", want: "400 the upload is no form"},
		"while another was faster": {change: func(r *rig) {
			r.meet = func() {
				c := r.claim()
				c.Annotations[contract.KeyVolumeUpload] = "sha256:bb"
				if err := r.client.Update(t.Context(), c); err != nil {
					t.Error(err)
				}
			}
		}, want: "409 a disk was uploaded"},
		"while the claim goes": {change: func(r *rig) {
			r.meet = func() {
				if err := r.client.Delete(t.Context(), r.claim()); err != nil {
					t.Error(err)
				}
			}
		}, want: "404"},
		"that cannot be written down": {change: func(r *rig) {
			r.patch = func() error { return apierrors.NewInternalError(errors.New("no etcd")) }
		}, want: "503 write to PersistentVolumeClaim team/disk"},
		"that others always precede": {change: func(r *rig) {
			r.patch = func() error {
				return apierrors.NewConflict(schema.GroupResource{Resource: "persistentvolumeclaims"}, "disk", errors.New("changed"))
			}
		}, want: "503 write to PersistentVolumeClaim team/disk"},
	} {
		r := start(t, claim())
		token := r.token()
		switch c.token {
		case "":
		case "-":
			token = ""
		default:
			token = c.token
		}
		if c.method == "" {
			c.method = http.MethodPost
		}
		if c.path == "" {
			c.path = Prefix
		}
		if c.body == nil {
			c.body = strings.NewReader("the disk")
		}
		if c.change != nil {
			c.change(r)
		}
		if got := r.send(c.method, c.path, token, c.body); !strings.HasPrefix(got, c.want) {
			t.Errorf("an upload %s: %s, want %s", name, got, c.want)
		}
		if len(r.has) > 0 && len(r.journal()) == 0 {
			t.Errorf("an upload %s: nobody knows of what the registry has", name)
		}
		if r.all != 0 || len(r.count) != 0 {
			t.Errorf("an upload %s still counts: %d %v", name, r.all, r.count)
		}
	}
}

// A manager that ends after any of its steps leaves a claim that can take the upload again.
func TestUploadThatWasCutOff(t *testing.T) {
	r := start(t, claim())
	cut := errdefs.Unavailablef("killed")
	r.stop = cut
	if got := r.send(http.MethodPost, Prefix, r.token(), strings.NewReader("the disk")); !strings.HasPrefix(got, "503") {
		t.Error(got)
	}
	if all := r.journal(); len(all) != 1 {
		t.Errorf("the journal has %v", all)
	}
	r.stop, r.patch = nil, func() error { return cut }
	if got := r.send(http.MethodPost, Prefix, r.token(), strings.NewReader("the disk")); !strings.HasPrefix(got, "503") {
		t.Error(got)
	}
	r.patch = nil
	if got := r.send(http.MethodPost, Prefix, r.token(), strings.NewReader("the disk")); got != "200" {
		t.Error(got)
	}
	if all := r.journal(); len(all) != 1 {
		t.Errorf("the journal has %v", all)
	}
}

func TestClaimsThatTakeNoUpload(t *testing.T) {
	for want, change := range map[string]func(*corev1.PersistentVolumeClaim){
		"does not ask for an upload":  func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil },
		"only disks of machines":      func(c *corev1.PersistentVolumeClaim) { c.Annotations[AnnContentType] = "archive" },
		"has its volume already":      func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "pv" },
		"asks for other content":      func(c *corev1.PersistentVolumeClaim) { c.Annotations[contract.KeyVolumeImage] = "x" },
		"a disk was uploaded for":     func(c *corev1.PersistentVolumeClaim) { c.Annotations[contract.KeyVolumeUpload] = digest },
		"asks for other content than": func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSource = &corev1.TypedLocalObjectReference{} },
	} {
		r := start(t, claim(change))
		if _, err := r.Token(t.Context(), "team", "disk"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	r := start(t, claim())
	r.Registry = nil
	if _, err := r.Token(t.Context(), "team", "disk"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without a registry: %v", err)
	}
	if _, err := r.Token(t.Context(), "dev", "disk"); !errdefs.IsNotFound(err) {
		t.Errorf("of another namespace: %v", err)
	}
}

// Uploads of one namespace do not keep others waiting.
func TestManyUploads(t *testing.T) {
	r := start(t)
	var ends []func()
	for i := range mostAll / mostPerNamespace {
		for range mostPerNamespace {
			end, err := r.begin(fmt.Sprint(i))
			if err != nil {
				t.Fatal(err)
			}
			ends = append(ends, end)
		}
		if _, err := r.begin(fmt.Sprint(i)); !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Errorf("one too many of a namespace: %v", err)
		}
	}
	if _, err := r.begin("new"); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("one too many: %v", err)
	}
	for _, end := range ends {
		end()
	}
	if r.all != 0 || len(r.count) != 0 {
		t.Errorf("left: %d %v", r.all, r.count)
	}
}

// A body gets more time only by bytes.
func TestPace(t *testing.T) {
	var set []bool // whether there is a deadline
	deadline := func(at time.Time) error { set = append(set, !at.IsZero()); return nil }
	p := &paced{r: bytes.NewReader(make([]byte, 2*progressBytes)), deadline: deadline, left: 4 * progressBytes}
	n, err := io.Copy(io.Discard, p)
	if d := diff.Of([]bool{true, true, false}, set); n != 2*progressBytes || err != nil || d != "" {
		t.Errorf("%d bytes, %v, %s", n, err, d)
	}
	set = nil
	p = &paced{r: io.MultiReader(strings.NewReader("slow"), &broken{}), deadline: deadline, left: 10}
	if _, err := io.Copy(io.Discard, p); !errdefs.IsUnavailable(err) || len(set) > 0 {
		t.Errorf("%v, %v", err, set)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("i/o timeout") }

func TestJournal(t *testing.T) {
	c := fake.NewClientBuilder().Build()
	j := Journal{Client: c, Object: types.NamespacedName{Namespace: "system", Name: "uploads"}}
	a, b := Entry{Claim{"team", "a", "uid-a"}, "sha256:aa"}, Entry{Claim{"team", "b", "uid-b"}, "sha256:bb"}
	if err := errors.Join(j.Drop(t.Context(), a), j.Add(t.Context(), a), j.Add(t.Context(), b), j.Add(t.Context(), a)); err != nil {
		t.Fatal(err)
	}
	list := func() []Entry {
		all, err := j.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(all, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
		return all
	}
	if d := diff.Of([]Entry{a, b}, list()); d != "" {
		t.Error(d)
	}
	object := &corev1.ConfigMap{}
	if err := c.Get(t.Context(), j.Object, object); err != nil {
		t.Fatal(err)
	}
	object.Data["note"] = "of somebody"
	if err := errors.Join(c.Update(t.Context(), object), j.Drop(t.Context(), a), j.Drop(t.Context(), a)); err != nil {
		t.Fatal(err)
	}
	if d := diff.Of([]Entry{b}, list()); d != "" {
		t.Error(d)
	}
	// One namespace does not take the room of the others.
	for n := len(list()); n < mostWaiting; n++ {
		object.Data[fmt.Sprintf("uid-%d.cc", n)] = "team/many"
	}
	object.ResourceVersion = ""
	if err := c.Update(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	if err := j.Add(t.Context(), Entry{Claim{"team", "more", "uid-more"}, "sha256:dd"}); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("one more of the namespace: %v", err)
	}
	if err := j.Add(t.Context(), Entry{Claim{"other", "a", "uid-other"}, "sha256:dd"}); err != nil {
		t.Errorf("one of another namespace: %v", err)
	}
}
