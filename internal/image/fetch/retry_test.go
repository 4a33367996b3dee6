package fetch

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

func TestRetryAfter(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"":                        0,
		"0":                       0,
		"7":                       7 * time.Second,
		"-7":                      0,
		"+7":                      0,
		"x":                       0,
		"99999999999999999999999": 0,
		"9223372036854775807":     24 * time.Hour,
		noon.Add(time.Minute).Format(http.TimeFormat):      time.Minute,
		noon.Add(-time.Minute).Format(http.TimeFormat):     0,
		noon.Add(9000 * time.Hour).Format(http.TimeFormat): 24 * time.Hour,
	} {
		if got := retryAfter(in, noon); got != want {
			t.Errorf("%q: %v, want %v", in, got, want)
		}
	}
}

func TestBackoff(t *testing.T) {
	o := Options{Backoff: time.Second, MaxWait: 30 * time.Second}
	for _, tc := range []struct {
		tries     int
		asked     time.Duration
		low, high time.Duration
	}{
		{0, 0, 0, 0},
		{1, 0, 750 * time.Millisecond, 1250 * time.Millisecond},
		{3, 0, 3 * time.Second, 5 * time.Second},
		{40, 0, 22500 * time.Millisecond, 30 * time.Second},
		{1, 5 * time.Second, 5 * time.Second, 5 * time.Second},
		{1, time.Hour, 30 * time.Second, 30 * time.Second},
	} {
		for range 100 {
			b := &Body{s: &session{c: &Client{opts: o}}, tries: tc.tries, pauses: o.pauses()}
			for range tc.tries - 1 {
				b.pauses.NextBackOff()
			}
			if got := b.wait(tc.asked); got < tc.low || got > tc.high {
				t.Fatalf("%+v: %v", tc, got)
			}
		}
	}
}

func FuzzRetryAfter(f *testing.F) {
	f.Add("120")
	f.Add("Fri, 31 Dec 1999 23:59:59 GMT")
	f.Add("18446744073709551615")
	f.Fuzz(func(t *testing.T, in string) {
		if d := retryAfter(in, noon); d < 0 || d > 24*time.Hour {
			t.Errorf("%q: %v", in, d)
		}
	})
}

func TestContentRange(t *testing.T) {
	for in, want := range map[string]contentRange{
		"bytes 0-99/100":                {0, 99, 100},
		"Bytes 5-9/*":                   {5, 9, -1},
		"bytes 9-5/100":                 {},
		"bytes 0-100/100":               {},
		"bytes */100":                   {},
		"bytes -1-5/10":                 {},
		"bytes 0-+5/10":                 {},
		"items 0-1/2":                   {},
		"bytes 0-1":                     {},
		"":                              {},
		"bytes 0-9223372036854775808/*": {},
	} {
		got, ok := parseContentRange(in)
		if ok != (want != contentRange{}) || ok && got != want {
			t.Errorf("%q: %v, %s", in, ok, diff.Of(want, got))
		}
	}
}

func FuzzContentRange(f *testing.F) {
	f.Add("bytes 0-99/100")
	f.Add("bytes 5-9/*")
	f.Add("bytes */9")
	f.Fuzz(func(t *testing.T, in string) {
		if r, ok := parseContentRange(in); ok && (r.first < 0 || r.last < r.first || r.total < -1 || r.total >= 0 && r.last >= r.total) {
			t.Errorf("%q: %+v", in, r)
		}
	})
}

func TestChecksumLines(t *testing.T) {
	hex := strings.Repeat("0a", 32)
	for _, tc := range []struct {
		text, name, want string
	}{
		{hex + "  a.img", "a.img", hex},
		{strings.ToUpper(hex) + " *a.img\r\n", "a.img", hex},
		{hex + "  ./a.img\n", "a.img", hex},
		{hex + "  folder/a b.img\n", "a b.img", hex},
		{"SHA256 (a.img) = " + hex + "\n", "a.img", hex},
		{"SHA256(d/a.img)= " + hex + "\n", "a.img", hex},
		{`\` + hex + `  a\\b.img`, `a\b.img`, hex},
		{"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n# a.img: 5 bytes\nSHA256 (a.img) = " + hex + "\n", "a.img", hex},
		{hex + "  a.img\n" + hex + "  x/a.img\n", "a.img", hex},
		{"SHA512 (a.img) = " + hex + hex, "a.img", ""},
		{hex + " a.img", "a.img", ""},
		{hex[1:] + "  a.img", "a.img", ""},
		{hex + "0  a.img", "a.img", ""},
		{hex + "  A.img", "a.img", ""},
		{hex + "  a.img.xz", "a.img", ""},
		{"", "a.img", ""},
	} {
		got, err := lookup([]byte(tc.text), tc.name)
		if got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("%q in %q: %q, %v", tc.name, tc.text, got, err)
		}
	}
}

func FuzzChecksums(f *testing.F) {
	hex := strings.Repeat("0a", 32)
	f.Add([]byte(hex+"  a.img\n"), "a.img")
	f.Add([]byte("SHA256 (a.img) = "+hex), "a.img")
	f.Add([]byte(`\`+hex+`  a\\b`), `a\b`)
	f.Fuzz(func(t *testing.T, text []byte, name string) {
		digest, err := lookup(text, name)
		if (err == nil) != (digest != "") {
			t.Fatalf("%q, %v", digest, err)
		}
		if err != nil {
			return
		}
		if again, err := hexDigest(digest); err != nil || again != digest {
			t.Errorf("%q is no digest", digest)
		}
	})
}

func FuzzURL(f *testing.F) {
	f.Add("http://u:p@example.com/a?b#c", "/d")
	f.Add("https://h", "http://h")
	f.Add("http://h/", "//u:p@other:1/x?y")
	f.Fuzz(func(t *testing.T, raw, to string) {
		l, err := parseURL(raw)
		if err != nil {
			return
		}
		if next, err := l.follow(to); err == nil && (next.url.User != nil || l.url.Scheme == "https" && next.url.Scheme != "https") {
			t.Errorf("%q leads from %s to %s", to, l, next)
		}
	})
}
