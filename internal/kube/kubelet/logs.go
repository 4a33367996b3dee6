package kubelet

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// logQuery holds the options of kubectl logs.
type logQuery struct {
	options    guest.LogOptions
	timestamps bool
	limit      int64  // bytes; negative: no limit
	stream     string // "": both
}

func parseLogQuery(q url.Values, now time.Time) (logQuery, error) {
	l := logQuery{options: guest.LogOptions{Tail: -1}, limit: -1}
	var errs []error
	flag := func(key string, to *bool) {
		if v := q.Get(key); v != "" {
			b, err := strconv.ParseBool(v)
			if err != nil {
				errs = append(errs, errdefs.Invalidf("%s: %q is not a boolean", key, v))
			}
			*to = b
		}
	}
	number := func(key string, least int64) (int64, bool) {
		v := q.Get(key)
		if v == "" {
			return 0, false
		}
		n, err := strconv.ParseInt(v, 10, 32)
		if err != nil || n < least {
			errs = append(errs, errdefs.Invalidf("%s: %q must be a number of at least %d", key, v, least))
			return 0, false
		}
		return n, true
	}
	flag("follow", &l.options.Follow)
	flag("previous", &l.options.Previous)
	flag("timestamps", &l.timestamps)
	if n, ok := number("tailLines", 0); ok {
		l.options.Tail = int(n)
	}
	if n, ok := number("limitBytes", 1); ok {
		l.limit = n
	}
	if n, ok := number("sinceSeconds", 1); ok {
		l.options.Since = now.Add(-time.Duration(n) * time.Second)
	}
	if v := q.Get("sinceTime"); v != "" {
		t, err := time.Parse(time.RFC3339Nano, v)
		switch {
		case err != nil:
			errs = append(errs, errdefs.Invalidf("sinceTime: %q is not a time in RFC 3339 format", v))
		case !l.options.Since.IsZero():
			errs = append(errs, errdefs.Invalidf("only one of sinceSeconds and sinceTime can be given"))
		}
		l.options.Since = t
	}
	switch v := q.Get("stream"); v {
	case "", "All":
	case "Stdout", "Stderr":
		l.stream = strings.ToLower(v)
	default:
		errs = append(errs, errdefs.Invalidf("stream: %q must be one of: All, Stdout, Stderr", v))
	}
	return l, errors.Join(errs...)
}

// errEnough stops a log at its byte limit.
var errEnough = errors.New("limit reached")

func (s *Server) logs(w http.ResponseWriter, r *http.Request) {
	q, err := parseLogQuery(r.URL.Query(), time.Now())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	out := &logWriter{to: w, query: q}
	err = s.cfg.Backend.Logs(r.Context(), r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container"), q.options, out.entry)
	if err != nil && !errors.Is(err, errEnough) && r.Context().Err() == nil {
		if !out.began {
			s.fail(w, err)
			return
		}
		s.cfg.Log.Debug("log stream ended", "err", err)
	}
}

// logWriter writes entries like the kubelet: whole lines, with their time if requested. It flushes each line immediately.
type logWriter struct {
	to    http.ResponseWriter
	query logQuery
	began bool
	open  map[string]bool // streams whose last line is incomplete
	spent int64
}

func (l *logWriter) entry(e guest.LogEntry) error {
	if l.query.stream != "" && e.Stream != l.query.stream {
		return nil
	}
	data := e.Data
	if l.query.timestamps && !l.open[e.Stream] {
		data = append(append([]byte(e.Time.UTC().Format(time.RFC3339Nano)), ' '), data...)
	}
	if l.open == nil {
		l.open = map[string]bool{}
	}
	l.open[e.Stream] = len(e.Data) > 0 && e.Data[len(e.Data)-1] != '\n'
	full := false
	if l.query.limit >= 0 && l.spent+int64(len(data)) >= l.query.limit {
		data, full = data[:l.query.limit-l.spent], true
	}
	if !l.began {
		l.began = true
		l.to.Header().Set("Content-Type", "text/plain")
	}
	n, err := l.to.Write(data)
	if err != nil {
		return err
	}
	l.spent += int64(n)
	_ = http.NewResponseController(l.to).Flush()
	if full {
		return errEnough
	}
	return nil
}
