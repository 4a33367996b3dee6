package upload

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Prefix is what the paths of uploads begin with: CDI's.
const Prefix = "/v1beta1/upload"

// The part of a form that is the disk, as in CDI.
const formPart = "file"

// An upload that is slower than this is ended, so that nobody keeps others waiting by sending nothing.
const (
	progressBytes = 1 << 20
	progressTime  = time.Minute
)

// answerTime is how long the answer may take to be written.
const answerTime = time.Minute

// kinds of paths: with a form, or with the disk as the body. CDI has each twice, for clients that wait for its conversion and such as do not.
var forms = map[string]bool{Prefix: false, Prefix + "-async": false, Prefix + "-form": true, Prefix + "-form-async": true}

// ServeHTTP takes an upload. It asks nobody who the client is: the token says what it may do.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	form, known := forms[r.URL.Path]
	switch {
	case !known:
		http.NotFound(w, r)
		return
	case r.Method != http.MethodHead && r.Method != http.MethodPost && r.Method != http.MethodPut:
		http.Error(w, "use HEAD, POST or PUT", http.StatusMethodNotAllowed)
		return
	}
	of, err := s.whose(r)
	switch {
	case errdefs.IsFailedPrecondition(err):
		answer(w, http.StatusUnauthorized, err)
		return
	case err != nil:
		answer(w, statusOf(err), err)
		return
	}
	if r.Method == http.MethodHead { // virtctl asks whether there is such a path
		if _, err := s.claim(r.Context(), of); err != nil {
			answer(w, statusOf(err), err)
		}
		return
	}
	began := s.Now()
	if err := s.receive(w, r, of, form); err != nil {
		s.Log.Warn("upload failed", "op", "upload", "claim", of.String(), "dur", s.Now().Sub(began), "err", err)
		answer(w, statusOf(err), err)
		return
	}
	s.Log.Info("disk uploaded", "op", "upload", "claim", of.String(), "dur", s.Now().Sub(began))
}

// answer answers with one sentence. What is left of the body is not read.
func answer(w http.ResponseWriter, code int, err error) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime))
	http.Error(w, err.Error(), code)
}

// whose returns the claim of the request's token.
func (s *Service) whose(r *http.Request) (Claim, error) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return Claim{}, errdefs.Preconditionf("an upload needs the token of an UploadTokenRequest, as `Authorization: Bearer TOKEN`")
	}
	key, err := s.Key()
	if err != nil {
		return Claim{}, err
	}
	return verify(key, token, s.Now())
}

// tooLarge is an upload that is larger than the volume can be.
type tooLarge struct{ error }

// receive takes the body of a request.
func (s *Service) receive(w http.ResponseWriter, r *http.Request, of Claim, form bool) error {
	end, err := s.begin(of.Namespace)
	if err != nil {
		return err
	}
	defer end()
	c, err := s.claim(r.Context(), of)
	if err != nil {
		return err
	}
	limit := most(Size(c))
	if r.ContentLength > limit {
		return tooLarge{errdefs.Invalidf("the upload has %d bytes, and the claim asks for a volume of %d; make a larger claim", r.ContentLength, Size(c))}
	}
	control := http.NewResponseController(w)
	if err := control.SetWriteDeadline(time.Time{}); err != nil {
		return fmt.Errorf("set the deadline of an upload: %w", err)
	}
	body := &paced{r: r.Body, deadline: control.SetReadDeadline, left: limit}
	if err := body.extend(); err != nil {
		return err
	}
	r.Body = io.NopCloser(body)
	var disk io.Reader = body
	if form {
		if disk, err = part(r); err != nil {
			return err
		}
	}
	if err := s.take(r.Context(), of, Size(c), disk); err != nil {
		return err
	}
	return control.SetWriteDeadline(time.Now().Add(answerTime))
}

// part returns the disk in a form.
func part(r *http.Request) (io.Reader, error) {
	parts, err := r.MultipartReader()
	if err != nil {
		return nil, errdefs.Invalidf("the upload is no form: %w", err)
	}
	for {
		p, err := parts.NextPart()
		if err != nil {
			return nil, errdefs.Invalidf("the form has no part with the name %s: %w", formPart, err)
		}
		if p.FormName() == formPart {
			return p, nil
		}
	}
}

// most returns how many bytes an upload for a volume of that size may have: a format has tables of its own.
func most(size int64) int64 { return size + size/64 + 1<<20 }

// paced is a body that ends when it is too long, or too slow.
type paced struct {
	r        io.Reader
	deadline func(time.Time) error // of reads
	got      int                   // since the last deadline
	left     int64
}

func (p *paced) extend() error {
	p.got = 0
	if err := p.deadline(time.Now().Add(progressTime)); err != nil {
		return fmt.Errorf("set the deadline of an upload: %w", err)
	}
	return nil
}

func (p *paced) Read(b []byte) (int, error) {
	if int64(len(b)) > p.left+1 {
		b = b[:p.left+1]
	}
	n, err := p.r.Read(b)
	if p.left -= int64(n); p.left < 0 {
		return 0, tooLarge{errdefs.Invalidf("the upload has more bytes than the claim asks for; make a larger claim")}
	}
	if p.got += n; p.got >= progressBytes {
		if err := p.extend(); err != nil {
			return n, err
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		// The server goes on reading, to see whether the client leaves. It must not take the deadline for that while the registry writes.
		if err := p.deadline(time.Time{}); err != nil {
			return n, fmt.Errorf("set the deadline of an upload: %w", err)
		}
	case err != nil:
		return n, errdefs.Unavailablef("the upload was cut off, or has sent less than %d bytes in %s: %w", progressBytes, progressTime, err)
	}
	return n, err
}

// statusOf returns the HTTP status for an error.
func statusOf(err error) int {
	if _, ok := errors.AsType[tooLarge](err); ok {
		return http.StatusRequestEntityTooLarge
	}
	switch errdefs.ClassOf(err) {
	case errdefs.InvalidArgument, errdefs.DataLoss, errdefs.Unsupported:
		return http.StatusBadRequest
	case errdefs.NotFound:
		return http.StatusNotFound
	case errdefs.FailedPrecondition, errdefs.Conflict, errdefs.AlreadyExists, errdefs.Unauthenticated, errdefs.PermissionDenied:
		return http.StatusConflict
	case errdefs.ResourceExhausted:
		return http.StatusTooManyRequests
	case errdefs.Unavailable, errdefs.Canceled, errdefs.DeadlineExceeded:
		return http.StatusServiceUnavailable
	case errdefs.Internal:
	}
	return http.StatusInternalServerError
}
